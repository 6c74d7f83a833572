"""Measures the cost of checkpoints that survive a power failure.

    python -m benchmarks.saves                       # 10 MB and 1 GB, on the disk of this directory
    python -m benchmarks.saves --megabytes 10 --directory /mnt/disk --rounds 30

It saves with and without `fsync`, in turns in one process. The file system decides the result: on
one in memory, such as /dev/shm, `fsync` does nothing.
"""

import argparse
import contextlib
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import jax
import numpy as np

from benchmarks import stats
from benchmarks.timing import in_order
from mirror._src.training.checkpoints.store import CheckpointStore

SYNCED, UNSYNCED = "durable", "without fsync"
CONTINUES, IS_DURABLE = "until training continues", "until it is durable"
_ARRAYS = 8
_WARMUPS = 2


def arrays_of(num_bytes: int) -> dict[str, np.ndarray]:
    """Returns random bits, which cannot be compressed, like trained weights."""
    draw = np.random.default_rng(0)
    length = num_bytes // 4 // _ARRAYS
    return {f"w{i}": draw.integers(0, 2**32, length, np.uint32) for i in range(_ARRAYS)}


@contextlib.contextmanager
def unsynced() -> Iterator[None]:
    """Context manager in which a save does not wait for the disk."""
    with mock.patch.object(os, "fsync", return_value=None):
        yield


def seconds(store: CheckpointStore, step: int, arrays: dict[str, np.ndarray]) -> tuple[float, ...]:
    """Returns the times until `save` has returned, and until the checkpoint is complete."""
    start = time.perf_counter()
    store.save(step, arrays, {})
    returned = time.perf_counter()
    store.wait()
    return returned - start, time.perf_counter() - start


def measure(
    directory: Path, num_bytes: int, rounds: int, *, asynchronous: bool
) -> dict[str, dict[str, list[float]]]:
    """Returns seconds by moment and arm, one number per round."""
    arrays, step = arrays_of(num_bytes), 0
    times: dict[str, dict[str, list[float]]] = {
        moment: {SYNCED: [], UNSYNCED: []} for moment in (CONTINUES, IS_DURABLE)
    }
    with CheckpointStore(directory, keep_last=1, asynchronous=asynchronous) as store:
        for number in range(-_WARMUPS, rounds):
            for arm in in_order([SYNCED, UNSYNCED], number):
                step += 1
                with contextlib.nullcontext() if arm == SYNCED else unsynced():
                    found = seconds(store, step, arrays)
                if number >= 0:
                    for moment, secs in zip(times, found, strict=True):
                        times[moment][arm].append(secs)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, nargs="+", default=[10, 1000])
    parser.add_argument("--directory", type=Path, default=Path.cwd())
    parser.add_argument("--rounds", type=int, help="30, and 5 from 1 GB")
    options = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    print(f"{'':42}{SYNCED:>12}{UNSYNCED:>16}   ratio")
    for megabytes in options.megabytes:
        rounds = options.rounds or (30 if megabytes < 1000 else 5)
        for asynchronous in (False, True):
            with tempfile.TemporaryDirectory(dir=options.directory) as name:
                path = Path(name)
                times = measure(path, megabytes * 10**6, rounds, asynchronous=asynchronous)
            kind = "asynchronous" if asynchronous else "synchronous"
            for moment, arms in times.items():
                synced, unsynced_ = (stats.median([arms[arm]]) for arm in (SYNCED, UNSYNCED))
                found = stats.ratio(arms, SYNCED, UNSYNCED)
                print(
                    f"{megabytes} MB, {kind}, {moment}".ljust(50)
                    + f"{synced * 1e3:9.1f} ms{unsynced_ * 1e3:9.1f} ms   "
                    + f"{found.median:.2f} [{found.low:.2f}, {found.high:.2f}]",
                    flush=True,
                )


if __name__ == "__main__":
    main()
