"""A step with what it takes: a named one, or the user's own."""

import argparse
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, TypeAlias, final

import jax
import numpy as np

from mirror._src.cli.bench.named import NAMED, make_named
from mirror._src.data.source import DistributedDatasetBase
from mirror._src.strategy.strategy import Strategy
from mirror._src.training.single_step import step_of
from mirror._src.training.trainer import Trainer
from mirror._src.utils.errors import describe
from mirror._src.utils.types import PyTree, StepFunction

_FORM = "(step, args) or (step, args, data), or (trainer, data)"


class WorkloadError(ValueError):
    """There is no such step, or it cannot be measured as was asked; the message says what to do."""


class Workload(NamedTuple):
    """A step and what it takes.

    Attributes:
        step: for one replica.
        args: its arguments, without the batch where there are `data`.
        data: distributed batches, each the last argument of a step; `None`: there are none.
    """

    step: StepFunction
    args: tuple[Any, ...]
    data: Iterable[PyTree] | None


MakeWorkload: TypeAlias = Callable[[Strategy], Workload]


def workload_of(text: str, batch_size: int | None, weak: bool) -> MakeWorkload:
    """What makes the workload of a strategy.

    Args:
        text: `mlp`, `cnn`, `module:function` or `file.py:function`.
        batch_size: of a named step; `None`: its own.
        weak: whether each replica, and not all together, has the batch.

    Raises:
        WorkloadError: there is no such step, or it brings its own batch size.
    """
    if text in NAMED:
        size = NAMED[text].batch_size if batch_size is None else batch_size
        return lambda strategy: _named(text, strategy, size, weak)
    if batch_size is not None:
        raise WorkloadError(
            f"--batch-size {batch_size}: {text} brings its own batches. Leave --batch-size out, or "
            f"measure {' or '.join(NAMED)}."
        )
    function = _load(text)
    return lambda strategy: _own(text, function, strategy, weak)


def _named(name: str, strategy: Strategy, batch_size: int, weak: bool) -> Workload:
    n = strategy.num_replicas_in_sync
    if not weak and batch_size % n:
        raise WorkloadError(
            f"A batch of {batch_size} does not divide by {n} devices. Pass --batch-size "
            f"{-(-batch_size // n) * n}, or --weak: the same batch on each."
        )
    step, args = make_named(name, strategy, batch_size * n if weak else batch_size)
    return Workload(step, args, None)


def _own(
    text: str, function: Callable[[Strategy], Any], strategy: Strategy, weak: bool
) -> Workload:
    with strategy.scope():
        made = function(strategy)
    if isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], Trainer):
        return _training(text, *made, strategy, weak)
    if not isinstance(made, tuple) or len(made) not in (2, 3) or not callable(made[0]):
        raise WorkloadError(f"{text} returned {describe(made)}. Return {_FORM}.")
    step, args, data = (*made, None)[:3]
    if not isinstance(args, tuple | list):
        raise WorkloadError(
            f"{text} returned {describe(args)} as the arguments of the step. Return {_FORM}, args "
            "a tuple: (model, optimizer)."
        )
    if data is None or isinstance(data, DistributedDatasetBase):
        return Workload(step, tuple(args), data)
    if weak:
        data = RepeatedBatches(data, strategy.num_replicas_in_sync)
    return Workload(step, tuple(args), strategy.distribute_dataset(data))


def _training(text: str, trainer: Trainer, data: Any, strategy: Strategy, weak: bool) -> Workload:
    """One training step of a trainer."""
    if isinstance(data, DistributedDatasetBase):
        raise WorkloadError(
            f"{text} returned batches that are distributed already. Return the global batches: "
            "(trainer, data)."
        )
    if weak:
        data = RepeatedBatches(data, strategy.num_replicas_in_sync)
    batches = strategy.distribute_dataset(data, remainder="pad")
    return Workload(step_of(trainer), (trainer.model, trainer.optimizer), batches)


@final
class RepeatedBatches(Iterable[PyTree]):
    """Each batch so many times over, as one batch."""

    def __init__(self, data: Iterable[PyTree], times: int) -> None:
        self._data = data
        self._times = times

    def __iter__(self) -> Iterator[PyTree]:
        return (jax.tree.map(self._repeat, batch) for batch in self._data)

    def _repeat(self, leaf: Any) -> np.ndarray:
        return np.concatenate([np.asarray(leaf)] * self._times)


def _load(text: str) -> Callable[[Strategy], Any]:
    """The user's function.

    Raises:
        WorkloadError: there is none.
    """
    where, _, name = text.rpartition(":")
    if not where or not name:
        raise WorkloadError(
            f"There is no step {text!r}. Name {' or '.join(NAMED)}, or your own: module:function "
            "or file.py:function."
        )
    module = _from_file(Path(where)) if where.endswith(".py") else _by_name(where)
    function = getattr(module, name, None)
    if not callable(function):
        there = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
        raise WorkloadError(
            f"There is no function {name} in {where}, which has {', '.join(there) or 'none'}. Name "
            f"one that takes a strategy and returns {_FORM}."
        )
    return function


def _from_file(file: Path) -> ModuleType:
    """The module in a file, which finds its neighbours as `python file.py` does."""
    if not file.is_file():
        raise WorkloadError(f"There is no file {file}. Name one: path/to/file.py:function.")
    name = f"mirror_bench_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None, "the name ends in .py"
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    sys.path.insert(0, str(file.resolve().parent))
    spec.loader.exec_module(module)
    return module


def _by_name(name: str) -> ModuleType:
    """The module of that name, as `python -m` finds it: in this folder, too."""
    sys.path.insert(0, "")
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        raise WorkloadError(
            f"There is no module {error.name}, neither installed nor in {Path.cwd()}. Name one, "
            "module:function, or a file, path/to/file.py:function."
        ) from error


def add_step(parser: argparse.ArgumentParser) -> None:
    """Adds the argument that names a workload, as `workload_of` takes it."""
    parser.add_argument(
        "step",
        nargs="?",
        default="mlp",
        metavar="STEP",
        help=f"{', '.join(NAMED)}, module:function or file.py:function (default: %(default)s)",
    )
