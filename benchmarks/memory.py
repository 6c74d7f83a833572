"""Memory: how many copies of the state a device holds, and whether donated buffers are reused."""

import math
from typing import Any

import jax

from benchmarks.jax_contender import JaxContender, Placement
from benchmarks.models import BY_NAME
from benchmarks.through_mirror import mirror_nnx, strategy_over

_STEPS = 5


def live_bytes(device: jax.Device) -> int:
    """Bytes of all arrays on the device that are alive."""
    return sum(
        math.prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize
        for array in jax.live_arrays()
        if device in array.sharding.device_set
    )


def state_of(contender: JaxContender) -> list[Any]:
    """The arrays of the state."""
    return jax.tree.leaves(contender.arrays()[0])


def buffers(contender: JaxContender) -> set[int]:
    """Where the state's buffers lie, on all devices."""
    return {
        shard.data.unsafe_buffer_pointer()
        for leaf in state_of(contender)
        for shard in leaf.addressable_shards
    }


def copies(contender: JaxContender, place: Placement, others: int, size: int) -> float:
    """How often the state is on the fullest device, `others` bytes being something else."""
    jax.block_until_ready(contender.arrays())
    return (max(map(live_bytes, place.devices)) - others) / size


def measure_memory(name: str, num_devices: int) -> dict[str, Any]:
    """The bytes of one state, copies of it before and after some steps, and buffers reused."""
    strategy, model = strategy_over(num_devices), BY_NAME[name]
    place = Placement(num_devices)
    batch = sum(leaf.nbytes for leaf in jax.tree.leaves(model.batch())) // num_devices
    others = max(map(live_bytes, place.devices)) + batch
    contender = mirror_nnx(model, strategy)
    size = sum(leaf.nbytes for leaf in state_of(contender))
    before = copies(contender, place, others, size)
    contender.advance(_STEPS)
    settled = buffers(contender)
    contender.advance(_STEPS)
    after = copies(contender, place, others, size)
    reused = len(settled & buffers(contender)) / len(settled)
    return {"state_bytes": size, "copies": [before, after], "reused": reused}
