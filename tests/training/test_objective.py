"""Per-example losses: weights, penalties, checks, and their mean."""
# ruff: noqa: E501 (arguments and their message are one row)

import itertools
import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import mirror
from tests.support import inside
from tests.support.messages import raises
from tests.support.strategies import cpu_strategy
from tests.support.tables import mostly_slow
from tests.support.training import batches_of, fit

Objective, Sums = inside.objective().Objective, inside.objective().Sums
MetricAccumulator, Position = inside.meter().MetricAccumulator, inside.position().Position
B, N, CLASSES = 4, 10, 3
RNG = np.random.RandomState(0)
DATA = {
    "x": (RNG.randint(-4, 5, (N, 2)) / 4).astype(np.float32),
    "label": RNG.randint(0, CLASSES, N).astype(np.int64),
    "weight": (RNG.randint(0, 5, N) / 2).astype(np.float32),
}
WEIGHTS = RNG.randn(2, CLASSES).astype(np.float32)


class Classifier(nnx.Module):
    def __init__(self):
        self.w = nnx.Param(jnp.asarray(WEIGHTS))

    def __call__(self, x):
        return x @ self.w


def cross_entropy(model, batch):
    logits = model(batch["x"])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    return losses, {"correct": logits.argmax(-1) == batch["label"]}


def penalty_of(model):
    return 0.25 * jnp.sum(model.w[...] ** 2)


def batches(size=B):
    return batches_of(DATA, size)


def by_hand(data, weights_of, penalty=0.0):
    """Keras' mean, sum(w * l) / N, and gradient descent with a rate of 1, in NumPy.

    The penalty is added to the mean, and no weight changes it.
    """
    w, total, count = WEIGHTS.astype(np.float64), 0.0, 0
    for batch in data:
        rows, label, weights = np.arange(len(batch["x"])), batch["label"], weights_of(batch)
        p = np.exp(batch["x"] @ w)
        p /= p.sum(1, keepdims=True)
        losses = penalty * np.sum(w**2) - weights * np.log(p[rows, label])
        total, count = total + losses.sum(), count + len(rows)
        p[rows, label] -= 1
        gradient = batch["x"].T @ (p * weights[:, None]) / len(rows)
        w = w - gradient - 2 * penalty * w
    return w, total / count


def classify(strategy, loss_fn=cross_entropy, **kwargs):
    return mirror.Trainer(Classifier(), optax.sgd(1.0), loss_fn, strategy=strategy, **kwargs)


def ones(batch):
    return np.ones(len(batch["x"]))


def by_class(batch):
    return np.asarray([0.5, 1.0, 3.0])[batch["label"]]


OBJECTIVES: dict[str, tuple[Any, ...]] = {  # arguments, the weights by hand, the penalty
    "regularized": ({"penalty": penalty_of}, ones, 0.25),
    "a function": (
        {"sample_weight": lambda batch: batch["weight"] * 2},
        lambda batch: batch["weight"] * 2,
        0,
    ),
    "classes": (
        {"labels": "label", "num_classes": CLASSES, "class_weight": {0: 0.5, 2: 3}},
        by_class,
        0,
    ),
    "both": (
        {
            "labels": lambda batch: batch["label"],
            "num_classes": np.int64(CLASSES),
            "class_weight": {np.int64(0): 0.5, 2: 3},
            "sample_weight": "weight",
            "penalty": penalty_of,
        },
        lambda batch: by_class(batch) * batch["weight"],
        0.25,
    ),
}


@pytest.mark.parametrize(
    "rows", mostly_slow([*((name, 8) for name in OBJECTIVES), ("regularized", 1)], ("both", 8))
)
def test_loss_and_gradient_equal_those_of_one_device(subtests, rows):
    for name, num_replicas in rows:
        with subtests.test(msg=f"{name}, {num_replicas} replicas"):
            kwargs, weights_of, penalty = OBJECTIVES[name]
            trainer = classify(cpu_strategy(num_replicas), **kwargs)
            history = fit(trainer, batches())
            w, loss = by_hand(batches(), weights_of, penalty)
            np.testing.assert_allclose(trainer.model.w[...], w, rtol=1e-5, atol=1e-6)
            np.testing.assert_allclose(history["loss"], [loss], rtol=1e-5)


def test_evaluation_weights_the_loss_but_not_the_metrics(two):
    trainer = classify(two, sample_weight="weight")
    found, trained = trainer.evaluate(batches()), fit(trainer, batches(N))
    np.testing.assert_allclose([found["loss"]], trained["loss"], rtol=1e-6)
    correct = (DATA["x"] @ WEIGHTS).argmax(1) == DATA["label"]
    assert [found["correct"]] == trained["correct"] == [correct.mean()]


# Results of a loss function


def returns(make):
    """Returns a loss function that modifies the correct losses."""

    def loss_fn(model, batch):
        return make(cross_entropy(model, batch)[0])

    return loss_fn


PER_EXAMPLE = ["optax.softmax_cross_entropy_with_integer_labels(logits, labels)", ".mean()"]
OTHER_AXES = ["x.mean(axis=-1)", "x[:, 0]"]
LOSSES: dict[str, tuple[Any, ...]] = {
    "a mean": (lambda x: x.mean(), ValueError, {"names": ["loss", "loss_fn"], "values": [(), 2, (2,)], "fix": PER_EXAMPLE}),
    "a column": (lambda x: x[:, None], ValueError, {"names": ["loss", "loss_fn"], "values": [(2, 1), 2, (2,)], "fix": OTHER_AXES}),
    "a sequence": (lambda x: jnp.outer(x, jnp.ones(5)), ValueError, {"names": ["loss", "loss_fn"], "values": [(2, 5), 2, (2,)], "fix": OTHER_AXES}),
    "transposed": (lambda x: jnp.outer(jnp.ones(5), x), ValueError, {"names": ["loss", "loss_fn"], "values": [(5, 2), 2, (2,)], "fix": PER_EXAMPLE}),
    "too few": (lambda x: x[:1], ValueError, {"names": ["loss", "loss_fn"], "values": [(1,), 2, (2,)], "fix": PER_EXAMPLE}),
    "nothing": (lambda x: None, ValueError, {"names": ["loss", "loss_fn"], "values": [None, "NoneType", 2, (2,)]}),
    "a list": (lambda x: [x], ValueError, {"names": ["loss", "loss_fn"], "values": ["list", 2, (2,)]}),
    "three": (lambda x: (x, {}, x), ValueError, {"names": ["loss", "loss_fn"], "values": ["tuple", 2, (2,)]}),
    "integers": (lambda x: x.astype(int), TypeError, {"names": "loss_fn", "values": "int32"}),
    "booleans": (lambda x: x > 0, TypeError, {"names": "loss_fn", "values": "bool"}),
    "complex numbers": (lambda x: x * 1j, TypeError, {"names": ["loss", "loss_fn"], "values": "complex64", "fix": "x.real"}),
    "a metric of strings": (lambda x: (x, {"c": np.array(["a"] * len(x))}), TypeError, {"names": ["'c'", "loss_fn"], "values": "<U1"}),
    "a complex metric": (lambda x: (x, {"c": x * 1j}), TypeError, {"names": ["'c'", "loss_fn"], "values": "complex64", "fix": "abs(x)"}),
    "a metric of keys": (lambda x: (x, {"keys": jax.random.split(jax.random.key(0), 2)}), TypeError, {"names": ["'keys'", "loss_fn"], "values": "key<fry>"}),
    "not a dict": (lambda x: (x, x), TypeError, {"names": "loss_fn", "values": "float32[2]", "fix": "dict"}),
    "named loss": (lambda x: (x, {"loss": x}), TypeError, {"names": ["loss_fn", "'loss'"], "fix": "losses, {'accuracy': correct}"}),
    "a mean metric": (lambda x: (x, {"mean": x.mean()}), ValueError, {"names": ["'mean'", "loss_fn"], "values": [(), 2, (2,)], "fix": "logits.argmax(-1) == labels"}),
    "a metric of rows": (lambda x: (x, {"rows": x[:, None]}), ValueError, {"names": ["'rows'", "loss_fn"], "values": [(2, 1), 2, (2,)], "fix": OTHER_AXES}),
    "a metric of text": (lambda x: (x, {"text": "good"}), ValueError, {"names": ["'text'", "loss_fn"], "values": ["'good'", "str", 2, (2,)]}),
}  # fmt: skip


@pytest.fixture(scope="module")
def on_two():
    return cpu_strategy(2)


def test_objective_rejects_losses_that_are_not_per_example(subtests, on_two):
    for name, use in itertools.product(LOSSES, [fit, mirror.Trainer.evaluate]):
        with subtests.test(msg=f"{use.__name__}: {name}"):
            make, error, wanted = LOSSES[name]
            with raises(error, **wanted):
                use(classify(on_two, returns(make)), batches())


def labeled(labels, **kwargs):
    data = [{**batch, "label": labels(batch["label"])} for batch in batches()]
    return {"labels": "label", "num_classes": CLASSES, "data": data, **kwargs}


KEYS = "['label', 'weight', 'x']"
PARTS: dict[str, tuple[Any, ...]] = {
    "unknown weight": ({"sample_weight": "w"}, {"names": "sample_weight", "values": ["'w'", KEYS]}),
    "unknown label": ({"labels": "y", "num_classes": 3}, {"names": "labels", "values": ["'y'", KEYS]}),
    "no such index in a tuple": ({"sample_weight": 2, "data": [(DATA["x"], DATA["label"])]}, {"names": "sample_weight", "values": [2, "tuple"]}),
    "no such index in an array": ({"labels": "y", "num_classes": 3, "data": [DATA["x"]]}, {"names": "labels", "values": ["'y'", "ndarray"]}),
    "weights of columns": ({"sample_weight": "x"}, {"names": "sample_weight", "values": ["'x'", (2, 2), 2, (2,)], "fix": OTHER_AXES}),
    "one weight": ({"sample_weight": lambda batch: 2.0}, {"names": ["sample_weight", "<lambda>"], "values": [(), 2, (2,)]}),
    "one too much": (labeled(lambda label: label + 1), {"names": "labels", "values": [3, 0, 2], "fix": "num_classes=3"}),
    "negative": (labeled(lambda label: label - 1), {"names": "labels", "values": [-1, 0, 2], "fix": "num_classes=3"}),
    "floats": (labeled(lambda label: label * 0.5), {"names": "labels", "values": [0, "float64[4]"]}),
    "booleans": (labeled(lambda label: label > 0), {"names": "labels", "values": [0, "bool[4]"]}),
    "one-hot": (labeled(lambda label: np.eye(CLASSES, dtype=int)[label]), {"names": "labels", "values": [0, "int64[4,3]"], "fix": "x.argmax(-1)"}),
    "a column": (labeled(lambda label: label[:, None]), {"names": "labels", "values": [0, "int64[4,1]"], "fix": "x[:, 0]"}),
}  # fmt: skip


def test_objective_rejects_invalid_weights_and_classes(subtests, on_two):
    for name, use in itertools.product(PARTS, [fit, mirror.Trainer.evaluate]):
        with subtests.test(msg=f"{use.__name__}: {name}"):
            check_objective_rejects_invalid_weights_and_classes(on_two, name, use)


def check_objective_rejects_invalid_weights_and_classes(on_two, name, use):
    kwargs, wanted = PARTS[name]
    arguments = {"data": batches(), **kwargs}
    data = arguments.pop("data")
    loss_fn = cross_entropy if isinstance(data[0], dict) else (lambda model, x: model(x).sum(-1))
    if isinstance(data[0], tuple):
        loss_fn = lambda model, batch: model(batch[0]).sum(-1)  # noqa: E731
    with raises(ValueError, **wanted):
        use(classify(on_two, loss_fn, **arguments), data)


def test_objective_reports_an_invalid_class_in_its_batch(on_two):
    """After the previous batches, with the number of its batch."""
    data = batches()
    data[2]["label"] = np.asarray([1, 7])
    trainer, steps = classify(on_two, labels="label", num_classes=CLASSES), []

    class Counts(mirror.callbacks.Callback):
        def on_step(self, fit):
            steps.append(fit.position.step)

    with raises(ValueError, names="labels", values=[2, 7, 1], fix="num_classes=3"):
        fit(trainer, data, callbacks=Counts())
    assert steps == [1, 2]


BOTH = "labels='label', num_classes=10"
ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "penalty not callable": ({"penalty": 0.1}, TypeError, {"names": "penalty", "values": [0.1, "float"]}),
    "not a class": ({"labels": "label", "num_classes": 0}, ValueError, {"names": "num_classes", "values": 0}),
    "loss_fn not callable": ({"loss_fn": 0.5}, TypeError, {"names": "loss_fn", "values": [0.5, "float"], "fix": "(model, batch)"}),
    "labels alone": ({"labels": "y"}, ValueError, {"names": ["labels", "num_classes"], "values": ["'y'", None], "fix": BOTH}),
    "a number alone": ({"num_classes": 3}, ValueError, {"names": ["labels", "num_classes"], "values": [None, 3], "fix": BOTH}),
    "weights alone": ({"class_weight": {0: 2.0}}, ValueError, {"names": ["labels", "num_classes", "class_weight"], "values": "{0: 2.0}", "fix": BOTH}),
    "no weights alone": ({"class_weight": {}}, ValueError, {"names": ["labels", "num_classes", "class_weight"], "values": "{}", "fix": BOTH}),
    "a class too many": ({"class_weight": {3: 1.0}, "num_classes": 3, "labels": "y"}, ValueError, {"names": "class_weight", "values": [3, 0, 2], "fix": "num_classes=3"}),
    "a negative class": ({"class_weight": {-1: 1.0}, "num_classes": 3, "labels": "y"}, ValueError, {"names": "class_weight", "values": [-1, 0, 2], "fix": "num_classes=3"}),
    "a named class": ({"class_weight": {"cat": 1.0}, "num_classes": 3, "labels": "y"}, ValueError, {"names": "class_weight", "values": ["'cat'", 0, 2], "fix": "num_classes=3"}),
    "a list": ({"class_weight": [1, 2, 3], "num_classes": 3, "labels": "y"}, TypeError, {"names": "class_weight", "values": ["[1, 2, 3]", "list"], "fix": ["dict", "class_weight={3: 2.0}"]}),
}  # fmt: skip


def test_objective_rejects_bad_arguments(subtests):
    for name in ARGUMENTS:
        with subtests.test(msg=name):
            kwargs, error, wanted = ARGUMENTS[name]
            with raises(error, **wanted):
                Objective(**{"loss_fn": cross_entropy, **kwargs})


def test_penalty_must_be_a_scalar(on_two):
    trainer = classify(on_two, penalty=lambda model: model.w[...] ** 2)
    with raises(ValueError, names=["<lambda>", "penalty"], values="float32[2,3]"):
        fit(trainer, batches())


# Sums and their means


def test_padding_does_not_count():
    """Whatever its values: not in the loss, the metrics or the gradient."""

    def loss_fn(w, batch):
        return w * batch, {"batch": batch, "positive": batch > 0}

    objective = Objective(loss_fn)
    mask = np.asarray([True, True, False])
    for last in (0.0, 1e30, np.inf, np.nan):
        losses, _, sums = objective(jnp.ones(()), jnp.asarray([1.0, 2.0, last]), mask)
        assert losses.tolist() == [1, 2, 0]
        assert jax.tree.map(float, sums) == Sums({"loss": 3, "batch": 3, "positive": 2}, 2)
        assert sums.totals["positive"].dtype == sums.count.dtype == jnp.int32


def test_sums_are_at_least_float32(subtests):
    for dtype in [jnp.bfloat16, jnp.float16, jnp.float32]:
        with subtests.test(msg=str(dtype)):
            check_sums_are_at_least_float32(dtype)


def check_sums_are_at_least_float32(dtype):
    *_, sums = Objective(lambda _, batch: batch)(None, jnp.ones(8, dtype), np.ones(8, bool))
    assert sums.totals["loss"].dtype == jnp.float32


def sums_of(loss, count=2, **metrics):
    return Sums({**metrics, "loss": loss}, count)


def collected(meter, running=0):
    """The metrics of the launches that a meter collects now."""
    found = []
    meter.collect(running=running, then=found.append)
    return found


def test_meter_reads_only_finished_steps_and_adds_in_order():
    meter = MetricAccumulator()
    for step in range(1, 5):
        meter.add(step, sums_of(np.float32(step), seen=step))
    assert collected(meter, 3) == [(1, {"loss": 0.5, "seen": 0.5}, frozenset())]
    assert collected(meter, 3) == []
    assert [step for step, *_ in collected(meter)] == [2, 3, 4]
    assert meter.means == {"loss": 10 / 8, "seen": 10 / 8}
    assert next(iter(meter.means)) == "loss"
    again = MetricAccumulator(**meter.to_dict())
    again.add(5, sums_of(2.0, seen=2))
    again.collect()
    assert again.means == {"loss": 1.2, "seen": 1.2}
    assert meter.count == 8


def test_meter_starts_to_copy_sums_of_accelerators_when_it_gets_them():
    events = []

    class OnDevice:
        platform = "gpu"

        def devices(self):
            return {self}

        def copy_to_host_async(self):
            events.append("copy")

        def __array__(self, dtype=None, copy=None):
            events.append("read")
            return np.asarray(4)

    meter = MetricAccumulator()
    meter.add(1, sums_of(OnDevice(), OnDevice(), seen=OnDevice()))
    assert events == ["copy"] * 3
    meter.add(2, sums_of(jnp.float32(8), jnp.int32(4), seen=np.float32(8)))
    meter.collect()
    assert events == ["copy"] * 3 + ["read"] * 3
    assert meter.means == {"loss": 1.5, "seen": 1.5}
    OnDevice.platform = "cpu"
    meter.add(3, sums_of(OnDevice(), OnDevice(), seen=OnDevice()))
    assert events == ["copy"] * 3 + ["read"] * 3


class Failed:
    """A number of a launch that failed."""

    def __array__(self, dtype=None, copy=None):
        raise ValueError("failed")


def test_position_returns_to_before_the_first_launch_that_failed():
    position = Position()
    for step in range(1, 6):
        position.advance(1, 4, sums_of(np.float32(step) if step < 4 else Failed(), 4))
        if step == 3:
            position.next_pass()
    with pytest.raises(ValueError, match="failed"):
        position.meter.collect()
    assert position.meter.count == 3 * 4
    position.drop_failed()
    assert (position.step, position.epoch_step, position.passes, position.samples) == (3, 3, 1, 0)
    assert collected(position.meter) == []
    position.drop_failed()
    assert position.step == 3


def test_labels_are_pickled_without_batches_that_wait():
    labels = inside.labels().Labels("y", None)
    labels.inspect(0, {"y": np.array([9])})
    again = pickle.loads(pickle.dumps(labels))
    again.infer(8)
    again.inspect(0, {"y": np.array([7])})
    with pytest.raises(ValueError, match="row 0 is 9"):
        labels.infer(8)


def test_meter_adds_integers_exactly():
    """2**31 - 1 in each launch: the sum exceeds int32 and the exact integers of float64."""
    meter, most = MetricAccumulator(), 2**31 - 1
    for step in range(5):
        meter.add(step, sums_of(0.0, 1, seen=np.int32(most)))
    meter.collect()
    assert meter.totals["seen"] == 5 * most
    assert np.isnan(MetricAccumulator({"loss": 0.0}).means["loss"])
