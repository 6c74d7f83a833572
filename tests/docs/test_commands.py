"""The commands for contributors exist: their options, files, modules and programs."""

import importlib.util
import os
import re
import subprocess
import sys
import tomllib

import pytest

from tests.support import fresh
from tests.support import pages as documentation

PAGES = ("README.md", "CONTRIBUTING.md", ".ci/run")
PROGRAMS = {"python", "pip", "mirror"}  # other programs of `.venv/bin` come from the extra `test`


def commands(text: str) -> list[str]:
    """Returns the commands of a page or script, without comments; lists of folders included."""
    blocks = re.findall(r"^```sh\n(.*?)^```", text, re.DOTALL | re.M)
    found = blocks + re.findall(r"`([^`]+)`", text)
    lines = (text if text.startswith("#!") else "\n".join(found)).splitlines()
    return [line.split(" #")[0] for line in lines]


COMMANDS = {page: commands((fresh.ROOT / page).read_text()) for page in PAGES}


def test_options_of_pytest_exist(subtests):
    command = [sys.executable, "-m", "pytest", "--help"]
    shown = subprocess.run(command, cwd=fresh.ROOT, capture_output=True, text=True, check=True)
    options = {"--junitxml", *re.findall(r"--[a-z][\w-]*", shown.stdout)}
    marks = {"slow", "nightly", "notebooks", "gpu", "gpu_aot", "dev", "or"}
    for page, lines in COMMANDS.items():
        with subtests.test(msg=page):
            tests = [line.partition("-m pytest")[2] for line in lines if "-m pytest" in line]
            assert tests
            used = {option for line in tests for option in re.findall(r"--[a-z][\w-]*", line)}
            assert used <= options
            selected = re.findall(r"-m \"?([a-z_ ]+?)\"?(?=$| -| tests)", "\n".join(tests), re.M)
            assert {word for text in selected for word in text.split()} <= marks


def test_files_and_modules_exist(subtests):
    project = tomllib.loads((fresh.ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    for page, lines in COMMANDS.items():
        with subtests.test(msg=page):
            text = "\n".join(lines)
            for path in re.findall(r"\b(?:tests|docs)/[\w/.-]+\b", text):
                assert (fresh.ROOT / path).exists(), path
            for module in re.findall(r"python -m ((?:tests|benchmarks|mirror)[\w.]*)", text):
                assert importlib.util.find_spec(module), module
            for tool in re.findall(r"\.venv/bin/([a-z]+)(?= |$)", text, re.M):
                assert tool in PROGRAMS or tool in "".join(extras["test"]), tool
            for extra in re.findall(r"\"\.\[([\w-]+)\]\"", text):
                assert extra in extras
    assert os.access(fresh.ROOT / ".ci" / "run", os.X_OK)


SHOWN = {
    command: (output, option != "")
    for text in documentation.PAGES.values()
    for command, option, output in re.findall(
        r"^```sh\nmirror ([^\n]+)\n```\n\n?```text( numbers-vary)?\n(.*?)^```$", text, re.S | re.M
    )
}


@pytest.mark.nightly
def test_commands_print_what_the_pages_show(subtests):
    """A text block directly below a command is what it prints, without GPUs."""
    assert SHOWN
    for command, (output, numbers_vary) in SHOWN.items():
        with subtests.test(msg=command):
            printed = subprocess.run(
                [sys.executable, "-m", "mirror", *command.split()],
                env={**fresh.INHERITED, "PYTHONPATH": str(fresh.ROOT), "JAX_PLATFORMS": "cpu"},
                stdout=subprocess.PIPE,
                text=True,
                check=True,
            ).stdout
            assert documentation.fits(output, printed, numbers_vary=numbers_vary), printed
