"""Runs of pytest in new processes, with the plugin of mirror."""

import pathlib
import re
import subprocess
import tempfile
import textwrap

from tests.support import fresh
from tests.support.strict import STRICT

# As an installed mirror has it: pytest finds the plugin by this, and blocks it by this name.
ENTRY_POINT = {"entry_points.txt": "[pytest11]\nmirror = mirror.pytest_plugin\n"}
METADATA = {"METADATA": "Metadata-Version: 2.1\nName: mirror-stand-in\nVersion: 0\n"}


def run_pytest(
    files: dict[str, str], *runs: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Runs pytest several times in one process, over a folder with these files.

    The exit statuses are in lines `STATUS i`.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        installed = {f"stand_in-0.dist-info/{k}": v for k, v in (ENTRY_POINT | METADATA).items()}
        for path, text in ({"pytest.ini": "[pytest]\n"} | files | installed).items():
            (folder / path).parent.mkdir(exist_ok=True)
            (folder / path).write_text(textwrap.dedent(text))
        code = f"""\
            import os, sys, pytest
            os.chdir({name!r})
            for options in {runs!r}:
                options = [*{STRICT!r}, "-p", "no:cacheprovider", *options.split()]
                status = pytest.main(options)
                print("STATUS", int(status), flush=True)
            print("LOADED", *sorted({{"jax", "mirror"}} & set(sys.modules)))
            """
        path = f"{fresh.ROOT}:{name}"
        return fresh.start(
            code, environment={"PYTHONPATH": path, "JAX_PLATFORMS": "cpu", **environment}
        )


def statuses(output: str) -> list[int]:
    return [int(found) for found in re.findall(r"^STATUS (\d+)", output, re.MULTILINE)]


def lines_with(said: str, *texts: str) -> str:
    """Returns the lines that contain all of the texts."""
    return "\n".join(line for line in said.splitlines() if all(text in line for text in texts))
