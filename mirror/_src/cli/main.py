"""The `mirror` command."""

import argparse
import contextlib
import importlib
import json
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from mirror._src.cli import devices as inventory
from mirror._src.cli.bench import command as bench
from mirror._src.cli.common import FAILED, REFUSED, Commands, add_command, complain, positive
from mirror._src.cli.demo.options import APIS, EXECUTORS, TRAINERS, OptionError, Options
from mirror._src.cli.doctor import command as doctor
from mirror._src.cli.estimate import command as estimate
from mirror._src.utils import interrupts
from mirror._version import __version__

_INTERRUPTED = 128 + signal.SIGINT
_DEMO_MODULES = ("sklearn", "tqdm", "matplotlib", "grain")
_DEVICES = """\
Shows the CPU and the GPUs of this machine, the logical devices that JAX makes
of them, how much memory is taken, what is configured and why, and versions.
It starts JAX's backend, as a program would: try it with the environment of the
program, XLA_FLAGS and CUDA_VISIBLE_DEVICES among it.
"""
_DEVICES_END = """\
examples:
  mirror devices
  mirror devices --json | jq '.logical[].name'
  CUDA_VISIBLE_DEVICES=1 mirror devices

exit status:
  0  shown
  1  JAX's backend does not start; the message says why
  2  an option is wrong
"""
_DEMO = """\
Trains a small convolutional net on the 1797 handwritten digits that
scikit-learn ships, mirrored over all GPUs; where there is no GPU, over host
devices, which are forced for the purpose. Then it shows that all replicas hold
bitwise the same parameters, and that a training step on all of them is the one
that a single device takes on the whole batch.
"""
_DEMO_END = """\
examples:
  mirror demo                           all GPUs, or 4 host devices
  mirror demo --devices 8 --api linen   8 replicas of a Linen module
  mirror demo --trainer loop            the same by hand
  mirror demo --devices 1 --replicas-per-device 8
                                        8 replicas on one device
  mirror demo --plot curves.png         loss and accuracy as a picture
  mirror demo --json | jq .test_accuracy

exit status:
  0    the replicas are equal and compute what one device does
  1    they are not
  2    an option is wrong or a package is missing
  130  Ctrl-C

It needs a few packages more than mirror does: pip install "mirror-jax[demo]"
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    parsed = _parser().parse_args(arguments)
    try:
        with interrupts.DeferredInterrupts():
            return parsed.run(parsed)
    except KeyboardInterrupt:
        print("\nInterrupted.", file=sys.stderr)
        return _INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="mirror", description="MirroredStrategy for JAX.")
    parser.add_argument("--version", action="version", version=f"mirror {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    _add_demo(commands)
    _add_devices(commands)
    bench.add(commands)
    estimate.add(commands)
    doctor.add(commands)
    return parser


def _add_devices(commands: Commands) -> None:
    parser = add_command(
        commands,
        "devices",
        _devices,
        "show the devices, what is configured of them and why",
        (_DEVICES, _DEVICES_END),
    )
    parser.add_argument("--json", action="store_true", help="print it as JSON, sizes in bytes")


def _devices(parsed: argparse.Namespace) -> int:
    try:
        found = inventory.inventory()
    except (RuntimeError, ValueError) as error:
        return complain("devices", str(error), FAILED)
    print(json.dumps(found, indent=2) if parsed.json else inventory.in_words(found))
    return 0


def _add_demo(commands: Commands) -> None:
    parser = add_command(
        commands,
        "demo",
        _demo,
        "train a net on handwritten digits, mirrored over all devices",
        (_DEMO, _DEMO_END),
    )
    parser.add_argument(
        "--devices",
        type=_devices_asked,
        metavar="N|NAMES",
        help="how many devices, or which: 2, or /gpu:0,/cpu:0 (default: all GPUs, else 4 host "
        "devices, or as many as XLA_FLAGS or JAX_NUM_CPU_DEVICES say)",
    )
    parser.add_argument(
        "--replicas-per-device",
        type=positive,
        default=Options.replicas_per_device,
        metavar="N",
        help="how many replicas on each device (default: %(default)s)",
    )
    parser.add_argument(
        "--executor",
        choices=EXECUTORS,
        help="what runs the step: pmap, one program over all devices; vmap, all replicas on the "
        "first device; staged, collectives reduced on the host (default: what suits the devices)",
    )
    parser.add_argument(
        "--api",
        choices=APIS,
        default=Options.api,
        help="how the net is written: an nnx module with an nnx.Optimizer, a Linen module with a "
        "TrainState, or a plain pytree with optax (default: %(default)s)",
    )
    parser.add_argument(
        "--trainer",
        choices=TRAINERS,
        default=Options.trainer,
        help="who trains: fit, a mirror.Trainer; loop, a loop written by hand over strategy.run "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--epochs",
        type=positive,
        default=Options.epochs,
        metavar="N",
        help="how often to go through the training images (default: %(default)s)",
    )
    parser.add_argument(
        "--batch-size",
        type=positive,
        default=Options.batch_size,
        metavar="N",
        help="images in a step, of all replicas together; any number: where it does not divide by "
        "the replicas it is padded, exactly (default: %(default)s)",
    )
    parser.add_argument(
        "--seed",
        type=_seed,
        default=Options.seed,
        metavar="N",
        help="of the first parameters and of the order of the images (default: %(default)s)",
    )
    parser.add_argument(
        "--plot",
        type=Path,
        metavar="FILE",
        help="write the curves of loss and accuracy there; its ending says the format: .png, .pdf",
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="print what comes of it as JSON; the rest goes to standard error",
    )


def _demo(parsed: argparse.Namespace) -> int:
    options = Options(
        devices=parsed.devices,
        replicas_per_device=parsed.replicas_per_device,
        executor=parsed.executor,
        epochs=parsed.epochs,
        api=parsed.api,
        trainer=parsed.trainer,
        batch_size=parsed.batch_size,
        seed=parsed.seed,
        plot=parsed.plot,
    )
    try:
        # Imported when asked for: it needs packages that the other commands do without.
        demo = importlib.import_module("mirror._src.cli.demo.run")
        with contextlib.redirect_stdout(sys.stderr if parsed.json else sys.stdout):
            outcome = demo.run(options)
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in _DEMO_MODULES:
            raise
        return complain(
            "demo",
            f"the demo needs {missing}, which is not installed. Install what it needs:\n"
            '  pip install "mirror-jax[demo]"',
            REFUSED,
        )
    except OptionError as error:
        return complain("demo", str(error), REFUSED)
    if parsed.json:
        print(json.dumps(outcome.to_dict(), indent=2))
    return 0 if outcome.passed else FAILED


def _devices_asked(text: str) -> int | tuple[str, ...]:
    """How many devices, or their names, separated by commas."""
    if not any(character.isalpha() for character in text):
        return positive(text)
    return tuple(name.strip() for name in text.split(","))


def _seed(text: str) -> int:
    """An option's whole number from 0 to what a 32-bit seed holds."""
    if not text.strip().isdecimal() or int(text) >= 2**32:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 0 to 4294967295")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
