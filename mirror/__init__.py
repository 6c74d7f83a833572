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
  deleted and must not be used again. Models and optimizers are always donated, and updated in
  place.
- **physical device, logical device**: A CPU or GPU of the machine, and a device that JAX places
  computations on. A CPU can be split into several logical devices; see `mirror.config`.
"""

from typing import TYPE_CHECKING as _TYPE_CHECKING

from mirror import callbacks as callbacks
from mirror import config as config
from mirror import data as data
from mirror import debugging as debugging
from mirror import distributed as distributed
from mirror import testing as testing
from mirror._src.base.errors import InvalidDeviceError as InvalidDeviceError
from mirror._src.base.errors import ProgramMismatchError as ProgramMismatchError
from mirror._src.base.errors import ReplicaDivergenceError as ReplicaDivergenceError
from mirror._src.base.errors import VerifyError as VerifyError
from mirror._src.base.lazy_names import LAZY_MODULE as _LAZY_MODULE
from mirror._src.base.types import REPLICA_AXIS as REPLICA_AXIS
from mirror._src.base.unknown_names import explain_unknown_names as _explain_unknown_names
from mirror._src.data.distribute import DistributedDataset as DistributedDataset
from mirror._src.data.distribute import InputContext as InputContext
from mirror._src.devices.launches import StalledError as StalledError
from mirror._src.devices.placement import add_n as add_n
from mirror._src.devices.placement import device as device
from mirror._src.engine.all_reduce import AllReduce as AllReduce
from mirror._src.engine.cross_device_ops import CrossDeviceOps as CrossDeviceOps
from mirror._src.engine.example_keys import example_keys as example_keys
from mirror._src.engine.example_mask import example_mask as example_mask
from mirror._src.engine.one_device import ReductionToOneDevice as ReductionToOneDevice
from mirror._src.engine.per_replica import PerReplica as PerReplica
from mirror._src.engine.reduce_op import ReduceOp as ReduceOp
from mirror._src.engine.replica_context import ReplicaContext as ReplicaContext
from mirror._src.engine.scopes import has_strategy as has_strategy
from mirror._src.engine.scopes import in_cross_replica_context as in_cross_replica_context
from mirror._src.engine.variable import Variable as Variable
from mirror._src.inspection.explanation import Explanation as Explanation
from mirror._src.inspection.program_report import ProgramReport as ProgramReport
from mirror._src.inspection.verify import VerifyReport as VerifyReport
from mirror._src.jaxprs.ensure import ensure_mirrored as ensure_mirrored
from mirror._src.strategy.current_replica import all_gather as all_gather
from mirror._src.strategy.current_replica import all_reduce as all_reduce
from mirror._src.strategy.data_parallel import DataParallel as DataParallel
from mirror._src.strategy.mirrored import MirroredStrategy as MirroredStrategy
from mirror._src.strategy.mirrored import OneDeviceStrategy as OneDeviceStrategy
from mirror._src.strategy.mirrored import get_replica_context as get_replica_context
from mirror._src.strategy.mirrored import get_strategy as get_strategy
from mirror._src.strategy.multi_worker import (
    MultiWorkerMirroredStrategy as MultiWorkerMirroredStrategy,
)
from mirror._src.strategy.strategy import Strategy as Strategy
from mirror._src.strategy.strategy import ValueContext as ValueContext
from mirror._src.training.checkpoints.load import load_checkpoint as load_checkpoint
from mirror._src.training.history import History as History
from mirror._src.training.loss_scale import LossScale as LossScale
from mirror._src.training.trainer import Trainer as Trainer
from mirror._src.training.weighted import Weighted as Weighted
from mirror._version import __version__ as __version__

_explain_unknown_names(
    "mirror",
    *(
        f"mirror.{name}"
        for name in ("callbacks", "config", "data", "debugging", "distributed", "testing")
    ),
)


if _TYPE_CHECKING:
    from mirror import ps as ps


def __dir__() -> list[str]:
    names = {*globals(), _LAZY_MODULE}
    return sorted(n for n in names if n.isidentifier() and not n.startswith("_"))
