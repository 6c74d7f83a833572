"""The notebooks are stored with their results; `--notebooks` runs each cell twice and compares."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import nbformat
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError

from tests.support import fresh

FOLDER = fresh.ROOT / "notebooks"
PATHS = sorted(FOLDER.glob("*.ipynb"))
WRITER = fresh.module_of(fresh.ROOT / "docs" / "notebooks.py")
_LINK = re.compile(r"\]\(([^)#\s]+)")
_COLORS = re.compile(r"\x1b\[[0-9;]*m")

REFRESH = "Run `python docs/notebooks.py` to store the results again."
_PATHS = re.compile(r"(?<![\w.])/(?:tmp|home|root|Users)/")
_NUMBER = re.compile(  # an address, a hash, or a number with a unit of time
    r"0x[0-9a-f]+|\b[0-9a-f]{12,}\b|[-+]?\d[\d_.]*(?:e[-+]?\d+)?(?: ?[mu]?s\b)?"
)
_COUNT = re.compile(r"(?<=[a-z])_\d+\b")  # Keras counts names, and each cell runs twice

NEEDS = {"08_keras": "keras", "09_parameter_server": "ray"}


def read(path: Path) -> Any:
    return nbformat.read(path, as_version=nbformat.NO_CONVERT)


def cells(path: Path, kind: str) -> list[Any]:
    return [cell for cell in read(path).cells if cell.cell_type == kind]


def links(text: str) -> list[str]:
    return [link for link in _LINK.findall(text) if "://" not in link]


def test_notebooks_are_numbered_without_gaps():
    assert [path.name[:3] for path in PATHS] == [f"{i + 1:02}_" for i in range(len(PATHS))]
    assert len(PATHS) >= 3


def test_notebooks_are_stored_with_results_and_cell_ids(subtests):
    for path in PATHS:
        with subtests.test(msg=path.stem):
            notebook = read(path)
            nbformat.validate(notebook)
            assert (notebook.nbformat, notebook.nbformat_minor) == (4, 5)
            assert notebook.metadata.kernelspec.name == "python3"
            ids = [cell.id for cell in notebook.cells]
            assert len(set(ids)) == len(ids)
            code = cells(path, "code")
            assert [cell.execution_count for cell in code] == [*range(1, len(code) + 1)], REFRESH
            assert sum(bool(cell.outputs) for cell in code) >= len(code) / 2, REFRESH
            for cell in code:
                for output in cell.outputs:
                    assert output.get("name", "stdout") == "stdout", cell.id
                    assert not _PATHS.search(str(output)), f"{cell.id} shows a path of a machine"


def test_notebooks_pass_the_linter():
    for command in (["check"], ["format", "--check"]):
        found = subprocess.run(
            [sys.executable, "-m", "ruff", *command, "--no-cache", str(FOLDER)],
            cwd=fresh.ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        assert found.returncode == 0, found.stdout + found.stderr


def test_notebook_links_lead_to_files_and_the_next_notebook(subtests):
    for path in PATHS:
        with subtests.test(msg=path.stem):
            last = read(path).cells[-1]
            for cell in cells(path, "markdown"):
                for link in links(cell.source):
                    assert (path.parent / link).is_file(), f"{cell.id} links to {link}"
            following = PATHS[PATHS.index(path) + 1 :]
            assert last.cell_type == "markdown"
            if following:
                assert following[0].name in links(last.source)


def test_first_cell_runs_again_after_jax_has_started(subtests):
    for path in PATHS:
        with subtests.test(msg=path.stem):
            jax.devices()
            first, names = cells(path, "code")[0], {"__name__": "__main__"}
            for _ in range(2):
                exec(compile(first.source, f"{path.name}:{first.id}", "exec"), names)


@pytest.mark.notebooks
@pytest.mark.parametrize(
    "path",
    [
        pytest.param(p, marks=[pytest.mark.dev(name)] if (name := NEEDS.get(p.stem)) else [])
        for p in PATHS
    ],
    ids=[path.stem for path in PATHS],
)
def test_notebook_cells_run_twice_in_a_row(path, tmp_path, monkeypatch):
    """In one kernel, on all GPUs, or on the host devices that the first cell creates.

    The first run shows the stored results, up to numbers, except in cells with nbval's tag for
    results that depend on time.
    """
    stored = {
        cell.id: shown(cell.outputs)
        for cell in cells(path, "code")
        if "nbval-ignore-output" not in cell.metadata.get("tags", [])
    }
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "jupyter"))
    environment = {**os.environ, "IPYTHONDIR": str(tmp_path / "ipython")}
    notebook = read(path)
    notebook.cells.append(nbformat.v4.new_code_cell(SEVERAL_DEVICES, id="several-devices"))
    client = NotebookClient(
        notebook, timeout=900, kernel_name="python3", resources={"metadata": {"path": tmp_path}}
    )
    with client.setup_kernel(env=environment):
        for i, cell in enumerate(notebook.cells):
            if cell.cell_type == "code":
                once = execute(client, i, f"{path.name}, cell {cell.id}")
                again = execute(client, i, f"{path.name}, cell {cell.id}, the second time")
                if cell.id not in stored:
                    continue
                kinds = [[kind for kind, _ in results] for results in (once, again)]
                assert kinds[0] == kinds[1], f"{path.name}, cell {cell.id} shows something else"
                if jax.default_backend() == "cpu":
                    assert once == stored[cell.id], f"{path.name}, cell {cell.id}: {REFRESH}"


SEVERAL_DEVICES = """
import jax
assert len(jax.devices()) > 1 or jax.default_backend() != "cpu"
"""


def shown(outputs: list[Any]) -> list[tuple[str, str]]:
    """Returns the kinds of a cell's results and their sorted words, without numbers.

    The order of lines on standard output and standard error varies.
    """
    results = []
    for output in WRITER.merged(outputs):
        kinds, text = "stream", output.get("text", "")
        if output.output_type != "stream":
            kinds, text = " ".join(sorted(output.data)), output.data.get("text/plain", "")
        text = _COUNT.sub("", text)
        results.append((kinds, " ".join(sorted(_NUMBER.sub("#", text).split()))))
    return results


def execute(client: NotebookClient, index: int, name: str) -> list[tuple[str, str]]:
    """Returns what a cell shows; raises the error of the cell, if any."""
    try:
        cell = client.execute_cell(client.nb.cells[index], index)
    except (CellExecutionError, CellTimeoutError) as error:
        pytest.fail(f"{name}:\n{_COLORS.sub('', str(error))}", pytrace=False)
    texts = [output.text for output in cell.outputs if output.output_type == "stream"]
    assert not any("Warning: " in text for text in texts), f"{name} warns:\n{''.join(texts)}"
    return shown(cell.outputs)
