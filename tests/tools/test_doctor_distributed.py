"""`mirror doctor --distributed`: its checks, and jobs in which something is wrong."""

import contextlib
import functools
import json
import os
import re
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import mirror
from mirror import cli
from tests.support import fresh, inside, processes
from tests.support.messages import assert_message, raises
from tests.support.tables import rows
from tests.support.waiting import wait_until

distributed = inside.doctor_of_jobs()
check_module, command, *_ = inside.doctor()
Problem = check_module.Problem
resolvers = inside.members()
store = inside.messages()
ProbeResult, findings = command.ProbeResult, command.findings
Rendezvous, UnreachableError = distributed.Rendezvous, distributed.UnreachableError
meet = distributed.meet
Membership = resolvers.Membership


def rolls(*members, port, secs):
    """Returns what the roll call of each process finds; members are pairs of index and count."""
    with ThreadPoolExecutor(len(members)) as pool:
        calls = [
            pool.submit(meet, Membership(f"127.0.0.1:{port}", count, index), secs)
            for index, count in members
        ]
        return [call.result() for call in calls]


ROLLS = {
    "all": ([(0, 3), (1, 3), (2, 3)], Rendezvous([], [], [])),
    "absent": ([(0, 4), (2, 4)], Rendezvous([1, 3], [], [])),
    "repeated": ([(0, 3), (1, 3), (1, 3)], Rendezvous([2], [1], [])),
    "other count": ([(0, 2), (1, 4)], Rendezvous([], [], [(1, 4)])),
    "alone": ([(0, 2)], Rendezvous([1], [], [])),
}
ENDS_AT_ONCE = ("all", "other count")


@pytest.mark.parametrize(
    "cases", [["all"], pytest.param(list(ROLLS)[1:], marks=pytest.mark.slow)], ids=["all", "others"]
)
def test_roll_call_finds_the_same_in_every_process(cases, subtests):
    """Without all processes, a roll call waits until its time is over: all wait at once."""
    ports = processes.free_ports(len(cases))
    with ThreadPoolExecutor(len(cases)) as pool:
        found = {
            case: pool.submit(
                rolls, *ROLLS[case][0], port=port, secs=60 if case in ENDS_AT_ONCE else 6
            )
            for case, port in zip(cases, ports, strict=True)
        }
    for case, calls in found.items():
        members, expected = ROLLS[case]
        with subtests.test(msg=case):
            assert calls.result() == [expected] * len(members)


def test_roll_call_leaves_the_port_to_jax():
    (port,) = processes.free_ports(1)
    for _ in range(3):
        with ThreadPoolExecutor(2) as pool:
            members = [Membership(f"localhost:{port}", 2, i) for i in range(2)]
            assert list(pool.map(lambda m: meet(m, 20), members)) == [Rendezvous([], [], [])] * 2
        with socket.create_server(("127.0.0.1", port)):
            pass


def test_roll_call_uses_the_port_that_the_launcher_reserves():
    with processes.tf_configs(2) as (config, _), ThreadPoolExecutor(2) as pool:
        address = json.loads(config)["cluster"]["worker"][0]
        members = [Membership(address, 2, i) for i in range(2)]
        assert list(pool.map(lambda m: meet(m, 20), members)) == [Rendezvous([], [], [])] * 2


def test_roll_call_says_why_process_0_cannot_be_used():
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with raises(UnreachableError, values=[port, "in use"]):
            meet(Membership(f"127.0.0.1:{port}", 2, 0), 1)

        def greet():
            with contextlib.suppress(OSError):
                while True:
                    with other.accept()[0] as connection:
                        connection.sendall(b"SSH-2.0-other\r\n")

        threading.Thread(target=greet, daemon=True).start()
        with raises(UnreachableError, values="another program"):
            meet(Membership(f"127.0.0.1:{port}", 2, 1), 1)
        other.shutdown(socket.SHUT_RDWR)
    with raises(UnreachableError, values="refused"):
        meet(Membership(f"127.0.0.1:{port}", 2, 1), 0.5)
    with raises(UnreachableError, values="not known"):
        meet(Membership("no.such.host.invalid:2222", 2, 1), 0.5)


def is_sent(port, line):
    with contextlib.suppress(ConnectionRefusedError):
        with socket.create_connection(("127.0.0.1", port), 5) as connection:
            connection.sendall(line)
        return True
    return False


def test_roll_call_ignores_other_connections():
    (port,) = processes.free_ports(1)
    address = f"127.0.0.1:{port}"
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(meet, Membership(address, 2, 0), 30)
        for line in (
            b"GET / HTTP/1.1\r\n\r\n",
            b'{"mirror": 3}\n',
            b"\xff\n",
            b"[]\n",
            b'{"mirror": {}}\n',
            b"",
        ):
            wait_until(functools.partial(is_sent, port, line))
        second = pool.submit(meet, Membership(address, 2, 1), 30)
        assert first.result() == second.result() == Rendezvous([], [], [])


PROBLEMS = [
    (Rendezvous([1, 2], [], []), ["processes 1, 2 of 9", "3 s"]),
    (Rendezvous([4], [], []), ["process 4 of 9"]),
    (Rendezvous([], [3], []), ["process 3"]),
    (Rendezvous([], [], [(2, 8)]), ["process 2 has 8", "has 9"]),
]


@rows("roll, values", PROBLEMS)
def test_problems_name_processes_and_the_fix(roll, values):
    (check,) = distributed._problems_of(roll, 9, 3)
    assert check.state == "problem"
    assert_message(check.found, values=values)
    assert check.fix


def test_address_is_that_of_this_machine():
    assert distributed.gloo_address("localhost") in ("127.0.0.1", "::1")
    assert distributed.gloo_address("no.such.host.invalid") is None
    assert distributed.address_towards("127.0.0.1") == "127.0.0.1"
    assert distributed.address_towards("no.such.host.invalid") is None
    for address, expected in (("127.0.1.1", True), ("::1", True), ("10.0.0.1", False)):
        assert distributed.is_loopback(address) == expected
    assert not distributed.is_loopback("fe80::1%eth0")


def host(name, gloo, network="10.0.0.5"):
    return {"host": name, "gloo": gloo, "network": network}


ADDRESSES = {
    "one machine": ([host("a", "127.0.1.1"), host("a", "127.0.1.1")], "ok", ""),
    "two machines": ([host("a", "10.0.0.5"), host("b", "10.0.0.6")], "ok", ""),
    "loopback": ([host("a", "127.0.1.1"), host("b", "10.0.0.6")], "warning", "10.0.0.5 a"),
    "no network": ([host("a", "::1", None), host("b", "10.0.0.6")], "warning", "ADDRESS a"),
    "no address": ([host("a", None), host("a", None)], "warning", "10.0.0.5 a"),
}


@rows("case", list(ADDRESSES))
def test_an_address_that_others_cannot_reach_is_a_warning(case):
    hosts, state, fix = ADDRESSES[case]
    check = distributed.check_address(hosts)
    assert check.state == state
    assert_message(check.found, values="a")
    assert check.fix.endswith(fix)
    assert bool(check.fix) == bool(fix)


@pytest.mark.parametrize("config", ["{", '{"cluster": {"worker": ["a:1"]}, "task": {}}'])
def test_a_cluster_that_is_wrong_is_a_problem(config, monkeypatch):
    monkeypatch.setenv("TF_CONFIG", config)
    (begins, problem, end) = distributed.run(1)
    assert begins == {"begins": distributed.CLUSTER}
    assert end == {"ends": True}
    assert problem["state"] == "problem"
    assert_message(problem["found"], names="TF_CONFIG")


def test_one_process_without_a_cluster(monkeypatch):
    for name in ("TF_CONFIG", "SLURM_STEP_NODELIST"):
        monkeypatch.delenv(name, raising=False)
    lines = list(distributed.run(60))
    checks = [line for line in lines if "name" in line]
    assert [c["name"] for c in checks] == [
        distributed.CLUSTER,
        distributed.DEVICES,
        distributed.ALL_REDUCE,
    ]
    assert [c["state"] for c in checks] == ["warning", "ok", "ok"]
    assert_message(checks[0]["fix"], values=["TF_CONFIG", "srun", "mirror launch"])
    assert re.search(r"correct across 8 devices: \d+\.\d ms for 32 bytes", checks[2]["found"])


def test_an_all_reduce_that_fails_is_a_problem(monkeypatch, subtests):
    end = threading.Event()
    faults = {
        "division by zero": (60, lambda strategy: 1 / 0),
        "did not finish within 0.3 s": (0.3, lambda strategy: end.wait()),
    }
    for value, (secs, fails) in faults.items():
        monkeypatch.setattr(distributed, "_sums", fails)
        with subtests.test(msg=value):
            with pytest.raises(Problem) as stop:
                distributed.check_all_reduce(mirror.MultiWorkerMirroredStrategy(), secs)
            (check,) = stop.value.checks
            assert check.state == "problem"
            assert_message(check.found, values=["process 0", value])
    end.set()


def test_faults_of_other_processes_are_named(monkeypatch):
    said = [{"fault": ""}, {"fault": "received 1 instead of 2"}]
    monkeypatch.setattr(store, "process_count", lambda: 2)
    monkeypatch.setattr(distributed.consensus, "gather", lambda name, mine, deadline: said)
    with pytest.raises(Problem) as stop:
        distributed.check_all_reduce(mirror.MirroredStrategy(["/cpu:0", "/cpu:1"]), 60)
    (check,) = stop.value.checks
    assert check.found == "process 1: received 1 instead of 2"


def test_a_wrong_copy_is_named():
    total = mirror.MirroredStrategy(["/cpu:0", "/cpu:1"]).run(lambda: np.float32([1, 2]))
    distributed._require_equal(total, np.float32([1, 2]))
    with raises(ValueError, values=["CPU:0", "2.0", "3.0", "element 1 of 2"]):
        distributed._require_equal(total, np.float32([1, 3]))


def test_a_crash_counts_only_before_the_end():
    line = json.dumps({"name": "it", "state": "ok", "found": "that"})
    crash = "F0 x.cc:1] Socket closed\n"
    (check,) = findings(ProbeResult(-6, f'{line}\n{{"ends": true}}\n', crash))
    assert check.state == "ok"
    _, check = findings(ProbeResult(-6, f'{{"begins": "it"}}\n{line}\n', crash), "Look there.")
    assert (check.name, check.state, check.fix) == ("it", "problem", "Look there.")
    assert_message(check.found, values="SIGABRT")


def test_the_deadline_has_a_limit(capsys):
    with pytest.raises(SystemExit, match="2"):
        cli.main(["doctor", "--distributed", "--deadline", "9" * 25])
    assert_message(capsys.readouterr().err, names="--deadline", fix="from 1 to 1000000000")


def test_the_deadline_needs_distributed(capsys):
    assert cli.main(["doctor", "--deadline", "3"]) == 2
    assert_message(capsys.readouterr().err, fix="--distributed")


# Jobs


def launched(*arguments, **variables):
    command = [sys.executable, "-m", "mirror", "launch", "--cpu", *arguments]
    path = os.pathsep.join(filter(None, [fresh.INHERITED.get("PYTHONPATH"), str(fresh.ROOT)]))
    return subprocess.run(
        command,
        env={**fresh.INHERITED, "PYTHONPATH": path, **variables},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )


DOCTOR = ("-m", "mirror", "doctor", "--distributed", "--deadline", "40")


@pytest.mark.slow
def test_doctor_passes_in_a_job():
    done = launched("--processes", "2", "--devices", "2", *DOCTOR)
    assert done.returncode == 0, done
    for i in (0, 1):
        lines = [line for line in done.stdout.splitlines() if line.startswith(f"[{i}] ok")]
        text = "\n".join(lines)
        expected = (
            rf"cluster: TFConfigClusterResolver: process {i} of 2, coordinator 127.0.0.1:\d+",
            r"processes: all 2 have joined",
            r"versions and settings: equal in all 2 processes",
            r"address: .* all processes are on this machine",
            r"devices: 4 devices; process 0 on \S+: 2 x CPU; process 1 on \S+: 2 x CPU",
            r"all-reduce: correct across 4 devices of 2 processes: .* ms for 4 MiB",
            r"coordinator: \d+\.\d\d ms per message",
        )
        for pattern in expected:
            assert re.search(pattern, text), done.stdout
        assert f"[{i}] no problems" in done.stdout


@pytest.mark.nightly
def test_doctor_names_what_differs_and_who():
    """Every process prints it, although `mirror launch` ends a job at its first failure."""
    code = (
        "import os, sys, json; from mirror import cli\n"
        "me = json.loads(os.environ['TF_CONFIG'])['task']['index']\n"
        "os.environ['JAX_ENABLE_X64'] = str(me)\n"
        "sys.exit(cli.main(['doctor', '--distributed', '--json', '--deadline', '40']))"
    )
    for ended in processes.run(code):
        assert ended.status == 1, ended
        found = json.loads(ended.output)
        assert found["state"] == "problem"
        *_, problem = found["checks"]
        assert problem["name"] == distributed.VERSIONS
        for i, value in enumerate(("False", "True")):
            assert f"jax_enable_x64: {value} on process {i}" in problem["meaning"]


@pytest.mark.nightly
def test_doctor_names_a_process_that_does_not_come():
    code = "from mirror import cli; exit(cli.main(%r))"
    arguments = ["doctor", "--distributed", "--deadline", "5"]
    with processes.tf_configs(3) as (first, _, third):
        each = [{"TF_CONFIG": first}, {"TF_CONFIG": third}]
        for ended in processes.run(code % arguments, processes=2, each=each):
            assert ended.status == 1, ended
            assert "problem  processes: process 1 of 3 did not join within 5 s" in ended.output
