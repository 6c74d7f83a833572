"""The layout of a checkpoint directory: file names, order, and the JSON about a checkpoint.

A checkpoint contains arrays by name, and JSON:

    ckpt/120/arrays   the arrays, a flat dictionary that Orbax can read as well
    ckpt/120/about    JSON: position and metrics; shape, dtype and checksum of every array

A directory is renamed to its number when it is complete, and renamed again before it is deleted.
After an interrupt at any point, every directory with a number can be loaded.
"""

import json
import math
import os
import re
import shutil
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeAlias

Best: TypeAlias = tuple[str, Literal["min", "max"]]

FORMAT = 1
ABOUT = Path("about", "metadata")
UNFINISHED = ".orbax-checkpoint-tmp"  # named by Orbax
REPLACES = ".new"  # complete, and about to replace the checkpoint of the same step
_REMOVED = ".removed"
_STEP = re.compile(rf"(0|[1-9][0-9]*)({re.escape(REPLACES)})?")
LEFTOVER = re.compile(
    rf"[0-9]+({re.escape(REPLACES)})?({re.escape(UNFINISHED)}.*|{re.escape(_REMOVED)})"
)


def absolute(directory: str | os.PathLike[str]) -> Path:
    """Returns the absolute path, which Orbax requires."""
    text = os.fspath(directory)
    if not isinstance(text, str) or not text or "://" in text:
        raise ValueError(f"`directory` must be the path of a local directory, got {text!r}.")
    path = Path(text).expanduser().resolve()
    if {"\\", "["} & set(str(path)):  # TensorStore reads "\\" as "/", Orbax "[" as a pattern
        raise ValueError(f"`directory` must be a path without '[' and '\\', got {str(path)!r}.")
    return path


def checkpoints_in(directory: Path) -> dict[int, Path]:
    """Returns the checkpoints by step, in order. `120.new` takes precedence over `120`."""
    paths = {}
    for path in sorted(directory.iterdir()):  # "120" comes before "120.new"
        match = _STEP.fullmatch(path.name)
        if match and (path / ABOUT).is_file():
            paths[int(match[1])] = path
    return dict(sorted(paths.items()))


def in_order_of_writing(paths: Mapping[int, Path]) -> list[int]:
    """Returns the steps by time of writing: a second training may restart at step 0."""

    def written(step: int) -> int:
        try:
            return int(read_about(paths[step])["written"])
        except Exception:  # loading the checkpoint reports that it is damaged
            return (paths[step] / ABOUT).stat().st_mtime_ns

    return sorted(paths, key=written)


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
    if place.exists():
        remove(place)
    path.rename(place)


def remove(path: Path) -> None:
    """Renames a checkpoint, so that it has no number, and then deletes it."""
    doomed = path.with_name(path.name + _REMOVED)
    shutil.rmtree(doomed, ignore_errors=True)
    path.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)  # the next store deletes the rest


def read_about(path: Path) -> dict[str, Any]:
    """Reads the JSON of a checkpoint.

    Raises:
        ValueError: If it is damaged, or has another format.
    """
    about = json.loads((path / ABOUT).read_text())
    if about.pop("checksum") != checksum_of_json(about):
        raise ValueError(f"the checksum of {ABOUT} does not match")
    if about["format"] != FORMAT:
        raise ValueError(f"it has format {about['format']}, but this version reads {FORMAT}")
    return about


def checksum_of_json(value: Any) -> int:
    """Returns a checksum of a JSON value that does not depend on the order of keys."""
    return zlib.crc32(json.dumps(value, sort_keys=True).encode())
