"""Hooks Keras, so that models created in a scope train on all devices of its strategy.

The hooks are methods of `keras.Model`: `__new__` and `compile`, which remember the scope;
`make_train_function`, `make_test_function` and `make_predict_function`, which `fit`, `evaluate`,
`predict` and the methods for one batch call to make the function that runs a step; and these
methods themselves, which reject data that is already split. Models that have nothing to do with a
scope keep what Keras made.
"""

import functools
import gc
from collections.abc import Callable, Iterator
from typing import Any

from mirror._src.base.keras_library import library
from mirror._src.base.naming import parameter_names, warn_user
from mirror._src.devices.replicas import ReplicaDevices
from mirror._src.keras.owners import add_scope, claim, claim_compiled, owner_of
from mirror._src.keras.precision import train_warnings
from mirror._src.keras.step_function import StepFunction, keras_loop, require_global

METHODS = ["fit", "evaluate", "predict", "train_on_batch", "test_on_batch", "predict_on_batch"]
_MOST = 64  # a longer list is data, not a structure of inputs
KINDS = ("train", "test", "predict")
_hooked: Any = None
"""The class of models that has the hooks."""


def checking(method: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a method of `keras.Model` that rejects values of replicas before Keras reads them.

    Keras takes any model here, also one that was created outside all scopes. What a generator or a
    `PyDataset` yields is rejected where Keras converts it to an array. The method runs as a loop of
    Keras, which step functions return their state to in a form that Keras assigns faster.
    """
    names = parameter_names(method)

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        for name, value in (*zip(names[1:], args, strict=False), *kwargs.items()):
            for path, leaf in _leaves(name, value):
                require_global(path, leaf, method.__name__)
        with keras_loop():
            return method(self, *args, **kwargs)

    return call


def _leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yields what containers hold, with its name. Arrays and text are leaves."""
    is_short_list = isinstance(value, list | tuple) and len(value) <= _MOST
    if not (isinstance(value, dict) or is_short_list):
        yield name, value
        return
    for key, each in value.items() if isinstance(value, dict) else enumerate(value):
        yield from _leaves(f"{name}[{key!r}]", each)


def enter_scope(strategy: object, replicas: ReplicaDevices) -> None:
    """Hooks Keras, if the program has imported it, at the start of a scope."""
    keras = library()
    if keras is None:
        return
    if keras.Model is not _hooked:
        _hook(keras.Model)
    add_scope(strategy, replicas)


def exit_scope(strategy: object, replicas: ReplicaDevices) -> None:
    """Hooks Keras if it was imported in the scope that ends, and takes over its models.

    Raises:
        RuntimeError, NotImplementedError: If models cannot train on the devices of the scope.
    """
    keras = library()
    if keras is None or keras.Model is _hooked:
        return
    enter_scope(strategy, replicas)
    is_frozen = gc.get_freeze_count() > 0
    gc.unfreeze()  # else models that `gc.freeze` has set aside are not found
    models = [each for each in gc.get_objects() if issubclass(type(each), keras.Model)]
    if is_frozen:
        gc.freeze()
    for model in models:
        claim(model)
    if any(getattr(model, f"{kind}_function", None) for model in models for kind in KINDS):
        warn_user(
            "Keras was first imported inside strategy.scope(), and a model already ran there: each "
            "device computed whole batches. The results are the same. To use all devices from the "
            "start, import keras before the scope."
        )


def _hook(model_class: Any) -> None:
    global _hooked
    # In the class that defines it: Keras would take a method of `keras.Model` for one of the user,
    # and not compile a model that it loads.
    owner = next(each for each in model_class.__mro__ if "compile" in vars(each))
    create, compile_model = model_class.__new__, owner.compile

    @functools.wraps(create)
    def new(cls: Any, *args: Any, **kwargs: Any) -> Any:
        model = create(cls, *args, **kwargs)
        claim(model)
        return model

    @functools.wraps(compile_model)
    def compile_in_scope(self: Any, *args: Any, **kwargs: Any) -> Any:
        claim_compiled(self)
        return compile_model(self, *args, **kwargs)

    model_class.__new__, owner.compile = staticmethod(new), compile_in_scope
    for kind in KINDS:
        name = f"make_{kind}_function"
        setattr(model_class, name, _making(kind, getattr(model_class, name)))
    for name in METHODS:
        setattr(model_class, name, checking(getattr(model_class, name)))
    _hooked = model_class


def _making(kind: str, make: Callable[..., Any]) -> Callable[..., Any]:
    attribute = f"{kind}_function"

    @functools.wraps(make)
    def make_function(self: Any, force: bool = False) -> None:
        make(self, force=force)
        function, owner = getattr(self, attribute), owner_of(self)
        if isinstance(function, StepFunction):
            if owner is not None and owner.replicas.mesh == function.owner.replicas.mesh:
                return
            function = function.made
        if owner is not None:
            for message in train_warnings(self, owner.replicas) if kind == "train" else ():
                warn_user(message, "keras")
            function = StepFunction(function, owner, self, kind)
        setattr(self, attribute, function)

    return make_function
