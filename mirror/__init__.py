"""Synchronous data-parallel training for JAX, in the style of `tf.distribute.MirroredStrategy`.

Write the training step for one replica; `mirror` runs it on every GPU of the machine, or on CPU
devices on a laptop and in CI, and keeps all copies of the model identical.

    strategy = mirror.MirroredStrategy()
    with strategy.scope():
        model = CNN(rngs=nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)

    def step(model, optimizer, batch):  # runs on every replica, with its shard of the batch
        loss, grads = nnx.value_and_grad(loss_fn)(model, batch)
        grads, loss = mirror.all_reduce("mean", (grads, loss))
        optimizer.update(model, grads)
        return loss

    for batch in strategy.distribute_dataset(dataset):
        loss = strategy.run(step, (model, optimizer, batch))

- **Replicas cannot diverge.** Each step is traced and checked first. A missing all-reduce is an
  error that names the parameter.
- **No deadlocks.** A collective in a branch that replicas may take differently is rejected at trace
  time, and the number of launches in flight is bounded.
- **Exact for any batch size.** `mirror.Trainer` counts every example once, including those in the
  last batch.
- **Verifiable.** `strategy.verify(step, args)` compares n replicas with one device.

Glossary:

- **replica**: One of the n copies of the step that run at the same time, each on its own device and
  with its own shard of the batch. n is `strategy.num_replicas_in_sync`.
- **mirrored**: Identical on all replicas, with one copy per device, such as the parameters of a
  model. A mirrored value is a plain `jax.Array`.
- **per-replica**: Possibly different on every replica, such as a batch. Outside a step, a
  per-replica value is a `PerReplica`; inside, it is this replica's array.
- **shard**: The slice of an array that belongs to one replica or is stored on one device.
- **collective**: An operation in which all replicas take part, such as all-reduce or all-gather.
- **cross-device ops**: An object that implements the collectives: `AllReduce`,
  `ReductionToOneDevice`, or a subclass of `CrossDeviceOps`.
- **replica context**: The state of being inside a step that `strategy.run` executes.
  `get_replica_context()` returns the replica's id; `all_reduce` and `all_gather` are its
  collectives.
- **cross-replica context**: The state of being inside `strategy.scope()`, but outside a step. Code
  runs once for all replicas, and arrays are created mirrored.
- **donate**: To let a step reuse the memory of an argument for its results. A donated array is
  deleted and must not be used again. The nnx variables that a step changes are always donated,
  and updated in place.
- **physical device, logical device**: A CPU or GPU of the machine, and a device that JAX places
  computations on. A CPU can be split into several logical devices; see `mirror.config`.
"""

from typing import TYPE_CHECKING as _TYPE_CHECKING

from mirror._src.base.public_names import make_lazy as _make_lazy
from mirror._version import __version__ as __version__

# JAX, Flax and Optax take a second to import, which `mirror --help` and pytest need not wait for.
_make_lazy()

if _TYPE_CHECKING:
    from mirror import callbacks as callbacks
    from mirror import config as config
    from mirror import data as data
    from mirror import debugging as debugging
    from mirror import distributed as distributed
    from mirror import ps as ps
    from mirror import testing as testing
    from mirror._public import *  # noqa: F403
