"""The layout of a checkpoint directory: file names, order, and the JSON about a checkpoint.

A checkpoint contains arrays by name, and JSON:

    ckpt/120/arrays   the arrays, a flat dictionary that Orbax can read as well
    ckpt/120/about    JSON: position and metrics; shape, dtype and checksum of every array

A directory is renamed to its number when it is complete and on the disk, and renamed again before
it is deleted. After an interrupt or a power failure at any point, every directory with a number can
be loaded.
"""

import errno
import json
import math
import os
import re
import time
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeAlias

from mirror._src.training.checkpoints import durable

Best: TypeAlias = tuple[str, Literal["min", "max"]]

FORMAT = 1
ABOUT = Path("about", "metadata")
LOCK = ".mirror.lock"
UNFINISHED = ".unfinished"
REPLACES = ".new"  # complete, and about to replace the checkpoint of the same step
_OF_ORBAX = ".orbax-checkpoint-tmp"  # what Orbax appends while it writes
_REMOVED = ".removed"
_STEP = re.compile(rf"(0|[1-9][0-9]*)({re.escape(REPLACES)})?")
LEFTOVER = re.compile(
    rf"[0-9]+({re.escape(REPLACES)})?"
    rf"({re.escape(UNFINISHED)}|({re.escape(UNFINISHED)})?{re.escape(_OF_ORBAX)}.*"
    rf"|{re.escape(_REMOVED)})"
)


def absolute(directory: str | os.PathLike[str]) -> Path:
    """Returns the absolute path, which Orbax requires."""
    text = os.fspath(directory)
    if not isinstance(text, str) or not text or "://" in text or not _is_name(text):
        raise ValueError(
            f"`directory` must be the path of a local directory, got {text!r}. Use characters that "
            "UTF-8 can encode."
        )
    path = Path(text).expanduser()
    try:
        path = path.resolve()
    except RuntimeError:  # in Python 3.11 and 3.12, for a link to itself; opening it fails
        path = path.absolute()
    if {"\\", "["} & set(str(path)):  # TensorStore reads "\\" as "/", Orbax "[" as a pattern
        raise ValueError(f"`directory` must be a path without '[' and '\\', got {str(path)!r}.")
    return path


def _is_name(text: str) -> bool:
    """Whether Orbax can write to this path."""
    try:
        text.encode()
    except UnicodeEncodeError:  # Python's form of a name that is not UTF-8
        return False
    return "\0" not in text


def checkpoints_in(directory: Path) -> dict[int, Path]:
    """Returns the checkpoints by step, in order. `120.new` takes precedence over `120`.

    A directory that does not exist has none.
    """
    paths = {}
    try:
        entries = sorted(directory.iterdir())  # "120" comes before "120.new"
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):  # ELOOP: a link to itself
            return {}
        raise
    for path in entries:
        match = _STEP.fullmatch(path.name)
        if match and (path / ABOUT).is_file():
            paths[int(match[1])] = path
    return dict(sorted(paths.items()))


def in_order_of_writing(paths: Mapping[int, Path]) -> list[int]:
    """Returns the steps in order of writing: a second training may restart at step 0."""
    return sorted(paths, key=lambda step: _written(paths[step]))


def next_written(directory: Path) -> int:
    """Returns the `written` of a new checkpoint, which is greater than all others'.

    It is the time in nanoseconds, except after the clock was set back.
    """
    others = map(_written, checkpoints_in(directory).values())
    return max(time.time_ns(), max(others, default=0) + 1)


def _written(path: Path) -> int:
    try:
        return int(read_about(path)["written"])
    except Exception:  # loading the checkpoint reports that it is damaged
        return (path / ABOUT).stat().st_mtime_ns


def best_of(abouts: dict[int, dict], rule: Best) -> int | None:
    """Returns the step with the best value of the metric: the last of equals, and never NaN."""
    metric, mode = rule
    sign = -1 if mode == "min" else 1
    values = {step: about["metrics"].get(metric, math.nan) for step, about in abouts.items()}
    ranked = [(sign * value, step) for step, value in values.items() if not math.isnan(value)]
    return max(ranked)[1] if ranked else None


def put_in_place(path: Path) -> None:
    """Renames `120.new`, which is complete, to `120`."""
    place = path.with_suffix("")
    if place.exists() or place.is_symlink():
        remove(place)
    durable.rename(path, place)


def remove(path: Path) -> None:
    """Renames a checkpoint, so that it has no number, and then deletes it."""
    doomed = path.with_name(path.name + _REMOVED)
    durable.delete(doomed)
    durable.rename(path, doomed)
    durable.delete(doomed)  # the next store deletes the rest


def read_about(path: Path) -> dict[str, Any]:
    """Reads the JSON of a checkpoint.

    Raises:
        ValueError: If it is damaged, or has another format.
    """
    about = json.loads((path / ABOUT).read_text(encoding="utf-8"))
    if about.pop("checksum") != checksum_of_json(about):
        raise ValueError(f"the checksum of {ABOUT} does not match")
    if about["format"] != FORMAT:
        raise ValueError(f"it has format {about['format']}, but this version reads {FORMAT}")
    return about


def contents(about: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any], dict[str, float]]:
    """Returns the entries of the arrays, the position and the metrics.

    Raises:
        ValueError: If one is missing or invalid. The checksum finds damage, but a file that was
            made on purpose has a right one.
    """
    entries, position, metrics = (about.get(name) for name in ("arrays", "position", "metrics"))
    if not (isinstance(entries, dict) and isinstance(position, dict) and isinstance(metrics, dict)):
        raise ValueError(f"{ABOUT} lacks arrays, position or metrics")
    for name, entry in entries.items():
        if not _is_entry(entry):
            raise ValueError(f"the entry of {name} in {ABOUT} is invalid: {entry!r:.200}")
    return entries, position, metrics


def _is_entry(entry: Any) -> bool:
    if not isinstance(entry, dict) or not isinstance(entry.get("impl", ""), str):
        return False
    shape, dtype, checksum = (entry.get(name) for name in ("shape", "dtype", "checksum"))
    is_shape = isinstance(shape, list) and all(type(n) is int and n >= 0 for n in shape)
    return is_shape and isinstance(dtype, str) and type(checksum) is int


def checksum_of_json(value: Any) -> int:
    """Returns a checksum of a JSON value that does not depend on the order of keys."""
    return zlib.crc32(json.dumps(value, sort_keys=True).encode())
