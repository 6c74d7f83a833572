"""`Trainer`: trains, evaluates, predicts, saves and restores; `FitLoop` is the training loop."""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar

import optax
from flax import nnx

from mirror._src.base import interrupts
from mirror._src.base.errors import counted, describe, expected, require_int, require_secs
from mirror._src.base.naming import warn_user
from mirror._src.base.public_names import set_module
from mirror._src.base.terminal import Table
from mirror._src.base.tracebacks import api_boundary
from mirror._src.base.types import PyTree
from mirror._src.base.unknown_names import unknown_attribute
from mirror._src.cluster import consensus
from mirror._src.cluster.start import agreement_secs
from mirror._src.data.arrays import ArrayDataset
from mirror._src.data.distribute import DistributedDataset
from mirror._src.data.padded import PaddedBatch
from mirror._src.inspection.equality import DIFFERENT, UNSURE
from mirror._src.inspection.memory import MemoryReport
from mirror._src.inspection.verify import VerifyReport
from mirror._src.inspection.watch import watch
from mirror._src.passes.callbacks import in_callback
from mirror._src.strategy.mirrored import strategy_of_trainer
from mirror._src.strategy.strategy import Strategy
from mirror._src.training import steps
from mirror._src.training.callbacks.callback import Callback, require_callbacks
from mirror._src.training.callbacks.progress_bar import ProgressBar
from mirror._src.training.checkpoints import snapshot
from mirror._src.training.checkpoints.directory import find_checkpoint, path_of
from mirror._src.training.checkpoints.from_chief import BroadcastRestore
from mirror._src.training.checkpoints.store import CheckpointStore
from mirror._src.training.export import export
from mirror._src.training.history import History
from mirror._src.training.inputs import (
    NO_DATA,
    Validation,
    batches_of,
    first_batch,
    fit_data,
    is_iterator,
    require_end,
    whole_pass,
)
from mirror._src.training.loop import FitLoop
from mirror._src.training.losses import LossName, Metrics
from mirror._src.training.micro_batch import MicroBatch, MicroBatchArgument
from mirror._src.training.mistakes import (
    advice_for_model,
    explains_arguments,
    warn_of_random_order,
)
from mirror._src.training.named_loss import LossFunction, PartOfBatch
from mirror._src.training.objective import Objective, Sums, add_on_host
from mirror._src.training.precision import (
    SCALE,
    LossScaleArgument,
    Precision,
    PrecisionName,
    loss_scale_of,
)
from mirror._src.training.prediction import (
    MetricTotals,
    ModelOutputs,
    predictions,
    require_prediction,
)
from mirror._src.training.progress import (
    MOST_RUNNING,
    MetricAccumulator,
    Position,
    bits_of,
    starting_position,
    warn_of_other_bits,
)
from mirror._src.training.row_check import RowCheck
from mirror._src.training.runners import (
    LocalSteps,
    RemoteStrategy,
    Training,
    local_strategy,
    require_local_options,
)
from mirror._src.training.steps import make_optimizer
from mirror._src.training.summary import num_parameters, summary

M = TypeVar("M", bound=nnx.Module)
Data: TypeAlias = Iterable[PyTree] | PyTree
"""In-memory arrays, or an iterable of global batches."""

_MOST_PREDICTIONS = 16


@set_module("mirror")
class Trainer(Generic[M]):
    """Trains, evaluates and predicts with a model on all replicas of a strategy.

    `loss_fn` returns one value per example and never averages: mirror divides by the number of
    examples on all replicas. Loss, metrics and gradients therefore equal what one device computes
    on the whole batch, for any batch size and number of replicas, including the last batch. A loss
    that looks across examples, such as synchronized batch normalization, is exact if the replicas
    share the batch equally, or if it excludes the padding with `mirror.example_mask(batch)`, and an
    error otherwise. Batch normalization without `axis_name` sees the shard of its replica.

        def loss_fn(model, batch):
            logits = model(batch["image"])
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
            return losses, {"accuracy": logits.argmax(-1) == batch["label"]}

        with strategy.scope():
            trainer = mirror.Trainer(CNN(rngs=nnx.Rngs(0)), optax.adam(1e-3), loss_fn)
        history = trainer.fit(train, epochs=10, validation_data=test)

    Common losses have the names they have in Keras. The model must return *logits*, as with
    `from_logits=True` in Keras, also for binary cross-entropy: no softmax or sigmoid at the end,
    unless you pass `from_logits=False`.

        trainer = mirror.Trainer(
            model, optax.adam(1e-3), "sparse_categorical_crossentropy", metrics=["accuracy"]
        )
        history = trainer.fit((x, y), epochs=10, batch_size=64, validation_split=0.1)

    Training uses the mode of the model (`model.train()`, `model.eval()`); evaluation and prediction
    use a copy in evaluation mode.

    Args:
        model: An `nnx.Module`. Wrap a Linen module: `nnx.bridge.ToNNX(module, rngs).lazy_init(x)`.
        tx: An optax transformation, or an `nnx.Optimizer` of the model. Transformations with extra
            arguments receive the loss as `value`, as `optax.contrib.reduce_on_plateau` requires.
        loss_fn: Function `(model, batch)` that returns float losses of shape `(B,)` for one
            replica's batch, or `(losses, metrics)` with a dict of metrics of shape `(B,)`. Booleans
            and integers are counted exactly. A loss or metric may be
            `mirror.Weighted(values, weights)`, which is divided by the sum of its weights (such as
            numbers of tokens) instead of the number of examples. A metric that is not a mean is a
            `mirror.Metric`. Or the name of a loss, which is
            computed from the logits `model(inputs)`: batches are `(inputs, labels)`, or dicts with
            two entries of which `labels` names one.
        metrics: Metrics of a named loss: names such as `"accuracy"` and `"top_5_accuracy"`, or
            functions `(outputs, labels)` that return one value per example or a `mirror.Metric`, or
            a dict of them.
        strategy: The strategy to train with. Defaults to the strategy of the current scope.
        wrt: Which variables to train, as for `nnx.Optimizer`. Defaults to `nnx.Param`, or to the
            `wrt` of the `nnx.Optimizer` that was passed.
        accumulate_steps: Number of pieces into which each replica splits its batch to save memory.
            Every batch still takes one collective and one update. A loss that looks across examples
            is an error; batch normalization uses the statistics of a piece, with a warning.
            `nnx.Rngs` samples for each piece; `mirror.example_keys` do not depend on the pieces.
        micro_batch: Number of examples that a replica computes at a time, instead of
            `accumulate_steps`. Or `"auto"`: the largest number with which the estimated memory of
            the first batch fits on the devices. `fit` compiles the step for a few numbers, and
            `trainer.accumulate_steps` is the number of pieces that it has chosen.
        memory_limit: Bytes of each device that a step may use, for `micro_batch="auto"`. Defaults
            to nine tenths of the memory that JAX may allocate; required on CPUs.
        steps_per_execution: Number of batches per launch, to reduce the overhead on the host.
        sample_weight: Key of the batch, or function of it, for weights of shape `(B,)` by which the
            losses are multiplied. As in Keras, weights do not change the divisor, which remains the
            number of examples or the weights of a `mirror.Weighted` loss. Metrics are not weighted.
        labels: Key of the batch, or function of it, for integer classes of shape `(B,)`, which are
            validated to be from 0 to `num_classes - 1`. With a named loss, the key of its labels,
            which are always validated.
        num_classes: Number of classes. With a named loss, it defaults to the number of logits.
        from_logits: Whether the model returns logits, for a named cross-entropy. False: it returns
            probabilities, as with Keras' default, because it ends in a softmax or sigmoid.
        class_weight: Factors by class, by which the losses of its examples are multiplied.
        penalty: Function of the model that returns a scalar, such as the L2 norm of the parameters.
            It is added to the mean loss and never weighted, not even for a `mirror.Weighted` loss.
        precision: `"bfloat16"` or `"float16"`: the dtype in which Flax's layers compute, unless
            they were created with another `dtype`. Parameters, gradients and optimizer state stay
            float32. It is set on the layers of the model, as `layer.dtype`; Linen modules compute
            in it only inside the trainer's methods. `"float32"` makes other inputs float32, too.
            Defaults to what the layers do without it.
        loss_scale: A `mirror.LossScale`, for gradients that are too small for float16. Defaults to
            one for `precision="float16"`, which False disables. A step whose gradients are infinite
            or NaN is then skipped: it changes nothing but random keys. `fit` reports the metrics
            `loss_scale` and `skipped`, the means over the steps.
        stall_secs: Number of seconds after which `fit`, `evaluate` and `predict` report a step that
            has not ended and raise `mirror.StalledError`; see `mirror.debugging.watch`.
        require_equal: Whether `fit` raises `ValueError` before the first step unless the step is
            proved to compute what one device computes on the whole batch. Dropout with `nnx.Rngs`
            does not: its numbers depend on the number of replicas. By default, a step that differs
            otherwise is a warning, which False omits.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If `accumulate_steps` or `steps_per_execution` is less than 1, a name is
            unknown, an argument does not fit the loss, `labels` is passed without `num_classes` for
            a function, `wrt` together with an `nnx.Optimizer`, `wrt` selects nothing, or
            `precision` does not reach any layer.

    >>> def loss_fn(model, batch):
    ...     return optax.squared_error(model(batch["x"]), batch["y"])[:, 0]
    >>> arrays = {"x": np.ones((5, 2), "float32"), "y": np.ones((5, 1), "float32")}
    >>> data = mirror.data.from_arrays(arrays, batch_size=2)
    >>> with mirror.MirroredStrategy(["/cpu:0", "/cpu:1"]).scope():
    ...     trainer = Trainer(nnx.Linear(2, 1, rngs=nnx.Rngs(0)), optax.sgd(0.1), loss_fn)
    >>> history = trainer.fit(data, epochs=9, progress=False)
    >>> trainer.evaluate(data)["loss"] < 1e-3
    True
    >>> trainer.predict(data, lambda model, batch: model(batch["x"])).shape
    (5, 1)
    """

    @explains_arguments
    def __init__(
        self,
        model: M,
        tx: optax.GradientTransformation | nnx.Optimizer[Any],
        loss_fn: LossFunction | LossName,
        *,
        metrics: Metrics | None = None,
        strategy: Strategy | RemoteStrategy | None = None,
        wrt: Any = None,
        accumulate_steps: int = 1,
        micro_batch: MicroBatchArgument = None,
        memory_limit: int | None = None,
        steps_per_execution: int = 1,
        sample_weight: PartOfBatch | None = None,
        labels: PartOfBatch | None = None,
        num_classes: int | None = None,
        from_logits: bool = True,
        class_weight: Mapping[int, float] | None = None,
        penalty: Callable[[Any], Any] | None = None,
        precision: PrecisionName | None = None,
        loss_scale: LossScaleArgument = None,
        stall_secs: float | None = None,
        require_equal: bool | None = None,
    ) -> None:
        if not isinstance(model, nnx.Module):
            raise TypeError(expected("model", model, "an nnx.Module", advice_for_model(model)))
        if not isinstance(strategy, Strategy | RemoteStrategy | None):
            raise TypeError(
                f"`strategy` must be a mirror.Strategy, got {describe(strategy)}. Pass "
                "mirror.MirroredStrategy(), or create the trainer inside its scope()."
            )
        self.strategy: Strategy | RemoteStrategy = (
            strategy if isinstance(strategy, RemoteStrategy) else strategy_of_trainer(strategy)
        )
        local = local_strategy(self.strategy)
        require_int("accumulate_steps", accumulate_steps)
        require_int("steps_per_execution", steps_per_execution)
        self._micro_batch: MicroBatch | None = None
        if micro_batch is not None or memory_limit is not None:
            if accumulate_steps != 1:
                raise ValueError("`micro_batch` chooses accumulate_steps. Pass one of them.")
            self._micro_batch = MicroBatch(micro_batch, memory_limit, local._replicas)
        self.steps_per_execution = int(steps_per_execution)
        if steps_per_execution > 1 and local.shard != "none" and not local._runner.chooses:
            warn_user(
                f"A launch of steps_per_execution={steps_per_execution} batches stores the whole "
                f"state on each device, so that shard={local.shard!r} saves no memory. Omit it."
            )
        if not isinstance(require_equal, bool | None):
            fix = "Pass require_equal=True or False, or omit it."
            raise TypeError(expected("require_equal", require_equal, "a bool", fix))
        self.precision, self._precision = precision, Precision(precision)
        self.loss_scale = loss_scale_of(loss_scale, precision)
        self._stall_secs = None if stall_secs is None else require_secs("stall_secs", stall_secs)
        self._objects: dict[str, Any] = {
            "model": model,
            "optimizer": make_optimizer(model, tx, wrt),
        }
        if self.loss_scale is not None:
            self._objects[SCALE] = self.loss_scale
        self._objective = Objective(
            loss_fn,
            sample_weight,
            labels,
            num_classes,
            class_weight,
            penalty,
            metrics,
            self._precision,
            from_logits,
        )
        if isinstance(self.strategy, RemoteStrategy):
            options = {
                "steps_per_execution": steps_per_execution if steps_per_execution > 1 else None,
                "loss_scale": self.loss_scale,
                "stall_secs": stall_secs,
                "require_equal": require_equal or None,
                "micro_batch": micro_batch,
            }
            require_local_options(type(self.strategy).__name__, options)
        self._local, self._require_equal = local, require_equal
        self._split_batches(int(accumulate_steps))
        self._trained_examples = steps.examples_of(self._objective, in_training=True)
        self._evaluated_examples = steps.examples_of(self._objective, in_training=False)
        self._outputs = ModelOutputs(self._objective.loss_fn)
        self._predict_step = functools.lru_cache(_MOST_PREDICTIONS)(
            functools.partial(steps.prediction_step, precision=self._precision)
        )
        self._num_parameters = num_parameters(model)  # for `repr`, which must not fail
        self._position, self._resumes = Position(), False
        self._has_looked = require_equal is False  # at a loss that may differ from one device
        self._loop: FitLoop | None = None
        self._users: list[tuple[int, str]] = []  # threads in `_using`, and the methods
        self._precision.set_on(model)  # after everything that rejects an argument

    def _split_batches(self, pieces: int) -> None:
        """Creates the step that computes the batch of a replica in pieces, and what runs it."""
        self.accumulate_steps = pieces
        self._training = self._training_of(pieces)
        if isinstance(self.strategy, RemoteStrategy):
            self._runner = self.strategy.step_runner(self._training)
        else:
            self._runner = LocalSteps(self._training, require_equal=self._require_equal)
        by_micro_batch = "" if self._micro_batch is None else "micro_batch"
        option = by_micro_batch or f"accumulate_steps={pieces}"
        wrt = self._objects["optimizer"].wrt
        gradients = [steps.gradients_of(self._objective, wrt, times) for times in (1, 2)]
        self._rows = RowCheck(self._local, pieces, option, gradients)

    def _choose_pieces(self, data: DistributedDataset[Any], micro_batch: MicroBatch) -> None:
        """Chooses the number of pieces for batches such as the first."""
        batches = data.peek()
        if not batches:
            return

        def first(pieces: int) -> PaddedBatch:
            source = self._local.distribute_dataset(batches, remainder="pad", prefetch=0)
            return next(iter(source.padded(multiple=pieces, group=self.steps_per_execution)))

        def estimate(pieces: int) -> MemoryReport:
            return LocalSteps(self._training_of(pieces)).memory(first(pieces))

        pieces = micro_batch.num_pieces(first(1), estimate)
        if pieces != self.accumulate_steps:
            self._split_batches(pieces)

    def _training_of(self, pieces: int) -> Training:
        objective, local = self._objective, self._local
        make = functools.partial(steps.training_step, objective)
        step = make(pieces)
        whole = step if pieces == 1 else make(1)
        evaluate = steps.evaluation_step(objective)
        return Training(local, objective, self._objects, step, whole, evaluate, pieces)

    def __repr__(self) -> str:
        position = self._position
        replicas = counted(self.strategy.num_replicas_in_sync, "replica")
        precision = "" if self.precision is None else f"{self.precision}, "
        return (
            f"{type(self).__name__}({type(self._objects['model']).__name__}, "
            f"{self._num_parameters:,} parameters, {type(self.strategy).__name__}({replicas}), "
            f"{precision}epoch {position.epoch}, step {position.step})"
        )

    @property
    def model(self) -> M:
        """The model. During `fit`, it is as it is between two steps."""
        self._require_current("model")
        return self._objects["model"]

    @model.setter
    def model(self, model: M) -> None:
        self._require_local("model")
        if not isinstance(model, nnx.Module):
            raise TypeError(expected("model", model, "an nnx.Module", advice_for_model(model)))
        self._precision.set_on(model)
        self._objects["model"] = model
        self._num_parameters = num_parameters(model)

    @property
    def optimizer(self) -> nnx.Optimizer[Any]:
        """The optimizer. During `fit`, it is as it is between two steps."""
        self._require_current("optimizer")
        return self._objects["optimizer"]

    @optimizer.setter
    def optimizer(self, optimizer: nnx.Optimizer[Any]) -> None:
        self._require_local("optimizer")
        if not isinstance(optimizer, nnx.Optimizer):
            fix = "Pass nnx.Optimizer(trainer.model, tx, wrt=nnx.Param)."
            raise TypeError(expected("optimizer", optimizer, "an nnx.Optimizer", fix))
        self._objects["optimizer"] = optimizer

    @api_boundary
    @explains_arguments
    def fit(
        self,
        data: Data,
        epochs: int = 1,
        *,
        batch_size: int | None = None,
        validation_data: Data | None = None,
        validation_split: float = 0.0,
        shuffle: bool | None = None,
        seed: int | None = None,
        callbacks: Callback | Sequence[Callback] = (),
        initial_epoch: int | None = None,
        steps_per_epoch: int | None = None,
        validation_steps: int | None = None,
        progress: bool = True,
    ) -> History:
        """Trains the model up to a number of epochs.

        After an interrupt or `restore`, training resumes at the same position, also within an
        epoch. Otherwise epochs start at 0, and the model is trained further.

        Args:
            data: In-memory arrays: a dict or tuple of arrays with one row per example, or one
                array, which `batch_size` splits into batches. Or an iterable of global batches of
                any size, as for `strategy.distribute_dataset`, or its result. More than one epoch
                needs an object that can be iterated repeatedly. Resuming within an epoch needs an
                order that depends only on the epoch, as for in-memory arrays.
            epochs: Number of the epoch to stop at, counted from 0 also if training resumes.
            batch_size: Number of examples per global batch, for all replicas together. Required for
                in-memory arrays, and rejected for other data.
            validation_data: Data to evaluate after each epoch; names of its metrics start with
                `val_`. In-memory arrays have the `batch_size` of `data`.
            validation_split: Fraction of in-memory arrays to hold out as validation data. As in
                Keras, these are the last examples, before shuffling.
            shuffle: Whether to shuffle in-memory arrays differently in every epoch. Defaults to
                True.
            seed: Seed of the shuffle, as for `mirror.data.from_arrays`. Defaults to 0.
            callbacks: One or several `mirror.callbacks.Callback` objects.
            initial_epoch: Epoch to start with, regardless of earlier training.
            steps_per_epoch: Number of batches per epoch, for data without an end. An epoch
                continues the pass of the epoch before, and starts another one when the data end.
                Defaults to a whole pass over the data.
            validation_steps: Number of batches to evaluate after each epoch, from the start of
                `validation_data`; an iterator is continued. Defaults to all batches.
            progress: Whether to show a progress bar, unless `callbacks` contains one.

        Returns:
            The metrics of each epoch, including epochs before an interrupt.

        Raises:
            ValueError: If the data is empty, the loss has the wrong shape, a number is out of
                range, `batch_size` is missing for in-memory arrays, or an option for in-memory
                arrays is passed with other data. If `validation_data` repeats forever and
                `validation_steps` is missing. If padding or `accumulate_steps` would change the
                result of a loss that looks across examples.
            TypeError: If `data` is neither in-memory arrays nor an iterable of batches, a callback
                is not a `Callback`, or an option has the wrong type.
            RuntimeError: If called in the scope of another strategy, in a replica, or during `fit`.
        """
        self._require_no_fit("fit")
        if initial_epoch is None:
            self._require_no_lost_values()
        position = starting_position(self._position, self._resumes, epochs, initial_epoch)
        if position.samples and position.loader is None:
            warn_of_random_order(data)
        training, held_out = fit_data(
            data,
            validation_data,
            batch_size=batch_size,
            validation_split=validation_split,
            shuffle=shuffle,
            seed=seed,
        )
        if steps_per_epoch is None:
            require_end("data", training, "Pass trainer.fit(..., steps_per_epoch=100).")
        position.read_from(training.rows if isinstance(training, ArrayDataset) else "")
        validation = Validation(held_out, validation_steps)
        if held_out is not None and isinstance(self.strategy, RemoteStrategy):
            snapshot.require_values({"model": self._objects["model"]})  # not after an epoch
        distributed = self._distributed(training)
        if self._micro_batch is not None:
            self._choose_pieces(distributed, self._micro_batch)
        padded = distributed.padded(
            multiple=self._runner.multiple,
            group=self.steps_per_execution,
            skip=position.num_skipped(data if is_iterator(data) else None),
            state=position.loader,
            inspect=self._objective.inspect,
            on_host=self._runner.on_host,
        )
        callbacks = require_callbacks(callbacks)
        if progress and not any(isinstance(callback, ProgressBar) for callback in callbacks):
            callbacks = (ProgressBar(), *callbacks)
        loop = FitLoop(
            self,
            epochs,
            position,
            padded,
            steps_per_epoch,
            callbacks,
            validation,
        )
        self._last_size = padded.last_size if steps_per_epoch is None else None
        with self._watched(), self._running(loop):
            loop.run(self._train)
        return loop.history

    def _require_evaluable(self, data: Any) -> None:
        """Raises the errors of the first batch of validation data now, not after an epoch."""
        source = data.source if isinstance(data, DistributedDataset) else data
        if self._local._spans_processes or not isinstance(source, ArrayDataset | list | tuple):
            return  # reading another first batch may take long, or change the next pass
        first = source.peek() if isinstance(source, ArrayDataset) else source[:1]
        if not first:
            raise ValueError(NO_DATA.format("validation_data"))
        padded = self._local.distribute_dataset(first, remainder="pad", prefetch=0).padded()
        for batch in padded:
            arguments = (self._objects["model"], batch.batch, batch.mask)
            self._local._runner.traced(self._training.evaluate_step, arguments, {})

    def _validate(self, validation: Validation, num_trained: int) -> dict[str, float]:
        if validation.data is None:
            return {}
        options = {"name": "validation_data", "most": validation.num_batches}
        batches = self._whole_pass(validation.data, **options)
        return self._evaluate(self._objects["model"], validation.observed(num_trained, batches))

    @api_boundary
    @explains_arguments
    def evaluate(self, data: Data, *, batch_size: int | None = None) -> dict[str, float]:
        """Returns the loss and the metrics over all examples of the data.

        Args:
            data: As for `fit`; in-memory arrays are not shuffled.
            batch_size: As for `fit`.

        Returns:
            `{"loss": ..., "accuracy": ...}`: means over the examples, independent of the batch
            size, or weighted means of `mirror.Weighted` values. NaN if the weights add up to 0.

        Raises:
            ValueError: If the data is empty, the loss has the wrong shape, or padding would change
                the result of a loss that looks across examples.
        """
        return self._evaluate_model(self._objects["model"], data, batch_size)

    def _evaluate_model(self, model: Any, data: Data, batch_size: int | None) -> dict[str, float]:
        batches = batches_of("evaluate", data, batch_size)
        fix = "Limit it: trainer.evaluate(itertools.islice(data, 100))."
        require_end("data", batches, fix)
        return self._evaluate(model, self._whole_pass(batches, fix=fix))

    def _evaluate(self, model: Any, batches: Iterator[PaddedBatch]) -> dict[str, float]:
        meter, metrics = MetricAccumulator(), MetricTotals(self._local)
        step = self._training.evaluate_step
        with self._watched(), self._using("evaluate"):
            for batch in batches:
                self._rows.warn_of_training_mode(self._evaluated_examples, model, batch)
                (padded,) = self._rows.without_padding(self._evaluated_examples, model, batch)
                arguments = (model, padded.batch, padded.mask)
                sums = self._local.run(step, arguments)
                meter.add(0, sums._replace(metrics={}))
                metrics.add(sums.metrics, padded.mask)
                self._training.warn_after_trace(step, arguments)
                if not self._has_looked:
                    self._rows.warn_of_own_rows(self._evaluated_examples, model, batch)
                meter.collect(running=MOST_RUNNING)
            meter.collect()
            return {**meter.means, **metrics.values()}

    @api_boundary
    @explains_arguments
    def predict(
        self,
        data: Data,
        fn: Callable[[M, PyTree], PyTree] | None = None,
        *,
        batch_size: int | None = None,
    ) -> PyTree:
        """Computes the outputs of the model for all examples, in the order of the data.

        Args:
            data: As for `evaluate`. With a named loss, its labels are ignored and may be missing;
                an array is the inputs.
            fn: Function `(model, batch)` that returns a pytree of arrays with a leading batch axis
                for one replica's batch. The model is in evaluation mode. Define the function once:
                every new function object is compiled. Defaults to calling the model on the inputs,
                which are known if the loss has a name, or if the data is one array.
            batch_size: As for `fit`.

        Returns:
            The pytree that the model or `fn` returns, with NumPy arrays of exactly one row per
            example. Dtypes do not change: with `precision="bfloat16"`, they may be bfloat16.

        Raises:
            ValueError: If the data is empty, a result does not have one row per example, or rows of
                another shape or dtype in another batch; padding would change the result of a
                function that looks across examples, or `fn` is missing and the inputs of a batch
                are unknown.
            TypeError: If `fn` is not callable.

        >>> trainer = Trainer(nnx.Linear(2, 1, rngs=nnx.Rngs(0)), optax.sgd(0.1), "mse")
        >>> trainer.predict(np.ones((5, 2), "float32"), batch_size=2).shape
        (5, 1)
        """
        fn = require_prediction(fn, data, self._outputs)
        step = self._predict_step(fn)
        batches = batches_of("predict", data, batch_size)
        fix = "Limit it: trainer.predict(itertools.islice(data, 100))."
        require_end("data", batches, fix)
        distributed = self._distributed(batches)
        with self._watched(), self._using("predict"):
            model = self._objects["model"]
            looks = self._require_equal is not False
            return predictions(self._local, fn, step, model, distributed, self._rows, fix, looks)

    @api_boundary
    def export(
        self,
        path: str | Path,
        example: PyTree,
        fn: Callable[[M, PyTree], PyTree] | None = None,
        *,
        batch_size: int | None = None,
        platforms: Sequence[str] | None = None,
    ) -> None:
        """Writes what `predict` computes, and the weights, to a file that does not need mirror.

        The file is a StableHLO program of `jax.export` for one device, with the model in evaluation
        mode. Load it without mirror or the code of the model:

            program = jax.export.deserialize(bytearray(Path("model.jax").read_bytes()))
            logits = program.call(x)

        A path that ends with `.onnx` gets a program in ONNX, by jax2onnx, if ONNX Runtime computes
        the same for the example with it:

            session = onnxruntime.InferenceSession("model.onnx")
            (logits,) = session.run(None, {"input": x})

        In a job of several processes, every process calls it, and the chief writes.

        Args:
            path: The file, or a URL of an object store. It is replaced only when the new one is
                complete.
            example: A batch with at least one row, as for `predict`: dtypes and shapes count, not
                values. `call` takes such a batch.
            fn: As for `predict`.
            batch_size: Number of rows that `call` takes. Defaults to any number, which JAX cannot
                trace for every model.
            platforms: JAX's names of the platforms on which a StableHLO program can run. Defaults
                to `("cpu", "cuda")`.

        Raises:
            OSError: If the file cannot be written.
            ValueError: If the program contains host callbacks, such as `jax.debug.print`, or cannot
                be converted to ONNX, or the inputs of a batch are unknown and `fn` is missing.
            ModuleNotFoundError: If flatbuffers, or jax2onnx for ONNX, is not installed.

        >>> trainer = Trainer(nnx.Linear(2, 1, rngs=nnx.Rngs(0)), optax.sgd(0.1), "mse")
        >>> trainer.export("model.jax", np.ones((1, 2), "float32"))
        """
        fn = require_prediction(fn, example, self._outputs)
        with self._using("export"), self._complete_for_all("trainer.export"):
            if self._local.is_chief:
                model, step = self._objects["model"], self._predict_step(fn)
                export(path, step, fn, model, example, batch_size, platforms)

    @api_boundary
    def summary(self, data: Data) -> Table:
        """Returns a table of the model's layers, with their output shapes, parameters and bytes.

        Nothing is computed, and neither the model nor the data changes. The last rows are totals,
        and the memory of the model and of the optimizer state on each device as it is stored now.
        With `MirroredStrategy(shard="optimizer")`, the first step shards the optimizer state.

        Args:
            data: A batch, in-memory arrays with the structure of a batch, or an iterable of
                batches, of which only the first is used. It must not be an iterator.

        Raises:
            TypeError: If `data` is an iterator, or not a batch of arrays.
            ValueError: If the data is empty.

        >>> trainer.summary(data)
        layer                 type        output        parameters  bytes
        model                 Linear      float32[2,1]  3           12 bytes
        trainable                                       3           12 bytes
        not trainable                                   0           0 bytes
        model per device      2 replicas  2 devices                 12 bytes
        optimizer per device                                        ... bytes
        """
        batch = first_batch(data)
        with self._using("summary"):
            model, optimizer, *_ = self._objects.values()
            table = summary(model, optimizer, self._local, batch, self._objective.outputs)
            if self.precision is not None:
                table.rows.append(("precision", "", self.precision, "", ""))
            return table

    @api_boundary
    @explains_arguments
    def verify(
        self, data: Data, *, batch_size: int | None = None, rtol: float | None = None
    ) -> VerifyReport:
        """Compares a training step on all replicas with one device, without changing the model.

        The one device computes the whole batch without padding, and not in pieces.

        Args:
            data: As for `evaluate`; only the first batch is used.
            batch_size: As for `fit`.
            rtol: Relative tolerance; see `Strategy.verify`. Defaults to 1e-5. If layers compute in
                half precision, by `precision` or the attribute `dtype` of nnx layers, defaults to
                four times the spacing of its numbers at 1: 0.03 for bfloat16, 0.004 for float16.

        Raises:
            VerifyError: If the results differ; the message names them.
            ValueError: If the data is empty.

        >>> trainer.verify(data).largest < 1e-5
        True
        """
        batches = batches_of("verify", data, batch_size)
        (padded,) = self._whole_pass(batches, most=1, multiple=self._runner.multiple)
        with self._using("verify"):
            rtol = self._precision.rtol_of(self._objects["model"]) if rtol is None else rtol
            return self._runner.verify(padded, rtol)

    @api_boundary
    def save(self, directory: str | Path) -> None:
        """Writes a checkpoint: model, optimizer, random keys and the position of the training.

        The checkpoint contains one copy of each array. `restore` reads it on any number of
        replicas; `mirror.load_checkpoint` reads it without a model or devices. In a job of several
        processes, every process calls it, and the chief writes. If a callback calls it in
        `on_epoch_end`, the checkpoint is written again after that hook of all callbacks, with the
        metrics and states of all.

        Args:
            directory: Directory of checkpoints, or a URL of an object store: `s3://bucket/run`.
                This one is the file `step-120.safetensors` at step 120, in the format of
                safetensors.

        Raises:
            OSError: If the checkpoint cannot be written. Earlier checkpoints remain intact.
            ValueError: If an `"on_read"` variable has no aggregation.
            RuntimeError: If another process does not call it in time.

        >>> trainer.save("checkpoints")
        >>> trainer.restore("checkpoints")
        >>> history = trainer.fit(data, epochs=9, progress=False)
        """
        with self._using("save"), self._complete_for_all("trainer.save"):
            if not self._local.is_chief:
                self._checkpoint_state()  # aggregating an "on_read" variable is a collective
                return
            found = self._position.found
            with CheckpointStore(directory, asynchronous=False, found=found) as store:
                arrays, position = self._checkpoint_state()
                store.save(position["step"], arrays, position)
                if self._loop is not None:
                    self._loop.saved.append(path_of(store.directory, position["step"]))

    def _complete_for_all(self, name: str) -> AbstractContextManager[None]:
        """Context manager in which the chief writes; after it, every process can read."""
        if not self._local._spans_processes:
            return contextlib.nullcontext()
        return consensus.chief_writes(name, agreement_secs())

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
            RuntimeError: If called during `fit`, or while another method uses the model. With
                several processes, if one does not call it within `agreement_secs`, or calls it for
                another model or step.
        """
        self._require_no_fit("restore")
        with self._using("restore"):
            position, saved = self._read(directory, step)
            arrays = snapshot.placed(self._objects, saved, position.weak, self._local._replicas)
            with interrupts.DeferredInterrupts():  # all or nothing
                if self.loss_scale is not None:  # which a training without one does not save
                    self.loss_scale.reset()
                snapshot.write(self._objects, arrays, self._local._replicas)
                self._position, self._resumes = position, True
                self._runner.has_lost_values = False
        warn_of_other_bits(position.bits, bits_of(self._local._replicas))

    def _read(
        self, directory: str | Path, step: int | str
    ) -> tuple[Position, Iterable[tuple[str, Any]]]:
        """Returns the position and the arrays of a checkpoint that matches the model."""
        if self._local._spans_processes:
            current = snapshot.described(self._objects)  # a collective: before an error of one
            position, arrays = BroadcastRestore(self._local, directory, step, current).read()
            return position, arrays.items()
        checkpoint = find_checkpoint(directory, step)
        with checkpoint.readable():
            position = Position.from_dict(checkpoint.position)
        snapshot.require_match(snapshot.described(self._objects), checkpoint.entries)
        return position, checkpoint.arrays()

    def _checkpoint_state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Returns the contents of a checkpoint: arrays by name, and the position."""
        self._require_no_lost_values()
        with self._using("save"):
            if self._loop is None:
                with interrupts.DeferredInterrupts():
                    self._position.meter.collect()
            else:
                self._loop.collect()
                self._loop.remember_callbacks()
            self._position.bits = bits_of(self._local._replicas)
            arrays = snapshot.read(self._objects)
            self._position.weak = snapshot.weak_names(arrays)
            return arrays, self._position.to_dict()

    @contextlib.contextmanager
    def _using(self, method: str) -> Iterator[None]:
        """Context manager around a method that reads the arrays, which steps of `fit` delete.

        Raises:
            RuntimeError: If another thread trains, or it is called inside a step. If one of two
                methods at a time is `restore`.
        """
        me = (threading.get_ident(), method)
        self._users.append(me)  # before the check, as `fit` is noted before it looks for users
        try:
            self._require_thread_of_fit(f"{method}()")
            users = self._users.copy()
            if len(users) > 1 and any(name == "restore" for _, name in users):
                raise RuntimeError(
                    f"trainer.{method}() was called while another method of the trainer runs. A "
                    "model that is restored meanwhile would have weights of two checkpoints. Call "
                    "restore() before the other method, or when it has ended."
                )
            self._runner.synchronize()
            yield
        finally:
            self._users.remove(me)

    def _require_thread_of_fit(self, what: str) -> None:
        loop, where = self._loop, ""
        if in_callback():
            where = "inside a host callback of a step"
        elif loop is not None and loop.thread != threading.get_ident():
            where = "in another thread while fit() trains"
        if where:
            raise RuntimeError(
                f"trainer.{what} was used {where}. Each step deletes the arrays of the model that "
                "it updates, so only the thread of fit() may use them, between two steps. Use it "
                "in on_step(self, fit) of a mirror.callbacks.Callback, or after fit()."
            )

    def _require_local(self, name: str) -> None:
        if isinstance(self.strategy, RemoteStrategy):
            kind = type(self.strategy).__name__
            raise TypeError(
                f"trainer.{name} cannot be replaced with {kind}. Change its arrays, for example "
                f"nnx.update(trainer.{name}, state), or create a new Trainer."
            )

    def _require_current(self, name: str) -> None:
        """Waits for steps in other processes if a callback reads the model or the optimizer."""
        if self._loop is None or not isinstance(self.strategy, RemoteStrategy):
            return
        self._require_thread_of_fit(name)
        try:
            self._runner.synchronize()
        except AttributeError as error:  # of a step; `__getattr__` would replace it
            raise RuntimeError(f"A step raised {type(error).__name__}: {error}") from error

    def _require_no_lost_values(self) -> None:
        """Rejects to resume or to save if the values of the servers could not be read at the end.

        Raises:
            RuntimeError: If the position is later than the model.
        """
        if self._runner.has_lost_values:
            raise RuntimeError(
                f"Training ended at step {self._position.step}, but the model has older values, "
                "because the values on the parameter servers were lost. Restore a checkpoint, "
                "trainer.restore(directory), or pass initial_epoch to train from the values that "
                "the model has."
            )

    def _watched(self) -> contextlib.AbstractContextManager[Any]:
        """Context manager that raises an error if a step does not end, and is not nested."""
        if self._stall_secs is None or self._loop is not None:
            return contextlib.nullcontext()
        return watch(self._stall_secs, "raise")

    def _require_no_fit(self, name: str) -> None:
        if self._loop is not None:
            raise RuntimeError(
                f"trainer.{name}() cannot be called while fit() is running (from a callback or "
                "another thread). Callbacks may call trainer.evaluate(), predict() and save()."
            )

    @contextlib.contextmanager
    def _running(self, loop: FitLoop) -> Iterator[None]:
        self._loop = loop
        try:
            if {thread for thread, _ in self._users.copy()} - {loop.thread}:
                raise RuntimeError(
                    "trainer.fit() was called while a method of the trainer runs in another "
                    "thread. Each step would delete the arrays of the model that it uses. Wait for "
                    "its result before fit()."
                )
            self._position, self._resumes = loop.position, True
            yield
        finally:
            self._loop = None
            self._resumes = self._resumes and not loop.is_complete

    def _lowered_text(self) -> str:
        """Returns the program of the last step."""
        return self._runner.lowered_text(None if self._loop is None else self._loop.last_batch)

    def _train(self, batch: PaddedBatch) -> Sums:
        """Makes the step of a batch, or the steps of a group."""
        rows, step, model = self._rows, self._trained_examples, self._runner.checked_model
        multiple, last_size, self._last_size = self._runner.multiple, self._last_size, None
        if last_size is not None:
            rows.check_last(step, model, batch, last_size, multiple)
        rows.require_separate_pieces(step, model, batch)
        batches = rows.without_padding(step, model, batch, multiple, changes_state=True)
        # A list: `map` would end at a StopIteration that the loss raises.
        sums = functools.reduce(add_on_host, [self._runner.run(each) for each in batches])
        if not self._has_looked:
            self._has_looked = True
            runner = self._runner
            warned = runner.warned(batches[0]) if isinstance(runner, LocalSteps) else {DIFFERENT}
            first = self._evaluated_examples, model, batches[0]
            is_unsure = UNSURE in warned
            if is_unsure or (DIFFERENT not in warned and rows.numbers_of_rows(*first)):
                rows.warn_of_own_rows(*first)
            if is_unsure or self.accumulate_steps > 1:
                rows.warn_of_row_counts(*first)
        return sums

    def _whole_pass(self, data: Iterable[PyTree], **options: Any) -> Iterator[PaddedBatch]:
        """Yields the batches of one pass, whose labels are checked."""
        return whole_pass(self._distributed(data), inspect=self._objective.inspect, **options)

    def _distributed(self, data: Iterable[PyTree]) -> DistributedDataset[Any]:
        if isinstance(data, DistributedDataset):
            return data
        return self._local.distribute_dataset(data, remainder="pad")

    if not TYPE_CHECKING:  # for type checkers, there are no other attributes

        def __getattr__(self, name: str) -> Any:
            raise unknown_attribute("trainer", self, name)


def step_of(trainer: Trainer[Any]) -> Callable[..., Any]:
    """Returns one training step of a trainer, for `strategy.run`.

    Its arguments are the model, the optimizer, the loss scale of a trainer that has one, and a
    `(batch, mask)` pair from `distribute_dataset(data, remainder="pad")`.
    Unlike `fit`, it does not pad to a multiple of `accumulate_steps`: it raises a `ValueError` if
    the batch cannot be split into that many pieces.
    """
    single, pieces = trainer._training.step, trainer.accumulate_steps

    def scaled_step(model: Any, optimizer: Any, loss_scale: Any, padded: Any) -> Any:
        batch, mask = padded
        if mask.size % pieces:
            multiple = pieces * trainer.strategy.num_replicas_in_sync
            raise ValueError(
                f"A replica's batch of {mask.size} examples cannot be split into "
                f"accumulate_steps={pieces} equal pieces. Use a batch size that is a multiple of "
                f"{multiple}."
            )
        return single(model, optimizer, batch, mask, loss_scale)

    def train_step(model: Any, optimizer: Any, padded: Any) -> Any:
        return scaled_step(model, optimizer, None, padded)

    return train_step if trainer.loss_scale is None else scaled_step
