"""Settings of glibc's `malloc`, which allocates the memory of host devices.

XLA:CPU allocates the temporaries of a step at its start and frees them at its end. By default,
glibc returns blocks of more than 32 MiB, and free memory at the end of a heap, to the kernel, which
clears and maps each page again in the next step: a step of a MobileNet-like net takes 1.8 times as
long on one device (glibc 2.36, JAX 0.10.2). JAX has no setting for it. Larger blocks than here stay
as they are: a thread's heap has no place for them, and large arrays of NumPy should be returned.
"""

import ctypes
import functools
import os
import sys

_VARIABLES = "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_"
_MMAP_THRESHOLD, _TRIM_THRESHOLD, _TOP_PAD = -3, -1, -2  # of malloc.h
_MIB = 2**20


@functools.cache
def keep_freed_memory() -> None:
    """Lets this process keep freed blocks of up to 64 MiB, unless the user has set what it keeps.

    Other C libraries have no such settings.
    """
    mallopt = sys.platform == "linux" and getattr(ctypes.CDLL(None), "mallopt", None)
    is_set = "glibc.malloc." in os.environ.get("GLIBC_TUNABLES", "")
    if not mallopt or is_set or any(name in os.environ for name in _VARIABLES):
        return
    # Before glibc 2.35, at most 32 MiB. A thread's heap of 64 MiB that is empty is returned unless
    # heaps are padded by as much.
    if mallopt(_MMAP_THRESHOLD, 64 * _MIB) or mallopt(_MMAP_THRESHOLD, 32 * _MIB):
        mallopt(_TRIM_THRESHOLD, 256 * _MIB)
        mallopt(_TOP_PAD, 64 * _MIB)
