"""Host devices for a command that finds no GPU."""

from collections.abc import Sequence

import jax

from mirror._src.base.errors import counted
from mirror._src.devices import backend
from mirror._src.devices.host_devices import force_host_devices as force_host_devices
from mirror._src.tools.options import OptionError

HOST_COUNTS = (1, 2, 4)
NUM_HOST_DEVICES = HOST_COUNTS[-1]


def too_few_devices(
    command: str, option: str, devices: Sequence[jax.Device], fixed_by: str | None
) -> OptionError:
    """Returns the error for a `--devices` option that exceeds the available devices.

    Args:
        command: The command, such as `"bench"`.
        option: Value of the option.
        devices: The available devices, all of one type.
        fixed_by: The setting that fixes the number of host devices.
    """
    kind, num_devices = backend.type_of(devices[0]), len(devices)
    available = counted(num_devices, f"{kind} device")
    problem = f"--devices {option}: only {available} available, {backend.names(devices)}."
    if kind == "CPU":
        return OptionError(
            f"{problem} Their number is set by {fixed_by}. Unset it, or request at most "
            f"{num_devices}."
        )
    return OptionError(
        f"{problem} Request at most {num_devices}, or run on host devices: "
        f"JAX_PLATFORMS=cpu mirror {command} --devices {option}"
    )
