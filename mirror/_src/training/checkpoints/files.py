"""The files of one checkpoint: arrays are written by Orbax and read by TensorStore."""

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
from mirror._src.training.checkpoints.orbax_quiet import quiet_orbax


def write(path: Path, arrays: dict[str, np.ndarray | KeyData], about: dict[str, Any]) -> None:
    """Writes a checkpoint, and moves it to its path when it is complete."""
    orbax: Any = importlib.import_module("orbax.checkpoint")
    about["arrays"] = {name: _entry(value) for name, value in arrays.items()}
    about["written"] = time.time_ns()
    about |= _kept_metrics(path, about)
    items = {"about": orbax.args.JsonSave({**about, "checksum": layout.checksum_of_json(about)})}
    stored = {name: _stored(_data(value)) for name, value in arrays.items() if _data(value).size}
    if stored:  # Orbax rejects empty trees and arrays without elements
        items["arrays"] = orbax.args.PyTreeSave(stored)
    target = path.with_name(path.name + layout.REPLACES) if path.exists() else path
    try:
        with quiet_orbax(), orbax.Checkpointer(orbax.CompositeCheckpointHandler()) as checkpointer:
            checkpointer.save(target, args=orbax.args.Composite(**items))
    finally:
        shutil.rmtree(target.with_name(target.name + layout.UNFINISHED), ignore_errors=True)
    if target != path:
        layout.put_in_place(target)


def _kept_metrics(path: Path, about: dict[str, Any]) -> dict[str, Any]:
    """Returns the metrics of a checkpoint of the same arrays, if the new one has no metrics."""
    with contextlib.suppress(Exception):  # no earlier checkpoint, or an unreadable one
        earlier = layout.read_about(path)
        if not about["metrics"] and earlier["arrays"] == about["arrays"]:
            return {name: earlier[name] for name in ("metrics", "keep_best")}
    return {}


def _data(value: np.ndarray | KeyData) -> np.ndarray:
    return value.data if isinstance(value, KeyData) else value


def _stored(data: np.ndarray) -> np.ndarray:
    """Converts dtypes of one byte, such as float8 and uint4, to bytes: TensorStore lacks some."""
    return data.view(np.uint8) if data.dtype.itemsize == 1 and data.dtype != bool else data


def _entry(value: np.ndarray | KeyData) -> dict[str, Any]:
    data = _data(value)
    entry = {"shape": list(data.shape), "dtype": data.dtype.name, "checksum": _checksum(data)}
    return entry | {"impl": value.impl} if isinstance(value, KeyData) else entry


def _checksum(data: np.ndarray) -> int:
    return zlib.crc32(np.ascontiguousarray(data).reshape(-1).view(np.uint8).data)


def read_arrays(path: Path, entries: dict[str, Any]) -> dict[str, np.ndarray | KeyData]:
    """Reads arrays with TensorStore: Orbax would initialize the backend of JAX."""
    tensorstore: Any = importlib.import_module("tensorstore")
    context = tensorstore.Context()  # all arrays share one cache
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
        raise ValueError(f"the checksum of {name} does not match")
    return KeyData(entry["impl"], data) if "impl" in entry else data
