"""The files of one checkpoint: arrays are written by Orbax and read by TensorStore."""

import contextlib
import importlib
import math
import os
import threading
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from mirror._src.cluster.store import process_count, process_index
from mirror._src.training.checkpoints import durable, layout
from mirror._src.training.checkpoints.host_copies import KeyData
from mirror._src.training.checkpoints.memory import require_memory_for
from mirror._src.training.checkpoints.orbax_quiet import quiet_orbax

_orbax = threading.Lock()  # saves of one process share a signal, and so each other's directories


def write(path: Path, arrays: dict[str, np.ndarray | KeyData], about: dict[str, Any]) -> None:
    """Writes a checkpoint, and moves it to its path when it is complete and on the disk."""
    orbax: Any = importlib.import_module("orbax.checkpoint")
    about["arrays"] = {name: _entry(value) for name, value in arrays.items()}
    about["written"] = layout.next_written(path.parent)
    about |= _kept_metrics(path, about)
    items = {"about": orbax.args.JsonSave({**about, "checksum": layout.checksum_of_json(about)})}
    stored = {name: _stored(_data(value)) for name, value in arrays.items() if _data(value).size}
    if stored:  # Orbax rejects empty trees and arrays without elements
        items["arrays"] = orbax.args.PyTreeSave(stored)
    unfinished = path.with_name(path.name + layout.UNFINISHED)
    try:
        with _orbax, quiet_orbax():
            durable.delete(unfinished)
            with _checkpointer(orbax) as checkpointer:
                checkpointer.save(unfinished, args=orbax.args.Composite(**items))
        durable.sync_tree(unfinished)
        is_new = not path.exists()
        target = path if is_new else path.with_name(path.name + layout.REPLACES)
        durable.rename(unfinished, target)
        if not is_new:
            layout.put_in_place(target)
    finally:
        for leftover in path.parent.glob(f"{path.name}{layout.UNFINISHED}*"):
            durable.delete(leftover)


def _checkpointer(orbax: Any) -> Any:
    """Returns a writer. By default, Orbax would wait for the other processes of a job."""
    if process_count() == 1:
        return orbax.Checkpointer(orbax.CompositeCheckpointHandler())
    alone = orbax.options.MultiprocessingOptions(
        primary_host=process_index(),
        active_processes={process_index()},
        barrier_sync_key_prefix="mirror",
    )
    options = orbax.CompositeOptions(multiprocessing_options=alone)
    handler = orbax.CompositeCheckpointHandler(composite_options=options)
    return orbax.Checkpointer(handler, multiprocessing_options=alone)


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
    """Reads arrays with TensorStore: Orbax would initialize the backend of JAX.

    Raises:
        MemoryError: If the entries need more than the memory of this machine.
        ValueError: If the arrays differ from their entries.
    """
    require_memory_for(sum(map(num_bytes, entries.values())))
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
    arrays = {name: future.result() for name, future in opened.items()}
    for name, array in arrays.items():  # before anything is allocated for them
        _require_match(name, array, entries[name])
    reads = {name: array.read() for name, array in arrays.items()}
    return {name: _checked(name, reads.get(name), entry) for name, entry in entries.items()}


def num_bytes(entry: dict[str, Any]) -> int:
    """Returns the size of an array by its entry."""
    return math.prod(entry["shape"]) * np.dtype(entry["dtype"]).itemsize


def _require_match(name: str, array: Any, entry: dict[str, Any]) -> None:
    """Rejects an array of another shape or dtype, or in pieces larger than itself."""
    shape, dtype, stored = tuple(entry["shape"]), np.dtype(entry["dtype"]), array.dtype.numpy_dtype
    is_byte = dtype.itemsize == stored.itemsize == 1
    if tuple(array.shape) != shape or not (stored == dtype or is_byte):
        found = f"{stored.name}{list(array.shape)}"
        raise ValueError(f"{name} is {found}, but {layout.ABOUT} has {dtype.name}{list(shape)}")
    pieces = array.chunk_layout.read_chunk.shape or ()  # None for a scalar
    if any(piece > size for piece, size in zip(pieces, shape, strict=True)):
        raise ValueError(f"{name} of shape {shape} is stored in pieces of shape {tuple(pieces)}")


def from_bytes(name: str, data: np.ndarray, entry: dict[str, Any]) -> np.ndarray | KeyData:
    """Returns an array from its bytes in C order, as it is described by its entry.

    Raises:
        ValueError: If the bytes differ from the entry.
    """
    copy = np.array(data)  # aligned
    return _with_checksum(name, copy.view(np.dtype(entry["dtype"])).reshape(entry["shape"]), entry)


def _checked(name: str, read: Any, entry: dict[str, Any]) -> np.ndarray | KeyData:
    shape, dtype = tuple(entry["shape"]), np.dtype(entry["dtype"])
    data = np.zeros(shape, dtype) if read is None else read.result()
    data = data.view(dtype) if dtype.itemsize == data.dtype.itemsize == 1 else data
    return _with_checksum(name, data, entry)


def _with_checksum(name: str, data: np.ndarray, entry: dict[str, Any]) -> np.ndarray | KeyData:
    shape, dtype = tuple(entry["shape"]), np.dtype(entry["dtype"])
    if (data.shape, data.dtype, _checksum(data)) != (shape, dtype, entry["checksum"]):
        raise ValueError(f"the checksum of {name} does not match")
    return KeyData(entry["impl"], data) if "impl" in entry else data
