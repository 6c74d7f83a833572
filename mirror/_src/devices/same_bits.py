"""A comparison of devices by bits, before they train a fixed number of replicas.

One small program computes the same values on each device of the process, by the operations of which
models consist. The digest of the results is also compared between processes.
"""

import functools
import hashlib

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mirror._src.base.naming import warn_user
from mirror._src.base.types import Array
from mirror._src.devices.backend import names, type_of

_AXIS = "devices"
# Otherwise each process searches for the fastest kernels, and gradients are added by atomics.
OPTIONS_ON_GPUS = {"xla_gpu_deterministic_ops": True}


def computed(x: Array) -> Array:
    """Returns sums of products and elementary functions of a square array."""
    half = x.astype(jnp.bfloat16)
    y = jnp.tanh(x @ x) + jnp.exp(-jnp.abs((half @ half).astype(x.dtype)))
    return jnp.sum(y * jax.lax.rsqrt(1 + x**2), 0)


@functools.cache
def digest_of(devices: tuple[jax.Device, ...]) -> str:
    """Returns the digest of what the first device computes; warns if another one differs."""
    mesh = Mesh(np.asarray(devices), (_AXIS,))
    rows = PartitionSpec(_AXIS)
    of_device = lambda x: computed(x[0])[None]  # noqa: E731
    fn = jax.shard_map(of_device, mesh=mesh, in_specs=rows, out_specs=rows)
    x = np.random.RandomState(0).randn(1, 128, 128).astype(np.float32)
    shape, sharding = (len(devices), *x.shape[1:]), NamedSharding(mesh, rows)
    # In a job of several processes, `jit` rejects a NumPy array.
    everyone = jax.make_array_from_callback(shape, sharding, lambda _: x)
    options = OPTIONS_ON_GPUS if type_of(devices[0]) == "GPU" else None
    first, *others = np.asarray(jax.jit(fn, compiler_options=options)(everyone))
    wrong = [
        d for d, row in zip(devices[1:], others, strict=True) if row.tobytes() != first.tobytes()
    ]
    if wrong:
        warn_user(
            f"{names(wrong)} computes other bits than {names(devices[:1])}, so that replicas= does "
            "not give the same bits on any number of devices. Use devices of one model; if they "
            "are, test their memory."
        )
    return hashlib.sha256(first.tobytes()).hexdigest()[:8]
