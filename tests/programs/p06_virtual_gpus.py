"""Limits a GPU to 1024 MiB, or splits it in several of 1024 MiB; without a GPU it splits the CPU.

Usage: p06_virtual_gpus.py [PARTS]
"""

import sys

import jax.numpy as jnp

import mirror

parts = int(sys.argv[1]) if len(sys.argv) > 1 else 2
gpus = mirror.config.list_physical_devices("GPU")
if gpus:
    # XLA knows one limit for all GPUs: the others stay out.
    mirror.config.set_visible_devices(gpus[0], "GPU")
    limits = [mirror.config.LogicalDeviceConfiguration(memory_limit=1024)] * parts
    mirror.config.set_logical_device_configuration(gpus[0], limits)
else:
    (cpu,) = mirror.config.list_physical_devices("CPU")
    split = [mirror.config.LogicalDeviceConfiguration()] * parts
    mirror.config.set_logical_device_configuration(cpu, split)

logical_gpus = mirror.config.list_logical_devices("GPU")
print(len(gpus), "Physical GPUs,", len(logical_gpus), "Logical GPUs")
for device in logical_gpus:
    print(device.name, mirror.config.get_memory_info(device)["limit"] / 2**20, "MiB")

# They are replicas like any others.
strategy = mirror.MirroredStrategy(logical_gpus or mirror.config.list_logical_devices("CPU"))


def step():
    context = mirror.get_replica_context()
    return context.all_reduce("sum", jnp.float32(context.replica_id_in_sync_group + 1))


print(strategy)
print("Sum over the replicas:", strategy.run(step))
