"""Memory: copies of the state on a device, buffers reused, and the sharded optimizer state."""

import math
from collections.abc import Sequence
from typing import Any

import jax

import mirror
from benchmarks.jax_contender import JaxContender, Placement
from benchmarks.models import BY_NAME
from benchmarks.through_mirror import mirror_nnx, mirror_plain, names_of, strategy_over

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


def device_bytes(leaf: jax.Array, device: jax.Device) -> int:
    """Bytes of the array on the device."""
    return sum(shard.data.nbytes for shard in leaf.addressable_shards if shard.device == device)


def least_share(leaves: Sequence[jax.Array], num_devices: int) -> float:
    """The part of the leaves that a device holds where all that can be sharded evenly is.

    A leaf without an axis that `num_devices` divides stays whole: a step counter, a bias of 10.
    """
    held = [
        leaf.nbytes / num_devices
        if any(d and d % num_devices == 0 for d in leaf.shape)
        else leaf.nbytes
        for leaf in leaves
    ]
    return sum(held) / sum(leaf.nbytes for leaf in leaves)


def measure_sharded(name: str, num_devices: int) -> dict[str, float]:
    """The optimizer state's part on the fullest device, with `shard_update`, after some steps."""
    strategy = mirror.MirroredStrategy(names_of(num_devices), shard_update=True)
    contender = mirror_plain(BY_NAME[name], strategy)
    contender.advance(_STEPS)
    state, _ = contender.arrays()
    moments = jax.tree.leaves(state["moments"])
    devices = Placement(num_devices).devices
    fullest = max(sum(device_bytes(leaf, device) for leaf in moments) for device in devices)
    share = fullest / sum(leaf.nbytes for leaf in moments)
    return {"share": share, "least": least_share(moments, num_devices)}


def measure_memory(name: str, num_devices: int) -> dict[str, Any]:
    """What a device holds, by default and with `shard_update`.

    Returns:
        `state_bytes`, of one state; `copies` of it before and after some steps; `reused`, the part
        of its buffers that are reused; `sharded`, with `share`, the optimizer state's part on the
        fullest device, and `least`, what it can be. One device has nothing to shard.
    """
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
    found = {"state_bytes": size, "copies": [before, after], "reused": reused}
    if num_devices == 1:
        return found
    return {**found, "sharded": measure_sharded(name, num_devices)}
