"""Metrics merged over replicas are the metrics of one device that has seen all batches."""

# mypy: disable-error-code="override"

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

from mirror._src.program.additive import Dependence, dependence
from mirror._src.run.nnx.metrics import Additive, Moments, Update, merge, merge_rule

INDEPENDENT, ADDED, OTHER = Dependence
SIZES = [3, 1, 4, 2, 4, 1, 3, 2]


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


def stepped(metric, change, replicas):
    """Returns, per replica, the states before and after a change, and their dependence."""
    before = states(metric)

    def program(before, batch):
        copy = nnx.clone(metric)
        write(copy, before)
        change(copy, batch)
        return states(copy)

    indices = range(len(before))
    closed, after = jax.make_jaxpr(program, return_shape=True)(before, replicas[0])
    assert list(after) == sorted(before)
    how = dependence(closed, indices, indices)
    named = dict(zip(sorted(before), how, strict=True))
    return [(before, program(before, batch), named) for batch in replicas]


def trees_stacked(trees):
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


def merged(steps):
    """Returns the merged states of each metric, from the results of `stepped`.

    Args:
        steps: For each metric, a list with one step per replica.
    """
    rules = [merge_rule(metric) for metric, _ in steps]
    before = [replicas[0][0] for _, replicas in steps]
    afters = [trees_stacked([after for _, after, _ in replicas]) for _, replicas in steps]
    dependences = [replicas[0][2] for _, replicas in steps]
    calls = []

    def psum(arrays):
        calls.append(len(arrays))
        return lax.psum(arrays, "replica")

    def one_replica(afters):
        updates = map(Update, rules, before, afters, dependences)
        return merge(list(updates), psum)

    return jax.vmap(one_replica, axis_name="replica", out_axes=None)(afters), calls


def cut(batch, sizes):
    ends = np.cumsum(sizes)[:-1]
    parts = {name: np.split(leaf, ends) for name, leaf in batch.items()}
    return [{k: jnp.asarray(v[i]) for k, v in parts.items()} for i in range(len(sizes))]


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


def assert_same(found, expected, scale=20.0):
    """Checks that the states are equal; Welford's up to rounding at the `scale` of its values."""
    for name, value in expected.items():
        assert found[name].dtype == value.dtype
        if name in ("mean", "m2"):
            # The deviations grow with the number of values, and with the squares of them.
            near = 1e-6 * scale * (1 if name == "mean" else 200)
            np.testing.assert_allclose(found[name], value, rtol=1e-5, atol=near, err_msg=name)
        else:
            np.testing.assert_array_equal(found[name], value, name)


NUM_REPLICAS = [("updated", 1), ("updated", 2), ("updated", 8), ("reset_and_updated", 8)]


@pytest.mark.parametrize(("change", "num_replicas"), [(c, 3) for c in CHANGES] + NUM_REPLICAS)
@pytest.mark.parametrize("kind", METRICS)
def test_merged_metrics_equal_those_of_one_device(kind, change, num_replicas):
    metric = METRICS[kind]()
    alone = nnx.clone(metric)
    for step in range(3):
        sizes = SIZES[:num_replicas]
        whole = batches(step, sum(sizes))
        replicas = cut(whole, sizes)
        steps = stepped(metric, CHANGES[change], replicas)
        assert merge_rule(metric).unmergeable(steps[0][2]) == []
        (found,), _ = merged([(metric, steps)])
        write(metric, found)
        if change == "reset_and_updated":
            alone.reset()
        alone.update(**whole)
        if change == "updated_twice":
            for batch in replicas:
                alone.update(**half(batch))
    assert_same(states(metric), states(alone))


@pytest.mark.parametrize("num_replicas", [2, 8])
@pytest.mark.parametrize("mean", [0.0, 1e4])
@pytest.mark.parametrize("resets", [False, True])
def test_welford_merges_moments_over_many_steps(mean, resets, num_replicas):
    """Merging is as exact as one device, even if the mean is far from zero."""
    metric = nnx.metrics.Welford()
    alone = nnx.clone(metric)
    seen = []
    for step in range(12):
        whole = batches(step, 16 * num_replicas, mean)
        change = reset_and_updated if resets else updated
        replicas = cut(whole, [16] * num_replicas)
        (found,), _ = merged([(metric, stepped(metric, change, replicas))])
        write(metric, found)
        change(alone, whole)
        seen = [*([] if resets else seen), *whole["values"].astype(np.float64)]
    assert found["count"] == len(seen)
    error = lambda m: abs(m.compute().standard_deviation - np.std(seen))  # noqa: E731
    assert error(metric) <= max(4 * error(alone), 2e-6 * (mean + 20))
    np.testing.assert_allclose(found["mean"], np.mean(seen), rtol=1e-6, atol=1e-4)


def test_welford_supports_replicas_without_examples():
    """Replicas with an empty batch, which makes Flax's own states NaN, change nothing."""
    metric = nnx.metrics.Welford()
    nothing = states(metric)
    empty = jax.tree.map(lambda value: jnp.where(value == 0, jnp.nan, value), nothing)
    empty["count"] = nothing["count"]
    how = {"count": ADDED, "mean": OTHER, "m2": ADDED}
    (found,), _ = merged([(metric, [(nothing, empty, how), (nothing, empty, how)])])
    assert_same(found, nothing)

    metric.update(values=jnp.array([1.0, 4.0]))
    before = states(metric)
    after = {**before, "mean": jnp.array(jnp.nan), "m2": jnp.array(jnp.nan)}
    changed = stepped(metric, updated, [{"values": jnp.array([7.0, 9.0])}])[0]
    (found,), _ = merged([(metric, [(before, after, how), changed])])
    assert_same(found, changed[1])


def test_welford_of_equal_values_has_zero_deviation():
    """Rounded means do not give negative squared deviations, whose root would be NaN."""
    near = np.nextafter(np.float32(0.1), np.float32(1))
    before = {"count": jnp.array(24), "mean": jnp.float32(0.1), "m2": jnp.float32(0)}
    after = {"count": jnp.array(27), "mean": jnp.array(near), "m2": jnp.float32(0)}
    how = {"count": ADDED, "mean": OTHER, "m2": ADDED}
    (found,), _ = merged([(nnx.metrics.Welford(), [(before, after, how)] * 8)])
    assert found["m2"] == 0
    np.testing.assert_allclose(found["mean"], 0.1, rtol=1e-6)


def test_update_by_some_replicas_only_is_merged():
    metric = nnx.metrics.Average()
    metric.update(values=jnp.array([3.0, 4.0]))
    replicas = [{"values": jnp.array(v)} for v in ([1.0, 2.0], [np.nan, 3.0], [5.0, -1.0])]
    (found,), _ = merged([(metric, stepped(metric, updated_if_finite, replicas))])
    assert found == {"total": 14.0, "count": 6}


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (np.uint32(2**32 - 3), np.uint32(2**32 - 1), np.uint32(1)),
        (np.uint8(250), np.uint8(4), np.uint8(14)),
        (np.int32(2**24), np.int32(2**24 + 1), np.int32(2**24 + 2)),
        (np.int32(7), np.int32(-1), np.int32(-9)),
        (np.float32(2**20), np.float32(2**20 + 0.5), np.float32(2**20 + 1)),
        (jnp.bfloat16(1), jnp.bfloat16(1 + 2**-7), jnp.bfloat16(1 + 2**-6)),
        (np.float16(60000), np.float16(30000), np.float16(0)),
        (np.float32(np.inf), np.float32(np.inf), np.float32(np.inf)),
        (np.float32(1), np.float32(-np.inf), np.float32(-np.inf)),
        (np.float32(1), np.float32(np.nan), np.float32(np.nan)),
        (np.complex64(1j), np.complex64(2j + 1), np.complex64(3j + 2)),
    ],
)
def test_equal_increments_of_two_replicas_are_added(before, after, expected):
    step = {"total": jnp.asarray(before)}, {"total": jnp.asarray(after)}, {"total": ADDED}
    ((found,), _) = merged([(nnx.metrics.Average(), [step, step])])
    assert found["total"].dtype == before.dtype
    np.testing.assert_array_equal(found["total"], expected)


def test_increments_that_overflow_their_dtype_are_merged():
    before = {"total": jnp.float16(60000)}
    steps = [(before, {"total": jnp.float16(v)}, {"total": ADDED}) for v in (-60000, 64000)]
    (found,), _ = merged([(nnx.metrics.Average(), steps)])
    assert found["total"] == jnp.float16(-56000)


@pytest.mark.parametrize("dtype", ["int32", "uint8", "bfloat16", "float32"])
def test_reset_sum_is_merged(dtype):
    values = [jnp.array(v, dtype) for v in (100, 50, 70)]
    before = {"total": jnp.array(3, dtype)}
    steps = [(before, {"total": value}, {"total": INDEPENDENT}) for value in values]
    (found,), _ = merged([(nnx.metrics.Average(), steps)])
    assert found["total"].dtype == dtype
    assert found["total"] == jnp.array(220, dtype)


@pytest.mark.parametrize(
    ("kinds", "calls"),
    [
        (["average"], [2]),
        (["average", "accuracy", "by_class"], [6]),
        (["welford"], [2, 1]),
        (["average", "welford", "accuracy", "welford"], [8, 2]),
    ],
)
def test_all_metrics_share_their_collectives(kinds, calls):
    metrics = [METRICS[kind]() for kind in kinds]
    replicas = cut(batches(0, 6), [2, 4])
    found, made = merged([(m, stepped(m, updated, replicas)) for m in metrics])
    assert made == calls
    for metric, after in zip(metrics, found, strict=True):
        updated(metric, batches(0, 6))
        assert_same(after, states(metric))


def test_unchanged_metric_needs_no_collective():
    assert merge([], lambda arrays: pytest.fail("called")) == []


@pytest.mark.parametrize(
    ("metric", "rule"),
    [
        (nnx.metrics.Average(), Additive),
        (nnx.metrics.Accuracy(), Additive),
        (ByClass(), Additive),
        (nnx.metrics.Welford(), Moments),
        (Exponential(), None),
        (Custom(), None),
        (nnx.MultiMetric(loss=nnx.metrics.Average()), None),
        (nnx.Param(jnp.zeros(2)), None),
        (None, None),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, type) else value.__name__,
)
def test_merge_rule_depends_on_the_metric(metric, rule):
    found = merge_rule(metric)
    assert found is None if rule is None else type(found) is rule


@pytest.mark.parametrize(
    ("metric", "change", "states_refused"),
    [
        (Halved(), updated, ["total"]),
        (Extremes(), updated, ["largest"]),
        (nnx.metrics.Average(), reset_sometimes, ["count", "total"]),
        (nnx.metrics.Welford(), reset_sometimes, ["count", "m2"]),
        (nnx.metrics.Welford(), decayed, ["m2"]),
        (nnx.metrics.Welford(), mean_replaced, ["mean"]),
        (nnx.metrics.Welford(), count_reset, ["m2", "mean"]),
        (nnx.metrics.Average(), count_reset, []),
    ],
)
def test_unmergeable_states_are_rejected(metric, change, states_refused):
    ((_, _, how),) = stepped(metric, change, cut(batches(0, 4), [4]))
    assert sorted(merge_rule(metric).unmergeable(how)) == states_refused


def test_unknown_state_of_a_welford_metric_is_rejected():
    how = {"count": ADDED, "mean": OTHER, "m2": ADDED, "largest": ADDED}
    assert Moments().unmergeable(how) == ["largest"]


def test_increments_may_depend_on_other_states():
    """The increments of the replicas are summed, even if they depend on another state."""

    def change(metric, batch):
        metric.update(values=batch["values"] * (metric.count[...] + 1))

    metric = nnx.metrics.Average()
    metric.update(values=jnp.ones(4))
    replicas = [{"values": jnp.arange(3.0)}, {"values": jnp.arange(2.0)}]
    (found,), _ = merged([(metric, stepped(metric, change, replicas))])
    assert found == {"total": 4 + 5 * 4, "count": 4 + 5}
