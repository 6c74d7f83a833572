"""Host callbacks of a step: an exception in one must not leave the other replicas waiting.

If a callback raises, XLA ends the launch on its device, while the other devices wait in the next
collective until XLA aborts the process (after 40 s on host devices, JAX 0.10 to 0.12). So a
callback never raises into XLA: the exception is stored, the callback returns zeros, and `run`
raises the exception after the launch has finished.

A callback that does not return lets the other replicas wait, too: `running_callbacks` tells which.
"""

import contextlib
import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.dtypes import canonicalize_dtype
from jax.extend.core import ClosedJaxpr, JaxprEqn

from mirror._src.base import clock
from mirror._src.base.errors import describe
from mirror._src.devices.transfer import ENABLE_64_BITS
from mirror._src.jaxprs.equations import equations, user_line
from mirror._src.jaxprs.primitives import CALLBACK
from mirror._src.passes.evaluate import Rules, bind


class RunningCallback(NamedTuple):
    """A host callback that has not returned.

    Attributes:
        eqn: The operation of the step.
        replica: The replica that called it; `None` if it is called for several replicas.
        thread: The identity of the thread that it runs in.
        began: When it was called, in seconds of `clock.now`.
    """

    eqn: JaxprEqn
    replica: int | None
    thread: int
    began: float

    @property
    def line(self) -> str:
        """The user's line that calls it."""
        return user_line(self.eqn)


_running: dict[int, RunningCallback] = {}
_numbers = itertools.count()


def running_callbacks() -> list[RunningCallback]:
    """Returns the host callbacks that have not returned, oldest first."""
    return list(_running.values())


def in_callback() -> bool:
    """Whether this thread runs a host callback of a step, whose launch waits for it to return."""
    return bool(_running) and threading.get_ident() in {each.thread for each in running_callbacks()}


def calls_back(program: ClosedJaxpr) -> bool:
    """Whether a program contains host callbacks."""
    eqns = equations(program.jaxpr)
    return any(map(is_callback, [eqn for eqn in eqns if eqn.primitive.name in CALLBACK]))


def is_callback(eqn: JaxprEqn) -> bool:
    """Whether an operation calls a function of the user; `jax.debug.print` calls one of JAX."""
    return eqn.primitive.name in CALLBACK and "callback" in eqn.params


def check_callbacks(program: ClosedJaxpr, num_devices: int) -> None:
    """Rejects callbacks and prints that would fail after the state is donated.

    Raises:
        ValueError: If several devices would call in order, which JAX does on one device only, or a
            print cannot format its values.
    """
    for eqn in [eqn for eqn in equations(program.jaxpr) if eqn.effects]:
        effects = {type(effect).__name__ for effect in eqn.effects}
        if num_devices > 1 and eqn.primitive.name in CALLBACK and "OrderedDebugEffect" in effects:
            raise ValueError(
                f"The step prints or calls back with ordered=True at {user_line(eqn)}, which JAX "
                f"supports on one device, but the replicas have {num_devices}. Remove ordered=True."
            )
        if eqn.params.get("has_placeholders"):
            _require_format(eqn)


def _require_format(eqn: JaxprEqn) -> None:
    """Rejects a print whose format does not fit its values: JAX notices when it prints."""
    text: str = eqn.params["fmt"]
    avals: list[Any] = [x.aval for x in eqn.invars]
    # A random key is printed as the vector of its data.
    leaves = [np.zeros(x.shape, x.dtype if isinstance(x.dtype, np.dtype) else "2u4") for x in avals]
    for position, fixed in eqn.params["static_args"]:
        leaves.insert(position, fixed)
    args, kwargs = jax.tree.unflatten(eqn.params["in_tree"], leaves)
    try:
        with contextlib.suppress(AttributeError, LookupError):  # JAX checks names, with its arrays
            text.format(*args, **kwargs)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"The print at {user_line(eqn)} cannot format {', '.join(map(describe, avals))} as "
            f"{text!r}: {error}. Correct the format: {{}} prints any value."
        ) from error


class CallbackGuard:
    """Stores the exceptions that the callbacks of one compiled program raise."""

    def __init__(self) -> None:
        self._errors: list[BaseException] = []

    def wrap(self, eqn: JaxprEqn, *, has_replica: bool = False) -> Callable[..., Any]:
        """Returns a function that calls the callback, or stores its exception and returns zeros.

        Args:
            eqn: The operation that calls the callback.
            has_replica: Whether the function gets the index of the replica as first argument.
        """
        callback = eqn.params["callback"]
        avals = eqn.params.get("result_avals", ())
        declared, x64 = [(aval.shape, aval.dtype) for aval in avals], jax.enable_x64.value

        def call(*args: Any, **kwargs: Any) -> Any:
            replica = None
            if has_replica:
                replica, args = int(args[0]), args[1:]
            number, me = next(_numbers), threading.get_ident()
            _running[number] = RunningCallback(eqn, replica, me, clock.now())
            try:
                arrays = list(map(np.asarray, callback(*args, **kwargs)))
                with jax.enable_x64(x64):  # XLA calls in a thread that has the global value
                    arrays = [x.astype(canonicalize_dtype(x.dtype), copy=False) for x in arrays]
                if [(x.shape, x.dtype) for x in arrays] != declared:
                    raise ValueError(
                        f"The host callback at {user_line(eqn)} returned {describe(arrays)}, but "
                        f"it declares {describe(list(avals))}. Return what it declares."
                    )
                if any(canonicalize_dtype(x.dtype) != x.dtype for x in arrays):
                    raise ValueError(
                        f"The host callback at {user_line(eqn)} returns {describe(arrays)}, but "
                        f"64-bit types are enabled in one thread only. Call {ENABLE_64_BITS}."
                    )
                return arrays
            except BaseException as error:
                self._errors.append(error)
                return [np.zeros(shape, dtype) for shape, dtype in declared]
            finally:
                del _running[number]

        return call

    def rules(self, axis: str | None = None) -> Rules:
        """Returns rules for `Lowering`, which bind a callback with the wrapped function.

        Args:
            axis: The mapped axis whose index is the replica. `None` without one, as inside a
                program that was vectorized.
        """

        def rule(eqn: JaxprEqn, arguments: list[Any]) -> Sequence[Any]:
            replica = [] if axis is None else [jax.lax.axis_index(axis)]
            callback = self.wrap(eqn, has_replica=axis is not None)
            return bind(eqn, [*replica, *arguments], callback=callback)

        return dict.fromkeys(CALLBACK, lambda eqn: rule if is_callback(eqn) else None)

    @property
    def first(self) -> BaseException | None:
        """The first exception stored since the last call of `raise_first`."""
        return next(iter(self._errors), None)

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
