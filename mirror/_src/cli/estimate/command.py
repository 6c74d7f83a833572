"""`mirror estimate-memory`."""

import argparse
import json
import sys
import traceback

from mirror._src.cli.bench.workload import WorkloadError, add_step, workload_of
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
from mirror._src.cli.estimate.estimate import Estimate, estimate_row
from mirror._src.cli.host_devices import force_host_devices
from mirror._src.collectives.all_reduce import AllReduce
from mirror._src.devices import backend
from mirror._src.strategy.mirrored import MirroredStrategy
from mirror._src.utils import interrupts
from mirror._src.utils.errors import counted

_HOST_COUNTS = (1, 2, 4)
_TEXT = """\
Estimates the memory that a training step needs per device: parameters,
optimizer state, other state, batch, results and temporaries. It runs nothing and
allocates neither model nor batch: the function that makes the step is traced,
so that an array is a shape and a dtype. XLA compiles the step and reports what
it would allocate.

Where there are fewer GPUs than asked for, it compiles for host devices, which
are forced for the purpose. So 8 devices can be estimated on a laptop. State and
batch are exact there; temporaries and results are those of XLA's CPU compiler
and differ from a GPU's.

STEP is mlp or cnn, or your own: module:function or file.py:function, the same as
for mirror bench. The function is called once per number of devices, in the
strategy's scope, and returns the step, its arguments and, optionally, batches,
each of which is the last argument of a step:

  # model.py
  def make(strategy):
      model = Net(rngs=nnx.Rngs(0))
      optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)

      def step(model, optimizer, batch):
          loss, grads = nnx.value_and_grad(loss_fn)(model, batch)
          grads, loss = mirror.get_replica_context().all_reduce("mean", (grads, loss))
          optimizer.update(model, grads)
          return loss

      batch = {"x": np.zeros((256, 784), np.float32), "y": np.zeros(256, np.int32)}
      return step, (model, optimizer), [batch]

It may return (trainer, data) as well, a mirror.Trainer and its global batches.
A batch is that of all replicas together. Only its shapes and dtypes matter;
np.zeros takes no memory until it is read.
"""
_END = """\
the table, per device:
  parameters       nnx.Param; what is named params
  optimizer state  nnx.Optimizer; the state of optax transformations; what is
                   named opt_state
  other state      batch statistics, rngs, metrics, what else is an argument and
                   a result
  arguments        all other arrays, a whole copy on each device
  batch            a replica's part of the batch
  results          outputs that do not overwrite a donated argument
  temporaries      activations, gradients, buffers of collectives
  peak estimate    the sum

examples:
  mirror estimate-memory cnn --batch-size 1024
  mirror estimate-memory model.py:make --devices 1,8
  mirror estimate-memory model.py:make --devices 8 --weak --json | jq '.rows[0].bytes'

exit status:
  0    estimated
  1    the function or its step fails; its traceback and a message say why
  2    an option is wrong, or there is no such step
  130  Ctrl-C
"""


def add(commands: Commands) -> None:
    """Adds the command."""
    summary = "estimate the memory of a training step per device, without running it"
    parser = add_command(commands, "estimate-memory", run, summary, (_TEXT, _END))
    add_step(parser)
    parser.add_argument(
        "--devices",
        type=positives,
        metavar="N,N,...",
        help="for how many devices; they need not exist (default: 1 and all GPUs, else 1, 2 and 4)",
    )
    parser.add_argument(
        "--replicas-per-device",
        type=positive,
        default=1,
        metavar="N",
        help="how many replicas on each device (default: %(default)s)",
    )
    parser.add_argument(
        "--weak",
        action="store_true",
        help="the same batch per replica, so that the global batch grows with them (default: the "
        "same global batch)",
    )
    parser.add_argument(
        "--batch-size",
        type=positive,
        metavar="N",
        help="examples in a step of a built-in model; with --weak, per replica",
    )
    parser.add_argument(
        "--donate",
        type=_positions,
        default=(),
        metavar="N,N,...",
        help="positions of the arguments that strategy.run(..., donate_argnums=) donates; nnx "
        "objects always are (default: none)",
    )
    parser.add_argument(
        "--shard-update",
        action="store_true",
        help="as of MirroredStrategy(shard_update=True): optimizer state of 1/n on each device",
    )
    parser.add_argument("--json", action="store_true", help="print it as JSON, sizes in bytes")


def run(parsed: argparse.Namespace) -> int:
    """Runs the command; returns the exit status."""
    try:
        strategies = _strategies(
            parsed.devices, parsed.replicas_per_device, shard_update=parsed.shard_update
        )
        make = workload_of(parsed.step, parsed.batch_size, parsed.weak)
        rows = []
        for strategy in strategies:
            interrupts.check()
            on = counted(len(dict.fromkeys(strategy.devices)), "device")
            print(f"compiling {parsed.step} for {on}", file=sys.stderr, flush=True)
            rows.append(estimate_row(parsed.step, make, strategy, parsed.donate))
    except (OptionError, WorkloadError) as error:
        return complain("estimate-memory", str(error), REFUSED)
    except Exception as error:
        traceback.print_exc()
        lines = str(error).splitlines() or [""]
        message = f"{parsed.step} fails: {type(error).__name__}: {lines[0]}"
        return complain("estimate-memory", message, FAILED)
    found = Estimate(parsed.step, parsed.weak, tuple(rows))
    print(json.dumps(found.to_dict(), indent=2) if parsed.json else found)
    return 0


def _strategies(
    asked: tuple[int, ...] | None, replicas_per_device: int, *, shard_update: bool
) -> list[MirroredStrategy]:
    """A strategy for each number of devices: accelerators where there are enough, else CPUs.

    Raises:
        OptionError: If there are not enough host devices, because their number is fixed.
    """
    most = max(asked or _HOST_COUNTS)
    fixed_by = force_host_devices(most)
    devices = backend.default_devices()
    if asked is None:
        is_host = backend.type_of(devices[0]) == "CPU"
        asked = _HOST_COUNTS if is_host else tuple(sorted({1, len(devices)}))
        asked = tuple(count for count in asked if count <= len(devices))
    host = backend.devices_of_type("CPU")
    if max(asked) > max(len(devices), len(host)):
        raise OptionError(
            f"--devices {','.join(map(str, asked))}: only {len(host)} host devices exist. "
            f"{fixed_by} fixes their number. Unset it, or ask for at most {len(host)}."
        )
    # The all-reduce is given, because the default tests it among accelerators first.
    return [
        MirroredStrategy(
            (devices if count <= len(devices) else host)[:count],
            AllReduce(),
            replicas_per_device=replicas_per_device,
            shard_update=shard_update,
        )
        for count in asked
    ]


def _positions(text: str) -> tuple[int, ...]:
    """Positions of arguments, separated by commas, from 0."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} must be positions from 0, such as 0 or 0,1")
    return tuple(sorted(set(map(int, parts))))
