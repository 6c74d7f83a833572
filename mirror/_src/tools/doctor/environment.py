"""The installed versions, and checks of versions and settings that do not start JAX's backend."""

import difflib
import platform
import re
from collections.abc import Iterator, Mapping

from packaging.version import Version

from mirror._src.base.errors import bytes_in_words
from mirror._src.base.optional import install_command, version_of
from mirror._src.base.supported import BEYOND, LEAST, base_version
from mirror._src.devices.jax_options import HOST_DEVICES_FLAG
from mirror._src.devices.physical import (
    driver_version,
    gpus_of_process,
    how_to_list,
    unlisted_platforms,
)
from mirror._src.tools.doctor.check import Check
from mirror._version import __version__

CUDA_PLUGINS = ("jax-cuda12-plugin", "jax-cuda13-plugin")
_PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy", *CUDA_PLUGINS, "nvidia-ml-py")
SUPPORTED = {
    "python": "3.11",
    "jax": LEAST,
    "jaxlib": LEAST,
    "flax": "0.12.8",
    "optax": "0.2.8",
}
_LEAST_DRIVER = {"jax-cuda12-plugin": 525, "jax-cuda13-plugin": 580}
_TERMINATE = "--xla_cpu_collective_call_terminate_timeout_seconds"
_TERMINATE_SECS = 40
_FLAGS = (  # commonly used flags, to suggest a correction for a typo
    HOST_DEVICES_FLAG,
    _TERMINATE,
    "--xla_cpu_collective_call_warn_stuck_timeout_seconds",
    "--xla_cpu_collective_timeout_seconds",
    "--xla_cpu_enable_fast_math",
    "--xla_cpu_multi_thread_eigen",
    "--xla_dump_to",
    "--xla_dump_hlo_as_text",
    "--xla_backend_optimization_level",
    "--xla_gpu_all_reduce_combine_threshold_bytes",
    "--xla_gpu_autotune_level",
    "--xla_gpu_deterministic_ops",
    "--xla_gpu_enable_command_buffer",
    "--xla_gpu_enable_latency_hiding_scheduler",
)
_COSTLY = {
    "--xla_dump_to": "XLA writes every compiled program to files in this directory.",
    "--xla_cpu_enable_fast_math": "NaNs and infinities may be lost, and replicas may differ.",
    "--xla_backend_optimization_level": "Programs are compiled with less optimization.",
}
_ALLOCATORS = ("default", "platform", "bfc", "cuda_async", "vmm")
_FRACTION, _OLD_FRACTION = "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"
_PREALLOCATE, _ALLOCATOR = "XLA_PYTHON_CLIENT_PREALLOCATE", "XLA_PYTHON_CLIENT_ALLOCATOR"


def installed_versions() -> dict[str, str]:
    """Returns the version of each component by name, without the components not installed."""
    # Python built from a Git checkout calls itself "3.13.0+", which is not a valid version.
    versions = {"mirror": __version__, "python": platform.python_version().rstrip("+")}
    versions |= {name: found for name in _PACKAGES if (found := version_of(name)) is not None}
    driver = driver_version()
    return versions if driver is None else {**versions, "NVIDIA driver": driver}


def check_versions(versions: dict[str, str]) -> Iterator[Check]:
    """Checks that all versions are supported and fit together.

    Args:
        versions: The installed versions by name.
    """
    for name, least in SUPPORTED.items():
        yield _check_range(name, versions.get(name), least)
    if "jaxlib" in versions:
        if base_version(versions["jaxlib"]) < Version(BEYOND):
            yield _known_fault(versions["jaxlib"])
        for plugin in CUDA_PLUGINS:
            if plugin in versions:
                yield _check_plugin(plugin, versions)


def _check_range(name: str, version: str | None, least: str) -> Check:
    install = f'pip install "{name}>={least}"'
    if name == "python":
        install = f"Install Python {least} or newer, and mirror for it."
    if version is None or base_version(version) < Version(least):
        meaning = f"mirror requires {least} or newer."
        return Check(name, "problem", version or "not installed", meaning, install)
    if name in ("jax", "jaxlib") and base_version(version) >= Version(BEYOND):
        meaning = f"mirror is not tested with {BEYOND} or newer."
        return Check(name, "warning", version, meaning, f'pip install "{name}<{BEYOND}"')
    return Check(name, "ok", version)


def _known_fault(jaxlib: str) -> Check:
    return Check(
        "known faults",
        "ok",
        f"jaxlib {jaxlib} can deadlock if many launches on host devices, or launches of several "
        "threads, are in flight; mirror limits its own",
        "Wait for your own jax.pmap calls every few steps: jax.block_until_ready(x).",
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


def flags_of(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the flags in `XLA_FLAGS`; the last value of a repeated flag counts, as in XLA."""
    pairs = (flag.partition("=") for flag in environment.get("XLA_FLAGS", "").split())
    return {name: value for name, _, value in pairs}


def check_environment(environment: Mapping[str, str]) -> Iterator[Check]:
    """Checks the environment variables for conflicts and drawbacks, and lists the GPUs."""
    yield from _check_flags(environment)
    yield from _check_memory(environment)
    yield _check_gpus()


def guess(flag: str) -> str:
    """Returns the flag that a typo most likely means, or an empty string."""
    return "".join(difflib.get_close_matches(flag.partition("=")[0], _FLAGS, n=1, cutoff=0.8))


def _check_flags(environment: Mapping[str, str]) -> Iterator[Check]:
    flags, option = flags_of(environment), environment.get("JAX_NUM_CPU_DEVICES")
    forced = flags.get(HOST_DEVICES_FLAG)
    if forced is not None and option is not None and forced != option:
        yield Check(
            "host devices",
            "warning",
            f"XLA_FLAGS={HOST_DEVICES_FLAG}={forced} conflicts with JAX_NUM_CPU_DEVICES={option}",
            f"JAX_NUM_CPU_DEVICES takes precedence: JAX has {option} host devices.",
            "unset JAX_NUM_CPU_DEVICES, or remove the flag.",
        )
    for flag, meaning in _COSTLY.items():
        if flags.get(flag, "false") not in ("false", "False"):
            finding = f"{flag}={flags[flag]}"
            yield Check("XLA_FLAGS", "warning", finding, meaning, f"Remove {flag} from XLA_FLAGS.")
    secs = flags.get(_TERMINATE, "")
    if secs.isdecimal() and int(secs) < _TERMINATE_SECS:
        yield Check(
            "XLA_FLAGS",
            "warning",
            f"{_TERMINATE}={secs}",
            f"XLA ends the process with SIGABRT if one replica is {secs} s slower than another. "
            f"The default is {_TERMINATE_SECS} s.",
            f"{_TERMINATE}=600, or remove it from XLA_FLAGS.",
        )


def _check_memory(environment: Mapping[str, str]) -> Iterator[Check]:
    both = [name for name in (_FRACTION, _OLD_FRACTION) if environment.get(name)]
    if len(both) > 1:
        finding = ", ".join(f"{name}={environment[name]}" for name in both)
        meaning = "JAX rejects the combination, and then finds no GPU."
        yield Check("memory", "problem", finding, meaning, f"unset {_OLD_FRACTION}")
    for name in both[:1]:
        yield _check_fraction(name, environment[name])
    preallocate = environment.get(_PREALLOCATE, "")
    if preallocate:
        yield _check_preallocate(preallocate)
    allocator = environment.get(_ALLOCATOR, "default")
    if allocator.lower() not in _ALLOCATORS:
        meaning = f"With values other than {', '.join(_ALLOCATORS)}, JAX finds no GPU."
        yield Check(
            "memory", "problem", f"{_ALLOCATOR}={allocator}", meaning, f"unset {_ALLOCATOR}"
        )
    elif allocator.lower() == "platform":
        meaning = "The driver allocates every array separately, which is slow."
        yield Check(
            "memory", "warning", f"{_ALLOCATOR}={allocator}", meaning, f"unset {_ALLOCATOR}"
        )


def _check_fraction(name: str, value: str) -> Check:
    finding = f"{name}={value}"
    if not re.fullmatch(r"\d*\.?\d+|\d+\.", value):
        meaning = "The value is not a number, so JAX finds no GPU."
        return Check("memory", "problem", finding, meaning, f"export {name}=0.75")
    if not 0 < float(value) <= 1:
        meaning = "The value must be a fraction of a GPU's memory, above 0 and at most 1."
        return Check("memory", "warning", finding, meaning, f"export {name}=0.75")
    return Check("memory", "ok", f"{finding}: JAX allocates this fraction of each GPU's memory")


def _check_preallocate(value: str) -> Check:
    finding = f"{_PREALLOCATE}={value}"
    if value in ("false", "False", "0"):
        return Check("memory", "ok", f"{finding}: GPU memory is allocated as needed")
    if value in ("true", "True", "1"):
        return Check("memory", "ok", f"{finding}: most of a GPU's memory is allocated at startup")
    meaning = "Only false, False and 0 disable preallocation: most of a GPU's memory is allocated."
    return Check("memory", "warning", finding, meaning, f"export {_PREALLOCATE}=false")


def _check_gpus() -> Check:
    """Lists the GPUs that the driver shows to this process."""
    gpus = gpus_of_process()
    if unlisted_platforms():
        meaning = "mirror.config cannot list the GPUs, nor select some of them before JAX starts."
        return Check("GPUs", "warning", "the driver cannot be queried", meaning, how_to_list())
    if not gpus:
        return Check("GPUs", "ok", "none")
    sizes = [f"{g.name} ({bytes_in_words(g.memory_bytes)})" for g in gpus]
    return Check("GPUs", "ok", f"{len(gpus)}: {', '.join(sizes)}")
