"""Host callbacks of a step: an exception in one must not leave the other replicas waiting.

If a callback raises, XLA ends the launch on its device, while the other devices wait in the next
collective until XLA aborts the process (after 40 s on host devices, JAX 0.10 to 0.12). So a
callback never raises into XLA: the exception is stored, the callback returns zeros, and `run`
raises the exception after the launch has finished.
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


_current = _CallbackDepth()


def in_callback() -> bool:
    """Whether this thread runs a host callback of a step, whose launch waits for it to return."""
    return _current.depth > 0


def calls_back(program: ClosedJaxpr) -> bool:
    """Whether a program contains host callbacks."""
    return any(eqn.primitive.name in CALLBACKS for eqn in equations(program.jaxpr))


class CallbackGuard:
    """Stores the exceptions that the callbacks of one compiled program raise."""

    def __init__(self) -> None:
        self._errors: list[BaseException] = []

    def wrap(self, callback: Callable[..., Any], avals: Iterable[Any]) -> Callable[..., Any]:
        """Returns a function that calls the callback, or stores its exception and returns zeros."""
        shapes = [(aval.shape, aval.dtype) for aval in avals]

        def call(*args: Any, **kwargs: Any) -> Any:
            _current.depth += 1
            try:
                return callback(*args, **kwargs)
            except BaseException as error:
                self._errors.append(error)
                return [np.zeros(shape, dtype) for shape, dtype in shapes]
            finally:
                _current.depth -= 1

        return call

    def rule(self, eqn: JaxprEqn, arguments: list[Any]) -> Sequence[Any]:
        """Binds a callback operation with the wrapped function."""
        callback = self.wrap(eqn.params["callback"], eqn.params.get("result_avals", ()))
        return bind_with(eqn, arguments, {**eqn.params, "callback": callback})

    @property
    def rules(self) -> Rules:
        """Rules for `Lowering`."""
        return dict.fromkeys(CALLBACKS, lambda _: self.rule)

    def raise_first(self) -> None:
        """Raises the first exception stored since the previous call, if any."""
        errors, self._errors = self._errors, []
        if not errors:
            return
        if len(errors) > 1:
            errors[0].add_note(
                f"{len(errors)} host callbacks of this step raised. This is the first error."
            )
        raise errors[0]
