"""The public names of `mirror`, imported together when a program first uses one of them."""

from mirror._src.base.errors import InvalidDeviceError as InvalidDeviceError
from mirror._src.base.errors import ProgramMismatchError as ProgramMismatchError
from mirror._src.base.errors import ReplicaDivergenceError as ReplicaDivergenceError
from mirror._src.base.errors import VerifyError as VerifyError
from mirror._src.base.tracebacks import make_public as _make_public
from mirror._src.base.types import REPLICA_AXIS as REPLICA_AXIS
from mirror._src.data.distribute import DistributedDataset as DistributedDataset
from mirror._src.data.distribute import InputContext as InputContext
from mirror._src.devices.launches import StalledError as StalledError
from mirror._src.devices.placement import add_n as add_n
from mirror._src.devices.placement import device as device
from mirror._src.engine.all_reduce import AllReduce as AllReduce
from mirror._src.engine.all_reduce import ReductionToOneDevice as ReductionToOneDevice
from mirror._src.engine.cross_device_ops import CrossDeviceOps as CrossDeviceOps
from mirror._src.engine.examples import example_keys as example_keys
from mirror._src.engine.examples import example_mask as example_mask
from mirror._src.engine.per_replica import PerReplica as PerReplica
from mirror._src.engine.reduce_op import ReduceOp as ReduceOp
from mirror._src.engine.replica_context import ReplicaContext as ReplicaContext
from mirror._src.engine.replica_context import has_strategy as has_strategy
from mirror._src.engine.replica_context import in_cross_replica_context as in_cross_replica_context
from mirror._src.engine.variable import Variable as Variable
from mirror._src.inspection.equality import EqualityReport as EqualityReport
from mirror._src.inspection.equality import per_replica_on_purpose as per_replica_on_purpose
from mirror._src.inspection.explanation import Explanation as Explanation
from mirror._src.inspection.program_report import ProgramReport as ProgramReport
from mirror._src.inspection.verify import VerifyReport as VerifyReport
from mirror._src.jaxprs.marks import ensure_mirrored as ensure_mirrored
from mirror._src.strategy.current_replica import all_gather as all_gather
from mirror._src.strategy.current_replica import all_reduce as all_reduce
from mirror._src.strategy.data_parallel import DataParallel as DataParallel
from mirror._src.strategy.mirrored import MirroredStrategy as MirroredStrategy
from mirror._src.strategy.mirrored import (
    MultiWorkerMirroredStrategy as MultiWorkerMirroredStrategy,
)
from mirror._src.strategy.mirrored import get_replica_context as get_replica_context
from mirror._src.strategy.mirrored import get_strategy as get_strategy
from mirror._src.strategy.strategy import OneDeviceStrategy as OneDeviceStrategy
from mirror._src.strategy.strategy import Strategy as Strategy
from mirror._src.strategy.strategy import ValueContext as ValueContext
from mirror._src.training.checkpoints.directory import load_checkpoint as load_checkpoint
from mirror._src.training.history import History as History
from mirror._src.training.metric import Metric as Metric
from mirror._src.training.metric import Weighted as Weighted
from mirror._src.training.precision import LossScale as LossScale
from mirror._src.training.trainer import Trainer as Trainer

_make_public("mirror._public")
