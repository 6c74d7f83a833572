"""Ends the process if a test hangs, and reports the stacks and the launches in flight.

Why not pytest-timeout: a step can hang in native code that holds the GIL. The `signal` method of
pytest-timeout runs a Python signal handler, which waits until the main thread executes bytecode
again, and its `thread` method runs a `threading.Timer`, which waits for the GIL. Neither ends such
a test. `faulthandler.dump_traceback_later` uses a thread in C that does not need the GIL.
"""

import contextlib
import faulthandler
import os
import sys
import threading
import traceback
from collections.abc import Generator, Iterator

import pytest

from mirror._src.tools.plugin import member
from mirror._src.tools.plugin.marks import MARKED_SECS, SETTINGS, mark_keywords, runs_elsewhere

_LAUNCHES = "mirror._src.devices.launches"
GRACE_SECS = 5.0  # time for the report, after which faulthandler ends the process
_deadline = pytest.StashKey[contextlib.ExitStack]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Ends the process if a test, including its fixtures, exceeds its timeout."""
    secs = 0.0 if runs_elsewhere(item) else timeout_of(item)
    with contextlib.ExitStack() as stack:
        if secs:
            _start_timers(item, secs, stack)
        item.config.stash[_deadline] = stack
        return (yield)


def pytest_enter_pdb(config: pytest.Config) -> None:
    """Stops the timers, because debugging may take longer than any timeout."""
    if _deadline in config.stash:
        config.stash[_deadline].close()


def timeout_of(item: pytest.Item) -> float:
    """Returns the timeout: the mark takes precedence over the option, the option over the file."""
    option = item.config.stash[SETTINGS].secs
    if item.get_closest_marker("mirror") is None:
        return option or 0.0
    with contextlib.suppress(pytest.fail.Exception):  # the setup hook reports an invalid mark
        return mark_keywords(item).get("timeout", MARKED_SECS if option is None else option)
    return 0.0


def _start_timers(item: pytest.Item, secs: float, stack: contextlib.ExitStack) -> None:
    """Starts the timers; closing the stack cancels them.

    A Python thread prints the report. If it cannot run because the test holds the GIL,
    faulthandler's thread prints the stacks and ends the process.
    """
    if _LAUNCHES in sys.modules:
        from mirror._src.tools.plugin import support  # its dependencies are already imported

        stack.enter_context(support.logged_launches())
    timer = threading.Timer(secs, _expire, (item, secs))
    timer.daemon = True
    timer.start()
    stack.callback(timer.cancel)
    # faulthandler has a single timer; pytest uses it if the ini option faulthandler_timeout is set.
    if not float(item.config.getini("faulthandler_timeout") or 0):
        stderr = item.config.stash[SETTINGS].stderr
        faulthandler.dump_traceback_later(secs + GRACE_SECS, exit=True, file=stderr)
        stack.callback(faulthandler.cancel_dump_traceback_later)


def _expire(item: pytest.Item, secs: float) -> None:
    """Prints the report and ends the process; native code cannot be stopped in any other way."""
    config = item.config
    try:
        with open(
            config.stash[SETTINGS].stderr, "w", encoding="locale", errors="backslashreplace"
        ) as file:
            for part in _report(item, secs):
                file.write(part + "\n")
                file.flush()
        reporter = config.pluginmanager.get_plugin("terminalreporter")
        if reporter is not None:
            reporter.flush()
        if process := config.pluginmanager.get_plugin(member.NAME):
            process.expire(f"{item.nodeid} exceeded its timeout of {secs:g} s.")
    finally:
        os._exit(pytest.ExitCode.TESTS_FAILED)


def _report(item: pytest.Item, secs: float) -> Iterator[str]:
    """Yields the report in two parts, because the second part may hang itself."""
    failure = f"FAILED {item.nodeid} - exceeded its timeout of {secs:g} s; the process was ended"
    stacks = "\n".join(_stacks())
    yield f"\n\n{' mirror timeout ':=^80}\n{failure}.\n\nStacks of all Python threads:\n{stacks}"
    out, err = _captured(item.config)
    texts = {"output": out, "error": err}
    lines = [f"{f' captured standard {n} ':-^80}\n{text}" for n, text in texts.items() if text]
    replicas = list(_launches())
    lines += ["State of the replicas:", *replicas, ""] if replicas else []
    lines += [f"{failure}. Change it with mark.mirror(timeout=...) or --mirror-timeout."]
    yield "\n".join([*lines, "=" * 80])


def _stacks() -> Iterator[str]:
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for ident, frame in sys._current_frames().items():
        if ident != threading.get_ident():
            name = names.get(ident, "not started by Python")
            yield f"\nThread {ident} ({name}):\n{''.join(traceback.format_stack(frame))}"


def _captured(config: pytest.Config) -> tuple[str, str]:
    """Returns the captured output of the test so far, including XLA's log."""
    manager = config.pluginmanager.get_plugin("capturemanager")
    if manager is None or not manager.is_globally_capturing():
        return "", ""
    return manager.read_global_capture()


def _launches() -> Iterator[str]:
    if _LAUNCHES not in sys.modules:
        return
    from mirror._src.tools.plugin import support

    lines = support.state_of_launches()
    yield from (f"  {line}" for line in lines)
    if not lines:
        yield "  mirror has no launch in flight."
