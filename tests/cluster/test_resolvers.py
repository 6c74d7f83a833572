"""Cluster specs and resolvers: what they read, and the messages for what they cannot read."""

import json

import pytest

import mirror
from mirror._src.cluster.resolvers import Membership, expand_counts, expand_nodes
from mirror.distributed import (
    ClusterSpec,
    SimpleClusterResolver,
    SlurmClusterResolver,
    TFConfigClusterResolver,
)
from tests.support.messages import raises
from tests.support.tables import rows

TWO = {"worker": ["a:1", "b:1"]}
CHIEF = {"chief": ["c:1"], "worker": ["a:1", "b:1"], "evaluator": ["e:1"]}


@pytest.fixture
def environment(monkeypatch):
    """Sets variables, after all that name a cluster are removed."""
    import os

    for name in list(os.environ):
        if name.startswith(("SLURM_", "OMPI_")) or name in ("TF_CONFIG", "CUDA_VISIBLE_DEVICES"):
            monkeypatch.delenv(name)

    def set_all(**variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return set_all


def tf_config(cluster, **task):
    return json.dumps({"cluster": cluster, "task": task})


@rows(
    "cluster, task, membership",
    [
        (TWO, {"type": "worker", "index": 1}, Membership("a:1", 2, 1)),
        (CHIEF, {"type": "chief", "index": 0}, Membership("c:1", 3, 0)),
        (CHIEF, {"type": "worker", "index": "0"}, Membership("c:1", 3, 1)),
        (CHIEF, {"type": "evaluator", "index": 0}, None),
        (
            {"worker": {"2": "b:1", "0": "a:1"}},
            {"type": "worker", "index": 2},
            Membership("b:1", 2, 0),
        ),
        ({}, {}, None),
    ],
)
def test_tf_config_gives_the_arguments_of_jax(environment, cluster, task, membership):
    environment(TF_CONFIG=tf_config(cluster, **task))
    resolver = TFConfigClusterResolver()
    assert resolver.membership() == membership
    if membership:
        assert resolver.master() == membership.coordinator_address
        assert (resolver.task_type, resolver.task_id) == (task["type"], int(task["index"]))


def test_without_tf_config_there_is_no_cluster(environment):
    environment()
    resolver = TFConfigClusterResolver()
    assert resolver.membership() is None
    assert (resolver.task_type, resolver.task_id, resolver.master()) == (None, None, "")


def test_arguments_override_the_task_of_tf_config(environment):
    environment(TF_CONFIG=tf_config(TWO, type="worker", index=0))
    assert TFConfigClusterResolver("worker", 1).membership() == Membership("a:1", 2, 1)


@rows(
    "text, error, names",
    [
        ("{worker", ValueError, ["TF_CONFIG"]),
        ("[1]", ValueError, ["TF_CONFIG"]),
        (tf_config({"worker": "a:1"}, type="worker", index=0), ValueError, ["TF_CONFIG", "worker"]),
        (tf_config({"worker": ["a"]}, type="worker", index=0), ValueError, ["'a'", "'host:port'"]),
        (tf_config({"worker": ["a:1", "a:1"]}, type="worker", index=0), ValueError, ["a:1"]),
        (tf_config([1], type="worker", index=0), ValueError, ["TF_CONFIG"]),
        (tf_config(TWO), ValueError, ["TF_CONFIG", "type"]),
        (tf_config(TWO, type="worker"), ValueError, ["TF_CONFIG", "index"]),
        (tf_config(TWO, type="worker", index=2), ValueError, ["worker 2", "worker 0", "worker 1"]),
        (tf_config(TWO, type="trainer", index=0), ValueError, ["trainer 0", "worker 1"]),
        (tf_config({"ps": ["a:1"]}, type="worker", index=0), NotImplementedError, ["'ps'"]),
        (tf_config({**TWO, "ps": ["p:1"]}, type="ps", index=0), NotImplementedError, ["'ps'"]),
    ],
)
def test_a_wrong_tf_config_is_rejected(environment, text, error, names):
    environment(TF_CONFIG=text)
    with raises(error, names=names):
        TFConfigClusterResolver().membership()


def test_simple_resolver():
    resolver = SimpleClusterResolver(ClusterSpec(TWO), task_type="worker", task_id=1)
    assert resolver.membership() == Membership("a:1", 2, 1)
    assert resolver.cluster_spec() == ClusterSpec(TWO)
    with raises(TypeError, names="task_type", values=3):
        SimpleClusterResolver(TWO, 3)
    with raises(ValueError, names="task_id", values=-1):
        SimpleClusterResolver(TWO, "worker", -1)


SLURM = {"SLURM_JOB_ID": "5", "SLURM_STEP_NODELIST": "gpu[1-2],login"}


@rows(
    "tasks, rank, local, visible, count, ids",
    [
        ("1(x3)", "2", "0", "0,1,2,3", 3, None),  # one task per node uses all of its GPUs
        ("2(x2),1", "1", "1", "0,1", 5, [1]),
        ("2(x2),1", "1", "1", "1", 5, None),  # Slurm has selected its GPU
        ("2(x2),1", "4", "0", "", 5, [0]),
    ],
)
def test_slurm_gives_the_arguments_of_jax(environment, tasks, rank, local, visible, count, ids):
    environment(
        **SLURM,
        SLURM_STEP_TASKS_PER_NODE=tasks,
        SLURM_PROCID=rank,
        SLURM_LOCALID=local,
        CUDA_VISIBLE_DEVICES=visible,
    )
    member = SlurmClusterResolver().membership()
    assert member == Membership("gpu1:61445", count, int(rank), ids)
    assert SlurmClusterResolver(port=8000).master() == "gpu1:8000"


def test_slurm_needs_srun(environment):
    environment(SLURM_JOB_ID="5")
    with raises(RuntimeError, names=["SLURM_PROCID", "SLURM_STEP_NODELIST"], fix="srun --nodes=2"):
        SlurmClusterResolver()
    with raises(ValueError, names="port", values=0):
        SlurmClusterResolver(port=0)


def test_lists_of_slurm():
    assert expand_nodes("n[01-03,7],x[9-11]y,z") == [
        *("n01", "n02", "n03", "n7", "x9y", "x10y", "x11y", "z")
    ]
    assert expand_nodes("a-b,c") == ["a-b", "c"]
    assert expand_nodes("r[1-2]n[09-10]x,[3,5]") == [
        *("r1n09x", "r1n10x", "r2n09x", "r2n10x", "3", "5")
    ]
    assert expand_counts("2(x3),1") == [2, 2, 2, 1]


def test_cluster_spec_has_the_interface_of_tensorflow():
    spec = ClusterSpec(ClusterSpec(CHIEF))
    assert spec.jobs == ["chief", "worker", "evaluator"]
    assert (spec.num_tasks("worker"), spec.task_indices("worker")) == (2, [0, 1])
    assert spec.task_address("worker", 1) == "b:1"
    assert spec.job_tasks("chief") == ["c:1"]
    assert spec.as_dict() == CHIEF
    assert ClusterSpec({"worker": {1: "b:1"}}).as_dict() == {"worker": {1: "b:1"}}
    assert spec == ClusterSpec(CHIEF)
    assert hash(spec) == hash(ClusterSpec(CHIEF))
    assert spec != ClusterSpec(TWO)
    assert not ClusterSpec({})
    assert "a:1" in repr(spec)
    with raises(ValueError, names="'workr'", fix="'worker'"):
        spec.num_tasks("workr")
    with raises(ValueError, names="'worker'", values=2):
        spec.task_address("worker", 2)


@rows("cluster", [3, ["a:1"], {"worker": "a:1"}, {1: ["a:1"]}, {"worker": 5}])
def test_a_wrong_cluster_is_rejected(cluster):
    with raises(TypeError, names="cluster" if cluster in (3, ["a:1"]) else (), fix="'worker'"):
        ClusterSpec(cluster)


def test_process_of_no_job():
    assert mirror.distributed.process_index() == 0
    assert mirror.distributed.process_count() == 1
    assert mirror.distributed.is_chief()
    mirror.distributed.barrier("nobody else", timeout_secs=0.01)
