"""`mirror bench`."""

import argparse
import importlib
import json
import sys
import traceback
from pathlib import Path

import jax

from mirror._src.cli.bench.measure import Contender, measure
from mirror._src.cli.bench.named import NAMED
from mirror._src.cli.bench.scaling import Scaling
from mirror._src.cli.bench.workload import MakeWorkload, WorkloadError, add_step, workload_of
from mirror._src.cli.common import (
    FAILED,
    REFUSED,
    Commands,
    add_command,
    complain,
    positive,
    positives,
)
from mirror._src.cli.demo.options import OptionError
from mirror._src.cli.host_devices import force_host_devices
from mirror._src.devices import backend
from mirror._src.strategy.mirrored import MirroredStrategy
from mirror._src.utils import interrupts
from mirror._src.utils.optional import require

_HOST_COUNTS = (1, 2, 4)
_TEXT = """\
Measures how a training step scales: on one device, on two, on more, all in this
process and in turn, so that what else the machine does meets them alike. Where
there is no GPU it runs on host devices, which are forced for the purpose; they
share the cores, so they show what mirror costs and not what more GPUs bring.

STEP is mlp (784-512-512-10) or cnn (two convolutions on 28x28 images), or your
own: module:function or file.py:function. The function is called for each count
of devices, in the strategy's scope, and returns the step, its arguments and,
if you like, batches, each of which is the last argument of a step:

  # train.py
  def bench(strategy):
      model = Net(rngs=nnx.Rngs(0))
      optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)

      def step(model, optimizer, batch):
          loss, grads = nnx.value_and_grad(loss_fn)(model, batch)
          grads, loss = mirror.get_replica_context().all_reduce("mean", (grads, loss))
          optimizer.update(model, grads)
          return loss

      return step, (model, optimizer), [{"x": x[:256], "y": y[:256]}]

The batches are those of all replicas together; mirror cuts them up. Without
data, (step, args), each step gets the same arguments. It may return (trainer,
data) as well: one training step of a mirror.Trainer per batch.
"""
_END = """\
the table:
  ms a step     the median of ten rounds; the middle half of the rounds beside it
  speed-up      against the smallest count of devices: how much more work a second
  efficiency    the speed-up as a part of the ideal one
  verdict       what takes the most, as strategy.explain finds it
  bytes         per device, a table of its own: parameters, optimizer state, batch,
                temporaries; mirror estimate-memory counts them without a run

examples:
  mirror bench                                  mlp on all GPUs, or on 4 host devices
  mirror bench cnn --devices 1,2,4,8 --weak     the same batch on each device
  mirror bench train.py:bench --plot scaling.png
  mirror bench --json | jq '.rows[].efficiency'

exit status:
  0    measured
  1    the step fails; its traceback and a message say why
  2    an option is wrong, there is no such step, or a package is missing
  130  Ctrl-C

A picture needs matplotlib: pip install "mirror-jax[train]"
"""


def add(commands: Commands) -> None:
    """Adds the command."""
    summary = "measure how a training step scales over the devices"
    parser = add_command(commands, "bench", run, summary, (_TEXT, _END))
    add_step(parser)
    parser.add_argument(
        "--devices",
        type=positives,
        metavar="N,N,...",
        help="on how many devices, the first of those there are (default: 1, 2, 4 and so on to "
        "all GPUs, else to 4 host devices)",
    )
    parser.add_argument(
        "--steps",
        type=positive,
        default=30,
        metavar="N",
        help="how many steps to measure on each, at least (default: %(default)s)",
    )
    parser.add_argument(
        "--weak",
        action="store_true",
        help="the same batch on each device, so that the whole grows with them (default: strong "
        "scaling, the same whole batch)",
    )
    sizes = ", ".join(f"{name} {named.batch_size}" for name, named in NAMED.items())
    parser.add_argument(
        "--batch-size",
        type=positive,
        metavar="N",
        help=f"examples in a step of a built-in model; with --weak, on each device ({sizes})",
    )
    parser.add_argument(
        "--plot",
        type=Path,
        metavar="FILE",
        help="draw the speed-up there; its ending says the format: .png, .pdf",
    )
    parser.add_argument("--json", action="store_true", help="print it as JSON")


def run(parsed: argparse.Namespace) -> int:
    """Runs the command; returns the exit status."""
    try:
        if parsed.plot is not None:
            _require_plot(parsed.plot)
        devices, counts = _devices(parsed.devices)
        make = workload_of(parsed.step, parsed.batch_size, parsed.weak)
        found = _measure(parsed, make, devices, counts)
    except (OptionError, WorkloadError) as error:
        return complain("bench", str(error), REFUSED)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name == "matplotlib":
            return complain("bench", str(error), REFUSED)
        traceback.print_exc()
        return complain("bench", f"{parsed.step} fails: {_first_line(error)}", FAILED)
    print(json.dumps(found.to_dict(), indent=2) if parsed.json else found)
    if parsed.plot is not None:
        found.plot(parsed.plot)
        print(f"picture: {parsed.plot}", file=sys.stderr)
    return 0


def _measure(
    parsed: argparse.Namespace,
    make: MakeWorkload,
    devices: tuple[jax.Device, ...],
    counts: tuple[int, ...],
) -> Scaling:
    contenders = []
    for count in counts:
        interrupts.check()
        print(f"compiling {parsed.step} for {_in_words(count)}", file=sys.stderr, flush=True)
        strategy = MirroredStrategy(devices[:count])
        contenders.append(Contender(strategy, make(strategy)))
        contenders[-1].warm_up()
    print("measuring and explaining it", file=sys.stderr, flush=True)
    return measure(parsed.step, contenders, parsed.steps, parsed.weak)


def _devices(asked: tuple[int, ...] | None) -> tuple[tuple[jax.Device, ...], tuple[int, ...]]:
    """The devices, and on how many of them to measure.

    Raises:
        OptionError: there are not so many.
    """
    most = max(asked or _HOST_COUNTS)
    fixed_by = force_host_devices(most)
    devices = backend.default_devices()
    there = len(devices)
    if asked is None:
        powers = (2**k for k in range(there.bit_length()))
        counts = tuple(sorted({*powers, there}))
        on_host = backend.type_of(devices[0]) == "CPU"
        return devices, tuple(n for n in counts if n <= _HOST_COUNTS[-1]) if on_host else counts
    if most <= there:
        return devices, asked
    kind = backend.type_of(devices[0])
    raise OptionError(
        f"--devices {','.join(map(str, asked))}: there are {there} {kind} devices, "
        f"{backend.names(devices)}. "
        + (
            f"{fixed_by} says how many, and is left as it is. Unset it, or ask for at most {there}."
            if kind == "CPU"
            else f"Ask for at most {there}, or run on host devices: JAX_PLATFORMS=cpu mirror bench."
        )
    )


def _require_plot(file: Path) -> None:
    """Refuses a picture that could not be drawn, before anything is measured.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
        OptionError: an unknown format, or no such folder.
    """
    require("matplotlib.figure")
    importlib.import_module("mirror._src.cli.demo.plot").require_writable(file)


def _in_words(count: int) -> str:
    return "1 device" if count == 1 else f"{count} devices"


def _first_line(error: Exception) -> str:
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"
