"""`TrainerState`: the model, optimizer and position of a `Trainer`, which it saves and restores."""

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import optax
from flax import nnx

from mirror._src.checks.trial import copy_of
from mirror._src.distributed.store import barrier
from mirror._src.strategy.mirrored import get_strategy
from mirror._src.strategy.strategy import Strategy
from mirror._src.training.checkpoints import snapshot
from mirror._src.training.checkpoints.from_chief import CheckpointOfChief
from mirror._src.training.checkpoints.host_copies import on_host
from mirror._src.training.checkpoints.load import find_checkpoint
from mirror._src.training.checkpoints.store import CheckpointStore
from mirror._src.training.fit import TrainingRun
from mirror._src.training.mistakes import advice_for_model
from mirror._src.training.optimizer import make_optimizer
from mirror._src.training.position import Position
from mirror._src.training.readers import Readers
from mirror._src.training.state_lock import StateLock
from mirror._src.training.summary import num_parameters
from mirror._src.utils import interrupts
from mirror._src.utils.errors import counted, describe, require_secs
from mirror._src.utils.tracebacks import api_boundary
from mirror._src.utils.unknown_names import unknown_attribute
from mirror._src.watchdog.watch import watch

M = TypeVar("M", bound=nnx.Module)


class TrainerState(Generic[M]):
    """Base class of `Trainer`: its model and optimizer, its position, and its checkpoints."""

    def __init__(
        self,
        model: M,
        tx: optax.GradientTransformation | nnx.Optimizer[Any],
        strategy: Strategy | None,
        wrt: Any,
        stall_secs: float | None,
    ) -> None:
        if not isinstance(model, nnx.Module):
            raise TypeError(
                f"`model` must be an nnx.Module, got {describe(model)}. {advice_for_model(model)}"
            )
        if not isinstance(strategy, Strategy | None):
            raise TypeError(
                f"`strategy` must be a mirror.Strategy, got {describe(strategy)}. Pass "
                "mirror.MirroredStrategy(), or create the trainer inside its scope()."
            )
        self.strategy = get_strategy() if strategy is None else strategy
        self.model = model
        self.optimizer = make_optimizer(model, tx, wrt)
        self._stall_secs = stall_secs
        if stall_secs is not None:
            self._stall_secs = require_secs("stall_secs", stall_secs)
        self._num_parameters = num_parameters(model)  # for `repr`, which must not fail
        self._position = Position()
        self._resumes = False
        self._run: TrainingRun | None = None
        self._launch: tuple[Any, ...] | None = None
        self._lock, self._readers = StateLock(), Readers()

    def __repr__(self) -> str:
        position = self._position
        replicas = counted(self.strategy.num_replicas_in_sync, "replica")
        return (
            f"{type(self).__name__}({type(self.model).__name__}, "
            f"{self._num_parameters:,} parameters, {type(self.strategy).__name__}({replicas}), "
            f"epoch {position.epoch}, step {position.step})"
        )

    @api_boundary
    def save(self, directory: str | Path) -> None:
        """Writes a checkpoint: model, optimizer, random keys and the position of the training.

        The checkpoint contains one copy of each array. `restore` reads it on any number of
        replicas; `mirror.load_checkpoint` reads it without a model or devices. In a job of several
        processes, every process calls it, and the chief writes.

        Args:
            directory: Directory of checkpoints. This one is a subdirectory named after the step.

        Raises:
            OSError: If the checkpoint cannot be written. Earlier checkpoints remain intact.
            ValueError: If an `"on_read"` variable has no aggregation.

        >>> trainer.save("checkpoints")
        >>> trainer.restore("checkpoints")
        >>> history = trainer.fit(data, epochs=9, progress=False)
        """
        with self._readers.reading("save"):
            if not self.strategy.spans_processes:
                self._write(directory)
                return
            try:
                if self.strategy.is_chief:
                    self._write(directory)
                else:
                    self.checkpoint_state()  # aggregating an "on_read" variable is a collective
            finally:
                barrier("trainer.save")  # then every process can read it

    def _write(self, directory: str | Path) -> None:
        with CheckpointStore(directory, asynchronous=False) as store:
            arrays, position = self.checkpoint_state()
            store.save(position["step"], arrays, position)

    @api_boundary
    def restore(self, directory: str | Path, step: int | str = "last") -> None:
        """Restores a checkpoint, from which `fit` resumes.

        In a job of several processes, every process calls it, and all restore the checkpoint of the
        chief. A process that does not have the same files receives the arrays from the chief.

        Args:
            directory: Directory of checkpoints. With several processes, only the chief's must
                exist.
            step: Step of the checkpoint, `"last"` or `"best"`.

        Raises:
            FileNotFoundError: If the checkpoint does not exist.
            ValueError: If it is damaged or does not match the model; the model is not changed.
            RuntimeError: If called during `fit`. With several processes, if one does not call it
                within `agreement_secs`, or calls it for another model or step.
        """
        self._require_no_fit("restore")
        position, arrays = self._read(directory, step)
        with interrupts.DeferredInterrupts():  # all or nothing
            snapshot.write(self._objects, arrays, self.strategy._replicas)
            self._position, self._resumes = position, True

    def _read(self, directory: str | Path, step: int | str) -> tuple[Position, Mapping[str, Any]]:
        """Returns the position and the arrays of a checkpoint that matches the model."""
        if self.strategy.spans_processes:
            current = snapshot.described(self._objects)  # a collective: before an error of one
            return CheckpointOfChief(self.strategy, directory, step, current).read()
        checkpoint = find_checkpoint(directory, step)
        with checkpoint.readable():
            position = Position.from_dict(checkpoint.position)
        snapshot.require_match(snapshot.described(self._objects), checkpoint.entries)
        return position, checkpoint.read()

    def checkpoint_state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Returns the contents of a checkpoint: arrays by name, and the position.

        If another thread trains, it waits until the end of a step, and the arrays are copies on the
        host: later steps delete the trainer's own.
        """
        with self._readers.reading("checkpoint_state") as must_copy:
            must_copy = must_copy and not self._lock.is_mine
            with self._lock.held() if must_copy else contextlib.nullcontext():
                run = self._run
                if run is None:
                    self._position.meter.collect()
                else:
                    run.collect(may_call=not must_copy)
                    run.remember_callbacks()
                with self._lock.held():  # the callbacks of `collect` run without it
                    arrays = snapshot.read(self._objects)
                    return on_host(arrays) if must_copy else arrays, self._position.to_dict()

    @contextlib.contextmanager
    def _reading(self, method: str, *objects: Any) -> Iterator[list[Any]]:
        """Yields nnx objects whose arrays no step deletes: copies if another thread trains."""
        with self._readers.reading(method) as must_copy:
            if must_copy:
                with self._lock.held():
                    objects = tuple(copy_of(objects))
            yield list(objects)

    def _watched(self) -> contextlib.AbstractContextManager[Any]:
        """Context manager that raises an error if a step does not end, and is not nested."""
        if self._stall_secs is None or self._run is not None:
            return contextlib.nullcontext()
        return watch(self._stall_secs, "raise")

    @property
    def _objects(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer}

    def _require_no_fit(self, name: str) -> None:
        if self._run is not None:
            raise RuntimeError(
                f"trainer.{name}() cannot be called while fit() is running (from a callback or "
                "another thread). Callbacks may call trainer.evaluate(), predict() and save()."
            )

    @contextlib.contextmanager
    def _running(self, run: TrainingRun) -> Iterator[None]:
        with self._readers.training():
            self._run, self._position, self._resumes = run, run.position, True
            try:
                yield
            finally:
                self._run = self._launch = None

    if not TYPE_CHECKING:  # for type checkers, there are no other attributes

        def __getattr__(self, name: str) -> Any:
            raise unknown_attribute("trainer", self, name)
