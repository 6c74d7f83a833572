"""Messages for calls as in other libraries: arguments and methods that `Trainer` does not have."""

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen, nnx

from mirror._src.base.errors import counted, describe, expected, nearest
from mirror._src.base.foreign_arrays import is_array
from mirror._src.base.naming import is_our_module, keys, name_of, signature_of, warn_user
from mirror._src.base.tracebacks import is_own
from mirror._src.base.types import PyTree
from mirror._src.base.unknown_names import advice
from mirror._src.data.padded import PaddedBatch
from mirror._src.engine.per_replica import is_per_replica

P = ParamSpec("P")
R = TypeVar("R")

_OF_TRACES = (jax.errors.JAXTypeError, jax.errors.JAXIndexError)


def explains_arguments(method: Callable[P, R]) -> Callable[P, R]:
    """Decorates a method of `Trainer`, so that a wrong call is answered with the right one.

    The signature stays as it is: there is no `**kwargs` that would hide errors from type checkers.
    """
    signature = inspect.signature(method)
    parameters = list(signature.parameters)
    name = "mirror.Trainer" if method.__name__ == "__init__" else f"trainer.{method.__name__}"

    @functools.wraps(method)
    def explained(*args: P.args, **kwargs: P.kwargs) -> R:
        is_pair = method.__name__ in ("fit", "evaluate", "verify") and (
            len(args) > 2 and (is_array(args[2]) or isinstance(args[2], list | tuple | dict))
        )
        if method.__name__ != "__init__" and len(args) > 1 and _is_model(args[1]):
            line = f"{name}(data{', epochs=10' if method.__name__ == 'fit' else ''})"
            raise TypeError(
                f"{name} received a {type(args[1]).__name__}, but the model was given to "
                f"mirror.Trainer. Pass the data first: {line}."
            )
        unknown = [key for key in kwargs if key not in parameters]
        if is_pair or unknown:
            called = ", ".join([*map(describe, args[1:]), *(f"{k}=..." for k in kwargs)])
            if is_pair or ("y" in unknown and _advice(name, "y")):
                fix = _advice(name, "x")
                raise TypeError(f"{name}({called}) received inputs and labels separately. {fix}")
            raise TypeError(_unknown(name, unknown, parameters[1:]))
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:
            fix = _advice(name, "x") if method.__name__ == "predict" else ""
            shown = signature_of(method, is_method=True)
            raise TypeError(f"{name}: {error}. The call is {name}{shown}. {fix}".strip()) from None
        return method(*args, **kwargs)

    return explained


def _is_model(value: Any) -> bool:
    """Whether the value is a model, as the first argument of `fit` in Lightning."""
    return isinstance(value, nnx.Module | linen.Module) or callable(
        getattr(value, "named_parameters", None)
    )


def _advice(name: str, argument: str) -> str:
    return advice().get((f"{name}()", argument), "")


def _unknown(name: str, unknown: list[str], parameters: list[str]) -> str:
    known = {key: _advice(name, key) or nearest(key, parameters).strip() for key in unknown}
    if len(unknown) == 1 or not any(known.values()):
        fix = known[unknown[0]] or f"Its arguments are {', '.join(parameters)}."
        return f"{name} does not have the argument {unknown[0]!r}. {fix}"
    fixes = "".join(f"\n  {key}: {fix}" for key, fix in known.items() if fix)
    return f"{name} does not have the arguments {', '.join(map(repr, unknown))}.{fixes}"


def advice_for_model(model: Any) -> str:
    """Returns how to get an `nnx.Module` instead of this value."""
    kind = model if isinstance(model, type) else type(model)
    libraries = {base.__module__.partition(".")[0] for base in kind.__mro__}
    if libraries & {"keras", "tensorflow", "tf_keras"}:
        return (
            "A Trainer trains Flax models. A Keras model trains itself on all replicas, if it is "
            "created inside strategy.scope(): model.compile(...), model.fit(...), with Keras' "
            "backend 'jax'. To use the Trainer, write the layers in Flax: "
            "keras.layers.Dense(10) is nnx.Linear(n, 10, rngs=rngs), and "
            "keras.Sequential([...]) is nnx.Sequential(...)."
        )
    if "torch" in libraries:
        return (
            "mirror trains Flax models, not PyTorch models. Write the layers in Flax: "
            "torch.nn.Linear(n, 10) is nnx.Linear(n, 10, rngs=rngs), and forward is __call__."
        )
    if isinstance(model, type):
        return f"This is a class. Create an object: {model.__name__}(..., rngs=nnx.Rngs(0))."
    if isinstance(model, linen.Module):
        return "Wrap the Linen module: nnx.bridge.ToNNX(module, rngs=nnx.Rngs(0)).lazy_init(x)."
    if isinstance(model, optax.GradientTransformation):
        return "The model comes first: mirror.Trainer(model, optax.adam(1e-3), loss_fn)."
    if "equinox" in libraries or "haiku" in libraries:
        return "For other models, write the step: strategy.run(step, (params, opt_state, batch))."
    return "To train a Linen module, wrap it: nnx.bridge.ToNNX(module, rngs=nnx.Rngs(0))."


def require_transformation(tx: Any) -> None:
    """Rejects everything but an optax transformation.

    Raises:
        TypeError: If it is something else; the message says how to create one.
    """
    if isinstance(tx, optax.GradientTransformation):
        return
    fix = "For example: optax.adam(1e-3)."
    kind = tx if isinstance(tx, type) else type(tx)
    library = str(kind.__module__).partition(".")[0]
    if isinstance(tx, str):
        plain = tx.lower()
        is_known = plain.isidentifier() and callable(getattr(optax, plain, None))
        names = ("adam", "adamw", "sgd", "rmsprop", "adagrad", "adamax", "lion", "lamb", "nadam")
        fix = f"Write optax.{plain}(1e-3)." if is_known else nearest(tx, names).strip() or fix
    elif library in ("keras", "tensorflow", "tf_keras", "torch"):
        fix = f"Use the optimizer of optax: optax.{kind.__name__.lower()}(1e-3)."
    elif callable(tx) and getattr(optax, name := name_of(tx), None) is tx:
        fix = f"Call the function: optax.{name}(1e-3)."
    elif callable(tx) and str(getattr(tx, "__module__", "")).startswith("optax"):
        fix = "Pass a schedule to the optimizer: optax.adam(schedule)."
    elif callable(tx):
        fix = "The order is mirror.Trainer(model, optax.adam(1e-3), loss_fn)."
    elif isinstance(tx, optax.MultiSteps):
        fix = "Pass its transformation: optax.MultiSteps(...).gradient_transformation()."
    elif isinstance(tx, int | float):
        fix = f"Pass the learning rate to the optimizer: optax.adam({tx!r})."
    raise TypeError(expected("tx", tx, "an optax.GradientTransformation or an nnx.Optimizer", fix))


@contextmanager
def describes_batch(fn: Callable[..., Any], batch: PyTree) -> Iterator[None]:
    """Adds a note that describes the batch to errors of a user's function."""
    try:
        yield
    except (TypeError, KeyError, IndexError, ValueError, AttributeError) as error:
        # JAX's errors about traced values are about a line, not about the shapes.
        if not isinstance(error, _OF_TRACES) and not _is_ours(error):
            with suppress(Exception):  # a note never replaces an error
                error.add_note(_batch_note(fn, batch))
        raise


def warn_of_random_order(data: Any) -> None:
    """Warns that a loader of PyTorch which shuffles cannot resume within an epoch."""
    if type(getattr(data, "sampler", None)).__name__ != "RandomSampler":
        return
    warn_user(
        "Training resumes within an epoch, but the data loader shuffles in another order than "
        "before: some examples are used twice, and others not at all. Shuffle by epoch: "
        "DataLoader(dataset, batch_size=32, sampler=DistributedSampler(dataset, num_replicas=1, "
        "rank=0))."
    )


def bytes_of(padded: PaddedBatch) -> int:
    """Returns the size of the arrays of a launch."""
    return sum(getattr(leaf, "nbytes", 0) for leaf in jax.tree.leaves(padded.batch))


def wrong_numbers(padded: PaddedBatch) -> str:
    """Returns a sentence about NaN and infinite numbers in the data of a launch, or ""."""
    with suppress(Exception):  # the devices of other processes
        mask = np.asarray(padded.mask.stacked)
        for path, leaf in jax.tree_util.tree_flatten_with_path(padded.batch)[0]:
            values = np.asarray(leaf)
            if not jnp.issubdtype(values.dtype, jnp.inexact):
                continue
            rows = values.reshape(*mask.shape, -1).astype(np.complex128)
            for kind, is_wrong in (("NaN", np.isnan), ("infinite number", np.isinf)):
                wrong = is_wrong(rows) & mask[..., None]
                if wrong.any():
                    replica, *group, row = np.argwhere(wrong)[0][:-1]
                    which = f" of batch {group[0]} of the launch" if group else ""
                    number = replica * mask.shape[-1] + row
                    return (
                        f"batch{keys(path)} contains {counted(int(wrong.sum()), kind)} (the first "
                        f"in row {number}{which}): clean the data. "
                    )
    return ""


def labels_in(padded: PaddedBatch) -> str | None:
    """Returns how to check the labels of a launch, or None if it is unclear which they are."""
    with suppress(Exception):  # the devices of other processes
        mask = np.asarray(padded.mask.stacked)
        leaves = jax.tree_util.tree_flatten_with_path(padded.batch, is_leaf=is_per_replica)[0]
        arrays = [(path, np.asarray(leaf.stacked)) for path, leaf in leaves]
        ((path, values),) = [
            (path, values)
            for path, values in arrays
            if values.shape == mask.shape and np.issubdtype(values.dtype, np.integer)
        ]
        (key,) = (getattr(each, "key", getattr(each, "idx", None)) for each in path)
        values = values[mask]
        return (
            f" (batch{keys(path)} contains {values.min()} to {values.max()}), which "
            f"mirror.Trainer(..., labels={key!r}, num_classes=n) checks"
        )
    return None


def _is_ours(error: BaseException) -> bool:
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    return traceback is not None and is_own(traceback.tb_frame.f_code.co_filename)


def _batch_note(fn: Callable[..., Any], batch: PyTree) -> str:
    leaves, _ = jax.tree_util.tree_flatten_with_path(batch)
    shown = ", ".join(f"batch{keys(path)}: {describe(leaf)}" for path, leaf in leaves[:12])
    fix = ""
    is_named = is_our_module(getattr(fn, "__module__", None))  # which unpacks the batch itself
    if isinstance(batch, tuple | list) and len(batch) > 1 and not is_named:
        names = ", ".join(["x", "y", "z", "w"][: len(batch)]) if len(batch) < 5 else "x, *rest"
        fix = f" Unpack it: {names} = batch."
    elif isinstance(batch, dict) and not is_named:
        fix = f" Its keys are {', '.join(map(repr, batch))}."
    kind = f"a {type(batch).__name__}"
    if hasattr(batch, "shape"):
        kind, fix = "an array", fix or " If the data are a list of arrays, pass a tuple: (x, y)."
    return (
        f"{name_of(fn)} received a batch that is {kind}, with the shapes of one replica: "
        f"{shown}.{fix}"
    )
