"""The placement log: which op, step, variable and collective runs on which device.

Eager ops are seen by a trace of our own under JAX's (`jax.core.Trace`), which hands each on to
JAX's own trace and then looks where the results lie. It is installed in a thread only while the log
is on, so that off costs nothing: JAX's quick path for compiled functions is then its own again.
"""

import contextlib
import functools
import logging
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any

import jax
from jax.extend.core import get_opaque_trace_state, set_current_trace, take_current_trace

from mirror._src.devices.backend import logical_name, names, place
from mirror._src.utils.errors import describe
from mirror._src.utils.source_lines import line_of_user

_logger = logging.getLogger("mirror")
_HIDDEN = ("jit", "pjit")
_COMPARES = type(get_opaque_trace_state()).__eq__.__code__


class _Thread(threading.local):
    installed = False
    muted = False


_thread = _Thread()


def log_is_here() -> bool:
    """Whether the log's trace may be installed in this thread."""
    return _thread.installed


class _ToStderr(logging.Handler):
    """Prints records to what is `sys.stderr` when they come, where nobody else handles them."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            if _is_alone(self):
                print(self.format(record), file=sys.stderr)
        except Exception:  # as every handler of `logging`: the op that is logged goes on
            self.handleError(record)


def _is_alone(handler: logging.Handler) -> bool:
    """Whether no other handler gets what the logger says: a root handler, for instance."""
    logger: logging.Logger | None = _logger
    while logger is not None:
        if any(other is not handler for other in logger.handlers):
            return False
        logger = logger.parent if logger.propagate else None
    return True


class _LogTrace(jax.core.Trace):
    """Hands every eager op on to JAX's own trace, and logs where its results lie."""

    def __init__(self, parent: Any) -> None:
        super().__init__()
        self._parent = parent

    # Flax lets a variable be changed only under the trace that it was made under, and compares
    # traces by `==` (JAX 0.10.2 to 0.12.0.1): for it, this one is not another. For the cache of
    # `jax.jit`, which compares too, it must be: a function that is found there runs unseen.
    def __eq__(self, other: object) -> bool:
        if other is self._parent:
            return sys._getframe(1).f_code is _COMPARES
        return other is self

    def __hash__(self) -> int:
        return hash(self._parent)

    def process_primitive(self, primitive: Any, args: Any, params: Any, /) -> Any:
        with set_current_trace(self._parent):
            outputs = self._parent.process_primitive(primitive, args, params)
        if placement_log.on and not _thread.muted:
            _log_op(primitive, args, params, outputs)
        return outputs

    def stage_value(self, value: Any) -> Any:
        """Puts a host value onto a device."""
        with set_current_trace(self._parent):
            staged = self._parent.stage_value(value)
        if staged is not value and placement_log.on and not _thread.muted:
            _log_placed("stage", [staged])
        return staged

    def process_call(self, *call: Any) -> Any:
        return self._parent.process_call(*call)

    def process_custom_jvp_call(self, *call: Any, **_: Any) -> Any:
        """Runs a function with a derivative of its own, whose ops are logged too."""
        _, fun, _, arguments = call
        with set_current_trace(self):
            return fun.call_wrapped(*arguments)

    def process_custom_vjp_call(self, *call: Any, **_: Any) -> Any:
        """The same, for one with forward and backward."""
        _, fun, _, _, arguments = call
        with set_current_trace(self):
            return fun.call_wrapped(*arguments)

    def __getattr__(self, name: str) -> Any:
        """What else a trace can do, `shard_map` for instance, JAX's own does."""
        found = getattr(self._parent, name)
        return functools.partial(self._process, found) if name.startswith("process_") else found

    def _process(self, process: Any, primitive: Any, *call: Any, **params: Any) -> Any:
        outputs = process(primitive, *call, **params)
        if placement_log.on and not _thread.muted:
            _log_op(primitive, call, params, list(outputs))
        return outputs


class _PlacementLog:
    """Whether the log is on, in the process, and what is installed for it, in each thread."""

    def __init__(self) -> None:
        self.on = False
        self._lock = threading.Lock()
        self._undo = contextlib.ExitStack()

    def switch(self, enabled: bool) -> None:
        """Switches the log on or off, for all threads."""
        with self._lock:
            _log_trace()  # made before new threads have another
            if enabled and not self.on:
                self._undo.enter_context(_visible())
                self._undo.enter_context(_in_new_threads(self.sync))
            elif self.on and not enabled:
                self._undo.close()
            self.on = enabled
        self.sync()

    def sync(self) -> None:
        """Installs the trace in this thread, or takes it away, as the log is on or off.

        Not inside a transformation. What is done inside an op, JAX takes back when the op ends: a
        thread is known to be without the trace when it was found so.
        """
        if _thread.muted or not (self.on or _thread.installed):
            return
        current = _current_trace()
        if self.on and current is eager_trace():
            _thread.installed = True
            set_current_trace(_log_trace()).__enter__()
        elif not self.on and isinstance(current, _LogTrace):
            set_current_trace(eager_trace()).__enter__()
        elif not self.on and current is eager_trace():
            _thread.installed = False

    def step(
        self,
        name: str,
        devices: Iterable[jax.Device],
        collectives: Iterable[tuple[str, str]],
        reduces_on: jax.Device | None,
    ) -> None:
        """Logs that a compiled step runs, and its collectives: the kind of each, and how much."""
        devices = tuple(devices)
        _logger.info("Executing step %s in %s", name, place(devices))
        for kind, amount in collectives:
            if reduces_on is None:
                _logger.info("%s over %s: %s", kind, names(devices), amount)
            else:
                route = f"Reduce to {logical_name(reduces_on)} then broadcast to {names(devices)}"
                _logger.info("%s: %s, %s", route, kind, amount)

    def mirrored(self, name: str, value: Any, devices: Iterable[jax.Device]) -> None:
        """Logs that a variable, or another value, is mirrored."""
        _logger.info("Mirroring %s %s over %s", name, describe(value), names(devices))


placement_log = _PlacementLog()


def set_log_device_placement(enabled: bool) -> None:
    """Logs where everything runs: eager ops, compiled steps, variables, collectives.

    A line for each, through the logger `mirror` at level INFO. While nobody has configured logging,
    they are printed to the standard error. It may be switched at any time and holds for all
    threads: a thread that was running before is heard of from its next `mirror.device` or
    `strategy.scope` on. It is a tool for looking: while it is on an eager op, or a call of a
    jitted function, costs some 80 us more, and `jax.set_mesh` refuses to work, which takes it for
    tracing. Programs compiled by hand, `.lower().compile()`, are not heard of. Off, it costs
    nothing.

    Raises:
        TypeError: no bool.
        RuntimeError: called inside `jax.jit` or another transformation.

    >>> set_log_device_placement(True)
    >>> x = jnp.ones(2) + 1  # a line for each op, with its device
    >>> set_log_device_placement(False)
    """
    if not isinstance(enabled, bool):
        raise TypeError(f"enabled={describe(enabled)} is neither True nor False.")
    current = _current_trace()
    if not isinstance(current, _LogTrace) and current is not eager_trace():
        raise RuntimeError(
            f"set_log_device_placement({enabled}) inside jax.jit, grad or vmap, at "
            f"{line_of_user()}. Call it outside."
        )
    placement_log.switch(enabled)


def unlogged() -> contextlib.AbstractContextManager[None]:
    """A context without the log, for what JAX does only where it sees no trace but its own."""
    placement_log.sync()
    return _without_log() if _thread.installed else contextlib.nullcontext()


@contextlib.contextmanager
def _without_log() -> Iterator[None]:
    current = _current_trace()
    before, _thread.muted = _thread.muted, True
    try:
        with set_current_trace(current._parent if isinstance(current, _LogTrace) else current):
            yield
    finally:
        _thread.muted = before


@functools.cache
def eager_trace() -> Any:
    """The trace that JAX has where nothing is transformed: that of a thread that did nothing."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(_current_trace()))
    thread.start()
    thread.join()
    # Another thread may have switched the log on in the meantime.
    return found[0]._parent if isinstance(found[0], _LogTrace) else found[0]


@functools.cache
def _log_trace() -> _LogTrace:
    """One for all threads, for good: variables remember the trace that they were made under."""
    return _LogTrace(eager_trace())


def _current_trace() -> Any:
    with take_current_trace() as current:
        return current


def _log_op(primitive: Any, args: Any, params: Any, outputs: Any) -> None:
    name = params.get("name", primitive.name) if primitive.name in _HIDDEN else primitive.name
    _log_placed(name.lstrip("_"), _arrays(outputs) or _arrays(args))


def _log_placed(name: str, arrays: list[jax.Array]) -> None:
    devices = sorted({d for array in arrays for d in array.devices()}, key=lambda d: d.id)
    if devices:
        _logger.info("Executing op %s in %s", name, place(devices))


def _arrays(values: Any) -> list[jax.Array]:
    return [
        value
        for value in jax.tree.leaves(values)
        if isinstance(value, jax.Array) and not isinstance(value, jax.core.Tracer)
    ]


@contextlib.contextmanager
def _visible() -> Iterator[None]:
    """Lets INFO through, and prints it where nobody has configured logging."""
    level, handler = _logger.level, _ToStderr()
    _logger.addHandler(handler)
    if not _logger.isEnabledFor(logging.INFO):
        _logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        _logger.setLevel(level)
        _logger.removeHandler(handler)


@contextlib.contextmanager
def _in_new_threads(install: Callable[[], None]) -> Iterator[None]:
    """Calls `install` in every thread that is started from now on, as its first act.

    `threading` runs a profile function in each new thread, and that is all that it is used for:
    the thread goes on with the one that was there before, if any.
    """
    before: Any = threading.getprofile()

    def first(frame: FrameType, event: str, argument: object) -> None:
        sys.setprofile(before)
        install()
        if before is not None:
            before(frame, event, argument)

    threading.setprofile(first)
    try:
        yield
    finally:
        if threading.getprofile() is first:
            threading.setprofile(before)
