"""`Trainer`: training, evaluation and prediction loops over `strategy.run`."""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np
import optax
from flax import nnx

from mirror._src.base import interrupts
from mirror._src.base.closing import closing
from mirror._src.base.errors import require_int
from mirror._src.base.modules import set_module
from mirror._src.base.tables import Table
from mirror._src.base.tracebacks import api_boundary
from mirror._src.base.types import PyTree
from mirror._src.data.distribute import DistributedDataset
from mirror._src.data.padded import PaddedBatch
from mirror._src.engine.per_replica import PerReplica, is_per_replica
from mirror._src.engine.scopes import require_cross_replica
from mirror._src.inspection.verify import VerifyReport, verify
from mirror._src.strategy.strategy import Strategy
from mirror._src.training import steps
from mirror._src.training.callbacks.callback import Callback, require_callbacks
from mirror._src.training.callbacks.progress import ProgressBar
from mirror._src.training.fit import TrainingRun
from mirror._src.training.history import History
from mirror._src.training.inputs import batches_of, first_batch, fit_data
from mirror._src.training.labels import PartOfBatch
from mirror._src.training.loss_scale import LossScaleArgument
from mirror._src.training.losses import LossName
from mirror._src.training.meter import MOST_RUNNING, Meter
from mirror._src.training.metrics import Metrics
from mirror._src.training.mistakes import explains_arguments, warn_of_random_order
from mirror._src.training.named_loss import LossFunction
from mirror._src.training.objective import Objective, Sums, add_on_host
from mirror._src.training.position import starting_position
from mirror._src.training.precision import PrecisionName
from mirror._src.training.prediction import ModelOutputs, predictions, require_prediction
from mirror._src.training.remote import (
    RemoteStrategy,
    divisor_of,
    host_batch,
    require_local_options,
)
from mirror._src.training.row_check import RowCheck
from mirror._src.training.state import M, TrainerState
from mirror._src.training.stream import whole_pass
from mirror._src.training.summary import summary
from mirror._src.training.validation import Validation, require_end

Data: TypeAlias = Iterable[PyTree] | PyTree
"""In-memory arrays, or an iterable of global batches."""

_MOST_PREDICTIONS = 16


@set_module("mirror")
class Trainer(TrainerState[M]):
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
            numbers of tokens) instead of the number of examples. Or the name of a loss, which is
            computed from the logits `model(inputs)`: batches are `(inputs, labels)`, or dicts with
            two entries of which `labels` names one.
        metrics: Metrics of a named loss: names such as `"accuracy"` and `"top_5_accuracy"`, or
            functions `(outputs, labels)` that return one value per example, or a dict of them.
        strategy: The strategy to train with. Defaults to the strategy of the current scope.
        wrt: Which variables to train, as for `nnx.Optimizer`. Defaults to `nnx.Param`, or to the
            `wrt` of the `nnx.Optimizer` that was passed.
        accumulate_steps: Number of pieces into which each replica splits its batch to save memory.
            Every batch still takes one collective and one update. A loss that looks across examples
            is an error; batch normalization uses the statistics of a piece, with a warning.
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

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If `accumulate_steps` or `steps_per_execution` is less than 1, a name is
            unknown, an argument does not fit the loss, `labels` is passed without `num_classes` for
            a function, `wrt` together with an `nnx.Optimizer`, or `precision` does not reach any
            layer.

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

    @api_boundary
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
    ) -> None:
        super().__init__(model, tx, strategy, wrt, stall_secs, precision, loss_scale)
        require_int("accumulate_steps", accumulate_steps)
        require_int("steps_per_execution", steps_per_execution)
        self.accumulate_steps = int(accumulate_steps)
        self.steps_per_execution = int(steps_per_execution)
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
        self._single_step = steps.training_step(
            self._objective, self._optimizer.wrt, self.accumulate_steps
        )
        self._whole_step = (
            steps.training_step(self._objective, self._optimizer.wrt, 1)
            if self.accumulate_steps > 1
            else self._single_step
        )
        if isinstance(self.strategy, RemoteStrategy):
            require_local_options(
                type(self.strategy).__name__,
                steps_per_execution=self.steps_per_execution,
                loss_scale=self.loss_scale,
                stall_secs=stall_secs,
            )
            self._remote = self.strategy.remote_training(
                self._single_step, self._model, self._optimizer, divisor_of
            )
        self._is_traced = False
        self._train_step: Callable[..., Any] = self._single_step
        if self.steps_per_execution > 1:
            self._train_step = steps.repeated(self._single_step)
        self._evaluate_step = steps.evaluation_step(self._objective)
        self._rows = RowCheck(self._local, self.accumulate_steps)
        self._trained_examples = steps.examples_of(self._objective, in_training=True)
        self._evaluated_examples = steps.examples_of(self._objective, in_training=False)
        self._outputs = ModelOutputs(self._objective.loss_fn)
        self._predict_step = functools.lru_cache(_MOST_PREDICTIONS)(
            functools.partial(steps.prediction_step, precision=self._precision)
        )
        self._precision.set_on(model)  # after everything that rejects an argument

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
            steps_per_epoch: Number of batches per epoch, for data without an end. Defaults to a
                whole pass over the data.
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
        if position.samples:
            warn_of_random_order(data)
        training, held_out = fit_data(
            data,
            validation_data,
            batch_size=batch_size,
            validation_split=validation_split,
            shuffle=shuffle,
            seed=seed,
        )
        validation = Validation(held_out, validation_steps)
        padded = self._distributed(training).padded(
            multiple=self._multiple,
            group=self.steps_per_execution,
            skip=position.samples,
            inspect=self._objective.inspect,
        )
        last_size = padded.last_size if steps_per_epoch is None else None
        callbacks = require_callbacks(callbacks)
        if progress and not any(isinstance(callback, ProgressBar) for callback in callbacks):
            callbacks = (ProgressBar(), *callbacks)
        run = TrainingRun(
            self,
            epochs,
            position,
            padded,
            steps_per_epoch,
            callbacks,
            has_validation=validation.is_given,
        )
        deferred = interrupts.DeferredInterrupts(watches=True)
        with (
            self._watched(),
            deferred,
            self._running(run),
            run.listening(),
            self._ends_synchronized(),
        ):
            self._has_lost_values = False
            while position.epoch < epochs and not run.must_stop():
                run.begin_epoch()
                for launch in run.launches():
                    if last_size is not None:
                        step, model = self._trained_examples, self._model
                        self._rows.check_last(step, model, launch, last_size, self._multiple)
                        last_size = None
                    run.after_step(launch, self._train(launch))
                    run.collect(running=self._most_running)
                    if run.must_stop():
                        break
                is_cut_short = run.must_stop()
                run.collect()
                if not is_cut_short:
                    run.end_epoch(self._validate(run, validation))
            self._synchronize()
            run.must_stop()
            self._resumes = False
        return run.history

    def _validate(self, run: TrainingRun, validation: Validation) -> dict[str, float]:
        self._synchronize()  # for callbacks that read the model
        if not validation.is_given:
            return {}
        num_trained = run.position.epoch_step
        means = self._evaluate(
            validation.batches(),
            validation.num_batches,
            lambda count: validation.after_batch(count, num_trained),
        )
        validation.after_pass()
        return means

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
        batches = batches_of("evaluate", data, batch_size)
        require_end("data", batches, "Limit it: trainer.evaluate(itertools.islice(data, 100)).")
        return self._evaluate(batches)

    def _evaluate(
        self,
        data: Iterable[PyTree],
        most: int | None = None,
        after_batch: Callable[[int], None] | None = None,
    ) -> dict[str, float]:
        """Evaluates all batches, or the first `most`, and calls `after_batch` with their number."""
        meter = Meter()
        distributed = self._distributed(data)
        model = self._model
        with self._watched(), self._using("evaluate"):
            launches = whole_pass(distributed, most=most, inspect=self._objective.inspect)
            for count, launch in enumerate(launches, 1):
                (padded,) = self._rows.without_padding(self._evaluated_examples, model, launch)
                arguments = (model, padded.batch, padded.mask)
                meter.add(0, self._local.run(self._evaluate_step, arguments))
                self._warn_after_trace(self._evaluate_step, arguments)
                meter.collect(running=MOST_RUNNING)
                if after_batch is not None:
                    after_batch(count)
            meter.collect()
        return meter.means

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
            ValueError: If the data is empty, a result does not have one row per example, padding
                would change the result of a function that looks across examples, or `fn` is missing
                and the inputs of a batch are unknown.
            TypeError: If `fn` is not callable.

        >>> trainer = Trainer(nnx.Linear(2, 1, rngs=nnx.Rngs(0)), optax.sgd(0.1), "mse")
        >>> trainer.predict(np.ones((5, 2), "float32"), batch_size=2).shape
        (5, 1)
        """
        fn = require_prediction(fn, data, self._outputs)
        step = self._predict_step(fn)
        batches = batches_of("predict", data, batch_size)
        require_end("data", batches, "Limit it: trainer.predict(itertools.islice(data, 100)).")
        distributed = self._distributed(batches)
        with self._watched(), self._using("predict"):
            return predictions(self._local, fn, step, self._model, distributed, self._rows)

    @api_boundary
    def summary(self, data: Data) -> Table:
        """Returns a table of the model's layers, with their output shapes, parameters and bytes.

        Nothing is computed, and neither the model nor the data changes. The last rows are totals,
        and the memory of the model and of the optimizer state on each device as it is stored now.
        With `MirroredStrategy(shard_update=True)`, the first step shards the optimizer state.

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
            objects = self._model, self._optimizer
            table = summary(*objects, self._local, batch, self._objective.outputs)
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
        distributed = self._distributed(batches_of("verify", data, batch_size))
        batches = whole_pass(distributed, multiple=self._multiple, inspect=self._objective.inspect)
        with closing("closing the data", batches.close):
            padded = next(batches)
        with self._using("verify"):
            rtol = self._precision.rtol_of(self._model) if rtol is None else rtol
            if self._remote is not None:
                self._trace(padded)
                return self._remote.verify(*host_batch(padded), rtol)
            require_cross_replica(self._local, "verify", "Call it outside the step.")
            runners = self._local._runner, self._local._single_runner()
            model, optimizer, *scales = self._objects.values()
            arguments = (model, optimizer, padded.batch, padded.mask, *scales)
            return verify(*runners, self._single_step, arguments, {}, rtol, self._alone)

    def _alone(self, tree: PyTree) -> tuple[Callable[..., Sums], PyTree]:
        """Returns the step of one device, which neither pads a batch nor splits it."""
        (model, optimizer, batch, mask, *scales), kwargs = tree
        is_example = np.asarray(mask.values[0])

        def examples(leaf: PerReplica) -> PerReplica:
            return PerReplica([np.asarray(leaf.values[0])[is_example]])

        batch, mask = jax.tree.map(examples, (batch, mask), is_leaf=is_per_replica)
        return self._whole_step, ((model, optimizer, batch, mask, *scales), kwargs)

    def _lowered_text(self) -> str:
        """Returns the program of the last step: the compiler's input, or a report if it is staged.

        Raises:
            RuntimeError: If no step has run yet.
        """
        if self._remote is not None:
            raise NotImplementedError(
                f"{type(self.strategy).__name__} compiles steps on the workers, whose programs "
                "cannot be returned. Use the same step with mirror.MirroredStrategy."
            )
        if self._launch is None:
            raise RuntimeError(
                "Cannot return the program of the last step: train for a step first."
            )
        if self._local._runner.is_staged:
            return str(self._local.inspect(self._train_step, self._launch))
        return self._local._runner.lower(self._train_step, self._launch, {}).as_text()

    def _train(self, launch: PaddedBatch) -> Sums:
        """Runs one launch: a batch, or up to `steps_per_execution` batches."""
        step = self._trained_examples
        self._rows.require_separate_pieces(step, self._model, launch)
        launches = self._rows.without_padding(
            step, self._model, launch, self._multiple, changes_state=True
        )
        if launches[0] is not launch:
            return functools.reduce(add_on_host, map(self._train_alone, launches))
        if self._remote is not None:
            self._trace(launch)
            return self._remote.run(*host_batch(launch))
        arguments: tuple[Any, ...] = (self._model, self._optimizer, launch.batch, launch.mask)
        if self.steps_per_execution > 1:
            arguments += (np.int32(launch.first), np.int32(launch.num_batches))
        if self.loss_scale is not None:
            arguments += (self.loss_scale,)
        self._launch = arguments
        sums: Sums = self._local.run(self._train_step, arguments)
        self._warn_after_trace(self._train_step, arguments)
        return sums

    def _train_alone(self, batch: PaddedBatch) -> Sums:
        """Runs a batch that has no padding and is not part of a group."""
        if self._remote is not None:
            return self._remote.run(*host_batch(batch))
        scales = () if self.loss_scale is None else (self.loss_scale,)
        arguments = (self._model, self._optimizer, batch.batch, batch.mask, *scales)
        sums: Sums = self._local.run(self._single_step, arguments)
        return sums

    def _trace(self, launch: PaddedBatch) -> None:
        """Traces the loss in this process, once: labels are checked and warnings raised here."""
        if not self._is_traced:
            arguments = (self._model, launch.batch, launch.mask)
            self._local._runner.lower(self._evaluate_step, arguments, {})
            self._warn_after_trace(self._evaluate_step, arguments)
            self._is_traced = True

    def _warn_after_trace(self, step: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        """Issues the warnings about a loss that has just been traced."""
        if self._objective.is_traced:
            self._objective.warn_of_half_precision()
            self._objective.warn_of_probabilities(
                lambda: self._local._runner.traced(step, arguments, {})[1].jaxpr
            )

    @property
    def _multiple(self) -> int:
        """The number of rows of a padded batch per replica is a multiple of it."""
        return self.accumulate_steps * (1 if self._remote is None else self._remote.multiple)

    @property
    def _most_running(self) -> int:
        return MOST_RUNNING if self._remote is None else self._remote.most_running

    def _distributed(self, data: Iterable[PyTree]) -> DistributedDataset[Any]:
        if isinstance(data, DistributedDataset):
            return data
        return self._local.distribute_dataset(data, remainder="pad")
