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
- exchange: the point in a step where replicas talk: all-reduce, all-gather.
- cross-device ops: who carries an exchange out.
"""

from mirror import callbacks as callbacks
from mirror import config as config
from mirror import data as data
from mirror import debugging as debugging
from mirror._errors import InvalidDeviceError as InvalidDeviceError
from mirror._errors import ReplicaDivergenceError as ReplicaDivergenceError
from mirror._errors import ReplicaMismatchError as ReplicaMismatchError
from mirror._types import REPLICA_AXIS as REPLICA_AXIS
from mirror._version import __version__ as __version__
from mirror.checks import VerifyReport as VerifyReport
from mirror.context import ReplicaContext as ReplicaContext
from mirror.context import has_strategy as has_strategy
from mirror.context import in_cross_replica_context as in_cross_replica_context
from mirror.cross_device_ops import AllReduce as AllReduce
from mirror.cross_device_ops import CrossDeviceOps as CrossDeviceOps
from mirror.cross_device_ops import ReduceOp as ReduceOp
from mirror.cross_device_ops import ReductionToOneDevice as ReductionToOneDevice
from mirror.data.distribute import DistributedDataset as DistributedDataset
from mirror.data.distribute import InputContext as InputContext
from mirror.devices.placement import add_n as add_n
from mirror.devices.placement import device as device
from mirror.explain.program import ProgramReport as ProgramReport
from mirror.explain.report import Explanation as Explanation
from mirror.mirrored import MirroredStrategy as MirroredStrategy
from mirror.mirrored import OneDeviceStrategy as OneDeviceStrategy
from mirror.mirrored import get_replica_context as get_replica_context
from mirror.mirrored import get_strategy as get_strategy
from mirror.parallel import DataParallel as DataParallel
from mirror.program.ensure import ensure_mirrored as ensure_mirrored
from mirror.randomness import example_keys as example_keys
from mirror.strategy import Strategy as Strategy
from mirror.strategy import ValueContext as ValueContext
from mirror.training.checkpoint import load_checkpoint as load_checkpoint
from mirror.training.history import History as History
from mirror.training.objective import Weighted as Weighted
from mirror.training.trainer import Trainer as Trainer
from mirror.values import PerReplica as PerReplica
from mirror.variables import Variable as Variable
