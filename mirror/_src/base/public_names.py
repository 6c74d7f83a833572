"""The public names of `mirror`, which are imported when a program first uses one of them.

Then all of them are, so that what a program sees does not depend on which name it uses first. Only
`mirror.ps`, which few programs use, waits for its own first use.
"""

import importlib
import sys
from collections.abc import Callable
from typing import Any, TypeVar

_T = TypeVar("_T")


def set_module(name: str) -> Callable[[type[_T]], type[_T]]:
    """Returns a decorator that sets the module that tracebacks and reprs show for a class."""

    def decorate(cls: type[_T]) -> type[_T]:
        cls.__module__ = name
        return cls

    return decorate


MODULES = ("callbacks", "config", "data", "debugging", "distributed", "testing")
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
    "ServerTable",
)
"""The public names of `mirror.ps`, for messages to those who look for them in `mirror`."""
_WITHOUT_JAX = ("cli", "pytest_plugin")


def make_lazy() -> None:
    """Makes the module `mirror` import its names when it is asked for one."""
    mirror = sys.modules["mirror"]
    mirror.__getattr__ = _attribute  # type: ignore[method-assign]
    mirror.__dir__ = lambda: sorted([*_names(), LAZY_MODULE])  # type: ignore[method-assign]


def load() -> None:
    """Imports the public names into `mirror`, unless this has begun."""
    public = importlib.import_module("mirror._public")
    for name in MODULES:
        importlib.import_module(f"mirror.{name}")  # which sets the attribute
    vars(sys.modules["mirror"]).update({n: vars(public)[n] for n in vars(public) if _is_public(n)})


def _names() -> list[str]:
    """Returns the names that `from mirror import *` imports."""
    load()
    return [*MODULES, *filter(_is_public, vars(sys.modules["mirror._public"]))]


def _is_public(name: str) -> bool:
    return name.isidentifier() and not name.startswith("_")


def _attribute(name: str) -> Any:
    """Returns an attribute that the module `mirror` does not have yet."""
    if name == "__all__":
        return _names()
    if name in (LAZY_MODULE, *_WITHOUT_JAX):
        return importlib.import_module(f"mirror.{name}")
    if name.startswith("_"):  # Python, a library or a notebook asks, not a user
        raise AttributeError(f"module 'mirror' has no attribute {name!r}")
    load()
    mirror = sys.modules["mirror"]
    if name in vars(mirror):
        return vars(mirror)[name]
    unknown_names = importlib.import_module("mirror._src.base.unknown_names")
    raise unknown_names.unknown_name("mirror", name, sys._getframe(1))
