"""Computes a product on each device, and the sum of all on the CPU."""

import jax.numpy as jnp

import mirror

mirror.debugging.set_log_device_placement(True)

towers = mirror.config.list_logical_devices("GPU") or mirror.config.list_logical_devices("CPU")
c = []
for tower in towers:
    with mirror.device(tower):
        a = jnp.array([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
        b = jnp.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
        c.append(a @ b)

with mirror.device("/CPU:0"):
    total = mirror.add_n(c)

print(total)
