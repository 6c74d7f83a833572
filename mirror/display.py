"""What a strategy looks like, in a terminal and in a notebook."""

import html
from collections.abc import Sequence

import jax

from mirror.devices import backend

_HEADINGS = ("replica", "logical device", "physical device", "memory")


class DeviceTable:
    """A table of replica, logical device, physical device and memory."""

    def __init__(self, devices: Sequence[jax.Device]) -> None:
        self._devices = tuple(devices)

    @property
    def names(self) -> str:
        """The logical names, in parentheses."""
        return backend.names(self._devices)

    @property
    def rows(self) -> list[tuple[str, str, str, str]]:
        """The cells, row by row."""
        return [
            (str(i), backend.logical_name(d), _physical_name(d), _memory(d))
            for i, d in enumerate(self._devices)
        ]

    def __str__(self) -> str:
        rows = [_HEADINGS, *self.rows]
        widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADINGS))]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        return "\n".join(lines)

    def html(self) -> str:
        """The table for a notebook."""
        head = "".join(f"<th>{html.escape(h)}</th>" for h in _HEADINGS)
        body = "".join(
            "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>"
            for row in self.rows
        )
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _physical_name(device: jax.Device) -> str:
    """One CPU is one physical device, however many host devices it is split into."""
    kind = backend.device_type(device)
    if kind == "CPU":
        return "/physical_device:CPU:0"
    return f"/physical_device:{kind}:{device.local_hardware_id} ({device.device_kind})"


def _memory(device: jax.Device) -> str:
    stats = device.memory_stats()
    if not stats or "bytes_limit" not in stats:
        return "host memory" if backend.device_type(device) == "CPU" else "unknown"
    used, limit = stats["bytes_in_use"] / 2**30, stats["bytes_limit"] / 2**30
    return f"{used:.1f} of {limit:.1f} GiB"
