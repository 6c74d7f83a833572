"""One checkpoint on the disk: its arrays written by Orbax, read by TensorStore, and where it lies.

A directory gets its number when it is complete, by being renamed, and loses it the same way before
it is deleted: whatever interrupts, what has a number can be loaded.
"""

import contextlib
import importlib
import json
import logging
import math
import os
import re
import shutil
import sys
import threading
import time
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from mirror._errors import describe

FORMAT = 1
ABOUT = Path("about", "metadata")
_UNFINISHED = ".orbax-checkpoint-tmp"  # Orbax's word
REPLACES = ".new"  # complete, and about to take the place of the one of the same step
_REMOVED = ".removed"
_STEP = re.compile(rf"(0|[1-9][0-9]*)({re.escape(REPLACES)})?")
LEFT_OVER = re.compile(
    rf"[0-9]+({re.escape(REPLACES)})?({re.escape(_UNFINISHED)}.*|{re.escape(_REMOVED)})"
)
_MOST_WAIT_SECS = 1.0
_QUIET_SECS = 0.1


@dataclass(frozen=True, eq=False)
class KeyData:
    """PRNG keys without JAX: `jax.random.wrap_key_data(data, impl=impl)` makes keys of them."""

    impl: str
    data: np.ndarray


def found_in(directory: Path) -> dict[int, Path]:
    """The checkpoints of mirror by their steps, in order; a newer one of a step wins."""
    found = {}
    for path in sorted(directory.iterdir()):  # "120" stands before "120.new"
        match = _STEP.fullmatch(path.name)
        if match and (path / ABOUT).is_file():
            found[int(match[1])] = path
    return dict(sorted(found.items()))


def in_order_of_writing(found: Mapping[int, Path]) -> list[int]:
    """The steps, the one written last at the end: a second training may begin at step 0 again."""

    def written(step: int) -> int:
        try:
            return int(read_about(found[step])["written"])
        except Exception:  # it cannot be read, which whoever wants it will be told
            return (found[step] / ABOUT).stat().st_mtime_ns

    return sorted(found, key=written)


def put_in_place(path: Path) -> None:
    """Makes `120.new`, which is complete, `120`."""
    place = path.with_suffix("")
    if place.exists():
        remove(place)
    path.rename(place)


def remove(path: Path) -> None:
    """Takes a checkpoint's number from it, and then deletes it."""
    doomed = path.with_name(path.name + _REMOVED)
    shutil.rmtree(doomed, ignore_errors=True)
    path.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)  # the next store deletes what is left


def write(place: Path, arrays: dict[str, np.ndarray | KeyData], about: dict[str, Any]) -> None:
    """Writes a checkpoint, and gives it its place when it is complete."""
    orbax: Any = importlib.import_module("orbax.checkpoint")
    about["arrays"] = {name: _entry(value) for name, value in arrays.items()}
    about["written"] = time.time_ns()
    about |= _kept_metrics(place, about)
    items = {"about": orbax.args.JsonSave({**about, "checksum": _checksum_of_json(about)})}
    stored = {name: _stored(_data(value)) for name, value in arrays.items() if _data(value).size}
    if stored:  # Orbax takes neither no arrays nor arrays without elements
        items["arrays"] = orbax.args.PyTreeSave(stored)
    target = place.with_name(place.name + REPLACES) if place.exists() else place
    try:
        with _orbax_alone(), orbax.Checkpointer(orbax.CompositeCheckpointHandler()) as checkpointer:
            checkpointer.save(target, args=orbax.args.Composite(**items))
    finally:
        shutil.rmtree(target.with_name(target.name + _UNFINISHED), ignore_errors=True)
    if target != place:
        put_in_place(target)


def _kept_metrics(place: Path, about: dict[str, Any]) -> dict[str, Any]:
    """The metrics of the same arrays that stand there already, where none came with these."""
    with contextlib.suppress(Exception):  # nothing there, or nothing to be read
        there = read_about(place)
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


def _checksum_of_json(value: Any) -> int:
    return zlib.crc32(json.dumps(value, sort_keys=True).encode())


@contextlib.contextmanager
def _orbax_alone() -> Iterator[None]:
    """Keeps what Orbax says from the user, and waits for its threads.

    That is forty lines of log for a checkpoint. Where it fails, it closes its event loop under the
    writes that are under way, each of which then prints that the loop is closed. And it lets go of
    the loop's threads, `asyncio_0`, without joining them (Orbax 0.12.8).
    """
    logger, hook, late = logging.getLogger("absl"), sys.unraisablehook, threading.Event()
    before = set(threading.enumerate())

    def is_not_orbax(record: logging.LogRecord) -> bool:
        return f"{os.sep}orbax{os.sep}" not in record.pathname

    def unless_late(unraisable: Any) -> None:
        if str(unraisable.exc_value) == "Event loop is closed":
            late.set()
        else:
            hook(unraisable)

    logger.addFilter(is_not_orbax)
    sys.unraisablehook = unless_late
    try:
        yield
    except BaseException:
        while late.wait(_QUIET_SECS):
            late.clear()
        raise
    finally:
        logger.removeFilter(is_not_orbax)
        if sys.unraisablehook is unless_late:
            sys.unraisablehook = hook
        for thread in set(threading.enumerate()) - before:
            if thread.name.startswith("asyncio_"):
                thread.join(_MOST_WAIT_SECS)  # another's may have no end


def read_about(path: Path) -> dict[str, Any]:
    """What the JSON of a checkpoint says.

    Raises:
        ValueError: it is damaged, or of another format.
    """
    about = json.loads((path / ABOUT).read_text())
    if about.pop("checksum") != _checksum_of_json(about):
        raise ValueError(f"the checksum of {ABOUT} differs")
    if about["format"] != FORMAT:
        raise ValueError(f"it has format {about['format']}, and this version reads {FORMAT}")
    return about


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


def on_host(arrays: Mapping[str, Any]) -> dict[str, np.ndarray | KeyData]:
    """Copies that nobody else holds: the caller's buffers may be donated next."""
    for name, value in arrays.items():
        _check_array(name, value)
    parts = {name: _parts(value) for name, value in arrays.items()}
    datas = jax.device_get({name: data for name, (_, data) in parts.items()})  # all under way
    copies = {name: _copy(np.asarray(data)) for name, data in datas.items()}
    return {
        name: copies[name] if impl is None else KeyData(impl, copies[name])
        for name, (impl, _) in parts.items()
    }


def _copy(data: np.ndarray) -> np.ndarray:
    """A copy in C order and in the machine's byte order, which names of dtypes do not tell."""
    return np.array(data, data.dtype.newbyteorder("="), order="C")


def _parts(value: Any) -> tuple[str | None, Any]:
    """The kind of PRNG keys, if they are; and the array, of one replica."""
    if isinstance(value, KeyData):
        return value.impl, value.data
    impl = None
    if isinstance(value, jax.Array):
        if jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
            impl, value = str(jax.random.key_impl(value)), jax.random.key_data(value)
        value = value.addressable_data(0) if value.is_fully_replicated else value
    return impl, value


def _check_array(name: Any, value: Any) -> None:
    if not isinstance(name, str) or not all(name.split("/")):
        raise ValueError(f"{name!r} is no name: join parts that are not empty with '/'.")
    if isinstance(value, np.ndarray | np.generic):
        number = jax.dtypes.issubdtype(value.dtype, np.number) or value.dtype == bool
        known = number and value.dtype.char not in "gG"  # long doubles: JAX has none
    else:
        known = isinstance(value, jax.Array | KeyData | int | float | complex)
    if not known:
        raise TypeError(f"{name} is {describe(value)}. Save arrays of numbers, and PRNG keys.")


def in_short(error: BaseException) -> str:
    """The text of an error, without what TensorStore adds, of which there is a lot."""
    text = getattr(error, "strerror", None) or str(error).split(" [")[0]
    return f"{text or type(error).__name__:.300}".rstrip(".")
