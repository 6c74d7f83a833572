"""The packages of the extra `dev`, which the test command of the README does not install."""

import importlib
import importlib.util
import re
from collections.abc import Callable, Iterable
from typing import Any

import pytest

LARGE = ("torch", "datasets", "keras")  # more of them are in the marks of single tests


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
