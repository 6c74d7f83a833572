"""Options and help of `mirror demo`."""

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias, get_args

from mirror_cli.common import Commands, add_command, positive_int
from mirror_cli.install import install_command

ExecutorName: TypeAlias = Literal["pmap", "vmap", "staged"]
EXECUTORS: tuple[ExecutorName, ...] = get_args(ExecutorName)
_TEXT = """\
Trains a small convolutional net on the 1797 handwritten digits that ship with
scikit-learn, mirrored across all GPUs. Without a GPU, it creates host devices.
Then it checks that all replicas hold bitwise equal parameters, and that a
training step on all replicas equals a step of one device on the whole batch.
"""
_END = f"""\
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

The demo requires additional packages: {install_command("demo")}
"""


@dataclass(frozen=True)
class Options:
    """The parsed options of `mirror demo`.

    Attributes:
        devices: Number of devices, or their names. `None` selects all GPUs, or four host devices
            on a machine without GPUs.
        replicas_per_device: Number of replicas on each device.
        executor: Runs the step. `None` selects the executor that suits the devices.
        epochs: Number of passes over the training images.
        batch_size: Number of images in a global batch.
        seed: Seed of the initial parameters and of the order of the images.
        plot: Picture file for the curves of loss and accuracy.
    """

    devices: int | tuple[str, ...] | None = None
    replicas_per_device: int = 1
    executor: ExecutorName | None = None
    epochs: int = 15
    batch_size: int = 64
    seed: int = 0
    plot: Path | None = None


def add(commands: Commands) -> None:
    """Adds the command."""
    summary = "train a small model on handwritten digits, mirrored across all devices"
    parser = add_command(commands, "demo", summary, (_TEXT, _END))
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
