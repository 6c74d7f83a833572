"""The memory of this machine, which limits what a checkpoint may ask for."""

import contextlib
import os
from pathlib import Path

from mirror._src.base.errors import bytes_in_words

_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def require_memory_for(num_bytes: int) -> None:
    """Checks that arrays could be held in memory.

    A damaged or malicious checkpoint can declare terabytes of zeros in a few bytes, and allocating
    them would end the process.

    Raises:
        MemoryError: If they need more than the machine, its container or `ulimit -v` has.
    """
    limit = _memory_limit()
    if limit is not None and num_bytes > limit:
        raise MemoryError(
            f"its arrays need {bytes_in_words(num_bytes)}, but this process can use at most "
            f"{bytes_in_words(limit)} of memory"
        )


def _memory_limit() -> int | None:
    """Returns the least of the limits that apply to this process, in bytes; None if unknown."""
    limits = []
    with contextlib.suppress(AttributeError, ValueError, OSError):
        limits.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    for file in _LIMITS:
        with contextlib.suppress(OSError, ValueError):  # "max"
            limits.append(int(Path(file).read_text(encoding="utf-8")))
    with contextlib.suppress(ImportError):
        import resource

        limit, _ = resource.getrlimit(resource.RLIMIT_AS)
        limits += [limit] * (limit != resource.RLIM_INFINITY)
    return min((limit for limit in limits if limit > 0), default=None)
