"""Records what JAX traces and compiles."""

import contextlib
import logging
from collections.abc import Iterator

import jax


@contextlib.contextmanager
def compilations(caplog) -> Iterator[list[str]]:
    """Collects JAX's log line for each trace and each compilation."""
    events: list[str] = []
    with jax.log_compiles(True), caplog.at_level(logging.WARNING):
        start = len(caplog.records)
        yield events
        events += [r.getMessage() for r in caplog.records[start:]]


def assert_nothing_compiled(events: list[str]) -> None:
    """Checks that nothing was traced or compiled; the events show the names."""
    assert not events, events
