"""Random programs: every value they compute, run with `jax.pmap`, is as the proof marks it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from mirror.program.proof import prove
from mirror.program.trace import trace
from tests.test_proof import AXIS, index, ring, total


def nested(name, body):
    def last(a, b):
        return body([a, b])[-1]

    def rounds(limit):
        step = lambda c: (c[0] + 1, last(c[1], c[2]), c[1])  # noqa: E731
        return lambda a, b: lax.while_loop(
            lambda c: c[0] < limit(a, b), step, (0, jnp.sin(a), b + 0)
        )[1]

    return {
        "jit": jax.jit(last),
        "checkpoint": jax.checkpoint(last),
        "scan": lambda a, b: lax.scan(lambda c, s: ((last(*c), c[0] + s), None), (a + 0, b + 0), a)[
            0
        ][1],
        "cond": lambda a, b: lax.cond(a[0] > b[1], last, lambda a, b: b, a, b),
        "while": rounds(lambda a, b: (a[0] > 0) + 1),
        "fori": rounds(lambda a, b: 2),
    }[name]


FLAT = {
    "add": lambda a, b: jnp.sin(a + b),
    "mul": lambda a, b: a * b,
    "first": lambda a, b: a,
    "fresh": lambda a, b: jnp.cos(jnp.arange(4.0)),
}
TALK = {
    "psum": lambda a, b: jnp.sin(total(a)),
    "pmax": lambda a, b: lax.pmax(b, AXIS),
    "gather": lambda a, b: lax.all_gather(a, AXIS).mean(0) + b,
    "ring": lambda a, b: lax.ppermute(a, AXIS, ring()),
    "index": lambda a, b: a + index(),
}


def random_program(rng, length, depth, talks=True):
    names = [*FLAT, *(TALK if talks else {})]
    names += ["jit", "checkpoint", "scan", "cond", "while", "fori"] if depth else []
    code = []
    for name in rng.choice(names, length):
        operation = {**FLAT, **TALK}.get(name)
        if operation is None:
            within = talks and name not in ("cond", "while")
            operation = nested(name, random_program(rng, 3, depth - 1, within))
        code.append((operation, *rng.integers(0, 100, 2)))

    def run(values):
        values = list(values)
        for operation, i, j in code:
            values.append(operation(values[i % len(values)], values[j % len(values)]))
        return values

    return run


@pytest.mark.parametrize("seed", range(12))
def test_random_programs_are_as_marked(seed):
    program = random_program(np.random.default_rng(seed), 10, 2)
    short = jax.ShapeDtypeStruct((4,), np.float32)
    jaxpr = trace(lambda *values: program(values), [short, short], 4)
    marks = prove(jaxpr, [True, False])
    run = jax.pmap(
        lambda *values: program(values), AXIS, in_axes=(0, None), devices=jax.devices("cpu")[:4]
    )
    rng = np.random.default_rng(seed)
    out = run(rng.normal(size=(4, 4)).astype(np.float32), np.float32([0.1, -1, 2, 0.5]))
    for mark, value in zip(marks, map(np.asarray, out), strict=True):
        if not mark.per_replica:
            np.testing.assert_array_equal(value, np.broadcast_to(value[:1], value.shape))
