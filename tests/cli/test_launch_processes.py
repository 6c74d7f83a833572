"""`mirror launch --processes`: output, failures, restarts, signals, and nothing left behind."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from mirror_cli import launch
from mirror_cli.common import OptionError
from tests.support import fresh
from tests.support.messages import assert_message, raises

SECS = 60


def script(directory: pathlib.Path, code: str) -> str:
    """Writes a script that knows its number, and the number of restarts."""
    head = (
        "import json, os, pathlib, signal, subprocess, sys, time\n"
        "task = json.loads(os.environ.get('TF_CONFIG', '{\"task\": {\"index\": 0}}'))['task']\n"
        "me, restarts = task['index'], int(os.environ['MIRROR_RESTARTS'])\n"
        "pathlib.Path(f'pid-{me}-{restarts}').write_text(str(os.getpid()))\n"
    )
    path = directory / "train.py"
    path.write_text(head + code)
    return str(path)


def launched(directory: pathlib.Path, *arguments: str) -> "subprocess.Popen[str]":
    path = os.pathsep.join(filter(None, [fresh.INHERITED.get("PYTHONPATH"), str(fresh.ROOT)]))
    return subprocess.Popen(
        [sys.executable, "-m", "mirror_cli", "launch", *arguments],
        cwd=directory,
        env={**fresh.INHERITED, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(directory: pathlib.Path, code: str, *options: str) -> tuple[int, str, str]:
    process = launched(directory, *options, script(directory, code), "--epochs", "5")
    try:
        output, errors = process.communicate(timeout=SECS)
    finally:
        process.kill()
        process.wait()
    assert_nobody_is_left(directory)
    return process.returncode, output, errors


def assert_nobody_is_left(directory: pathlib.Path) -> None:
    deadline = time.monotonic() + 5
    while left := [p.name for p in directory.glob("pid-*") if is_alive(int(p.read_text()))]:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


def is_alive(pid: int) -> bool:
    try:
        return (
            "Z" not in pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        )
    except FileNotFoundError:
        return False


def test_processes_get_a_cluster_and_lines_are_not_mixed(tmp_path):
    code = (
        "for i in range(200): print(f'{me}:' + 'x' * 500)\n"
        "print(f'error {me}', file=sys.stderr); print(sys.argv[1:], os.environ['TF_CONFIG'])\n"
        "sys.stdout.write('no newline')"
    )
    status, output, errors = run(tmp_path, code, "--processes", "3", "--devices", "2")
    assert status == 0, errors
    lines = output.splitlines()
    for i in range(3):
        own = [line.removeprefix(f"[{i}] ") for line in lines if line.startswith(f"[{i}] ")]
        assert own[:200] == [f"{i}:" + "x" * 500] * 200
        config = json.loads(own[200].removeprefix("['--epochs', '5'] "))
        assert config["task"] == {"type": "worker", "index": i}
        assert len(set(config["cluster"]["worker"])) == 3
        assert own[201:] == ["no newline"]
        assert f"[{i}] error {i}" in errors
    assert len(lines) == 3 * 202


def test_one_process_can_be_restarted(tmp_path):
    code = "print('start', restarts, 'TF_CONFIG' in os.environ); sys.exit(restarts < 2)"
    status, output, errors = run(tmp_path, code, "--restarts", "5")
    assert (status, output) == (0, "start 0 False\nstart 1 False\nstart 2 False\n")
    assert_message(errors, names=["process 0"], values=["restart 1 of 5", "restart 2 of 5"])
    assert "restart 3" not in errors


FAILURES = {
    "exit status": ("sys.exit(3)", 3, "with exit status 3"),
    "exception": ("raise ValueError('bad data')", 1, "with exit status 1"),
    "signal": ("os.kill(os.getpid(), signal.SIGKILL)", 137, "by SIGKILL"),
}


@pytest.mark.parametrize("case", FAILURES)
def test_the_first_failure_is_named_and_ends_all(tmp_path, case):
    fail, expected, words = FAILURES[case]
    code = f"if me == 1:\n    time.sleep(0.5); {fail}\ntime.sleep(100)"
    start = time.monotonic()
    status, _, errors = run(tmp_path, code, "--processes", "3", "--restarts", "1")
    assert status == expected
    assert errors.count(f"process 1 ended first, {words}") == 2
    assert "restart 1 of 1" in errors
    assert time.monotonic() - start < 30
    assert {p.name for p in tmp_path.glob("pid-*")} >= {"pid-0-0", "pid-2-1"}


def test_processes_that_ignore_signals_and_their_children_are_killed(tmp_path):
    code = (
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import signal, time; '\n"
        "    'signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(100)'])\n"
        "pathlib.Path(f'pid-child-{me}').write_text(str(child.pid))\n"
        "if me == 0:\n    time.sleep(1); sys.exit(4)\ntime.sleep(100)"
    )
    status, _, errors = run(tmp_path, code, "--processes", "2", "--grace", "1")
    assert (status, len(list(tmp_path.glob("pid-child-*")))) == (4, 2), errors


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("heeds", [True, False], ids=["heeds it", "ignores it"])
def test_a_signal_reaches_all_processes_once(tmp_path, number, heeds):
    code = (
        f"caught = []\nfor s in (signal.SIGINT, signal.SIGTERM):\n"
        "    signal.signal(s, lambda n, f: caught.append(n))\n"
        "pathlib.Path(f'ready-{me}').touch()\n"
        f"while not (caught and {heeds}): time.sleep(0.05)\n"
        "time.sleep(0.5); print('caught', caught)"
    )
    process = launched(tmp_path, "--processes", "2", "--grace", "3", script(tmp_path, code))
    try:
        wait_for(tmp_path, "ready-*", 2)
        process.send_signal(number)
        output, errors = process.communicate(timeout=SECS)
    finally:
        process.kill()
        process.wait()
    assert_nobody_is_left(tmp_path)
    assert process.returncode == 128 + number
    assert f"ended by {number.name}" in errors
    caught = sorted(output.splitlines())
    assert caught == ([f"[{i}] caught [{number.value}]" for i in range(2)] if heeds else [])


def test_a_killed_launcher_leaves_nobody(tmp_path):
    code = "pathlib.Path(f'ready-{me}').touch(); time.sleep(100)"
    process = launched(tmp_path, "--processes", "2", script(tmp_path, code))
    try:
        wait_for(tmp_path, "ready-*", 2)
    finally:
        process.kill()
        process.communicate()
    assert_nobody_is_left(tmp_path)


def wait_for(directory: pathlib.Path, pattern: str, count: int) -> None:
    deadline = time.monotonic() + SECS
    while len(list(directory.glob(pattern))) < count:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_port_that_is_taken_is_replaced(tmp_path):
    """It does not count as a restart."""
    code = (
        "address = json.loads(os.environ['TF_CONFIG'])['cluster']['worker'][0]\n"
        "if address == '127.0.0.1:7' and me == 0:\n"
        "    print('bind: Address already in use', file=sys.stderr); sys.exit(1)\n"
        "if address == '127.0.0.1:7': time.sleep(100)\n"
        "print(address, restarts)"
    )
    driver = (
        "import os, sys; from mirror_cli import job\n"
        "ports = iter([[7, 8], [9, 10]])\n"
        "job.free_ports = lambda count: next(ports)\n"
        f"os.chdir({str(tmp_path)!r})\n"
        f"arguments = [{script(tmp_path, code)!r}]\n"
        "sys.exit(job.run(arguments, [dict(os.environ)] * 2, restarts=0, grace_secs=5))"
    )
    output = fresh.run(driver, timeout=SECS)
    assert "[0] 127.0.0.1:9 0" in output
    assert "mirror launch: another program has taken the port" in output


GPUS = {  # GPUs, processes, devices of each, environment, what each sees
    "shared": (8, 2, None, {}, ["0,1,2,3", "4,5,6,7"]),
    "some": (8, 2, 2, {}, ["0,1", "2,3"]),
    "a rest": (3, 2, None, {}, ["0", "1"]),
    "selected": (3, 3, 1, {"CUDA_VISIBLE_DEVICES": "5,GPU-1,2"}, ["5", "GPU-1", "2"]),
}


@pytest.mark.parametrize("case", GPUS)
def test_processes_share_the_gpus(case, monkeypatch):
    num_gpus, processes, devices, environment, visible = GPUS[case]
    monkeypatch.setattr(launch, "count_gpus", lambda: num_gpus)
    made = launch.environments_for(environment, processes, devices, on_cpu=False)
    assert [each["CUDA_VISIBLE_DEVICES"] for each in made] == visible


def test_host_devices_are_those_of_each_process(monkeypatch):
    monkeypatch.setattr(launch, "count_gpus", lambda: 8)
    made = launch.environments_for({}, 3, 2, on_cpu=True)
    assert made == [{"JAX_NUM_CPU_DEVICES": "2", "JAX_PLATFORMS": "cpu"}] * 3
    monkeypatch.setattr(launch, "count_gpus", lambda: 0)
    assert launch.environments_for({"A": "1"}, 2, None, on_cpu=False) == [{"A": "1"}] * 2


@pytest.mark.parametrize(
    ("num_gpus", "devices", "environment", "message"),
    [
        (2, 2, {}, {"names": "--processes 3", "values": [6, 2], "fix": "--cpu"}),
        (2, None, {}, {"names": "--processes 3", "values": [3, 2], "fix": "--cpu"}),
        (0, 2, {"TF_CONFIG": "{}"}, {"names": "TF_CONFIG={}", "fix": "Unset TF_CONFIG"}),
    ],
)
def test_impossible_jobs_are_rejected(num_gpus, devices, environment, message, monkeypatch):
    monkeypatch.setattr(launch, "count_gpus", lambda: num_gpus)
    with raises(OptionError, **message):
        launch.environments_for(environment, 3, devices, on_cpu=False)
