"""The README's code runs, and so do the docstrings' examples."""

import doctest
import importlib
import pathlib
import pkgutil
import re
import subprocess
import sys

import pytest

import mirror

ROOT = pathlib.Path(__file__).parents[1]


def test_readme_code_runs():
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len(blocks) == 6
    devices = "import jax\njax.config.update('jax_num_cpu_devices', 4)\n"
    code = devices + "\n".join(blocks)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "loss" in done.stdout
    assert "4 replicas against one device" in done.stdout


@pytest.mark.parametrize(
    "name",
    [m.name for m in pkgutil.walk_packages(mirror.__path__, "mirror.") if ".demo" not in m.name],
)
def test_docstring_examples_run(name):
    module = importlib.import_module(name)
    assert doctest.testmod(module, extraglobs={"mirror": mirror}).failed == 0
