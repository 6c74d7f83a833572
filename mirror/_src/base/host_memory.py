"""The memory that this process can use."""

import contextlib
import os
from pathlib import Path

_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def host_memory() -> int | None:
    """Returns the bytes of memory of the machine, or of the container; `None` if unknown."""
    limits = []
    with contextlib.suppress(AttributeError, ValueError, OSError):  # not on Windows
        limits.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    for file in _LIMITS:
        with contextlib.suppress(OSError, ValueError):  # "max"
            limits.append(int(Path(file).read_text(encoding="utf-8")))
    return min(limits, default=None)
