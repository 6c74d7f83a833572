"""`TrainerState`: the model, optimizer and position of a `Trainer`, which it saves and restores."""

import contextlib
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import optax
from flax import nnx

from mirror._src.base import interrupts
from mirror._src.base.errors import counted, describe, require_secs
from mirror._src.base.tracebacks import api_boundary
from mirror._src.base.unknown_names import unknown_attribute
from mirror._src.cluster.store import barrier
from mirror._src.inspection.watch import watch
from mirror._src.passes.callbacks import in_callback
from mirror._src.strategy.mirrored import strategy_of_trainer
from mirror._src.strategy.strategy import Strategy
from mirror._src.training.checkpoints import snapshot
from mirror._src.training.checkpoints.from_chief import CheckpointOfChief
from mirror._src.training.checkpoints.load import find_checkpoint
from mirror._src.training.checkpoints.store import CheckpointStore
from mirror._src.training.fit import TrainingRun
from mirror._src.training.loss_scale import SCALE, LossScaleArgument, loss_scale_of
from mirror._src.training.mistakes import advice_for_model
from mirror._src.training.optimizer import make_optimizer
from mirror._src.training.position import Position
from mirror._src.training.precision import Precision, PrecisionName
from mirror._src.training.remote import RemoteStrategy, RemoteTraining, local_strategy
from mirror._src.training.summary import num_parameters

M = TypeVar("M", bound=nnx.Module)


class TrainerState(Generic[M]):
    """Base class of `Trainer`: its model and optimizer, its position, and its checkpoints."""

    def __init__(
        self,
        model: M,
        tx: optax.GradientTransformation | nnx.Optimizer[Any],
        strategy: Strategy | RemoteStrategy | None,
        wrt: Any,
        stall_secs: float | None,
        precision: PrecisionName | None,
        loss_scale: LossScaleArgument,
    ) -> None:
        if not isinstance(model, nnx.Module):
            raise TypeError(
                f"`model` must be an nnx.Module, got {describe(model)}. {advice_for_model(model)}"
            )
        if not isinstance(strategy, Strategy | RemoteStrategy | None):
            raise TypeError(
                f"`strategy` must be a mirror.Strategy, got {describe(strategy)}. Pass "
                "mirror.MirroredStrategy(), or create the trainer inside its scope()."
            )
        self.strategy: Strategy | RemoteStrategy = (
            strategy if isinstance(strategy, RemoteStrategy) else strategy_of_trainer(strategy)
        )
        self._local = local_strategy(self.strategy)
        self._remote: RemoteTraining | None = None
        self._has_lost_values = False
        self._model = model
        self._optimizer = make_optimizer(model, tx, wrt)
        self._precision = Precision(precision)
        self.precision = precision
        self.loss_scale = loss_scale_of(loss_scale, precision)
        self._stall_secs = stall_secs
        if stall_secs is not None:
            self._stall_secs = require_secs("stall_secs", stall_secs)
        self._num_parameters = num_parameters(model)  # for `repr`, which must not fail
        self._position = Position()
        self._resumes = False
        self._run: TrainingRun | None = None
        self._launch: tuple[Any, ...] | None = None
        self._users: list[int] = []  # threads in `_using`

    def __repr__(self) -> str:
        position = self._position
        replicas = counted(self.strategy.num_replicas_in_sync, "replica")
        precision = "" if self.precision is None else f"{self.precision}, "
        return (
            f"{type(self).__name__}({type(self._model).__name__}, "
            f"{self._num_parameters:,} parameters, {type(self.strategy).__name__}({replicas}), "
            f"{precision}epoch {position.epoch}, step {position.step})"
        )

    @property
    def model(self) -> M:
        """The model. During `fit`, it is as it is between two steps."""
        self._require_current("model")
        return self._model

    @model.setter
    def model(self, model: M) -> None:
        self._require_local("model")
        self._precision.set_on(model)
        self._model = model

    @property
    def optimizer(self) -> nnx.Optimizer[Any]:
        """The optimizer. During `fit`, it is as it is between two steps."""
        self._require_current("optimizer")
        return self._optimizer

    @optimizer.setter
    def optimizer(self, optimizer: nnx.Optimizer[Any]) -> None:
        self._require_local("optimizer")
        self._optimizer = optimizer

    @api_boundary
    def save(self, directory: str | Path) -> None:
        """Writes a checkpoint: model, optimizer, random keys and the position of the training.

        The checkpoint contains one copy of each array. `restore` reads it on any number of
        replicas; `mirror.load_checkpoint` reads it without a model or devices. In a job of several
        processes, every process calls it, and the chief writes.

        Args:
            directory: Directory of checkpoints. This one is the file `step-120.safetensors` at step
                120, in the format of safetensors.

        Raises:
            OSError: If the checkpoint cannot be written. Earlier checkpoints remain intact.
            ValueError: If an `"on_read"` variable has no aggregation.

        >>> trainer.save("checkpoints")
        >>> trainer.restore("checkpoints")
        >>> history = trainer.fit(data, epochs=9, progress=False)
        """
        with self._using("save"):
            if not self._local._spans_processes:
                self._write(directory)
                return
            try:
                if self._local.is_chief:
                    self._write(directory)
                else:
                    self._checkpoint_state()  # aggregating an "on_read" variable is a collective
            finally:
                barrier("trainer.save")  # then every process can read it

    def _write(self, directory: str | Path) -> None:
        with CheckpointStore(directory, asynchronous=False) as store:
            arrays, position = self._checkpoint_state()
            store.save(position["step"], arrays, position)

    @api_boundary
    def restore(self, directory: str | Path, step: int | str = "last") -> None:
        """Restores a checkpoint, from which `fit` resumes.

        In a job of several processes, every process calls it, and all restore the checkpoint of the
        chief. A process that does not have the same files receives the arrays from the chief.

        The precision is not part of a checkpoint: parameters are float32 in each. The state of the
        loss scale is; if the checkpoint does not contain one, the scale restarts.

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
            if self.loss_scale is not None:  # which a training without one does not save
                self.loss_scale.reset()
            snapshot.write(self._objects, arrays, self._local._replicas)
            self._position, self._resumes = position, True
            self._has_lost_values = False

    def _read(self, directory: str | Path, step: int | str) -> tuple[Position, Mapping[str, Any]]:
        """Returns the position and the arrays of a checkpoint that matches the model."""
        if self._local._spans_processes:
            current = snapshot.described(self._objects)  # a collective: before an error of one
            return CheckpointOfChief(self._local, directory, step, current).read()
        checkpoint = find_checkpoint(directory, step)
        with checkpoint.readable():
            position = Position.from_dict(checkpoint.position)
        snapshot.require_match(snapshot.described(self._objects), checkpoint.entries)
        return position, checkpoint.read()

    def _checkpoint_state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Returns the contents of a checkpoint: arrays by name, and the position."""
        self._require_no_lost_values()
        with self._using("save"):
            if self._run is None:
                self._position.meter.collect()
            else:
                self._run.collect()
                self._run.remember_callbacks()
            return snapshot.read(self._objects), self._position.to_dict()

    @contextlib.contextmanager
    def _using(self, method: str) -> Iterator[None]:
        """Context manager around a method that reads the arrays, which steps of `fit` delete.

        Raises:
            RuntimeError: If another thread trains, or it is called inside a step.
        """
        me = threading.get_ident()
        self._users.append(me)  # before the check, as `fit` is noted before it looks for users
        try:
            self._require_thread_of_fit(f"{method}()")
            self._synchronize()
            yield
        finally:
            self._users.remove(me)

    def _require_thread_of_fit(self, what: str) -> None:
        run, where = self._run, ""
        if in_callback():
            where = "inside a host callback of a step"
        elif run is not None and run.thread != threading.get_ident():
            where = "in another thread while fit() trains"
        if where:
            raise RuntimeError(
                f"trainer.{what} was used {where}. Each step deletes the arrays of the model that "
                "it updates, so only the thread of fit() may use them, between two steps. Use it "
                "in on_step(self, fit) of a mirror.callbacks.Callback, or after fit()."
            )

    def _synchronize(self) -> None:
        """Waits for steps in other processes, and writes their results into the objects."""
        if self._remote is not None:
            self._remote.synchronize()

    def _require_local(self, name: str) -> None:
        if self._remote is not None:
            kind = type(self.strategy).__name__
            raise TypeError(
                f"trainer.{name} cannot be replaced with {kind}. Change its arrays, for example "
                f"nnx.update(trainer.{name}, state), or create a new Trainer."
            )

    def _require_current(self, name: str) -> None:
        """Waits for steps in other processes if a callback reads the model or the optimizer."""
        if self._remote is None or self._run is None:
            return
        self._require_thread_of_fit(name)
        try:
            self._synchronize()
        except AttributeError as error:  # of a step; `__getattr__` would replace it
            raise RuntimeError(f"A step raised {type(error).__name__}: {error}") from error

    @contextlib.contextmanager
    def _ends_synchronized(self) -> Iterator[None]:
        """Context manager after which the objects belong to the position, also after an error."""
        try:
            yield
        except BaseException:
            if self._remote is not None:
                with contextlib.suppress(Exception):  # the error that ends `fit` is raised
                    self._synchronize()
                self._has_lost_values = self._remote.has_lost_values
                # Steps are counted when they are scheduled. With synchronous updates, this is
                # where the model is. With others, batches after the one that failed may have been
                # used, and are used again.
                self._position.drop_failed()
            raise

    def _require_no_lost_values(self) -> None:
        """Rejects to resume or to save if the values of the servers could not be read at the end.

        Raises:
            RuntimeError: If the position is later than the model.
        """
        if self._has_lost_values:
            raise RuntimeError(
                f"Training ended at step {self._position.step}, but the model has older values, "
                "because the values on the parameter servers were lost. Restore a checkpoint, "
                "trainer.restore(directory), or pass initial_epoch to train from the values that "
                "the model has."
            )

    def _watched(self) -> contextlib.AbstractContextManager[Any]:
        """Context manager that raises an error if a step does not end, and is not nested."""
        if self._stall_secs is None or self._run is not None:
            return contextlib.nullcontext()
        return watch(self._stall_secs, "raise")

    @property
    def _objects(self) -> dict[str, Any]:
        objects = {"model": self._model, "optimizer": self._optimizer}
        return objects if self.loss_scale is None else {**objects, SCALE: self.loss_scale}

    def _require_no_fit(self, name: str) -> None:
        if self._run is not None:
            raise RuntimeError(
                f"trainer.{name}() cannot be called while fit() is running (from a callback or "
                "another thread). Callbacks may call trainer.evaluate(), predict() and save()."
            )

    @contextlib.contextmanager
    def _running(self, run: TrainingRun) -> Iterator[None]:
        self._run = run
        try:
            if set(self._users) - {run.thread}:
                raise RuntimeError(
                    "trainer.fit() was called while a method of the trainer runs in another "
                    "thread. Each step would delete the arrays of the model that it uses. Wait for "
                    "its result before fit()."
                )
            self._position, self._resumes = run.position, True
            yield
        finally:
            self._run = self._launch = None

    if not TYPE_CHECKING:  # for type checkers, there are no other attributes

        def __getattr__(self, name: str) -> Any:
            raise unknown_attribute("trainer", self, name)
