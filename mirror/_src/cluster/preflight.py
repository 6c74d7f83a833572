"""Compared at the start of a job: do all processes have the same versions, settings and devices?"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax

from mirror._src.base.optional import version_of
from mirror._src.cluster.consensus import gather
from mirror._src.devices import backend
from mirror._version import __version__

_OPTIONS = (
    "jax_enable_x64",
    "jax_default_matmul_precision",
    "jax_numpy_dtype_promotion",
    "jax_default_prng_impl",
    "jax_threefry_partitionable",
)
_PACKAGES = ("jax", "jaxlib", "flax", "optax")


def require_same_settings(deadline: float) -> None:
    """Compares versions and numerical settings, before any device is used.

    Raises:
        RuntimeError: If they differ, or a process does not arrive by the deadline.
    """
    mine = {
        "mirror": __version__,
        **{name: version_of(name) or "not installed" for name in _PACKAGES},
    }
    mine |= {name: str(jax.config.values.get(name)) for name in _OPTIONS}
    _require_equal(
        gather("preflight", mine, deadline),
        "The processes have different versions or settings",
        "Install the same versions on all machines, and set the same options of jax.config.",
    )


def visible_devices(deadline: float) -> tuple[jax.Device, ...]:
    """Returns the visible devices of all processes, in the order of the processes.

    Raises:
        RuntimeError: If the processes differ in the number or type of devices, or a process does
            not arrive by the deadline.
    """
    local = backend.default_devices()
    kind = backend.type_of(local[0])
    mine = {"devices": f"{len(local)} x {kind}", "ids": [device.id for device in local]}
    each = gather("devices", mine, deadline)
    ids = [i for process in each for i in process.pop("ids")]
    _require_equal(
        each,
        "The processes have different devices",
        "Give every process the same number of devices of one type, for example with "
        "mirror launch --devices, or with CUDA_VISIBLE_DEVICES.",
    )
    devices = backend.devices_by_id(kind)
    return tuple(devices[i] for i in ids)


def _require_equal(each: Sequence[Mapping[str, Any]], what: str, fix: str) -> None:
    lines = []
    for name in each[0]:
        if len({process[name] for process in each}) > 1:
            values: dict[Any, list[int]] = {}
            for i, process in enumerate(each):
                values.setdefault(process[name], []).append(i)
            lines += [f"  {name}: {value} on {processes(ids)}" for value, ids in values.items()]
    if lines:
        text = "\n".join(lines)
        raise RuntimeError(f"{what}:\n{text}\n{fix}")


def processes(ids: Sequence[int]) -> str:
    """Returns `process 1` or `processes 1, 2`, of at most 8 processes."""
    shown = ", ".join(map(str, ids[:8])) + (", ..." if len(ids) > 8 else "")
    return f"process {shown}" if len(ids) == 1 else f"processes {shown}"
