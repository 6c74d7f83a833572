"""Installed versions of Python, the packages that mirror uses, and the NVIDIA driver."""

import importlib.metadata
import platform

from mirror._src.devices.physical import driver_version
from mirror._version import __version__

CUDA_PLUGINS = ("jax-cuda12-plugin", "jax-cuda13-plugin")
_PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy", *CUDA_PLUGINS, "nvidia-ml-py")


def installed_versions() -> dict[str, str]:
    """Returns the version of each component by name, without the components not installed."""
    # Python built from a Git checkout calls itself "3.13.0+", which is not a valid version.
    versions = {"mirror": __version__, "python": platform.python_version().rstrip("+")}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    driver = driver_version()
    return versions if driver is None else {**versions, "NVIDIA driver": driver}
