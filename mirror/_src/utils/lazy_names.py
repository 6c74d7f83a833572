"""Public names whose modules are imported when a program first uses them.

The parameter server takes as long to import as a quarter of everything else, and few programs use
it.
"""

import importlib
import sys
from typing import Any

_PS = "mirror._src.ps"
LAZY_NAMES = {
    "CancelledError": f"{_PS}.remote_value",
    "ClusterCoordinator": f"{_PS}.coordinator",
    "FixedShardsPartitioner": f"{_PS}.partitioners",
    "MaxSizePartitioner": f"{_PS}.partitioners",
    "MinSizePartitioner": f"{_PS}.partitioners",
    "ParameterServerLostError": f"{_PS}.errors",
    "ParameterServerStrategy": f"{_PS}.strategy",
    "PerWorkerDataset": f"{_PS}.datasets",
    "RemoteValue": f"{_PS}.remote_value",
}
"""Names of the module `mirror`, and the modules that define them."""


def lazy_value(name: str) -> Any:
    """Imports one of `LAZY_NAMES`, which the module `mirror` has from then on."""
    value = getattr(importlib.import_module(LAZY_NAMES[name]), name)
    setattr(sys.modules["mirror"], name, value)
    return value
