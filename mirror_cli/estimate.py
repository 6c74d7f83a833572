"""Options and help of `mirror estimate-memory`."""

import argparse

from mirror_cli.bench import add_step
from mirror_cli.common import Commands, add_command, positive_int, positive_ints

GPUS = ("h100", "h200", "a100", "l4", "rtx4090")  # described in mirror._src.devices.described
_TEXT = """\
Estimates the memory that a training step needs per device: parameters,
optimizer state, other state, batch, results and temporaries. It runs nothing and
allocates neither model nor batch: the function that makes the step is traced,
so that an array is only a shape and a dtype. XLA compiles the step and reports
what it would allocate.

If there are fewer GPUs than requested, it creates host devices and compiles for
them, so that 8 devices can be estimated on a laptop. Figures for state and batch
are then exact; temporaries and results come from XLA's CPU compiler and differ
from a GPU's. With --gpu, XLA compiles for this GPU instead, on a machine without
one. Only a GPU can select the fastest algorithms by their times, so temporaries
of convolutions can still differ.

STEP is mlp or cnn, or a function of yours: module:function or file.py:function,
as for mirror bench. The function is called once per number of devices, in the
strategy's scope. It returns the step, its arguments and, optionally, batches;
each batch is the last argument of a step:

  # model.py
  def make(strategy):
      model = Net(rngs=nnx.Rngs(0))
      optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)

      def step(model, optimizer, batch):
          loss, grads = nnx.value_and_grad(loss_fn)(model, batch)
          grads, loss = mirror.all_reduce("mean", (grads, loss))
          optimizer.update(model, grads)
          return loss

      batch = {"x": np.zeros((256, 784), np.float32), "y": np.zeros(256, np.int32)}
      return step, (model, optimizer), [batch]

It may also return (trainer, data), a mirror.Trainer and its batches. Batches are
global. Only their shapes and dtypes matter; np.zeros takes no memory until it
is read.
"""
_END = """\
the table, per device:
  parameters       nnx.Param; arguments named params
  optimizer state  nnx.Optimizer; the state of optax transformations; arguments
                   named opt_state
  other state      batch statistics, rngs, metrics, and anything else that is both
                   an argument and a result
  arguments        all other arrays, a full copy on each device
  batch            a replica's shard of the batch
  results          outputs that do not overwrite a donated argument
  temporaries      activations, gradients, buffers of collectives
  peak estimate    the sum

examples:
  mirror estimate-memory cnn --batch-size 1024
  mirror estimate-memory model.py:make --devices 1,8
  mirror estimate-memory model.py:make --gpu h100 --devices 8
  mirror estimate-memory model.py:make --devices 8 --weak --json | jq '.rows[0].bytes'

exit status:
  0    success
  1    the function or its step failed; a traceback and a message explain why
  2    an option is invalid, the step does not exist or calls the host, or a package
       is missing
  130  interrupted by Ctrl-C
"""


def add(commands: Commands) -> None:
    """Adds the command."""
    summary = "estimate the memory of a training step per device, without running it"
    parser = add_command(commands, "estimate-memory", summary, (_TEXT, _END))
    add_step(parser)
    parser.add_argument(
        "--devices",
        type=positive_ints,
        metavar="N,N,...",
        help="numbers of devices to estimate for; they need not exist (default: 1 and all GPUs; "
        "without a GPU, 1, 2 and 4)",
    )
    parser.add_argument(
        "--gpu",
        metavar="NAME",
        help=f"compile for these GPUs, which need not exist: {', '.join(GPUS)} (default numbers of "
        "devices: 1 and 8)",
    )
    parser.add_argument(
        "--replicas-per-device",
        type=positive_int,
        default=1,
        metavar="N",
        help="number of replicas on each device (default: %(default)s)",
    )
    parser.add_argument(
        "--weak",
        action="store_true",
        help="the same batch per replica, so that the global batch grows with their number "
        "(default: the same global batch)",
    )
    parser.add_argument(
        "--batch-size",
        type=positive_int,
        metavar="N",
        help="global batch size of a built-in model; with --weak, batch size per replica",
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
        help="shard the optimizer state, as MirroredStrategy(shard_update=True) does",
    )
    parser.add_argument("--json", action="store_true", help="print JSON, with sizes in bytes")


def _positions(text: str) -> tuple[int, ...]:
    """Parses positions of arguments, counted from 0 and separated by commas."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of positions such as 0 or 0,1")
    return tuple(sorted(set(map(int, parts))))
