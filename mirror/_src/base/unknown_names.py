"""Errors for names that mirror does not have: of other libraries, and misspellings."""

import dis
import inspect
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from mirror._src.base.errors import nearest_name
from mirror._src.base.lazy_names import LAZY_MODULE, NAMES_OF_PS, lazy_module
from mirror._src.base.migration import advice

_MODULES = ("mirror", "mirror.config", "mirror.data", "mirror.callbacks", "mirror.debugging")
# Objects whose attributes are looked for in other places, and how programs refer to them.
_OBJECTS = {
    "Strategy": "strategy",
    "ReplicaContext": "mirror.get_replica_context()",
    "Trainer": "trainer",
}
_IMPORT_FROM = dis.opmap["IMPORT_FROM"]

_GRADIENTS = (
    "There is nothing to zero or accumulate: nnx.value_and_grad(loss_fn)(model, batch) returns the "
    "gradients in the step."
)

# What people try, by the owner of the name. Precedes the tables of other libraries.
GUESSES = {
    "mirror": {
        "experimental": "The names of tf.distribute are in mirror: mirror.MirroredStrategy.",
        "ReplicaMismatchError": "It is mirror.VerifyError, which strategy.verify raises.",
        "jit": "strategy.run compiles the step.",
        "pmap": "strategy.run maps the step over the devices: strategy.run(step, args).",
        "run": "It is a method of a strategy: mirror.MirroredStrategy().run(step, args).",
        "num_devices": "Call mirror.get_strategy().num_replicas_in_sync.",
    },
    "mirror.config": {
        "list_gpus": 'Call mirror.config.list_physical_devices("GPU").',
        "list_cpus": 'Call mirror.config.list_physical_devices("CPU").',
        "list_devices": "Call mirror.config.list_logical_devices().",
        "update": 'JAX\'s options are set by jax.config.update("jax_...", value).',
    },
    "mirror.callbacks": {
        "LearningRateMonitor": "Use mirror.callbacks.LearningRate.",
        "LambdaCallback": "Subclass mirror.callbacks.Callback.",
    },
    "strategy": {
        "num_replicas": "Read strategy.num_replicas_in_sync.",
        "num_devices": "Read len(strategy.devices).",
        "worker_devices": "Read strategy.devices.",
        "broadcast": "Arrays are mirrored when strategy.run first receives them, or when "
        "they are created inside strategy.scope().",
        "compile": "strategy.run compiles the step at its first call.",
        "fit": "Train with mirror.Trainer(model, optimizer, loss_fn).fit(data).",
        **dict.fromkeys(
            ("to", "cuda", "cpu", "module", "parameters"),
            "A strategy does not wrap a model: pass the model to the step, strategy.run(step, "
            "(model, batch)), which places it on the devices.",
        ),
        **dict.fromkeys(("zero_grad", "backward"), _GRADIENTS),
    },
    "trainer": {
        "compile": "Pass the optimizer, the loss and the metrics to the constructor: "
        "mirror.Trainer(model, optax.adam(1e-3), 'mse', metrics=['mae']).",
        "train_on_batch": "trainer.fit([batch], progress=False) trains with one batch.",
        "test_on_batch": "trainer.evaluate([batch]) evaluates one batch.",
        "predict_on_batch": "trainer.predict([batch]) predicts one batch.",
        "train": "trainer.fit(data, epochs=10) trains; trainer.model.train() sets the mode.",
        "eval": "trainer.evaluate(data) evaluates; trainer.model.eval() sets the mode.",
        **dict.fromkeys(
            ("zero_grad", "backward", "step"),
            "There is nothing to zero: trainer.fit(data, epochs=10) computes the gradients and "
            "updates the model.",
        ),
        "test": "Use trainer.evaluate(data).",
        "validate": "Use trainer.evaluate(data).",
        "save_weights": "Use trainer.save(directory).",
        "load_weights": "Use trainer.restore(directory).",
        "load": "Use trainer.restore(directory).",
        "get_weights": "Use nnx.state(trainer.model, nnx.Param).",
        "set_weights": "Use nnx.update(trainer.model, state).",
        "history": "trainer.fit(...) returns it: history = trainer.fit(...).",
        "tx": "The optimizer is trainer.optimizer; its transformation is trainer.optimizer.tx.",
    },
}


def explain_unknown_names(*modules: str) -> None:
    """Makes each of these modules explain the names that it does not have.

    `hasattr` still returns False, and `from mirror import x` still raises an `ImportError`.
    """
    for module in modules:
        sys.modules[module].__getattr__ = _explaining(module)  # type: ignore[method-assign]


def _explaining(module: str) -> Any:
    def __getattr__(name: str) -> Any:
        if module == "mirror" and name == LAZY_MODULE:
            return lazy_module()
        if _is_private(name):
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        caller = sys._getframe(1)
        if caller.f_code.co_code[caller.f_lasti] == _IMPORT_FROM:
            # Python would replace an AttributeError by one that does not have this text.
            text = f"cannot import name {name!r} from {module!r}."
            raise ImportError(f"{text} {suggestion(module, name)}".strip(), name=name)
        text = f"module {module!r} has no attribute {name!r}."
        # Without `obj`, which would make Python append its own suggestion.
        raise AttributeError(f"{text} {suggestion(module, name)}".strip(), name=name)

    return __getattr__


def unknown_attribute(
    owner: str, value: object, name: str, told: Mapping[str, str] | None = None
) -> AttributeError:
    """Returns the error for an attribute that an object does not have.

    Args:
        owner: "strategy", "replica_context", "trainer" or "variable"; see `migration.advice`.
        value: The object.
        name: Name of the attribute.
        told: By name, what to use instead; replaces the advice for the owner.
    """
    text = f"{type(value).__name__!r} object has no attribute {name!r}"
    if _is_private(name):
        return AttributeError(text, name=name)
    if told is not None and name in told:
        return AttributeError(f"{text}. {told[name]}", name=name)
    known = dir(type(value))
    return AttributeError(f"{text}. {suggestion(owner, name, known)}".strip(), name=name)


def suggestion(owner: str, name: str, known: Iterable[str] | None = None) -> str:
    """Returns a sentence that says what to use in place of an unknown name, or ""."""
    if name in NAMES_OF_PS and owner != "mirror.ps":
        return f"It is in mirror.ps: mirror.ps.{name}."
    told = advice_on(owner, name) or _elsewhere(owner, name)
    if told is None and owner.startswith("mirror."):
        told = advice().get(("mirror", name))
    if told is not None:
        return told
    names = [n for n in (dir(sys.modules[owner]) if known is None else known) if n[0] != "_"]
    nearest = nearest_name(name, names)
    if nearest is not None:
        return f"Did you mean {owner}.{nearest}?"
    if owner == "mirror":
        return "help(mirror) lists the public names."
    return f"Its public names are {', '.join(names)}."


def advice_on(owner: str, name: str) -> str | None:
    """Returns a sentence about a name of another library, or None if no table has it."""
    return GUESSES.get(owner, {}).get(name) or advice().get((owner, name))


def _elsewhere(owner: str, name: str) -> str | None:
    """Returns a sentence that says where a name of mirror is, if not at `owner`."""
    for module in _MODULES:
        found = vars(sys.modules[module]).get(name) if module != owner else None
        if found is not None and not inspect.ismodule(found):
            return f"It is in {module}: {module}.{name}."
    for kind, text in _OBJECTS.items():
        cls = getattr(sys.modules["mirror"], kind)
        if hasattr(cls, name) and not text.startswith(owner):
            where = " in a step" if kind == "ReplicaContext" else ""
            call = "(...)" if callable(getattr(cls, name)) else ""
            return f"It belongs to a {kind}{where}: {text}.{name}{call}."
    return None


def _is_private(name: str) -> bool:
    """Whether Python, a library or a notebook asks for this name, rather than a user."""
    return name.startswith("_")
