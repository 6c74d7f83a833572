"""Losses that look across rows and hide the padding: with neutral numbers, or an error."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import mirror
from tests.support.messages import raises
from tests.support.strategies import cpu_strategy
from tests.support.training import fit

X = np.random.RandomState(0).randn(10, 4).astype(np.float32)
BIG = jnp.finfo(jnp.float32).max


def softplus(x):
    return np.log1p(np.exp(x))


def log_softmax(s):
    return s - np.log(np.exp(s).sum(-1, keepdims=True))


def lse(s, **options):
    return jax.nn.logsumexp(s, -1, **options)


def scanned(s, m):
    """Sums columns one by one."""

    def add(total, column):
        score, is_example = column
        return jnp.where(is_example, total + score, total), score

    return jax.lax.scan(add, jnp.zeros(len(s)), (s.T, m))[0]


def called(fn, x):
    """Returns what a function of NumPy makes of rows, which no analysis can know."""
    kind = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return jax.pure_callback(lambda v: np.asarray(fn(v), v.dtype), kind, jax.lax.stop_gradient(x))


def wide(s, m):
    return jnp.broadcast_to(m, s.shape)


# Functions of the scores `s` of the rows of a replica and of all rows, the mask `m` of all rows and
# the outputs `z` of a replica; and what they are for one device, in NumPy.
RIGHT = {
    "sum": (lambda s, m, z: (s * m).sum(-1), lambda s, z: s.sum(-1)),
    "mean": (lambda s, m, z: (s * m).sum(-1) / m.sum(), lambda s, z: s.mean(-1)),
    "mean where": (lambda s, m, z: jnp.mean(s, -1, where=wide(s, m)), lambda s, z: s.mean(-1)),
    "mean of NaN": (
        lambda s, m, z: jnp.nanmean(jnp.where(m, s, jnp.nan), -1),
        lambda s, z: s.mean(-1),
    ),
    "exp": (
        lambda s, m, z: jnp.log((jnp.exp(s) * m).sum(-1)),
        lambda s, z: np.log(np.exp(s).sum(-1)),
    ),
    "logsumexp": (
        lambda s, m, z: lse(jnp.where(m, s, -jnp.inf)),
        lambda s, z: np.log(np.exp(s).sum(-1)),
    ),
    "logsumexp where": (
        lambda s, m, z: lse(s, where=wide(s, m)),
        lambda s, z: np.log(np.exp(s).sum(-1)),
    ),
    "logsumexp b": (lambda s, m, z: lse(s, b=m * 1.0), lambda s, z: np.log(np.exp(s).sum(-1))),
    "-1e9": (
        lambda s, m, z: lse(jnp.where(m, s, -1e9) / 4),
        lambda s, z: np.log(np.exp(s / 4).sum(-1)),
    ),
    "finfo": (lambda s, m, z: lse(jnp.where(m, s, -BIG)), lambda s, z: np.log(np.exp(s).sum(-1))),
    "plus": (
        lambda s, m, z: lse(s + jnp.where(m, 0, -1e9)),
        lambda s, z: np.log(np.exp(s).sum(-1)),
    ),
    "minus": (
        lambda s, m, z: lse(s - 1e9 * (1 - m.astype("f4"))),
        lambda s, z: np.log(np.exp(s).sum(-1)),
    ),
    "softmax": (
        lambda s, m, z: (jax.nn.softmax(s, where=wide(s, m)) * s).sum(-1),
        lambda s, z: (np.exp(log_softmax(s)) * s).sum(-1),
    ),
    "positives": (
        lambda s, m, z: jnp.where(m & (s > 0), jax.nn.log_softmax(jnp.where(m, s, -1e9)), 0).sum(
            -1
        ),
        lambda s, z: np.where(s > 0, log_softmax(s), 0).sum(-1),
    ),
    "margin": (
        lambda s, m, z: jax.nn.relu(0.5 + jnp.where(m, s, -1e9) - z[:, :1]).sum(-1),
        lambda s, z: np.maximum(0.5 + s - z[:, :1], 0).sum(-1),
    ),
    "softplus": (
        lambda s, m, z: jax.nn.softplus(jnp.where(m, s, -1e9)).sum(-1),
        lambda s, z: softplus(s).sum(-1),
    ),
    "max": (lambda s, m, z: jnp.where(m, s, -jnp.inf).max(-1), lambda s, z: s.max(-1)),
    "min": (lambda s, m, z: jnp.where(m, s, 1e9).min(-1), lambda s, z: s.min(-1)),
    "prod": (lambda s, m, z: jnp.where(m, s, 1).prod(-1), lambda s, z: s.prod(-1)),
    "log of 1": (
        lambda s, m, z: jnp.log(jnp.where(m, s**2 + 1, 1)).sum(-1),
        lambda s, z: np.log(s**2 + 1).sum(-1),
    ),
    "any": (
        lambda s, m, z: z[:, 0] * (m & (s > 1)).any(-1),
        lambda s, z: z[:, 0] * (s > 1).any(-1),
    ),
    "all": (
        lambda s, m, z: z[:, 0] * (~m | (s < 1)).all(-1),
        lambda s, z: z[:, 0] * (s < 1).all(-1),
    ),
    "argmax": (
        lambda s, m, z: z[:, 0] * jnp.argmax(jnp.where(m, s, -1e9), -1),
        lambda s, z: z[:, 0] * s.argmax(-1),
    ),
    "largest": (
        lambda s, m, z: jax.lax.top_k(jnp.where(m, s, -1e9), 2)[0].sum(-1),
        lambda s, z: np.sort(s)[:, -2:].sum(-1),
    ),
    "rank": (
        lambda s, m, z: z[:, 0] * (jnp.where(m, s, -jnp.inf) > z[:, :1]).sum(-1),
        lambda s, z: z[:, 0] * (s > z[:, :1]).sum(-1),
    ),
    "scan": (lambda s, m, z: scanned(s, m), lambda s, z: s.sum(-1)),
}
WRONG = {
    "logsumexp of products": lambda s, m, z: lse(s * m),
    "logsumexp of -1": lambda s, m, z: lse(jnp.where(m, s, -1)),
    "logsumexp of 0": lambda s, m, z: lse(jnp.where(m, s, 0)),
    "exp of products": lambda s, m, z: jnp.exp(s * m).sum(-1) / m.sum(),
    "plus -1": lambda s, m, z: lse(s + jnp.where(m, 0, -1)),
    "softmax of products": lambda s, m, z: (jax.nn.softmax(s * m) * s * m).sum(-1),
    "sum of -1": lambda s, m, z: jnp.where(m, s, -1).sum(-1),
    "sum of complements": lambda s, m, z: (1 - jax.nn.sigmoid(s) * m).sum(-1),
    "log of 2": lambda s, m, z: jnp.log(jnp.where(m, s**2 + 1, 2)).sum(-1),
    "margin": lambda s, m, z: jax.nn.relu(0.5 + s * m).sum(-1),
    "softplus": lambda s, m, z: jax.nn.softplus(s * m).sum(-1),
    "min": lambda s, m, z: jnp.where(m, s, 0).min(-1),
    "max": lambda s, m, z: jnp.where(m, s, 0).max(-1),
    "prod": lambda s, m, z: jnp.where(m, s, 0).prod(-1),
    "argmax": lambda s, m, z: z[:, 0] * jnp.argmax(s * m, -1),
    "all": lambda s, m, z: z[:, 0] * (m & (s < 1)).all(-1),
    "any": lambda s, m, z: z[:, 0] * (~m | (s > 1)).any(-1),
    "count": lambda s, m, z: z[:, 0] / (m >= 0).sum(),
    "sort": lambda s, m, z: jnp.sort(jnp.where(m, s, -jnp.inf), -1)[:, 0],
    "largest": lambda s, m, z: jax.lax.top_k(s * m, 2)[0].sum(-1),
    "cumsum": lambda s, m, z: jnp.cumsum(jnp.where(m, s, 1), -1).max(-1),
    "differences": lambda s, m, z: (jnp.diff(s * m, axis=-1) ** 2).sum(-1),
    "last": lambda s, m, z: (s * m)[:, -1],
    "matrix product": lambda s, m, z: (jnp.where(m, s, 1) @ jnp.ones(len(m))) ** 2,
    "scan": lambda s, m, z: scanned(s + 1, m >= 0),
    "callback": lambda s, m, z: z[:, 0] * called(lambda v: v - v.mean(), z[:, 0]),
    "rows by their number": lambda s, m, z: z[:, 0] * (s * m / m.size).sum(-1),
    "mean by a product": lambda s, m, z: s @ (m / 1) / len(m),
    "rows of all": lambda s, m, z: (s * m).sum(-1) / mirror.all_reduce("sum", len(z)),
    "rows but one": lambda s, m, z: (s * m).sum(-1) / (len(m) - 1),
    "root": lambda s, m, z: jnp.sqrt((s**2 * m).sum(-1)) / np.sqrt(len(m)),
    "logarithm of rows": lambda s, m, z: lse(jnp.where(m, s, -jnp.inf)) / np.log(len(m)),
    "product before": lambda s, m, z: (s * m).sum(-1) * z[:, 0] / len(m),
    "means and a number": lambda s, m, z: ((s * m).mean(-1) + 1) / ((s**2 * m).mean(-1) + 1),
    "mean of squares": lambda s, m, z: (s * m).mean(-1) ** 2 / (s**2 * m).mean(-1),
    "weight of a batch": lambda s, m, z: z[:, 0] * len(z),
}


def scores(model, batch):
    z, m = model(batch["x"]), mirror.example_mask(batch)
    every, m = mirror.all_gather((z, m))
    return z @ every.reshape(-1, 4).T / 4, m.reshape(-1), z


def linear():
    return nnx.Linear(4, 4, use_bias=False, rngs=nnx.Rngs(0))


def test_numbers_that_change_the_result_are_rejected(subtests):
    for name, fn in WRONG.items():

        def loss_fn(model, batch, fn=fn):
            return fn(*scores(model, batch))

        with subtests.test(msg=name):
            trainer = mirror.Trainer(linear(), optax.sgd(0.1), loss_fn, strategy=cpu_strategy(3))
            names = ["loss_fn", "test_hidden_padding.py"]
            with raises(ValueError, names=names, values=10, fix="mirror.example_mask"):
                fit(trainer, [{"x": X}])


def test_numbers_that_do_not_change_the_result_give_what_one_device_gives(subtests):
    def loss_fn(model, batch):
        each = {name: fn(*scores(model, batch)) for name, (fn, _) in RIGHT.items()}
        return sum(each.values()), each

    def wanted(kernel):
        z = X.astype(float) @ kernel
        return {name: reference(z @ z.T / 4, z).mean() for name, (_, reference) in RIGHT.items()}

    model = linear()
    kernel = np.asarray(model.kernel[...], float)
    trainer = mirror.Trainer(model, optax.sgd(1.0), loss_fn, strategy=cpu_strategy(3))
    history = fit(trainer, [{"x": X}])
    for name, value in wanted(kernel).items():
        with subtests.test(msg=name):
            assert history[name] == [pytest.approx(value, rel=1e-4)]
    direction = np.random.RandomState(1).randn(4, 4)
    step = 1e-6 * direction
    difference = sum(wanted(kernel + step).values()) - sum(wanted(kernel - step).values())
    gradient = kernel - model.kernel[...]
    assert (gradient * direction).sum() == pytest.approx(difference / 2e-6, rel=1e-3)


# Functions of the outputs `z` of a replica and the mask `m` of its rows. Batches of 3 and 1 on two
# replicas with two rows: one has padding, and of the smaller batch, one has padding only.
NAN = {
    "norm": (lambda z, m: jnp.linalg.norm(z * m[:, None], axis=-1), 3),
    "division by a norm": (lambda z, m: unit(z * m[:, None]).sum(-1), 3),
    "NaN in a product": (lambda z, m: similar(z, unit(hidden(z, m, 0)), m), 3),
    "logarithm": (lambda z, m: jnp.log((z * m[:, None]) ** 2).sum(-1), 3),
    "lgamma": (lambda z, m: jax.scipy.special.gammaln(z**2 * m[:, None]).sum(-1), 3),
    "power": (lambda z, m: (jnp.abs(z * m[:, None]) ** jax.nn.sigmoid(z)).sum(-1), 3),
    "inverse": (lambda z, m: jnp.linalg.inv(matrices(z, m)).sum((1, 2)), 3),
    "loss over the mask": (lambda z, m: cross_entropy(z) / m, 3),
    "softmax of a row of -inf": (lambda z, m: mixed(z, m[None] & m[:, None]), 3),
    "softmax of -inf": (lambda z, m: mixed(z, m[None]), 1),
    "maximum": (lambda z, m: (z - hidden(z, m, -jnp.inf).max(0)).sum(-1) ** 2, 1),
}
FINITE = {
    "norm and a number": lambda z, m: jnp.sqrt(((z * m[:, None]) ** 2).sum(-1) + 1e-6),
    "safe norm": lambda z, m: optax.safe_norm(z * m[:, None], 1e-6, axis=-1),
    "root of 1": lambda z, m: jnp.sqrt(jnp.where(m, (z**2).sum(-1), 1)),
    "hidden before": lambda z, m: unit(hidden(z, m, 0)).sum(-1),
    "hidden afterwards": lambda z, m: jnp.where(m, jnp.sqrt((z**2).sum(-1)), 0),
    "layer norm": lambda z, m: nnx.LayerNorm(4, rngs=nnx.Rngs(0))(z * m[:, None])[:, 0],
    "logsumexp of -inf": lambda z, m: similar(z, z, m),
    "logsumexp of rows of -inf": lambda z, m: lse(
        jnp.where(m[None] & m[:, None], z @ z.T, -jnp.inf)
    ),
    "softmax where": lambda z, m: (jax.nn.softmax(z @ z.T, where=m[None]) @ z).sum(-1),
    "softmax of -1e9": lambda z, m: (jax.nn.softmax(jnp.where(m, z @ z.T, -1e9)) @ z).sum(-1),
    "features by as many as rows": lambda z, m: cross_entropy(z * m[:, None] / 2),
    "callback": lambda z, m: cross_entropy(z) + called(np.cos, z[:, 0]),
    "random callback": lambda z, m: (
        cross_entropy(z) + called(lambda v: np.random.randn(*v.shape), z[:, 0])
    ),
    "callback for two rows": lambda z, m: (
        cross_entropy(z) + called(lambda v: v.reshape(2), z[:, 0])
    ),
    "weights": lambda z, m: mirror.Weighted(cross_entropy(z) * m, m * 1.0),
    "reversed gradient": lambda z, m: cross_entropy(with_rule(z, lambda g: -2 * g)),
    "mean over gathered rows": lambda z, m: (
        cross_entropy(z) - jnp.mean(mirror.all_gather(z), where=mirror.all_gather(m)[:, None])
    ),
}


def hidden(z, m, number):
    return jnp.where(m[:, None], z, number)


def matrices(z, m):
    return (z[:, :, None] * z[:, None] + jnp.eye(4)) * m[:, None, None]


def similar(z, others, m):
    return lse(jnp.where(m, z @ others.T, -jnp.inf))


def unit(z):
    return z / jnp.linalg.norm(z, axis=-1, keepdims=True)


def mixed(z, mask):
    return (jax.nn.softmax(jnp.where(mask, z @ z.T, -jnp.inf)) @ z).sum(-1)


def cross_entropy(z):
    return optax.softmax_cross_entropy_with_integer_labels(z, jnp.arange(len(z)))


def masked_trainer(fn):
    def loss_fn(model, batch):
        return fn(model(batch["x"]), mirror.example_mask(batch))

    options = {"strategy": cpu_strategy(2), "require_equal": False}  # rows of a replica are meant
    return mirror.Trainer(linear(), optax.sgd(0.1), loss_fn, **options)


def test_a_gradient_that_padding_makes_nan_is_rejected(subtests):
    for name, (fn, size) in NAN.items():
        with subtests.test(msg=name):
            names = ["loss_fn", "NaN gradient", "test_hidden_padding.py"]
            with raises(ValueError, names=names, values=size, fix="drop_remainder"):
                fit(masked_trainer(fn), [{"x": X[:4]}, {"x": X[4 : 4 + size]}])


def test_a_gradient_that_is_finite_in_spite_of_padding_is_not_rejected(subtests):
    for name, fn in FINITE.items():
        with subtests.test(msg=name):
            trainer = masked_trainer(fn)
            fit(trainer, [{"x": X[:4]}, {"x": X[4:7]}, {"x": X[7:8]}])
            assert np.isfinite(trainer.model.kernel[...]).all()


def with_rule(z, rule):
    """Returns `z`, whose gradient a rule computes from the one that it receives."""

    @jax.custom_vjp
    def identity(z):
        return z

    identity.defvjp(lambda z: (z, None), lambda _, g: (rule(g),))
    return identity(z)


CLIPPED = {
    "clipped": lambda g: jnp.clip(g, -0.01, 0.01),
    "normalized": lambda g: g / (1e-6 + jnp.linalg.norm(g, axis=-1, keepdims=True)),
    "rounded": lambda g: jnp.round(64 * g) / 64,
}


def test_a_gradient_that_the_loss_clips_does_not_depend_on_padding(subtests):
    """One replica computes the examples alone; padding would shrink what is clipped."""
    batches = [{"x": X[:4]}, {"x": X[4:7]}]
    for name, rule in CLIPPED.items():

        def loss_fn(model, batch, rule=rule):
            return cross_entropy(with_rule(model(batch["x"]), rule))

        with subtests.test(msg=name):
            model, trainers = linear(), []
            for n in (1, 2):
                options = {"strategy": cpu_strategy(n)}
                trainers.append(mirror.Trainer(linear(), optax.sgd(0.1), loss_fn, **options))
            optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
            for batch in batches:
                optimizer.update(model, nnx.grad(lambda m, b: loss_fn(m, b).mean())(model, batch))
            fit(trainers[0], batches)
            found = trainers[0].model.kernel[...]
            np.testing.assert_allclose(found, model.kernel[...], rtol=1e-5, atol=1e-6)
            with raises(
                ValueError, names=["loss_fn", "jax.custom_vjp"], values=3, fix="drop_remainder"
            ):
                fit(trainers[1], batches)


def test_a_gradient_that_the_loss_only_scales_is_not_rejected(subtests):
    """Also of a `Weighted` loss; random numbers do not hide what is clipped."""

    def weighted(model, batch):
        loss = cross_entropy(with_rule(model(batch["x"]), lambda g: 2 * g))
        return mirror.Weighted(loss, 1 + jnp.abs(batch["x"][:, 0]))

    def noisy(model, batch):
        noise = jax.random.normal(jax.random.key(0), batch["x"].shape)
        return cross_entropy(with_rule(model(batch["x"] + noise), CLIPPED["clipped"]))

    options = {"strategy": cpu_strategy(2), "require_equal": False}
    with subtests.test(msg="weighted"):
        fit(mirror.Trainer(linear(), optax.sgd(0.1), weighted, **options), [{"x": X[:3]}])
    with subtests.test(msg="noisy"):
        trainer = mirror.Trainer(linear(), optax.sgd(0.1), noisy, **options)
        with raises(ValueError, names="jax.custom_vjp", values=3, fix="drop_remainder"):
            fit(trainer, [{"x": X[:3]}])


def test_one_replica_does_not_count_padding_among_its_rows(subtests):
    """In the gradient of a mean, which moves rows, and in a divisor."""

    def squares(model, x):
        return (model(x) ** 2).sum(-1)

    def moved(model, x):
        mean = lambda x: squares(model, x).mean()  # noqa: E731
        return squares(model, x + jax.grad(mean)(x))

    def divided(model, x):
        return squares(model, x) / len(x)

    def weighted(model, x):
        return squares(model, x) * np.sqrt(len(x))

    for name, losses in (("moved", moved), ("divided", divided), ("weighted", weighted)):
        with subtests.test(msg=name):
            model, strategy = linear(), cpu_strategy(1)
            trainer = mirror.Trainer(
                linear(), optax.sgd(0.1), lambda m, b, fn=losses: fn(m, b["x"]), strategy=strategy
            )
            optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
            for x in (X[:3], X[3:5]):
                optimizer.update(model, nnx.grad(lambda m, x: losses(m, x).mean())(model, x))
            fit(trainer, [{"x": X[:3]}, {"x": X[3:5]}])
            found = trainer.model.kernel[...]
            np.testing.assert_allclose(found, model.kernel[...], rtol=1e-5, atol=1e-6)
            loss = trainer.evaluate([{"x": X[:3]}, {"x": X[3:5]}])["loss"]
            wanted = [losses(trainer.model, x).sum() for x in (X[:3], X[3:5])]
            np.testing.assert_allclose(loss, sum(wanted) / 5, rtol=1e-5)


class Counting(nnx.Module):
    """Counts the examples that it has seen."""

    def __init__(self, rngs):
        self.linear, self.dropout = linear(), nnx.Dropout(0.5, rngs=rngs)
        self.seen = nnx.Variable(jnp.zeros(()))


def test_padding_is_found_with_dropout_and_in_other_state(subtests):
    def counted(model, batch):
        model.seen[...] += mirror.all_reduce("sum", float(len(batch["x"])))
        return (model.linear(batch["x"]) ** 2).sum(-1)

    def dropped(model, batch):
        z, m = model.linear(batch["x"]), mirror.example_mask(batch)
        mean = mirror.all_reduce("sum", (z * m[:, None]).sum()) / mirror.all_reduce("sum", len(z))
        return (model.dropout(z) ** 2).sum(-1) - mean

    for loss_fn in (counted, dropped):
        with subtests.test(msg=loss_fn.__name__):
            options = {"strategy": cpu_strategy(3), "require_equal": False}
            trainer = mirror.Trainer(Counting(nnx.Rngs(0)), optax.sgd(0.1), loss_fn, **options)
            names = [loss_fn.__name__, "test_hidden_padding.py"]
            with raises(ValueError, names=names, values=10, fix="mirror.example_mask"):
                fit(trainer, [{"x": X}])


def test_statistics_of_a_piece_without_examples_are_rejected():
    """Normalizes pieces of four rows; the second one has none of three examples."""

    def loss_fn(model, batch):
        z = model(batch["x"])
        mask = mirror.example_mask(batch)[:, None]
        return nnx.BatchNorm(4, rngs=nnx.Rngs(0))(z, mask=mask).sum(-1) ** 2

    options = {"accumulate_steps": 2, "strategy": cpu_strategy(1)}
    trainer = mirror.Trainer(linear(), optax.sgd(0.1), loss_fn, **options)
    with (
        pytest.warns(UserWarning, match="batch normalization"),
        raises(ValueError, names=["loss_fn", "2 pieces"], values=3, fix="multiples of 2"),
    ):
        fit(trainer, [{"x": X[:8]}, {"x": X[:3]}])
