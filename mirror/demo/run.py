"""The demo from start to end: devices, training, and the proof that the replicas are in step."""

import math

import jax
import optax

import mirror
from mirror.demo import data, interrupts, placement, plot
from mirror.demo.loop import fit
from mirror.demo.models import Training, make_training
from mirror.demo.options import Options

_LEARNING_RATE = 0.1
_RTOL = 1e-5


def run(options: Options) -> bool:
    """Trains the net and prints what comes of it.

    Returns:
        Whether the replicas are bitwise equal and compute what one device does.

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
    lines = [repr(strategy), ""]
    if placement.on_host(strategy):
        lines.append(
            "No GPU: host devices share the cores of this machine, so more are not faster."
        )
    lines.append(
        f"A convolutional net, written as {api[options.api]}, learns handwritten digits "
        f"in batches of {options.batch_size}."
    )
    lines.append(f"Exchanges are carried out by {strategy.cross_device_ops!r}.")
    return "\n".join(lines)


def _train_and_check(strategy: mirror.Strategy, options: Options) -> bool:
    train, test = data.load()
    tx = _optimizer(options, len(train))
    with strategy.scope():
        training = make_training(options.api, tx, options.seed)
        untrained = make_training(options.api, tx, options.seed)
    history = fit(strategy, training, train, test, options)
    _say(f"\ntrained on {len(train)} images {options.epochs} times in {history.seconds:.1f} s")
    _say(f"test accuracy: {history.test[-1].score}")
    if options.plot is not None:
        count = strategy.num_replicas_in_sync
        plot.save(history, f"Digits, {options.api}, {count} replicas", options.plot)
        _say(f"curves: {options.plot}")
    equal = _check_equal(strategy, training)
    return _check_verified(strategy, untrained, train, options) and equal


def _optimizer(options: Options, num_images: int) -> optax.GradientTransformation:
    """Momentum, whose steps are linear in the gradient: rounding stays as small as it was.

    Adam divides by the gradient's size and so makes the rounding of a gradient near zero as large
    as a whole step: a first step of Adam is off by up to 2e-4, this one by less than 1e-6.
    """
    steps = math.ceil(num_images / options.batch_size) * options.epochs
    return optax.sgd(optax.cosine_decay_schedule(_LEARNING_RATE, steps), momentum=0.9)


def _check_equal(strategy: mirror.Strategy, training: Training) -> bool:
    """Whether every device holds the same bits of parameters and optimizer state."""
    try:
        strategy.check_mirrored(training.state)
    except mirror.ReplicaDivergenceError as error:
        _say(f"replicas bitwise equal: no\n{error}")
        return False
    _say("replicas bitwise equal: yes")
    return True


def _check_verified(
    strategy: mirror.Strategy, untrained: Training, train: data.Digits, options: Options
) -> bool:
    """Whether a step on all replicas is that of one device on the whole batch.

    Of an untrained net, since a trained one's loss is nearly nothing, and that is mostly rounding.
    """
    batches = strategy.distribute_dataset(train.batches(options.batch_size), remainder="pad")
    batch, mask = next(iter(batches))
    try:
        report = strategy.verify(untrained.step, (*untrained.state, batch, mask), rtol=_RTOL)
    except mirror.ReplicaMismatchError as error:
        _say(f"same step as on one device: no\n{error}")
        return False
    _say(
        f"same step as on one device: yes (largest relative difference {report.largest:.1e}, "
        f"allowed {report.rtol:g})"
    )
    return True
