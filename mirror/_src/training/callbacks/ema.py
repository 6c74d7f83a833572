"""`EMA`: moving averages of the weights, in the optimizer, and their evaluation."""

import contextlib
from collections.abc import Iterator
from typing import Any, ClassVar, final

import optax
from flax import nnx

from mirror._src.base.errors import describe, expected
from mirror._src.base.public_names import set_module
from mirror._src.training.callbacks.callback import Callback
from mirror._src.training.loop import FitLoop


class _AveragingOptimizer(nnx.Optimizer[Any]):
    """An optimizer with moving averages of the variables that it updates."""

    def __init__(self, model: Any, tx: Any, decay: float, wrt: Any) -> None:
        super().__init__(model, tx, wrt=wrt)
        self.ema = nnx.EMA(model, decay, only=wrt)

    def update(self, model: Any, grads: Any, /, **kwargs: Any) -> None:
        """Makes an update, and moves the averages."""
        super().update(model, grads, **kwargs)
        self.ema.update(model)


@set_module("mirror.callbacks")
@final
class EMA(Callback):
    """Exponential moving averages of the weights, by `nnx.EMA`, which often generalize better.

    They are state of the optimizer: each update moves them inside the step, checkpoints contain
    them, and `trainer.restore` restores them. Create the optimizer with `optimizer`, and pass the
    callback to `fit` to evaluate the averages after each epoch, as `ema_loss` and so on.

        ema = mirror.callbacks.EMA(test, batch_size=64, decay=0.999)
        with strategy.scope():
            model = CNN(rngs=nnx.Rngs(0))
            trainer = mirror.Trainer(model, ema.optimizer(model, optax.adam(1e-3)), loss_fn)
        trainer.fit(train, epochs=10, callbacks=ema)
        with ema.weights(trainer):  # the model has the averages
            trainer.export("model.jax", example)

    Other state, such as the statistics of batch normalization, is not averaged. With
    `mirror.ps.ParameterServerStrategy`, servers would have to know the averages: an error.

    Args:
        data: Data to evaluate the averages on after each epoch, as for `trainer.evaluate`.
        batch_size: As for `trainer.evaluate`.
        decay: Weight of the average before an update: `decay * average + (1 - decay) * new`.

    Raises:
        ValueError: If `decay` is not between 0 and 1.
        TypeError: In `fit` and `weights`, if the trainer has another optimizer.

    >>> data = np.ones((4, 2), "float32"), np.ones((4, 1), "float32")
    >>> ema = EMA(data, batch_size=4, decay=0.5)
    >>> with mirror.MirroredStrategy(["/cpu:0", "/cpu:1"]).scope():
    ...     model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    ...     trainer = mirror.Trainer(model, ema.optimizer(model, optax.sgd(0.1)), "mse")
    >>> sorted(trainer.fit(data, epochs=2, batch_size=4, callbacks=ema, progress=False))
    ['ema_loss', 'loss']
    """

    adds: ClassVar[tuple[str, ...]] = ("ema_",)

    def __init__(self, data: Any = None, *, batch_size: int | None = None, decay: float) -> None:
        if isinstance(decay, bool) or not isinstance(decay, int | float) or not 0 <= decay < 1:
            raise ValueError(expected("decay", decay, "a number from 0 to 1", "For example 0.999."))
        self._data, self._batch_size, self._decay = data, batch_size, decay

    def optimizer(
        self, model: nnx.Module, tx: optax.GradientTransformation, *, wrt: Any = nnx.Param
    ) -> nnx.Optimizer[Any]:
        """Returns the optimizer for `mirror.Trainer`, which updates the averages, too.

        Args:
            model: The model, inside the scope of the strategy if there is one.
            tx: An optax transformation.
            wrt: Which variables to train and to average, as for `nnx.Optimizer`.
        """
        return _AveragingOptimizer(model, tx, self._decay, wrt)

    @contextlib.contextmanager
    def weights(self, trainer: Any) -> Iterator[None]:
        """Context manager in which `trainer.model` has the averages instead of the weights.

        Args:
            trainer: The trainer, which evaluates, predicts and exports with the averages inside.

        Raises:
            RuntimeError: At the end, if the trainer has trained inside.
        """
        optimizer, model = self._optimizer_of(trainer), trainer.model
        averaged, step = optimizer.ema.apply_to(model), int(optimizer.step[...])
        try:
            trainer.model = averaged
            yield
        finally:
            trainer._objects["model"] = model  # an interrupt can arrive in the setter
        if int(optimizer.step[...]) != step:
            raise RuntimeError(
                "fit() was called inside ema.weights(trainer) and has trained the averages, which "
                "are lost. Call it outside: the callback evaluates the averages in each epoch."
            )

    def _optimizer_of(self, trainer: Any) -> _AveragingOptimizer:
        optimizer = trainer.optimizer
        if not isinstance(optimizer, _AveragingOptimizer):
            raise TypeError(
                f"The optimizer of the trainer is {describe(optimizer)}, which has no averages. "
                "Create it with the callback: mirror.Trainer(model, ema.optimizer(model, tx), ...)."
            )
        return optimizer

    def on_fit_begin(self, fit: FitLoop) -> None:
        """Checks that there are averages."""
        self._optimizer_of(fit.trainer)

    def on_epoch_end(self, fit: FitLoop, logs: dict[str, float]) -> None:
        """Evaluates the averages."""
        if self._data is not None:
            trainer = fit.trainer  # which has the weights if this is interrupted
            averaged = self._optimizer_of(trainer).ema.apply_to(trainer.model)
            found = trainer._evaluate_model(averaged, self._data, self._batch_size)
            logs.update({f"ema_{name}": value for name, value in found.items()})
