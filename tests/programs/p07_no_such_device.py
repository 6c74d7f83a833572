"""Selects a missing device, with strict and then with soft placement."""

import jax.numpy as jnp

import mirror

mirror.debugging.set_log_device_placement(True)


def multiply():
    with mirror.device("/device:GPU:2"):
        a = jnp.array([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
        b = jnp.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
        return a @ b


try:
    print(multiply())
except RuntimeError as error:
    print(error)

mirror.config.set_soft_device_placement(True)
c = multiply()

print(c)
