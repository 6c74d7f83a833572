"""Jobs of several processes: how they find each other, and which of them this one is."""

from mirror._src.base.tracebacks import make_public as _make_public
from mirror._src.cluster.consensus import barrier as barrier
from mirror._src.cluster.resolvers import ClusterResolver as ClusterResolver
from mirror._src.cluster.resolvers import ClusterSpec as ClusterSpec
from mirror._src.cluster.resolvers import SimpleClusterResolver as SimpleClusterResolver
from mirror._src.cluster.resolvers import SlurmClusterResolver as SlurmClusterResolver
from mirror._src.cluster.resolvers import TFConfigClusterResolver as TFConfigClusterResolver
from mirror._src.cluster.start import initialize as initialize
from mirror._src.cluster.store import is_chief as is_chief
from mirror._src.cluster.store import process_count as process_count
from mirror._src.cluster.store import process_index as process_index
from mirror._src.ps.server import Server as Server

_make_public("mirror.distributed")
