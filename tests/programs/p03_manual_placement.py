"""Creates two matrices on the CPU and multiplies them on the default device."""

import jax.numpy as jnp

import mirror

mirror.debugging.set_log_device_placement(True)

# Place the matrices on the CPU.
with mirror.device("/CPU:0"):
    a = jnp.array([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    b = jnp.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])

# Run on the GPU, if there is one. They are copied by themselves.
c = a @ b

print(c)
print(mirror.debugging.visualize_placement({"a": a, "b": b, "c": c}))
