"""Hooks Keras, so that models created in a scope train on all devices of its strategy.

The hooks are methods of `keras.Model`: `__new__`, which remembers the scope, and
`make_train_function`, `make_test_function` and `make_predict_function`, which `fit`, `evaluate`,
`predict` and the methods for one batch call to make the function that runs a step. Models that have
nothing to do with a scope keep what Keras made.
"""

import functools
import gc
import warnings
from collections.abc import Callable
from typing import Any

from mirror._src.devices.replicas import ReplicaDevices
from mirror._src.keras.owners import add_scope, claim, owner_of
from mirror._src.keras.step_function import StepFunction
from mirror._src.utils.keras_library import library
from mirror._src.utils.naming import depth_of_user

KINDS = ("train", "test", "predict")

_hooked: Any = None
"""The class of models that has the hooks."""


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
    models = [each for each in gc.get_objects() if issubclass(type(each), keras.Model)]
    for model in models:
        claim(model)
    if any(getattr(model, f"{kind}_function", None) for model in models for kind in KINDS):
        warnings.warn(
            "Keras was first imported inside strategy.scope(), and a model already ran there: each "
            "device computed whole batches. The results are the same. To use all devices from the "
            "start, import keras before the scope.",
            stacklevel=depth_of_user(),
        )


def _hook(model_class: Any) -> None:
    global _hooked
    model_class.__new__ = staticmethod(_claiming(model_class.__new__))
    for kind in KINDS:
        name = f"make_{kind}_function"
        setattr(model_class, name, _making(kind, getattr(model_class, name)))
    _hooked = model_class


def _claiming(create: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(create)
    def new(cls: Any, *args: Any, **kwargs: Any) -> Any:
        model = create(cls, *args, **kwargs)
        claim(model)
        return model

    return new


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
            function = StepFunction(function, owner, self, kind)
        setattr(self, attribute, function)

    return make_function
