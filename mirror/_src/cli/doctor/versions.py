"""Versions: of Python and the packages, of the CUDA plugin and the driver."""

import importlib.metadata
import platform
import re
from collections.abc import Iterator
from typing import NamedTuple, TypeAlias

from mirror._src.cli.doctor.check import Check
from mirror._src.devices.physical import driver_version
from mirror._version import __version__

Version: TypeAlias = tuple[int, ...]


class Range(NamedTuple):
    """Versions that are supported.

    Attributes:
        least: the first of them.
        beyond: the first that nobody has tried; `None`: unknown.
    """

    least: str
    beyond: str | None = None


SUPPORTED = {
    "python": Range("3.11"),
    "jax": Range("0.10.2", "0.13"),
    "jaxlib": Range("0.10.2", "0.13"),
    "flax": Range("0.12.8"),
    "optax": Range("0.2.8"),
}
_PACKAGES = tuple(name for name in SUPPORTED if name != "python")
_DEADLOCKS_BEFORE = "0.12"
_PLUGINS = ("jax-cuda12-plugin", "jax-cuda13-plugin")
_LEAST_DRIVER = {"jax-cuda12-plugin": 525, "jax-cuda13-plugin": 580}


def parse(text: str) -> Version:
    """The numbers that a version begins with: `0.12.0.dev3` is `(0, 12, 0)`."""
    found = re.match(r"\d+(\.\d+)*", text)
    return tuple(map(int, found[0].split("."))) if found else ()


def deadlocks_on_host(jaxlib: str) -> bool:
    """Whether this jaxlib hangs when launches pile up on host devices (seen on 0.10.2 to 0.11)."""
    return parse(jaxlib) < parse(_DEADLOCKS_BEFORE)


def installed() -> dict[str, str]:
    """The versions of what is there; `""` for a package that is needed and is not."""
    found = {"mirror": __version__, "python": platform.python_version()}
    for name in (*_PACKAGES, *_PLUGINS):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            if name in _PACKAGES:
                found[name] = ""
    driver = driver_version()
    return found if driver is None else {**found, "NVIDIA driver": driver}


def check_versions(versions: dict[str, str]) -> Iterator[Check]:
    """Whether they are supported, fit each other, and what is known of them."""
    for name, supported in SUPPORTED.items():
        yield _check_range(name, versions[name], supported)
    yield _check_deadlock(versions["jaxlib"])
    for plugin in _PLUGINS:
        if plugin in versions:
            yield _check_plugin(plugin, versions)


def _check_range(name: str, version: str, supported: Range) -> Check:
    install = f'pip install "{name}>={supported.least}"'
    if name == "python":
        install = f"Install Python {supported.least} or newer, and mirror in it."
    if parse(version) < parse(supported.least):
        found = version or "not installed"
        return Check(name, "problem", found, f"mirror needs {supported.least} or newer.", install)
    if supported.beyond is not None and parse(version) >= parse(supported.beyond):
        meaning = f"mirror is not tested with {supported.beyond} or newer."
        return Check(name, "warning", version, meaning, f'pip install "{name}<{supported.beyond}"')
    return Check(name, "ok", version)


def _check_deadlock(jaxlib: str) -> Check:
    if not deadlocks_on_host(jaxlib):
        return Check("known faults", "ok", f"none of jaxlib {jaxlib}")
    return Check(
        "known faults",
        "ok",
        f"jaxlib {jaxlib} deadlocks when steps pile up on host devices; mirror guards against it",
        "Not so your own jax.pmap beside mirror: there, wait for the results every few steps, "
        "jax.block_until_ready(x), or use Python 3.12 with JAX 0.12.",
    )


def _check_plugin(plugin: str, versions: dict[str, str]) -> Check:
    """The plugin must be of jaxlib's version, and the driver new enough for its CUDA."""
    version, jaxlib, driver = versions[plugin], versions["jaxlib"], versions.get("NVIDIA driver")
    least = _LEAST_DRIVER[plugin]
    if parse(version) != parse(jaxlib):
        meaning = f"JAX does not use it, since jaxlib is {jaxlib}: there is no GPU."
        return Check(plugin, "problem", version, meaning, f'pip install "{plugin}=={jaxlib}"')
    if driver is None:
        meaning = "There is no driver that can be asked, so perhaps no GPU."
        return Check(plugin, "warning", version, meaning, "Install NVIDIA's driver; nvidia-smi.")
    if parse(driver)[:1] < (least,):
        meaning = f"Its CUDA needs driver {least} or newer, and there is {driver}."
        fix = "Install a newer driver" + (
            ', or the older CUDA: pip install "mirror-jax[cuda12]"' if "13" in plugin else "."
        )
        return Check(plugin, "problem", version, meaning, fix)
    return Check(plugin, "ok", f"{version}, driver {driver}")
