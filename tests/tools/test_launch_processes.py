"""`mirror launch --processes`: output, failures, restarts, signals, and no processes left."""

import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import threading

import pytest

from tests.support import fresh, inside
from tests.support.messages import assert_message, raises
from tests.support.tables import rows
from tests.support.waiting import wait_until

launch, OptionError = inside.launcher()
job = inside.starter()
HANGS_SECS = 900  # ends a launcher that hangs
HEAD = """
import json, os, pathlib, signal, subprocess, sys, threading
task = json.loads(os.environ.get('TF_CONFIG', '{"task": {"index": 0}}'))['task']
me, restarts = task['index'], int(os.environ['MIRROR_RESTARTS'])
pathlib.Path(f'pid-{me}-{restarts}').write_text(str(os.getpid()))
def wait_for(pattern, count):
    while len(list(pathlib.Path().glob(pattern))) < count: threading.Event().wait(0.01)
"""


def script(directory: pathlib.Path, code: str) -> str:
    """Writes a script that knows its number, and the number of restarts."""
    path = directory / "train.py"
    path.write_text(HEAD + code)
    return str(path)


@pytest.fixture
def runs(tmp_path, monkeypatch, capfd):
    """Runs a job in a new directory; returns its status, output and errors.

    This process receives a signal when both processes have written the files of a pattern.
    """
    environment = {k: v for k, v in os.environ.items() if k != "TF_CONFIG"}
    numbers = iter(range(100))

    def run(code, processes=2, restarts=0, grace_secs=30.0, signals=()):
        directory = tmp_path / str(next(numbers))
        directory.mkdir()
        monkeypatch.chdir(directory)

        def send(pattern, number):
            try:
                wait_until(lambda: has_files(directory, pattern, 2))
            finally:
                os.kill(os.getpid(), number)  # ends the job in any case

        threads = [threading.Thread(target=send, args=each) for each in signals]
        for thread in threads:
            thread.start()
        arguments = ["-S", script(directory, code)]
        status = launch.run_job(
            arguments, [environment] * processes, restarts=restarts, grace_secs=grace_secs
        )
        for thread in threads:
            thread.join()
        assert_none_is_left(directory)
        return status, *capfd.readouterr()

    return run


def launched(directory: pathlib.Path, *arguments: str) -> "subprocess.Popen[str]":
    path = os.pathsep.join(filter(None, [fresh.INHERITED.get("PYTHONPATH"), str(fresh.ROOT)]))
    return subprocess.Popen(
        [sys.executable, "-m", "mirror", "launch", *arguments],
        cwd=directory,
        env={**fresh.INHERITED, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def assert_none_is_left(directory: pathlib.Path) -> None:
    pids = [int(p.read_text() or 0) for p in directory.glob("pid-*")]
    wait_until(lambda: not any(map(is_alive, pids)))


def is_alive(pid: int) -> bool:
    try:
        return "Z" not in pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except FileNotFoundError:
        return False


def has_files(directory: pathlib.Path, pattern: str, count: int) -> bool:
    return len(list(directory.glob(pattern))) >= count


def test_processes_get_a_cluster_and_lines_are_not_mixed(tmp_path):
    code = (
        "for i in range(200): print(f'{me}:' + 'x' * 500)\n"
        "print(f'error {me}', file=sys.stderr); print(sys.argv[1:], os.environ['TF_CONFIG'])\n"
        "sys.stdout.write('no newline')"
    )
    arguments = ["--processes", "3", "--devices", "2", script(tmp_path, code), "--epochs", "5"]
    with launched(tmp_path, *arguments) as process:
        output, errors = process.communicate(timeout=HANGS_SECS)
    assert process.returncode == 0, errors
    assert_none_is_left(tmp_path)
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
    with launched(tmp_path, "--restarts", "5", script(tmp_path, code)) as process:
        output, errors = process.communicate(timeout=HANGS_SECS)
    assert process.returncode == 0, errors
    assert output == "start 0 False\nstart 1 False\nstart 2 False\n"
    assert_message(errors, names=["process 0"], values=["restart 1 of 5", "restart 2 of 5"])
    assert "restart 3" not in errors


FAILURES = {
    "exit status": ("sys.exit(3)", 3, "with exit status 3"),
    "exception": ("raise ValueError('bad data')", 1, "with exit status 1"),
    "signal": ("os.kill(os.getpid(), signal.SIGKILL)", 137, "by SIGKILL"),
}


def test_the_first_failure_is_named_and_ends_all(runs, subtests):
    for name, (fail, expected, words) in FAILURES.items():
        with subtests.test(msg=name):
            code = (
                f"if me == 1:\n    wait_for(f'pid-*-{{restarts}}', 3)\n    {fail}\nsignal.pause()"
            )
            status, _, errors = runs(code, 3, restarts=1)
            assert status == expected
            assert errors.count(f"process 1 ended first, {words}") == 2
            assert "restart 1 of 1" in errors
            assert len(list(pathlib.Path().glob("pid-*"))) == 6


def test_output_of_the_program_does_not_restart_it(runs, subtests):
    for processes in (1, 2):
        with subtests.test(msg=f"{processes} processes"):
            code = (
                f"wait_for('pid-*', {processes})\n"
                "with open(f'runs-{me}', 'a') as file: file.write('x')\n"
                f"wait_for('runs-*', {processes})\n"
                "if me == 0: sys.exit('OSError: Address already in use: port 9100')\n"
                "signal.pause()"
            )
            status, _, errors = runs(code, processes)
            assert status == 1
            assert [p.read_text() for p in pathlib.Path().glob("runs-*")] == ["x"] * processes
            assert "start" not in errors


def test_the_port_of_process_0_is_reserved():
    """Other programs cannot take it; JAX's coordinator, which uses SO_REUSEPORT, can."""
    with job.tf_configs(3) as configs:
        addresses = json.loads(configs[0])["cluster"]["worker"]
        ports = [int(address.removeprefix("127.0.0.1:")) for address in addresses]
        assert len(set(ports)) == 3
        for host in ("127.0.0.1", ""):
            with pytest.raises(OSError, match="in use"):
                socket.create_server((host, ports[0]))
        with socket.create_server(("", ports[0]), reuse_port=True) as server:
            for _ in range(5):
                with socket.create_connection(("127.0.0.1", ports[0])), server.accept()[0]:
                    pass
        for port in ports[1:]:
            socket.create_server(("127.0.0.1", port)).close()
    socket.create_server(("127.0.0.1", ports[0])).close()


def test_processes_that_ignore_signals_and_their_children_are_killed(runs):
    code = (
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import signal; '\n"
        "    'signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); signal.pause()'],\n"
        "    stdout=subprocess.PIPE)\n"
        "child.stdout.readline()\n"
        "pathlib.Path(f'pid-child-{me}').write_text(str(child.pid))\n"
        "if me == 0:\n    wait_for('pid-child-*', 2); sys.exit(4)\nsignal.pause()"
    )
    status, _, errors = runs(code, grace_secs=0.3)
    assert (status, len(list(pathlib.Path().glob("pid-child-*")))) == (4, 2), errors


@rows("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_reaches_all_processes_once(runs, number, monkeypatch, subtests):
    sent = []

    def killpg(pid, signum, killpg=os.killpg):
        sent.append(signum)
        killpg(pid, signum)

    monkeypatch.setattr(job.os, "killpg", killpg)
    for heeds in (True, False):
        with subtests.test(msg="heeds it" if heeds else "ignores it"):
            code = (
                # Not `pause`: a signal between the test of the loop and it would be lost.
                "caught, (read, write) = [], os.pipe()\n"
                "def catch(number, _):\n"
                "    caught.append(number)\n    os.write(write, b'x')\n"
                "for s in (signal.SIGINT, signal.SIGTERM):\n    signal.signal(s, catch)\n"
                "pathlib.Path(f'ready-{me}').touch()\n"
                f"while not (os.read(read, 1) and {heeds}): pass\n"
                "print('caught', caught)"
            )
            sent.clear()
            signals = [("ready-*", number)]
            status, output, errors = runs(code, grace_secs=900 if heeds else 0.5, signals=signals)
            assert status == 128 + number
            assert f"ended by {number.name}" in errors
            assert sent == [number] * 2 + [signal.SIGKILL] * 2
            caught = sorted(output.splitlines())
            expected = [f"[{i}] caught [{number.value}]" for i in range(2)]
            assert caught == (expected if heeds else [])


def test_a_second_signal_ends_the_processes_at_once(runs):
    """They ignore the first, and the grace period is endless."""
    code = (
        "signal.signal(signal.SIGTERM, lambda *_: pathlib.Path(f'caught-{me}').touch())\n"
        "pathlib.Path(f'ready-{me}').touch()\nwhile True: signal.pause()"
    )
    signals = [("ready-*", signal.SIGTERM), ("caught-*", signal.SIGTERM)]
    status, _, errors = runs(code, grace_secs=1e6, signals=signals)
    assert status == 128 + signal.SIGTERM, errors


STARTS = {  # at the start of which process the signal comes; each attempt has two
    "while the first process starts": 1,
    "while the last process starts": 2,
    "while the processes start again": 3,
}


def test_a_signal_during_the_start_ends_the_job(runs, monkeypatch, subtests):
    popen = subprocess.Popen
    for name, count in STARTS.items():
        for number in (signal.SIGINT, signal.SIGTERM):
            started = []

            def start(*arguments, started=started, count=count, number=number, **options):
                started.append(popen(*arguments, **options))
                if len(started) == count:
                    os.kill(os.getpid(), number)
                return started[-1]

            monkeypatch.setattr(job.subprocess, "Popen", start)
            with subtests.test(msg=f"{number.name} {name}"):
                code = f"if restarts == 0 and {count == 3}: sys.exit(3)\nsignal.pause()"
                status, _, errors = runs(code, restarts=1)
                assert status == 128 + number
                assert f"ended by {number.name}" in errors
                assert all(process.returncode is not None for process in started)


def test_a_killed_launcher_leaves_no_processes(tmp_path):
    code = "pathlib.Path(f'ready-{me}').touch(); signal.pause()"
    with launched(tmp_path, "--processes", "2", script(tmp_path, code)) as process:
        try:
            wait_until(lambda: has_files(tmp_path, "ready-*", 2))
        finally:
            process.kill()
            process.communicate()
    assert_none_is_left(tmp_path)


GPUS = {  # GPUs, processes, devices of each, environment, what each sees
    "shared": (8, 2, None, {}, ["0,1,2,3", "4,5,6,7"]),
    "some": (8, 2, 2, {}, ["0,1", "2,3"]),
    "a rest": (3, 2, None, {}, ["0", "1"]),
    "selected": (3, 3, 1, {"CUDA_VISIBLE_DEVICES": "5,GPU-1,2"}, ["5", "GPU-1", "2"]),
}


def test_processes_share_the_gpus(monkeypatch, subtests):
    for name, (num_gpus, processes, devices, environment, visible) in GPUS.items():
        with subtests.test(msg=name):
            monkeypatch.setattr(launch, "visible_gpus", lambda n=num_gpus: ["GPU-"] * n)
            made = launch.environments_for(environment, processes, devices, on_cpu=False)
            assert [each["CUDA_VISIBLE_DEVICES"] for each in made] == visible


def test_each_process_has_its_own_host_devices(monkeypatch):
    monkeypatch.setattr(launch, "visible_gpus", lambda: ["GPU-"] * 8)
    made = launch.environments_for({}, 3, 2, on_cpu=True)
    assert made == [{"JAX_NUM_CPU_DEVICES": "2", "JAX_PLATFORMS": "cpu"}] * 3
    monkeypatch.setattr(launch, "visible_gpus", list)
    assert launch.environments_for({"A": "1"}, 2, None, on_cpu=False) == [{"A": "1"}] * 2


IMPOSSIBLE = [
    (2, 2, {}, {"names": "--processes 3", "values": [6, 2], "fix": "--cpu"}),
    (2, None, {}, {"names": "--processes 3", "values": [3, 2], "fix": "--cpu"}),
    (0, 2, {"TF_CONFIG": "{}"}, {"names": "TF_CONFIG={}", "fix": "Unset TF_CONFIG"}),
]


def test_impossible_jobs_are_rejected(monkeypatch, subtests):
    for num_gpus, devices, environment, message in IMPOSSIBLE:
        with subtests.test(msg=str(message)):
            monkeypatch.setattr(launch, "visible_gpus", lambda n=num_gpus: ["GPU-"] * n)
            with raises(OptionError, **message):
                launch.environments_for(environment, 3, devices, on_cpu=False)
