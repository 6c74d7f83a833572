"""Options and help of `mirror doctor`."""

from mirror_cli.common import Commands, add_command, positive_int

DEADLINE_SECS = 60

_TEXT = """\
Checks whether this machine and environment are ready for training. For each
problem, prints what it means and how to fix it:

  versions      Python, JAX, jaxlib, Flax, Optax, the CUDA plugin and the driver
  known faults  bugs of the installed jaxlib
  XLA_FLAGS     flags that crash the process, or that are expensive
  memory        variables that control how much GPU memory JAX allocates
  GPUs          GPUs that the driver reports, and whether JAX uses them
  host threads  size of the thread pool that the host devices share
  all-reduce    a known sum across all devices, with a deadline
  training      a step on all devices, compared with one device on the whole batch

Checks that may crash run in a subprocess. Run it in the environment of your
program, with the same XLA_FLAGS and CUDA_VISIBLE_DEVICES. Without a GPU it
creates 4 host devices, unless you have set their number.

With --distributed, run it in every process of a job. Instead of the last four
checks, it finds the other processes as your program does, and checks:

  cluster       how it was found, the coordinator, and the index of this process
  processes     all have joined, each with its own index; names those that have not
  versions      versions and settings are equal in all processes
  address       other machines can reach the address of this machine's name
  devices       the devices of each process
  all-reduce    a known sum across the devices of all processes, and its time
  coordinator   time of a message to it

With --ray, it checks the Ray cluster of mirror.ps.ParameterServerStrategy instead:
the one of TF_CONFIG, or one that it starts on this machine:

  cluster       its head answers
  tasks         the node of every parameter server and worker has joined
  nodes         CPUs, GPUs, and the size of the object store
  versions      equal on all nodes
  actor calls   time of a call, without data and with 4 MiB
"""
_END = """\
examples:
  mirror doctor
  mirror doctor --report > report.md
  mirror doctor --json | jq '.checks[] | select(.state != "ok")'
  XLA_FLAGS=--xla_force_host_platform_device_count=8 mirror doctor
  srun --nodes=2 --ntasks-per-node=1 mirror doctor --distributed
  mirror launch --processes 2 --devices 2 -m mirror doctor --distributed
  mirror doctor --ray

exit status:
  0    no problems; there may be warnings
  1    a problem was found; with --distributed, in this or another process
  2    an option is invalid
  130  interrupted by Ctrl-C
"""


def add(commands: Commands) -> None:
    """Adds the command."""
    summary_line = "check versions, environment, devices and collectives; say how to fix problems"
    parser = add_command(commands, "doctor", summary_line, (_TEXT, _END))
    others = parser.add_mutually_exclusive_group()
    others.add_argument(
        "--distributed",
        action="store_true",
        help="check a job of several processes; run it in each of them",
    )
    others.add_argument(
        "--ray", action="store_true", help="check the Ray cluster of parameter servers"
    )
    parser.add_argument(
        "--deadline",
        type=positive_int,
        metavar="SECS",
        help="with --distributed or --ray, time to wait for the others in each check "
        f"(default: {DEADLINE_SECS})",
    )
    formats = parser.add_mutually_exclusive_group()
    formats.add_argument("--json", action="store_true", help="print JSON")
    formats.add_argument(
        "--report",
        action="store_true",
        help="print Markdown to paste into an issue: versions, devices, settings, environment "
        "variables and checks, without user names in paths",
    )
