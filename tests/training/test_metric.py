"""`mirror.Metric`: metrics that are not means, over exactly the examples of the data."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from sklearn.metrics import f1_score, log_loss, precision_score, roc_auc_score

import mirror
from mirror import Metric
from tests.support.messages import raises
from tests.support.packages import optional
from tests.support.strategies import EXECUTORS, LAYOUTS, STRATEGIES
from tests.support.tables import mostly_slow, rows

metrax = optional("metrax")
N = 23  # no number of replicas divides the last batch
RNG = np.random.RandomState(0)
X = RNG.randn(N, 3).astype("float32")
DATA = {"x": X, "y": (X[:, 0] + RNG.randn(N) > 0).astype("int32")}


class Ranked:
    """Depends on each value, on their number and on their order."""

    def __init__(self, *values):
        self.values = values

    @classmethod
    def from_model_output(cls, values, labels):
        assert values.shape == labels.shape
        return cls(*values)

    def merge(self, other):
        return type(self)(*self.values, *other.values)

    def compute(self):
        return np.dot(np.arange(len(self.values)), self.values)


ACCURACY = nnx.metrics.Accuracy(threshold=0.5)


def loss_fn(model, batch):
    logits, labels = model(batch["x"])[:, 0], batch["y"]
    scores = nnx.sigmoid(logits)
    metrics = {
        "ranked": Metric(Ranked, values=logits, labels=labels),
        "function": Metric(Ranked.from_model_output, values=logits, labels=labels),
        "f1": Metric(f1_score, y_true=labels, y_pred=scores > 0.5),
        "object": Metric(ACCURACY, logits=scores, labels=labels),
        "class": Metric(nnx.metrics.Average, values=jnp.stack([scores, scores], 1)),
        "mean": (scores > 0.5) == labels,
    }
    return optax.sigmoid_binary_cross_entropy(logits, labels), metrics


def only_means(model, batch):
    losses, metrics = loss_fn(model, batch)
    return losses, {"mean": metrics["mean"]}


def trainer_of(strategy, loss=loss_fn, **options) -> mirror.Trainer:
    with strategy.scope():
        net = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
        return mirror.Trainer(net, optax.sgd(0.1), loss, **options)


def expected(trainer) -> dict[str, float]:
    logits = X @ np.asarray(trainer.model.kernel) + np.asarray(trainer.model.bias)
    scores = 1 / (1 + np.exp(-logits[:, 0]))
    ranked = np.dot(np.arange(N), logits[:, 0])
    accuracy = np.mean((scores > 0.5) == DATA["y"])
    same = {"ranked": ranked, "function": ranked, "object": accuracy, "mean": accuracy}
    return {**same, "class": scores.mean(), "f1": f1_score(DATA["y"], scores > 0.5)}


def assert_exact(found, trainer, prefix="") -> None:
    for name, value in expected(trainer).items():
        np.testing.assert_allclose(found[prefix + name], value, rtol=1e-4, err_msg=name)


@pytest.mark.parametrize("layouts", mostly_slow(LAYOUTS, "2"))
def test_metric_is_that_of_all_examples(layouts, subtests):
    for layout in layouts:
        with subtests.test(msg=layout):
            trainer = trainer_of(STRATEGIES[layout]())
            found = trainer.evaluate(DATA, batch_size=4)
            assert all(type(value) is float for value in found.values())
            assert_exact(found, trainer)
    assert np.isnan(ACCURACY.compute()), "the user's object has changed"


@pytest.mark.parametrize("executors", mostly_slow(EXECUTORS, "pmap"))
def test_training_does_not_compute_it(executors, subtests):
    for executor in executors:
        with subtests.test(msg=executor):
            check_training(executor)


def check_training(executor) -> None:
    options = {"accumulate_steps": 2, "steps_per_execution": 2}
    trainer = trainer_of(EXECUTORS[executor](), **options)
    stops = mirror.callbacks.EarlyStopping("val_ranked", patience=9)
    fit = {"epochs": 2, "batch_size": 8, "progress": False}
    history = trainer.fit(DATA, validation_data=DATA, callbacks=stops, **fit)
    assert [*history][:2] == ["loss", "mean"]
    assert {f"val_{name}" for name in expected(trainer)} < {*history}
    assert_exact({name: column[-1] for name, column in history.items()}, trainer, "val_")
    plain = trainer_of(EXECUTORS[executor](), only_means, **options)
    plain.fit(DATA, **fit)
    for a, b in zip(*(jax.tree.leaves(nnx.state(t.model)) for t in (trainer, plain)), strict=True):
        np.testing.assert_array_equal(a, b)
    stops = mirror.callbacks.EarlyStopping("ranked")
    with raises(ValueError, names="EarlyStopping", values="'ranked'"):
        trainer.fit(DATA, callbacks=stops, **fit)


@pytest.mark.dev("metrax")
def test_named_loss_and_real_library():
    def metric(kind):
        return lambda outputs, labels: Metric(
            kind, predictions=nnx.sigmoid(outputs), labels=labels.astype(jnp.int32)
        )

    def perplexity(outputs, labels):
        score = nnx.sigmoid(outputs)
        both = jnp.stack([1 - score, score], axis=-1).reshape(len(score), 1, 2)
        token = labels.astype(jnp.int32).reshape(len(score), 1)
        return Metric(metrax.Perplexity, predictions=both, labels=token)

    metrics = {
        "auc": metric(metrax.AUCROC),
        "precision": metric(metrax.Precision),
        "f1": metric(metrax.FBetaScore),  # which has no merge
        "perplexity": perplexity,
    }
    trainer = trainer_of(STRATEGIES["2"](), "binary_crossentropy", metrics=metrics)
    found = trainer.evaluate((X, DATA["y"]), batch_size=4)
    logits = trainer.predict(X, batch_size=4)[:, 0]
    assert abs(found["auc"] - roc_auc_score(DATA["y"], logits)) < 0.01  # of 200 thresholds
    np.testing.assert_allclose(found["precision"], precision_score(DATA["y"], logits > 0))
    np.testing.assert_allclose(found["f1"], f1_score(DATA["y"], logits > 0), rtol=1e-6)
    exact = np.exp(log_loss(DATA["y"], 1 / (1 + np.exp(-logits))))
    np.testing.assert_allclose(found["perplexity"], exact, rtol=1e-5)


def returning(metrics):
    return lambda model, batch: (model(batch["x"])[:, 0] ** 2, metrics(batch))


class Pair(Ranked):
    def compute(self):
        return np.ones(2)


class Text(Ranked):
    def compute(self):
        return "high"


BAD = {
    "no metric": (
        lambda b: {"a": Metric(3, x=b["y"])},
        TypeError,
        {"names": "metric", "values": 3},
    ),
    "no inputs": (
        lambda b: {"a": Metric(Ranked)},
        ValueError,
        {"names": "Ranked", "fix": "labels="},
    ),
    "a scalar": (
        lambda b: {"a": Metric(Ranked, values=b["y"].sum(), labels=b["y"])},
        ValueError,
        {"names": ["values", "'a'"], "values": "(2, ...)"},
    ),
    "across examples": (
        lambda b: {"a": Metric(Ranked, values=b["y"] - b["y"].mean(), labels=b["y"])},
        ValueError,
        {"fix": "example_mask"},
    ),
    "two numbers": (
        lambda b: {"a": Metric(lambda values: Pair(*values), values=b["y"])},
        TypeError,
        {"names": "'a'", "values": "float64[2]"},
    ),
    "several numbers in one object": (
        lambda b: {"a": Metric(nnx.metrics.Welford, values=b["y"])},
        TypeError,
        {"names": "'a'", "values": "Statistics", "fix": "mirror.Metric for each number"},
    ),
    "a text": (
        lambda b: {"a": Metric(lambda values: Text(*values), values=b["y"])},
        TypeError,
        {"names": "'a'", "values": "'high' (str)"},
    ),
}


@rows("case", list(BAD))
def test_bad_metrics_are_errors(case):
    metrics, kind, said = BAD[case]
    trainer = trainer_of(STRATEGIES["2"](), returning(metrics))
    with raises(kind, **said):
        trainer.evaluate({"x": X[:7], "y": DATA["y"][:7]}, batch_size=4)


def test_loss_cannot_be_one():
    trainer = trainer_of(STRATEGIES["2"](), lambda model, batch: Metric(Ranked, values=batch["x"]))
    with pytest.raises(ValueError, match=r"Metric\(.*Ranked"):
        trainer.evaluate(DATA, batch_size=4)
