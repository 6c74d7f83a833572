"""`shard="auto"`: stores the state in the first way in which a step fits in a device's memory."""

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax

from mirror._src.base.errors import bytes_in_words
from mirror._src.base.host_memory import host_memory
from mirror._src.devices import backend
from mirror._src.devices.described import memory_of
from mirror._src.devices.replicas import ReplicaDevices
from mirror._src.engine import choice
from mirror._src.engine.program import StepProgram

_USED = 0.9  # of the memory; the rest is for batches that are loaded ahead, and for gaps


class Choice(NamedTuple):
    """A way to store the state.

    Attributes:
        slice_bytes: See `ReplicaDevices`.
        kept_bytes: Bytes of gathered weights that are kept, as for the passes' `Settings`.
        why: The choice and its reason, in a sentence.
    """

    slice_bytes: float | None
    kept_bytes: int | None
    why: str


def fitting(
    make: Callable[[float | None, int | None], StepProgram], replicas: ReplicaDevices
) -> Choice:
    """Returns how to store the state; it has made the program for it.

    Args:
        make: Returns the program of the step, compiled, for `slice_bytes` and `kept_bytes`.
        replicas: Devices of the replicas.
    """
    limit, of = _limit(replicas), ""
    if limit is None:
        make(None, None)
        return Choice(None, None, "none, because the memory of the devices is unknown")
    because = ""
    ways = {"none": None, "optimizer": math.inf, "model": choice.SLICE_BYTES}
    for way, slice_bytes in ways.items():
        program = make(slice_bytes, None)
        count = program.compiled.peak_bytes
        if count is None:
            return Choice(None, None, "none, because XLA does not say how much memory it needs")
        if count <= limit:
            why = f"{way}{because}; it needs {bytes_in_words(count)}"
            kept = _most_kept(make, program, limit - count) if way == "model" else None
            if kept is not None:
                why += f", and keeps {bytes_in_words(kept)} of gathered weights"
            return Choice(slice_bytes, kept, why)
        of = f"{bytes_in_words(count)} of {bytes_in_words(limit)}"
        because = f", because {way} needs {of} on each device"
    return Choice(choice.SLICE_BYTES, None, f"model, although it needs {of} on each device")


def _most_kept(
    make: Callable[[float | None, int | None], StepProgram], program: StepProgram, room: int
) -> int | None:
    """Returns how many bytes of gathered weights fit, too. Each needs as much memory once."""
    gathered = list(_gathered(program))
    least, most = max(gathered, default=0), sum(gathered)
    kept = min(least + room, most)
    if kept <= least:
        return None
    count = make(choice.SLICE_BYTES, kept).compiled.peak_bytes
    before = program.compiled.peak_bytes
    return kept if count is not None and before is not None and count <= before + room else None


def _gathered(program: StepProgram) -> Iterator[int]:
    """Yields the bytes of each weight that the program gathers, once."""
    parts = {}
    for operation in program.final.everywhere():
        if operation.kind == "gather":
            parts[operation.inputs[0]] = operation.outputs[0].num_bytes
    yield from parts.values()


def usable_bytes(device: jax.Device) -> int | None:
    """Returns the bytes of a device that programs may use; `None` if it does not report them."""
    memory = memory_of(device) or (device.memory_stats() or {}).get("bytes_limit")
    return None if memory is None else int(_USED * memory)


def _limit(replicas: ReplicaDevices) -> int | None:
    """Returns the bytes that a program may use on each device; `None` if they are unknown."""
    if backend.type_of(replicas.devices[0]) == "CPU":  # host devices share the memory
        memory = host_memory()
        return None if memory is None else int(_USED * (memory // len(replicas.distinct)))
    limits = list(map(usable_bytes, replicas.distinct))
    return None if None in limits else min(filter(None, limits))
