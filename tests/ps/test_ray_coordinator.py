"""`ClusterCoordinator` on real processes: functions, variables, errors, and lost processes."""

import json
import os
import signal
import subprocess
import sys
import threading
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import mirror
from tests.ps.digits import are_equal, arrays, batches, create, on_replicas, train_step
from tests.support import inside
from tests.support.messages import raises
from tests.support.packages import optional
from tests.support.waiting import wait_until

pytestmark = pytest.mark.dev("ray")
ray: Any = optional("ray")
SMALL = mirror.ps.FixedShardsPartitioner(3)
TX = optax.adam(3e-3)
DATA = batches([24] * 30)


@pytest.fixture
def strategy(on_ray):
    return on_ray


@pytest.fixture
def coordinator(strategy):
    coordinator = mirror.ps.ClusterCoordinator(strategy)
    yield coordinator
    coordinator.join(900)  # a test leaves nothing behind


@pytest.fixture
def training(one_worker):
    coordinator = mirror.ps.ClusterCoordinator(one_worker)
    yield coordinator
    coordinator.join(900)


def pids(strategy, job):
    return inside.servers_and_workers(strategy)[job]


def kill(*processes):
    for process in processes:
        os.kill(process, signal.SIGKILL)


# The program of the parameter-server chapter: two workers multiply variables, one sets a first.


@pytest.mark.slow
def test_two_workers_multiply_variables(strategy, coordinator):
    a, b = strategy.Variable(3.0, name="a"), strategy.Variable(4.0, name="b")

    def multiply():
        return a * b

    def set_and_multiply(a, b):
        a.assign(10.0)
        return a * b

    assert coordinator.schedule(multiply).fetch() == 12.0
    assert coordinator.schedule(set_and_multiply, (a,), {"b": b}).fetch() == 40.0
    assert coordinator.schedule(multiply).fetch() == 40.0
    assert float(a.read_value()) == 10.0
    assert float(a * b) == float(b * a) == 40.0
    assert float(2 - a) == -8.0
    assert a > b
    assert float(-a) == -10.0


@pytest.mark.slow
def test_functions_that_a_worker_has_forgotten_are_sent_again(coordinator):
    """A worker keeps 256 functions; each is sent once."""
    functions = [lambda x, i=i: x + i for i in range(300)]
    for _ in range(2):
        values = [coordinator.schedule(fn, (1,)) for fn in functions]
        assert coordinator.fetch(values) == list(range(1, 301))


@pytest.mark.slow
def test_variables_survive_the_loss_of_servers_and_workers(strategy, coordinator):
    total = strategy.Variable(1.0, name="total")
    coordinator.schedule(lambda: total.assign_add(1.0)).fetch()
    kill(*pids(strategy, "servers"), pids(strategy, "workers")[0])
    assert float(total.read_value()) == 2.0
    assert coordinator.schedule(lambda: total * 2).fetch(900) == 4.0


@pytest.mark.slow
def test_function_that_ends_its_process_is_an_error(strategy, coordinator):
    before = pids(strategy, "workers")
    coordinator.schedule(sys.exit, (3,))
    with raises(RuntimeError, values="SystemExit: 3"):
        coordinator.join(900)
    assert pids(strategy, "workers") == before


@pytest.mark.slow
def test_start_does_not_wait_forever_for_occupied_resources(ray_cluster, monkeypatch, caplog):
    driver_thread, _ = inside.waits_for_ray()
    monkeypatch.setattr(driver_thread, "_START_SECS", 3.0)
    monkeypatch.setattr(driver_thread, "_LINE_SECS", 1.0)
    total = ray.cluster_resources()["CPU"]
    options = {"ps": 1, "workers": 1, "ps_options": {"num_cpus": total}}

    @ray.remote(num_cpus=total)
    class Occupies:
        def is_there(self):
            return True

    actor = Occupies.remote()
    ray.get(actor.is_there.remote())
    with raises(RuntimeError, values=("have not started", f"0 of {total:g} CPU"), fix="Close"):
        mirror.ps.ParameterServerStrategy(**options)
    assert "Waiting for the cluster" in caplog.text
    ray.kill(actor)


def test_variables_reject_what_does_not_fit(strategy, coordinator):
    a = strategy.Variable(np.zeros(2, np.float32), name="pair")
    with raises(ValueError, values=("'pair'", "[2]", "[3]")):
        a.assign(np.zeros(3, np.float32))
    with raises(ValueError, values="'pair'"):
        strategy.Variable(np.zeros(3, np.float32), name="pair")
    coordinator.schedule(lambda: a.assign(np.zeros(3, np.float32)))
    with raises(ValueError, values=("'pair'", "[2]", "[3]")):
        coordinator.join()
    assert strategy.Variable(1.0).name != strategy.Variable(1.0).name


def test_functions_run_under_the_strategy_of_their_worker(coordinator):
    def describe():
        strategy = mirror.get_strategy()
        total = strategy.run(lambda: mirror.all_reduce("sum", 1.0))
        return type(strategy).__name__, strategy.num_replicas_in_sync, float(total)

    assert coordinator.schedule(describe).fetch() == ("MirroredStrategy", 1, 1.0)


OPTIONS = {
    "jax_enable_x64": True,
    "jax_default_matmul_precision": "float32",
    "jax_numpy_dtype_promotion": "strict",
    "jax_default_prng_impl": "rbg",
    "jax_threefry_partitionable": False,
}


def options():
    return {name: getattr(jax.config, name) for name in OPTIONS}


@pytest.mark.slow
def test_workers_have_the_options_of_the_main_program(ray_cluster):
    before = options()
    try:
        for name, value in OPTIONS.items():
            jax.config.update(name, value)
        with mirror.ps.ParameterServerStrategy(ps=1, workers=1) as strategy:
            assert mirror.ps.ClusterCoordinator(strategy).schedule(options).fetch() == OPTIONS
            assert strategy.Variable(2**40).read_value() == 2**40
    finally:
        for name, value in before.items():
            jax.config.update(name, value)


def test_options_must_not_change_after_the_workers_have_started(coordinator):
    texts = {"values": "jax_enable_x64", "fix": "jax.config.update"}
    with raises(RuntimeError, **texts), jax.enable_x64(True):
        coordinator.schedule(options)


def test_fetch_replaces_remote_values_in_a_tree(coordinator):
    values = {"x": coordinator.schedule(lambda x: x + 1, (np.arange(3),)), "y": [7]}
    fetched = coordinator.fetch(values)
    assert list(fetched["x"]) == [1, 2, 3]
    assert fetched["y"] == [7]
    assert values["x"].done()
    assert coordinator.done()


def test_each_worker_has_its_own_dataset(coordinator, tmp_path):
    def numbers():
        yield from range(100)

    dataset = coordinator.create_per_worker_dataset(numbers)
    first, second = iter(dataset), iter(dataset)

    both = os.path.join(tmp_path, "both")
    os.mkfifo(both)

    def meet(iterator, is_first):
        with open(both, "w" if is_first else "r"):  # waits for the other worker
            return next(iterator)

    values = [coordinator.schedule(meet, (first, is_first)) for is_first in (True, False)]
    assert coordinator.fetch(values) == [0, 0]
    taken = coordinator.fetch([coordinator.schedule(next, (first,)) for _ in range(8)])
    counts = [sorted(taken).count(i) for i in range(1, max(taken) + 1)]
    assert all(1 <= count <= 2 for count in counts)
    assert coordinator.schedule(lambda: next(second)).fetch() == 0
    with raises(RuntimeError, fix="next(iterator)"):
        next(first)


def test_arguments_may_change_after_they_are_scheduled(one_worker, training, tmp_path):
    """Functions that wait for a worker, and steps, get what was passed."""

    def wait(path):
        with open(path):  # until the test writes
            return 0

    def total(x, *, y):
        return x.sum() + sum(y)

    def step(model, optimizer, batch, scale):
        loss = train_step(model, optimizer, batch)
        return loss * scale

    model, optimizer = create(one_worker, TX)
    training.schedule(step, (model, optimizer, DATA[0], 1.0))  # loads them, when none runs
    path = os.path.join(tmp_path, "begin")
    os.mkfifo(path)
    training.schedule(wait, (path,))
    x, y, scale = np.ones((4, 5)), np.array(2.0), np.array(3.0, np.float32)
    batch = {name: array.copy() for name, array in DATA[1].items()}
    row = training.schedule(total, (x[:, 1],), {"y": [y, y]})
    every = training.schedule(total, (x,), {"y": [y]})
    loss = training.schedule(step, (model, optimizer, batch, scale))
    for array in (x, y, scale, *batch.values()):
        array[...] = 0
    with open(path, "w"):
        pass
    _, (_, wanted) = on_replicas(1, TX, DATA[:2])
    assert training.fetch([row, every]) == [8, 22]
    np.testing.assert_allclose(loss.fetch(), 3 * wanted, rtol=1e-6)


class UserError(ValueError):
    """An error whose constructor does not take its `args`."""

    def __init__(self, a, b):
        super().__init__(f"{a} and {b}")
        self.b = b


@pytest.mark.slow
def test_error_of_a_function_is_raised_once_and_cancels_what_has_not_started(
    coordinator, tmp_path, subtests
):
    """By `join`, and by the next call if the error has arrived before."""

    def wait(path):
        with open(path) as file:  # until the test writes
            return file.read()

    def fail(path):
        wait(path)
        raise UserError(1, 2)

    for method, arguments in {"join": (60,), "schedule": (len, ([],)), "done": ()}.items():
        with subtests.test(method=method):
            paths = [os.path.join(tmp_path, f"{method} {i}") for i in range(2)]
            for path in paths:
                os.mkfifo(path)
            values = [
                coordinator.schedule(f, (path,))
                for f, path in zip((wait, fail), paths, strict=True)
            ]
            values += [coordinator.schedule(wait, (paths[0],)) for _ in range(40)]
            with raises(TimeoutError, values="0.01"):  # which does not end what runs
                values[0].fetch(0.01)
            with raises(TimeoutError, names="join", values="0.01"):
                coordinator.join(0.01)
            assert not coordinator.done()
            with open(paths[1], "w"):
                pass
            wait_until(values[1].done)
            with open(paths[0], "w") as file:
                file.write("seven")
            wait_until(values[0].done)
            with pytest.raises(UserError, match="1 and 2") as caught:
                getattr(coordinator, method)(*arguments)
            assert caught.value.b == 2
            assert "in fail" in "".join(caught.value.__notes__)
            assert values[0].fetch() == "seven"  # it ran, and has ended
            with pytest.raises(UserError):
                values[1].fetch()
            with pytest.raises(mirror.ps.CancelledError):
                values[-1].fetch()
            assert coordinator.schedule(len, ([7],)).fetch() == 1
            assert coordinator.done()


LOCK = threading.Lock()


def test_what_cannot_be_scheduled_is_rejected(strategy, coordinator):
    value = coordinator.schedule(lambda: 1)
    lock = threading.Lock()
    with raises(TypeError, names="fn", values=3):
        coordinator.schedule(3)
    with raises(TypeError, names="args", values=3):
        coordinator.schedule(len, 3)
    with raises(TypeError, names="kwargs"):
        coordinator.schedule(len, ([],), [3])
    with raises(TypeError, values="RemoteValue", fix="fetch()"):
        coordinator.schedule(len, ([value],))
    with raises(TypeError, values="'lock'"):
        coordinator.schedule(lambda: lock)
    with raises(TypeError, names="len"):
        coordinator.schedule(len, (LOCK,))
    with raises(TypeError, values="RemoteValue"):
        coordinator.schedule(lambda: value)
    with raises(TypeError, names="dataset_fn"):
        coordinator.create_per_worker_dataset([1, 2])
    with raises(TypeError, values="'lock'"):
        coordinator.create_per_worker_dataset(lambda: [lock])
    with raises(TypeError, names="strategy"):
        mirror.ps.ClusterCoordinator(mirror.MirroredStrategy(["/cpu:0"]))
    with raises(TypeError, values="ParameterServerStrategy"):
        coordinator.schedule(lambda: strategy.num_ps)
    assert mirror.ps.ClusterCoordinator(strategy) is coordinator
    with raises(ValueError, names="train_step", fix=("staleness=None", "mirror.Trainer")):
        coordinator.schedule(train_step, (*create(strategy, TX), DATA[0]))


@pytest.mark.slow
def test_what_is_not_a_step_is_rejected(training, one_worker):
    model, optimizer = create(one_worker, TX)
    x, y = DATA[0]["x"], DATA[0]["y"]
    with raises(ValueError, names=("batch['x']", "batch['y']"), values=(24, 23)):
        training.schedule(train_step, (model, optimizer, {"x": x, "y": y[:23]}))
    with raises(ValueError, names="train_step"):
        training.schedule(train_step, (model, optimizer, {"x": x[:0], "y": y[:0]}))
    with raises(TypeError, names="batch['x']"):
        batch = {"x": mirror.PerReplica([x]), "y": y}
        training.schedule(train_step, (model, optimizer, batch))
    with raises(TypeError, names="train_step", fix="coordinator.join()"):
        training.schedule(train_step, (model, x))
    with raises(TypeError, names="train_step"):
        training.schedule(train_step, (optimizer, x))
    other = nnx.Optimizer(model, TX, wrt=nnx.Param)
    with raises(TypeError, names="train_step", values="Optimizer, Optimizer"):
        training.schedule(train_step, (model, optimizer, other, DATA[0]))
    with raises(TypeError, names="batch['key']", fix="jax.random.key(seed)"):
        batch = {**DATA[0], "key": jax.random.key(0)}
        training.schedule(train_step, (model, optimizer, batch))


@pytest.mark.slow
def test_optimizers_that_see_several_servers_are_rejected(one_worker, training):
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1))
    model, optimizer = create(one_worker, tx)
    with raises(ValueError, values="ps=1"):
        training.schedule(train_step, (model, optimizer, DATA[0]))


@pytest.mark.slow
def test_a_step_updates_once(one_worker, training):
    def twice(model, optimizer, batch):
        train_step(model, optimizer, batch)
        return train_step(model, optimizer, batch)

    def never(model, optimizer, batch):
        return batch["x"].sum()

    model, optimizer = create(one_worker, TX)
    for step, times in ((twice, 2), (never, "did not call")):
        training.schedule(step, (model, optimizer, DATA[0]))
        with raises(ValueError, names=step.__name__, values=times):
            training.join(900)


@pytest.mark.slow
def test_another_model_waits_for_join(one_worker, training):
    model, optimizer = create(one_worker, TX)
    other = create(one_worker, TX)
    training.schedule(train_step, (model, optimizer, DATA[0]))
    with raises(RuntimeError, fix="coordinator.join()"):
        training.schedule(train_step, (*other, DATA[0]))
    training.join()
    training.schedule(train_step, (*other, DATA[0]))
    training.join()
    assert are_equal(arrays(model, optimizer), arrays(*other))


def train(strategy, *, disturb=lambda: None, after=5, **kwargs):
    """Trains with `DATA`, disturbed in the middle, and returns all arrays."""
    model, optimizer = create(strategy, TX, **kwargs)
    coordinator = mirror.ps.ClusterCoordinator(strategy)
    values = [coordinator.schedule(train_step, (model, optimizer, batch)) for batch in DATA]
    values[after].fetch(900)
    disturb()
    coordinator.join(900)
    assert all(value.done() for value in values)
    assert int(optimizer.step[...]) == len(DATA)
    return arrays(model, optimizer)


@pytest.mark.slow
def test_asynchronous_updates_are_all_made_in_spite_of_losses(ray_cluster):
    """A worker and then a server; `test_schedule.py` has every order of events."""
    options = {"ps": 2, "workers": 2, "staleness": 2, "snapshot_every": 5}
    with mirror.ps.ParameterServerStrategy(**options, partitioner=SMALL) as strategy:
        for job in ("workers", "servers"):
            process = pids(strategy, job)[0]
            train(strategy, disturb=lambda process=process: kill(process))  # counts the updates
        report = strategy.report()
        assert max(report.staleness) <= 2
        assert (report.lost_workers, report.lost_servers) == (1, 1)


@pytest.mark.nightly
def test_lost_server_without_snapshots_is_an_error_and_the_objects_can_be_loaded_again(
    ray_cluster,
):
    options = {"ps": 2, "workers": 1, "snapshot_every": 0, "staleness": None}
    with mirror.ps.ParameterServerStrategy(**options, partitioner=SMALL) as strategy:
        coordinator = mirror.ps.ClusterCoordinator(strategy)
        model, optimizer = create(strategy, TX)
        for batch in DATA[:3]:
            coordinator.schedule(train_step, (model, optimizer, batch))
        coordinator.join(900)
        process = pids(strategy, "servers")[1]
        with raises(mirror.ps.ParameterServerLostError, fix="snapshot_every"):
            for batch in DATA[3:]:
                value = coordinator.schedule(train_step, (model, optimizer, batch))
                if process is not None:
                    kill(process)
                    process = None
            coordinator.join(900)
        with pytest.raises((mirror.ps.CancelledError, mirror.ps.ParameterServerLostError)):
            value.fetch(1)
        assert int(optimizer.step[...]) == 3
        for batch in DATA[3:]:
            coordinator.schedule(train_step, (model, optimizer, batch))
        coordinator.join(900)
        reference, _ = on_replicas(1, TX, DATA)
        found, wanted = arrays(model, optimizer), arrays(*reference)
        assert max(np.abs(found[k] - wanted[k]).max() for k in found if found[k].size) < 1e-5


@pytest.mark.slow
def test_closed_strategy_leaves_nothing_behind(ray_cluster):
    before = set(threading.enumerate())
    strategy = mirror.ps.ParameterServerStrategy(ps=1, workers=1)
    coordinator = mirror.ps.ClusterCoordinator(strategy)
    processes = [*pids(strategy, "servers"), *pids(strategy, "workers")]
    variable = strategy.Variable(1.0)
    value = coordinator.schedule(lambda: threading.Event().wait(600))
    strategy.close()
    strategy.close()
    with raises(mirror.ps.CancelledError, values="closed"):
        value.fetch(1)
    for use in (lambda: coordinator.schedule(len), coordinator.join, variable.read_value):
        with raises(RuntimeError, values="closed"):
            use()
    assert repr(strategy) == "ParameterServerStrategy(closed)"
    wait_until(lambda: not any(os.path.exists(f"/proc/{process}") for process in processes))
    ours = [t for t in set(threading.enumerate()) - before if t.name.startswith("mirror")]
    assert not ours


PROGRAM = """
import json, time
import mirror
from tests.support import inside

strategy = mirror.ps.ParameterServerStrategy(ps=1, workers=1)
coordinator = mirror.ps.ClusterCoordinator(strategy)
print(json.dumps(inside.servers_and_workers(strategy)), flush=True)
coordinator.schedule(lambda: time.sleep(600))
coordinator.join()
"""


@pytest.mark.nightly
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_no_process_outlives_the_main_program(number):
    with subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE) as program:
        processes = json.loads(program.stdout.readline())
        program.send_signal(number)
        program.wait(900)
    for process in [*processes["servers"], *processes["workers"]]:
        wait_until(lambda process=process: not os.path.exists(f"/proc/{process}"))


@pytest.mark.parametrize(
    ("options", "kind", "names"),
    [
        ({"ps": 0}, ValueError, "ps"),
        ({"ps": True}, TypeError, "ps"),
        ({"workers": "2"}, TypeError, "workers"),
        ({"workers": -1}, ValueError, "workers"),
        ({"staleness": -1}, ValueError, "staleness"),
        ({"staleness": 0.5}, TypeError, "staleness"),
        ({"snapshot_every": -1}, ValueError, "snapshot_every"),
        ({"snapshot_every": None}, TypeError, "snapshot_every"),
        ({"devices_per_worker": 0}, ValueError, "devices_per_worker"),
        ({"partitioner": 3}, TypeError, "partitioner"),
        ({"worker_options": 3}, TypeError, "worker_options"),
        ({"ps_options": [3]}, TypeError, "ps_options"),
        ({"cluster": 3}, TypeError, "cluster"),
        ({"cluster": {"ps": ["a:1"], "worker": ["b:1"]}, "ps": 2}, ValueError, "ps"),
    ],
)
def test_bad_options_are_rejected_before_ray_starts(options, kind, names):
    with raises(kind, names=names):
        mirror.ps.ParameterServerStrategy(**options)


@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
def test_missing_resources_are_named(monkeypatch):
    _, ray_cluster = inside.waits_for_ray()
    monkeypatch.setattr(ray_cluster, "_WAIT_SECS", 0.2)
    with raises(RuntimeError, values=("worker 0", "8 GPU"), fix="worker_options"):
        mirror.ps.ParameterServerStrategy(ps=1, workers=2, worker_options={"num_gpus": 8})
