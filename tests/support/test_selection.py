"""Options deselect tests, and a missing package skips the tests that import it."""

import importlib.util
import re
import tomllib

from packaging.requirements import Requirement

from tests.support import fresh, packages
from tests.support.messages import assert_message
from tests.support.pytest_runs import run_pytest, statuses
from tests.support.selection import OPTIONS, OneCluster, option_of

TOOLS = {"pytest", "pytest-xdist", "ruff", "mypy", "codespell", "mirror-jax"}
CONFTEST = """\
import importlib.util, sys
import tests.support.selection
from tests.support.selection import *

class Hides:
    def find_spec(self, name, *_):
        if name in ("equinox", "haiku", "absent"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Hides())
find = importlib.util.find_spec
importlib.util.find_spec = lambda name: None if name in ("equinox", "haiku") else find(name)
"""
FILES = {
    "conftest.py": CONFTEST,
    "test_file.py": "import equinox\n\ndef test_file(): pass\n",
    "test_inside.py": "def test_other(): pass\n\ndef test_inside(): import haiku\n",
    "test_absent.py": "def test_absent(): import absent\n",
    "test_marked.py": "import pytest\n"
    + "".join(f"\n@pytest.mark.{name}\ndef test_{name}(): pass\n" for name in OPTIONS),
}


def test_options_deselect_and_missing_packages_skip():
    output = run_pytest(
        FILES, "-rsf test_file.py test_inside.py test_marked.py", "test_absent.py", "--dev -rf"
    ).stdout
    first, absent, strict = re.split(r"^STATUS \d\n", output, flags=re.M)[:3]
    assert statuses(output) == [0, 1, 2]
    for name in ("equinox", "haiku"):
        assert packages.advice(name, "test") in first
    assert f"1 passed, 2 skipped, {len(OPTIONS)} deselected" in first
    assert all(f"1 without {option_of(name)}" in first for name in OPTIONS)
    assert re.search(r"peak memory: \d+\.\d GB in this process", first)
    assert "No module named 'absent'" in absent, "a package of no extra is a mistake of the test"
    assert "No module named 'equinox'" in strict


def test_option_selects_its_mark():
    runs = [f"{option_of(name)} -m {name} test_marked.py" for name in OPTIONS]
    output = run_pytest(FILES, *runs).stdout
    assert output.count(f"1 passed, {len(OPTIONS) - 1} deselected") == len(OPTIONS), output


def test_one_worker_runs_all_files_that_share_a_cluster():
    scope_of = OneCluster.__new__(OneCluster)._split_scope
    files = sorted((fresh.ROOT / "tests/ps").glob("test_*.py"))
    shares = {file for file in files if re.search(r"\bray_cluster\)|\bon_ray\b", file.read_text())}
    scopes = {file: scope_of(f"tests/ps/{file.name}::test") for file in files}
    assert len(shares) > 3
    assert len({scopes[file] for file in shares}) == 1
    assert scopes[files[0]] == f"tests/ps/{files[0].name}"


def test_environment_without_what_every_test_needs(monkeypatch):
    assert packages.missing_environment(packages.PYTHON) == ""
    old = packages.missing_environment((3, 10))
    assert_message(old, values=["3.10", "3.11"])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "xdist" else 1)
    assert_message(packages.missing_environment((3, 11)), names="pytest-xdist", fix="pip install")


def test_modules_are_those_of_the_extra():
    project = tomllib.loads((fresh.ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    listed = extras["test"] + extras["completion"] + extras["demo"] + extras["train"]
    names = {Requirement(text).name for text in listed}
    assert names - TOOLS == set(packages.MODULES)
