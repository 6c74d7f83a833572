"""Options and help of `mirror bench`."""

import argparse
from pathlib import Path

from mirror_cli.common import Commands, add_command, positive_int, positive_ints
from mirror_cli.install import install_command

BATCH_SIZES = {"mlp": 256, "cnn": 128}  # the built-in steps
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
          grads, loss = mirror.all_reduce("mean", (grads, loss))
          optimizer.update(model, grads)
          return loss

      return step, (model, optimizer), [{"x": x[:256], "y": y[:256]}]

The batches are global: mirror splits them across the replicas. Without data,
(step, args), every step gets the same arguments. The function may also return
(trainer, data), to measure one training step of a mirror.Trainer per batch.
"""
_END = f"""\
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

--plot requires matplotlib: {install_command("train")}
"""


def add_step(parser: argparse.ArgumentParser) -> None:
    """Adds the argument that names a workload for `workload_of`."""
    parser.add_argument(
        "step",
        nargs="?",
        default="mlp",
        metavar="STEP",
        help=f"{', '.join(BATCH_SIZES)}, module:function or file.py:function "
        "(default: %(default)s)",
    )


def add(commands: Commands) -> None:
    """Adds the command."""
    summary = "measure how a training step scales across devices"
    parser = add_command(commands, "bench", summary, (_TEXT, _END))
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
    sizes = ", ".join(f"{name} {size}" for name, size in BATCH_SIZES.items())
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
