"""The demo from start to end: devices, training, and the proof that the replicas are in step."""

import math
import time
from dataclasses import asdict, dataclass
from typing import Any

import jax
import optax

import mirror
from mirror._src.cli.demo import data, placement, plot
from mirror._src.cli.demo.options import Options
from mirror._src.cli.demo.trained import Trained, make_trained
from mirror._src.devices import backend
from mirror._src.utils import interrupts

_LEARNING_RATE = 0.1


@dataclass(frozen=True)
class StepCheck:
    """How a step on all replicas compares with one device's.

    Attributes:
        same: whether it is the same one.
        largest: the largest relative difference; `None` where they are not the same.
        rtol: the largest that was allowed.
    """

    same: bool
    largest: float | None
    rtol: float | None


@dataclass(frozen=True)
class Outcome:
    """What came of the demo.

    Attributes:
        devices: of the replicas.
        test_accuracy: after the last epoch, 0 to 1.
        seconds: how long the training took.
        history: of the epochs.
        replicas_equal: whether the replicas hold bitwise the same.
        step: of all replicas, against one device's.
    """

    devices: tuple[str, ...]
    test_accuracy: float
    seconds: float
    history: mirror.History
    replicas_equal: bool
    step: StepCheck

    @property
    def passed(self) -> bool:
        """Whether the replicas are bitwise equal and compute what one device does."""
        return self.replicas_equal and self.step.same

    def to_dict(self) -> dict[str, Any]:
        """Everything as numbers, text and lists, for JSON."""
        return {
            "passed": self.passed,
            "devices": list(self.devices),
            "test_accuracy": self.test_accuracy,
            "seconds": self.seconds,
            "replicas_equal": self.replicas_equal,
            "same_step_as_one_device": asdict(self.step),
            "history": self.history.to_dict(),
        }


def run(options: Options) -> Outcome:
    """Trains the net and prints what comes of it.

    Raises:
        OptionError: an option that this machine cannot honour.
    """
    if options.plot is not None:
        plot.require_writable(options.plot)
    # GPUs round float32 products to TF32 by themselves. The net is small, and what is verified
    # below should be how the replicas add up, not that.
    with jax.default_matmul_precision("highest"):
        strategy = placement.make_strategy(options)
        _say(_introduction(strategy, options))
        return _train_and_check(strategy, options)


def _say(text: str) -> None:
    """Prints at once, so that a log has it in order with the bar; or stops, after Ctrl-C."""
    interrupts.check()
    print(text, flush=True)


def _introduction(strategy: mirror.Strategy, options: Options) -> str:
    api = {"nnx": "an nnx module", "linen": "a Linen module", "plain": "a plain pytree"}
    how = {"fit": "by mirror.Trainer", "loop": "by a loop over strategy.run"}
    lines = [repr(strategy), ""]
    if placement.on_host(strategy):
        lines.append(
            "No GPU: host devices share the cores of this machine, so more are not faster."
        )
    lines.append(
        f"A convolutional net, written as {api[options.api]}, learns handwritten digits "
        f"in batches of {options.batch_size}, trained {how[options.trainer]}."
    )
    lines.append(f"Collectives are carried out by {strategy.cross_device_ops!r}.")
    return "\n".join(lines)


def _train_and_check(strategy: mirror.Strategy, options: Options) -> Outcome:
    train, test = data.load()
    tx, start = _optimizer(options, len(train)), time.perf_counter()
    with strategy.scope():
        trained, untrained = make_trained(tx, options), make_trained(tx, options)
    interrupts.check()
    history = trained.fit(train, test, options)
    seconds, accuracy = time.perf_counter() - start, history["val_accuracy"][-1]
    _say(f"\ntrained on {len(train)} images {options.epochs} times in {seconds:.1f} s")
    _say(f"test accuracy: {accuracy:.1%} ({round(accuracy * len(test))} of {len(test)})")
    if options.plot is not None:
        history.plot(options.plot)
        _say(f"curves: {options.plot}")
    names = tuple(map(backend.logical_name, strategy.devices))
    equal = _check_equal(strategy, trained)
    verified = _check_verified(untrained, train, options)
    return Outcome(names, accuracy, seconds, history, equal, verified)


def _optimizer(options: Options, num_images: int) -> optax.GradientTransformation:
    """Momentum, whose steps are linear in the gradient: rounding stays as small as it was.

    Adam divides by the gradient's size and so makes the rounding of a gradient near zero as large
    as a whole step: a first step of Adam is off by up to 2e-4, this one by less than 1e-6.
    """
    steps = math.ceil(num_images / options.batch_size) * options.epochs
    return optax.sgd(optax.cosine_decay_schedule(_LEARNING_RATE, steps), momentum=0.9)


def _check_equal(strategy: mirror.Strategy, trained: Trained) -> bool:
    """Whether every device holds the same bits of parameters and optimizer state."""
    try:
        strategy.check_mirrored(trained.state)
    except mirror.ReplicaDivergenceError as error:
        _say(f"replicas bitwise equal: no\n{error}")
        return False
    _say("replicas bitwise equal: yes")
    return True


def _check_verified(untrained: Trained, train: data.Digits, options: Options) -> StepCheck:
    """Whether a step on all replicas is that of one device on the whole batch.

    Of an untrained net, since a trained one's loss is nearly nothing, and that is mostly rounding.
    """
    try:
        report = untrained.verify(train, options)
    except mirror.ReplicaMismatchError as error:
        _say(f"same step as on one device: no\n{error}")
        return StepCheck(False, None, None)
    _say(
        f"same step as on one device: yes (largest relative difference {report.largest:.1e}, "
        f"allowed {report.rtol:g})"
    )
    return StepCheck(True, report.largest, report.rtol)
