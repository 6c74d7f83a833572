"""Host callbacks of a step: an exception in one must not leave other replicas waiting.

XLA ends the launch of a device whose callback raises, while the other devices wait in the next
collective until XLA aborts the process (40 s on host devices, JAX 0.10 to 0.12). So a callback
never raises to XLA: the exception is kept, zeros are returned in place of results, and `run`
raises the exception when the launch has ended.
"""

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn

from mirror._src.program.evaluate import Rules, bind_with
from mirror._src.program.jaxprs import equations

CALLBACKS = ("pure_callback", "io_callback", "debug_callback")


class _CallbackDepth(threading.local):
    depth = 0


_here = _CallbackDepth()


def in_callback() -> bool:
    """Whether this thread runs a host callback of a step: its launch waits for it to return."""
    return _here.depth > 0


def calls_back(program: ClosedJaxpr) -> bool:
    """Whether a program calls a function of the user's on the host."""
    return any(eqn.primitive.name in CALLBACKS for eqn in equations(program.jaxpr))


class CallbackGuard:
    """Keeps the exceptions that the callbacks of one compiled program raise."""

    def __init__(self) -> None:
        self._errors: list[BaseException] = []

    def guarded(self, callback: Callable[..., Any], avals: Iterable[Any]) -> Callable[..., Any]:
        """Returns the callback, which keeps what it raises and then returns zeros."""
        shapes = [(aval.shape, aval.dtype) for aval in avals]

        def call(*args: Any, **kwargs: Any) -> Any:
            _here.depth += 1
            try:
                return callback(*args, **kwargs)
            except BaseException as error:
                self._errors.append(error)
                return [np.zeros(shape, dtype) for shape, dtype in shapes]
            finally:
                _here.depth -= 1

        return call

    def rule(self, eqn: JaxprEqn, arguments: list[Any]) -> Sequence[Any]:
        """Binds a callback's operation with the guarded function."""
        callback = self.guarded(eqn.params["callback"], eqn.params.get("result_avals", ()))
        return bind_with(eqn, arguments, {**eqn.params, "callback": callback})

    @property
    def rules(self) -> Rules:
        """The rules for `Lowering`."""
        return dict.fromkeys(CALLBACKS, lambda _: self.rule)

    def raise_first(self) -> None:
        """Raises the first exception that was kept since the last time, if there was one."""
        errors, self._errors = self._errors, []
        if not errors:
            return
        if len(errors) > 1:
            errors[0].add_note(f"{len(errors)} host callbacks of this step raised; see the first.")
        raise errors[0]
