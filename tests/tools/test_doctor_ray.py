"""`mirror doctor --ray`: its checks on stand-ins, and on a cluster of Ray on this machine."""

import json
import subprocess
import sys
import types

import pytest

import mirror
from tests.support import fresh, inside
from tests.support.tables import rows

check_module, command, *_ = inside.doctor()
ray_nodes, ray_names = inside.doctor_of_ray()
resolvers = inside.members()

JOBS = {"chief": ["host0:1"], "ps": ["host1:1"], "worker": ["host2:1", "host3:1"]}
SPEC = mirror.distributed.ClusterSpec(JOBS)
OWN = {"python": "3.11.9", "ray": "2.60.0"}


class Node(dict):
    """A node of Ray, as `ray.nodes` returns it."""

    def __init__(self, host, *, store=2**33, alive=True, **resources):
        found = {"CPU": 4.0, "object_store_memory": float(store), **resources}
        super().__init__(NodeID=host, NodeManagerAddress=host, Alive=alive, Resources=found)


@pytest.fixture
def nodes(monkeypatch):
    """The nodes of a stand-in for Ray."""
    found = []
    monkeypatch.setattr(ray_nodes, "import_ray", lambda: types.SimpleNamespace(nodes=lambda: found))
    return found


def problem(check, *arguments):
    """Returns the problem that a check stops with."""
    with pytest.raises(check_module.Problem) as stopped:
        check(*arguments)
    (found,) = stopped.value.checks
    assert found.state == "problem"
    return found


def task_node(job, number):
    resource = ray_names.resource_of(resolvers.ClusterTask(job, number))
    return Node(f"{job}{number}", **{resource: 1.0})


def test_missing_ray_is_a_problem_with_the_command(monkeypatch):
    def missing():
        raise ModuleNotFoundError("ray")

    monkeypatch.setattr(ray_nodes, "import_ray", missing)
    check, end = ray_nodes.run(1)
    assert (check["state"], check["found"], end) == ("problem", "not installed", {"ends": True})
    assert "[ray]" in check["fix"]


@rows("text", ["{", "[]", '{"cluster": {"worker": []}}', '{"cluster": 1}'])
def test_bad_tf_config_is_a_problem(monkeypatch, text):
    monkeypatch.setenv("TF_CONFIG", text)
    check = problem(ray_nodes.spec_of, {"TF_CONFIG": text})
    assert check.name == "cluster"
    assert check.meaning
    assert "TF_CONFIG" in check.fix


@pytest.mark.parametrize("text", ["", " "])
def test_no_tf_config_is_no_cluster(text):
    assert ray_nodes.spec_of({"TF_CONFIG": text}) is None
    assert ray_nodes.spec_of({}) is None


def test_tf_config_names_the_tasks(monkeypatch):
    text = json.dumps({"cluster": JOBS, "task": {"type": "ps", "index": 0}})
    monkeypatch.setenv("TF_CONFIG", text)
    assert ray_nodes.spec_of({"TF_CONFIG": text}).as_dict() == JOBS


def test_head_that_does_not_answer_is_a_problem(monkeypatch):
    def refuse(spec):
        raise RuntimeError("No Ray cluster answers at host0:1.")

    monkeypatch.setattr(ray_nodes, "Connection", refuse)
    check = problem(ray_nodes.check_cluster, SPEC, 0)
    assert "host0:1" in check.found
    assert "mirror.distributed.Server(cluster, 'chief', 0)" in check.fix


def test_missing_tasks_are_named_with_addresses(nodes):
    nodes += [task_node("chief", 0), task_node("ps", 0), task_node("worker", 0)]
    check = problem(ray_nodes.check_tasks, SPEC, 0)
    assert "1 of 4" in check.found
    assert "host3:1" in check.found
    assert "host2:1" not in check.found
    assert "'worker', 1" in check.fix
    resource = ray_names.resource_of(resolvers.ClusterTask("worker", 1))
    nodes.append(Node("gone", alive=False, **{resource: 1.0}))
    problem(ray_nodes.check_tasks, SPEC, 0)
    nodes.append(task_node("worker", 1))
    assert ray_nodes.check_tasks(SPEC, 0) == check_module.Check("tasks", "ok", "all 4 have joined")
    assert ray_nodes.check_tasks(None, 0).state == "ok"


def test_small_object_store_is_a_warning(nodes):
    nodes.append(Node("large", GPU=2.0))
    check = ray_nodes.check_nodes()
    assert (check.state, check.found) == ("ok", "1 node, 4 CPUs, 2 GPUs")
    nodes += [Node("small", store=2**26), Node("dead", store=1, alive=False)]
    check = ray_nodes.check_nodes()
    assert (check.state, check.found) == ("warning", "2 nodes, 8 CPUs, 2 GPUs")
    assert "small" in check.meaning
    assert "large" not in check.meaning
    assert "--shm-size" in check.fix


def test_other_versions_and_lost_nodes_are_a_problem(monkeypatch):
    theirs = {"same": OWN, "other": {**OWN, "ray": "2.61.0"}, "lost": OSError("node died")}

    strategies = types.ModuleType("ray.util.scheduling_strategies")
    strategies.NodeAffinitySchedulingStrategy = lambda node, soft: node
    for name in ("ray", "ray.util"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, strategies.__name__, strategies)

    class Remote:
        def options(self, scheduling_strategy, **options):
            # As in Ray, what it returns has no `options`.
            return types.SimpleNamespace(remote=lambda: scheduling_strategy)

    def get(host, timeout):
        answer = theirs[host]
        if isinstance(answer, Exception):
            raise answer
        return answer

    found = []
    ray = types.SimpleNamespace(nodes=lambda: found, remote=lambda fn: Remote(), get=get)
    monkeypatch.setattr(ray_nodes, "import_ray", lambda: ray)
    monkeypatch.setattr(ray_nodes, "installed", lambda: {**OWN, "jax": "0.10.2"})
    theirs["same"] = {**OWN, "jax": "0.10.2"}
    found += [Node("same")]
    assert "equal on 1 node" in ray_nodes.check_versions(1).found
    found += [Node("other"), Node("lost")]
    check = problem(ray_nodes.check_versions, 1)
    assert "other has ray 2.61.0, this process 2.60.0" in check.found
    assert "other has jax None" in check.found
    assert "lost: " in check.found
    assert "node died" in check.found
    assert "same" not in check.found.replace("the same", "")


def test_unexpected_errors_are_a_problem_and_end_the_checks(monkeypatch, nodes):
    def fail(*arguments):
        raise OSError("no route")

    monkeypatch.setattr(
        ray_nodes,
        "import_ray",
        lambda: types.SimpleNamespace(
            nodes=lambda: nodes, shutdown=lambda: None, __version__="2.60.0"
        ),
    )
    monkeypatch.delenv("TF_CONFIG", raising=False)
    monkeypatch.setattr(ray_nodes, "Connection", lambda spec: None)
    monkeypatch.setattr(ray_nodes, "check_nodes", fail)
    output = "\n".join(map(json.dumps, ray_nodes.run(1)))
    checks = list(command.findings(command.ProbeResult(0, output, "")))
    assert [check.state for check in checks][-1] == "problem"
    assert checks[-1].name == "nodes"
    assert "no route" in checks[-1].found


def doctor(*arguments, **environment):
    command = [sys.executable, "-m", "mirror", "doctor", "--ray", *arguments]
    return subprocess.run(
        command,
        env={**fresh.INHERITED, **environment},
        cwd=fresh.ROOT,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.dev("ray")
def test_a_cluster_of_this_machine_has_no_problem():
    done = doctor("--json", TF_CONFIG="")
    assert done.returncode == 0, done.stdout + done.stderr
    checks = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    assert "started on this machine" in checks["cluster"]["found"]
    assert checks["tasks"]["state"] == "ok"
    assert "1 node" in checks["nodes"]["found"]
    assert "equal on 1 node" in checks["versions"]["found"]
    assert "4 MiB" in checks["actor calls"]["found"]
