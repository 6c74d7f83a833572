"""`equals_one_device`: its verdicts, of which `verify` says the same, and the warning."""

import functools
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import mirror
from mirror import testing
from tests.support import inside
from tests.support.messages import assert_message, raises
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


def normalized(axes):
    def of_row(row):
        return row / jnp.sqrt(jax.lax.pmean(row**2, axes))

    def loss(model, batch):
        return average(lambda x: jax.vmap(of_row, axis_name="row")(model(x)), batch)

    return loss


def moved(reduce):
    """Moves the rows along their gradient, as adversarial training does."""

    def loss(model, batch):
        x, y = batch
        return average(model, (x + jax.grad(lambda x: reduce(losses(model, (x, y))))(x), y))

    return loss


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


def by_all_rows(model, batch):
    num_rows = len(batch[0]) * mirror.get_strategy().num_replicas_in_sync
    return losses(model, batch).sum() / num_rows


# The loss, what is done with its gradients, the keywords of the model, and the verdict.
STEPS = {
    "means": (average, mean, {}, "equal"),
    "sums": (summed, total, {}, "equal"),
    "a sum by the batch": (summed, by_rows, {}, "equal"),
    "a sum by the rows of all": (by_all_rows, total, {}, "equal"),
    "clipped after": (average, lambda g: clipped(mean(g)), {}, "equal"),
    "decay in means": (decayed(average), mean, {}, "equal"),
    "counted together": (counted_together, total, {}, "equal"),
    "statistics of all": (average, mean, {"norm": SYNCED}, "equal"),
    "statistics of all, by row": (normalized(("row", mirror.REPLICA_AXIS)), mean, {}, "equal"),
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
    "own statistics, by row": (normalized("row"), mean, {}, "different"),
    "sum of means, by row": (normalized("row"), total, {}, "different"),
    "moved by a sum": (moved(jnp.sum), mean, {}, "equal"),
    "moved by a mean": (moved(jnp.mean), mean, {}, "different"),
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
    batch = mirror.PerReplica([[1.0, 2.0]])
    for own in (lambda x: 2 * x, lambda x: x.sum()):
        assert strategy.inspect(own, (batch,)).equals_one_device.verdict == "equal"


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


# The warning at the first run


RANDOM = {"dropout", "own keys", "one key"}
NOISY = {"rate": 0.5}


def said(strategy, step, args):
    """Returns what two runs of a step warn of, without other kinds of warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            strategy.run(step, args)
    found = [each for each in caught if "one device" in str(each.message)]
    assert all(each.filename == __file__ for each in found)
    return [str(each.message) for each in found]


@rows("name", list(STEPS))
def test_verdicts_of_training_steps_and_one_warning(name, two):
    """Not for random numbers: replicas are meant to draw their own."""
    loss, reduce, kwargs, verdict = STEPS[name]
    step, args = make(two, loss, reduce, **kwargs)
    found = said(two, step, args)
    report = two.inspect(step, args).equals_one_device
    assert report.verdict == verdict, report
    assert bool(report.reasons) == (verdict != "equal")
    if verdict == "different":
        assert all("test_equality.py:" in reason for reason in report.reasons), report.reasons
    assert len(found) == (verdict == "different" and name not in RANDOM)
    for message in found:
        fix = "@mirror.per_replica_on_purpose"
        assert_message(message, names=["step", "model."], values=report.reasons[0], fix=fix)
        assert ("axis_name" in message) == ("norm" in kwargs)


def test_a_key_that_a_step_reads_from_outside_is_a_constant(two):
    key = jax.random.key(7)

    def step(x):
        draw = lambda key: jax.random.normal(key, x.shape[1:])  # noqa: E731
        return total((x + jax.vmap(draw)(mirror.example_keys(key, x))).sum(0))

    batch = mirror.PerReplica.from_stacked(np.ones((2, 2, 3), np.float32))
    assert two.inspect(step, (batch,)).equals_one_device.verdict == "equal"


def test_step_with_as_many_rows_as_replicas_is_traced_once(two):
    """The first 2 counts rows, the second one replicas."""
    traces = []

    def step(w, x):
        traces.append(w)
        return w - jax.lax.psum(x.sum(0) / 2, mirror.REPLICA_AXIS) / 2

    batch = mirror.PerReplica.from_stacked(np.ones((2, 2, 3), np.float32))
    assert not said(two, step, (jnp.ones(3), batch))
    assert len(traces) == 1


def test_steps_with_random_numbers_that_differ_otherwise(two):
    for loss, reduce, kwargs, count in [
        (average, lambda g: mean(clipped(g)), NOISY, 1),
        (average, total, NOISY, 1),
        (average, mean, {**NOISY, "norm": {}}, 1),
        (average, mean, {**NOISY, "norm": SYNCED}, 0),
        (summed, total, NOISY, 0),
        (noisy_examples, total, {}, 1),
        (noisy(lambda key: mirror.get_replica_context().fold_in(key)), total, {}, 1),
    ]:
        assert len(said(two, *make(two, loss, reduce, **kwargs))) == count


@rows("strategy", each_executor)
def test_every_executor_warns(strategy):
    assert len(said(strategy, *make(strategy, average, total))) == 1
    assert not said(strategy, *make(strategy, average, mean))


def undone(w, x):
    return mean(jax.grad(lambda w: jnp.linalg.norm(x * w - 1) ** 2 / len(x))(w))


def weighted(w, x):
    kept = (x[:, 0] > 0).astype(x.dtype)
    count = kept.sum()
    return total((x * kept[:, None]).sum(0) / jnp.maximum(count, 1) * count) / total(count)


def combined(w, x):
    center = x.mean(0)
    moved = center - mean(center)
    return total(((x - center) ** 2).sum(0) + len(x) * moved**2) / total(len(x))


CANCELING = {
    "the square of a root": undone,
    "a mean times its count": weighted,
    "the variances of replicas": combined,
    "a sum that is positive": lambda w, x: total(jnp.maximum((x**2).sum(0), 0)),
    "the exponential of a logarithm": lambda w, x: jnp.log(
        total(jnp.exp(jnp.log(jnp.exp(x).sum(0))))
    ),
    "whether any row": lambda w, x: jnp.where(
        total(jnp.isnan(x).any().astype(int)) > 0, 0 * w, mean((x * w).mean(0))
    ),
    "a root of the rows": lambda w, x: mean(jnp.dot(x.T / np.sqrt(len(x)), x / np.sqrt(len(x))))[0],
    "pairs that are added": lambda w, x: w - mean((x[:, None] - x[None]).mean((0, 1))),
}


@rows("name", list(CANCELING))
def test_steps_that_equal_one_device_do_not_warn(name, two):
    step = CANCELING[name]
    x = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)
    args = jnp.array([0.5, 1.0, 1.5]), *two.distribute_dataset([x])
    assert two.inspect(step, args).equals_one_device.verdict != "equal"
    two.verify(step, args)
    assert not said(two, step, args)


@rows("rate", [1e-4, 1.0])
def test_a_clip_warns_before_it_has_an_effect(rate, two):
    """The numbers that decide are not the arguments of the first run."""

    def step(w, x):
        grads = jax.grad(lambda w: jnp.tanh(x @ w).mean())(w)
        return w - rate * mean(grads * jnp.minimum(1.0, 1 / norm(grads)))

    args = np.ones(3, np.float32), mirror.PerReplica([np.full((5, 3), 0.01, np.float32)] * 2)
    (message,) = said(two, step, args)
    assert_message(message, names="result")


def test_a_step_that_is_right_is_traced_once_and_one_that_differs_twice(two):
    traced = []

    def loss(model, batch):
        traced.append(len(batch[0]))
        return average(model, batch)

    said(two, *make(two, loss, mean))
    assert traced == [6]
    said(two, *make(two, loss, total))
    assert traced == [6, 6, 12]


def test_state_of_a_plain_function(two):
    """A result with the place and type of a mirrored argument is state, and others are not."""

    def step(w, x):
        loss, grad = jax.value_and_grad(lambda w: jnp.tanh(x @ w).mean())(w)
        return w - 0.1 * total(grad), total(loss)

    def metrics(w, x):
        return total((x @ w).mean()), {"total": total(x.mean(0))}

    args = np.ones(3, np.float32), mirror.PerReplica([np.ones((5, 3), np.float32)] * 2)
    (message,) = said(two, step, args)
    assert_message(message, names="result[0]", fix='mirror.all_reduce("mean", x)')
    assert not said(two, metrics, args)

    def nested(x, params):
        grads = jax.grad(lambda p: jnp.tanh(x @ p["w"]).mean())(params)
        return total(x.mean(0)), {"w": params["w"] - total(grads["w"])}

    (message,) = said(two, nested, (args[1], {"w": args[0]}))
    assert_message(message, names="in result[1]['w'].")


def test_a_marked_step_does_not_warn(two):
    step, args = make(two, average, total)
    assert mirror.per_replica_on_purpose(step) is step
    assert not said(two, step, args)
    assert not said(two, functools.partial(step), args)
    step, args = make(two, average, total)
    assert not said(two, mirror.per_replica_on_purpose(functools.partial(step)), args)
    wrong: list[Any] = [3, [].append]
    for value in wrong:
        with raises(TypeError, names="step", fix="@mirror.per_replica_on_purpose"):
            mirror.per_replica_on_purpose(value)


def test_reports_do_not_warn(two):
    step, args = make(two, average, total)
    two.inspect(step, args)
    with pytest.raises(mirror.VerifyError):
        two.verify(step, args)
    assert not said(cpu_strategy(1), *make(cpu_strategy(1), average, total))


def test_steps_that_one_device_cannot_trace_run(two):
    def step(w, x):
        if len(x) > 5:
            raise ValueError(len(x))
        return w - total(jax.grad(lambda w: (x @ w).mean())(w))

    args = np.ones(3, np.float32), mirror.PerReplica([np.ones((5, 3), np.float32)] * 2)
    assert not said(two, step, args)


def test_one_row_per_replica_is_not_guessed(two):
    """Each axis of one entry could be the axis of the rows."""

    def step(w, x):
        return w - total(jax.grad(lambda w: (x @ w).mean())(w))

    args = np.ones(3, np.float32), mirror.PerReplica([np.ones((1, 3), np.float32)] * 2)
    assert not said(two, step, args)


def test_a_fault_of_the_guess_does_not_end_the_training(two, monkeypatch):
    inside.break_guesses(monkeypatch)
    assert not said(two, *make(two, average, total))


# The guess, with as many rows as features, tokens, channels, replicas and entries of a window


class Block(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(16, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(4, 16, rngs=rngs, decode=False)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.first, self.last = (nnx.Linear(16, 16, rngs=rngs) for _ in range(2))

    def __call__(self, x):
        x = x + self.dropout(self.attention(self.norm(x)))
        return x + self.last(nnx.gelu(self.first(x)))


class Transformer(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(16, 16, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(2)])
        self.last = nnx.Linear(16, 16, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


class Images(nnx.Module):
    def __init__(self, rngs, axis_name=mirror.REPLICA_AXIS):
        self.first = nnx.Conv(3, 16, (3, 3), rngs=rngs)
        self.norm = nnx.BatchNorm(16, axis_name=axis_name, rngs=rngs)
        self.second = nnx.Conv(16, 16, (3, 3), strides=2, rngs=rngs)
        self.last = nnx.Linear(16, 16, rngs=rngs)

    def __call__(self, x):
        x = nnx.max_pool(nnx.relu(self.norm(self.first(x))), (2, 2), (2, 2))
        x = nnx.avg_pool(nnx.relu(self.second(x)), (2, 2), (2, 2))
        return self.last(x.mean((1, 2)))


CLIPPING = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
NETS = {
    "transformer": (Transformer, True),
    "statistics of all": (Images, True),
    "own statistics": (functools.partial(Images, axis_name=None), False),
}
# What is done with the gradients, whether the loss is a sum, the optimizer, and whether it is right
UPDATES = {
    "means": (mean, False, optax.adam(1e-3), True),
    "means, then a clip": (mean, False, CLIPPING, True),
    "sums": (total, True, optax.lamb(1e-3), True),
    "sum of means": (total, False, optax.adafactor(1e-3), False),
    "mean of sums": (mean, True, optax.sgd(0.1, momentum=0.9), False),
    "a clip before": (lambda g: mean(clipped(g)), False, optax.lion(1e-3), False),
}


def is_suspected(strategy, size, net, update):
    reduce, is_sum, tx, _ = UPDATES[update]
    with strategy.scope():
        model = NETS[net][0](nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

    def step(model, optimizer, x, y):
        def loss(model):
            every = optax.softmax_cross_entropy_with_integer_labels(model(x), y)
            return every.sum() if is_sum else every.mean()

        optimizer.update(model, reduce(nnx.grad(loss)(model)))

    rows = size * strategy.num_replicas_in_sync
    tokens = np.zeros((rows, 8), np.int32)
    data = (tokens, tokens) if net == "transformer" else (np.zeros((rows, 8, 8, 3)), tokens[:, 0])
    (batch,) = strategy.distribute_dataset([data])
    return inside.is_suspected(strategy, step, (model, optimizer, *batch))


@pytest.mark.slow
@rows("net", list(NETS))
def test_the_guess_is_right_about_networks(net, two, subtests):
    count = len(UPDATES) if NETS[net][1] else 2  # a wrong network is wrong with every update
    for update, size in list(zip(UPDATES, (2, 4, 8, 16, 3, 16), strict=True))[:count]:
        with subtests.test(update=update, size=size):
            is_right = NETS[net][1] and UPDATES[update][-1]
            assert is_suspected(two, size, net, update) == (not is_right)


@pytest.mark.nightly
@rows("net", list(NETS))
def test_the_guess_is_right_about_all_sizes(net, subtests):
    for num_replicas in (2, 4):
        for size in (2, 3, 4, 8, 16):
            for update in UPDATES:
                with subtests.test(num_replicas=num_replicas, size=size, update=update):
                    is_right = NETS[net][1] and UPDATES[update][-1]
                    strategy = cpu_strategy(num_replicas)
                    assert is_suspected(strategy, size, net, update) == (not is_right)
