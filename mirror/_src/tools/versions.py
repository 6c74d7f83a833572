"""Installed versions of Python, the packages that mirror uses, and the NVIDIA driver."""

import platform

from mirror._src.base.optional import version_of
from mirror._src.devices.physical import driver_version
from mirror._version import __version__

CUDA_PLUGINS = ("jax-cuda12-plugin", "jax-cuda13-plugin")
_PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy", *CUDA_PLUGINS, "nvidia-ml-py")


def installed_versions() -> dict[str, str]:
    """Returns the version of each component by name, without the components not installed."""
    # Python built from a Git checkout calls itself "3.13.0+", which is not a valid version.
    versions = {"mirror": __version__, "python": platform.python_version().rstrip("+")}
    versions |= {name: found for name in _PACKAGES if (found := version_of(name)) is not None}
    driver = driver_version()
    return versions if driver is None else {**versions, "NVIDIA driver": driver}
