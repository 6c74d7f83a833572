"""`.ci/run`, with stand-ins for Python and its tools, and the list of slowest tests."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support import fresh
from tests.support.slowest_tests import lines

VERSIONS = ("3.11", "3.12", "3.13")
# Notes each call; makes virtual environments; fails where the call contains $FAILS.
STAND_IN = """\
#!/bin/sh
case "$*" in
  *version_info*) basename "$0" | sed s/python//; exit ;;
  *sys.executable*) command -v "$0"; exit ;;
esac
echo "$(basename "$0") $*" >> "$CALLS"
case "$*" in
  *"-m venv"*)
    for folder; do :; done
    mkdir -p "$folder/bin"
    for name in python pip ruff codespell mypy; do cp "$0" "$folder/bin/$name"; done ;;
esac
case "$*" in
  *"$FAILS"*) echo "it fails" >&2; exit 3 ;;
esac
"""


def run(folder: Path, *, versions=VERSIONS, fails="nothing", **variables: str):
    """Runs a copy of `.ci/run`; returns how it ended, and the calls of Python and the tools."""
    checkout, programs = folder / "a checkout", folder / "programs"
    for path in (checkout / ".ci", checkout / "notebooks", programs):
        path.mkdir(parents=True)
    shutil.copy2(fresh.ROOT / ".ci" / "run", checkout / ".ci" / "run")
    shutil.copy2(fresh.ROOT / "README.md", checkout)
    for name in ("01_first", "02_second"):
        (checkout / "notebooks" / f"{name}.ipynb").touch()
    for version in VERSIONS:
        program = programs / f"python{version}"
        program.write_text(STAND_IN if version in versions else "#!/bin/sh\nexit 1\n")
        program.chmod(0o755)
    shutil.copy2(program, programs / "python3")
    calls = folder / "calls"
    calls.touch()
    environment = {
        "PATH": f"{programs}:{os.defpath}",
        "CALLS": str(calls),
        "FAILS": fails,
        "TMPDIR": str(folder),
        **variables,
    }
    done = subprocess.run(
        [checkout / ".ci" / "run"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    return done, calls.read_text()


def summary(output: str) -> list[str]:
    """Returns the stages of the summary."""
    return output.partition("== summary")[2].partition("== slowest")[0].splitlines()[1:]


def test_every_stage_runs_once(tmp_path):
    done, calls = run(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    stages = summary(done.stdout)
    assert len(stages) == 15
    assert all(" ok " in stage for stage in stages)
    assert calls.count("-m pytest") == 8
    for tool in ("ruff check", "ruff format", "codespell", "mypy"):
        assert calls.count(f"\n{tool}") == 1
    assert "--slow --dev -m slow or dev" in calls
    assert "--gpu-aot -m gpu_aot" in calls
    assert calls.count("-several-processes.xml --slow --dist load tests/cluster tests/tr") == 1
    assert calls.count("-k 01_first") + calls.count("-k 02_second") == 1
    assert not list(tmp_path.glob("tmp.*")), "nothing is left behind"


def test_failed_stage_fails_the_run_but_not_the_next_stages(tmp_path, subtests):
    cases = {  # what fails, and how many stages are left
        "format --check": (1, 15),
        "slow or dev": (1, 15),
        "-m notebooks": (1, 15),
        "3.12/bin/python install": (1, 14),
        ".[dev]": (1, 13),
        "-m tests.support.lowest_versions": (1, 14),
    }
    for i, (fails, (failed, count)) in enumerate(cases.items()):
        with subtests.test(msg=fails):
            done, _ = run(tmp_path / str(i), fails=fails)
            stages = summary(done.stdout)
            assert done.returncode == 1
            assert sum("FAILED (3)" in stage for stage in stages) == failed
            assert len(stages) == count


def test_missing_pythons_are_named(tmp_path):
    done, calls = run(tmp_path, versions=("3.12",), NOTEBOOKS="all")
    assert done.returncode == 0, done.stdout + done.stderr
    for version in ("3.11", "3.13"):
        assert f"Python {version}" in done.stderr
    assert len(summary(done.stdout)) == 12
    assert "-k notebook" in calls


def test_programs_for_gpus_are_skipped_without_their_compiler(tmp_path):
    done, calls = run(tmp_path, fails="--no-deps jax-cuda12-pjrt")
    assert done.returncode == 0, done.stdout + done.stderr
    stages = summary(done.stdout)
    assert len(stages) == 15
    assert "skipped" in stages[-1]
    assert "jax-cuda12-plugin" in stages[-1]
    assert "gpu_aot" not in calls


def test_no_python_is_an_error(tmp_path):
    done, _ = run(tmp_path, versions=())
    assert done.returncode == 1
    assert "No Python 3.11" in done.stderr


def test_script_passes_shellcheck():
    if shutil.which("shellcheck") is None:
        pytest.skip("needs shellcheck")
    subprocess.run(["shellcheck", fresh.ROOT / ".ci" / "run"], check=True)


def test_slowest_tests_come_from_all_reports(tmp_path):
    case = (
        '<testsuite><testcase classname="tests.a.test_{0}" name="test[x]" time="{1}"/></testsuite>'
    )
    for name, secs in {"one": 1.5, "two": 12.0, "three": 0.2}.items():
        (tmp_path / f"{name}.xml").write_text(case.format(name, secs))
    (tmp_path / "killed.xml").write_text("<testsuite>")
    first, second = lines(tmp_path, 2)
    assert first.split() == ["12.0", "s", "two", "tests/a/test_two::test[x]"]
    assert "test_one" in second
