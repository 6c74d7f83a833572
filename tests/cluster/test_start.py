"""`mirror.distributed.initialize`: joining a job, and everything that can be wrong with one."""

import json
import re

import jax
import pytest
from jax._src import distributed

import mirror
from tests.support import fresh, inside, processes
from tests.support.messages import assert_message, raises
from tests.support.tables import rows

start = inside.start_of_job()

ADDRESS = "127.0.0.1:1"
WORKER_1 = {"type": "worker", "index": 1}


@rows(
    "arguments, error, names",
    [
        ({"heartbeat_secs": 0}, ValueError, ["heartbeat_secs", "0"]),
        ({"agreement_secs": "3"}, TypeError, ["agreement_secs", "'3'"]),
        ({"shutdown_secs": True}, TypeError, ["shutdown_secs", "True"]),
        ({"initialization_secs": -1.0}, ValueError, ["initialization_secs", "-1.0"]),
        ({"cluster_resolver": "worker"}, TypeError, ["cluster_resolver", "'worker'"]),
        ({"coordinator_address": ADDRESS}, ValueError, ["num_processes", "process_id"]),
        ({"process_id": 0, "num_processes": 1}, ValueError, ["coordinator_address"]),
        (
            {
                "cluster_resolver": mirror.distributed.TFConfigClusterResolver(),
                "coordinator_address": ADDRESS,
                "num_processes": 1,
                "process_id": 0,
            },
            ValueError,
            ["cluster_resolver", "coordinator_address"],
        ),
    ],
)
def test_wrong_arguments_are_rejected(arguments, error, names):
    with raises(error, names=names):
        mirror.distributed.initialize(**arguments)


SLURM = {
    "SLURM_JOB_ID": "5",
    "SLURM_STEP_NODELIST": "gpu[1-2]",
    "SLURM_NTASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
}
ENVIRONMENTS = {
    # One task of Slurm or Open MPI per node uses all of its GPUs, where JAX would use one.
    "Slurm": (SLURM, {"num_processes": 2, "process_id": 1, "local_device_ids": None}),
    "Open MPI": ({"OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, {"local_device_ids": [0, 1, 2, 3]}),
    "Open MPI, two per node": (
        {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"},
        {"local_device_ids": None},
    ),
    "TF_CONFIG": (
        {"TF_CONFIG": json.dumps({"cluster": {"worker": ["a:1", "b:1"]}, "task": WORKER_1})},
        {"coordinator_address": "a:1", "num_processes": 2, "process_id": 1},
    ),
}


@rows("case", list(ENVIRONMENTS))
def test_the_environment_gives_the_arguments_of_jax(case, monkeypatch):
    variables, expected = ENVIRONMENTS[case]
    for name in ("TF_CONFIG", "SLURM_STEP_NODELIST"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    found = {}
    monkeypatch.setattr(jax.distributed, "initialize", lambda **arguments: found.update(arguments))
    monkeypatch.setattr(start, "_job", start._Job())
    monkeypatch.setattr(start, "started", lambda: False)
    monkeypatch.setattr(start, "watch_startup", lambda: None)
    monkeypatch.setattr(start, "list_physical_devices", lambda kind: ["a GPU"] * 4)
    mirror.distributed.initialize(heartbeat_secs=7, shutdown_secs=8, initialization_secs=9)
    assert {name: found[name] for name in expected} == expected
    # With a resolver, JAX must not detect another cluster.
    is_resolved = case in ("Slurm", "TF_CONFIG")
    assert found.get("cluster_detection_method") == ("deactivate" if is_resolved else None)
    secs = ["heartbeat_timeout_seconds", "shutdown_timeout_seconds", "initialization_timeout"]
    assert [found[name] for name in secs] == [7, 8, 14 if is_resolved else 9]


def test_the_private_store_of_jax_is_still_there():
    """JAX has no public key-value store. When it has one, `distributed/store.py` must use it."""
    names = ("client", "process_id", "num_processes")
    assert all(hasattr(distributed.global_state, name) for name in names)
    public = [name for name in dir(jax.distributed) if "key" in name or "store" in name]
    assert not public


@pytest.mark.slow
def test_initialize_joins_reads_settings_and_may_be_called_twice():
    code = """
        import mirror, time
        mirror.distributed.initialize(heartbeat_secs=20, agreement_secs=9)
        mirror.distributed.initialize()
        assert mirror.distributed.process_count() == 2
        from tests.support import inside
        start = inside.start_of_job()
        assert not inside.has_started(), "joining a job starts no backend"
        assert start.agreement_secs() == 9
        strategy = mirror.MultiWorkerMirroredStrategy()
        assert start.agreement_secs() == 9
        mirror.distributed.barrier("all", timeout_secs=20)
        print(mirror.distributed.process_index(), strategy.cluster_resolver.master())
        try:
            mirror.distributed.barrier(f"of {mirror.distributed.process_index()}")
        except RuntimeError as error:
            print(error)
        if strategy.is_chief:
            try:
                mirror.distributed.barrier("only the chief", timeout_secs=1)
            except RuntimeError as error:
                print(error)
        start.gather("test", {}, time.monotonic() + 20)
    """
    first, second = processes.outputs_of(processes.run(code, after_failure=10))
    (address,) = re.findall(r"^0 (\S+:\d+)$", first, re.MULTILINE)
    assert f"\n1 {address}\n" in second
    for each in (first, second):
        assert_message(each, names=["'of 0' on processes [0]", "'of 1' on processes [1]"])
    absent = "processes [1] have not"
    assert_message(first, names=["'only the chief'", absent], fix="mirror.distributed.barrier(")
    assert "DEADLINE" not in first


@pytest.mark.nightly
def test_a_backend_that_has_started_is_named():
    code = """
        import jax, mirror
        x = jax.numpy.ones(3)
        try:
            mirror.MultiWorkerMirroredStrategy()
        except RuntimeError as error:
            print(error)
        mirror.MirroredStrategy()
    """
    ended = processes.run(code)
    for i, output in enumerate(processes.outputs_of(ended)):
        assert_message(
            output, names=f"process {i} of 2", fix="mirror.distributed.initialize() first"
        )


@pytest.mark.slow
def test_an_absent_process_is_named_by_the_deadline():
    code = "import mirror; mirror.distributed.initialize(initialization_secs=3, shutdown_secs=2)"
    with processes.tf_configs(2) as configs:
        for i, config in enumerate(configs):
            address = json.loads(config)["cluster"]["worker"][0]
            done = fresh.start(code, environment={"TF_CONFIG": config, "JAX_PLATFORMS": "cpu"})
            assert done.returncode == 1, "JAX aborts no process"
            assert_message(
                done.stdout, names=f"process {i} of 2", values=address, fix="Start all processes"
            )


@pytest.mark.nightly
def test_different_settings_are_named_by_all():
    code = "import mirror; mirror.distributed.initialize()"
    each = [{}, {"JAX_ENABLE_X64": "1"}]
    for ended in processes.run(code, each=each, after_failure=15):
        assert ended.status == 1, ended.output
        assert_message(
            ended.output,
            names=["jax_enable_x64"],
            values=["process 0", "process 1"],
            fix="jax.config",
        )


def test_different_versions_are_named(monkeypatch):
    """The versions of three processes, of which the second differs."""
    said = [{"mirror": v, "jax": "1"} for v in ("0.2", "0.1", "0.2")]
    monkeypatch.setattr(start, "gather", lambda name, mine, deadline: said)
    with raises(
        RuntimeError,
        names="mirror",
        values=["0.2 on processes 0, 2", "0.1 on process 1"],
        fix="versions",
    ):
        start.require_same_settings(0.0)


@pytest.mark.nightly
def test_a_process_that_says_nothing_is_named():
    code = """
        import time, mirror
        from tests.support import inside
        start = inside.start_of_job()
        mirror.distributed.initialize()
        if mirror.distributed.is_chief():
            try:
                start.gather("test", {}, time.monotonic() + 2)
            except RuntimeError as error:
                print(error)
        mirror.distributed.barrier("end", 30)
    """
    first, _ = processes.outputs_of(processes.run(code, after_failure=10))
    assert_message(first, names="Process 0 of 2", values="[1]")
