"""What `relate` proves about the values of steps, and that none of it is false."""

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mirror._src.jaxprs.relate import relate
from mirror._src.jaxprs.relations import SAME, Kind, Why, rows
from mirror._src.jaxprs.trace import trace
from tests.fuzz import mutants
from tests.fuzz.equality import check, evaluated, holds, related
from tests.support.tables import rows as table

N, SIZE = 2, 4


def psum(x):
    return jax.lax.psum(x, "replica")


def pmean(x):
    return jax.lax.pmean(x, "replica")


def cross_entropy(w, x, y):
    return -jnp.take_along_axis(jax.nn.log_softmax(x @ w), y[:, None], 1)[:, 0]


def entropy(h):
    share = pmean(jax.nn.softmax(h).mean(0))
    return share * jnp.log(share)


def picked(w, x, y):
    return -jax.nn.log_softmax(x @ w)[jnp.arange(len(y)), y]


def gradient(loss):
    return lambda w, x, y: jax.grad(lambda w: loss(w, x, y))(w)


def mean(w, x, y):
    return cross_entropy(w, x, y).mean()


def total(w, x, y):
    return cross_entropy(w, x, y).sum()


def clipped(grads):
    return grads * jnp.minimum(1, 1 / jnp.linalg.norm(grads))


def distances(x):
    return ((x[:, None] - x[None]) ** 2).mean((1, 2))


def synced_norm(w, x, y):
    h = x @ w
    center = pmean(h.mean(0))
    variance = pmean((h**2).mean(0)) - center**2
    return (((h - center) / jnp.sqrt(variance + 1e-5)) ** 3).mean()


def pieces(x):
    return x.reshape(2, len(x) // 2, *x.shape[1:])


def mask(y):
    return (y > 0).astype(jnp.float32)


def noise(key, x):
    return jax.random.normal(key, x.shape)


def of_examples(x):
    positions = jnp.arange(len(x)) + jax.lax.axis_index("replica") * len(x)
    return jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(0), positions)


def own_key():
    return jax.random.fold_in(jax.random.key(0), jax.lax.axis_index("replica"))


def spectrum(x, axis):
    return jnp.abs(jnp.fft.fft(x, axis=axis)) ** 2


def solution(w, x):
    return jnp.linalg.solve(w @ w.T + jnp.eye(3), x.T).T


def solution_of_each(w, x):
    rows = jnp.tanh(x @ w)
    systems = rows[:, :, None] * rows[:, None] + jnp.eye(3)
    return jnp.linalg.solve(systems, x[..., None])[..., 0]


def image_loss(kernel, x):
    image = x.reshape(-1, 3, 1, 1) * jnp.ones((1, 3, 3, 1))
    numbers = ("NHWC", "HWIO", "NHWC")
    out = jax.lax.conv_general_dilated(image, kernel, (1, 1), "SAME", dimension_numbers=numbers)
    return (
        jax.lax.reduce_window(out, -jnp.inf, jax.lax.max, *[(1, 2, 2, 1)] * 2, "SAME") ** 2
    ).mean()


EQUAL = {
    "mean of means": lambda w, x, y: pmean(gradient(mean)(w, x, y)),
    "of picked elements": lambda w, x, y: pmean(gradient(lambda *a: picked(*a).mean())(w, x, y)),
    "sum of sums": lambda w, x, y: psum(gradient(total)(w, x, y)),
    "over all rows": lambda w, x, y: psum(gradient(total)(w, x, y)) / psum(len(x)),
    "clipped after": lambda w, x, y: clipped(pmean(gradient(mean)(w, x, y))),
    "counted": lambda w, x, y: psum((cross_entropy(w, x, y) * mask(y)).sum()) / psum(mask(y).sum()),
    "statistics of all": lambda w, x, y: pmean(gradient(synced_norm)(w, x, y)),
    "decay in a mean": lambda w, x, y: pmean(
        gradient(lambda w, x, y: mean(w, x, y) + (w**2).sum())(w, x, y)
    ),
    "embedding": lambda w, x, y: pmean(gradient(lambda w, x, y: (w[y] ** 2).mean())(w, x, y)),
    "loop": lambda w, x, y: pmean(
        jax.lax.scan(lambda h, _: (jnp.tanh(h @ w), None), x, None, length=3)[0].mean()
    ),
    "loop over rows": lambda w, x, y: pmean(jax.lax.map(lambda r: jnp.sin(r @ w).sum(), x).mean()),
    "accuracy": lambda w, x, y: pmean((jnp.argmax(x @ w, -1) == y).mean()),
    "largest": lambda w, x, y: jax.lax.pmax(x.max(), "replica"),
    "whether any row": lambda w, x, y: jax.lax.pmax((y > 2).any().astype(int), "replica"),
    "sums that are filled by zeros": lambda w, x, y: psum(
        x.sum(0).at[jnp.arange(5)].get(mode="fill", fill_value=0.0)
    ),
    "gathered": lambda w, x, y: (lambda g: jax.nn.log_softmax(g @ g.T).mean())(
        jax.lax.all_gather(x, "replica", tiled=True)
    ),
    "image": lambda w, x, y: pmean(jax.grad(image_loss)(jnp.ones((2, 2, 1, 4)), x)),
    "spectrum of features": lambda w, x, y: pmean(
        gradient(lambda w, x, y: spectrum(x @ w, 1).mean())(w, x, y)
    ),
    "real spectrum": lambda w, x, y: pmean(
        gradient(lambda w, x, y: (jnp.fft.irfft(jnp.fft.rfft(x @ w), 3) ** 3).mean())(w, x, y)
    ),
    "systems": lambda w, x, y: pmean(
        gradient(lambda w, x, y: (solution(w, x) ** 3).mean())(w, x, y)
    ),
    "a system of each row": lambda w, x, y: pmean(
        gradient(lambda w, x, y: (solution_of_each(w, x) ** 3).mean())(w, x, y)
    ),
    "noise of examples": lambda w, x, y: psum(
        (x * jax.vmap(lambda k: jax.random.normal(k, (3,)))(of_examples(x))).sum()
    ),
    "shared noise": lambda w, x, y: w + noise(jax.random.key(0), w),
    "scattered sums": lambda w, x, y: jax.lax.all_gather(
        jax.lax.psum_scatter(
            x.T @ jnp.tile(x, 2)[:, :4], "replica", scatter_dimension=1, tiled=True
        ),
        "replica",
        axis=1,
        tiled=True,
    ),
    "products of features": lambda w, x, y: psum(
        gradient(lambda w, x, y: (jnp.prod(x @ w, -1) ** 2).sum())(w, x, y)
    ),
    "tiled": lambda w, x, y: psum((jnp.tile(x, (1, 2)) ** 2).sum()),
    "accumulated rows": lambda w, x, y: psum(
        jax.lax.scan(lambda c, r: (c + jnp.tanh(r @ w), None), jnp.zeros(3), x)[0]
    ),
    "accumulated pieces": lambda w, x, y: psum(
        jax.lax.scan(
            lambda c, p: (c + gradient(total)(w, *p), None), 0 * w, (pieces(x), pieces(y))
        )[0]
    ),
    "pieces at once": lambda w, x, y: pmean(jnp.tanh(pieces(x)).mean()),
    "pieces and back": lambda w, x, y: psum((jnp.tanh(pieces(x)).reshape(-1, 3) @ w).sum()),
    "layers in pieces": lambda w, x, y: psum(
        jax.lax.scan(
            lambda c, p: (
                c + jax.lax.scan(lambda h, k: (jnp.tanh(h @ w + k), None), p, w)[0].sum(0),
                None,
            ),
            jnp.zeros(3),
            pieces(x),
        )[0]
    ),
    "by counted ones": lambda w, x, y: pmean(
        gradient(lambda *a: total(*a) / jnp.ones(len(a[2])).sum())(w, x, y)
    ),
    "zeros that are padded": lambda w, x, y: w + psum(jnp.pad(jnp.zeros((2, 3)), ((0, 1), (0, 0)))),
    "zeros that rows pick": lambda w, x, y: w + psum(jnp.zeros((5, 3))[y].sum(0)),
    "zeros beside zeros": lambda w, x, y: w + psum(jnp.zeros((3, 3)).at[0].set(jnp.zeros(3))),
    "scaled roots": lambda w, x, y: (lambda g: g / jnp.linalg.norm(g))(
        psum(gradient(mean)(w, x, y))
    ),
    "entropy of weight 0": lambda w, x, y: psum(
        gradient(lambda w, x, y: total(w, x, y) + 0.0 * entropy(x @ w).sum())(w, x, y)
    ),
    "the first of equal rows": lambda w, x, y: pmean(
        (x * jnp.ones_like(x)[0] * jnp.broadcast_to(w[0], x.shape)[1]).mean(0)
    ),
    "a mean that is added to rows": lambda w, x, y: pmean(
        (cross_entropy(w, x, y) + 0.1 * jnp.abs(x @ w).mean()).mean()
    ),
    "rows that are centered": lambda w, x, y: pmean((1 - 2 * (x @ w - x.mean(0))).sum(1).mean()),
    "rematerialized": lambda w, x, y: pmean(gradient(jax.checkpoint(mean))(w, x, y)),
}
OTHERS = {
    "sum of means": (lambda w, x, y: psum(gradient(mean)(w, x, y)), Why.SCALE),
    "divided twice": (lambda w, x, y: pmean(gradient(mean)(w, x, y) / 2 / len(x)), None),
    "by its own rows": (lambda w, x, y: psum(gradient(total)(w, x, y)) / len(x), Why.SCALE),
    "sum of mirrored": (lambda w, x, y: psum(w), Why.SCALE),
    "clipped before": (lambda w, x, y: pmean(clipped(gradient(mean)(w, x, y))), Why.PART),
    "counted by itself": (
        lambda w, x, y: pmean((cross_entropy(w, x, y) * mask(y)).sum() / mask(y).sum()),
        Why.PART,
    ),
    "own statistics": (lambda w, x, y: pmean(((x - x.mean(0)) ** 4).mean()), Why.PART),
    "decay in a sum": (
        lambda w, x, y: psum(gradient(lambda w, x, y: total(w, x, y) + (w**2).sum())(w, x, y)),
        Why.SCALE,
    ),
    "first row": (lambda w, x, y: psum(x[0]), Why.ROWS),
    "similarities": (lambda w, x, y: pmean(jax.nn.log_softmax(x @ x.T).mean()), Why.ROWS),
    "running sum": (lambda w, x, y: psum(jnp.cumsum(x, 0).sum()), Why.UNKNOWN),
    "a share of the rows": (lambda w, x, y: psum(x[: len(x) // 2].sum()), Why.UNKNOWN),
    "distances": (
        lambda w, x, y: psum(gradient(lambda w, x, y: distances(x @ w).mean())(w, x, y)),
        Why.ROWS,
    ),
    "hidden pairs": (
        lambda w, x, y: psum(
            gradient(
                lambda w, x, y: jnp.where(y[:, None] == y, distances(x @ w)[:, None], -1e9).max()
            )(w, x, y)
        ),
        Why.ROWS,
    ),
    "ones for pairs": (
        lambda w, x, y: jnp.broadcast_to(1.0, (len(x), len(x))).mean(),
        Why.CONSTANT,
    ),
    "products of pairs": (
        lambda w, x, y: pmean(jnp.tanh(x[:, None] * x[None]).mean()),
        Why.ROWS,
    ),
    "pairs on the diagonal": (lambda w, x, y: psum(jnp.diag(x @ x.T).sum()), Why.UNKNOWN),
    "clipped sum of means": (
        lambda w, x, y: clipped(psum(gradient(mean)(w, x, y))),
        Why.UNKNOWN,
    ),
    "digits of a sum": (
        lambda w, x, y: psum(y.sum() // 256) * 256 + psum(y.sum() % 256),
        Why.UNKNOWN,
    ),
    "shuffled rows": (
        lambda w, x, y: psum(jax.random.permutation(jax.random.key(0), x).sum(0)),
        Why.UNKNOWN,
    ),
    "function of each piece": (lambda w, x, y: psum(jnp.tanh(pieces(x).sum(1)).sum(0)), Why.PART),
    "weights of the rounds": (
        lambda w, x, y: psum(
            jax.lax.scan(lambda c, p: (c + p[0].sum() * p[1], None), 0.0, (pieces(x), w[0, :2]))[0]
        ),
        Why.UNKNOWN,
    ),
    "weights of rows of the rounds": (
        lambda w, x, y: psum(
            jax.lax.scan(
                lambda c, p: (c + (p[0] * (p[1] * jnp.ones_like(p[0]))).sum(), None),
                0.0,
                (pieces(x), w[0, :2]),
            )[0]
        ),
        Why.UNKNOWN,
    ),
    "sums and means of pieces": (
        lambda w, x, y: psum(
            jax.lax.scan(lambda c, p: (c + p.sum() + p.mean(), None), 0.0, pieces(x))[0]
        ),
        Why.PART,
    ),
    "a first value of each replica": (
        lambda w, x, y: psum(jax.lax.scan(lambda c, p: (c + p.sum(0), None), w[0], pieces(x))[0]),
        Why.UNKNOWN,
    ),
    "scattered weights": (
        lambda w, x, y: jax.lax.all_gather(
            jax.lax.psum_scatter(w[:2], "replica", scatter_dimension=0, tiled=True),
            "replica",
            tiled=True,
        ),
        Why.SCALE,
    ),
    "a share by an index": (
        lambda w, x, y: psum(
            jax.lax.dynamic_slice_in_dim(x, w[0, 0].astype(jnp.int32), len(x) // 2).sum()
        ),
        Why.UNKNOWN,
    ),
    "rows by an index": (lambda w, x, y: psum(x[np.array([0, 2])].sum()), Why.ROWS),
    "sums of all pieces but one": (
        lambda w, x, y: psum(
            jax.lax.scan(lambda c, p: (p.sum(0), c), jnp.zeros(3), pieces(x))[1].sum(0)
        ),
        Why.UNKNOWN,
    ),
    "decaying pieces": (
        lambda w, x, y: psum(
            jax.lax.scan(lambda c, p: (0.5 * c + p.sum(), None), 0.0, pieces(x))[0]
        ),
        Why.UNKNOWN,
    ),
    "read total": (
        lambda w, x, y: psum(
            jax.lax.scan(lambda c, p: (c + p.sum(), jnp.tanh(c)), 0.0, pieces(x))[1].sum()
        ),
        Why.UNKNOWN,
    ),
    "scaled by each piece": (
        lambda w, x, y: psum(
            jax.lax.scan(
                lambda c, p: (c + p[0].sum() * psum((p[1] * jnp.ones_like(p[0])).sum()), None),
                0.0,
                (pieces(x), w[0, :2]),
            )[0]
        ),
        Why.UNKNOWN,
    ),
    "every second piece": (
        lambda w, x, y: psum(
            jax.lax.scan(
                lambda c, p: ((c[0] + jnp.where(c[1] > 0, p.sum(), 0.0), 1 - c[1]), None),
                (0.0, 1),
                pieces(x),
            )[0][0]
        ),
        Why.UNKNOWN,
    ),
    "one key": (lambda w, x, y: psum((x * noise(jax.random.key(0), x)).sum()), Why.SAMPLES),
    "key of the replica": (lambda w, x, y: psum((x * noise(own_key(), x)).sum()), Why.SAMPLES),
    "mean of maxima": (lambda w, x, y: pmean(x.max()), Why.EXTREME),
    "whether the largest is not zero": (
        lambda w, x, y: jax.lax.pmax(y.max().astype(bool).astype(int), "replica"),
        Why.UNKNOWN,
    ),
    "bits of rows": (
        lambda w, x, y: jax.lax.pmax(jnp.bitwise_or.reduce(y), "replica"),
        Why.UNKNOWN,
    ),
    "sums that are filled": (
        lambda w, x, y: psum(x.sum(0).at[jnp.arange(5)].get(mode="fill", fill_value=1.0)),
        Why.UNKNOWN,
    ),
    "zeros that rows pick, or one": (
        lambda w, x, y: w + psum(jnp.zeros((5, 3)).at[y].get(mode="fill", fill_value=1.0).sum(0)),
        Why.UNKNOWN,
    ),
    "zeros that a function changes": (
        lambda w, x, y: w + psum(jnp.zeros((3, 3)).at[0].apply(jnp.cos)),
        None,
    ),
    "weights by rows that are filled": (
        lambda w, x, y: psum((w[0] / len(x)).at[y].get(mode="fill", fill_value=1.0).sum()),
        Why.UNKNOWN,
    ),
    "branch on a part": (
        lambda w, x, y: psum(jax.lax.cond(x.sum() > 0, lambda: x.sum(), lambda: 0.0)),
        Why.PART,
    ),
    "rounded": (lambda w, x, y: psum(jnp.floor(x.sum())), Why.PART),
    "spectrum of rows": (lambda w, x, y: psum(spectrum(x, 0).sum()), Why.UNKNOWN),
    "systems of parts": (lambda w, x, y: psum(solution(x.T @ x, w)), Why.PART),
    "sorted rows": (lambda w, x, y: psum(jnp.sort(x, 0)[0]), Why.UNKNOWN),
    "softmax of rows": (lambda w, x, y: psum(jax.nn.softmax(x, 0).sum()), Why.UNKNOWN),
    "mixed axes": (lambda w, x, y: psum(x.reshape(3, -1).max(1)), Why.UNKNOWN),
    "rounds for the rows": (
        lambda w, x, y: jax.lax.fori_loop(0, len(x), lambda _, c: c * 0.5, w),
        Why.UNKNOWN,
    ),
    "decay for the rows": (
        lambda w, x, y: jax.lax.scan(lambda c, _: (c * 0.5, None), w, x)[0],
        Why.UNKNOWN,
    ),
    "diagonal by positions in both columns": (
        lambda w, x, y: psum(
            jax.lax.gather(
                x,
                jax.lax.broadcasted_iota(jnp.int32, (len(x), 2), 0),
                jax.lax.GatherDimensionNumbers((), (0, 1), (0, 1)),
                (1, 1),
                mode="clip",
            ).sum()
        ),
        Why.UNKNOWN,
    ),
    "writes by positions in both columns": (
        lambda w, x, y: psum(
            jax.lax.scatter(
                jnp.zeros_like(x),
                jax.lax.broadcasted_iota(jnp.int32, (len(x), 2), 0),
                x[:, 0],
                jax.lax.ScatterDimensionNumbers((), (0, 1), (0, 1)),
            ).sum(0)
        ),
        Why.UNKNOWN,
    ),
    "another program": (
        lambda w, x, y: psum(jnp.tanh(x).sum() if len(x) > SIZE else x.sum()),
        Why.UNKNOWN,
    ),
    "another operand": (lambda w, x, y: w if len(x) > SIZE else w.T, Why.UNKNOWN),
    "another constant": (lambda w, x, y: w * (len(x) + 1), Why.SCALE),
    "a negative factor": (lambda w, x, y: jnp.abs(w * (len(x) - 6)), Why.UNKNOWN),
    "rows less one": (lambda w, x, y: psum(x.sum()) / (N * (len(x) - 1)), Why.SCALE),
    "narrow sum": (
        lambda w, x, y: psum(x.astype(jnp.int8).sum(dtype=jnp.int8).astype(jnp.int32)),
        Why.UNKNOWN,
    ),
    "0 times what may be infinite": (
        lambda w, x, y: psum(x.sum(0) + 0.0 * jnp.log(x.sum(0))),
        Why.UNKNOWN,
    ),
    "by the root of the rows": (
        lambda w, x, y: (lambda z: pmean(z.T @ z))(x / np.float32(np.sqrt(len(x)))),
        Why.UNKNOWN,
    ),
    "the last of equal rows": (
        lambda w, x, y: jnp.broadcast_to(w[0], x.shape)[-1],
        Why.UNKNOWN,
    ),
    "whether a count of replicas is not zero": (
        lambda w, x, y: (psum(jnp.isnan(x).any().astype(int)) > 0).astype(int),
        Why.UNKNOWN,
    ),
    "a count of replicas": (lambda w, x, y: psum(jnp.isnan(x).any().astype(int)), Why.EXTREME),
    "a sum that is added to rows": (lambda w, x, y: psum((x + x.sum(0)).sum(0)), Why.PART),
    "squares of centered rows": (lambda w, x, y: psum(((x - x.mean(0)) ** 2).sum()), Why.PART),
    "callback": (
        lambda w, x, y: jax.pure_callback(lambda v: v, jax.ShapeDtypeStruct((3, 3), w.dtype), w),
        Why.UNKNOWN,
    ),
}


def relation_of(step):
    def types(size):
        shapes = ((3, 3), "float32"), ((size, 3), "float32"), ((size,), "int32")
        return [jax.ShapeDtypeStruct(shape, np.dtype(dtype)) for shape, dtype in shapes]

    programs = [
        trace(lambda *a: [step(*a)], types(size * SIZE), n, "replica")
        for size, n in ((1, N), (N, 1))
    ]
    (found,) = relate(*programs, [SAME, rows(0), rows(0)], N)
    return found


@table("name", list(EQUAL))
def test_steps_that_equal_one_device_are_proved(name):
    assert relation_of(EQUAL[name]).is_equal


@table("name", list(OTHERS))
def test_steps_that_may_differ_are_not(name):
    step, why = OTHERS[name]
    found = relation_of(step)
    assert not found.is_equal
    assert (found.cause.why if found.cause else None) is why or why is None
    if found.kind is Kind.OTHER and why is not Why.UNKNOWN:
        assert "test_relate.py" in found.cause.line


def test_what_is_proved_of_random_steps_is_true():
    check(2, Counter())


@pytest.mark.nightly
@table("first", range(0, 200, 20))
def test_what_is_proved_of_many_random_steps_is_true(first):
    tally = Counter()
    for seed in range(first, first + 20):
        check(seed, tally)
    print(dict(tally))


# Values of each kind of relation, and how a program may replace them by zeros.
VALUES = {
    "same": lambda w, x: w[0],
    "rows": lambda w, x: x,
    "part": lambda w, x: x.sum(0),
    "spread": lambda w, x: jnp.broadcast_to(x.sum(0), x.shape),
    "most": lambda w, x: x.max(0),
    "least": lambda w, x: x.min(0),
    "index": lambda w, x: jnp.arange(len(x)),
    "number": lambda w, x: jax.lax.axis_index("replica"),
}
CHOICES = {
    "where": lambda flag, v: jnp.where(flag, v, 0),
    "cond": lambda flag, v: jax.lax.cond(flag, lambda v: v, jnp.zeros_like, v),
    "switch": lambda flag, v: jax.lax.switch(
        flag.astype(int) + 1, [jnp.zeros_like, jnp.zeros_like, lambda v: v], v
    ),
    "scan": lambda flag, v: jax.lax.scan(
        lambda c, use: (jnp.where(flag, v, 0 * v), c), jnp.zeros_like(v), None, length=2
    )[1][0],
    "while": lambda flag, v: jax.lax.while_loop(
        lambda c: flag & (c[0] < 2), lambda c: (c[0] + 1, v), (0, jnp.zeros_like(v))
    )[1],
}


def uses(x, v):
    """Yields a value, and what it selects if it is an index or the number of a replica."""
    yield v
    if jnp.issubdtype(v.dtype, jnp.integer):
        yield x[v]
        yield jnp.arange(len(x)) + v * len(x)


def reset_totals(choice, flag, x):
    """Yields sums of loops over rows and over pieces whose totals may become zeros."""
    for each in (x, pieces(x)):

        def add(total, part):
            return choice(flag, total) + part.reshape(-1, 3).sum(0), None

        yield psum(jax.lax.scan(add, jnp.zeros(3, x.dtype), each)[0])


@table("choice", list(CHOICES))
def test_what_is_proved_of_values_or_zeros_is_true(choice):
    def step(w, x, *_):
        results = {}
        choose = CHOICES[choice]
        for sign in (-1, 1):
            flag = sign * w[0, 0] > 0
            for name, value in VALUES.items():
                for i, each in enumerate(uses(x, choose(flag, value(w, x)))):
                    results[name, sign, i] = each
            for i, each in enumerate(reset_totals(choose, flag, x)):
                results["total", sign, i] = each
        names[:] = results
        return list(results.values())

    names = []
    with jax.enable_x64(True):
        relations = related(step)
        values, whole = evaluated(jax.jit(step), 0)
    facts = zip(names, relations, values, whole, strict=True)
    assert not [name for name, *fact in facts if not holds(*fact)]


def test_a_mistake_is_called_different():
    tally = Counter()
    mutants.check("regression", "loss", "rows of one replica", tally)
    assert tally == {"different": 1}


@pytest.mark.slow
def test_a_sample_of_mistakes_is_not_called_equal(subtests):
    tally = Counter()
    for name in list(mutants.STEPS)[::5]:
        place, mistake = mutants.mistakes(name)[0]
        with subtests.test(step=name, place=place, mistake=mistake):
            mutants.check(name, place, mistake, tally)
    assert tally["different"] > 3


@pytest.mark.nightly
@table("name", list(mutants.STEPS))
def test_mistakes_of_every_step_are_not_called_equal(name, subtests):
    right, tally = Counter(), Counter()
    mutants.check(name, "", "", right)
    assert right == {"equal": 1}
    for place, mistake in mutants.mistakes(name):
        with subtests.test(place=place, mistake=mistake):
            mutants.check(name, place, mistake, tally)
    assert sum(tally.values()) >= 15
    assert sum(count for verdict, count in tally.items() if "unknown" not in verdict) >= 8


def test_right_steps_are_not_traced_again(subtests):
    """The guess, from the program of a replica alone, is that they equal one device."""
    for name in list(mutants.STEPS)[::3]:
        with subtests.test(step=name):
            assert mutants.guessed(name, "", "") == (False, False)


@pytest.mark.slow
def test_mistakes_are_guessed():
    tally = Counter()
    for name in mutants.STEPS:
        tally.update(mutants.guessed(name, *each) for each in mutants.mistakes(name)[:2])
    assert tally[True, False] < 0.2 * tally[True, True], tally
    assert tally[False, True] < 0.1 * sum(tally.values()), tally
