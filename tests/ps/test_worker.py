"""A worker's part of a step, with servers in the same process."""

import asyncio
import pickle
import sys

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import mirror
from mirror._src.ps.driver import error_of
from mirror._src.ps.messages import (
    Assignment,
    Export,
    LostError,
    NotExportedError,
    Raised,
    Result,
    StepWork,
)
from mirror._src.ps.objects import TrainingObjects
from mirror._src.ps.step_data import ArgumentOfStep, as_users
from mirror._src.ps.store import Store
from tests.ps.digits import (
    Net,
    are_equal,
    arrays,
    batches,
    create,
    largest_difference,
    on_replicas,
    train_step,
)
from tests.ps.one_worker import Training
from tests.support.messages import raises


def test_worker_asks_for_what_was_not_sent():
    training = Training(*create(LOCAL, TX))
    assignment = Assignment(0, 0, 1, 0, None, 0)
    for work in (Export(5, None), Export(0, None)):
        reply = training.worker.run_function(assignment, work, ((), {}))
        assert isinstance(reply, NotExportedError)
    work = StepWork(Export(0, ["fn"]), Export(1, None), 0, None)
    places = (ArgumentOfStep("model"), ArgumentOfStep("optimizer"))
    arguments = ((*places, DATA[0]), {})
    assert isinstance(training.worker.run_part(assignment, work, arguments), NotExportedError)
    assert isinstance(training.part(DATA[0]), Result)
    work = StepWork(Export(0, None), Export(1, None), 0, None)
    assert isinstance(training.worker.run_part(assignment, work, arguments), Result)


def raised_by(function, *arguments):
    training = Training(*create(LOCAL, TX))
    assignment = Assignment(0, 0, 1, 0, None, 0)
    training.worker._exports[9] = function
    training.worker._loads, training.worker._dumps = pickle.loads, pickle.dumps
    raised = training.worker.run_function(
        assignment, Export(9, None), pickle.dumps((arguments, {}))
    )
    assert isinstance(raised, Raised)
    return error_of(raised, 0, pickle.loads)


def each_replica():
    strategy = mirror.get_strategy()
    return strategy.run(lambda: mirror.get_replica_context().replica_id_in_sync_group)


def test_per_replica_result_of_a_function_is_one_of_the_users():
    training = Training(*create(LOCAL, TX), 2)
    training.worker._exports[9] = each_replica
    reply = training.worker.run_function(Assignment(0, 0, 1, 0, None, 0), Export(9, None), ((), {}))
    value = as_users(reply.value)
    assert isinstance(value, mirror.PerReplica)
    assert list(map(int, value.values)) == [0, 1]


class OddError(Exception):
    """Its constructor does not take its `args`."""

    def __init__(self, name, *, value):
        super().__init__(f"{name} is {value}")
        self.value = value


def raise_odd_error():
    raise OddError("x", value=3)


def raise_(error):
    raise error


def interrupted_group():
    return BaseExceptionGroup("g", [KeyboardInterrupt()])


FAILURES = {
    "file": ((open, "/nonexistent/file"), FileNotFoundError, "/nonexistent/file"),
    "text": ((bytes.decode, b"\xff"), UnicodeDecodeError, "can't decode byte 0xff"),
    "syntax": ((compile, "a b", "some.py", "exec"), SyntaxError, "some.py, line 1"),
    "end": ((next, iter(())), StopIteration, ""),
    "own": ((raise_odd_error,), OddError, "x is 3"),
    "exit": ((sys.exit, 3), RuntimeError, "SystemExit: 3"),
    "canceled": ((raise_, asyncio.CancelledError("c")), RuntimeError, "CancelledError: c"),
    "generator": ((raise_, GeneratorExit("g")), RuntimeError, "GeneratorExit: g"),
    "group": ((raise_, interrupted_group()), RuntimeError, "BaseExceptionGroup: g"),
}


def test_error_of_a_function_says_what_it_said_on_the_worker(subtests):
    for name in FAILURES:
        with subtests.test(msg=name):
            (function, *arguments), kind, text = FAILURES[name]
            error = raised_by(function, *arguments)
            assert type(error) is kind
            assert text in str(error)
            if name == "file":
                assert error.filename == "/nonexistent/file"


LOCAL = mirror.OneDeviceStrategy("/cpu:0")
TX = optax.adam(3e-3)
DATA = batches([8, 8, 6])


def test_parts_of_a_step_make_the_update_of_the_whole_batch(subtests):
    for num_devices in [1, 2]:
        with subtests.test(num_devices=num_devices):
            model, optimizer = create(LOCAL, TX)
            training = Training(model, optimizer, num_devices)
            for batch in DATA:
                cuts = (slice(0, 4), slice(4, None))
                for i, rows in enumerate(cuts):
                    reply = training.part(jax.tree.map(lambda x, r=rows: x[r], batch), i, 2)
                    assert isinstance(reply, Result), reply
                training.end_step(2)
            training.collect()
            reference, _ = on_replicas(1, TX, DATA)
            assert largest_difference(arrays(model, optimizer), arrays(*reference)) < 1e-5
            assert int(optimizer.step[...]) == 3


def test_repeated_part_draws_the_same_noise_and_other_parts_do_not():
    model, optimizer = create(LOCAL, TX, has_noise="dropout")
    training = Training(model, optimizer)
    values = [float(training.part(DATA[0], part, 2).value) for part in (0, 0, 1)]
    assert values[0] == values[1] != values[2]


def test_pushes_of_a_failed_step_are_not_those_of_the_next():
    model, optimizer = create(LOCAL, TX)
    training = Training(model, optimizer)
    training.part(batches([8], seed=9)[0], num_parts=2, task=0)  # its other part fails: no commit
    training.part(DATA[0], task=1)
    training.end_step(task=1)
    training.collect()
    reference, _ = on_replicas(1, TX, DATA[:1])
    assert largest_difference(arrays(model, optimizer), arrays(*reference)) < 1e-5


def test_step_of_one_part_is_committed_with_the_pull_of_the_next():
    model, optimizer = create(LOCAL, TX)
    training = Training(model, optimizer)
    for number, batch in enumerate(DATA):
        assert training.part(batch).is_committed
        training.end_step()
        assert {store.statistics()["pulls"] for store in training.stores} == {2 + number}
    training.collect()
    reference, _ = on_replicas(1, TX, DATA)
    assert largest_difference(arrays(model, optimizer), arrays(*reference)) < 1e-5
    assert not training.part(DATA[0], 0, 2).is_committed


@pytest.mark.parametrize("server", [0, 1])
def test_result_of_a_step_survives_the_loss_of_its_worker_after_the_commit(server, monkeypatch):
    model, optimizer = create(LOCAL, TX)
    training = Training(model, optimizer)
    unreached, pull = training.stores[server], training.stores[server].pull
    with monkeypatch.context() as lost:
        lost.setattr(unreached, "pull", lambda *args: None if args[1] else pull(*args))
        value = training.part(DATA[0]).value
    assert unreached.statistics()["version"] == 0
    training.worker._ahead.clear()  # as in a new process
    repeated = training.part(DATA[0])
    assert repeated.value == value
    assert not repeated.is_committed
    training.end_step()
    training.part(DATA[1])
    training.end_step()
    training.collect()
    reference, _ = on_replicas(1, TX, DATA[:2])
    assert largest_difference(arrays(model, optimizer), arrays(*reference)) < 1e-5


@pytest.mark.parametrize("weight", [float("nan"), float("inf"), -1.0])
def test_bad_weights_are_not_pushed(weight):
    training = Training(*create(LOCAL, TX))
    raised = training.part(DATA[0], weight=weight)
    assert f"must sum to a non-negative number, got {weight}" in raised.text
    assert training.stores[0].statistics()["pushes"] == 0


def test_late_part_and_lost_server_are_answers():
    model, optimizer = create(LOCAL, TX)
    training = Training(model, optimizer)
    training.part(DATA[0])
    training.end_step()
    training.part(DATA[1])
    training.version -= 1
    late = training.part(DATA[0], 1, 2)
    assert late == Result(None)
    training.version += 1
    training.stores[1] = training.worker._servers.stores[1] = Store()
    lost = pickle.loads(pickle.dumps(training.part(DATA[1])))
    assert isinstance(lost, LostError)
    assert lost.index == 1


def require_raised(step, kind, **texts):
    model, optimizer = create(LOCAL, TX)
    training = Training(model, optimizer, step=step)
    reply = training.part(DATA[0])
    assert isinstance(reply, Raised)
    with raises(kind, **texts):
        raise kind(reply.text)


def test_wrong_steps_are_rejected():
    def forgot(model, optimizer, batch):
        optimizer.update(model, nnx.grad(lambda m: (m(batch["x"]) ** 2).mean())(model))

    def twice(model, optimizer, batch):
        train_step(model, optimizer, batch)
        train_step(model, optimizer, batch)

    def other_dtype(model, optimizer, batch):
        optimizer.update(model, jax.tree.map(lambda x: x.astype("bfloat16"), nnx.state(model)))

    def some(model, optimizer, batch):
        optimizer.update(model, nnx.state(model.layers[0], nnx.Param))

    def extra(model, optimizer, batch):
        optimizer.update(model, nnx.state(model), value=1.0)

    require_raised(forgot, ValueError, values="optimizer.gradients.layers.0.bias")
    require_raised(twice, ValueError, names="twice", values=2)
    require_raised(other_dtype, TypeError, values=("bfloat16[32]", "float32[32]"))
    require_raised(some, ValueError, values=4)
    require_raised(extra, TypeError, values="'value'")


class Counted(Net):
    """A network with a variable that parameter servers do not hold."""

    def __init__(self, rngs):
        super().__init__(rngs)
        self.calls = nnx.Variable(np.int32(0))
        self.scale = np.float32(1)

    def __call__(self, x):
        self.calls[...] += 1
        return super().__call__(x)


def test_changed_integer_is_named():
    with LOCAL.scope():
        model = Counted(nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, TX, wrt=nnx.Param)
    reply = Training(model, optimizer).part(DATA[0])
    assert isinstance(reply, Raised)
    assert "calls" in reply.text


class Projected(Net):
    """A network with a random key that is not of an nnx.Rngs."""

    def __init__(self, rngs):
        super().__init__(rngs)
        self.key = nnx.Variable(jax.random.key(5))


def draw(model, optimizer, batch, mask=None):
    train_step(model, optimizer, batch)
    return jax.random.normal(model.key[...], (3,))


def split(model, optimizer, batch, mask=None):
    model.key[...], _ = jax.random.split(model.key[...])
    return train_step(model, optimizer, batch)


def test_key_that_is_not_of_rngs_is_the_same_in_all_parts_and_updates():
    """As with MirroredStrategy."""
    with LOCAL.scope():
        model = Projected(nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, TX, wrt=nnx.Param)
    training = Training(model, optimizer, step=draw)
    for _ in range(2):
        for part in (0, 1):
            reply = training.part(DATA[0], part, 2)
            np.testing.assert_array_equal(reply.value, jax.random.normal(jax.random.key(5), (3,)))
        training.end_step(2)
    reply = Training(model, optimizer, step=split).part(DATA[0])
    assert isinstance(reply, Raised)
    assert "key" in reply.text
    assert "nnx.Rngs" in reply.text


def test_objects_that_servers_cannot_hold_are_rejected():
    class Measured(Net):
        def __init__(self, rngs):
            super().__init__(rngs)
            self.metric = nnx.metrics.Average()

    class Adam(nnx.Optimizer):
        pass

    model = Measured(nnx.Rngs(0))
    with raises(ValueError, names="metric.count"):
        TrainingObjects(model, nnx.Optimizer(model, TX, wrt=nnx.Param))
    model = Net(nnx.Rngs(0))
    with raises(TypeError, names="optimizer", values="Adam"):
        TrainingObjects(model, Adam(model, TX, wrt=nnx.Param))
    with raises(ValueError, values="Net"):
        TrainingObjects(model, nnx.Optimizer(model, TX, wrt=nnx.BatchStat))


def test_objects_notice_a_list_that_changes_in_place():
    """Workers have a copy."""
    model = Net(nnx.Rngs(0))
    model.sizes = [1]
    objects = TrainingObjects(model, nnx.Optimizer(model, TX, wrt=nnx.Param))
    assert objects.has_same_structure()
    model.sizes.append(2)
    assert not objects.has_same_structure()


def test_objects_are_written_as_they_are_read(subtests):
    for row, tx in enumerate(
        [
            TX,
            optax.sgd(0.1, momentum=0.9),
            optax.chain(optax.clip(1.0), optax.adamw(1e-3)),
            optax.MultiSteps(optax.adam(1e-3), 2),
            optax.inject_hyperparams(optax.adam)(1e-3),
        ]
    ):
        with subtests.test(row=row):
            model, optimizer = create(LOCAL, tx, has_noise="norm")
            (trained, wanted), _ = on_replicas(1, tx, DATA[:2], has_noise="norm")
            source, target = TrainingObjects(trained, wanted), TrainingObjects(model, optimizer)
            target.write(source.read(), source.read_optimizer(), source.step)
            assert are_equal(arrays(model, optimizer), arrays(trained, wanted))
            assert target.has_same_structure()
            model.eval()
            assert not target.has_same_structure()
