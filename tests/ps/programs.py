"""Programs that tests run in a process of their own, because they end it or start clusters."""

import os
import subprocess
import sys


def run_program(directory, text, *arguments, status=0):
    """Runs a program in a session of its own, and returns what it prints."""
    file = directory / "program.py"
    file.write_text(text)
    path = os.pathsep.join(part for part in sys.path if part)
    done = subprocess.run(
        [sys.executable, str(file), *arguments],
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        timeout=900,
        start_new_session=True,
        check=False,
    )
    assert done.returncode == status
    return done.stdout
