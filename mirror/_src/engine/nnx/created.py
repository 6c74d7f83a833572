"""Stores nnx variables in slices as soon as they are created in a scope.

Otherwise every device would hold the whole model before the first step. Flax has no hook for all
variables (Flax 0.12): `nnx.Variable.create_value`, which subclasses override, is wrapped.
"""

import functools
from typing import Any

import jax
from flax import nnx

from mirror._src.engine.scopes import current_frame

_INSTALLED = "_mirror_stores"


def store_created() -> None:
    """Makes nnx store variables in slices that are created in a scope whose strategy does so."""
    create_value = nnx.Variable.create_value
    if hasattr(create_value, _INSTALLED):
        return

    @functools.wraps(create_value)
    def stored(self: nnx.Variable[Any], value: Any) -> Any:
        return _stored(create_value(self, value))

    setattr(stored, _INSTALLED, True)
    nnx.Variable.create_value = stored  # type: ignore[method-assign]


def _stored(value: Any) -> Any:
    """Returns slices of an array that the scope has mirrored, not one on a device of its own."""
    frame = current_frame()
    devices = None if frame is None or frame.replica is not None else frame.devices
    if devices is None or not isinstance(value, jax.Array) or isinstance(value, jax.core.Tracer):
        return value
    axis = devices.stored_axis(value) if devices.is_mirrored(value) else None
    return value if axis is None else devices.shard(value, axis)
