"""`ServerScope`: the context of `ParameterServerStrategy.scope()`."""

from types import TracebackType
from typing import Generic, TypeVar, final

from mirror._src.engine.scopes import Frame, pop_frame, push_frame
from mirror._src.strategy.scope import Scope
from mirror._src.strategy.strategy import Strategy

S = TypeVar("S")


@final
class ServerScope(Generic[S]):
    """Context manager of `ParameterServerStrategy.scope()`; it is reentrant and reusable.

    Arrays are created as in the scope of a local strategy with one replica.
    """

    def __init__(self, strategy: S, local: Strategy) -> None:
        self._strategy, self._local = strategy, local
        self._open: list[Scope[Strategy]] = []

    def __enter__(self) -> S:
        scope = self._local.scope()
        scope.__enter__()
        self._open.append(scope)
        push_frame(Frame(self._local, devices=self._local._replicas, shown_as=self._strategy))
        return self._strategy

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            # With this frame: it rejects Keras models that were created in the scope.
            self._open.pop().__exit__(kind, error, trace)
        finally:
            pop_frame()
