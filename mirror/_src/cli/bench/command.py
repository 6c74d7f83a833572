"""`mirror bench`."""

import argparse
import json
import sys
from pathlib import Path

import jax

from mirror._src.cli.bench.measure import Contender, measure
from mirror._src.cli.bench.scaling import Scaling
from mirror._src.cli.bench.workload import MakeWorkload, WorkloadError, add_step, workload_of
from mirror._src.cli.builtin_steps import BUILTIN_STEPS
from mirror._src.cli.common import (
    USAGE_ERROR,
    Commands,
    OptionError,
    add_command,
    positive_int,
    positive_ints,
    report_error,
    report_step_failure,
    require_writable,
)
from mirror._src.cli.host_devices import (
    HOST_COUNTS,
    NUM_HOST_DEVICES,
    force_host_devices,
    too_few_devices,
)
from mirror._src.devices import backend
from mirror._src.strategy.mirrored import MirroredStrategy
from mirror._src.utils import interrupts
from mirror._src.utils.errors import counted

_TEXT = """\
Measures how a training step scales: on one device, on two, and so on. The
measurements are interleaved in one process, so that background load affects all
of them equally. Without a GPU it creates host devices. They share the cores, so
they show the overhead of mirror, not the speed-up that more GPUs would bring.

STEP is mlp (784-512-512-10) or cnn (two convolutions on 28x28 images), or a
function of yours: module:function or file.py:function. The function is called
once per number of devices, in the strategy's scope. It returns the step, its
arguments and, optionally, batches; each batch is the last argument of a step:

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

The batches are global: mirror splits them across the replicas. Without data,
(step, args), every step gets the same arguments. The function may also return
(trainer, data), to measure one training step of a mirror.Trainer per batch.
"""
_END = """\
the table:
  ms/step       median of ten rounds
  quartiles     first and third quartile of the rounds
  speed-up      ratio of work per second, compared with the fewest devices
  efficiency    speed-up divided by the ideal speed-up
  verdict       most expensive part of the step, according to strategy.explain
  bytes         per device, in a second table: parameters, optimizer state, batch,
                temporaries; mirror estimate-memory estimates them without a run

examples:
  mirror bench                                  mlp on all GPUs, or on 4 host devices
  mirror bench cnn --devices 1,2,4,8 --weak     the same batch per device
  mirror bench train.py:bench --plot scaling.png
  mirror bench --json | jq '.rows[].efficiency'

exit status:
  0    success
  1    the step failed; a traceback and a message explain why
  2    an option is invalid, the step does not exist, or a package is missing
  130  interrupted by Ctrl-C

--plot requires matplotlib: pip install "mirror-jax[train]"
"""


def add(commands: Commands) -> None:
    """Adds the command."""
    summary = "measure how a training step scales across devices"
    parser = add_command(commands, "bench", run, summary, (_TEXT, _END))
    add_step(parser)
    parser.add_argument(
        "--devices",
        type=positive_ints,
        metavar="N,N,...",
        help="numbers of devices to measure on (default: 1, 2, 4, ... up to all GPUs; without a "
        "GPU, up to 4 host devices)",
    )
    parser.add_argument(
        "--steps",
        type=positive_int,
        default=30,
        metavar="N",
        help="least number of steps to measure on each number of devices (default: %(default)s)",
    )
    parser.add_argument(
        "--weak",
        action="store_true",
        help="weak scaling: the same batch per device, so that the global batch grows (default: "
        "strong scaling, the same global batch)",
    )
    sizes = ", ".join(f"{name} {step.batch_size}" for name, step in BUILTIN_STEPS.items())
    parser.add_argument(
        "--batch-size",
        type=positive_int,
        metavar="N",
        help="global batch size of a built-in model; with --weak, batch size per device (default: "
        f"{sizes})",
    )
    parser.add_argument(
        "--plot",
        type=Path,
        metavar="FILE",
        help="save a picture of the speed-up; the suffix selects the format: .png, .pdf",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(parsed: argparse.Namespace) -> int:
    """Runs the command; returns the exit status."""
    try:
        if parsed.plot is not None:
            require_writable(parsed.plot)
        devices, counts = _devices(parsed.devices)
        make = workload_of(parsed.step, parsed.batch_size, parsed.weak)
        scaling = _measure(parsed, make, devices, counts)
    except (OptionError, WorkloadError) as error:
        return report_error("bench", str(error), USAGE_ERROR)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name == "matplotlib":
            return report_error("bench", str(error), USAGE_ERROR)
        return report_step_failure("bench", parsed.step, error)
    print(json.dumps(scaling.to_dict(), indent=2) if parsed.json else scaling)
    if parsed.plot is not None:
        scaling.plot(parsed.plot)
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
        on = counted(count, "device")
        print(f"compiling {parsed.step} for {on}", file=sys.stderr, flush=True)
        strategy = MirroredStrategy(devices[:count])
        contenders.append(Contender(strategy, make(strategy)))
        contenders[-1].warm_up()
    print("measuring and explaining the step", file=sys.stderr, flush=True)
    return measure(parsed.step, contenders, parsed.steps, parsed.weak)


def _devices(wanted: tuple[int, ...] | None) -> tuple[tuple[jax.Device, ...], tuple[int, ...]]:
    """Returns the available devices, and the numbers of devices to measure on.

    Raises:
        OptionError: If there are not enough devices.
    """
    most = max(wanted or HOST_COUNTS)
    fixed_by = force_host_devices(most)
    devices = backend.default_devices()
    if wanted is None:
        powers = (2**k for k in range(len(devices).bit_length()))
        counts = tuple(sorted({*powers, len(devices)}))
        on_host = backend.type_of(devices[0]) == "CPU"
        return devices, tuple(n for n in counts if n <= NUM_HOST_DEVICES) if on_host else counts
    if most > len(devices):
        raise too_few_devices("bench", ",".join(map(str, wanted)), devices, fixed_by)
    return devices, wanted
