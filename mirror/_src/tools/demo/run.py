"""Runs the demo: selects devices, trains, and checks that the replicas stayed in sync."""

import argparse
import time
from dataclasses import asdict, dataclass
from typing import Any

import mirror
from mirror._src.base import interrupts
from mirror._src.base.errors import counted
from mirror._src.base.terminal import paint, wrap
from mirror._src.devices import backend
from mirror._src.tools.common import require_writable
from mirror._src.tools.demo import data, placement
from mirror._src.tools.demo.training import make_trainer

_RTOL = 1e-5


@dataclass(frozen=True)
class StepCheck:
    """Comparison of a step on all replicas with the same step on one device.

    Attributes:
        same: Whether both compute the same.
        largest: The largest relative difference; `None` if they differ.
        rtol: The largest difference allowed; `None` if they differ.
    """

    same: bool
    largest: float | None
    rtol: float | None


@dataclass(frozen=True)
class Outcome:
    """Results of the demo.

    Attributes:
        devices: Names of the replicas' devices.
        test_accuracy: Accuracy on the test images after the last epoch, from 0 to 1.
        seconds: Duration of the training.
        history: Loss and accuracy of every epoch.
        replicas_equal: Whether all replicas hold bitwise equal parameters and optimizer state.
        step: Comparison of a step with one device.
    """

    devices: tuple[str, ...]
    test_accuracy: float
    seconds: float
    history: mirror.History
    replicas_equal: bool
    step: StepCheck

    @property
    def passed(self) -> bool:
        """Whether both checks passed."""
        return self.replicas_equal and self.step.same

    def to_dict(self) -> dict[str, Any]:
        """Returns the results as numbers, text and lists, for JSON."""
        return {
            "passed": self.passed,
            "devices": list(self.devices),
            "test_accuracy": self.test_accuracy,
            "seconds": self.seconds,
            "replicas_equal": self.replicas_equal,
            "same_step_as_one_device": asdict(self.step),
            "history": self.history.to_dict(),
        }


def run(options: argparse.Namespace) -> Outcome:
    """Trains the model, checks the replicas, and prints the results.

    Raises:
        OptionError: If this machine cannot satisfy an option.
    """
    if options.plot is not None:
        require_writable(options.plot)
    strategy = placement.make_strategy(options)
    _print(_introduction(strategy, options))
    return _train_and_check(strategy, options)


def _print(text: str) -> None:
    """Prints immediately, in order with the progress bar; stops after Ctrl-C."""
    interrupts.check()
    print(wrap(text), flush=True)


def _print_check(name: str, *, passed: bool, details: str = "") -> None:
    """Prints the result of a check, colored in terminals."""
    interrupts.check()
    head, verdict = f"{name}: ", "yes" if passed else "no"
    text = wrap(head + verdict + details).removeprefix(head + verdict)
    print(head + paint(verdict, "green" if passed else "red") + text, flush=True)


def _introduction(strategy: mirror.Strategy, options: argparse.Namespace) -> str:
    lines = [repr(strategy), ""]
    if placement.is_on_host(strategy):
        lines.append(
            "No GPU found. Running on host devices, which share this machine's cores: adding "
            "devices does not speed up training."
        )
    lines.append(
        "Training a convolutional net on handwritten digits with mirror.Trainer, in batches of "
        f"{options.batch_size}. Collectives: {strategy.cross_device_ops!r}."
    )
    return "\n".join(lines)


def _train_and_check(strategy: mirror.Strategy, options: argparse.Namespace) -> Outcome:
    train, test = data.load()
    start = time.perf_counter()
    trainer, untrained = (make_trainer(strategy, options, len(train)) for _ in range(2))
    interrupts.check()
    history = trainer.fit(
        train.batches(options.batch_size, shuffle=True, seed=options.seed),
        options.epochs,
        validation_data=test.batches(options.batch_size),
    )
    seconds, accuracy = time.perf_counter() - start, history["val_accuracy"][-1]
    epochs = counted(options.epochs, "epoch")
    _print(f"\ntrained on {len(train)} images for {epochs} in {seconds:.1f} s")
    _print(f"test accuracy: {accuracy:.1%} ({round(accuracy * len(test))} of {len(test)})")
    if options.plot is not None:
        history.plot(options.plot)
        _print(f"curves: {options.plot}")
    names = tuple(map(backend.logical_name, strategy.devices))
    is_equal = _check_equal(strategy, trainer)
    # A trained model's loss is close to zero and mostly rounding error, so a new model is compared.
    step = _check_step(untrained, train.batches(options.batch_size))
    return Outcome(names, accuracy, seconds, history, is_equal, step)


def _check_equal(strategy: mirror.Strategy, trainer: mirror.Trainer) -> bool:
    """Checks that all devices hold the same bits of the parameters and the optimizer state."""
    try:
        strategy.check_mirrored((trainer.model, trainer.optimizer))
    except mirror.ReplicaDivergenceError as error:
        _print_check("replicas bitwise equal", passed=False, details=f"\n{error}")
        return False
    _print_check("replicas bitwise equal", passed=True)
    return True


def _check_step(trainer: mirror.Trainer, batches: Any) -> StepCheck:
    """Checks that a step on all replicas equals a step of one device on the whole batch."""
    try:
        report = trainer.verify(batches, rtol=_RTOL)
    except mirror.VerifyError as error:
        _print_check("same step as on one device", passed=False, details=f"\n{error}")
        return StepCheck(False, None, None)
    details = f" (largest relative difference {report.largest:.1e}, allowed {report.rtol:g})"
    _print_check("same step as on one device", passed=True, details=details)
    return StepCheck(True, report.largest, report.rtol)
