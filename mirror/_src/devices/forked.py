"""Rejects work in a forked process, where JAX's threads do not exist and a step never ends."""

import os

_started_in: int | None = None  # the process in which the first strategy was created


def started_in() -> int:
    """Returns the id of the process in which strategies work, which is the first to call this."""
    global _started_in
    if _started_in is None:
        _started_in = os.getpid()
    return _started_in


def require_not_forked() -> None:
    """Checks that this process has not been forked since the first strategy was created.

    Raises:
        RuntimeError: If it has.
    """
    if os.getpid() != started_in():
        raise RuntimeError(
            f"Process {os.getpid()} was forked from process {started_in()}, in which JAX runs. A "
            "fork copies no threads, so a step would wait forever. Start the process with "
            'multiprocessing.get_context("spawn"), or use NumPy only in workers of a data loader.'
        )
