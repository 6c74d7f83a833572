"""One checkpoint on the disk: its arrays, written by Orbax and read by TensorStore."""

import contextlib
import importlib
import math
import os
import shutil
import time
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from mirror._src.training.checkpoints import layout
from mirror._src.training.checkpoints.host_copies import KeyData
from mirror._src.training.checkpoints.orbax_quiet import orbax_alone


def write(place: Path, arrays: dict[str, np.ndarray | KeyData], about: dict[str, Any]) -> None:
    """Writes a checkpoint, and gives it its place when it is complete."""
    orbax: Any = importlib.import_module("orbax.checkpoint")
    about["arrays"] = {name: _entry(value) for name, value in arrays.items()}
    about["written"] = time.time_ns()
    about |= _kept_metrics(place, about)
    items = {"about": orbax.args.JsonSave({**about, "checksum": layout.checksum_of_json(about)})}
    stored = {name: _stored(_data(value)) for name, value in arrays.items() if _data(value).size}
    if stored:  # Orbax takes neither no arrays nor arrays without elements
        items["arrays"] = orbax.args.PyTreeSave(stored)
    target = place.with_name(place.name + layout.REPLACES) if place.exists() else place
    try:
        with orbax_alone(), orbax.Checkpointer(orbax.CompositeCheckpointHandler()) as checkpointer:
            checkpointer.save(target, args=orbax.args.Composite(**items))
    finally:
        shutil.rmtree(target.with_name(target.name + layout.UNFINISHED), ignore_errors=True)
    if target != place:
        layout.put_in_place(target)


def _kept_metrics(place: Path, about: dict[str, Any]) -> dict[str, Any]:
    """The metrics of the same arrays that stand there already, where none came with these."""
    with contextlib.suppress(Exception):  # nothing there, or nothing to be read
        there = layout.read_about(place)
        if not about["metrics"] and there["arrays"] == about["arrays"]:
            return {name: there[name] for name in ("metrics", "keep_best")}
    return {}


def _data(value: np.ndarray | KeyData) -> np.ndarray:
    return value.data if isinstance(value, KeyData) else value


def _stored(data: np.ndarray) -> np.ndarray:
    """The small dtypes, `float8` and `uint4` and so on, as bytes: TensorStore lacks some."""
    return data.view(np.uint8) if data.dtype.itemsize == 1 and data.dtype != bool else data


def _entry(value: np.ndarray | KeyData) -> dict[str, Any]:
    data = _data(value)
    entry = {"shape": list(data.shape), "dtype": data.dtype.name, "checksum": _checksum(data)}
    return entry | {"impl": value.impl} if isinstance(value, KeyData) else entry


def _checksum(data: np.ndarray) -> int:
    return zlib.crc32(np.ascontiguousarray(data).reshape(-1).view(np.uint8).data)


def read_arrays(path: Path, entries: dict[str, Any]) -> dict[str, np.ndarray | KeyData]:
    """Reads without Orbax, which would start JAX's backend, what its arrays are stored with."""
    tensorstore: Any = importlib.import_module("tensorstore")
    context = tensorstore.Context()  # one cache for all
    base = {"driver": "file", "path": f"{path}{os.sep}"}
    opened = {
        name: tensorstore.open(
            {"driver": "zarr", "kvstore": {"driver": "ocdbt", "base": base, "path": f"{name}/"}},
            open=True,
            read=True,
            context=context,
        )
        for name, entry in entries.items()
        if math.prod(entry["shape"])
    }
    reads = {name: future.result().read() for name, future in opened.items()}
    return {name: _checked(name, reads.get(name), entry) for name, entry in entries.items()}


def _checked(name: str, read: Any, entry: dict[str, Any]) -> np.ndarray | KeyData:
    shape, dtype = tuple(entry["shape"]), np.dtype(entry["dtype"])
    data = np.zeros(shape, dtype) if read is None else read.result()
    data = data.view(dtype) if dtype.itemsize == data.dtype.itemsize == 1 else data
    if (data.shape, data.dtype, _checksum(data)) != (shape, dtype, entry["checksum"]):
        raise ValueError(f"the checksum of {name} differs")
    return KeyData(entry["impl"], data) if "impl" in entry else data
