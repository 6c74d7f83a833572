"""Steps on which all executors must agree, and the comparison of their results."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen, nnx

import mirror
from mirror import REPLICA_AXIS, PerReplica
from tests.support.steps import context
from tests.support.strategies import executor

N = 4
RING = [(i, (i + 1) % N) for i in range(N)]
HALVES = [[2, 0], [1, 3]]  # not in order


def rows(*shape, dtype=np.float32, seed=0):
    """Returns per-replica values of a dtype, some of them negative if it is signed."""
    values = np.random.RandomState(seed).randn(N, *shape) * 3
    if np.issubdtype(dtype, np.complexfloating):
        values = values + 1j * values[::-1]
    if np.issubdtype(dtype, np.unsignedinteger) or dtype == np.bool_:
        values = np.abs(np.round(values - 1))
    return PerReplica.from_stacked(values.astype(dtype))


# The steps. Each takes what its row in the table says, and returns results of any kind.


def reductions(tree):
    ordered = {k: x for k, x in tree.items() if not jnp.iscomplexobj(x)}
    return {
        "sum": context().all_reduce("sum", tree),
        "mean": context().all_reduce("mean", tree),
        "min": context().all_reduce("min", ordered),
        "max": context().all_reduce("max", ordered),
        "own": tree,
    }


def by_hand(tree):
    """Every collective of JAX's, for every dtype."""
    i = jax.lax.axis_index(REPLICA_AXIS)
    numbers = {k: x for k, x in tree.items() if x.dtype != jnp.bool_}
    ordered = {k: x for k, x in numbers.items() if not jnp.iscomplexobj(x)}
    return {
        "psum": jax.lax.psum(numbers, REPLICA_AXIS),
        "pmean": jax.lax.pmean(numbers, REPLICA_AXIS),
        "pmax": jax.lax.pmax(ordered, REPLICA_AXIS),
        "pmin": jax.lax.pmin(ordered, REPLICA_AXIS),
        "all_gather": jax.lax.all_gather(tree, REPLICA_AXIS),
        "ppermute": jax.lax.ppermute(tree, REPLICA_AXIS, RING),
        "all_to_all": jax.lax.all_to_all(jax.tree.map(lambda x: x[:N], tree), REPLICA_AXIS, 0, 0),
        "psum_scatter": jax.tree.map(lambda x: jax.lax.psum_scatter(x[:N], REPLICA_AXIS), numbers),
        "id": i,
        "size": jax.lax.axis_size(REPLICA_AXIS),
    }


def shapes_of_moves(x):
    """The tiled and untiled kinds along each axis; `x` is (4, 8)."""
    axis = REPLICA_AXIS
    return {
        "gather": [
            jax.lax.all_gather(x, axis, axis=k, tiled=t) for k in (0, 1) for t in (False, True)
        ],
        "gather last": jax.lax.all_gather(x, axis, axis=2),
        "gather by context": context().all_gather(x, -1),
        "to all": [jax.lax.all_to_all(x, axis, s, c, tiled=True) for s in (0, 1) for c in (0, 1)],
        "to all, untiled": [jax.lax.all_to_all(x, axis, 0, c) for c in (0, 1)],
        "scatter": [jax.lax.psum_scatter(x, axis, scatter_dimension=k, tiled=True) for k in (0, 1)],
        "scatter, untiled": jax.lax.psum_scatter(x, axis, scatter_dimension=0),
        "shuffle": jax.lax.pshuffle(x, axis, [2, 0, 3, 1]),
    }


def part_of_a_ring(x):
    return jax.lax.ppermute(x, REPLICA_AXIS, [(0, 2), (3, 1)])


def in_groups(x):
    groups = functools.partial(dict, axis_index_groups=HALVES)
    return {
        "psum": jax.lax.psum(x, REPLICA_AXIS, **groups()),
        "pmean": jax.lax.pmean(x, REPLICA_AXIS, **groups()),
        "pmax": jax.lax.pmax(x, REPLICA_AXIS, **groups()),
        "all_gather": jax.lax.all_gather(x, REPLICA_AXIS, **groups()),
        "psum_scatter": jax.lax.psum_scatter(x, REPLICA_AXIS, tiled=True, **groups()),
        "all_to_all": jax.lax.all_to_all(x, REPLICA_AXIS, 0, 0, tiled=True, **groups()),
    }


@jax.custom_jvp
def with_jvp(x):
    return jax.lax.pmean(x**2, REPLICA_AXIS)


@with_jvp.defjvp
def _(primals, tangents):
    (x,), (t,) = primals, tangents
    return with_jvp(x), jax.lax.pmean(3 * x * t, REPLICA_AXIS)


@jax.custom_vjp
def with_vjp(x):
    return jax.lax.pmean(x**2, REPLICA_AXIS)


with_vjp.defvjp(lambda x: (with_vjp(x), x), lambda x, g: (jax.lax.psum(g, REPLICA_AXIS) * 5 * x,))


def inside_calls(x):
    mean = lambda x: jax.lax.pmean(jnp.sin(x), REPLICA_AXIS)  # noqa: E731
    saved = jax.checkpoint(mean, policy=jax.checkpoint_policies.nothing_saveable)
    total = lambda f: lambda x: jnp.sum(f(x) ** 2)  # noqa: E731
    return {
        "jit": jax.jit(lambda x: jax.jit(mean)(x) + 1)(x),
        "remat": jax.checkpoint(mean)(x),
        "grad of remat": jax.grad(total(saved))(x),
        "custom_jvp": with_jvp(x),
        "grad of custom_jvp": jax.grad(total(with_jvp))(x),
        "jvp of custom_jvp": jax.jvp(with_jvp, (x,), (x + 1,)),
        "custom_vjp": with_vjp(x),
        "grad of custom_vjp": jax.grad(total(with_vjp))(x),
        "vmap": jax.vmap(mean)(x),
        "vmap of all_gather": jax.vmap(lambda x: jax.lax.all_gather(x, REPLICA_AXIS))(x),
        "vmap of vmap": jax.vmap(jax.vmap(mean))(x[None]),
        "named": jax.named_call(mean, name="mine")(x),
    }


def gradients(x):
    i = jax.lax.axis_index(REPLICA_AXIS)
    ways = {
        "psum": lambda y: jax.lax.psum(y, REPLICA_AXIS),
        "pmean": lambda y: jax.lax.pmean(y, REPLICA_AXIS),
        "all_gather": lambda y: jax.lax.all_gather(y, REPLICA_AXIS),
        "gather by context": lambda y: context().all_gather(y),
        "all_to_all": lambda y: jax.lax.all_to_all(y, REPLICA_AXIS, 0, 0),
        "ppermute": lambda y: jax.lax.ppermute(y, REPLICA_AXIS, RING),
        "psum_scatter": lambda y: jax.lax.psum_scatter(y, REPLICA_AXIS),
    }
    loss = lambda way: lambda x: jnp.sum(jnp.sin(way(x**2)) * (i + 1))  # noqa: E731
    return {name: jax.value_and_grad(loss(way))(x / 8) for name, way in ways.items()}


TABLE = np.linspace(0, 1, 3, dtype=np.float32)


def loops(x):
    held = jnp.asarray(TABLE)
    total = lambda x: jax.lax.psum(x, REPLICA_AXIS)  # noqa: E731

    def body(carry, row):
        carry = 0.5 * carry + total(row) * held
        return carry, (carry[0], row * 2)

    def inner(carry, _):
        return jax.lax.fori_loop(0, 2, lambda i, c: c * 0.5 + total(c) / (i + 4.0), carry), carry

    def gathers(carry, row):
        return carry, jax.lax.all_gather(row, REPLICA_AXIS)

    def halved(row):
        is_large = lambda c: jnp.abs(c).max() > jnp.argmax(row) + 1  # noqa: E731
        return jax.lax.while_loop(is_large, lambda c: c / 2 + jnp.argmax(c) / 8, row)

    def halved_together(row):
        is_large = lambda c: jnp.abs(c).sum() > total(1.0)  # noqa: E731
        return jax.lax.while_loop(is_large, lambda c: c / 2 + total(c) / 64, row)

    return {
        "scan": jax.lax.scan(body, x[0], x),
        "reverse": jax.lax.scan(body, x[0], x, reverse=True),
        "no trips": jax.lax.scan(body, x[0], x[:0]),
        "unrolled": jax.lax.scan(body, x[0], x, unroll=2),
        "nested": jax.lax.scan(inner, x[0], None, length=2),
        "no carry": jax.lax.scan(gathers, None, x[:2])[1],
        "counted": jax.lax.fori_loop(0, 3, lambda i, c: c + total(x[i]), x[0]),
        "while": jax.lax.while_loop(
            lambda c: total(jnp.abs(c).sum()) > 1.0, lambda c: c / 4 + total(c) / 64, x[0]
        ),
        "while of rows": jax.vmap(halved)(x[:, :2]),
        "while of rows that communicates": jax.vmap(halved_together)(jax.lax.pmax(x, REPLICA_AXIS)),
        "grad of scan": jax.grad(lambda x: jax.lax.scan(body, x[0], x)[0].sum())(x),
        "cond": [
            jax.lax.cond(total(1.0) > bound, lambda: total(x), lambda: x * held) for bound in (0, 9)
        ],
        "switch": jax.lax.switch(
            total(1) - N + 1, [lambda: x, lambda: total(x) * held, lambda: x + 1]
        ),
    }


def random(key, x):
    own = context().fold_in(key)
    old = jax.random.PRNGKey(3)
    return {
        "mirrored": jax.random.normal(key, (3,)),
        "own": jax.random.normal(own, (3,)),
        "key": jax.random.split(key, 2),
        "own key": own,
        "gathered data": jax.lax.all_gather(jax.random.key_data(own), REPLICA_AXIS),
        "old": jax.random.uniform(jax.random.fold_in(old, context().replica_id_in_sync_group)),
        "mean": jax.lax.pmean(jax.random.bits(own, (2,)) % 5 * 1.0, REPLICA_AXIS),
        "permuted": jax.random.permutation(own, 5),
        "dropped": x * jax.random.bernoulli(own, 0.5, x.shape),
    }


def collective_of_keys(key):
    own = context().fold_in(key)
    return {
        "gathered": jax.lax.all_gather(own, REPLICA_AXIS),
        "moved": jax.lax.ppermute(own, REPLICA_AXIS, RING),
    }


HELD = jnp.arange(3.0)
HELD_NUMPY = np.arange(3, dtype=np.float32)


def closures(x):
    inside = jax.jit(lambda y: y * HELD + HELD_NUMPY)
    scanned = jax.lax.scan(lambda c, r: (c + jax.lax.psum(r * HELD, REPLICA_AXIS), HELD), x[0], x)
    return {
        "in": jax.lax.pmean(x * HELD, REPLICA_AXIS),
        "in a jit": inside(x),
        "in a loop": scanned,
        "in a reversed loop": jax.lax.scan(lambda c, r: (c * HELD + r, c), x[0], x, reverse=True),
        "in a local loop": jax.lax.fori_loop(0, 2, lambda i, c: c * HELD + i, x),
        "itself": HELD,
        "numpy": HELD_NUMPY,
    }


def rounds(x):
    """Collectives of the results of collectives."""
    mean = jax.lax.pmean(x, REPLICA_AXIS)
    variance = jax.lax.pmean((x - mean) ** 2, REPLICA_AXIS)
    score = jax.lax.pmax(jnp.abs((x - mean) / jnp.sqrt(variance + 1)), REPLICA_AXIS)
    every = jax.lax.all_gather(x / score, REPLICA_AXIS)
    return mean, variance, score, jax.lax.ppermute(every.sum(0) * x, REPLICA_AXIS, RING)


def edges(x, scalar, nothing, mirrored):
    """Scalars, empty trees, numbers, unused results."""
    jax.lax.psum(x, REPLICA_AXIS)
    jax.lax.all_gather(x, REPLICA_AXIS)
    return {
        "scalar": jax.lax.pmean(scalar, REPLICA_AXIS),
        "gathered scalar": jax.lax.all_gather(scalar, REPLICA_AXIS),
        "nothing": context().all_reduce("sum", nothing),
        "gathered nothing": context().all_gather(nothing),
        "gathered rows of nothing": jax.lax.all_gather(nothing, REPLICA_AXIS, tiled=True),
        "numbers": jax.lax.psum((1, 2.5), REPLICA_AXIS),
        "number": context().all_reduce("mean", 3),
        "gathered number": jax.lax.all_gather(7, REPLICA_AXIS),
        "mirrored": jax.lax.psum(mirrored, REPLICA_AXIS),
        "same": (x, mirrored, scalar, nothing),
        "twice": [jax.lax.psum(x, REPLICA_AXIS)] * 2,
        "constant": 5,
        "none": None,
        "shared": context().all_reduce("sum", {"a": x, "b": x, "c": x[:0]}),
    }


def containers(x, y):
    total = jax.lax.psum(x, REPLICA_AXIS)
    return {"a": [x, (total, {"b": y, "c": (x + y, None)})], "d": ((), [], y * 2, total + y)}


class Regularized(nnx.Module):
    def __init__(self, rngs):
        # No bias: the normalization removes it, and its gradient is rounding noise.
        self.first = nnx.Linear(6, 8, use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.second = nnx.Linear(8, 2, rngs=rngs)

    def __call__(self, x):
        return self.second(self.dropout(jax.nn.relu(self.norm(self.first(x)))))


def nnx_step(model, optimizer, x):
    loss, grads = nnx.value_and_grad(lambda m: jnp.mean(m(x) ** 2))(model)
    loss, grads = context().all_reduce("mean", (loss, grads))
    optimizer.update(model, grads)
    return loss


class LinenNet(linen.Module):
    @linen.compact
    def __call__(self, x):
        x = linen.Dense(8, use_bias=False)(x)
        x = linen.BatchNorm(use_running_average=False, axis_name=REPLICA_AXIS)(x)
        return linen.Dense(2)(jax.nn.relu(x))


NET = LinenNet()


def linen_step(state, x):
    def loss(params):
        variables = {"params": params, "batch_stats": state["batch_stats"]}
        out, updated = NET.apply(variables, x, mutable=["batch_stats"])
        return jnp.mean(out**2), updated

    (value, updated), grads = jax.value_and_grad(loss, has_aux=True)(state["params"])
    value, grads = context().all_reduce("mean", (value, grads))
    params = jax.tree.map(lambda p, g: p - 0.1 * g, state["params"], grads)
    return mirror.ensure_mirrored({"params": params, **updated}), value


DTYPES = ("bool", "int8", "uint8", "int32", "float16", "bfloat16", "float32", "complex64")
WIDE = ("int64", "uint64", "float64", "complex128")


def of_dtypes(*shape, dtypes=DTYPES):
    return {name: rows(*shape, dtype=jnp.dtype(name)) for name in dtypes}


ONES = PerReplica([np.ones(2, np.float32)] * N)
MIRRORED = np.arange(3, dtype=np.float32)
STEPS = {
    "reductions": (reductions, lambda: (of_dtypes(3),)),
    "collectives by hand": (by_hand, lambda: (of_dtypes(N, 3),)),
    "shapes of moves": (shapes_of_moves, lambda: (rows(4, 8),)),
    "part of a ring": (part_of_a_ring, lambda: (rows(3),)),
    "groups": (in_groups, lambda: (rows(4, 2),)),
    "inside calls": (inside_calls, lambda: (rows(2, 3),)),
    "gradients": (gradients, lambda: (rows(N),)),
    "loops": (loops, lambda: (rows(3, 3),)),
    "random": (random, lambda: (jax.random.key(0), rows(3))),
    "keys": (collective_of_keys, lambda: (jax.random.key(0),)),
    "closures": (closures, lambda: (rows(2, 3),)),
    "rounds": (rounds, lambda: (rows(3),)),
    "edges": (edges, lambda: (rows(3), rows(), rows(0, 2), MIRRORED)),
    "containers": (containers, lambda: (rows(3), MIRRORED)),
}
TOLERANCES = {jnp.dtype("float16"): 1e-3, jnp.dtype("bfloat16"): 8e-3}


def is_per_replica(value):
    return isinstance(value, PerReplica)


def on_host(value):
    """Returns the kind, dtype and values of a result; for keys, their data."""
    kind = "per-replica" if is_per_replica(value) else "mirrored"
    parts = value.values if is_per_replica(value) else [value]
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        parts = list(map(jax.random.key_data, parts))
    return kind, value.dtype, np.stack([np.asarray(part) for part in parts])


def result_of(name, step, args):
    with executor(name) as strategy:
        leaves, treedef = jax.tree.flatten(strategy.run(step, args), is_leaf=is_per_replica)
        return treedef, [on_host(leaf) for leaf in leaves]


def by_pmap(step, args):
    """Returns what JAX alone computes, on each replica, of a step without a context."""
    axes = [0 if is_per_replica(arg) else None for arg in args]
    stacked = [arg.stacked if is_per_replica(arg) else arg for arg in args]
    devices = jax.devices("cpu")[:N]
    mapped = jax.pmap(step, REPLICA_AXIS, in_axes=tuple(axes), devices=devices)
    return list(map(np.asarray, jax.tree.leaves(mapped(*stacked))))


def assert_agree(got, wanted, rtol=1e-6):
    """Checks that two results have the same structure, kinds, dtypes, shapes and values."""
    assert got[0] == wanted[0]
    paths = jax.tree_util.tree_flatten_with_path(got[0].unflatten(got[1]), is_leaf=_is_result)[0]
    for (path, (kind, dtype, a)), (wanted_kind, wanted_dtype, b) in zip(
        paths, wanted[1], strict=True
    ):
        name = jax.tree_util.keystr(path)
        assert (kind, dtype, a.shape) == (wanted_kind, wanted_dtype, b.shape), name
        if not jnp.issubdtype(a.dtype, jnp.inexact) or not a.size:
            np.testing.assert_array_equal(a, b, err_msg=name)
            continue
        wide = np.complex128 if np.iscomplexobj(a) else np.float64
        difference = np.abs(a.astype(wide) - b.astype(wide)).max()
        largest = np.abs(b.astype(wide)).max()
        assert difference <= TOLERANCES.get(dtype, rtol) * largest, (name, difference, largest)


def _is_result(value):
    return isinstance(value, tuple) and len(value) == 3 and value[0] in ("per-replica", "mirrored")
