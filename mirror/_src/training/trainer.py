"""`Trainer`: the training loop, thin over `strategy.run`."""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import optax
from flax import nnx

from mirror._src.checks.verify import VerifyReport
from mirror._src.data.distribute import DistributedDataset
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
from mirror._src.training.objective import LossFunction, Objective, PartOfBatch
from mirror._src.training.optimizer import make_optimizer
from mirror._src.training.position import Position, starting_position
from mirror._src.training.prediction import predictions
from mirror._src.training.stream import Launch, Stream, length_of, whole_pass
from mirror._src.utils import interrupts
from mirror._src.utils.errors import describe, require_int
from mirror._src.utils.modules import set_module
from mirror._src.utils.types import PyTree

_MOST_PREDICTIONS = 16


@set_module("mirror")
class Trainer:
    """Trains, evaluates and predicts with a model, on all replicas of a strategy.

    `loss_fn` returns a value for each example and never scales anything: mirror alone divides, by
    the number of examples of all replicas. So loss, metrics and gradients are those of one device
    on the whole batch, for any batch size and any number of replicas, the last batch included. What
    looks at a whole batch in the forward pass is the model's own affair: batch normalisation sees
    each replica's part, and in the last batch the rows that pad it, which repeat its last example.

        def loss_fn(model, batch):
            logits = model(batch["image"])
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
            return losses, {"accuracy": logits.argmax(-1) == batch["label"]}

        with strategy.scope():
            trainer = mirror.Trainer(CNN(rngs=nnx.Rngs(0)), optax.adam(1e-3), loss_fn)
        history = trainer.fit(train, epochs=10, validation_data=test)

    The model trains in the mode it is in (`model.train()`, `model.eval()`), and is evaluated in
    evaluation mode.

    Args:
        model: an `nnx.Module`; a Linen module as `nnx.bridge.ToNNX(module, rngs).lazy_init(x)`.
        tx: an optax transformation, or an `nnx.Optimizer` of the model.
        loss_fn: `(model, batch)` to float losses `(B,)`, or to `(losses, metrics)` with a dict of
            metrics `(B,)`, for one replica's batch. Booleans and integers are counted exactly.
            Losses and metrics may be `mirror.Weighted(values, weights)`, to be divided by the sum
            of their weights and not by the number of examples: by tokens, say.
        strategy: the one to train with; `None`: that of the scope the trainer is made in.
        wrt: which variables are trained, as for `nnx.Optimizer`; `None`: `nnx.Param`, or those of
            the `nnx.Optimizer` that was passed.
        accumulate_steps: in how many pieces each replica works through its batch, to save memory;
            there is still one collective and one update for each batch.
        steps_per_execution: how many batches are trained with in one launch, to save the host work.
        sample_weight: a key of the batch, or a function of it, for weights `(B,)` that each
            example's loss is multiplied by. As in Keras, the sum is divided by what it is divided
            by without them, the number of examples or the weights of a `mirror.Weighted` loss;
            metrics are not weighted.
        labels: a key of the batch, or a function of it, for integer classes `(B,)`, which are then
            checked to be from 0 to `num_classes - 1`.
        num_classes: how many classes there are.
        class_weight: by class, what the loss of its examples is multiplied by.
        penalty: a function of the model for a scalar that is added to the mean loss whatever the
            weights, `mirror.Weighted` included, such as an L2 norm of the parameters.

    Raises:
        TypeError: an argument of a wrong type.
        ValueError: `accumulate_steps` or `steps_per_execution` below 1, `labels` without
            `num_classes`, an optimizer together with `wrt`.

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

    def __init__(
        self,
        model: nnx.Module,
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
                f"model={describe(model)} is no nnx.Module. A Linen module becomes one: "
                "nnx.bridge.ToNNX(module, rngs=nnx.Rngs(0)).lazy_init(x)."
            )
        if not isinstance(strategy, Strategy | None):
            raise TypeError(
                f"strategy={describe(strategy)} is no strategy. Pass one, mirror.MirroredStrategy()"
                ", or make the trainer inside its scope()."
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
        self._goes_on = False
        self._fit: TrainingRun | None = None
        self._launch: tuple[Any, ...] | None = None

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
        """Trains for some epochs.

        A training that was interrupted or restored goes on where it stood, in the middle of an
        epoch too; else the first epoch is 0, and the model is trained on.

        Args:
            data: an iterable of global batches, as for `strategy.distribute_dataset`, of any size;
                or what that returned. One that can be iterated again, for more than one epoch. To
                go on in the middle of an epoch, its order must depend on nothing but the epoch, as
                that of `mirror.data.from_arrays` does.
            epochs: the number of the epoch to end at; how many there are, counted from 0.
            validation_data: evaluated after each epoch; metrics whose names begin with `val_`.
            callbacks: what happens beside; see `mirror.callbacks`.
            initial_epoch: the epoch to begin with, whatever was trained before.
            steps_per_epoch: how many batches make an epoch, for data without an end; `None`: all.
            progress: whether to show a progress bar, unless there is one among the callbacks.

        Returns:
            The metrics of each epoch, those before an interrupt included.

        Raises:
            ValueError: there is no data; the loss is of a wrong shape; `epochs` or
                `steps_per_epoch` of a wrong value.
            TypeError: the data is no iterable of batches; something is no callback.
            RuntimeError: called inside another strategy's scope, a replica, or itself.
        """
        self._require_no_fit("fit")
        position = starting_position(self._position, self._goes_on, epochs, initial_epoch)
        stream = self._stream(data, steps_per_epoch, position)
        callbacks = require_callbacks(callbacks)
        if progress and not any(isinstance(callback, ProgressBar) for callback in callbacks):
            callbacks = (ProgressBar(), *callbacks)
        fit = TrainingRun(self, epochs, position, stream.steps_per_epoch, callbacks)
        with interrupts.DeferredInterrupts(), self._fitting(fit), fit.listening(), stream:
            while position.epoch < epochs and not fit.stopped:
                fit.begin_epoch()
                for launch in stream.epoch():
                    self._train(launch)
                    fit.after_step()
                    fit.collect(running=MOST_RUNNING)
                    interrupts.check()
                    if fit.stopped:
                        break
                is_cut_short = fit.stopped is not None
                fit.collect()
                if not is_cut_short:
                    validation = self._validated(validation_data)  # may be interrupted
                    stream.end_epoch()
                    fit.end_epoch(validation)
            self._goes_on = False
            interrupts.check()
        return fit.history

    def evaluate(self, data: Iterable[PyTree]) -> dict[str, float]:
        """The loss and the metrics, over all examples of the data.

        Args:
            data: as for `fit`.

        Returns:
            `{"loss": ..., "accuracy": ...}`, means over the examples, whatever the batch size, or
            over the weights of what is `mirror.Weighted`. NaN where the weights add up to 0.

        Raises:
            ValueError: there is no data; the loss is of a wrong shape.
        """
        meter = Meter()
        for padded in whole_pass(self._distributed(data), inspect=self._objective.inspect):
            arguments = (self.model, padded.batch, padded.mask)
            meter.add(0, self.strategy.run(self._evaluate_step, arguments))
            meter.collect(running=MOST_RUNNING)
        meter.collect()
        return meter.means

    def predict(self, fn: Callable[[Any, PyTree], PyTree], data: Iterable[PyTree]) -> PyTree:
        """What `fn` makes of each example, in the order of the data.

        Args:
            fn: `(model, batch)` to arrays with the batch axis first, in any nest, for one replica's
                batch; the model is in evaluation mode. Define it once: a new function compiles.
            data: as for `fit`.

        Returns:
            The tree that `fn` returns, of NumPy arrays with exactly one row for each example.

        Raises:
            ValueError: there is no data; a result has not one row for each example.
            TypeError: `fn` is no function.
        """
        if not callable(fn):
            raise TypeError(
                f"fn={describe(fn)} is no function. Pass one of (model, batch) that returns a row "
                "for each example."
            )
        step = self._predict_step(fn)
        return predictions(self.strategy, fn, step, self.model, self._distributed(data))

    def verify(self, data: Iterable[PyTree], *, rtol: float = 1e-5) -> VerifyReport:
        """Takes a training step on all replicas and on one device, and compares; changes nothing.

        Args:
            data: as for `fit`; its first batch is used.
            rtol: see `Strategy.verify`.

        Raises:
            ReplicaMismatchError: they differ; the message names what does.
            ValueError: there is no data.

        >>> trainer.verify(data).largest < 1e-5
        True
        """
        with contextlib.closing(
            whole_pass(self._distributed(data), multiple=self.accumulate_steps)
        ) as batches:
            padded = next(batches)
        arguments = (self.model, self.optimizer, padded.batch, padded.mask)
        return self.strategy.verify(self._single_step, arguments, rtol=rtol)

    def save(self, directory: str | Path) -> None:
        """Writes a checkpoint: model, optimizer, random keys and where the training stands.

        It has one copy of each array and knows nothing of replicas. `restore` reads it with any
        number of them; `mirror.load_checkpoint` without a model or a device.

        Args:
            directory: of checkpoints; this one goes into a folder named after the step in it.

        Raises:
            OSError: it cannot be written; earlier checkpoints are as they were.
            ValueError: a variable that is `"on_read"` without an aggregation.

        >>> trainer.save("checkpoints")
        >>> trainer.restore("checkpoints")
        >>> history = trainer.fit(data, epochs=9, progress=False)
        """
        with CheckpointStore(directory, asynchronous=False) as store:
            arrays, position = self.checkpoint_state()
            store.save(self._position.step, arrays, position)

    def restore(self, directory: str | Path, step: int | str = "last") -> None:
        """Goes back to a checkpoint; `fit` goes on from there.

        Args:
            directory: of checkpoints.
            step: which one, `"last"` or `"best"`.

        Raises:
            FileNotFoundError: there is none.
            ValueError: it is damaged, or of another model; nothing is changed then.
            RuntimeError: `fit` is running.
        """
        self._require_no_fit("restore")
        found = load_checkpoint(directory, step)
        snapshot.write(self._objects, found.arrays, self.strategy._replicas)
        self._position = Position.from_dict(found.position)
        self._goes_on = True

    def checkpoint_state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """What a checkpoint holds: arrays by name, and where the training stands."""
        if self._fit is None:
            self._position.meter.collect()
        else:
            self._fit.collect()
            self._fit.remember_callbacks()
        return snapshot.read(self._objects), self._position.to_dict()

    def lowered_text(self) -> str:
        """The program of the last step: as the compiler is given it, or in words if it is staged.

        Raises:
            RuntimeError: there has been no step yet.
        """
        if self._launch is None:
            raise RuntimeError("There has been no step yet, so there is no program: train first.")
        if self.strategy._runner.is_staged:
            return str(self.strategy.inspect(self._train_step, self._launch))
        return self.strategy._runner.lower(self._train_step, self._launch, {}).as_text()

    @property
    def _objects(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer}

    def _require_no_fit(self, name: str) -> None:
        if self._fit is not None:
            raise RuntimeError(
                f"trainer.{name} was called while fit is running, by a callback or another thread. "
                "Callbacks may call trainer.evaluate, predict and save."
            )

    @contextlib.contextmanager
    def _fitting(self, fit: TrainingRun) -> Iterator[None]:
        self._fit, self._position, self._goes_on = fit, fit.position, True
        try:
            yield
        finally:
            self._fit = self._launch = None

    def _train(self, launch: Launch) -> None:
        """One launch: a batch, or up to `steps_per_execution` of them."""
        batch, mask, *_ = launch.padded
        arguments: tuple[Any, ...] = (self.model, self.optimizer, batch, mask)
        if self.steps_per_execution > 1:
            arguments += (np.int32(launch.first), np.int32(launch.num_batches))
        self._launch = arguments
        sums = self.strategy.run(self._train_step, arguments)
        self._position.advance(launch.num_batches, launch.num_examples, sums)

    def _stream(
        self, data: Iterable[PyTree], steps_per_epoch: int | None, position: Position
    ) -> Stream:
        """The data from where the training stands, in launches of one shape."""
        distributed = self._distributed(data)
        padded = distributed.padded(
            multiple=self.accumulate_steps,
            group=self.steps_per_execution,
            skip=position.samples,
            inspect=self._objective.inspect,
        )
        return Stream(padded, length_of(distributed), steps_per_epoch, position)

    def _validated(self, data: Iterable[PyTree] | None) -> dict[str, float]:
        return {} if data is None else self.evaluate(data)

    def _distributed(self, data: Iterable[PyTree]) -> DistributedDataset:
        if isinstance(data, DistributedDataset):
            return data
        return self.strategy.distribute_dataset(data, remainder="pad")
