"""`mirror demo`: trains a convolutional net on handwritten digits, and checks the replicas."""

import argparse
import contextlib
import json
import math
import sys
import time
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import numpy as np
import optax

import mirror
from mirror._src.base import interrupts
from mirror._src.base.errors import counted
from mirror._src.base.optional import require
from mirror._src.base.terminal import paint, wrap
from mirror._src.devices import backend
from mirror._src.devices.names import DeviceSpec
from mirror._src.devices.resolve import canonicalize_replica_devices
from mirror._src.tools.builtin_steps import CNN
from mirror._src.tools.common import (
    NUM_HOST_DEVICES,
    force_host_devices,
    require_few_replicas,
    require_writable,
    too_few_devices,
)
from mirror._src.tools.options import FAILED, USAGE_ERROR, OptionError, report_error

_FEATURE = "mirror demo", "demo"  # and its extra
_PACKAGES = ("sklearn", "matplotlib")
SIDE = 8
_NUM_TEST = 360
_FEATURES = (32, 64)
_LEARNING_RATE = 0.1
_RTOL = 1e-5


Digits: TypeAlias = tuple[np.ndarray, np.ndarray]
"""Images, float32 of shape `(N, 8, 8, 1)` from 0 to 1, and labels, int32 from 0 to 9."""


def load() -> tuple[Digits, Digits]:
    """Returns 1437 training images and 360 test images, always the same ones."""
    datasets = require("sklearn.datasets", *_FEATURE)
    pixels, label = datasets.load_digits(return_X_y=True)
    image = (pixels / 16).astype(np.float32).reshape(-1, SIDE, SIDE, 1)
    order = np.random.default_rng(0).permutation(len(label))
    test, train = (
        (image[rows], label[rows].astype(np.int32)) for rows in np.split(order, [_NUM_TEST])
    )
    return train, test


def make_trainer(
    strategy: mirror.Strategy, options: argparse.Namespace, num_images: int
) -> mirror.Trainer:
    """Returns a trainer with a new model, and with SGD, whose steps are linear in the gradient.

    Why not Adam: it divides by the magnitude of the gradient, so the rounding error of a gradient
    near zero becomes as large as a whole step. A first step of Adam differs from one device by up
    to 2e-4, a step of this optimizer by less than 1e-6.
    """
    steps = math.ceil(num_images / options.batch_size) * options.epochs
    with strategy.scope():
        return mirror.Trainer(
            CNN(SIDE, _FEATURES, options.seed),
            optax.sgd(optax.cosine_decay_schedule(_LEARNING_RATE, steps), momentum=0.9),
            "sparse_categorical_crossentropy",
            metrics=["accuracy"],
        )


def make_strategy(options: argparse.Namespace) -> mirror.MirroredStrategy:
    """Returns a strategy over the requested devices that uses the requested executor.

    Raises:
        OptionError: If the devices do not exist, the executor does not support them, or there
            would be too many replicas.
    """
    devices, per_device = _devices(options.devices), options.replicas_per_device
    require_few_replicas(len(devices), per_device)
    if options.executor == "vmap":  # the same number of replicas, all on the first device
        return mirror.MirroredStrategy(devices[:1], replicas_per_device=len(devices) * per_device)
    kinds = dict.fromkeys(map(backend.type_of, devices))
    if options.executor == "pmap" and (per_device > 1 or len(kinds) > 1):
        why = f"{per_device} replicas per device" if per_device > 1 else " and ".join(kinds)
        raise OptionError(
            f"--executor pmap requires one replica per device and devices of a single type, got "
            f"{why}. Omit --executor to use one that supports them."
        )
    ops = mirror.ReductionToOneDevice() if options.executor == "staged" else None
    return mirror.MirroredStrategy(devices, ops, replicas_per_device=per_device)


def _devices(wanted: int | tuple[str, ...] | None) -> tuple[jax.Device, ...]:
    if isinstance(wanted, tuple):
        try:
            specs = [DeviceSpec.parse(name) for name in wanted]
            force_host_devices(max([NUM_HOST_DEVICES, *((s.index or 0) + 1 for s in specs)]))
            return canonicalize_replica_devices(wanted)
        except ValueError as error:
            raise OptionError(f"--devices {','.join(wanted)}: {error}") from error
    fixed_by = force_host_devices(wanted or NUM_HOST_DEVICES)
    devices = backend.default_devices()
    if wanted is not None and wanted > len(devices):
        raise too_few_devices("demo", str(wanted), devices, fixed_by)
    return devices[:wanted]


def run(parsed: argparse.Namespace) -> int:
    """Runs the command; returns the exit status."""
    try:
        with contextlib.redirect_stdout(sys.stderr if parsed.json else sys.stdout):
            outcome = train_and_check(parsed)
    except (OptionError, ModuleNotFoundError) as error:
        if isinstance(error, ModuleNotFoundError) and error.name not in _PACKAGES:
            raise
        return report_error("demo", str(error), USAGE_ERROR)
    if parsed.json:
        print(json.dumps(outcome.to_dict(), indent=2))
    return 0 if outcome.passed else FAILED


@dataclass(frozen=True)
class Outcome:
    """Results of the demo.

    Attributes:
        devices: Names of the replicas' devices.
        test_accuracy: Accuracy on the test images after the last epoch, from 0 to 1.
        seconds: Duration of the training.
        history: Loss and accuracy of every epoch.
        replicas_equal: Whether all replicas hold bitwise equal parameters and optimizer state.
        step: Comparison of a step with one device: whether both are the `"same"`, and the
            `"largest"` relative difference and the one allowed (`"rtol"`) if they are.
    """

    devices: tuple[str, ...]
    test_accuracy: float
    seconds: float
    history: mirror.History
    replicas_equal: bool
    step: dict[str, Any]

    @property
    def passed(self) -> bool:
        """Whether both checks passed."""
        return self.replicas_equal and self.step["same"]

    def to_dict(self) -> dict[str, Any]:
        """Returns the results as numbers, text and lists, for JSON."""
        return {
            "passed": self.passed,
            "devices": list(self.devices),
            "test_accuracy": self.test_accuracy,
            "seconds": self.seconds,
            "replicas_equal": self.replicas_equal,
            "same_step_as_one_device": self.step,
            "history": self.history.to_dict(),
        }


def train_and_check(options: argparse.Namespace) -> Outcome:
    """Trains the model, checks the replicas, and prints the results.

    Raises:
        OptionError: If this machine cannot satisfy an option.
    """
    if options.plot is not None:
        require_writable(options.plot, *_FEATURE)
    train, test = load()
    num_train, num_test = len(train[0]), len(test[0])
    strategy = make_strategy(options)
    _print(_introduction(strategy, options))
    start = time.perf_counter()
    trainer, untrained = (make_trainer(strategy, options, num_train) for _ in range(2))
    interrupts.check()
    history = trainer.fit(
        train,
        options.epochs,
        batch_size=options.batch_size,
        seed=options.seed,
        validation_data=test,
    )
    seconds, accuracy = time.perf_counter() - start, history["val_accuracy"][-1]
    epochs = counted(options.epochs, "epoch")
    _print(f"\ntrained on {num_train} images for {epochs} in {seconds:.1f} s")
    _print(f"test accuracy: {accuracy:.1%} ({round(accuracy * num_test)} of {num_test})")
    if options.plot is not None:
        history.plot(options.plot)
        _print(f"curves: {options.plot}")
    names = tuple(map(backend.logical_name, strategy.devices))
    is_equal = _check_equal(strategy, trainer)
    # A trained model's loss is close to zero and mostly rounding error, so a new model is compared.
    step = _check_step(untrained, train, options.batch_size)
    return Outcome(names, accuracy, seconds, history, is_equal, step)


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
    if {backend.type_of(device) for device in strategy.devices} == {"CPU"}:
        lines.append(
            "No GPU found. Running on host devices, which share this machine's cores: adding "
            "devices does not speed up training."
        )
    lines.append(
        "Training a convolutional net on handwritten digits with mirror.Trainer, in batches of "
        f"{options.batch_size}. Collectives: {strategy.cross_device_ops!r}."
    )
    return "\n".join(lines)


def _check_equal(strategy: mirror.Strategy, trainer: mirror.Trainer) -> bool:
    """Checks that all devices hold the same bits of the parameters and the optimizer state."""
    try:
        strategy.check_mirrored((trainer.model, trainer.optimizer))
    except mirror.ReplicaDivergenceError as error:
        _print_check("replicas bitwise equal", passed=False, details=f"\n{error}")
        return False
    _print_check("replicas bitwise equal", passed=True)
    return True


def _check_step(trainer: mirror.Trainer, data: Digits, batch_size: int) -> dict[str, Any]:
    """Checks that a step on all replicas equals a step of one device on the whole batch."""
    try:
        report = trainer.verify(data, batch_size=batch_size, rtol=_RTOL)
    except mirror.VerifyError as error:
        _print_check("same step as on one device", passed=False, details=f"\n{error}")
        return {"same": False, "largest": None, "rtol": None}
    details = f" (largest relative difference {report.largest:.1e}, allowed {report.rtol:g})"
    _print_check("same step as on one device", passed=True, details=details)
    return {"same": True, "largest": report.largest, "rtol": report.rtol}
