"""`mirror.ps`, which is imported when a program first uses it.

It takes as long to import as a quarter of everything else, and few programs use it.
"""

import importlib
from types import ModuleType

LAZY_MODULE = "ps"
NAMES_OF_PS = (
    "CancelledError",
    "ClusterCoordinator",
    "FixedShardsPartitioner",
    "MaxSizePartitioner",
    "MinSizePartitioner",
    "ParameterServerLostError",
    "ParameterServerStrategy",
    "PerWorkerDataset",
    "RemoteValue",
)
"""The public names of `mirror.ps`, for messages to those who look for them in `mirror`."""


def lazy_module() -> ModuleType:
    """Imports `mirror.ps`, which the module `mirror` has from then on."""
    return importlib.import_module(f"mirror.{LAZY_MODULE}")
