"""MirroredStrategy for JAX: write the step for one replica, train in step on every device.

    strategy = mirror.MirroredStrategy()
    with strategy.scope():
        model = CNN(rngs=nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)

    def step(model, optimizer, batch):  # for one replica
        loss, grads = nnx.value_and_grad(loss_fn)(model, batch)
        context = mirror.get_replica_context()
        grads, loss = context.all_reduce("mean", (grads, loss))
        optimizer.update(model, grads)
        return loss

    for batch in strategy.distribute_dataset(dataset):
        loss = strategy.run(step, (model, optimizer, batch))

The words, as they are used everywhere:

- physical device: a CPU or a GPU of this machine. Logical device: what computations are placed on.
- replica: one copy of the step function, on one device; `num_replicas_in_sync` of them.
- mirrored value: the same on every replica. A plain `jax.Array`, nothing else.
- per-replica value: may differ between replicas. A `PerReplica`.
- replica context: inside a function that `run` runs. Cross-replica context: inside `scope()`,
  outside `run`.
- `config`: the devices there are, and their settings before JAX starts. `device(name)`: where eager
  ops run. `debugging`: looking at what runs and lies where.
- collective: the point in a step where replicas communicate: all-reduce, all-gather.
- cross-device ops: who carries a collective out.
"""

from mirror import callbacks as callbacks
from mirror import config as config
from mirror import data as data
from mirror import debugging as debugging
from mirror import testing as testing
from mirror._src.checks.verify import VerifyReport as VerifyReport
from mirror._src.collectives.all_reduce import AllReduce as AllReduce
from mirror._src.collectives.cross_device_ops import CrossDeviceOps as CrossDeviceOps
from mirror._src.collectives.one_device import ReductionToOneDevice as ReductionToOneDevice
from mirror._src.collectives.reduce_op import ReduceOp as ReduceOp
from mirror._src.context.example_keys import example_keys as example_keys
from mirror._src.context.replica_context import ReplicaContext as ReplicaContext
from mirror._src.context.scopes import has_strategy as has_strategy
from mirror._src.context.scopes import in_cross_replica_context as in_cross_replica_context
from mirror._src.data.distribute import DistributedDataset as DistributedDataset
from mirror._src.data.distribute import InputContext as InputContext
from mirror._src.devices.placement import add_n as add_n
from mirror._src.devices.placement import device as device
from mirror._src.explain.program import ProgramReport as ProgramReport
from mirror._src.explain.report import Explanation as Explanation
from mirror._src.program.ensure import ensure_mirrored as ensure_mirrored
from mirror._src.strategy.data_parallel import DataParallel as DataParallel
from mirror._src.strategy.mirrored import MirroredStrategy as MirroredStrategy
from mirror._src.strategy.mirrored import OneDeviceStrategy as OneDeviceStrategy
from mirror._src.strategy.mirrored import get_replica_context as get_replica_context
from mirror._src.strategy.mirrored import get_strategy as get_strategy
from mirror._src.strategy.strategy import Strategy as Strategy
from mirror._src.strategy.strategy import ValueContext as ValueContext
from mirror._src.training.checkpoints.load import load_checkpoint as load_checkpoint
from mirror._src.training.history import History as History
from mirror._src.training.objective import Weighted as Weighted
from mirror._src.training.trainer import Trainer as Trainer
from mirror._src.utils.errors import InvalidDeviceError as InvalidDeviceError
from mirror._src.utils.errors import ReplicaDivergenceError as ReplicaDivergenceError
from mirror._src.utils.errors import ReplicaMismatchError as ReplicaMismatchError
from mirror._src.utils.types import REPLICA_AXIS as REPLICA_AXIS
from mirror._src.values.per_replica import PerReplica as PerReplica
from mirror._src.variables.variable import Variable as Variable
from mirror._version import __version__ as __version__


def __dir__() -> list[str]:
    return sorted(name for name in globals() if not name.startswith("_"))
