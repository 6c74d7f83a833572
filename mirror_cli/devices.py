"""Options and help of `mirror devices`."""

from mirror_cli.common import Commands, add_command

_TEXT = """\
Lists the physical devices of this machine, the logical devices that JAX creates
on them, their memory, all settings and where each setting comes from, and the
installed versions. It starts JAX's backend, as your program does. Run it in the
environment of your program, with the same XLA_FLAGS and CUDA_VISIBLE_DEVICES.
"""
_END = """\
examples:
  mirror devices
  mirror devices --json | jq '.logical[].name'
  CUDA_VISIBLE_DEVICES=1 mirror devices

exit status:
  0  success
  1  JAX's backend does not start; the message explains why
  2  an option is invalid
"""


def add(commands: Commands) -> None:
    """Adds the command."""
    summary = "list devices, their settings, and where each setting comes from"
    parser = add_command(commands, "devices", summary, (_TEXT, _END))
    parser.add_argument("--json", action="store_true", help="print JSON, with sizes in bytes")
