"""Random functions of reduced values: computed in parts, they are equal, or cannot be joined."""

import itertools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mirror
from mirror._src.engine.in_step import bind_all_reduce
from mirror._src.engine.reduce_op import prepare
from mirror._src.engine.replica_context import ReplicaContext
from mirror._src.jaxprs.joins import Join, find_joins

NUM_ROWS, NUM_OPERATIONS = 3, 8

UNARY = {
    "negate": lambda x: -x,
    "add a constant": lambda x: x + 1,
    "times a constant": lambda x: x * 3,
    "over a constant": lambda x: x / 2,
    "square": lambda x: x * x,
    "root": lambda x: jnp.sqrt(jnp.abs(x)),
    "sign": jnp.sign,
    "absolute": jnp.abs,
    "to int": lambda x: (8 * x).astype(jnp.int32),
    "to float": lambda x: x.astype(jnp.float32),
    "to half": lambda x: x.astype(jnp.float16),
    "to bool": lambda x: x > 0,
    "total": jnp.sum,
    "largest": jnp.max,
    "first": lambda x: x.ravel()[0],
    "row": lambda x: jnp.broadcast_to(x, (3, *x.shape)).reshape(-1)[:3],
    "matrix": lambda x: jnp.broadcast_to(x.ravel()[:1], (2, 2)) @ jnp.ones((2, 3), x.dtype),
    "cumulated": lambda x: jnp.cumsum(x.ravel()),
    "reversed": lambda x: x.ravel()[::-1],
    "updated": lambda x: jnp.zeros(4, x.dtype).at[1:3].set(x.ravel()[0]),
    "chosen": lambda x: jnp.where(jnp.arange(3) > 1, x.ravel()[0], 1),
    "loop": lambda x: jax.lax.fori_loop(0, 2, lambda _, y: y + y, x),
    "scan": lambda x: jax.lax.scan(lambda c, v: (c + v, c * 2), x.ravel()[0], x.ravel())[1],
    "branch": lambda x: jax.lax.cond(x.ravel()[0] > 0, lambda y: y, lambda y: 2 * y, x),
}
BINARY = {
    "add": lambda x, y: x + y,
    "subtract": lambda x, y: x - y,
    "multiply": lambda x, y: x * y,
    "divide": lambda x, y: x / jnp.where(y == 0, 1, y),
    "maximum": jnp.maximum,
    "concatenate": lambda x, y: jnp.concatenate([x.ravel(), y.ravel()]),
    "select": lambda x, y: jnp.where(x.ravel()[0] > 0, x, y),
    "take": lambda x, y: x.ravel()[jnp.clip(y.ravel()[0].astype(jnp.int32), 0, x.size - 1)],
}


def random_function(seed):
    """Returns a function of rows, a common value and a number, and the names of its operations."""
    rng = np.random.default_rng(seed)
    plan = []
    for number in range(3, 3 + NUM_OPERATIONS):
        kind = rng.choice(["reduce", "unary", "binary"], p=[0.4, 0.35, 0.25])
        table = {"unary": UNARY, "binary": BINARY, "reduce": ("sum", "mean", "max", "min")}[kind]
        plan.append((kind, rng.choice(list(table)), rng.integers(0, number, 2)))

    def function(context, rows, common, number):
        values = [rows, common, number]
        for kind, name, (a, b) in plan:
            x, y = values[a], values[b]
            try:
                if kind == "reduce":
                    value = context.all_reduce(name, x)
                else:
                    value = UNARY[name](x) if kind == "unary" else BINARY[name](x, y)
            except (TypeError, ValueError):  # the shapes or dtypes do not fit
                value = x
            values.append(jnp.asarray(value))
        return values[3:]

    return function, [name for _, name, _ in plan]


def context_of(num_replicas):
    def all_reduce(op, leaves):
        return [bind_all_reduce(op, prepare(op, leaf)) for leaf in leaves]

    strategy = types.SimpleNamespace(
        num_replicas_in_sync=num_replicas,
        cross_device_ops=types.SimpleNamespace(all_reduce=all_reduce),
    )
    return ReplicaContext(strategy, in_step=True)


def replicas_of(function):
    """Returns a function of rows, a common value and numbers that returns each replica's values."""

    @jax.jit
    def run(rows, common, numbers):
        context = context_of(len(rows))
        return jax.vmap(
            lambda x, n: function(context, x, common, n), axis_name=mirror.REPLICA_AXIS
        )(rows, numbers)

    return lambda *arguments: list(map(np.asarray, run(*arguments)))


def joined(values, join):
    """Joins the values of parts of one size, each the values of all replicas of a part."""
    if join is Join.OWN:
        return np.concatenate(values)
    first = np.stack([value[0] for value in values])
    if join is Join.SAME:
        return first[0]
    reduce = {Join.MEAN: np.mean, Join.SUM: np.sum, Join.MAX: np.max, Join.MIN: np.min}[join]
    return reduce(first, axis=0).astype(first.dtype)


def in_parts(function, parts, common, numbers):
    """Returns for each value how it is joined, and the joined value."""
    num_replicas = len(parts[0])

    def traced(rows, common, number):
        return function(context_of(num_replicas), rows, common, number)

    axis = [(mirror.REPLICA_AXIS, num_replicas)]
    program = jax.make_jaxpr(traced, axis_env=axis)(parts[0][0], common, numbers[0][0])
    joins = find_joins(program, [Join.OWN, Join.SAME, Join.OWN], num_replicas)
    run = replicas_of(function)
    results = [run(part, common, own) for part, own in zip(parts, numbers, strict=True)]
    return joins, {
        k: joined([result[k] for result in results], join)
        for k, join in enumerate(joins)
        if join is not Join.NONE
    }


@pytest.mark.nightly
def test_functions_in_parts_are_equal_or_not_joined(subtests):
    for num_replicas, seeds in itertools.product([1, 2], [range(100)]):
        with subtests.test(num_replicas=num_replicas, seeds=seeds):
            num_joined = 0
            for seed in seeds:
                function, names = random_function(seed)
                rows = np.random.default_rng(seed).normal(size=(3, num_replicas, NUM_ROWS))
                rows, common = rows.astype(np.float32), np.float32(1.5)
                numbers = np.arange(3 * num_replicas, dtype=np.int32)
                joins, values = in_parts(function, rows, common, numbers.reshape(3, -1))
                whole = rows.reshape(-1, NUM_ROWS)
                expected = replicas_of(function)(whole, common, numbers)
                for k, value in values.items():
                    is_own = joins[k] is Join.OWN
                    other = expected[k] if is_own else expected[k][0]
                    num_joined += joins[k] not in (Join.OWN, Join.SAME)
                    np.testing.assert_allclose(
                        *(np.asarray(x, np.float64) for x in (value, other)),
                        rtol=1e-2 if other.dtype == np.float16 else 1e-4,
                        atol=1e-3,
                        err_msg=f"seed {seed}, value {k} of {names}, {joins[k]}",
                    )
            assert num_joined > len(seeds)  # not all are rejected
