"""`equals_one_device`: its verdicts on steps, of which `verify` says the same in numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import mirror
from mirror import testing
from tests.support.messages import raises
from tests.support.strategies import cpu_strategy, each_executor
from tests.support.tables import rows

SIZE, NUM_CLASSES = 12, 4
SYNCED = {"axis_name": mirror.REPLICA_AXIS}


class Net(nnx.Module):
    def __init__(self, rngs, norm=None, rate=0.0):
        self.first = nnx.Linear(6, 8, use_bias=False, rngs=rngs)
        self.norm = None if norm is None else nnx.BatchNorm(8, rngs=rngs, **norm)
        self.dropout = nnx.Dropout(rate, rngs=rngs)
        self.last = nnx.Linear(8, NUM_CLASSES, rngs=rngs)

    def __call__(self, x):
        h = self.first(x)
        h = h if self.norm is None else self.norm(h)
        return self.last(self.dropout(nnx.relu(h)))


def losses(model, batch):
    x, y = batch
    return optax.softmax_cross_entropy_with_integer_labels(model(x), y)


def weights(batch):
    return (batch[1] > 0).astype(jnp.float32)


def mean(tree):
    return mirror.all_reduce("mean", tree)


def total(tree):
    return mirror.all_reduce("sum", tree)


def same(tree):
    return tree


def scaled(tree, factor):
    return jax.tree.map(lambda leaf: leaf * factor, tree)


def norm(tree):
    return jnp.sqrt(sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(tree)))


def clipped(tree):
    return scaled(tree, jnp.minimum(1.0, 1e-2 / norm(tree)))


def average(model, batch):
    return losses(model, batch).mean()


def summed(model, batch):
    return losses(model, batch).sum()


def decayed(loss):
    def with_decay(model, batch):
        return loss(model, batch) + 0.1 * norm(nnx.state(model, nnx.Param)) ** 2

    return with_decay


def counted(model, batch):
    mask = weights(batch)
    return (losses(model, batch) * mask).sum() / mask.sum()


def counted_together(model, batch):
    mask = weights(batch)
    return (losses(model, batch) * mask).sum() / total(mask.sum())


def half(model, batch):
    return losses(model, jax.tree.map(lambda x: x[: len(x) // 2], batch)).mean()


def contrasted(model, batch):
    h = model(batch[0])
    return optax.softmax_cross_entropy_with_integer_labels(h @ h.T, jnp.arange(len(h))).mean()


def centered(model, batch):
    h = model(batch[0])
    return jnp.sum((h - h.mean(0)) ** 4, -1).mean()


def noisy(key_of):
    def loss(model, batch):
        x, y = batch
        key = key_of(jax.random.key(0))
        return average(model, (x + jax.random.normal(key, x.shape), y))

    return loss


def noisy_examples(model, batch):
    x, y = batch
    keys = mirror.example_keys(jax.random.key(0), x)
    return average(model, (x + jax.vmap(lambda k: jax.random.normal(k, x.shape[1:]))(keys), y))


def by_rows(tree):
    return scaled(total(tree), 1 / SIZE)  # the rows of the batch


def by_own_rows(model, batch):
    return losses(model, batch).sum() / len(batch[0])


# The loss, what is done with its gradients, the keywords of the model, and the verdict.
STEPS = {
    "means": (average, mean, {}, "equal"),
    "sums": (summed, total, {}, "equal"),
    "a sum by the batch": (summed, by_rows, {}, "equal"),
    "clipped after": (average, lambda g: clipped(mean(g)), {}, "equal"),
    "decay in means": (decayed(average), mean, {}, "equal"),
    "counted together": (counted_together, total, {}, "equal"),
    "statistics of all": (average, mean, {"norm": SYNCED}, "equal"),
    "example keys": (noisy_examples, mean, {}, "equal"),
    "sum of means": (average, total, {}, "different"),
    "mean of sums": (summed, mean, {}, "different"),
    "a sum by its own rows": (by_own_rows, total, {}, "different"),
    "reduced twice": (average, lambda g: total(mean(g)), {}, "different"),
    "clipped before": (average, lambda g: mean(clipped(g)), {}, "different"),
    "squashed sum": (average, lambda g: jax.tree.map(jnp.tanh, total(g)), {}, "different"),
    "decay in sums": (decayed(summed), total, {}, "different"),
    "counted apart": (counted, mean, {}, "different"),
    "own statistics": (average, mean, {"norm": {}}, "different"),
    "half of the rows": (half, mean, {}, "unknown"),
    "contrasted rows": (contrasted, mean, {}, "different"),
    "centered rows": (centered, mean, {}, "different"),
    "one key": (noisy(same), mean, {}, "different"),
    "own keys": (
        noisy(lambda key: mirror.get_replica_context().fold_in(key)),
        mean,
        {},
        "different",
    ),
    "dropout": (average, mean, {"rate": 0.5}, "different"),
}


def make(strategy, loss, reduce, **kwargs):
    with strategy.scope():
        model = Net(nnx.Rngs(0), **kwargs)
        optimizer = nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)

    def step(model, optimizer, batch):
        value, grads = nnx.value_and_grad(loss)(model, batch)
        optimizer.update(model, reduce(grads))
        return mean(jax.lax.stop_gradient(value)) if loss is average else None

    rng = np.random.default_rng(0)
    n = strategy.num_replicas_in_sync
    x = rng.normal(size=(n, SIZE // n, 6)).astype(np.float32)
    y = rng.integers(NUM_CLASSES, size=(n, SIZE // n)).astype(np.int32)
    batch = (mirror.PerReplica.from_stacked(x), mirror.PerReplica.from_stacked(y))
    return step, (model, optimizer, batch)


@rows("name", list(STEPS))
def test_verdicts_of_training_steps(name, two):
    loss, reduce, kwargs, verdict = STEPS[name]
    step, args = make(two, loss, reduce, **kwargs)
    report = two.inspect(step, args).equals_one_device
    assert report.verdict == verdict, report
    assert bool(report.reasons) == (verdict != "equal")
    if verdict == "different":
        assert all("test_equality.py:" in reason for reason in report.reasons), report.reasons


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:step applies the same random numbers")
@rows("name", list(STEPS))
def test_verdicts_are_those_of_the_numbers(name):
    strategy = cpu_strategy(3)
    loss, reduce, kwargs, _ = STEPS[name]
    step, args = make(strategy, loss, reduce, **kwargs)
    verdict = strategy.inspect(step, args).equals_one_device.verdict
    if verdict == "equal":
        strategy.verify(step, args, rtol=1e-2)
    else:
        assert verdict == STEPS[name][-1]
        with pytest.raises(mirror.VerifyError):
            strategy.verify(step, args, rtol=1e-2)


@rows("strategy", each_executor)
def test_verdict_does_not_depend_on_the_executor(strategy):
    for name in ("means", "sum of means"):
        loss, reduce, kwargs, verdict = STEPS[name]
        step, args = make(strategy, loss, reduce, **kwargs)
        assert strategy.inspect(step, args).equals_one_device.verdict == verdict


def test_reasons_name_operation_line_and_repair(two):
    def step(x):
        return mirror.all_reduce("sum", x.mean())

    report = two.inspect(step, (mirror.PerReplica([[1.0], [2.0]]),)).equals_one_device
    (reason,) = report.reasons
    assert "2 times" in reason
    assert "psum at test_equality.py:" in reason
    assert 'mirror.all_reduce("mean", x)' in reason
    assert str(report).splitlines()[0] == (
        "step: 2 replicas differ from one device with the whole batch"
    )
    assert "<table" in report._repr_html_()


def test_per_replica_results_are_compared_if_they_are_rows(two):
    def step(x):
        return {"rows": 2 * x, "own": x.sum(), "first": x[:1], "mixed": x - x.mean(0)}

    report = two.inspect(step, (mirror.PerReplica([[1.0, 3.0], [2.0, 4.0]]),)).equals_one_device
    verdicts = {row.name: row.verdict for row in report.rows}
    assert verdicts == {
        "result['first']": "per-replica",
        "result['mixed']": "different",
        "result['own']": "per-replica",
        "result['rows']": "equal",
    }


def test_steps_that_cannot_be_compared_are_unknown(two):
    def diverging(model, x):
        model.kernel[...] += x.sum()

    def rejecting(x):
        assert len(x) == 1, "one row"
        return mirror.all_reduce("sum", x)

    def of_numbers(x):
        return mirror.all_reduce("sum", x)

    def with_callback(x):
        total = mirror.all_reduce("sum", x.sum())
        return jax.pure_callback(lambda v: v, jax.ShapeDtypeStruct((), x.dtype), total)

    with two.scope():
        model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    batch, numbers = mirror.PerReplica([[1.0], [2.0]]), mirror.PerReplica([1.0, 2.0])
    for step, args, word in (
        (diverging, (model, batch), "run rejects"),
        (rejecting, (batch,), "one row"),
        (of_numbers, (numbers,), "input x"),
        (with_callback, (batch,), "pure_callback at test_equality.py"),
    ):
        report = two.inspect(step, args).equals_one_device
        assert report.verdict == "unknown"
        assert word in report.reasons[0]


def test_one_replica_is_one_device():
    loss, reduce, kwargs, _ = STEPS["own statistics"]
    strategy = cpu_strategy(1)
    step, args = make(strategy, loss, reduce, **kwargs)
    assert strategy.inspect(step, args).equals_one_device.verdict == "equal"


def test_metrics_that_are_sums_are_equal(two):
    def step(metric, x):
        metric.update(values=x)

    with two.scope():
        metric = nnx.metrics.Average()
    report = two.inspect(step, (metric, mirror.PerReplica([[1.0], [2.0]]))).equals_one_device
    assert [row.verdict for row in report.rows] == ["equal", "equal"]


def test_metrics_that_are_merged_otherwise_are_unknown(two):
    def step(metric, x):
        metric.update(values=x)

    with two.scope():
        metric = nnx.metrics.Welford()
    args = metric, mirror.PerReplica([[1.0, 5.0], [2.0, 3.0]])
    report = two.inspect(step, args).equals_one_device
    assert report.verdict == "unknown"
    assert any("merge of metric." in reason for reason in report.reasons)
    two.verify(step, args)


def test_the_step_is_traced_again_only_when_asked(two):
    sizes = []

    def step(x):
        sizes.append(len(x))
        return mirror.all_reduce("sum", x.sum())

    report = two.inspect(step, (mirror.PerReplica([[1.0], [2.0]]),))
    assert sizes == [1]
    assert report.equals_one_device.verdict == "equal"
    assert report.equals_one_device is report.equals_one_device
    assert sizes == [1, 2]


def test_assertion_passes_and_fails(two):
    loss, reduce, kwargs, _ = STEPS["means"]
    step, args = make(two, loss, reduce, **kwargs)
    assert testing.assert_equals_one_device(step, args, two).verdict == "equal"
    step, args = make(two, average, total)
    with raises(AssertionError, names="psum", fix='mirror.all_reduce("mean", x)'):
        testing.assert_equals_one_device(step, args, two)
    with raises(TypeError, names="strategy"):
        testing.assert_equals_one_device(step, args, "cpu")
