"""`ensure_mirrored` in every derivative, and values that the proof knows to be unchanged."""

import inspect

import jax
import jax.numpy as jnp
from jax import lax

import mirror
from mirror._src.jaxprs.proof import prove
from mirror._src.jaxprs.trace import trace
from tests.jaxprs.proofs import FLOATS, gradient, marks_of
from tests.support.messages import raises
from tests.support.tables import rows


# Ways to use `ensure_mirrored(tree)` inside a step.
def through_grad(wrap, of):
    return lambda x, m: gradient(lambda w: wrap(lambda v: ensured_sum(v, of(v, x)) * v)(w) * x, m)


def ensured_sum(weights, other):
    return mirror.ensure_mirrored({"other": other, "weights": weights})["other"].sum()


def scanned(f):
    return lambda w: lax.scan(lambda c, _: (c + f(c), None), w, None, length=2)[0]


WAYS = {
    "plain": lambda f: f,
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "jit checkpoint": lambda f: jax.jit(jax.checkpoint(f)),
    "scan": scanned,
    "vmap": lambda f: lambda w: jax.vmap(lambda _: f(w))(jnp.zeros(2)),
    "second derivative": lambda f: lambda w: gradient(f, w) * w,
    "forward": lambda f: lambda w: jax.jvp(f, (w,), (w,))[1],
}


@rows("way", WAYS)
def test_ensure_mirrored_rejects_per_replica_values_in_every_derivative(way):
    line = inspect.getsourcelines(ensured_sum)[1] + 1
    names = ["ensure_mirrored", f"test_ensure.py:{line}", "ensured_sum", "['other']"]
    fix = 'all_reduce("mean", grads)'
    with raises(mirror.ReplicaDivergenceError, names=names, fix=fix) as error:
        marks_of(through_grad(way, lambda w, x: jnp.sin(w * x)), 2)
    assert "['weights']" not in str(error.value)


@rows("way", WAYS)
def test_ensure_mirrored_accepts_per_replica_gradients(way):
    assert marks_of(through_grad(way, lambda w, x: jnp.sin(w)), 2) == "P"


def test_ensure_mirrored_accepts_per_replica_tangents():
    def step(x, m):
        f = lambda w: jnp.sin(mirror.ensure_mirrored(w))  # noqa: E731
        return jax.jvp(f, (m,), (x,)), jax.hessian(lambda w: (f(w) * x).sum())(m)

    assert marks_of(step, 2) == "MPP"


def test_ensure_mirrored_names_a_bare_value_and_keeps_integers_and_keys():
    def keeps(x, m):
        key, count = mirror.ensure_mirrored((jax.random.key(0), 3))
        return jax.random.key_data(key) + count

    assert marks_of(keeps, 2) == "M"
    names = ["ensure_mirrored", "test_ensure.py", "<lambda>"]
    fix = 'all_reduce("mean", grads)'
    with raises(mirror.ReplicaDivergenceError, names=names, fix=fix):
        marks_of(lambda x, m: mirror.ensure_mirrored(x), 2)


SAME = {
    "jit": lambda m: jax.jit(lambda a: a)(m),
    "deep": lambda m: jax.jit(jax.checkpoint(jax.jit(lambda a: a)))(m),
    "cond": lambda m: lax.cond(m[0] > 0, jax.jit(lambda a: a), lambda a: a, m),
    "scan carry": lambda m: lax.scan(lambda c, _: (jax.jit(lambda a: a)(c), 0), m, None, 2)[0],
    "while": lambda m: lax.while_loop(lambda c: c[1] < 3, lambda c: (c[0], c[1] + 1), (m, 0))[0],
    "barrier": lambda m: lax.optimization_barrier((m, 1.0))[0],
    "ensured": lambda m: mirror.ensure_mirrored({"m": m})["m"],
}
OTHER = {
    "computed": lambda m: m + 0,
    "swapped": lambda m: lax.scan(lambda c, _: (c[::-1], 0), (m, m + 1), None, 3)[0][0],
    "branch": lambda m: lax.cond(m[0] > 0, lambda a: a, lambda a: a + 1, m),
    "called twice": lambda m: (lambda f: f(f(m)))(jax.jit(lambda a: a * 2)),
}


@rows("step", SAME | OTHER)
def test_proof_recognizes_unchanged_values(step):
    jaxpr = trace(lambda x, m: [step(m)], [FLOATS, FLOATS], 2)
    (mark,) = prove(jaxpr, [True, False])
    assert (mark.source is jaxpr.jaxpr.invars[1]) == (step in SAME.values())
