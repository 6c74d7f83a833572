"""Records what JAX traces and compiles."""

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import jax
import pytest


@contextlib.contextmanager
def compilations(caplog) -> Iterator[list[str]]:
    """Collects JAX's log line for each trace and each compilation."""
    events: list[str] = []
    with jax.log_compiles(True), caplog.at_level(logging.WARNING):
        start = len(caplog.records)
        yield events
        events += [r.getMessage() for r in caplog.records[start:]]


@contextlib.contextmanager
def compiler_options() -> Iterator[list[dict[str, Any]]]:
    """Collects the options with which XLA compiles programs, for those that have any."""
    options, jit = [], jax.jit

    def recorded(*args, compiler_options=None, **kwargs):
        if compiler_options is not None:
            options.append(compiler_options)
        return jit(*args, compiler_options=compiler_options, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "jit", recorded)
        yield options


def assert_nothing_compiled(events: list[str]) -> None:
    """Checks that nothing was traced or compiled; the events show the names."""
    assert not events, events
