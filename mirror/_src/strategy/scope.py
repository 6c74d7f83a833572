"""`Scope`: the context of `strategy.scope()`, in which arrays are created mirrored."""

import contextlib
from types import TracebackType
from typing import Any, Generic, TypeVar, final

import jax

from mirror._src.context.replica_context import ReplicaGroup
from mirror._src.context.scopes import (
    Frame,
    current_frame,
    pop_frame,
    push_frame,
    require_cross_replica,
)
from mirror._src.devices.op_log import unlogged

S = TypeVar("S", bound=ReplicaGroup)


@final
class Scope(Generic[S]):
    """The context of `strategy.scope()`; it may be entered again and again."""

    def __init__(self, strategy: S) -> None:
        self._strategy = strategy
        self._meshes: list[Any] = []

    def __enter__(self) -> S:
        strategy = self._strategy
        require_cross_replica(strategy, "scope", "Open the scope outside the step.")
        with unlogged():
            try:
                mesh: Any = jax.set_mesh(strategy._replicas.mesh)
            except ValueError as error:
                if not _is_open(strategy):
                    raise RuntimeError(
                        f"{strategy}.scope() was entered inside jax.jit, grad or vmap. Enter it "
                        "outside, where the arrays are made."
                    ) from error
                mesh = contextlib.nullcontext()  # the trace has the mesh of the open scope
        mesh.__enter__()
        self._meshes.append(mesh)
        push_frame(Frame(strategy, None))
        return strategy

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        pop_frame()
        self._meshes.pop().__exit__(kind, error, trace)


def _is_open(strategy: ReplicaGroup) -> bool:
    """Whether this thread is inside the scope of the strategy, and no other mesh is set."""
    frame = current_frame()
    mesh = strategy._replicas.mesh.abstract_mesh
    is_set = jax.sharding.get_abstract_mesh() == mesh
    return frame is not None and frame.strategy is strategy and is_set
