"""Metrics merged over replicas are the metrics of one device that has seen all batches."""

# mypy: disable-error-code="override"

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import mirror
from mirror import PerReplica
from tests.support import inside
from tests.support.messages import raises
from tests.support.steps import replica_id
from tests.support.strategies import EXECUTORS, cpu_strategy
from tests.support.tables import Made, rows

pytestmark = pytest.mark.filterwarnings("ignore:.*compiled")  # each row has its own step


class Halved(nnx.metrics.Average):
    def update(self, **kwargs):
        self.total[...] = self.total[...] * 0.5
        super().update(**kwargs)


class Extremes(nnx.metrics.Average):
    """An average that also keeps the largest value."""

    def __init__(self):
        super().__init__()
        self.largest = nnx.metrics.MetricState(jnp.array(-jnp.inf))

    def update(self, *, values, **_):
        super().update(values=values)
        self.largest[...] = jnp.maximum(self.largest[...], values.max())


class ByClass(nnx.metrics.Average):
    """An average whose states are vectors: one total and one count per class."""

    def __init__(self):
        self.argname = "values"
        self.total = nnx.metrics.MetricState(jnp.zeros(3))
        self.count = nnx.metrics.MetricState(jnp.zeros(3, jnp.uint8))

    def update(self, *, values, labels, **_):
        self.total[...] = self.total[...].at[labels].add(values)
        self.count[...] = self.count[...].at[labels].add(1)

    def reset(self):
        self.total[...] = jnp.zeros(3)
        self.count[...] = jnp.zeros(3, jnp.uint8)


class Exponential(nnx.metrics.Welford):
    def update(self, *, values, **_):
        super().update(values=jnp.exp(values))


class Custom(nnx.metrics.Metric):
    def __init__(self):
        self.total = nnx.metrics.MetricState(jnp.array(0.0))

    def update(self, *, values, **_):
        self.total[...] += values.sum()

    def reset(self):
        self.total[...] = jnp.array(0.0)

    def compute(self):
        return self.total[...]


def updated(metric, batch):
    metric.update(**batch)


def half(batch):
    return jax.tree.map(lambda leaf: leaf[::-1][: len(leaf) // 2 + 1], batch)


def updated_twice(metric, batch):
    metric.update(**batch)
    metric.update(**half(batch))


def reset_and_updated(metric, batch):
    metric.reset()
    metric.update(**batch)


def updated_in_parts(metric, batch):
    """Microbatches, one example each, in a loop."""

    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    def body(metric, example):
        metric.update(**jax.tree.map(lambda leaf: leaf[None], example))
        return metric

    body(metric, batch)


def updated_if_finite(metric, batch):
    before = states(metric)
    metric.update(**batch)
    finite = jnp.isfinite(batch["values"].sum())
    write(metric, jax.tree.map(functools.partial(jnp.where, finite), states(metric), before))


def reset_sometimes(metric, batch):
    is_first = batch["values"][0] > 0
    write(metric, {name: jnp.where(is_first, 0, v) for name, v in states(metric).items()})
    metric.update(**batch)


def decayed(metric, batch):
    metric.m2[...] *= 0.9
    metric.update(**batch)


def mean_replaced(metric, batch):
    metric.update(**batch)
    metric.mean[...] = batch["values"].mean()


def count_reset(metric, batch):
    metric.count[...] = jnp.zeros_like(metric.count[...])
    metric.update(**batch)


def states(metric):
    """Returns the arrays of a metric, by attribute name."""
    found = vars(metric).items()
    return {name: s[...] for name, s in found if isinstance(s, nnx.metrics.MetricState)}


def write(metric, values):
    for name, value in values.items():
        getattr(metric, name)[...] = value


def cut(batch, sizes):
    """Returns the batch of all replicas as per-replica arrays."""
    ends = np.cumsum(sizes)[:-1]
    return {name: PerReplica(np.split(leaf, ends)) for name, leaf in batch.items()}


def parts(batch, sizes):
    """Returns the batch of each replica."""
    own = cut(batch, sizes)
    return [{k: jnp.asarray(v.values[i]) for k, v in own.items()} for i in range(len(sizes))]


def batches(seed, num, mean=0.0):
    draw = np.random.default_rng(seed)
    logits = draw.integers(-3, 4, (num, 3)).astype(np.float32)
    labels = draw.integers(0, 3, num).astype(np.int32)
    values = draw.integers(-20, 20, num).astype(np.float32) + np.float32(mean)
    return {"values": values, "logits": logits, "labels": labels}


METRICS = {
    "average": nnx.metrics.Average,
    "accuracy": nnx.metrics.Accuracy,
    "by_class": ByClass,
    "welford": nnx.metrics.Welford,
}
CHANGES = {
    "updated": updated,
    "updated_twice": updated_twice,
    "reset_and_updated": reset_and_updated,
    "updated_in_parts": updated_in_parts,
    "updated_if_finite": updated_if_finite,
}


def assert_same(found, expected, msg="", scale=20.0):
    """Checks that the states are equal; Welford's up to rounding at the `scale` of its values."""
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, msg
        if name in ("mean", "m2"):
            # The deviations grow with the number of values, and with the squares of them.
            near = 1e-6 * scale * (1 if name == "mean" else 200)
            np.testing.assert_allclose(found[name], value, rtol=1e-5, atol=near, err_msg=msg)
        else:
            np.testing.assert_array_equal(found[name], value, f"{msg} {name}")


@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param([3] * 3, marks=pytest.mark.slow),
        *(pytest.param(s, marks=pytest.mark.nightly) for s in ([2] * 2, [3], [2] * 8)),
    ],
    ids=str,
)
def test_merged_metrics_equal_those_of_one_device(sizes):
    """All kinds of metrics, changed in all ways, in one step."""
    table = [(kind, change) for change in CHANGES for kind in METRICS]
    strategy = cpu_strategy(len(sizes))
    with strategy.scope():
        metrics = tuple(METRICS[kind]() for kind, _ in table)
    alone = [METRICS[kind]() for kind, _ in table]

    def step(metrics, batch):
        for metric, (_, change) in zip(metrics, table, strict=True):
            CHANGES[change](metric, batch)

    for seed in range(3):
        whole = batches(seed, sum(sizes))
        strategy.run(step, (metrics, cut(whole, sizes)))
        for metric, (_, change) in zip(alone, table, strict=True):
            if change == "reset_and_updated":
                metric.reset()
            metric.update(**whole)
            if change == "updated_twice":
                for batch in parts(whole, sizes):
                    metric.update(**half(batch))
    for found, expected, row in zip(metrics, alone, table, strict=True):
        assert_same(states(found), states(expected), str(row))
    strategy.check_mirrored(metrics)


@rows("strategy", Made(EXECUTORS))
def test_every_executor_merges(strategy):
    with strategy.scope():
        metric = nnx.metrics.Welford()
    strategy.run(updated, (metric, cut(batches(0, 6), [3, 3])))
    alone = nnx.metrics.Welford()
    alone.update(**batches(0, 6))
    assert_same(states(metric), states(alone))


@pytest.mark.slow
@rows("n", [2, 8])
def test_welford_merges_moments_over_many_steps(n):
    """Merging is as exact as one device, even if the mean is far from zero."""
    strategy = cpu_strategy(n)
    table = [(mean, change) for mean in (0.0, 1e4) for change in (updated, reset_and_updated)]
    metrics = tuple(nnx.metrics.Welford() for _ in table)
    alone = tuple(nnx.metrics.Welford() for _ in table)
    seen: list[list[float]] = [[] for _ in table]

    def step(metrics, data):
        for metric, batch, (_, change) in zip(metrics, data, table, strict=True):
            change(metric, batch)

    for seed in range(12):
        data = [batches(seed, 16 * n, mean) for mean, _ in table]
        strategy.run(step, (metrics, [cut(whole, [16] * n) for whole in data]))
        step(alone, data)
        for i, (_, change) in enumerate(table):
            values = data[i]["values"].astype(np.float64).tolist()
            seen[i] = values if change is reset_and_updated else seen[i] + values
    for metric, other, values, (mean, _) in zip(metrics, alone, seen, table, strict=True):
        assert metric.count[...] == len(values)
        error, least = (
            abs(m.compute().standard_deviation - np.std(values)) for m in (metric, other)
        )
        assert error <= max(4 * least, 2e-6 * (mean + 20))
        np.testing.assert_allclose(metric.mean[...], np.mean(values), rtol=1e-6, atol=1e-4)


@pytest.mark.filterwarnings("ignore:scatter inputs have incompatible types")  # Flax's update
def test_average_of_wider_values_than_its_states(two):
    metric, values = nnx.metrics.Average(), np.arange(8.0)

    def step(metric, values):
        metric.update(values=values.astype(np.float64))

    with jax.enable_x64(True):
        two.run(step, (metric, cut({"values": values}, [4, 4])["values"]))
    assert metric.total[...].dtype == np.float32
    assert metric.compute() == values.mean()


def test_welford_supports_replicas_without_examples(two):
    """Replicas with an empty batch, which makes Flax's own states NaN, change nothing."""
    metric, alone = nnx.metrics.Welford(), nnx.metrics.Welford()

    def step(metric, values):
        metric.update(values=values)

    empty = np.zeros(0, np.float32)
    for values in ([], [1.0, 4.0], []):
        halves = np.split(np.float32(values), 2) if values else [empty, empty]
        two.run(step, (metric, PerReplica(halves)))
    alone.update(values=jnp.array([1.0, 4.0]))
    assert_same(states(metric), states(alone))


def test_welford_of_equal_values_has_zero_deviation(eight):
    """Rounded means do not give negative squared deviations, whose root would be NaN."""
    metric = nnx.metrics.Welford()

    def step(metric, mean):
        metric.count[...] += 3
        metric.mean[...] += mean - metric.mean[...]
        metric.m2[...] += 0.0

    metric.update(values=jnp.full(24, 0.1))
    write(metric, {"mean": jnp.float32(0.1), "m2": jnp.float32(0)})
    near = np.nextafter(np.float32(0.1), np.float32(1))
    eight.run(step, (metric, PerReplica([near] * 8)))
    assert metric.m2[...] == 0
    assert metric.count[...] == 24 + 8 * 3
    np.testing.assert_allclose(metric.mean[...], 0.1, rtol=1e-6)


def test_update_by_some_replicas_only_is_merged():
    metric = nnx.metrics.Average()
    metric.update(values=jnp.array([3.0, 4.0]))
    values = PerReplica([np.float32(v) for v in ([1.0, 2.0], [np.nan, 3.0], [5.0, -1.0])])
    cpu_strategy(3).run(updated_if_finite, (metric, {"values": values}))
    assert states(metric) == {"total": 14.0, "count": 6}


# The total of a metric before the step, what each of two replicas adds, and the total afterwards.
INCREMENTS = [
    (np.uint32(2**32 - 3), np.uint32(2), np.uint32(1)),
    (np.uint8(250), np.uint8(10), np.uint8(14)),
    (np.int32(2**24), np.int32(1), np.int32(2**24 + 2)),
    (np.int32(7), np.int32(-8), np.int32(-9)),
    (np.float32(2**20), np.float32(0.5), np.float32(2**20 + 1)),
    (jnp.bfloat16(1), jnp.bfloat16(2**-7), jnp.bfloat16(1 + 2**-6)),
    (np.float16(60000), np.float16(-30000), np.float16(0)),
    (np.float32(np.inf), np.float32(1), np.float32(np.inf)),
    (np.float32(1), np.float32(-np.inf), np.float32(-np.inf)),
    (np.float32(1), np.float32(np.nan), np.float32(np.nan)),
    (np.complex64(1j), np.complex64(1j + 1), np.complex64(3j + 2)),
]


def average_of(total):
    metric = nnx.metrics.Average()
    metric.total = nnx.metrics.MetricState(jnp.asarray(total))
    return metric


def test_equal_increments_of_two_replicas_are_added(two):
    metrics = tuple(average_of(before) for before, _, _ in INCREMENTS)

    def step(metrics, increments):
        for metric, increment in zip(metrics, increments, strict=True):
            metric.total[...] += increment

    two.run(step, (metrics, [PerReplica([increment] * 2) for _, increment, _ in INCREMENTS]))
    for metric, (before, _, expected) in zip(metrics, INCREMENTS, strict=True):
        assert metric.total.dtype == before.dtype
        np.testing.assert_array_equal(metric.total[...], expected, repr(before))


def test_increments_that_overflow_their_dtype_are_merged(two):
    metric = average_of(np.float16(60000))

    def step(metric, value):
        metric.total[...] += value
        metric.total[...] += value

    two.run(step, (metric, PerReplica([np.float16(-60000), np.float16(2000)])))
    assert metric.total[...] == jnp.float16(-56000)


def test_reset_sum_is_merged():
    dtypes = ["int32", "uint8", "bfloat16", "float32"]
    metrics = tuple(average_of(jnp.array(3, dtype)) for dtype in dtypes)

    def step(metrics, value):
        for metric in metrics:
            metric.total[...] = value.astype(metric.total.dtype)

    cpu_strategy(3).run(step, (metrics, PerReplica([np.float32(v) for v in (100, 50, 70)])))
    for metric, dtype in zip(metrics, dtypes, strict=True):
        assert metric.total.dtype == dtype
        assert metric.total[...] == jnp.array(220, dtype)


def test_all_metrics_share_their_collectives(two):
    """One round of them, and a second one for squared deviations: a buffer per dtype in each."""

    def num_buffers(*kinds):
        metrics = tuple(METRICS[kind]() for kind in kinds)

        def step(metrics, batch):
            for metric in metrics:
                metric.update(**batch)

        return inside.num_all_reduces(two, step, (metrics, cut(batches(0, 6), [3, 3])))

    assert num_buffers("average") == num_buffers("average", "accuracy", "average") == 2
    assert num_buffers("welford") == num_buffers("welford", "average", "accuracy", "welford") == 3


def test_unchanged_metric_needs_no_collective(two):
    metric = nnx.metrics.Average()
    step = lambda metric, x: x + metric.total[...]  # noqa: E731
    assert inside.num_all_reduces(two, step, (metric, PerReplica([1.0, 2.0]))) == 0


def test_metrics_with_other_metrics_inside_are_merged(two):
    metric = nnx.MultiMetric(loss=nnx.metrics.Average("values"))
    two.run(updated, (metric, cut(batches(0, 4), [2, 2])))
    assert metric.compute()["loss"] == batches(0, 4)["values"].mean()


class Largest(nnx.metrics.Welford):
    """Keeps a state that the rule for Welford's does not know."""

    def __init__(self):
        super().__init__()
        self.largest = nnx.metrics.MetricState(jnp.array(0.0))


def largest_counted(metric, batch):
    metric.largest[...] += batch["values"].sum()


UNMERGEABLE = {  # the metric, how it is changed, and its states that the message names
    "halved": (Halved, updated, ["total"]),
    "extremes": (Extremes, updated, ["largest"]),
    "exponential": (Exponential, updated, ["m2", "mean"]),
    "custom": (Custom, updated, ["total"]),
    "reset sometimes": (nnx.metrics.Average, reset_sometimes, ["count", "total"]),
    "Welford reset sometimes": (nnx.metrics.Welford, reset_sometimes, ["count", "m2"]),
    "decayed": (nnx.metrics.Welford, decayed, ["m2"]),
    "mean replaced": (nnx.metrics.Welford, mean_replaced, ["mean"]),
    "Welford count reset": (nnx.metrics.Welford, count_reset, ["m2", "mean"]),
    "unknown state": (Largest, largest_counted, ["largest"]),
}


@rows("make, change, refused", UNMERGEABLE)
def test_unmergeable_states_are_rejected(two, make, change, refused):
    metric = make()
    before = states(metric)
    with raises(mirror.ReplicaDivergenceError, names=[f"metric.{name}" for name in refused]) as e:
        two.run(change, (metric, cut(batches(0, 4), [2, 2])))
    for name in before.keys() - set(refused):
        assert f"metric.{name}:" not in str(e.value)
    assert_same(states(metric), before)


def test_reset_count_is_merged(two):
    metric = nnx.metrics.Average()
    metric.update(values=jnp.ones(4))
    two.run(count_reset, (metric, cut(batches(0, 4), [2, 2])))
    assert metric.count[...] == 4
    assert metric.total[...] == 4 + batches(0, 4)["values"].sum()


def test_increments_may_depend_on_other_states(two):
    """The increments of the replicas are summed, even if they depend on another state."""

    def change(metric, values):
        metric.update(values=values * (metric.count[...] + 1) + 0 * replica_id())

    metric = nnx.metrics.Average()
    metric.update(values=jnp.ones(4))
    two.run(change, (metric, PerReplica([np.arange(3, dtype="f4"), np.arange(3, dtype="f4")])))
    assert states(metric) == {"total": 4 + 5 * 6, "count": 4 + 6}
