"""The one place that asks JAX for its devices, and so the one place that starts its backend."""

import contextlib
import os
import re
from collections.abc import Iterable, Iterator

import jax

from mirror._errors import InvalidDeviceError
from mirror.devices.spec import DeviceSpec

_GPU_PLATFORMS = ("gpu", "cuda", "rocm")
_POOL_VARIABLE = "PJRT_NPROC"
_DISPATCHING_THREADS = 3


@contextlib.contextmanager
def _wide_host_pool() -> Iterator[None]:
    """Gives the host client, should it start in here, a pool in which launches cannot starve.

    All forced host devices share one pool of max(cores, devices) threads, and each device's part of
    a launch blocks one of them until all parts have met: with several launches in flight that
    deadlocks (JAX 0.10 and 0.11; 0.12 was not seen to). `devices * (1 + dispatching threads)`
    threads are enough. The client reads `PJRT_NPROC` once, when it starts. A value that the user
    has set is left alone, and ours is taken back, so that no child process inherits it.
    """
    forced = re.findall(
        r"--xla_force_host_platform_device_count=(\d+)", os.environ.get("XLA_FLAGS", "")
    )
    devices = max([jax.config.values["jax_num_cpu_devices"], 1, *map(int, forced)])
    if devices == 1 or _POOL_VARIABLE in os.environ or "NPROC" in os.environ:
        yield
        return
    threads = max(os.cpu_count() or 1, devices * (1 + _DISPATCHING_THREADS))
    os.environ[_POOL_VARIABLE] = str(threads)
    try:
        yield
    finally:
        del os.environ[_POOL_VARIABLE]


def device_type(device: jax.Device) -> str:
    """`"CPU"`, `"GPU"` (CUDA or ROCm), or another platform's name in capitals."""
    return "GPU" if device.platform in _GPU_PLATFORMS else device.platform.upper()


def devices_of_type(wanted: str) -> tuple[jax.Device, ...]:
    """This process's devices of one type, in JAX's order; none where JAX has no such platform."""
    with _wide_host_pool():
        try:
            return tuple(jax.local_devices(backend=wanted.lower()))
        except RuntimeError:
            return ()


def default_devices() -> tuple[jax.Device, ...]:
    """All devices of JAX's default platform: accelerators where there are any, else CPUs."""
    with _wide_host_pool():
        return tuple(jax.local_devices())


def find_device(spec: DeviceSpec) -> jax.Device:
    """The device of that name.

    Raises:
        InvalidDeviceError: there is none; the message lists those that there are.
    """
    candidates = devices_of_type(spec.device_type)
    if spec.index < len(candidates):
        return candidates[spec.index]
    known = dict.fromkeys([*default_devices(), *devices_of_type("CPU")])
    raise InvalidDeviceError(
        f"There is no device {spec}. The devices are {names(known)}. Name one of them; for more "
        'host devices call jax.config.update("jax_num_cpu_devices", n) before the first array.'
    )


def logical_name(device: jax.Device) -> str:
    """`/device:GPU:1`: the device's type and its place among this process's of that type."""
    kind = device_type(device)
    return str(DeviceSpec(kind, devices_of_type(kind).index(device)))


def names(devices: Iterable[jax.Device]) -> str:
    """The logical names, in parentheses, as they stand in log lines and messages."""
    return f"({', '.join(map(logical_name, devices))})"
