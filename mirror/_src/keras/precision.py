"""Settings with which a Keras model cannot learn, or hardly, or which it ignores."""

from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp

from mirror._src.base.keras_library import has_loss_scale, layers_of, library
from mirror._src.devices.replicas import ReplicaDevices

_HALF = ("float16", "bfloat16")


def require_float_policy() -> None:
    """Checks Keras' policy for new layers.

    Raises:
        ValueError: If it is not a policy of floats: the layers would fail in their initializers.
    """
    policy = library().config.dtype_policy()
    dtypes = (policy.compute_dtype, policy.variable_dtype)
    if not all(jnp.issubdtype(jnp.dtype(dtype), jnp.floating) for dtype in dtypes):
        raise ValueError(
            f"Keras' dtype policy must be a policy of floats, got {policy.name!r}. Weights have "
            "gradients, so set keras.config.set_dtype_policy('float32'), 'mixed_bfloat16' or "
            "'mixed_float16' before you create the model."
        )


def train_warnings(model: Any, replicas: ReplicaDevices) -> Iterator[str]:
    """Yields why updates of a compiled and built model are rounded to zero, or not sharded."""
    if replicas.slice_bytes is not None:
        yield (
            f"`shard` has no effect on the Keras model {model.name!r}: each device stores the "
            "whole state. It applies to mirror.Trainer and strategy.run."
        )
    stored = [v for v in model.trainable_variables if v.dtype in _HALF]
    if stored:
        first = stored[0]
        yield (
            f"{len(stored)} variables of the Keras model {model.name!r} are stored in "
            f"{first.dtype}, for example {first.path!r}, so that small updates are rounded to "
            "zero, and Adam may not change them at all. Store them in float32: "
            f"keras.config.set_dtype_policy('mixed_{first.dtype}')."
        )
    # For a model with this policy, `compile` scales the loss, unless the user has declined it.
    if has_loss_scale(model.optimizer) or model.dtype_policy.name == "mixed_float16":
        return
    layers = (layer for layer in _layers(model) if layer.trainable_variables)
    half = next((layer for layer in layers if layer.compute_dtype == "float16"), None)
    if half is not None:
        yield (
            f"The layer {half.name!r} of the Keras model {model.name!r} computes in float16, and "
            "the loss is not scaled, so that small gradients are rounded to zero. Keras scales it "
            "only if the policy of the model is 'mixed_float16', got "
            f"{model.dtype_policy.name!r}. Call model.compile("
            "keras.optimizers.LossScaleOptimizer(optimizer), ...), or use bfloat16."
        )


def compute_dtypes(model: Any) -> set[str]:
    """Returns the dtypes that a model and its layers compute in."""
    return {each.compute_dtype for each in (model, *_layers(model))}


def _layers(model: Any) -> list[Any]:
    """Returns the layers of a model, and those inside of others, but no models."""
    return [layer for layer in layers_of(model) if not hasattr(layer, "layers")]
