"""Where the demo runs: on the GPUs, or on forced host devices where there is none."""

import jax

import mirror
from mirror._src.cli.demo.options import OptionError, Options
from mirror._src.cli.host_devices import force_host_devices
from mirror._src.devices import backend
from mirror._src.devices.names import DeviceSpec
from mirror._src.devices.resolve import canonicalize_replica_devices

NUM_HOST_DEVICES = 4


def make_strategy(options: Options) -> mirror.MirroredStrategy:
    """A strategy over the devices that were asked for, run as it was asked.

    Raises:
        OptionError: there are no such devices, or the executor cannot run on them.
    """
    devices, on_each = _devices(options.devices), options.replicas_per_device
    if options.executor == "vmap":  # as many replicas, all on the first device
        return mirror.MirroredStrategy(devices[:1], replicas_per_device=len(devices) * on_each)
    if options.executor == "staged":
        ops = mirror.ReductionToOneDevice()
        return mirror.MirroredStrategy(devices, ops, replicas_per_device=on_each)
    kinds = dict.fromkeys(map(backend.type_of, devices))
    if options.executor == "pmap" and (on_each > 1 or len(kinds) > 1):
        why = "several replicas on each" if on_each > 1 else f"devices of types {', '.join(kinds)}"
        raise OptionError(
            f"--executor pmap runs one replica on each device, all of one type, and was given {why}"
            ". Leave --executor out: what suits the devices is chosen"
        )
    return mirror.MirroredStrategy(devices, replicas_per_device=on_each)


def _devices(asked: int | tuple[str, ...] | None) -> tuple[jax.Device, ...]:
    if isinstance(asked, tuple):
        try:
            specs = [DeviceSpec.parse(name) for name in asked]
            force_host_devices(max([NUM_HOST_DEVICES, *((s.index or 0) + 1 for s in specs)]))
            return canonicalize_replica_devices(asked)
        except ValueError as error:
            raise OptionError(f"--devices {','.join(asked)}: {error}") from error
    forced_by = force_host_devices(asked or NUM_HOST_DEVICES) or "--devices"
    devices = backend.default_devices()
    if asked is not None and asked > len(devices):
        raise OptionError(_too_many(asked, devices, forced_by))
    return devices[:asked]


def on_host(strategy: mirror.Strategy) -> bool:
    """Whether the replicas run on host devices, which share the machine's cores."""
    return {backend.type_of(device) for device in strategy.devices} == {"CPU"}


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
