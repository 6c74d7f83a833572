"""Plants the faults that the search must find, which have a `search` in `tests/mutation`."""

import ast
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.mutation.faults import FAULTS, Fault

ROOT = Path(__file__).parents[2]
SEARCHED = {fault.name: fault for fault in FAULTS if fault.search is not None}


def plant(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces the function that has the text, wherever it was imported, until the test ends."""
    file = ROOT / fault.file
    text = file.read_text()
    module = importlib.import_module(fault.file.removesuffix(".py").replace("/", "."))
    line = text.count("\n", 0, text.index(fault.old)) + 1
    ((path, _),) = [x for x in _functions(text) if x[1].lineno <= line <= (x[1].end_lineno or 0)]
    function = dict(_functions(text.replace(fault.old, fault.new)))[path]
    *owners, name = path
    owner = getattr(module, owners[0]) if owners else module
    (make,) = ast.parse(f"def make(__class__): return {name}").body  # for `super()`
    assert isinstance(make, ast.FunctionDef)
    make.body.insert(0, function)
    found: dict[str, Any] = {}
    exec(compile(ast.Module([make], []), str(file), "exec"), vars(module), found)
    old, new = getattr(owner, name), found["make"](owner)
    monkeypatch.setattr(owner, name, new)
    for other in [m for m in sys.modules.values() if m.__name__.startswith("mirror.")]:
        if not owners and vars(other).get(name) is old:
            monkeypatch.setattr(other, name, new)


def _functions(text: str) -> Iterator[tuple[tuple[str, ...], ast.FunctionDef]]:
    """Returns the functions of a module and the methods of its classes, by name."""
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef):
            yield (node.name,), node
        elif isinstance(node, ast.ClassDef):
            for method in node.body:
                if isinstance(method, ast.FunctionDef):
                    yield (node.name, method.name), method
