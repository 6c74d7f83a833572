"""The output of the commands in narrow terminals, its colors, and its absence in JSON and pipes."""

import json
import re
import sys

import pytest

from mirror import cli
from tests.support import inside, terminal
from tests.support.tables import rows

check_module, *_ = inside.doctor()
COLORS, STATES, Check = check_module.COLORS, check_module.STATES, check_module.Check

HOST = {"JAX_PLATFORMS": "cpu"}
COMMANDS = {
    "devices": "devices",
    "doctor": "doctor",
    "bench": "bench mlp --devices 1,2 --steps 3 --batch-size 32",
    "estimate-memory": "estimate-memory mlp --devices 1,2",
    "demo": "demo --devices 2 --epochs 1",
}


@pytest.mark.parametrize(
    "name",
    [
        "doctor",
        *(pytest.param(n, marks=pytest.mark.nightly) for n in COMMANDS if n != "doctor"),
    ],
)
@pytest.mark.slow
def test_output_fits_a_narrow_terminal(name):
    """The program wraps at spaces, so that the terminal has no line to break."""
    command = [sys.executable, "-m", "mirror", *COMMANDS[name].split()]
    screen = terminal.run(command, 40, HOST)
    for line in screen.lines:
        assert len(line) <= 40 or " " not in line.strip(": ").partition(": ")[2], line
    assert ("\x1b[3" in screen.text) == (name != "devices")


@rows("columns", [80, 60, 40, 30])
def test_tables_of_devices_fit_any_width(monkeypatch, capsys, columns):
    assert cli.main(["devices"]) == 0
    words = capsys.readouterr().out.split()
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert cli.main(["devices"]) == 0
    narrow = capsys.readouterr().out
    for line in narrow.splitlines():
        assert len(line) <= columns or " " not in line.strip()
    assert set(words) <= {word.rstrip(":") for word in narrow.split()} | set(narrow.split())
    monkeypatch.setenv("COLUMNS", "10")
    assert cli.main(["devices", "--json"]) == 0
    json.loads(capsys.readouterr().out)


@rows("state", STATES)
def test_state_of_a_check_is_colored_in_terminals(monkeypatch, state):
    check = Check("name", state, "found " * 20, "meaning", "fix")
    assert check.colored == str(check)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert re.sub(r"\x1b\[\d+m", "", check.colored) == str(check)
    assert check.colored.startswith("\x1b[3")
    assert len({COLORS[s] for s in STATES}) == len(STATES)
    monkeypatch.setenv("COLUMNS", "40")
    lines = str(check).splitlines()
    assert max(map(len, lines)) <= 40
    assert all(line.startswith(" " * 9) for line in lines[1:])
