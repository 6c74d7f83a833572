"""The files of a checkpoint directory: their names, their order, and the JSON about a checkpoint.

A checkpoint is names with arrays, and what else fits in JSON:

    ckpt/120/arrays   the arrays, a flat dictionary that Orbax alone can read too
    ckpt/120/about    JSON: position and metrics; shape, dtype and checksum of every array

A directory gets its number when it is complete, by being renamed, and loses it the same way before
it is deleted: whatever interrupts, what has a number can be loaded.
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
UNFINISHED = ".orbax-checkpoint-tmp"  # Orbax's word
REPLACES = ".new"  # complete, and about to take the place of the one of the same step
_REMOVED = ".removed"
_STEP = re.compile(rf"(0|[1-9][0-9]*)({re.escape(REPLACES)})?")
LEFT_OVER = re.compile(
    rf"[0-9]+({re.escape(REPLACES)})?({re.escape(UNFINISHED)}.*|{re.escape(_REMOVED)})"
)


def absolute(directory: str | os.PathLike[str]) -> Path:
    """As Orbax wants it, and the same after a change of the working directory."""
    text = os.fspath(directory)
    if not isinstance(text, str) or not text or "://" in text:
        raise ValueError(f"directory={text!r}: give the path of a directory of this machine.")
    path = Path(text).expanduser().resolve()
    if {"\\", "["} & set(str(path)):  # a slash to TensorStore; to Orbax, a pattern
        raise ValueError(f"directory={text!r} is {path}: give a path without '[' and '\\'.")
    return path


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


def best_of(abouts: dict[int, dict], rule: Best) -> int | None:
    """The step with the best value of the metric; of equals the last, and never NaN."""
    metric, mode = rule
    sign = -1 if mode == "min" else 1
    values = {step: about["metrics"].get(metric, math.nan) for step, about in abouts.items()}
    ranked = [(sign * value, step) for step, value in values.items() if not math.isnan(value)]
    return max(ranked)[1] if ranked else None


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


def read_about(path: Path) -> dict[str, Any]:
    """What the JSON of a checkpoint says.

    Raises:
        ValueError: it is damaged, or of another format.
    """
    about = json.loads((path / ABOUT).read_text())
    if about.pop("checksum") != checksum_of_json(about):
        raise ValueError(f"the checksum of {ABOUT} differs")
    if about["format"] != FORMAT:
        raise ValueError(f"it has format {about['format']}, and this version reads {FORMAT}")
    return about


def checksum_of_json(value: Any) -> int:
    """A checksum of what JSON holds, whatever the order of its keys."""
    return zlib.crc32(json.dumps(value, sort_keys=True).encode())
