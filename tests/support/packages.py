"""The packages that tests need, and what happens without them.

The test command of the README installs the extra `test`, but not the extra `dev`.
"""

import importlib
import importlib.util
import re
import sys
from collections.abc import Callable, Iterable
from typing import Any

import pytest

PYTHON = (3, 11)
MODULES = {  # packages of the extra `test`, and the module that a test imports
    "argcomplete": "argcomplete",
    "dm-haiku": "haiku",
    "equinox": "equinox",
    "flatbuffers": "flatbuffers",
    "grain": "grain",
    "hypothesis": "hypothesis",
    "ipykernel": "ipykernel",
    "matplotlib": "matplotlib",
    "nbclient": "nbclient",
    "nbformat": "nbformat",
    "platformdirs": "platformdirs",
    "safetensors": "safetensors",
    "scikit-learn": "sklearn",
    "tensorboardX": "tensorboardX",
    "universal-pathlib": "upath",
}
# Without them, no test can run.
NEEDED = ("jax", "flax", "optax", "chex", "numpy", "packaging", "rich")
LARGE = ("torch", "datasets", "keras")  # more of them are in the marks of single tests


def require_environment() -> None:
    """Ends the process with one sentence if no test can run in this environment."""
    sentence = missing_environment(sys.version_info[:2])
    if sentence:
        sys.exit(sentence)


def missing_environment(python: tuple[int, ...]) -> str:
    """Returns why no test can run with this version of Python and these packages, or ""."""
    if python < PYTHON:
        least, version = (".".join(map(str, each)) for each in (PYTHON, python[:2]))
        return f"The tests need Python {least} or newer, but this is Python {version}."
    needed = {**{name: name for name in NEEDED}, "xdist": "pytest-xdist"}
    missing = [name for module, name in needed.items() if not importlib.util.find_spec(module)]
    return f"The tests cannot run: {advice(', '.join(missing), 'test')}" if missing else ""


def advice(packages: str, extra: str) -> str:
    """Returns how to install missing packages."""
    return f'needs {packages}: pip install -e ".[{extra}]"'


def is_installed(package: str) -> bool:
    """Whether a package can be imported; a folder of this name, such as `build`, does not count."""
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None


def optional(package: str) -> Any:
    """Returns a module, or `None` if it is not installed; its tests are marked `dev`."""
    return importlib.import_module(package) if is_installed(package) else None


def rows(names: Iterable[str], needs: Callable[[str], list[str]] | None = None) -> list[Any]:
    """Returns the rows of a table, of which those that need a large package are marked `dev`.

    Args:
        names: The ids of the rows.
        needs: Returns the packages of a row. Defaults to those that its id names.
    """
    needs = needs or named
    return [
        pytest.param(name, marks=[pytest.mark.dev(*needs(name))] if needs(name) else [], id=name)
        for name in names
    ]


def row_groups(names: Iterable[str], needs: Callable[[str], list[str]] | None = None) -> list[Any]:
    """Returns the rows of a table, as one list for each set of packages that they need.

    Args:
        names: The ids of the rows.
        needs: Returns the packages of a row. Defaults to those that its id names.
    """
    groups: dict[tuple[str, ...], list[str]] = {}
    for name in names:
        groups.setdefault(tuple((needs or named)(name)), []).append(name)
    return [
        pytest.param(
            group, marks=[pytest.mark.dev(*packages)] if packages else [], id="-".join(packages)
        )
        for packages, group in groups.items()
    ]


def named(text: str) -> list[str]:
    """Returns the large packages that a text names."""
    return [package for package in LARGE if re.search(rf"\b{package}\b", text)]


def imported(code: str) -> list[str]:
    """Returns the large packages that a module imports."""
    return [
        package
        for package in LARGE
        if re.search(rf"^\s*(?:import|from) {package}\b", code, re.MULTILINE)
    ]
