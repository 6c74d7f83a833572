"""Parameter servers: variables on servers, and functions that workers run.

Requires the extra `ray`. Imported when a program first uses it.
"""

from mirror._src.base.tracebacks import make_public as _make_public
from mirror._src.ps.coordinator import ClusterCoordinator as ClusterCoordinator
from mirror._src.ps.handles import CancelledError as CancelledError
from mirror._src.ps.handles import ParameterServerLostError as ParameterServerLostError
from mirror._src.ps.handles import PerWorkerDataset as PerWorkerDataset
from mirror._src.ps.handles import RemoteValue as RemoteValue
from mirror._src.ps.placement import FixedShardsPartitioner as FixedShardsPartitioner
from mirror._src.ps.placement import MaxSizePartitioner as MaxSizePartitioner
from mirror._src.ps.placement import MinSizePartitioner as MinSizePartitioner
from mirror._src.ps.sparse import ServerTable as ServerTable
from mirror._src.ps.strategy import ParameterServerStrategy as ParameterServerStrategy

_make_public("mirror.ps")
