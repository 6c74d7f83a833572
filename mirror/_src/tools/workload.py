"""Workloads to measure: a built-in step, or a step of the user's."""

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, TypeAlias, final

import jax
import numpy as np

from mirror._src.base.errors import describe
from mirror._src.base.naming import require_parameters
from mirror._src.base.types import PyTree, StepFunction
from mirror._src.data.source import DistributedDatasetBase
from mirror._src.strategy.strategy import Strategy
from mirror._src.tools.builtin_steps import BUILTIN_STEPS, make_builtin_step
from mirror._src.training.trainer import Trainer, step_of

_FORM = "(step, args) or (step, args, data), or (trainer, data)"
_FIX = f"Pass a function that takes a strategy and returns {_FORM}."


class WorkloadError(ValueError):
    """Error for a step that does not exist or that cannot be measured as requested."""


class Workload(NamedTuple):
    """A step with its arguments and data.

    Attributes:
        step: One replica's step.
        args: Arguments of the step, except for the batch if `data` is given.
        data: Distributed batches, each passed as the last argument of a step; may be `None`.
    """

    step: StepFunction
    args: tuple[Any, ...]
    data: Iterable[PyTree] | None


MakeWorkload: TypeAlias = Callable[[Strategy], Workload]


def workload_of(text: str, batch_size: int | None, weak: bool) -> MakeWorkload:
    """Returns the function that makes the workload for a strategy.

    Args:
        text: `mlp`, `cnn`, `module:function` or `file.py:function`.
        batch_size: Batch size of a built-in step. `None` selects its default.
        weak: Whether the batch is the same per replica, rather than in total.

    Raises:
        WorkloadError: If the step does not exist, or defines its own batch size.
    """
    if text in BUILTIN_STEPS:
        size = BUILTIN_STEPS[text].batch_size if batch_size is None else batch_size
        return lambda strategy: _builtin(text, strategy, size, weak)
    if batch_size is not None:
        raise WorkloadError(
            f"--batch-size {batch_size}: {text} defines its own batches. Omit --batch-size, or "
            f"measure {' or '.join(BUILTIN_STEPS)}."
        )
    function = _load(text)
    return lambda strategy: _custom(text, function, strategy, weak)


def _builtin(name: str, strategy: Strategy, batch_size: int, weak: bool) -> Workload:
    n = strategy.num_replicas_in_sync
    if not weak and batch_size % n:
        raise WorkloadError(
            f"A batch of {batch_size} cannot be split evenly across {n} replicas. Pass "
            f"--batch-size {-(-batch_size // n) * n}, or --weak for the same batch per replica."
        )
    step, args = make_builtin_step(name, strategy, batch_size * n if weak else batch_size)
    return Workload(step, args, None)


def _custom(
    text: str, function: Callable[[Strategy], Any], strategy: Strategy, weak: bool
) -> Workload:
    with strategy.scope():
        result = function(strategy)
    if isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], Trainer):
        return _training(text, *result, strategy, weak)
    if not isinstance(result, tuple) or len(result) not in (2, 3) or not callable(result[0]):
        raise WorkloadError(f"{text} returned {describe(result)}. Return {_FORM}.")
    step, args, data = (*result, None)[:3]
    if not isinstance(args, tuple | list):
        raise WorkloadError(
            f"{text} returned {describe(args)} as the arguments of the step. Return {_FORM}, where "
            "args is a tuple such as (model, optimizer)."
        )
    if data is None or isinstance(data, DistributedDatasetBase):
        return Workload(step, tuple(args), data)
    if weak:
        data = RepeatedBatches(data, strategy.num_replicas_in_sync)
    return Workload(step, tuple(args), strategy.distribute_dataset(data))


def _training(text: str, trainer: Trainer, data: Any, strategy: Strategy, weak: bool) -> Workload:
    """Returns one training step of a trainer as a workload."""
    if isinstance(data, DistributedDatasetBase):
        raise WorkloadError(
            f"{text} returned distributed batches together with a trainer. Return the global "
            "batches: (trainer, data)."
        )
    if weak:
        data = RepeatedBatches(data, strategy.num_replicas_in_sync)
    batches = strategy.distribute_dataset(data, remainder="pad")
    return Workload(step_of(trainer), tuple(trainer._objects.values()), batches)


@final
class RepeatedBatches(Iterable[PyTree]):
    """Iterable of batches, each concatenated with itself a number of times."""

    def __init__(self, data: Iterable[PyTree], times: int) -> None:
        self._data = data
        self._times = times

    def __iter__(self) -> Iterator[PyTree]:
        repeat = lambda leaf: np.concatenate([np.asarray(leaf)] * self._times)  # noqa: E731
        return (jax.tree.map(repeat, batch) for batch in self._data)


def _load(text: str) -> Callable[[Strategy], Any]:
    """Returns the user's function.

    Raises:
        WorkloadError: If it does not exist.
    """
    where, _, name = text.rpartition(":")
    if not where or not name:
        raise WorkloadError(
            f"Unknown step {text!r}. Pass {' or '.join(BUILTIN_STEPS)}, or a function of yours: "
            "module:function or file.py:function."
        )
    module = _from_file(Path(where)) if where.endswith(".py") else _by_name(where)
    function = getattr(module, name, None)
    if not callable(function):
        functions = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
        raise WorkloadError(
            f"No function {name} found in {where} (functions: {', '.join(functions) or 'none'}). "
            f"{_FIX}"
        )
    try:
        require_parameters(function, text, ("strategy",), _FIX)
    except TypeError as error:  # such as the step itself
        raise WorkloadError(str(error)) from None
    return function


def _from_file(file: Path) -> ModuleType:
    """Imports a file; as with `python file.py`, it can import modules of its directory."""
    if not file.is_file():
        raise WorkloadError(f"The file {file} does not exist. Pass path/to/file.py:function.")
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
    """Imports a module; as with `python -m`, the current directory is searched first."""
    sys.path.insert(0, "")
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        raise WorkloadError(
            f"No module named {error.name} is installed or in {Path.cwd()}. Pass module:function "
            "or path/to/file.py:function."
        ) from error
