"""`strategy.inspect` and `strategy.explain` describe steps with known properties."""

import copy
import dataclasses
import itertools
import json
import pickle
import re
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import mirror
from mirror import PerReplica
from tests.support import inside
from tests.support.messages import assert_message, raises
from tests.support.models import MLP, batches, losses_of, nnx_step
from tests.support.strategies import cpu_strategy
from tests.support.tables import rows

report_module, memory_module, trial_module = inside.explanations()
Explanation, Seconds = report_module.Explanation, report_module.Seconds
Kind, MemoryGroup = memory_module.Kind, memory_module.MemoryGroup
split, IdleTimes, endless = report_module.split, trial_module.IdleTimes, trial_module.endless

SGD = optax.sgd(0.1)


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.first = nnx.Linear(12, 5, rngs=rngs)
        self.norm = nnx.BatchNorm(5, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.drop(self.norm(self.first(x)))


def training(strategy, model_type, tx=SGD):
    with strategy.scope():
        model = model_type(rngs=nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    (batch,) = strategy.distribute_dataset(batches((12,), 1))
    return model, optimizer, batch


def state_of(*objects):
    leaves = jax.tree.leaves(nnx.state(objects))
    keys = [jnp.issubdtype(x.dtype, jax.dtypes.prng_key) for x in leaves]
    return [np.array(x) for x, is_key in zip(leaves, keys, strict=True) if not is_key]


def by_name(rows):
    return {row.name: row for row in rows}


def test_reports_can_be_pickled_and_copied(subtests):
    strategy = cpu_strategy(2)
    arguments = training(strategy, MLP)
    for report in [
        strategy.inspect(nnx_step, arguments),
        strategy.inspect(nnx_step, arguments).equals_one_device,
        strategy.explain(nnx_step, arguments, steps=2),
        strategy.verify(nnx_step, arguments),
    ]:
        for twin in (pickle.loads(pickle.dumps(report)), copy.deepcopy(report)):
            with subtests.test(type(report).__name__):
                assert (twin, repr(twin)) == (report, repr(report))
                for name in ("equals_one_device", "collectives"):
                    assert getattr(twin, name, 0) == getattr(report, name, 0)


# program


def test_report_shows_the_collective_of_each_variable(two):
    arguments = training(two, MLP, optax.adam(1e-3))
    before = state_of(*arguments[:2])
    report = two.inspect(nnx_step, arguments)
    assert report.in_step
    rows = by_name((*report.results, *report.variables))
    for name in ("result", "model.first.kernel", "optimizer.opt_state.0.mu.second.bias"):
        assert rows[name].state == "mirrored"
        assert_message(rows[name].why, names=["models.py", "nnx_step"], values="sum")
    assert rows["model.first.kernel"].value == "float32[12,32]"
    assert_message(rows["optimizer.step"].why, fix="mirrored")
    (collective,) = report.collectives
    assert (collective.kind, collective.op, collective.num_leaves) == ("all-reduce", "sum", 5)
    assert collective.num_bytes == 4 * (12 * 32 + 32 + 32 * 5 + 5 + 1)
    assert (collective.loop, collective.trips) == ("", 1)
    for now, then in zip(state_of(*arguments[:2]), before, strict=True):
        np.testing.assert_array_equal(now, then)


def test_report_shows_statistics_and_keys(two):
    report = two.inspect(nnx_step, training(two, Net))
    rows = by_name(report.variables)
    assert rows["model.norm.mean"].state == "averaged"
    assert_message(rows["model.norm.mean"].why, names="batch['image']", fix="run")
    key = rows["model.drop.rngs.key"]
    assert key.state == "unchanged"
    assert_message(key.why, fix="replica")
    (packed,) = report.collectives
    alone = cpu_strategy(2, cross_device_ops=mirror.AllReduce(pack_bytes=0))
    rows = alone.inspect(nnx_step, training(alone, Net)).collectives
    assert [row.line for row in rows if "run" in row.line] == [rows[-1].line] * 2
    assert packed.num_leaves == len(rows), "run averages the statistics in the same buffer"
    assert report.in_step


def forgetful(model, optimizer, batch):
    def loss_fn(model):
        return losses_of(model(batch["image"]), batch["label"]).mean()

    loss, grads = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, grads)
    return {"loss": loss, "id": mirror.get_replica_context().replica_id_in_sync_group + 1, "n": 3}


def test_report_shows_a_missing_reduction_without_raising(two):
    report = two.inspect(forgetful, training(two, Net))
    assert not report.in_step
    rows = by_name((*report.results, *report.variables))
    assert rows["model.first.kernel"].state == "diverges"
    assert_message(rows["model.first.kernel"].why, names="batch['image']", fix="all-reduce")
    assert_message(rows["result['loss']"].why, names="batch['image']")
    assert "all-reduce" not in rows["result['loss']"].why
    assert rows["result['id']"].state == "per-replica"
    assert_message(rows["result['id']"].why, names=["axis_index", "test_explain.py"])
    assert rows["result['n']"].state == "mirrored"
    (problem,) = report.problems
    names = ["forgetful", "model.first.kernel", "batch['image']"]
    assert_message(problem, names=names, fix='all_reduce("mean", grads)')
    with pytest.raises(mirror.ReplicaDivergenceError) as caught:
        two.run(forgetful, training(two, Net))
    assert str(caught.value) == problem


def ensured(x):
    return mirror.ensure_mirrored({"w": x.mean()})


def hanging(x):
    reduce = mirror.all_reduce
    return jax.lax.cond(x.sum() > 0, lambda: reduce("sum", x.mean()), lambda: 0.0)


def waiting(x):
    test = lambda c: mirror.all_reduce("max", c) + x.sum() < 3  # noqa: E731
    return jax.lax.while_loop(test, lambda c: c + 1, 0.0)


@rows("step", [ensured, hanging, waiting])
def test_report_shows_what_the_proof_rejects(two, step):
    x = PerReplica([np.ones(3, np.float32)] * 2)
    with pytest.raises(mirror.ReplicaDivergenceError) as caught:
        two.run(step, (x,))
    assert two.inspect(step, (x,)).problems == (str(caught.value),)


def test_report_shows_loops_and_kinds_of_collectives(two):
    def step(x):
        context = mirror.get_replica_context()

        def body(total, row):
            return total + jax.lax.pmax(row.sum(), mirror.REPLICA_AXIS), row

        total, _ = jax.lax.scan(body, 0.0, x)
        looped = jax.lax.while_loop(
            lambda c: c < 3, lambda c: jax.lax.pmin(c, mirror.REPLICA_AXIS) + 1, jnp.float32(0)
        )
        return total, looped, context.all_gather(x), jax.lax.ppermute(x, "replica", [(0, 1)])

    x = PerReplica([np.ones((4, 2), np.float32)] * 2)
    report = two.inspect(step, (x,))
    assert [row.in_words for row in report.collectives] == [
        *("all-reduce (max)", "all-reduce (min)", "all-gather", "ppermute")
    ]
    loops = [(row.loop, row.trips) for row in report.collectives[:3]]
    assert loops == [("scan", 4), ("while", None), ("", 1)]
    assert_message(report.collectives[0].often, names="scan", values=4)
    assert_message(report.collectives[1].often, names="while")
    assert_message(report.results[0].why, names="test_explain.py", values="max")
    assert_message(report.results[2].why, names="test_explain.py", fix="all-gathered")
    assert report.results[3].state == "per-replica"
    text = str(report)
    assert report.in_step
    assert report.heading in text
    assert report.collectives[0].often in text
    assert "<table>" in report._repr_html_()


def test_report_of_a_step_without_collectives_is_explicit(two):
    report = two.inspect(lambda x: x + 1, (3.0,))
    assert not report.collectives
    assert_message(str(report), fix="collectives")
    assert report._repr_html_().count("<table>") == 1
    report = two.inspect(forgetful, training(two, Net))
    assert not report.in_step
    assert_message(report.heading, names="forgetful", values=2, fix="run")
    assert "<pre>" in report._repr_html_()


def test_report_shows_captured_variables(two):
    with two.scope():
        total = mirror.Variable(0.0, name="total", aggregation="sum")
        own = mirror.Variable(0.0, name="own", synchronization="on_read", aggregation="sum")

    def step(x):
        total.assign_add(x.sum())
        own.assign_add(x.sum())

    x = PerReplica([np.ones(3, np.float32)] * 2)
    rows = by_name(two.inspect(step, (x,)).variables)
    assert rows["total"].state == "mirrored"
    assert_message(rows["own"].why, fix="synchronization='on_read'")
    assert float(total[...]) == 0.0


def test_reports_require_the_cross_replica_context(two):
    def inside(method):
        with raises(RuntimeError, names=f"strategy.{method}"):
            getattr(two, method)(ensured, (1.0,))

    for method in ("inspect", "explain"):
        two.run(lambda method=method: inside(method))
        with raises(TypeError, names="fn", values=[3, "int"], fix=f"strategy.{method}(step, args)"):
            getattr(two, method)(3)


# explain


class Slow:
    """Slow batches."""

    def __init__(self, secs):
        self.secs = secs

    def __iter__(self):
        for batch in batches((12,), 4):
            time.sleep(self.secs)
            yield batch


class SlowCollective(mirror.CrossDeviceOps):
    """A slow network."""

    def reduce_implementation(self, op, values):
        time.sleep(0.03)
        return super().reduce_implementation(op, values)


def on(strategy, rows):
    return inside.on_replicas(PerReplica(rows), strategy)


def input_bound():
    strategy = cpu_strategy(2)
    model, optimizer, _ = training(strategy, MLP)
    data = strategy.distribute_dataset(Slow(0.03))
    return strategy.explain(nnx_step, (model, optimizer), data=data, steps=5)


def dispatch_bound():
    strategy = cpu_strategy(2)
    with strategy.scope():
        leaves = [jnp.ones(3) for _ in range(400)]
    return strategy.explain(lambda leaves: [x + 1 for x in leaves], (leaves,), steps=15)


def communication_bound():
    strategy = cpu_strategy(2, cross_device_ops=SlowCollective())
    with strategy.scope():
        kernel = jnp.ones((500, 500))

    def step(kernel, x):
        grads = jax.grad(lambda kernel: ((x @ kernel) ** 2).mean())(kernel)
        return kernel - mirror.all_reduce("mean", grads)

    example = on(strategy, [np.ones((1, 500), np.float32)] * 2)
    return strategy.explain(step, (kernel, example), steps=5)


def compute_bound():
    strategy = cpu_strategy(2)
    with strategy.scope():
        kernel = jnp.eye(256)

    def step(kernel, x):
        for _ in range(8):
            x = jnp.tanh(x @ kernel)
        return mirror.all_reduce("mean", x.mean())

    return strategy.explain(
        step, (kernel, on(strategy, [np.ones((1024, 256), np.float32)] * 2)), steps=5
    )


BOUND: dict[str, tuple[Any, list[Any], Any]] = {
    "input": (input_bound, [], "prefetch"),
    "dispatch": (dispatch_bound, [400], "steps_per_execution"),
    "communication": (communication_bound, [1, "976.6 KiB"], "batch"),
    "compute": (compute_bound, [], ()),
}


@pytest.mark.nightly  # what dominates depends on the machine
@rows("bound", list(BOUND))
def test_explain_finds_the_bottleneck_and_its_parts_add_up(bound):
    measure, values, fix = BOUND[bound]
    found = measure()
    assert found.bound == bound, str(found)
    share = found.shares[bound] + (found.shares["transfer"] if bound == "input" else 0.0)
    values = [*values, f"{share:.0%}"]
    assert_message(found.verdict, names=f"{bound}-bound", values=values, fix=fix)
    assert sum(found.secs) == pytest.approx(found.wall_secs, rel=0.1)
    assert min(found.secs) >= 0
    if bound in ("communication", "compute"):
        assert found.speedup > 0
    again = json.loads(json.dumps(found.to_dict()))
    assert again["bound"] == bound
    assert sum(again["shares"].values()) == pytest.approx(1)
    assert again["memory"]["peak_bytes"] == found.memory.peak_bytes > 0


@pytest.mark.slow
def test_explain_does_not_change_state(two):
    with two.scope():
        count = mirror.Variable(0.0, name="count", aggregation="sum")
    model, optimizer, batch = training(two, MLP)

    def step(model, optimizer, batch):
        count.assign_add(1.0)
        return nnx_step(model, optimizer, batch)

    before = state_of(model, optimizer, count)
    found = two.explain(step, (model, optimizer), {"batch": batch}, steps=2)
    assert found.speedup is not None
    for now, then in zip(state_of(model, optimizer, count), before, strict=True):
        np.testing.assert_array_equal(now, then)
    two.run(step, (model, optimizer), {"batch": batch})
    two.check_mirrored((model, optimizer))
    assert float(count[...]) == 2.0


def test_explain_counts_host_arrays_as_transfers(two):
    def idle(*args):
        trial = trial_module.Trial(two._runner, lambda *xs: sum(xs), args, {})
        trial.warm_up(())
        return trial.elsewhere, trial_module.idle_times(endless(None), [trial], 2)[0].transfer

    host = np.ones((300, 300), np.float32)
    for args in [(host,), (PerReplica([host] * 2),), (PerReplica([host] * 2), 1.0)]:
        elsewhere, secs = idle(*args)
        assert elsewhere
        assert secs > 1e-5
    placed = two._replicas.mirror(host)
    assert not idle(placed, on(two, [host, host]), 1.0)[0]


UNKNOWN = {  # name: how many replicas, the step, its batch, and what the reason holds
    "no batch": (2, lambda x: x + 1, 3.0, {"fix": "batch"}),
    "one replica": (1, lambda x: x + 1, PerReplica([np.ones(4)]), {"fix": "replica"}),
    "a fixed size": (
        *(2, lambda x: x + jnp.ones(4), PerReplica([np.ones(4)] * 2)),
        {"values": "(8,)", "fix": "replica"},  # the whole batch has 8 rows
    ),
}


@rows("name", list(UNKNOWN))
def test_explain_gives_the_reason_for_an_unknown_speedup(name):
    n, step, x, wanted = UNKNOWN[name]
    found = cpu_strategy(n).explain(step, (x,), steps=1)
    assert found.speedup is None
    assert_message(found.no_speedup_because, **wanted)
    assert found.no_speedup_because in str(found)


@rows(
    "steps, error, values",
    [
        (0, ValueError, [0]),
        (2.5, TypeError, [2.5, "float", "integer"]),
        (True, TypeError, [True, "bool", "integer"]),
    ],
)
def test_explain_checks_the_number_of_steps(two, steps, error, values):
    with raises(error, names="steps", values=values):
        two.explain(lambda x: x, (1.0,), steps=steps)


def test_explain_rejects_or_rereads_exhausted_data(two):
    with raises(ValueError, names="steps", values=3):
        two.explain(lambda x: x, (), data=iter([np.ones(2)] * 3), steps=2)
    batches = itertools.islice(endless([np.ones(3), np.ones(2)]), 4)
    shapes = [batch.shape for (batch,) in batches]
    assert shapes == [(3,)] * 4, "other shapes would be compiled for"


SPLITS = [
    # wall, input, transfer, run, dispatch, collective
    (10.0, 6.0, 0.0, 8.0, 2.0, 2.0),
    (10.0, 0.0, 0.0, 8.0, 2.0, 9.0),
    (30.0, 28.0, 1.0, 2.0, 3.0, 0.0),
    (50.0, 1.0, 0.0, 8.0, 1.0, 1.0),
    (5.0, 0.0, 0.0, 8.0, 0.0, 1.0),
    (5.0, 3.0, 0.0, 8.0, 1.0, 1.0),
]


@rows("case", SPLITS)
def test_parts_of_an_explanation_add_up(case):
    wall, read, transfer, run, dispatch, collective = case
    found = split(wall, IdleTimes(read, transfer, run), dispatch, collective)
    assert sum(found) == pytest.approx(wall)
    assert min(found) >= 0


def test_explain_counts_the_longer_of_host_and_devices_in_full():
    assert split(10.0, IdleTimes(6.0, 0.0, 8.0), 2.0, 3.0) == Seconds(6.0, 0.0, 2.0, 1.0, 1.0)
    assert split(10.0, IdleTimes(2.0, 0.0, 8.0), 0.0, 2.0) == Seconds(2.0, 0.0, 0.0, 6.0, 2.0)
    assert split(8.0, IdleTimes(2.0, 0.0, 8.0), 0.0, 2.0) == Seconds(0.0, 0.0, 0.0, 6.0, 2.0)
    assert split(20.0, IdleTimes(2.0, 0.0, 8.0), 0.0, 2.0) == Seconds(4.0, 0.0, 0.0, 12.0, 4.0)


@pytest.fixture
def explanation():
    secs = Seconds(0.004, 0.001, 0.002, 0.002, 0.001)
    weights = MemoryGroup(Kind.PARAMETERS, "model (Param)", 2, 2**20, (2**20, 2**20))
    return Explanation(
        *("train", ("a", "b"), True, 5, 0.01, secs, 7, 1, 2048, 1.5, ""),
        memory=memory_module.MemoryReport(
            "train", ("a", "b"), 2, "cpu", False, (weights,), 0, 3 * 2**20
        ),
        device_memory={"peak": 1024},
    )


@rows(
    "bound, fix",
    [
        ("input", "prefetch"),
        ("dispatch", "steps_per_execution"),
        ("communication", "batch"),
        ("compute", ()),
    ],
)
def test_verdict_names_the_largest_part_and_what_to_do(explanation, bound, fix):
    secs = Seconds(*(0.001 for _ in Seconds._fields))._replace(**{bound: 0.006})
    found = dataclasses.replace(explanation, secs=secs)
    assert found.bound == bound
    share = "70%" if bound == "input" else "60%"  # with the transfer
    assert_message(found.verdict, names=f"{bound}-bound", values=share, fix=fix)
    again = json.loads(json.dumps(found.to_dict()))
    assert again["bound"] == bound
    assert sum(again["shares"].values()) == pytest.approx(1)
    assert again["memory"]["peak_bytes"] == found.memory.peak_bytes > 0


def test_explanation_renders_text_and_html(explanation, tmp_path):
    text = str(explanation)
    assert text.startswith(f"{explanation.heading}\n\n{explanation.verdict}\n\n")
    assert_message(explanation.heading, names="train", values=[2, "10.00 ms"])
    assert_message(explanation.verdict, names="input-bound", values="50%")
    assert_message(text, values="1.50")
    assert re.search(r"peak +1.0 KiB", text)
    assert re.search(r"^temporaries +3.0 MiB +75%", text, re.MULTILINE)
    assert_message(explanation.memory.advice, values=["3.0 MiB", "4.0 MiB"])
    assert explanation.memory.advice in text
    assert explanation._repr_html_().count("<table>") == 3
    figure = explanation.plot(tmp_path / "step.png")
    assert figure.axes[0].get_title() == "input-bound"
    assert (tmp_path / "step.png").stat().st_size > 0


def test_plot_requires_matplotlib(explanation, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    wanted = {"names": "matplotlib", "fix": 'pip install ".[train]"'}
    with raises(ModuleNotFoundError, **wanted):
        explanation.plot()
