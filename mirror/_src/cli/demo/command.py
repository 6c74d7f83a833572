"""`mirror demo`."""

import argparse
import contextlib
import importlib
import json
import sys
from dataclasses import fields
from pathlib import Path

from mirror._src.cli.common import (
    FAILED,
    USAGE_ERROR,
    Commands,
    OptionError,
    add_command,
    positive_int,
    report_error,
)
from mirror._src.cli.demo.options import EXECUTORS, Options
from mirror._src.utils.optional import describe_missing

_PACKAGES = ("sklearn", "tqdm", "matplotlib", "grain")
_TEXT = """\
Trains a small convolutional net on the 1797 handwritten digits that ship with
scikit-learn, mirrored across all GPUs. Without a GPU, it creates host devices.
Then it checks that all replicas hold bitwise equal parameters, and that a
training step on all replicas equals a step of one device on the whole batch.
"""
_END = """\
examples:
  mirror demo                           all GPUs, or 4 host devices
  mirror demo --devices 8 --executor staged
                                        collectives reduced on the host
  mirror demo --devices 1 --replicas-per-device 8
                                        8 replicas on one device
  mirror demo --plot curves.png         loss and accuracy as a picture
  mirror demo --json | jq .test_accuracy

exit status:
  0    both checks passed
  1    a check failed
  2    an option is invalid, or a package is missing
  130  interrupted by Ctrl-C

The demo requires additional packages: pip install "mirror-jax[demo]"
"""


def add(commands: Commands) -> None:
    """Adds the command."""
    summary = "train a small model on handwritten digits, mirrored across all devices"
    parser = add_command(commands, "demo", run, summary, (_TEXT, _END))
    parser.add_argument(
        "--devices",
        type=_count_or_names,
        metavar="N|NAMES",
        help="number of devices, or their names: 2, or /gpu:0,/cpu:0 (default: all GPUs; without a "
        "GPU, 4 host devices, or the number set by XLA_FLAGS or JAX_NUM_CPU_DEVICES)",
    )
    parser.add_argument(
        "--replicas-per-device",
        type=positive_int,
        default=Options.replicas_per_device,
        metavar="N",
        help="number of replicas on each device (default: %(default)s)",
    )
    parser.add_argument(
        "--executor",
        choices=EXECUTORS,
        help="pmap: one program across all devices; vmap: all replicas on the first device; "
        "staged: collectives reduced on the host (default: chosen for the devices)",
    )
    parser.add_argument(
        "--epochs",
        type=positive_int,
        default=Options.epochs,
        metavar="N",
        help="number of passes over the training images (default: %(default)s)",
    )
    parser.add_argument(
        "--batch-size",
        type=positive_int,
        default=Options.batch_size,
        metavar="N",
        help="images in a global batch; any number, because batches are padded to a multiple of "
        "the replicas without changing the result (default: %(default)s)",
    )
    parser.add_argument(
        "--seed",
        type=_seed,
        default=Options.seed,
        metavar="N",
        help="seed of the initial parameters and of the order of the images (default: %(default)s)",
    )
    parser.add_argument(
        "--plot",
        type=Path,
        metavar="FILE",
        help="save the curves of loss and accuracy; the suffix selects the format: .png, .pdf",
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="print the results as JSON; all other output goes to standard error",
    )


def run(parsed: argparse.Namespace) -> int:
    """Runs the command; returns the exit status."""
    options = Options(**{field.name: getattr(parsed, field.name) for field in fields(Options)})
    try:
        # Imported here because it needs packages that the other commands do not.
        demo = importlib.import_module("mirror._src.cli.demo.run")
        with contextlib.redirect_stdout(sys.stderr if parsed.json else sys.stdout):
            outcome = demo.run(options)
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in _PACKAGES:
            raise
        message = describe_missing(missing, "mirror demo", "demo")
        return report_error("demo", message, USAGE_ERROR)
    except OptionError as error:
        return report_error("demo", str(error), USAGE_ERROR)
    if parsed.json:
        print(json.dumps(outcome.to_dict(), indent=2))
    return 0 if outcome.passed else FAILED


def _count_or_names(text: str) -> int | tuple[str, ...]:
    """Parses a number of devices, or device names separated by commas."""
    if not any(character.isalpha() for character in text):
        return positive_int(text)
    return tuple(name.strip() for name in text.split(","))


def _seed(text: str) -> int:
    """Parses a seed of 32 bits."""
    if not text.strip().isdecimal() or int(text) >= 2**32:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer from 0 to {2**32 - 1}")
    return int(text)
