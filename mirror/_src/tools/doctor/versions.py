"""Checks the versions of Python, the packages, the CUDA plugin and the driver."""

from collections.abc import Iterator

from packaging.version import Version

from mirror._src.base.optional import install_command
from mirror._src.base.supported import JAX, Range, base_version
from mirror._src.tools.doctor.check import Check
from mirror._src.tools.versions import CUDA_PLUGINS

SUPPORTED = {
    "python": Range("3.11"),
    "jax": JAX,
    "jaxlib": JAX,
    "flax": Range("0.12.8"),
    "optax": Range("0.2.8"),
}
_NO_DEADLOCKS = Version("0.12")
_LEAST_DRIVER = {"jax-cuda12-plugin": 525, "jax-cuda13-plugin": 580}


def deadlocks_on_host(jaxlib: str) -> bool:
    """Whether this jaxlib deadlocks if many launches on host devices are in flight.

    Seen on 0.10.2 to 0.11.
    """
    return base_version(jaxlib) < _NO_DEADLOCKS


def check_versions(versions: dict[str, str]) -> Iterator[Check]:
    """Checks that all versions are supported and fit together.

    Args:
        versions: The installed versions by name.
    """
    for name, supported in SUPPORTED.items():
        yield _check_range(name, versions.get(name), supported)
    if "jaxlib" in versions:
        yield _check_deadlock(versions["jaxlib"])
        for plugin in CUDA_PLUGINS:
            if plugin in versions:
                yield _check_plugin(plugin, versions)


def _check_range(name: str, version: str | None, supported: Range) -> Check:
    install = f'pip install "{name}>={supported.least}"'
    if name == "python":
        install = f"Install Python {supported.least} or newer, and mirror for it."
    if version is None or base_version(version) < Version(supported.least):
        meaning = f"mirror requires {supported.least} or newer."
        return Check(name, "problem", version or "not installed", meaning, install)
    if supported.beyond is not None and base_version(version) >= Version(supported.beyond):
        meaning = f"mirror is not tested with {supported.beyond} or newer."
        return Check(name, "warning", version, meaning, f'pip install "{name}<{supported.beyond}"')
    return Check(name, "ok", version)


def _check_deadlock(jaxlib: str) -> Check:
    if not deadlocks_on_host(jaxlib):
        return Check("known faults", "ok", f"none in jaxlib {jaxlib}")
    return Check(
        "known faults",
        "ok",
        f"jaxlib {jaxlib} deadlocks if many steps on host devices are in flight; mirror limits "
        "their number",
        "mirror does not limit your own jax.pmap calls. Wait for their results every few steps, "
        "jax.block_until_ready(x), or use Python 3.12 with JAX 0.12.",
    )


def _check_plugin(plugin: str, versions: dict[str, str]) -> Check:
    """Checks that the plugin has the version of jaxlib, and that the driver supports its CUDA."""
    version, jaxlib, driver = versions[plugin], versions["jaxlib"], versions.get("NVIDIA driver")
    if base_version(version) != base_version(jaxlib):
        meaning = f"JAX does not use it, and finds no GPU, because jaxlib has version {jaxlib}."
        return Check(plugin, "problem", version, meaning, f'pip install "{plugin}=={jaxlib}"')
    if driver is None:
        meaning = "No NVIDIA driver can be queried, so this machine may have no GPU."
        fix = "Install the NVIDIA driver; nvidia-smi shows whether it works."
        return Check(plugin, "warning", version, meaning, fix)
    least = _LEAST_DRIVER[plugin]
    if base_version(driver).major < least:
        meaning = f"Its CUDA requires driver {least} or newer, but {driver} is installed."
        older_cuda = f", or the older CUDA: {install_command('cuda12')}"
        fix = f"Install a newer driver{older_cuda if '13' in plugin else '.'}"
        return Check(plugin, "problem", version, meaning, fix)
    return Check(plugin, "ok", f"{version}, driver {driver}")
