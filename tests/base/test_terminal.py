"""Wrapping and colors of printed text."""

import io
import sys

import pytest

from mirror._src.base.terminal import output_width, paint, wrap
from tests.support import terminal

TEXT = "loss 0.1234, rate 1e-05: well-known /physical_device:CPU:0\n\n  indented 0.5"


def test_wrap_never_breaks_a_word(subtests):
    for width in [1, 10, 20, 40, 80]:
        with subtests.test(msg=f"{width}"):
            lines = wrap(TEXT, width).split("\n")
            assert " ".join(lines).split() == TEXT.split()
            assert all(len(line) <= width or " " not in line.strip() for line in lines)


def test_wrap_keeps_lines_that_fit_and_joined_words():
    assert wrap(TEXT, 80) == TEXT
    assert wrap("a\N{NO-BREAK SPACE}1 b\N{NO-BREAK SPACE}2", 4, indent="  ") == "a 1\n  b 2"


@pytest.fixture(autouse=True)
def no_settings(monkeypatch):
    for name in ("COLUMNS", "NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")


def test_width_of_terminals_files_and_the_environment(monkeypatch):
    with terminal.terminal(47) as (file, _):
        monkeypatch.setattr(sys, "stdout", file)
        assert output_width() == 47
        monkeypatch.setenv("COLUMNS", "33")
        assert output_width() == 33
        for wrong in ("", "0", "wide"):
            monkeypatch.setenv("COLUMNS", wrong)
            assert output_width() == 47
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    assert output_width() is None
    monkeypatch.setattr(sys, "stdout", None)
    assert output_width() is None


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


RED = "\x1b[31mtext\x1b[0m"
COLORS = {
    "terminal": (Terminal, {}, RED),
    "file": (io.StringIO, {}, "text"),
    "terminal with NO_COLOR": (Terminal, {"NO_COLOR": "1"}, "text"),
    "terminal with an empty NO_COLOR": (Terminal, {"NO_COLOR": ""}, RED),
    "dumb terminal": (Terminal, {"TERM": "dumb"}, "text"),
    "file with FORCE_COLOR": (io.StringIO, {"FORCE_COLOR": "1"}, RED),
    "file with both": (io.StringIO, {"FORCE_COLOR": "1", "NO_COLOR": "1"}, "text"),
}


def test_colors_are_for_terminals(subtests):
    for name in COLORS:
        with subtests.test(msg=name), pytest.MonkeyPatch.context() as monkeypatch:
            file, environment, expected = COLORS[name]
            for key, value in environment.items():
                monkeypatch.setenv(key, value)
            monkeypatch.setattr("sys.stdout", file())
            assert paint("text", "red") == expected
