"""Where the demo runs: on the GPUs, or on forced host devices where there is none."""

import jax

import mirror
from mirror.demo.options import OptionError
from mirror.devices import backend
from mirror.devices.start import HOST_DEVICES_FLAG, forced_host_devices

NUM_HOST_DEVICES = 4


def make_strategy(num_devices: int | None, replicas_per_device: int = 1) -> mirror.MirroredStrategy:
    """A strategy over that many GPUs, or host devices where there is no GPU.

    Args:
        num_devices: `None` means all GPUs; or all host devices the user forced, or 4.
        replicas_per_device: how many replicas on each of them.

    Raises:
        OptionError: there are not that many devices.
    """
    forced_by = _force_host_devices(num_devices or NUM_HOST_DEVICES)
    devices = backend.default_devices()
    if num_devices is not None and num_devices > len(devices):
        raise OptionError(_too_many(num_devices, devices, forced_by))
    return mirror.MirroredStrategy(devices[:num_devices], replicas_per_device=replicas_per_device)


def on_host(strategy: mirror.Strategy) -> bool:
    """Whether the replicas run on host devices, which share the machine's cores."""
    return backend.type_of(strategy.devices[0]) == "CPU"


def _force_host_devices(count: int) -> str:
    """Forces host devices, unless the user did; says who fixed how many there are.

    With GPUs it changes nothing that matters: they stay the default devices. So there is no need
    to know whether there are any, which only the backend knows, after whose start nothing can be
    forced.
    """
    forced = forced_host_devices()
    if forced is not None:
        return f"XLA_FLAGS={HOST_DEVICES_FLAG}={forced}"
    known = jax.config.values["jax_num_cpu_devices"]
    if known >= 0:
        return f"JAX_NUM_CPU_DEVICES={known}"
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:
        return "JAX's backend, which had started before,"
    return "--devices"


def _too_many(asked: int, devices: tuple[jax.Device, ...], forced_by: str) -> str:
    kind = backend.type_of(devices[0])
    there = f"--devices {asked}: there are {len(devices)} {kind} devices, {backend.names(devices)}."
    if kind != "CPU":
        return (
            f"{there} Ask for at most --devices {len(devices)}, or run on host devices, "
            f"JAX_PLATFORMS=cpu mirror demo --devices {asked}, or put several replicas on each: "
            "--replicas-per-device"
        )
    return (
        f"{there} {forced_by} says how many, and is left as it is. Unset it, or ask for at most "
        f"--devices {len(devices)}"
    )
