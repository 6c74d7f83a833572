"""How many all-reduces the results of small programs depend on, one after the other."""

import jax
import jax.numpy as jnp

import mirror
from mirror._src.jaxprs.collective_eqns import chain_lengths
from mirror._src.jaxprs.trace import trace


def psum(x):
    return jax.lax.psum(x, mirror.REPLICA_AXIS)


LENGTHS = {
    "none": (lambda x: jnp.tanh(x), 0),
    "sum": (psum, 1),
    "largest": (lambda x: jax.lax.pmax(x, mirror.REPLICA_AXIS), 1),
    "two sums": (lambda x: psum(x) + psum(x**2), 1),
    "sum in a call": (lambda x: jax.jit(psum)(x) / 2, 1),
    "sum of a sum": (lambda x: psum(psum(x)), 2),
    "statistics of all": (lambda x: psum((x - psum(x.sum())) ** 2), 2),
    "sums in a loop": (lambda x: jax.lax.fori_loop(0, 3, lambda _, a: psum(a), x), 2),
    "loop of sums": (lambda x: jax.lax.fori_loop(0, 3, lambda _, a: a + psum(x), x), 1),
    "gathered": (lambda x: jax.lax.all_gather(x, mirror.REPLICA_AXIS), 2),
    "rounds of a sum": (
        lambda x: jax.lax.while_loop(lambda a: a < psum(x).sum(), lambda a: a + 1, 0.0),
        1,
    ),
    "sum of the rounds of a sum": (
        lambda x: psum(jax.lax.while_loop(lambda a: a < psum(x).sum(), lambda a: a + 1, 0.0)),
        2,
    ),
}


def test_chains_of_small_programs(subtests):
    for name, (fn, length) in LENGTHS.items():
        with subtests.test(msg=name):
            program = trace(lambda x: [fn(x)], [jax.ShapeDtypeStruct((4,), jnp.float32)], 2)
            assert chain_lengths(program) == [length]
