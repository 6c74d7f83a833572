"""Memory of a device: copies of the state, reused buffers, and sharded optimizer state."""

import math
from collections.abc import Sequence
from typing import Any

import jax

import mirror
from benchmarks.by_hand import nnx_step
from benchmarks.devices import is_on_host, names_of
from benchmarks.jax_contender import JaxContender, ObjectsContender, Placement
from benchmarks.models import BY_NAME
from benchmarks.through_mirror import mirror_nnx, mirror_plain, mirrored_mean, strategy_over

_STEPS = 5


def live_bytes(device: jax.Device) -> int:
    """Returns the bytes of all live arrays on a device."""
    return sum(
        math.prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize
        for array in jax.live_arrays()
        if device in array.sharding.device_set
    )


def state_of(contender: JaxContender) -> list[Any]:
    """Returns the arrays of the state."""
    return jax.tree.leaves(contender.arrays()[0])


def buffers(contender: JaxContender) -> set[int]:
    """Returns the addresses of the state's buffers on all devices."""
    return {
        shard.data.unsafe_buffer_pointer()
        for leaf in state_of(contender)
        for shard in leaf.addressable_shards
    }


def copies(contender: JaxContender, place: Placement, others: int, size: int) -> float:
    """Returns the number of copies of the state on the fullest device, without `others` bytes."""
    jax.block_until_ready(contender.arrays())
    return (max(map(live_bytes, place.devices)) - others) / size


def device_bytes(leaf: jax.Array, device: jax.Device) -> int:
    """Returns the bytes of an array on a device."""
    return sum(shard.data.nbytes for shard in leaf.addressable_shards if shard.device == device)


def least_share(leaves: Sequence[jax.Array], num_devices: int) -> float:
    """Returns the least fraction of the leaves that a device must store.

    A leaf is sharded if `num_devices` divides one of its axes. A step counter or a bias of 10 is
    not.
    """
    shard_bytes = [
        leaf.nbytes / num_devices
        if any(d and d % num_devices == 0 for d in leaf.shape)
        else leaf.nbytes
        for leaf in leaves
    ]
    return sum(shard_bytes) / sum(leaf.nbytes for leaf in leaves)


def measure_sharded(name: str, num_devices: int) -> dict[str, float]:
    """Returns the fraction of the optimizer state on the fullest device in slices."""
    strategy = mirror.MirroredStrategy(names_of(num_devices), shard="optimizer")
    contender = mirror_plain(BY_NAME[name], strategy)
    contender.advance(_STEPS)
    state, _ = contender.arrays()
    moments = jax.tree.leaves(state["moments"])
    devices = Placement(num_devices).devices
    fullest = max(sum(device_bytes(leaf, device) for leaf in moments) for device in devices)
    share = fullest / sum(leaf.nbytes for leaf in moments)
    return {"share": share, "least": least_share(moments, num_devices)}


def measure_peak(
    strategy: mirror.Strategy, contender: ObjectsContender, device: jax.Device
) -> dict[str, int | None]:
    """Returns the peak of the memory that JAX reports, if it does, and mirror's estimate.

    The peak counts all models that the process has measured, and XLA's search for fast kernels.
    """
    stats = device.memory_stats()
    explained = strategy.explain(nnx_step(mirrored_mean), contender.args, steps=1)
    reported = None if stats is None else stats["peak_bytes_in_use"]
    return {"reported": reported, "estimate": explained.memory.peak_bytes}


def measure_memory(name: str, num_devices: int) -> dict[str, Any]:
    """Measures the memory of a device, by default and in slices.

    Returns:
        `state_bytes`, the size of the state; `copies`, the number of copies before and after some
        steps; `reused`, the fraction of buffers that are reused; with several devices `sharded`:
        `share`, the fraction of the optimizer state on the fullest device, and `least`, the least
        possible fraction; in the suite `gpu` the `peak`.
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
    result = {"state_bytes": size, "copies": [before, after], "reused": reused}
    if not is_on_host():
        result["peak"] = measure_peak(strategy, contender, place.devices[0])
    if num_devices == 1:
        return result
    return {**result, "sharded": measure_sharded(name, num_devices)}
