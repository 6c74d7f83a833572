"""The sharded executor: one replica per device, with state sharded over the devices.

It uses `jit(shard_map)`, because the axes of `jax.pmap` cannot express that an array is sharded.
"""

from typing import final

from mirror._src.engine.shard_map import ShardMapExecutor


@final
class ShardedExecutor(ShardMapExecutor):
    """Runs replica programs with one replica per device and sharded weight updates."""

    can_shard = True
