"""The program of Ray Tune on the page of the whole workflow."""

import re
import subprocess
import sys

import pytest

from tests.support import fast, fresh
from tests.support.pages import PAGES

_BLOCK = re.compile(r"^```python no-run\n(.*?)^```\n```text\n(.*?)^```", re.DOTALL | re.M)


@pytest.mark.dev("ray")
@pytest.mark.slow
def test_program_of_ray_tune_prints_what_the_page_shows(tmp_path):
    ((program, shown),) = _BLOCK.findall(PAGES["docs/whole-workflow.md"])
    (tmp_path / "tunes.py").write_text(program)
    environment = {**fresh.INHERITED, **fast.ENVIRONMENT, "PYTHONPATH": str(fresh.ROOT)}
    done = subprocess.run(
        [sys.executable, "tunes.py"],
        cwd=tmp_path,
        env={**environment, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2"},
        capture_output=True,
        text=True,
        timeout=fresh.LIMIT_SECS,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith(shown)
