"""`Scope`: the context of `strategy.scope()`, in which arrays are created mirrored.

With state in slices, nnx variables are stored in slices as soon as they are created. Otherwise
every device would hold the whole model before the first step. Flax has no hook for all variables
(Flax 0.12): `nnx.Variable.create_value`, which subclasses override, is wrapped.
"""

import contextlib
import functools
from typing import Any, Generic, TypeVar, final

import jax
from flax import nnx

from mirror._src.devices.op_log import unlogged
from mirror._src.devices.replicas import ReplicaDevices
from mirror._src.engine.in_step import stack
from mirror._src.engine.replica_context import (
    Frame,
    ReplicaGroup,
    current_frame,
    current_task,
    require_cross_replica,
)
from mirror._src.keras.hooks import enter_scope, exit_scope

_INSTALLED = "_mirror_stores"


def store_created() -> None:
    """Makes nnx store variables in slices that are created in a scope whose strategy does so."""
    create_value = nnx.Variable.create_value
    if hasattr(create_value, _INSTALLED):
        return

    @functools.wraps(create_value)
    def stored(self: nnx.Variable[Any], value: Any) -> Any:
        frame, value = current_frame(), create_value(self, value)
        devices = None if frame is None or frame.replica is not None else frame.devices
        is_array = isinstance(value, jax.Array) and not isinstance(value, jax.core.Tracer)
        if devices is None or not is_array or not devices.is_mirrored(value):
            return value  # an array on a device of its own stays there
        axis = devices.stored_axis(value)
        return value if axis is None else devices.shard(value, axis)

    setattr(stored, _INSTALLED, True)
    nnx.Variable.create_value = stored  # type: ignore[method-assign]


S = TypeVar("S")


@final
class Scope(Generic[S]):
    """Context manager of `strategy.scope()`; it is reentrant and reusable.

    Args:
        strategy: The strategy.
        devices: The devices on which arrays are created.
        local: The strategy that creates them, if it is another one.
    """

    def __init__(
        self, strategy: S, devices: ReplicaDevices, local: ReplicaGroup | None = None
    ) -> None:
        self._shown = strategy
        self._strategy: Any = strategy if local is None else local
        self._devices = devices
        self._meshes: list[Any] = []

    def __enter__(self) -> S:
        strategy = self._strategy
        require_cross_replica(strategy, "scope", "Enter the scope outside the step.")
        with unlogged():
            try:
                mesh: Any = jax.set_mesh(self._devices.mesh)
            except ValueError as error:
                if not self._is_open():
                    raise RuntimeError(
                        f"{strategy}.scope() was entered inside jax.jit, grad or vmap. Enter it "
                        "outside, where you create the arrays."
                    ) from error
                mesh = contextlib.nullcontext()  # the trace already uses this scope's mesh
        mesh.__enter__()
        self._meshes.append(mesh)
        if self._devices.slice_bytes is not None:
            store_created()
        shown_as = None if self._shown is strategy else self._shown
        stack.frames.append(Frame(strategy, None, self._devices, shown_as, current_task()))
        enter_scope(strategy, self._devices)
        return self._shown

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        try:
            if error is None:
                exit_scope(self._strategy, self._devices)
        finally:
            stack.frames.pop()
            self._meshes.pop().__exit__(kind, error, trace)

    def _is_open(self) -> bool:
        """Whether this thread is in the strategy's scope, and no other mesh is set."""
        frame = current_frame()
        is_set = jax.sharding.get_abstract_mesh() == self._devices.mesh.abstract_mesh
        return frame is not None and frame.strategy is self._strategy and is_set
