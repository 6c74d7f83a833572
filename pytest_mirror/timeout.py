"""The end of a test that hangs: what is known is said, and the process is ended."""

import contextlib
import faulthandler
import os
import re
import sys
import threading
import traceback
from collections.abc import Generator, Iterator

import pytest

from pytest_mirror.marks import marked
from pytest_mirror.settings import MARKED_SECS, SETTINGS

_GRACE_SECS = 5.0  # for the report; then a thread without Python ends the process
_WAITS_IN_XLA = re.compile(r"waiting for `(.*?)` for .*? and may be stuck\. Expected (\d+) threads")
_deadline = pytest.StashKey[contextlib.ExitStack]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Ends the process where a test, with its fixtures, takes longer than it may."""
    secs = _secs_of(item)
    with contextlib.ExitStack() as stack:
        if secs:
            _watch(item, secs, stack)
        item.config.stash[_deadline] = stack
        return (yield)


def pytest_enter_pdb(config: pytest.Config) -> None:
    """Who debugs a test takes longer than any limit."""
    if _deadline in config.stash:
        config.stash[_deadline].close()


def _secs_of(item: pytest.Item) -> float:
    """The mark wins over the option, that over the ini file."""
    said = item.config.stash[SETTINGS].secs
    if item.get_closest_marker("mirror") is None:
        return said or 0.0
    with contextlib.suppress(pytest.fail.Exception):  # the setup says what is wrong
        return marked(item).get("timeout", MARKED_SECS if said is None else said)
    return 0.0


def _watch(item: pytest.Item, secs: float, stack: contextlib.ExitStack) -> None:
    """Starts the clock; leaving the stack stops it.

    A thread of Python tells what it can. Where the test hangs in native code and keeps the
    interpreter's lock, no thread of Python runs: then faulthandler's ends the process.
    """
    timer = threading.Timer(secs, _expire, (item, secs))
    timer.daemon = True
    timer.start()
    stack.callback(timer.cancel)
    if not float(item.config.getini("faulthandler_timeout") or 0):  # which is the same one clock
        stderr = item.config.stash[SETTINGS].stderr
        faulthandler.dump_traceback_later(secs + _GRACE_SECS, exit=True, file=stderr)
        stack.callback(faulthandler.cancel_dump_traceback_later)


def _expire(item: pytest.Item, secs: float) -> None:
    """Reports, most certain first, and ends the process: nothing else stops native code."""
    config = item.config
    try:
        with open(config.stash[SETTINGS].stderr, "w", errors="backslashreplace") as file:
            for part in _report(item, secs):
                file.write(part + "\n")
                file.flush()
        reporter = config.pluginmanager.get_plugin("terminalreporter")
        if reporter is not None:
            reporter.flush()
    finally:
        os._exit(pytest.ExitCode.TESTS_FAILED)


def _report(item: pytest.Item, secs: float) -> Iterator[str]:
    """In two parts: the second needs more of what may hang."""
    said = f"FAILED {item.nodeid} - it took longer than {secs:g} s, and the process was ended"
    threads = "\n".join(_stacks())
    yield f"\n\n{' mirror timeout ':=^80}\n{said}.\n\nWhere each thread of Python is:\n{threads}"
    out, err = _captured(item.config)
    texts = {"output": out, "error": err}
    lines = [f"{f' captured standard {n} ':-^80}\n{text}" for n, text in texts.items() if text]
    known = [*_arrivals(err), *_launches()]
    lines += ["What is known of the replicas:", *known, ""] if known else []
    lines += [f"{said}. mark.mirror(timeout=...) or --mirror-timeout says how long it may take."]
    yield "\n".join([*lines, "=" * 80])


def _stacks() -> Iterator[str]:
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for ident, frame in sys._current_frames().items():
        if ident != threading.get_ident():
            name = names.get(ident, "not started by Python")
            yield f"\nThread {ident} ({name}):\n{''.join(traceback.format_stack(frame))}"


def _captured(config: pytest.Config) -> tuple[str, str]:
    """What the test has written so far; XLA's own lines among it."""
    manager = config.pluginmanager.get_plugin("capturemanager")
    if manager is None or not manager.is_globally_capturing():
        return "", ""
    return manager.read_global_capture()


def _arrivals(text: str) -> Iterator[str]:
    """How many have come to each collective; XLA numbers them as they come, and not by replica."""
    waits = _WAITS_IN_XLA.findall(text)
    for collective, expected in dict.fromkeys(waits):
        count = waits.count((collective, expected))
        yield f"  XLA: {count} of {expected} replicas wait in {collective}; it does not say which."


def _launches() -> Iterator[str]:
    if "mirror._src.devices.launch" not in sys.modules:
        return
    from mirror._src.testing import plugin_support  # mirror has been imported

    found = plugin_support.launches_under_way()
    yield from (f"  launch {i + 1} of {len(found)}: {line}" for i, line in enumerate(found))
    if not found:
        yield "  mirror has no launch with collectives under way on host devices."
