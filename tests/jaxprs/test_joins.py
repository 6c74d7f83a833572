"""How results of small programs on parts of a batch are joined."""

import jax
import jax.numpy as jnp

import mirror
from mirror._src.jaxprs.joins import Join, find_joins
from mirror._src.jaxprs.trace import trace


def psum(x):
    return jax.lax.psum(x, mirror.REPLICA_AXIS)


# For a value of two replicas that each part has its own of.
JOINS = {
    "sum": (psum, Join.SUM),
    "sum over the number of replicas": (lambda x: psum(x) / 2, Join.MEAN),
    "sum over another number": (lambda x: psum(x) / 3, Join.SUM),
    "sum in a call over the number": (lambda x: jax.jit(psum)(x) / 2, Join.MEAN),
    "sum of a sum": (lambda x: psum(psum(x)), Join.NONE),
    "sum and a constant": (lambda x: psum(x) + 1, Join.NONE),
    "mean in a while": (
        lambda x: jax.lax.fori_loop(0, jnp.int32(3), lambda _, a: 2 * a, psum(x) / 2),
        Join.MEAN,
    ),
    "square in a while": (
        lambda x: jax.lax.fori_loop(0, jnp.int32(3), lambda _, a: a * a, psum(x) / 2),
        Join.NONE,
    ),
    "rounds of each replica": (
        lambda x: jax.lax.while_loop(lambda a: a < x.sum(), lambda a: a + 1, 0.0),
        Join.OWN,
    ),
    "rounds of a sum": (
        lambda x: jax.lax.while_loop(lambda a: a < psum(x).sum(), lambda a: a + 1, 0.0),
        Join.NONE,
    ),
}


def test_joins_of_small_programs(subtests):
    for name, (fn, join) in JOINS.items():
        with subtests.test(msg=name):
            program = trace(lambda x: [fn(x)], [jax.ShapeDtypeStruct((4,), jnp.float32)], 2)
            assert find_joins(program, [Join.OWN], 2) == [join]
