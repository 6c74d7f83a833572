"""`mirror devices`: its output as text and as JSON, and its exit status."""

import functools
import json
import re
import subprocess
import sys

import jax
import pytest

import mirror
from mirror import cli
from tests.support import fresh, inside
from tests.support.messages import assert_message
from tests.support.tables import rows

inventory = inside.inventory()

COMMAND = "import sys; from mirror import cli; sys.exit(cli.main(['devices']))"
BOTH = """
from mirror import cli
assert cli.main(["devices"]) == 0
print("JSON")
assert cli.main(["devices", "--json"]) == 0
"""
CPU_ONLY = {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(fresh.STAND_INS)}
GIB = 2**30


def both(**environment: str) -> tuple[dict[str, list[list[str]]], dict]:
    """Returns its output, as text and as JSON, on a machine with only the stand-in's GPUs."""
    said = fresh.run(BOTH, environment={**CPU_ONLY, **environment})
    text, _, found = said.partition("JSON\n")
    return tables(text), json.loads(found)


def tables(text: str) -> dict[str, list[list[str]]]:
    """Returns the rows of each table by its first heading; notes by their own text."""
    found = {}
    for part in text.strip().split("\n\n"):
        rows = [re.split(r"  +", line) for line in part.splitlines()]
        found[rows[0][0]] = rows
    return found


def refused(platform: str) -> subprocess.CompletedProcess[str]:
    return fresh.start(COMMAND, environment={**CPU_ONLY, "JAX_PLATFORMS": platform})


AHEAD = {
    "on one CPU": both,
    # Two GPUs that JAX does not use, one of which does not say how much memory it has.
    "with GPUs": functools.partial(
        both,
        STAND_IN_GPUS="3",
        STAND_IN_MIB="16384,-,8192",
        CUDA_VISIBLE_DEVICES="2,1",
        XLA_FLAGS="--xla_force_host_platform_device_count=3",
        XLA_PYTHON_CLIENT_PREALLOCATE="false",
        XLA_CLIENT_MEM_FRACTION=".5",
    ),
    "cuda": functools.partial(refused, "cuda"),
    "abacus": functools.partial(refused, "abacus"),
}


@pytest.fixture
def on_one_cpu(ahead):
    return ahead[__name__]["on one CPU"].result()


@pytest.fixture
def with_gpus(ahead):
    return ahead[__name__]["with GPUs"].result()


def test_command_shows_the_devices_of_one_cpu(on_one_cpu):
    text, _ = on_one_cpu
    assert list(text) == ["physical device", "logical device", "setting", "package"]
    _, (name, what, memory, visible) = text["physical device"]
    assert (name, visible) == ("/physical_device:CPU:0", "yes")
    assert re.fullmatch(r"\w+, \d+ cores", what)
    assert re.fullmatch(r"\d+\.\d [KMG]iB", memory)
    _, (name, physical, memory) = text["logical device"]
    assert (name, physical) == ("/device:CPU:0", "/physical_device:CPU:0")
    assert not re.search(r"\d", memory), "JAX does not count it"
    assert_settings(
        text["setting"],
        ["host devices", "1", "default"],
        ["platforms", "cpu", "jax_platforms='cpu'"],
        ["visible GPUs", "none", "default"],
        ["memory growth", "False", "default"],
        ["memory fraction", "0.75", "default"],
        ["soft placement", "False", "default"],
    )


def assert_settings(table: list[list[str]], *expected: list[str]) -> None:
    """Checks all rows except headings; in the last cell, what set the value, or `default`."""
    assert [row[:2] for row in table[1:]] == [row[:2] for row in expected]
    for (name, _, why), (*_, source) in zip(table[1:], expected, strict=True):
        assert (why == "default") == (source == "default"), name
        if source:
            assert_message(why, names=source)


def test_command_shows_installed_versions(on_one_cpu):
    _, found = on_one_cpu
    versions = found["versions"]
    assert versions["mirror"] == mirror.__version__
    assert versions["jax"] == jax.__version__
    assert versions["python"] == sys.version.split()[0]
    assert versions["backend"] == "cpu"
    assert "NVIDIA driver" not in versions
    assert found["notes"] == []


def test_command_shows_gpus_that_jax_does_not_use(with_gpus):
    text, found = with_gpus
    capable = "Stand-in GPU, compute capability 9.0"
    assert text["physical device"][2:] == [
        ["/physical_device:GPU:0", capable, "8.0 GiB", "yes"],
        ["/physical_device:GPU:1", capable, "unknown", "yes"],
    ]
    gpus = found["physical"][1:]
    assert [gpu["memory_bytes"] for gpu in gpus] == [8 * GIB, None]
    assert [gpu["device_type"] for gpu in gpus] == ["GPU", "GPU"]
    assert [device["name"] for device in found["logical"]] == [f"/device:CPU:{i}" for i in range(3)]
    assert found["versions"]["NVIDIA driver"] == "570.1"
    (note,) = found["notes"]
    names = ["/physical_device:GPU:0", "/physical_device:GPU:1"]
    assert_message(note, names=names, fix="JAX_PLATFORMS=cpu")
    assert sum(note in shown for shown in text) == 1


def test_command_shows_settings_with_their_reason(with_gpus):
    text, _ = with_gpus
    assert_settings(
        text["setting"],
        ["host devices", "3", "XLA_FLAGS=--xla_force_host_platform_device_count=3"],
        ["platforms", "cpu", "jax_platforms='cpu'"],
        ["visible GPUs", "0,1", "default"],
        ["memory growth", "True", "XLA_PYTHON_CLIENT_PREALLOCATE=false"],
        ["memory fraction", ".5", "XLA_CLIENT_MEM_FRACTION=.5"],
        ["soft placement", "False", "default"],
        ["CUDA_VISIBLE_DEVICES", "2,1", ""],  # already named
    )


@pytest.mark.parametrize("where", ["on_one_cpu", "with_gpus"])
def test_json_contains_the_same_values(where, request):
    text, found = request.getfixturevalue(where)
    assert list(found) == ["physical", "logical", "configuration", "versions", "notes"]
    names = [[row[0] for row in text[heading][1:]] for heading in list(text)[:4]]
    assert [device["name"] for device in found["physical"]] == names[0]
    assert [device["name"] for device in found["logical"]] == names[1]
    assert [list(row.values()) for row in found["configuration"]] == text["setting"][1:]
    assert list(map(list, found["versions"].items())) == text["package"][1:]
    keys = {"name", "device_type", "physical", "memory_current", "memory_peak", "memory_limit"}
    assert all(set(device) == keys for device in found["logical"])
    assert all(device["memory_limit"] is None for device in found["logical"])


def test_command_uses_the_running_backend(capsys):
    assert cli.main(["devices"]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    shown = tables(printed.out)
    assert [row[0] for row in shown["logical device"][1:]] == [f"/device:CPU:{i}" for i in range(8)]
    (row,) = (row for row in shown["setting"] if row[0] == "host devices")
    assert row[1] == "8"
    assert_message(row[2], names="jax_num_cpu_devices=8")


@pytest.mark.slow
@pytest.mark.parametrize("platform", [pytest.param("cuda", marks=pytest.mark.nightly), "abacus"])
def test_failed_backend_start_prints_one_line_and_exits_with_status_1(platform, ahead):
    done = ahead[__name__][platform].result()
    assert done.returncode == 1
    said = done.stdout.splitlines()
    assert len(said) == 1
    assert said[0].startswith("mirror devices: error: ")
    assert_message(said[0], names=f"jax_platforms='{platform}'", fix="JAX_PLATFORMS=cpu")


def test_unknown_option_exits_with_status_2(capsys):
    with pytest.raises(SystemExit) as error:
        cli.main(["devices", "--yaml"])
    assert error.value.code == 2
    assert "unrecognized arguments: --yaml" in capsys.readouterr().err


def test_help_lists_the_exit_statuses(capsys):
    with pytest.raises(SystemExit) as error:
        cli.main(["devices", "--help"])
    assert error.value.code == 0
    said = capsys.readouterr().out
    assert re.findall(r"^  (\d)  ", said, re.MULTILINE) == ["0", "1", "2"]
    assert "--json" in said


def physical(*gpus: bool) -> list[dict]:
    """Returns the CPU and one GPU per flag; the flag is whether it is visible."""
    found = [{"name": "/physical_device:CPU:0", "device_type": "CPU", "visible": True}]
    return found + [
        {"name": f"/physical_device:GPU:{i}", "device_type": "GPU", "visible": visible}
        for i, visible in enumerate(gpus)
    ]


CPU, GPU = {"device_type": "CPU"}, {"device_type": "GPU"}
INSTALL = ['pip install ".[cuda12]"', 'pip install ".[cuda13]"']
NOTES = {
    "all in use": (physical(True), [CPU, GPU], None, None),
    "no GPU": (physical(), [CPU], None, None),
    "hidden": (physical(False, False), [CPU], "cpu", None),
    "left out": (
        physical(True, False),
        [CPU],
        "cpu",
        {"names": "/physical_device:GPU:0", "fix": "JAX_PLATFORMS=cpu"},
    ),
    "no CUDA": (
        physical(True),
        [CPU],
        None,
        {"names": "/physical_device:GPU:0", "fix": INSTALL},
    ),
    "no CUDA, asked for": (
        physical(True),
        [CPU],
        "cpu,cuda",
        {"names": "/physical_device:GPU:0", "fix": INSTALL},
    ),
    "not listed": (physical(), [CPU, GPU], "cuda", {"fix": "pip install nvidia-ml-py"}),
}


@rows("case", list(NOTES))
def test_notes_describe_suspicious_settings(monkeypatch, case):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    *found, wanted = NOTES[case]
    notes = inventory._notes(*found)
    assert len(notes) == (0 if wanted is None else 1)
    for note in notes:
        assert_message(note, **wanted)


def test_command_shows_the_memory_in_use_of_a_gpu():
    """Shows the figures of a GPU, which JAX does not have here."""
    found = inventory.inventory()
    gpu = {"name": "/device:GPU:0", "device_type": "GPU", "physical": "/physical_device:GPU:0 (G)"}
    some = {**gpu, "memory_current": 3 * 2**20, "memory_peak": GIB, "memory_limit": 16 * GIB}
    none = {**gpu, "memory_current": None, "memory_peak": None, "memory_limit": None}
    shown = tables(inventory.format_inventory({**found, "logical": [some, none]}))
    counted, unknown = (row[2] for row in shown["logical device"][1:])
    assert_message(counted, values=["3.0 MiB", "16.0 GiB"])
    assert unknown == "unknown"
