"""The file of one checkpoint, in the format of safetensors, which runs no code when it is read.

    8 bytes    length of the header
    header     JSON: dtype, shape and place of every array, for all readers of the format; and
               "__metadata__", a text with what mirror knows about the checkpoint, and its checksum
    data       arrays in C order, those with the largest items first, so that all are aligned

It is written and read here, not by the package `safetensors` 0.8: its NumPy reader lacks float8,
and maps files into memory, where a disk that fails ends the process.
"""

import contextlib
import errno
import itertools
import json
import math
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mirror._src.base.errors import bytes_in_words, expected, no_values
from mirror._src.base.types import ARRAY_LIKE, is_numeric
from mirror._src.devices.memory import host_memory
from mirror._src.training.paths import is_remote, put

RESERVED = "__metadata__"
"""The name that an array in a file cannot have."""


@dataclass(frozen=True, eq=False)
class KeyData:
    """The data of PRNG keys."""

    impl: str
    data: np.ndarray

    def keys(self) -> jax.Array:
        """Returns the keys."""
        return jax.random.wrap_key_data(jnp.asarray(self.data), impl=self.impl)


Value = np.ndarray | KeyData
"""An array on the host."""


def require_arrays(arrays: Mapping[str, Any]) -> None:
    """Checks that arrays can be written.

    Raises:
        TypeError: If one is not an array of numbers or PRNG keys.
        ValueError: If a name is not possible.
    """
    for name, value in arrays.items():
        if not isinstance(name, str) or name == RESERVED:
            raise ValueError(expected("name", name, f"a string other than {RESERVED!r}"))
        is_valid = isinstance(value, (*ARRAY_LIKE, KeyData))
        if isinstance(value, np.ndarray | np.generic):
            is_valid = is_numeric(value.dtype)
        if not is_valid:
            what = "an array of numbers or PRNG keys"
            raise TypeError(expected(name, value, what, no_values(value)))


def host_copies(arrays: Mapping[str, Any]) -> dict[str, Value]:
    """Copies arrays to the host. The caller may donate the buffers afterwards."""
    items = {name: _impl_and_data(value) for name, value in arrays.items()}
    for _, data in items.values():
        if isinstance(data, jax.Array):
            data.copy_to_host_async()
    return {name: _value(*items.pop(name), copy=True) for name in list(items)}


def on_host(value: Any) -> Value:
    """Returns an array on the host: a copy only if it is on another device, or in slices."""
    return _value(*_impl_and_data(value), copy=False)


def _value(impl: str | None, data: Any, *, copy: bool) -> Value:
    """Converts to C order and native byte order, which the name of a dtype does not include."""
    data = np.asarray(data)
    data = data.astype(data.dtype.newbyteorder("="), order="C", copy=copy)
    return data if impl is None else KeyData(impl, data)


def _impl_and_data(value: Any) -> tuple[str | None, Any]:
    """Returns the PRNG implementation, if the value holds keys, and its array."""
    if isinstance(value, KeyData):
        return value.impl, value.data
    if not isinstance(value, jax.Array):
        return None, value
    impl = None
    if jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
        impl, value = str(jax.random.key_impl(value)), jax.random.key_data(value)
    # Another object with the same buffers: JAX keeps a copy on the host as long as its array.
    shards = [shard.data for shard in value.addressable_shards]
    return impl, jax.make_array_from_single_device_arrays(value.shape, value.sharding, shards)


FORMAT = 1
UNFINISHED = ".unfinished"
_PIECE = 2**24  # bytes that are copied at a time
_MOST_HEADER = 100_000_000  # bytes that readers of the format accept
_TYPES = {  # dtypes that all readers know; others are stored as bytes
    **{"bool": "BOOL", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "bfloat16": "BF16"},
    **{f"float{bits}": f"F{bits}" for bits in (16, 32, 64)},
    **{f"int{bits}": f"I{bits}" for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": f"U{bits}" for bits in (8, 16, 32, 64)},
}


def write(path: Path, arrays: Mapping[str, Any], metadata: dict[str, Any]) -> None:
    """Writes a checkpoint. One array at a time is copied to the host."""
    pieces = (bytes_of(on_host(arrays[name])).data for name in _places(metadata["arrays"]))
    write_file(path, itertools.chain([_header(metadata)], pieces))


def write_again(path: Path, metadata: dict[str, Any]) -> None:
    """Writes a checkpoint with other metadata, and the arrays that it has."""
    write_file(path, itertools.chain([_header(metadata)], _data_in(path)))


def _data_in(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        file.seek(8 + _header_size(file))
        yield from iter(lambda: file.read(_PIECE), b"")


def write_file(path: Path, pieces: Iterable[Any]) -> None:
    """Writes a file, and moves it to its path when it is complete and on the disk.

    Object stores have no names for parts of a file: it gets its name when all of it has arrived.
    What was only written, or renamed, is in the memory of the operating system; `os.fsync` writes a
    file, or the names in a directory, to the disk.
    """
    if is_remote(path):
        return put(path, b"".join(pieces))
    unfinished = path.with_name(path.name + UNFINISHED)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        unfinished.unlink(missing_ok=True)
        with unfinished.open("xb") as file:  # never what a link points to
            for piece in pieces:
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
        _sync(path.parent)
    finally:
        with contextlib.suppress(OSError):
            unfinished.unlink(missing_ok=True)


def entries_of(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Returns shape, dtype and checksum of every array, and the implementation of PRNG keys."""
    return {name: _entry(on_host(value)) for name, value in arrays.items()}


def read_metadata(path: Path) -> dict[str, Any]:
    """Reads what mirror knows about a checkpoint, without its arrays.

    Raises:
        ValueError: If it is damaged, or has another format.
    """
    with path.open("rb") as file:
        text = file.read(_header_size(file))
    try:
        stored = json.loads(text)["__metadata__"]
        metadata, checksum = stored["mirror"], int(stored["checksum"])
    except (ValueError, KeyError, TypeError, RecursionError):
        raise ValueError("its header is damaged, or not by mirror") from None
    if zlib.crc32(metadata.encode()) != checksum:
        raise ValueError("the checksum of its header does not match")
    return _checked_metadata(json.loads(metadata))


def read_arrays(path: Path, entries: Mapping[str, Any]) -> Iterator[tuple[str, Value]]:
    """Reads the arrays of a checkpoint one by one, and yields them with their names.

    Raises:
        MemoryError: If one needs more than the memory of this machine.
        ValueError: If they differ from their entries.
    """
    places = _places(entries)
    with path.open("rb") as file:
        start = 8 + _header_size(file)
        for name, entry in entries.items():
            data = _bytes_at(file, start + places[name], name, entry)
            yield name, from_bytes(name, data, entry)


def require_memory(entries: Mapping[str, Any]) -> None:
    """Checks that arrays can be held in memory: terabytes of zeros need no room on a disk.

    Raises:
        MemoryError: If they need more than the memory of this machine.
    """
    count, limit = sum(map(num_bytes, entries.values())), host_memory()
    if limit is not None and count > limit:
        raise MemoryError(
            f"its arrays need {bytes_in_words(count)}, but this process can use at most "
            f"{bytes_in_words(limit)} of memory"
        )


def from_bytes(name: str, data: np.ndarray, entry: Mapping[str, Any]) -> Value:
    """Returns an array from its bytes, which must be aligned, as it is described by its entry.

    Raises:
        ValueError: If the bytes differ from the entry.
    """
    if zlib.crc32(data.data) != entry["checksum"]:
        raise ValueError(f"the checksum of {name} does not match")
    array = data.view(np.dtype(entry["dtype"])).reshape(entry["shape"])
    return KeyData(entry["impl"], array) if "impl" in entry else array


def bytes_of(value: Value) -> np.ndarray:
    """Returns the bytes of an array in C order; a view if possible."""
    data = value.data if isinstance(value, KeyData) else value
    return np.ascontiguousarray(data).reshape(-1).view(np.uint8)


def num_bytes(entry: Mapping[str, Any]) -> int:
    """Returns the size of an array by its entry."""
    return math.prod(entry["shape"]) * np.dtype(entry["dtype"]).itemsize


def _header(metadata: Mapping[str, Any]) -> bytes:
    text = json.dumps(metadata)
    stored = {"mirror": text, "checksum": str(zlib.crc32(text.encode()))}
    header: dict[str, Any] = {RESERVED: stored}
    for name, start in _places(metadata["arrays"]).items():
        entry = metadata["arrays"][name]
        size, dtype, shape = num_bytes(entry), np.dtype(entry["dtype"]), entry["shape"]
        is_known = dtype.name in _TYPES or dtype.itemsize == 1
        header[name] = {
            "dtype": _TYPES.get(dtype.name, "U8"),
            "shape": shape if is_known else [*shape, dtype.itemsize],
            "data_offsets": [start, start + size],
        }
    data = json.dumps(header).encode()
    data += b" " * (-len(data) % 8)  # so that arrays are aligned
    if len(data) > _MOST_HEADER:
        raise ValueError(f"its header has {len(data)} bytes, more than {_MOST_HEADER}")
    return len(data).to_bytes(8, "little") + data


def _places(entries: Mapping[str, Any]) -> dict[str, int]:
    """Returns the start of each array, in the order of the file."""
    places, start = {}, 0
    for name in sorted(entries, key=lambda name: -np.dtype(entries[name]["dtype"]).itemsize):
        places[name] = start
        start += num_bytes(entries[name])
    return places


def _header_size(file: Any) -> int:
    lead = file.read(8)
    size = int.from_bytes(lead, "little")
    if len(lead) < 8 or size > _MOST_HEADER:
        raise ValueError("it is cut off, or the size of its header is damaged")
    return size


def _bytes_at(file: Any, start: int, name: str, entry: Mapping[str, Any]) -> np.ndarray:
    require_memory({name: entry})
    data = np.empty(num_bytes(entry), np.uint8)
    file.seek(start)
    if file.readinto(data) != data.size:
        raise ValueError(f"it is cut off, and {name} is incomplete")
    return data


def _entry(value: Value) -> dict[str, Any]:
    data = value.data if isinstance(value, KeyData) else value
    checksum = zlib.crc32(bytes_of(value).data)
    entry = {"shape": list(data.shape), "dtype": data.dtype.name, "checksum": checksum}
    return entry | {"impl": value.impl} if isinstance(value, KeyData) else entry


def _checked_metadata(metadata: Any) -> dict[str, Any]:
    """Checks the contents: a file that was made on purpose has a right checksum."""
    if metadata["format"] != FORMAT:
        raise ValueError(f"it has format {metadata['format']}, but this version reads {FORMAT}")
    if not all(isinstance(metadata.get(name), dict) for name in ("arrays", "position", "metrics")):
        raise ValueError("its header lacks arrays, position or metrics")
    for name, entry in metadata["arrays"].items():
        if not _is_entry(entry):
            raise ValueError(f"the entry of {name} in its header is invalid: {entry!r:.200}")
    return metadata


def _is_entry(entry: Any) -> bool:
    if not isinstance(entry, dict) or not isinstance(entry.get("impl", ""), str):
        return False
    shape, dtype, checksum = (entry.get(name) for name in ("shape", "dtype", "checksum"))
    is_shape = isinstance(shape, list) and all(type(n) is int and n >= 0 for n in shape)
    return is_shape and isinstance(dtype, str) and type(checksum) is int


def _sync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some file systems, such as SMB mounts, cannot sync directories.
        if error.errno not in (errno.EBADF, errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)
