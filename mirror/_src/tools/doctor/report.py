"""The report of `mirror doctor --report`: Markdown to paste into an issue."""

import getpass
import os
import platform
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mirror._src.base.errors import bytes_in_words
from mirror._src.base.optional import version_of
from mirror._src.tools.doctor.check import Check, summary

_PACKAGES = ("chex", "nvidia-nccl-cu12", "nvidia-nccl-cu13")
_VARIABLES = (
    *("CUDA_", "JAX_", "MIRROR_", "NCCL_", "NPROC", "NVIDIA_", "PJRT_", "XLA_"),
    # Not all of `SLURM_`, which has names of users and accounts.
    *("GLOO_", "OMPI_COMM_WORLD_", "SLURM_JOB_NODELIST", "SLURM_LOCALID", "SLURM_NTASKS"),
    *("SLURM_PROCID", "SLURM_STEP_NODELIST", "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"),
    # Not all of `TF_`, which Terraform uses too, for secrets among others.
    *("TF_CONFIG", "TF_CPP_", "TF_FORCE_GPU_", "TF_GPU_", "TF_XLA_"),
)
_CONSTANT = "NVIDIA_REQUIRE_"  # of container images: 2,000 characters
_SECRET = re.compile(r"TOKEN|KEY|SECRET|PASSW|CREDENTIAL|AUTH", re.IGNORECASE)
_CREDENTIALS = re.compile(r"(?<=://)[^/@\s]+@")
_HOMES = re.compile(r"(?<=/home/|Users/)[^/\s:,;'\"|`]+")


def format_report(
    versions: Mapping[str, str],
    devices: Mapping[str, Any] | str,
    checks: Sequence[Check],
    environment: Mapping[str, str],
) -> str:
    """Returns the report. It contains no user names in paths and no secrets of the environment.

    Args:
        versions: The installed versions by name.
        devices: The result of `devices.inventory`, or why JAX did not start.
        checks: The results of the checks.
        environment: The environment variables.
    """
    parts = [
        f"### mirror {versions['mirror']} on {platform.system()}",
        _table(("component", "version"), _components(versions)),
        *_devices(devices),
        _table(("variable", "value"), variables(environment)),
        f"**Checks:** {summary(checks)}",
        "\n".join(map(_line, checks)),
    ]
    return without_names("\n\n".join(parts), environment)


def variables(environment: Mapping[str, str]) -> list[tuple[str, str]]:
    """Returns the variables that configure JAX, XLA and CUDA; hides the values of secrets."""
    names = sorted(name for name in environment if name.startswith(_VARIABLES))
    names = [name for name in names if not name.startswith(_CONSTANT)]
    return [(n, "(hidden)" if _SECRET.search(n) else environment[n] or '""') for n in names]


def without_names(text: str, environment: Mapping[str, str]) -> str:
    """Returns the text without user names in paths and credentials in URLs."""
    home = environment.get("HOME") or os.path.expanduser("~")
    if len(home) > 1:  # not "/"
        text = re.sub(rf"(?<![\w.~-]){re.escape(home.rstrip('/'))}(?![\w.-])", "~", text)
    text = _CREDENTIALS.sub("", _HOMES.sub("USER", text))
    return re.sub(rf"(?<=/){re.escape(_user())}(?![\w.-])", "USER", text)


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container without an entry for this user
        return "USER"


def _components(versions: Mapping[str, str]) -> list[tuple[str, str]]:
    system = f"{platform.platform()}, {os.cpu_count()} cores"
    others = [(name, found) for name in _PACKAGES if (found := version_of(name)) is not None]
    return [("system", system), *versions.items(), *others]


def _devices(devices: Mapping[str, Any] | str) -> Iterable[str]:
    if isinstance(devices, str):
        return [f"**Devices:** {_cell(devices)}"]
    physical = [
        (d["name"], d["what"], _size(d["memory_bytes"]), "yes" if d["visible"] else "no")
        for d in devices["physical"]
    ]
    logical = [(d["name"], d["physical"], _size(d["memory_limit"])) for d in devices["logical"]]
    settings = [(c["setting"], c["value"], c["why"]) for c in devices["configuration"]]
    return [
        f"**Backend:** {_cell(devices['versions']['backend'])}",
        _table(("physical device", "description", "memory", "visible"), physical),
        _table(("logical device", "physical device", "memory limit"), logical),
        _table(("setting", "value", "origin"), settings),
        *(f"**Note:** {_cell(note)}" for note in devices["notes"]),
    ]


def _size(num_bytes: int | None) -> str:
    return "" if num_bytes is None else bytes_in_words(num_bytes)


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [headings, ["---"] * len(headings), *([_cell(cell) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _line(check: Check) -> str:
    state = check.state if check.state == "ok" else f"**{check.state}**"
    details = [f"  - {_cell(text)}" for text in (check.meaning, check.fix) if text]
    return "\n".join([f"- {state}: {check.name}: {_cell(check.found)}", *details])


def _cell(text: str) -> str:
    """Returns text that Markdown shows unchanged in a cell of a table."""
    text = " ".join(text.split())
    return re.sub(r"([\\|*`<])", r"\\\1", text)
