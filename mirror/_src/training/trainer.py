"""`Trainer`: training, evaluation and prediction loops over `strategy.run`."""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
import optax
from flax import nnx

from mirror._src.checks.verify import VerifyReport
from mirror._src.data.distribute import DistributedDataset
from mirror._src.data.padded import PaddedBatch
from mirror._src.strategy.mirrored import get_strategy
from mirror._src.strategy.strategy import Strategy
from mirror._src.training import steps
from mirror._src.training.callbacks.callback import Callback, require_callbacks
from mirror._src.training.callbacks.progress import ProgressBar
from mirror._src.training.checkpoints import snapshot
from mirror._src.training.checkpoints.load import load_checkpoint
from mirror._src.training.checkpoints.store import CheckpointStore
from mirror._src.training.fit import TrainingRun
from mirror._src.training.history import History
from mirror._src.training.meter import MOST_RUNNING, Meter
from mirror._src.training.objective import LossFunction, Objective, PartOfBatch, Sums
from mirror._src.training.optimizer import make_optimizer
from mirror._src.training.position import Position, starting_position
from mirror._src.training.prediction import predictions
from mirror._src.training.stream import whole_pass
from mirror._src.utils import interrupts
from mirror._src.utils.errors import describe, expected, require_int
from mirror._src.utils.modules import set_module
from mirror._src.utils.tracebacks import api_boundary
from mirror._src.utils.types import PyTree

M = TypeVar("M", bound=nnx.Module)
_MOST_PREDICTIONS = 16


@set_module("mirror")
class Trainer(Generic[M]):
    """Trains, evaluates and predicts with a model on all replicas of a strategy.

    `loss_fn` returns one value per example and never averages: mirror divides by the number of
    examples on all replicas. Loss, metrics and gradients therefore equal what one device computes
    on the whole batch, for any batch size and number of replicas, including the last batch. Layers
    that look at a whole batch in the forward pass are not covered: batch normalization sees the
    shard of its replica and, in the last batch, the padding, which repeats the last example.

        def loss_fn(model, batch):
            logits = model(batch["image"])
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
            return losses, {"accuracy": logits.argmax(-1) == batch["label"]}

        with strategy.scope():
            trainer = mirror.Trainer(CNN(rngs=nnx.Rngs(0)), optax.adam(1e-3), loss_fn)
        history = trainer.fit(train, epochs=10, validation_data=test)

    Training uses the mode of the model (`model.train()`, `model.eval()`); evaluation and prediction
    use a copy in evaluation mode.

    Args:
        model: An `nnx.Module`. Wrap a Linen module: `nnx.bridge.ToNNX(module, rngs).lazy_init(x)`.
        tx: An optax transformation, or an `nnx.Optimizer` of the model.
        loss_fn: Function `(model, batch)` that returns float losses of shape `(B,)` for one
            replica's batch, or `(losses, metrics)` with a dict of metrics of shape `(B,)`. Booleans
            and integers are counted exactly. A loss or metric may be
            `mirror.Weighted(values, weights)`, which is divided by the sum of its weights (such as
            numbers of tokens) instead of the number of examples.
        strategy: The strategy to train with. Defaults to the strategy of the current scope.
        wrt: Which variables to train, as for `nnx.Optimizer`. Defaults to `nnx.Param`, or to the
            `wrt` of the `nnx.Optimizer` that was passed.
        accumulate_steps: Number of pieces into which each replica splits its batch to save memory.
            Every batch still takes one collective and one update.
        steps_per_execution: Number of batches per launch, to reduce the overhead on the host.
        sample_weight: Key of the batch, or function of it, for weights of shape `(B,)` by which the
            losses are multiplied. As in Keras, weights do not change the divisor, which remains the
            number of examples or the weights of a `mirror.Weighted` loss. Metrics are not weighted.
        labels: Key of the batch, or function of it, for integer classes of shape `(B,)`, which are
            validated to be from 0 to `num_classes - 1`.
        num_classes: Number of classes.
        class_weight: Factors by class, by which the losses of its examples are multiplied.
        penalty: Function of the model that returns a scalar, such as the L2 norm of the parameters.
            It is added to the mean loss and never weighted, not even for a `mirror.Weighted` loss.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If `accumulate_steps` or `steps_per_execution` is less than 1, if `labels` is
            passed without `num_classes`, or `wrt` together with an `nnx.Optimizer`.

    >>> def loss_fn(model, batch):
    ...     return optax.squared_error(model(batch["x"]), batch["y"])[:, 0]
    >>> arrays = {"x": np.ones((5, 2), "float32"), "y": np.ones((5, 1), "float32")}
    >>> data = mirror.data.from_arrays(arrays, batch_size=2)
    >>> with mirror.MirroredStrategy(["/cpu:0", "/cpu:1"]).scope():
    ...     trainer = Trainer(nnx.Linear(2, 1, rngs=nnx.Rngs(0)), optax.sgd(0.1), loss_fn)
    >>> history = trainer.fit(data, epochs=9, progress=False)
    >>> trainer.evaluate(data)["loss"] < 1e-3
    True
    >>> trainer.predict(lambda model, batch: model(batch["x"]), data).shape
    (5, 1)
    """

    @api_boundary
    def __init__(
        self,
        model: M,
        tx: optax.GradientTransformation | nnx.Optimizer[Any],
        loss_fn: LossFunction,
        *,
        strategy: Strategy | None = None,
        wrt: Any = None,
        accumulate_steps: int = 1,
        steps_per_execution: int = 1,
        sample_weight: PartOfBatch | None = None,
        labels: PartOfBatch | None = None,
        num_classes: int | None = None,
        class_weight: Mapping[int, float] | None = None,
        penalty: Callable[[Any], Any] | None = None,
    ) -> None:
        if not isinstance(model, nnx.Module):
            raise TypeError(
                f"`model` must be an nnx.Module, got {describe(model)}. To train a Linen module, "
                "wrap it: nnx.bridge.ToNNX(module, rngs=nnx.Rngs(0)).lazy_init(x)."
            )
        if not isinstance(strategy, Strategy | None):
            raise TypeError(
                f"`strategy` must be a mirror.Strategy, got {describe(strategy)}. Pass "
                "mirror.MirroredStrategy(), or create the trainer inside its scope()."
            )
        self.strategy = get_strategy() if strategy is None else strategy
        self.model = model
        self.optimizer = make_optimizer(model, tx, wrt)
        require_int("accumulate_steps", accumulate_steps)
        require_int("steps_per_execution", steps_per_execution)
        self.accumulate_steps = int(accumulate_steps)
        self.steps_per_execution = int(steps_per_execution)
        self._objective = Objective(
            loss_fn, sample_weight, labels, num_classes, class_weight, penalty
        )
        self._single_step = steps.training_step(
            self._objective, self.optimizer.wrt, self.accumulate_steps
        )
        self._train_step: Callable[..., Any] = self._single_step
        if self.steps_per_execution > 1:
            self._train_step = steps.repeated(self._single_step)
        self._evaluate_step = steps.evaluation_step(self._objective)
        self._predict_step = functools.lru_cache(_MOST_PREDICTIONS)(steps.prediction_step)
        self._position = Position()
        self._resumes = False
        self._run: TrainingRun | None = None
        self._launch: tuple[Any, ...] | None = None

    @api_boundary
    def fit(
        self,
        data: Iterable[PyTree],
        epochs: int = 1,
        *,
        validation_data: Iterable[PyTree] | None = None,
        callbacks: Callback | Sequence[Callback] = (),
        initial_epoch: int | None = None,
        steps_per_epoch: int | None = None,
        progress: bool = True,
    ) -> History:
        """Trains the model up to a number of epochs.

        After an interrupt or `restore`, training resumes at the same position, also within an
        epoch. Otherwise epochs start at 0, and the model is trained further.

        Args:
            data: Iterable of global batches of any size, as for `strategy.distribute_dataset`, or
                its result. More than one epoch needs an object that can be iterated repeatedly.
                Resuming within an epoch needs an order that depends only on the epoch, as
                `mirror.data.from_arrays` provides.
            epochs: Number of the epoch to stop at, counted from 0 also if training resumes.
            validation_data: Data to evaluate after each epoch; names of its metrics start with
                `val_`.
            callbacks: One or several `mirror.callbacks.Callback` objects.
            initial_epoch: Epoch to start with, regardless of earlier training.
            steps_per_epoch: Number of batches per epoch, for data without an end. Defaults to a
                whole pass over the data.
            progress: Whether to show a progress bar, unless `callbacks` contains one.

        Returns:
            The metrics of each epoch, including epochs before an interrupt.

        Raises:
            ValueError: If the data is empty, the loss has the wrong shape, or `epochs`,
                `initial_epoch` or `steps_per_epoch` is out of range.
            TypeError: If `data` is not an iterable of batches, a callback is not a `Callback`, or a
                number is not an integer.
            RuntimeError: If called in the scope of another strategy, in a replica, or during `fit`.
        """
        self._require_no_fit("fit")
        position = starting_position(self._position, self._resumes, epochs, initial_epoch)
        padded = self._distributed(data).padded(
            multiple=self.accumulate_steps,
            group=self.steps_per_execution,
            skip=position.samples,
            inspect=self._objective.inspect,
        )
        callbacks = require_callbacks(callbacks)
        if progress and not any(isinstance(callback, ProgressBar) for callback in callbacks):
            callbacks = (ProgressBar(), *callbacks)
        run = TrainingRun(self, epochs, position, padded, steps_per_epoch, callbacks)
        with interrupts.DeferredInterrupts(), self._running(run), run.listening():
            while position.epoch < epochs and not run.stopped:
                run.begin_epoch()
                for launch in run.launches():
                    run.after_step(launch, self._train(launch))
                    run.collect(running=MOST_RUNNING)
                    interrupts.check()
                    if run.stopped:
                        break
                is_cut_short = run.stopped is not None
                run.collect()
                if not is_cut_short:
                    run.end_epoch({} if validation_data is None else self.evaluate(validation_data))
            self._resumes = False
            interrupts.check()
        return run.history

    def evaluate(self, data: Iterable[PyTree]) -> dict[str, float]:
        """Returns the loss and the metrics over all examples of the data.

        Args:
            data: As for `fit`.

        Returns:
            `{"loss": ..., "accuracy": ...}`: means over the examples, independent of the batch
            size, or weighted means of `mirror.Weighted` values. NaN if the weights add up to 0.

        Raises:
            ValueError: If the data is empty, or the loss has the wrong shape.
        """
        meter = Meter()
        for padded in whole_pass(self._distributed(data), inspect=self._objective.inspect):
            arguments = (self.model, padded.batch, padded.mask)
            meter.add(0, self.strategy.run(self._evaluate_step, arguments))
            meter.collect(running=MOST_RUNNING)
        meter.collect()
        return meter.means

    @api_boundary
    def predict(self, fn: Callable[[Any, PyTree], PyTree], data: Iterable[PyTree]) -> PyTree:
        """Applies `fn` to all examples, and returns the results in the order of the data.

        Args:
            fn: Function `(model, batch)` that returns a pytree of arrays with a leading batch axis
                for one replica's batch. The model is in evaluation mode. Define the function once:
                every new function object is compiled.
            data: As for `fit`.

        Returns:
            The pytree that `fn` returns, with NumPy arrays of exactly one row per example.

        Raises:
            ValueError: If the data is empty, or a result does not have one row per example.
            TypeError: If `fn` is not callable.
        """
        if not callable(fn):
            fix = "Pass a function (model, batch) that returns one row per example."
            raise TypeError(expected("fn", fn, "callable", fix))
        step = self._predict_step(fn)
        return predictions(self.strategy, fn, step, self.model, self._distributed(data))

    @api_boundary
    def verify(self, data: Iterable[PyTree], *, rtol: float = 1e-5) -> VerifyReport:
        """Compares a training step on all replicas with one device, without changing the model.

        Args:
            data: As for `fit`; only the first batch is used.
            rtol: Relative tolerance; see `Strategy.verify`.

        Raises:
            ReplicaMismatchError: If the results differ; the message names them.
            ValueError: If the data is empty.

        >>> trainer.verify(data).largest < 1e-5
        True
        """
        with contextlib.closing(
            whole_pass(self._distributed(data), multiple=self.accumulate_steps)
        ) as batches:
            padded = next(batches)
        arguments = (self.model, self.optimizer, padded.batch, padded.mask)
        return self.strategy.verify(self._single_step, arguments, rtol=rtol)

    @api_boundary
    def save(self, directory: str | Path) -> None:
        """Writes a checkpoint: model, optimizer, random keys and the position of the training.

        The checkpoint contains one copy of each array. `restore` reads it on any number of
        replicas; `mirror.load_checkpoint` reads it without a model or devices.

        Args:
            directory: Directory of checkpoints. This one is a subdirectory named after the step.

        Raises:
            OSError: If the checkpoint cannot be written. Earlier checkpoints remain intact.
            ValueError: If an `"on_read"` variable has no aggregation.

        >>> trainer.save("checkpoints")
        >>> trainer.restore("checkpoints")
        >>> history = trainer.fit(data, epochs=9, progress=False)
        """
        with CheckpointStore(directory, asynchronous=False) as store:
            arrays, position = self.checkpoint_state()
            store.save(self._position.step, arrays, position)

    @api_boundary
    def restore(self, directory: str | Path, step: int | str = "last") -> None:
        """Restores a checkpoint, from which `fit` resumes.

        Args:
            directory: Directory of checkpoints.
            step: Step of the checkpoint, `"last"` or `"best"`.

        Raises:
            FileNotFoundError: If the checkpoint does not exist.
            ValueError: If it is damaged or does not match the model; the model is not changed.
            RuntimeError: If called during `fit`.
        """
        self._require_no_fit("restore")
        checkpoint = load_checkpoint(directory, step)
        snapshot.write(self._objects, checkpoint.arrays, self.strategy._replicas)
        self._position = Position.from_dict(checkpoint.position)
        self._resumes = True

    def checkpoint_state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Returns the contents of a checkpoint: arrays by name, and the position."""
        if self._run is None:
            self._position.meter.collect()
        else:
            self._run.collect()
            self._run.remember_callbacks()
        return snapshot.read(self._objects), self._position.to_dict()

    def lowered_text(self) -> str:
        """Returns the program of the last step: the compiler's input, or a report if it is staged.

        Raises:
            RuntimeError: If no step has run yet.
        """
        if self._launch is None:
            raise RuntimeError(
                "Cannot return the program of the last step: train for a step first."
            )
        if self.strategy._runner.is_staged:
            return str(self.strategy.inspect(self._train_step, self._launch))
        return self.strategy._runner.lower(self._train_step, self._launch, {}).as_text()

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
        self._run, self._position, self._resumes = run, run.position, True
        try:
            yield
        finally:
            self._run = self._launch = None

    def _train(self, launch: PaddedBatch) -> Sums:
        """Runs one launch: a batch, or up to `steps_per_execution` batches."""
        arguments: tuple[Any, ...] = (self.model, self.optimizer, launch.batch, launch.mask)
        if self.steps_per_execution > 1:
            arguments += (np.int32(launch.first), np.int32(launch.num_batches))
        self._launch = arguments
        return self.strategy.run(self._train_step, arguments)

    def _distributed(self, data: Iterable[PyTree]) -> DistributedDataset[Any]:
        if isinstance(data, DistributedDataset):
            return data
        return self.strategy.distribute_dataset(data, remainder="pad")
