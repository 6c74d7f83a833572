"""`mirror.distributed.Server`: the tasks of a cluster as Ray nodes."""

import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from mirror.distributed import Server, SimpleClusterResolver, TFConfigClusterResolver
from tests.support import fast, inside
from tests.support.messages import raises
from tests.support.processes import free_ports
from tests.support.waiting import wait_until

server_module, tethered = inside.nodes()
_, ray_cluster = inside.waits_for_ray()
cluster_of, head_address, head_of = (
    server_module.cluster_of,
    server_module.head_address,
    server_module.head_of,
)
resource_of, task_of, answers = (
    server_module.resource_of,
    server_module.task_of,
    server_module.answers,
)
ClusterSpec, ClusterTask = server_module.ClusterSpec, server_module.ClusterTask

CLUSTER = {"chief": ["c:1"], "ps": ["p:1", "p:2"], "worker": ["w:1", "w:2"]}


def test_cluster_that_cannot_have_servers_is_rejected(subtests):
    for cluster, kind, texts in [
        (3, TypeError, {"names": "cluster", "values": 3}),
        ({"ps": "a:1", "worker": ["b:1"]}, TypeError, {"names": "cluster['ps']"}),
        ({"ps": ["a"], "worker": ["b:1"]}, ValueError, {"values": "'host:port'"}),
        ({"ps": ["a:1"], "worker": ["a:1"]}, ValueError, {"values": "a:1"}),
        ({"ps": ["a:1"]}, ValueError, {"values": "'worker'"}),
        ({"worker": ["a:1"]}, ValueError, {"values": "'ps'"}),
        ({"ps": [], "worker": ["a:1"]}, ValueError, {"values": "'ps'"}),
        ({"ps": ["a:1"], "worker": ["b:1"], "boss": ["c:1"]}, ValueError, {"values": "'boss'"}),
        (
            {"chief": ["c:1", "d:1"], "ps": ["a:1"], "worker": ["b:1"]},
            ValueError,
            {"values": (2, "'chief'")},
        ),
    ]:
        with subtests.test(cluster=cluster):
            with raises(kind, **texts):
                cluster_of(cluster)
            with raises(kind, **texts):
                Server(cluster, "ps", 0)


def test_task_that_the_cluster_does_not_have_is_rejected(subtests):
    for arguments, kind, texts in [
        ((), TypeError, {"names": "job_name", "fix": "Server(cluster, 'ps', 0)"}),
        ((3, 0), TypeError, {"names": "job_name", "values": 3}),
        (("ps", None), TypeError, {"names": "task_index"}),
        (("ps", True), TypeError, {"names": "task_index", "values": "True"}),
        (("ps", 2), ValueError, {"values": (2, "[0, 1]")}),
        (("boss", 0), ValueError, {"values": "'boss'"}),
        (("evaluator", 0), ValueError, {"names": "evaluator"}),
    ]:
        with subtests.test(arguments=arguments), raises(kind, **texts):
            Server(CLUSTER, *arguments)


def test_options_are_checked(subtests):
    for options, kind in [
        ({"num_cpus": -1}, ValueError),
        ({"num_cpus": True}, TypeError),
        ({"num_gpus": "2"}, TypeError),
        ({"start_secs": 0}, ValueError),
        ({"start_secs": "1"}, TypeError),
    ]:
        with subtests.test(options=options), raises(kind, names=next(iter(options))):
            Server(CLUSTER, "ps", 0, **options)


def test_head_is_the_chief_or_the_first_server():
    assert head_address(cluster_of(CLUSTER)) == "c:1"
    without = cluster_of({"ps": {3: "p:3", 5: "p:5"}, "worker": ["w:1"]})
    assert (head_of(without), head_address(without)) == (ClusterTask("ps", 3), "p:3")
    assert resource_of(ClusterTask("worker", 1)) == "mirror:worker:1"


def test_resolver_knows_cluster_and_task(monkeypatch):
    task = {"type": "worker", "index": 1}
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": CLUSTER, "task": task}))
    resolver = TFConfigClusterResolver()
    assert cluster_of(resolver) == ClusterSpec(CLUSTER)
    assert task_of(resolver, None, None) == ClusterTask("worker", 1)
    assert task_of(resolver, "ps", 0) == ClusterTask("ps", 0)
    assert task_of(SimpleClusterResolver(CLUSTER, "ps", 1), None, None) == ClusterTask("ps", 1)


def test_resolver_without_a_cluster_is_rejected(monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    with raises(ValueError, names="TFConfigClusterResolver", fix="TF_CONFIG"):
        cluster_of(TFConfigClusterResolver())


def test_without_ray_the_message_says_how_to_install_it(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with raises(ModuleNotFoundError, names="mirror.distributed.Server", fix="[ray]"):
        Server(CLUSTER, "ps", 0)


@pytest.mark.slow
@pytest.mark.dev("ray")
def test_head_that_does_not_answer_is_an_error_in_time():
    cluster = {"chief": [f"127.0.0.1:{free_ports(1)[0]}"], "ps": ["127.0.0.1:2"], "worker": ["w:1"]}
    with raises(RuntimeError, values=cluster["chief"][0], fix="Start the program of the chief"):
        Server(cluster, "ps", 0, start_secs=1)


PROGRAM = """
import json, sys
import mirror

cluster, job, index = json.loads(sys.argv[1]), sys.argv[2], int(sys.argv[3])
server = mirror.distributed.Server(cluster, job, index, num_cpus=1)
print(server, flush=True)
server.join()
print(server, flush=True)
"""

CONNECT = """
import json, sys
import ray

ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR")
print(json.dumps(ray.cluster_resources()))
"""


def _start(cluster, job, index):
    command = [sys.executable, "-c", textwrap.dedent(PROGRAM), json.dumps(cluster), job, str(index)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


@pytest.mark.nightly
@pytest.mark.dev("ray")
def test_nodes_find_the_head_and_end_with_it_or_on_sigterm():
    ports = free_ports(3)
    chief, ps, worker = (f"127.0.0.1:{port}" for port in ports)
    cluster = {"chief": [chief], "ps": [ps], "worker": [worker]}
    # The worker starts before the head, for which it waits.
    processes = [
        _start(cluster, "worker", 0),
        _start(cluster, "chief", 0),
        _start(cluster, "ps", 0),
    ]
    try:
        for process in processes:
            assert "running" in process.stdout.readline()
        answer = subprocess.run(
            [sys.executable, "-c", CONNECT, chief],
            env={**os.environ, **server_module.token_variables()},
            capture_output=True,
            text=True,
            timeout=900,
        )
        resources = json.loads(answer.stdout.splitlines()[-1])
        for task in ("chief:0", "ps:0", "worker:0"):
            assert resources[f"mirror:{task}"] == 1
        assert resources["CPU"] == 3
        os.kill(processes[2].pid, signal.SIGTERM)
        assert "stopped" in processes[2].stdout.read()
        assert processes[2].wait(900) == 0
        os.kill(processes[1].pid, signal.SIGTERM)
        assert processes[1].wait(900) == 0
        assert processes[0].wait(900) == 0  # the head is gone
    finally:
        for process in processes:
            if process.poll() is None:
                process.terminate()
                process.wait(900)
            process.stdout.close()


@pytest.mark.slow
@pytest.mark.dev("ray")
def test_strategy_whose_head_does_not_start_leaves_no_connection(monkeypatch):
    """Otherwise, the next strategy would not be the last one to close it."""

    def fails(*arguments):
        raise RuntimeError("mine")

    monkeypatch.setenv("RAY_CLIENT_MODE", "0")  # as Ray does when it is imported
    monkeypatch.setattr(ray_cluster, "Server", fails)
    monkeypatch.setattr("ray.is_initialized", lambda: False)  # by another test
    (port,) = free_ports(1)
    spec = cluster_of({"chief": [f"127.0.0.1:{port}"], "ps": ["a:1"], "worker": ["b:1"]})
    before = ray_cluster.Connection._num_users
    with pytest.raises(RuntimeError, match="mine"):
        ray_cluster.Connection(spec)
    assert ray_cluster.Connection._num_users == before


NODE = """
import sys, time
from mirror.distributed import Server

Server({"chief": [sys.argv[1]], "ps": ["a:1"], "worker": ["b:1"]}, "chief", 0)
print("running", flush=True)
time.sleep(600)
"""


@pytest.mark.slow
@pytest.mark.dev("ray")
@pytest.mark.parametrize(
    "number", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.nightly)]
)
def test_node_ends_with_the_process_that_started_it(number):
    """Otherwise, the head of a chief that was killed keeps the processes of the others alive."""
    (port,) = free_ports(1)
    address = f"127.0.0.1:{port}"
    with subprocess.Popen(
        [sys.executable, "-c", NODE, address], stdout=subprocess.PIPE, text=True
    ) as process:
        assert "running" in process.stdout.readline()
        assert answers(address)
        process.send_signal(number)
        process.wait(900)
    wait_until(lambda: not answers(address), 60)


def tethered_process(secs, command, head="127.0.0.1:1"):
    tether = [sys.executable, "-I", tethered.__file__, str(secs), head]
    arguments = [*tether, sys.executable, "-c", command]
    return subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


COMMANDS = {"raise SystemExit(3)": 3, "import os; os.kill(os.getpid(), 9)": 137, "": 0}


def test_status_of_a_command_is_kept(subtests):
    for command in COMMANDS:
        with subtests.test(command=command), tethered_process(30, command) as process:
            assert process.wait(900) == COMMANDS[command]


WAITS = """
import signal
signal.pthread_sigmask(signal.SIG_BLOCK, [2, 15])
print("waits", flush=True)
print(int(signal.sigwait([2, 15])))
"""


def test_node_drains_only_toward_a_head_that_answers(subtests):
    """On SIGTERM, Ray drains for half a minute if the head is gone; on SIGINT, it ends at once."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        heads = {
            f"127.0.0.1:{listening.getsockname()[1]}": signal.SIGTERM,
            f"127.0.0.1:{free_ports(1)[0]}": signal.SIGINT,
        }
        for head, number in heads.items():
            with subtests.test(number=number), tethered_process(30, WAITS, head) as process:
                assert process.stdout.readline() == b"waits\n"
                process.terminate()
                assert int(process.stdout.readline()) == number


def test_command_that_ignores_the_end_of_its_parent_is_killed():
    command = (
        "import signal; signal.pthread_sigmask(signal.SIG_BLOCK, [2, 15]); "
        "print('ignores', flush=True); signal.pause()"
    )
    with tethered_process(0.5, command) as process:
        assert process.stdout.readline() == b"ignores\n"
        process.stdin.close()
        assert process.wait(900) == 137


@pytest.mark.slow
@pytest.mark.dev("ray")
def test_tasks_of_tf_config_train_together():
    chief, ps, *workers = (f"127.0.0.1:{port}" for port in free_ports(4))
    cluster = {"chief": [chief], "ps": [ps], "worker": workers}
    tasks = [("worker", 0), ("worker", 1), ("ps", 0), ("chief", 0)]
    processes = []
    try:
        for job, index in tasks:
            config = {"cluster": cluster, "task": {"type": job, "index": index}}
            processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", "tests.ps.program_cluster"],
                    env={**os.environ, **fast.ENVIRONMENT, "TF_CONFIG": json.dumps(config)},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            )
        output = processes[-1].communicate(timeout=900)[0]
        assert processes[-1].returncode == 0, output
        assert "ParameterServerStrategy(1 server, 2 workers, staleness=0)" in output
        assert float(output.split("loss")[1].split()[0]) < 0.1  # Ray may print after it
        for process in processes[:-1]:
            assert "stopped" in process.communicate(timeout=900)[0]
            assert process.returncode == 0
    finally:
        for process in processes:
            if process.poll() is None:
                process.terminate()
                process.wait(900)
            process.stdout.close()


def test_task_whose_node_has_not_joined_is_named(monkeypatch, caplog):
    spec = cluster_of(CLUSTER)
    page = (Path(__file__).parents[2] / "docs/parameter-server.md").read_text()
    assert f"waits {ray_cluster._JOIN_SECS:.0f} s" in page
    monkeypatch.setattr(ray_cluster, "_JOIN_SECS", 0.1)
    monkeypatch.setattr(ray_cluster, "_LINE_SECS", 0.03)
    monkeypatch.setattr(ray_cluster, "_nodes", lambda: [{"CPU": 2.0, "mirror:ps:0": 1.0}])
    wanted = ray_cluster.demands("ps", 2, {}, spec)
    with raises(RuntimeError, names="ps 1", fix="mirror.distributed.Server(cluster, 'ps', 1)"):
        ray_cluster.require_resources(wanted)
    assert 1 <= len(caplog.messages) <= 3
    assert all("ps 1" in line and "Waiting" in line for line in caplog.messages)
