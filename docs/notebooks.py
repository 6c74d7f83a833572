"""Executes the notebooks and stores their results in them.

python docs/notebooks.py                 # all of them, in minutes
python docs/notebooks.py 01 04           # those whose names begin with 01 or 04
"""

import argparse
import os
import re
import tempfile
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
_COLOR = re.compile(r"\x1b\[[0-9;]*m")
_FOLDER = re.compile(re.escape(tempfile.gettempdir()) + r"/tmp\w+/")
_NOISE = re.compile(r"(\[\d+\] )?\[Gloo\] |\(raylet\) |.* INFO .*ipywidgets")


def execute(path: Path) -> Any:
    """Returns a notebook with the results of its cells, as they are stored."""
    notebook = nbformat.read(path, as_version=nbformat.NO_CONVERT)
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"PYTHONPATH": str(ROOT), "IPYTHONDIR": folder}
        client = NotebookClient(notebook, timeout=300, resources={"metadata": {"path": folder}})
        client.execute(env=environment)
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # times
        if cell.cell_type == "code":
            cell.outputs = merged(cell.outputs)
    notebook.metadata.language_info = {"name": "python"}
    return notebook


def merged(outputs: list[Any]) -> list[Any]:
    """Returns outputs with one stream, of the lines that are visible at the end.

    Standard error comes after standard output, since Jupyter mixes them within lines.
    """
    streams = [output for output in outputs if output.output_type == "stream"]
    streams.sort(key=lambda output: output.name, reverse=True)
    text = visible("".join(output.text for output in streams))
    stream = [nbformat.v4.new_output("stream", name="stdout", text=text)] if text else []
    return stream + [output for output in outputs if output.output_type != "stream"]


def visible(text: str) -> str:
    """Returns printed text without colors, temporary folders and lines of Gloo and Ray."""
    text = _FOLDER.sub("", _COLOR.sub("", text))
    lines = [line.rstrip("\r").rsplit("\r", 1)[-1].rstrip() for line in text.split("\n")]
    shown = "\n".join(line for line in lines if not _NOISE.match(line))
    return shown.strip("\n") + "\n" if shown.strip() else ""


def main() -> None:
    """Executes the chosen notebooks in place."""
    parser = argparse.ArgumentParser(description="Stores the results of the notebooks in them.")
    parser.add_argument("names", nargs="*", default=[""], help="how the names begin")
    options = parser.parse_args()
    for path in NOTEBOOKS:
        if path.name.startswith(tuple(options.names)):
            print(path.name, flush=True)
            nbformat.write(execute(path), path)


if __name__ == "__main__":
    main()
