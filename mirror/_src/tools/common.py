"""Host devices, error messages and checks that several commands share."""

import json
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from mirror._src.base.errors import counted, first_line
from mirror._src.base.optional import require
from mirror._src.base.terminal import paint
from mirror._src.base.types import MOST_REPLICAS
from mirror._src.devices import backend
from mirror._src.devices.jax_options import force_host_devices as force_host_devices
from mirror._src.tools.options import FAILED, OptionError, report_error

HOST_COUNTS = (1, 2, 4)
NUM_HOST_DEVICES = HOST_COUNTS[-1]


def print_report(report: Any, *, as_json: bool) -> None:
    """Prints a report; in a terminal with colors, its first paragraph, the heading, is colored."""
    if as_json:
        print(json.dumps(report.to_dict(), indent=2))
        return
    heading, blank, rest = str(report).partition("\n\n")
    print("\n".join(paint(line, "cyan") for line in heading.split("\n")) + blank + rest)


def report_step_failure(command: str, step: str, error: Exception) -> int:
    """Prints the traceback of the user's step and a summary, and returns the exit status."""
    traceback.print_exc()
    message = f"{step} failed: {type(error).__name__}: {first_line(error)}"
    return report_error(command, message, FAILED)


def require_writable(file: Path, feature: str = "This feature", extra: str = "train") -> None:
    """Rejects a `--plot` file that cannot be written, before any work is done.

    Args:
        file: The file.
        feature: What needs matplotlib, for the message.
        extra: The extra of the package that installs it.

    Raises:
        ModuleNotFoundError: If matplotlib is not installed.
        OptionError: If the format is unknown, the directory does not exist, or the file cannot be
            opened.
    """
    figure = require("matplotlib.figure", feature, extra).Figure()
    formats = figure.canvas.get_supported_filetypes()
    if file.suffix[1:].lower() not in formats:
        raise OptionError(
            f"--plot {file}: the suffix of {file.name!r} is not a supported format "
            f"({', '.join(sorted(formats))}). For example: --plot {file.with_suffix('.png')}"
        )
    try:
        is_new = not file.exists()
        file.open("ab").close()
    except OSError as error:
        raise OptionError(
            f"--plot {file}: the file cannot be written: {error.strerror}. Pass the name of a file "
            "in an existing directory that you can write to."
        ) from None
    if is_new:
        file.unlink()


def require_few_replicas(num_devices: int, per_device: int) -> None:
    """Rejects options that ask for more replicas than a strategy can have.

    Raises:
        OptionError: If they do.
    """
    if num_devices * per_device > MOST_REPLICAS:
        raise OptionError(
            f"--replicas-per-device {per_device} on {counted(num_devices, 'device')} are "
            f"{num_devices * per_device} replicas. A strategy has at most {MOST_REPLICAS}."
        )


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
