"""`RemoteValue`: the result of a scheduled function, once there is one."""

import threading
from typing import Any, NoReturn, final

from mirror._src.base.errors import require_secs
from mirror._src.base.modules import set_module
from mirror._src.base.tracebacks import api_boundary


@set_module("mirror.ps")
class CancelledError(RuntimeError):
    """Raised by `RemoteValue.fetch` if the function was canceled before it ran.

    That happens if an earlier scheduled function fails, whose error `schedule`, `join` or `done`
    raise, if the values on the servers are lost, or if the strategy is closed.

    >>> issubclass(mirror.ps.CancelledError, RuntimeError)
    True
    """


@set_module("mirror.ps")
@final
class RemoteValue:
    """The result of a scheduled function, which `ClusterCoordinator.schedule` returns.

    >>> value = coordinator.schedule(lambda x: x + 1, (1,))
    >>> value.fetch()
    2
    """

    def __init__(self) -> None:
        self._event = threading.Event()
        self._value: Any = None
        self._error: BaseException | None = None

    @api_boundary
    def fetch(self, timeout: float | None = None) -> Any:
        """Waits for the result and returns it; arrays are NumPy arrays.

        Args:
            timeout: Seconds to wait. Defaults to forever.

        Raises:
            TimeoutError: If the function has not ended by then.
            CancelledError: If an earlier function failed before this one ran.
            Exception: What the function raised.
        """
        if timeout is not None:
            timeout = require_secs("timeout", timeout)
        if not self._event.wait(timeout):
            raise TimeoutError(
                f"The scheduled function has not ended after {timeout:g} s. Call fetch() again, or "
                "pass a longer timeout."
            )
        if self._error is not None:
            raise self._error
        return self._value

    def done(self) -> bool:
        """Whether the function has ended: with a result, an error, or because it was canceled."""
        return self._event.is_set()

    def _resolve(self, value: Any = None, error: BaseException | None = None) -> None:
        if not self._event.is_set():
            self._value, self._error = value, error
            self._event.set()

    def __repr__(self) -> str:
        if not self.done():
            return "RemoteValue(not done)"
        return f"RemoteValue({self._value if self._error is None else self._error!r})"

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "A RemoteValue cannot be passed to a scheduled function. Pass its result: "
            "value.fetch()."
        )
