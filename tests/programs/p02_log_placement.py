"""Logs the device of each op."""

import jax.numpy as jnp

import mirror

mirror.debugging.set_log_device_placement(True)

a = jnp.array([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
b = jnp.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
c = a @ b

print(c)
