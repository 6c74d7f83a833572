"""The README's code runs, and so do the docstrings' examples."""

import doctest
import importlib
import pkgutil
import re
import subprocess

import pytest

import mirror
from tests import fresh


def run_readme() -> subprocess.CompletedProcess:
    blocks = re.findall(r"```python\n(.*?)```", (fresh.ROOT / "README.md").read_text(), re.DOTALL)
    assert len(blocks) == 7
    devices = "import jax\njax.config.update('jax_num_cpu_devices', 4)\n"
    code = devices + "\n".join(blocks)
    return fresh.start(code, timeout=300)


AHEAD = {"README": run_readme}


def test_readme_code_runs(ahead):
    done = ahead[__name__]["README"].result()
    assert done.returncode == 0, done.stdout[-3000:]
    assert "loss" in done.stdout
    assert "4 replicas against one device" in done.stdout


@pytest.mark.parametrize(
    "name",
    [m.name for m in pkgutil.walk_packages(mirror.__path__, "mirror.") if ".demo" not in m.name],
)
def test_docstring_examples_run(name):
    module = importlib.import_module(name)
    assert doctest.testmod(module, extraglobs={"mirror": mirror}).failed == 0
