"""Creates the strategy of the demo, on GPUs or, without a GPU, on host devices."""

import argparse

import jax

import mirror
from mirror._src.devices import backend
from mirror._src.devices.names import DeviceSpec
from mirror._src.devices.resolve import canonicalize_replica_devices
from mirror._src.tools.host_devices import NUM_HOST_DEVICES, force_host_devices, too_few_devices
from mirror._src.tools.options import OptionError


def make_strategy(options: argparse.Namespace) -> mirror.MirroredStrategy:
    """Returns a strategy over the requested devices that uses the requested executor.

    Raises:
        OptionError: If the devices do not exist, or the executor does not support them.
    """
    devices, per_device = _devices(options.devices), options.replicas_per_device
    if options.executor == "vmap":  # the same number of replicas, all on the first device
        return mirror.MirroredStrategy(devices[:1], replicas_per_device=len(devices) * per_device)
    if options.executor == "staged":
        ops = mirror.ReductionToOneDevice()
        return mirror.MirroredStrategy(devices, ops, replicas_per_device=per_device)
    kinds = dict.fromkeys(map(backend.type_of, devices))
    if options.executor == "pmap" and (per_device > 1 or len(kinds) > 1):
        why = f"{per_device} replicas per device" if per_device > 1 else " and ".join(kinds)
        raise OptionError(
            f"--executor pmap requires one replica per device and devices of a single type, got "
            f"{why}. Omit --executor to use one that supports them."
        )
    return mirror.MirroredStrategy(devices, replicas_per_device=per_device)


def _devices(wanted: int | tuple[str, ...] | None) -> tuple[jax.Device, ...]:
    if isinstance(wanted, tuple):
        try:
            specs = [DeviceSpec.parse(name) for name in wanted]
            force_host_devices(max([NUM_HOST_DEVICES, *((s.index or 0) + 1 for s in specs)]))
            return canonicalize_replica_devices(wanted)
        except ValueError as error:
            raise OptionError(f"--devices {','.join(wanted)}: {error}") from error
    fixed_by = force_host_devices(wanted or NUM_HOST_DEVICES)
    devices = backend.default_devices()
    if wanted is not None and wanted > len(devices):
        raise too_few_devices("demo", str(wanted), devices, fixed_by)
    return devices[:wanted]


def is_on_host(strategy: mirror.Strategy) -> bool:
    """Whether the replicas run on host devices, which share the cores of the machine."""
    return {backend.type_of(device) for device in strategy.devices} == {"CPU"}
