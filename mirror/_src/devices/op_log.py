"""The placement log: the device of every op, step, variable and collective.

Eager ops are observed by a custom trace (`jax.core.Trace`) that forwards each op to JAX's own trace
and then logs the devices of the results. It is installed only while the log is on. When the log is
off, JAX's fast path for compiled functions is untouched and nothing is slower.
"""

# JAX has no public hook for eager ops (`jax.monitoring` reports compilations, not executions), so
# the log relies on these tricks. They are needed on all supported versions (JAX 0.10.2 to 0.12.0.1,
# Flax 0.12.8 and later); `tests/devices/test_op_log.py` fails if one stops working. Delete
# `_LogTrace` and everything below that installs it once JAX offers such a hook.
#
# - `_LogTrace` replaces the current trace (`set_current_trace` of `jax.extend.core`). Without it,
#   compiled functions, eager ops included, run in C++ and no Python code sees them.
# - `_LogTrace.__eq__` looks at the code object of its caller. Flax allows a variable to be changed
#   only under the trace that created it, and compares the two through `OpaqueTraceState.__eq__`:
#   there, the log's trace must equal JAX's, or changing a variable raises TraceContextError when
#   the log has been switched on or off since the variable was created. The cache of `jax.jit`
#   compares traces too: there, they must differ, or JAX reuses its fast path and logs nothing.
# - `_LogTrace.__hash__` is JAX's, because objects that can be equal must have the same hash.
# - `process_custom_jvp_call` and `process_custom_vjp_call` run the function under the log's trace.
#   Forwarded to JAX's trace, the ops inside would not be logged.
# - `__getattr__` forwards what `jax.core.Trace` does not declare. Without it, `jax.shard_map` fails
#   with an AttributeError (`process_shard_map`).
# - `eager_trace` asks a new thread for JAX's trace, because the current thread may be inside a
#   transformation, and `jax.core` does not export it.
# - `unlogged` removes the log's trace temporarily. `jax.set_mesh` raises under any other trace than
#   JAX's.

import contextlib
import functools
import logging
import sys
import threading
from collections.abc import Iterable, Iterator
from typing import Any

import jax
from jax.extend.core import get_opaque_trace_state, set_current_trace, take_current_trace

from mirror._src.base.errors import describe, require_bool
from mirror._src.base.tracebacks import line_of_user
from mirror._src.devices.backend import logical_name, names, place

_logger = logging.getLogger("mirror")
_JITS = ("jit", "pjit")
_STATE_EQ = type(get_opaque_trace_state()).__eq__.__code__


class _Thread(threading.local):
    is_installed = False
    is_muted = False


_thread = _Thread()


def is_log_installed() -> bool:
    """Whether the log's trace may be installed in this thread."""
    return _thread.is_installed


class _StderrHandler(logging.Handler):
    """Handler that prints to the current `sys.stderr`, unless another handler gets the records."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            if _is_only_handler(self):
                print(self.format(record), file=sys.stderr)
        except Exception:  # like every handler: an error in logging must not stop the op
            self.handleError(record)


def _is_only_handler(handler: logging.Handler) -> bool:
    """Whether no other handler, such as a root handler, gets the logger's records."""
    logger: logging.Logger | None = _logger
    while logger is not None:
        if any(other is not handler for other in logger.handlers):
            return False
        logger = logger.parent if logger.propagate else None
    return True


class _LogTrace(jax.core.Trace):
    """Trace that forwards every eager op to JAX's trace, and logs the devices of its results."""

    def __init__(self, parent: Any) -> None:
        super().__init__()
        self._parent = parent

    def __eq__(self, other: object) -> bool:
        if other is self._parent:
            return sys._getframe(1).f_code is _STATE_EQ  # called by Flax, not by `jax.jit`
        return other is self

    def __hash__(self) -> int:
        return hash(self._parent)

    def process_primitive(self, primitive: Any, args: Any, params: Any, /) -> Any:
        with set_current_trace(self._parent):
            outputs = self._parent.process_primitive(primitive, args, params)
        _log_op(primitive, args, params, outputs)
        return outputs

    def stage_value(self, value: Any) -> Any:
        """Moves a host value to a device."""
        with set_current_trace(self._parent):
            staged = self._parent.stage_value(value)
        if staged is not value:
            _log_placed("stage", [staged])
        return staged

    def process_call(self, *call: Any) -> Any:
        return self._parent.process_call(*call)

    def process_custom_jvp_call(self, _: Any, fun: Any, *rest: Any, **__: Any) -> Any:
        """Runs a function with a derivative of its own, and logs its ops."""
        with set_current_trace(self):
            return fun.call_wrapped(*rest[-1])

    process_custom_vjp_call = process_custom_jvp_call

    def __getattr__(self, name: str) -> Any:
        """Forwards other attributes, such as `process_shard_map`, to JAX's trace."""
        attribute = getattr(self._parent, name)
        if name.startswith("process_"):
            return functools.partial(self._process, attribute)
        return attribute

    def _process(self, process: Any, primitive: Any, *call: Any, **params: Any) -> Any:
        outputs = process(primitive, *call, **params)
        _log_op(primitive, call, params, list(outputs))
        return outputs


class _PlacementLog:
    """Switch of the log: on or off for the process, installed thread by thread."""

    def __init__(self) -> None:
        self.on = False
        self._lock = threading.Lock()
        self._undo = contextlib.ExitStack()

    def switch(self, enabled: bool) -> None:
        """Switches the log on or off, for all threads."""
        with self._lock:
            if enabled and not self.on:
                self._undo.enter_context(_visible())
            elif self.on and not enabled:
                self._undo.close()
            self.on = enabled
        self.sync()

    def sync(self) -> None:
        """Installs the trace in this thread, or removes it, if the log is on or off.

        Does nothing inside a transformation. After a switch inside an op, JAX restores the previous
        trace when the op ends. A thread therefore counts as without the trace only once `sync`
        observes JAX's trace.
        """
        if _thread.is_muted or not (self.on or _thread.is_installed):
            return
        current = _current_trace()
        if self.on and current is eager_trace():
            _thread.is_installed = True
            set_current_trace(_log_trace()).__enter__()
        elif not self.on and isinstance(current, _LogTrace):
            set_current_trace(eager_trace()).__enter__()
        elif not self.on and current is eager_trace():
            _thread.is_installed = False

    def step(
        self,
        name: str,
        devices: Iterable[jax.Device],
        collectives: Iterable[tuple[str, str]],
        reduces_on: jax.Device | None,
    ) -> None:
        """Logs a run of a compiled step, and the kind and size of each of its collectives."""
        devices = tuple(devices)
        _logger.info("Executing step %s in %s", name, place(devices))
        for kind, amount in collectives:
            if reduces_on is None:
                _logger.info("%s over %s: %s", kind, names(devices), amount)
            else:
                route = f"Reduce to {logical_name(reduces_on)} then broadcast to {names(devices)}"
                _logger.info("%s: %s, %s", route, kind, amount)

    def mirrored(self, name: str, value: Any, devices: Iterable[jax.Device]) -> None:
        """Logs that a variable or another value is mirrored."""
        _logger.info("Mirroring %s %s over %s", name, describe(value), names(devices))


placement_log = _PlacementLog()


def set_log_device_placement(enabled: bool) -> None:
    """Logs the devices of eager ops, compiled steps, variables and collectives.

    Writes one line for each to the logger `mirror` at level INFO, or to standard error if logging
    is not configured. Can be switched at any time. In the calling thread, the log starts at once;
    in any other thread, including new ones, at its next `mirror.device` or `strategy.scope`.

    This is a debugging tool. While the log is on, an eager op or a call of a jitted function takes
    about 80 us longer, and `jax.set_mesh` raises, because JAX mistakes the log for tracing.
    Programs compiled with `.lower().compile()` are not logged. When it is off, it costs nothing.

    Args:
        enabled: Whether to log.

    Raises:
        TypeError: If `enabled` is not a bool.
        RuntimeError: If called inside `jax.jit` or another transformation.

    >>> set_log_device_placement(True)
    >>> x = jnp.ones(2) + 1  # logs one line per op, with its device
    >>> set_log_device_placement(False)
    """
    require_bool("enabled", enabled)
    current = _current_trace()
    if not isinstance(current, _LogTrace) and current is not eager_trace():
        raise RuntimeError(
            f"set_log_device_placement({enabled}) was called at {line_of_user()}, inside jax.jit, "
            "jax.grad or jax.vmap. Call it outside."
        )
    placement_log.switch(enabled)


def unlogged() -> contextlib.AbstractContextManager[None]:
    """Context manager without the log, for JAX functions that require JAX's own trace."""
    placement_log.sync()
    return _without_log() if _thread.is_installed else contextlib.nullcontext()


@contextlib.contextmanager
def _without_log() -> Iterator[None]:
    current = _current_trace()
    before, _thread.is_muted = _thread.is_muted, True
    try:
        with set_current_trace(current._parent if isinstance(current, _LogTrace) else current):
            yield
    finally:
        _thread.is_muted = before


@functools.cache
def eager_trace() -> Any:
    """Returns JAX's trace outside of all transformations, which is the trace of a new thread."""
    traces: list[Any] = []
    thread = threading.Thread(target=lambda: traces.append(_current_trace()))
    thread.start()
    thread.join()
    return traces[0]


@functools.cache
def _log_trace() -> _LogTrace:
    """Returns the only instance: variables keep a reference to the trace that created them."""
    return _LogTrace(eager_trace())


def _current_trace() -> Any:
    with take_current_trace() as current:
        return current


def _log_op(primitive: Any, args: Any, params: Any, outputs: Any) -> None:
    name = params.get("name", primitive.name) if primitive.name in _JITS else primitive.name
    _log_placed(name.lstrip("_"), _arrays(outputs) or _arrays(args))


def _log_placed(name: str, arrays: list[jax.Array]) -> None:
    if not placement_log.on or _thread.is_muted:
        return
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
    """Enables level INFO, and prints the records if logging is not configured."""
    logger, handler = _logger, _StderrHandler()  # when Python ends, the global may be None
    level = logger.level
    logger.addHandler(handler)
    if not logger.isEnabledFor(logging.INFO):
        logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.setLevel(level)
        logger.removeHandler(handler)
