"""Keras as the program has imported it: this module alone looks up its names.

mirror never imports Keras: a Keras object exists only after the program's own `import keras`. Only
public names are used; `tests/keras/test_hooks.py` fails by name when a release moves one of them.
"""

import sys
from types import FrameType
from typing import Any

BACKEND = "jax"
GLOBAL_BATCHES = (
    "Keras models expect global batches, which they split themselves. Pass the arrays, or the "
    "dataset without strategy.distribute_dataset: model.fit(x, y) or model.fit(dataset)."
)
STATELESS_CALL = (
    "Train it with model.fit, which uses all replicas of the scope that it was created in; or "
    "write the step with the values of its variables: pass [v.value for v in "
    "model.trainable_variables], and the same of model.non_trainable_variables, and call "
    "model.stateless_call(trainable, non_trainable, x)."
)


def library() -> Any:
    """Returns the module `keras`, or None if it has not been imported, or not to its end."""
    module = sys.modules.get("keras")
    return module if hasattr(module, "Model") else None


def backend() -> str:
    """Returns the name of the backend of Keras, which the program has imported."""
    return str(library().config.backend())


def is_model(value: object) -> bool:
    """Whether the value is a Keras model."""
    keras = library()
    return keras is not None and isinstance(value, keras.Model)


def is_built(model: Any) -> bool:
    """Whether a Keras model and all layers inside have their variables."""
    return bool(model.built) and all(layer.built for layer in layers_of(model))


def layers_of(model: Any) -> list[Any]:
    """Returns the layers of a Keras model, and those inside of others, models included.

    `model.layers` lacks the layers of wrappers such as TimeDistributed (Keras 3.15).
    """
    return list(model._flatten_layers(include_self=False))


def has_variables(value: object) -> bool:
    """Whether the value is a Keras variable, or a Keras object that has variables."""
    keras = library()
    if keras is None:
        return False
    kinds = (keras.Variable, keras.Layer, keras.optimizers.Optimizer, keras.metrics.Metric)
    return isinstance(value, kinds)


def variables_of(value: Any) -> list[Any]:
    """Returns the variables of a Keras object that `has_variables`, each once.

    A model includes its optimizer, but not the metrics that `compile` created, which are reset at
    the start of every epoch.
    """
    keras = library()
    if isinstance(value, keras.Variable):
        return [value]
    if isinstance(value, keras.Model):
        sync_state(value)
        optimizer = getattr(value, "optimizer", None)
        own = [*value.variables, *(optimizer.variables if optimizer is not None else ())]
        metrics = {id(variable) for variable in value.metrics_variables}
        return list({id(v): v for v in own if id(v) not in metrics}.values())
    return list(value.variables)


def state_variables(model: Any, kind: str) -> list[list[Any]]:
    """Returns the variables of the state that a step of this kind takes, in the order of Keras.

    Args:
        model: A Keras model.
        kind: `"train"`, `"test"` or `"predict"`.
    """
    groups = [model.trainable_variables, model.non_trainable_variables]
    if kind == "train":
        groups.append(model.optimizer.variables)
    if kind != "predict":
        groups.append(model.metrics_variables)
    return groups


def has_array(variable: Any) -> bool:
    """Whether a Keras variable has an array: a loop takes it away, and steps donate it."""
    return variable._value is not None and not variable._value.is_deleted()


def has_loss_scale(optimizer: Any) -> bool:
    """Whether a Keras optimizer expects the gradients of a scaled loss."""
    if isinstance(optimizer, library().optimizers.LossScaleOptimizer):
        return True
    return getattr(optimizer, "loss_scale_factor", None) is not None


def sync_state(model: Any) -> None:
    """Writes the state of an epoch in progress back to the variables, as callbacks of Keras do."""
    sync = getattr(model, "jax_state_sync", None)
    if sync is not None:
        sync()


def loads_batches(frame: FrameType) -> bool:
    """Whether a function of Keras that reads the batches of a dataset is running in this frame.

    Keras converts batches to arrays one by one, in the middle of its own code. The name of the
    module is private (Keras 3.15); `tests/keras/test_inputs.py` fails if it changes.
    """
    return ".data_adapters." in str(frame.f_globals.get("__name__")) and library() is not None
