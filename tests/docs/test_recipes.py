"""The commands, extras, options and workflows on the pages exist."""

import importlib
import re
import shlex
import tomllib
from collections.abc import Iterator

import pytest
import yaml
from packaging.specifiers import SpecifierSet

from tests.support import fresh
from tests.support.pages import PAGES

PROJECT = tomllib.loads((fresh.ROOT / "pyproject.toml").read_text())["project"]
NOTEBOOKS = {path.name: path.read_text() for path in (fresh.ROOT / "notebooks").glob("*.ipynb")}
_SHELL = re.compile(r"^```sh\n(.*?)^```$", re.DOTALL | re.M)
_WORKFLOW = re.compile(r"^```yaml\n(.*?)^```$", re.DOTALL | re.M)
_EXTRAS = re.compile(r"(?:\.|mirror-jax)\[([\w,-]+)\]")


def workflow() -> dict:
    """Returns the workflow for continuous integration."""
    (text,) = _WORKFLOW.findall(PAGES["docs/testing.md"])
    return yaml.safe_load(text)


def commands(page: str) -> Iterator[list[str]]:
    """Yields the commands of a page that run mirror, as words."""
    lines = [line for block in _SHELL.findall(PAGES[page]) for line in block.splitlines()]
    lines += re.findall(r"`(mirror [a-z][^`]*)`", PAGES[page])
    if page == "docs/testing.md":
        lines += [step["run"] for step in workflow()["jobs"]["test"]["steps"] if "run" in step]
    for line in lines:
        for command in line.split("&&"):
            words = shlex.split(command, comments=True)
            if not words or words[0].rpartition("/")[2] != "mirror":
                continue
            if "-m" in words:  # a module, whose arguments follow; it may be mirror itself
                launched = words.index("-m") + 1
                yield words[1:launched]
                if words[launched] == "mirror":
                    yield words[launched + 1 :]
            else:
                yield words[1:]


def main(arguments: list[str]) -> int:
    """Runs the command line that the package installs."""
    module, _, function = PROJECT["scripts"]["mirror"].partition(":")
    return getattr(importlib.import_module(module), function)(arguments)


def test_commands_of_a_page_exist(subtests, capsys):
    for page in [name for name in PAGES if any(commands(name))]:
        with subtests.test(msg=page):
            for command, *arguments in commands(page):
                with pytest.raises(SystemExit) as ended:
                    main([command, "--help"])
                text = capsys.readouterr().out
                assert ended.value.code == 0, f"{page}: mirror {command}"
                for option in (word for word in arguments if word.startswith("--")):
                    assert option.partition("=")[0] in text, f"{page}: mirror {command} {option}"


def test_extras_that_are_installed_exist():
    found = {
        extra
        for text in (PAGES | NOTEBOOKS).values()
        for extras in _EXTRAS.findall(text)
        for extra in extras.split(",")
    }
    assert {"cuda12", "cuda13", "demo"} <= found <= PROJECT["optional-dependencies"].keys()
    table = re.findall(r"^\| `(.*)` \| .* \|$", PAGES["docs/install.md"], re.M)
    listed = {extra for row in table for extra in row.split("`, `")}
    assert listed <= PROJECT["optional-dependencies"].keys()


def test_workflow_runs_the_plugin_on_supported_versions(pytestconfig):
    job = workflow()["jobs"]["test"]
    versions = job["strategy"]["matrix"]["python-version"]
    assert all(SpecifierSet(PROJECT["requires-python"]).contains(v) for v in versions)
    assert all(isinstance(version, str) for version in versions), "3.10 would be the number 3.1"
    runs = [step["run"] for step in job["steps"] if "run" in step]
    (test,) = (shlex.split(run) for run in runs if run.startswith("pytest"))
    for option in test[1:]:
        name, _, value = option.partition("=")
        assert pytestconfig.getoption(name, default="unknown") != "unknown", option
        assert int(value) > 0
    (checkout,) = (step for step in job["steps"] if "actions/checkout" in step.get("uses", ""))
    assert checkout["with"] == {"submodules": True}, "the clone of mirror is a submodule"
    (install,) = (shlex.split(run) for run in runs if run.startswith("pip"))
    assert install[-1].endswith("/mirror-jax"), "a folder named mirror would hide the package"
