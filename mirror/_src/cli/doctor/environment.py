"""Environment variables that JAX reads, and the driver: all without JAX's backend."""

import difflib
import re
from collections.abc import Iterator, Mapping

from mirror._src.cli.doctor.check import Check
from mirror._src.devices.physical import gpus_of_process, may_have_gpus
from mirror._src.devices.startup import HOST_DEVICES_FLAG
from mirror._src.utils.errors import bytes_in_words

_TERMINATE = "--xla_cpu_collective_call_terminate_timeout_seconds"
_TERMINATE_SECS = 40
_FLAGS = (  # those that people set, for a guess at what a typo means
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
    "--xla_dump_to": "Every program that is compiled is written to files there.",
    "--xla_cpu_enable_fast_math": "NaNs and infinities may be lost, and replicas compute others.",
    "--xla_backend_optimization_level": "Programs are compiled with less optimization.",
}
_ALLOCATORS = ("default", "platform", "bfc", "cuda_async", "vmm")
_FRACTION, _OLD_FRACTION = "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"
_PREALLOCATE, _ALLOCATOR = "XLA_PYTHON_CLIENT_PREALLOCATE", "XLA_PYTHON_CLIENT_ALLOCATOR"


def flags_of(environment: Mapping[str, str]) -> dict[str, str]:
    """The flags in `XLA_FLAGS` with their values; of several the last, as in XLA."""
    pairs = (flag.partition("=") for flag in environment.get("XLA_FLAGS", "").split())
    return {name: value for name, _, value in pairs}


def check_environment(environment: Mapping[str, str]) -> Iterator[Check]:
    """What the variables do, and whether they contradict each other."""
    yield from _check_flags(environment)
    yield from _check_memory(environment)
    yield _check_gpus()


def guess(flag: str) -> str:
    """The flag that a typo may mean; empty where there is no guess."""
    return "".join(difflib.get_close_matches(flag.partition("=")[0], _FLAGS, n=1, cutoff=0.8))


def _check_flags(environment: Mapping[str, str]) -> Iterator[Check]:
    flags, asked = flags_of(environment), environment.get("JAX_NUM_CPU_DEVICES")
    forced = flags.get(HOST_DEVICES_FLAG)
    if forced is not None and asked is not None and forced != asked:
        yield Check(
            "host devices",
            "warning",
            f"XLA_FLAGS={HOST_DEVICES_FLAG}={forced}, and JAX_NUM_CPU_DEVICES={asked}",
            f"The second wins: JAX has {asked} host devices.",
            "unset JAX_NUM_CPU_DEVICES, or take the flag out.",
        )
    for flag, meaning in _COSTLY.items():
        if flags.get(flag, "false") not in ("false", "False"):
            found = f"{flag}={flags[flag]}"
            yield Check("XLA_FLAGS", "warning", found, meaning, f"Take {flag} out of XLA_FLAGS.")
    secs = flags.get(_TERMINATE, "")
    if secs.isdecimal() and int(secs) < _TERMINATE_SECS:
        yield Check(
            "XLA_FLAGS",
            "warning",
            f"{_TERMINATE}={secs}",
            f"Where one replica works {secs} s longer than another, the process is ended, with "
            "SIGABRT. XLA's own is 40.",
            f"{_TERMINATE}=600, or take it out of XLA_FLAGS.",
        )


def _check_memory(environment: Mapping[str, str]) -> Iterator[Check]:
    both = [name for name in (_FRACTION, _OLD_FRACTION) if environment.get(name)]
    if len(both) > 1:
        found = ", ".join(f"{name}={environment[name]}" for name in both)
        meaning = "JAX refuses both together, and has no GPU then."
        yield Check("memory", "problem", found, meaning, f"unset {_OLD_FRACTION}")
    for name in both[:1]:
        yield _check_fraction(name, environment[name])
    preallocate = environment.get(_PREALLOCATE, "")
    if preallocate:
        yield _check_preallocate(preallocate)
    allocator = environment.get(_ALLOCATOR, "default")
    if allocator.lower() not in _ALLOCATORS:
        meaning = f"JAX knows {', '.join(_ALLOCATORS)}, and has no GPU with another."
        yield Check(
            "memory", "problem", f"{_ALLOCATOR}={allocator}", meaning, f"unset {_ALLOCATOR}"
        )
    elif allocator.lower() == "platform":
        meaning = "Every array is allocated by the driver by itself, which is slow."
        yield Check(
            "memory", "warning", f"{_ALLOCATOR}={allocator}", meaning, f"unset {_ALLOCATOR}"
        )


def _check_fraction(name: str, value: str) -> Check:
    found = f"{name}={value}"
    if not re.fullmatch(r"\d*\.?\d+|\d+\.", value):
        meaning = "It is no number, and JAX has no GPU then."
        return Check("memory", "problem", found, meaning, f"export {name}=0.75")
    if not 0 < float(value) <= 1:
        meaning = "It is no part of a GPU's memory, which is above 0 and at most 1."
        return Check("memory", "warning", found, meaning, f"export {name}=0.75")
    return Check("memory", "ok", f"{found}: JAX takes that part of each GPU's memory")


def _check_preallocate(value: str) -> Check:
    found = f"{_PREALLOCATE}={value}"
    if value in ("false", "False", "0"):
        return Check("memory", "ok", f"{found}: a GPU's memory is taken as it is needed")
    if value in ("true", "True", "1"):
        return Check("memory", "ok", f"{found}: most of a GPU's memory is taken at the start")
    meaning = "JAX reads only false, False and 0 as no: most of a GPU's memory is taken."
    return Check("memory", "warning", found, meaning, f"export {_PREALLOCATE}=false")


def _check_gpus() -> Check:
    """What the driver shows this process."""
    gpus = gpus_of_process()
    if may_have_gpus():
        meaning = "mirror.config cannot list the GPUs, nor choose among them before JAX starts."
        return Check("GPUs", "warning", "a driver that cannot be asked", meaning, _ASK)
    if not gpus:
        return Check("GPUs", "ok", "none")
    sizes = [f"{g.name} ({bytes_in_words(g.memory_bytes)})" for g in gpus]
    return Check("GPUs", "ok", f"{len(gpus)}: {', '.join(sizes)}")


_ASK = "pip install nvidia-ml-py"
