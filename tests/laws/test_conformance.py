"""The executors agree: one table of executors, steps and dtypes, and one of errors."""

import contextlib
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

import mirror
from mirror import REPLICA_AXIS, PerReplica
from mirror._src.devices import backend
from tests.support import fresh

CPUS = jax.devices("cpu")
N = 4
RING = [(i, (i + 1) % N) for i in range(N)]
HALVES = [[0, 2], [1, 3]]


@contextlib.contextmanager
def pretended_types(types):
    """The host devices are said to be of these types, in their order; the rest stay CPUs."""
    kinds = dict(zip(CPUS, types, strict=False))

    def type_of(device):
        return kinds.get(device, "CPU")

    def devices_of_type(wanted):
        return tuple(device for device in CPUS if type_of(device) == wanted)

    with pytest.MonkeyPatch.context() as patch:
        for module in ("mirror._src.devices.backend", "mirror._src.devices.replicas"):
            patch.setattr(f"{module}.type_of", type_of)
        patch.setattr("mirror._src.collectives.one_device.type_of", type_of)
        patch.setattr(backend, "devices_of_type", devices_of_type)
        yield


EXECUTORS = {
    "pmap": (N, 1, mirror.AllReduce),
    "vmap": (1, N, mirror.AllReduce),
    "vmap on 2": (2, N // 2, mirror.AllReduce),
    "staged": (N, 1, mirror.ReductionToOneDevice),
    "staged on 2": (2, N // 2, mirror.ReductionToOneDevice),
    "staged in lanes": (N, 1, mirror.ReductionToOneDevice),
}


@contextlib.contextmanager
def executor(name, ops=None):
    """A strategy of four replicas; the lanes are devices of two types by turns."""
    num_devices, on_each, default_ops = EXECUTORS[name]
    with pretended_types(["CPU", "GPU"] * 2 if name == "staged in lanes" else []):
        yield mirror.MirroredStrategy(
            CPUS[:num_devices], ops or default_ops(), replicas_per_device=on_each
        )


def rows(*shape, dtype=np.float32, seed=0):
    """Replicas' values of a dtype: some negative where it has those."""
    values = np.random.RandomState(seed).randn(N, *shape) * 3
    if np.issubdtype(dtype, np.complexfloating):
        values = values + 1j * values[::-1]
    if np.issubdtype(dtype, np.unsignedinteger) or dtype == np.bool_:
        values = np.abs(np.round(values - 1))
    return PerReplica.from_stacked(values.astype(dtype))


# The steps. Each takes what its row in the table says, and returns results of any kind.


def context():
    return mirror.get_replica_context()


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
        "in a local loop": jax.lax.fori_loop(0, 2, lambda i, c: c * HELD + i, x),
        "itself": HELD,
        "numpy": HELD_NUMPY,
    }


def rounds(x):
    """Collectives of what collectives gave."""
    mean = jax.lax.pmean(x, REPLICA_AXIS)
    variance = jax.lax.pmean((x - mean) ** 2, REPLICA_AXIS)
    score = jax.lax.pmax(jnp.abs((x - mean) / jnp.sqrt(variance + 1)), REPLICA_AXIS)
    every = jax.lax.all_gather(x / score, REPLICA_AXIS)
    return mean, variance, score, jax.lax.ppermute(every.sum(0) * x, REPLICA_AXIS, RING)


def edges(x, scalar, nothing, mirrored):
    """Scalars, nothing at all, numbers, what nobody reads."""
    jax.lax.psum(x, REPLICA_AXIS)
    jax.lax.all_gather(x, REPLICA_AXIS)
    return {
        "scalar": jax.lax.pmean(scalar, REPLICA_AXIS),
        "gathered scalar": jax.lax.all_gather(scalar, REPLICA_AXIS),
        "nothing": context().all_reduce("sum", nothing),
        "gathered nothing": context().all_gather(nothing),
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
        # No bias: the normalisation takes it out again, and its gradient is rounding noise.
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
# What JAX's own map cannot do: its message comes out.
CANNOT = {
    "keys": ["pmap"],
}
# Two replicas on each of two devices: what may differ there.
ON_TWO = ("reductions", "collectives by hand", "closures", "edges", "containers")
ROWS = [
    (each, name) for each in EXECUTORS for name in STEPS if "on 2" not in each or name in ON_TWO
]
_TOLERANCES = {jnp.dtype("float16"): 1e-3, jnp.dtype("bfloat16"): 8e-3}


def is_per_replica(value):
    return isinstance(value, PerReplica)


def on_host(value):
    """A result's kind, and its numbers; of keys, their data."""
    kind = "per-replica" if is_per_replica(value) else "mirrored"
    parts = value.values if is_per_replica(value) else [value]
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        parts = list(map(jax.random.key_data, parts))
    return kind, value.dtype, np.stack([np.asarray(part) for part in parts])


def result_of(name, step, args):
    with executor(name) as strategy:
        leaves, treedef = jax.tree.flatten(strategy.run(step, args), is_leaf=is_per_replica)
        return treedef, [on_host(leaf) for leaf in leaves]


def assert_agree(got, wanted, rtol=1e-6):
    """The law: one tree, the same kinds, dtypes, shapes and numbers."""
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
        assert difference <= _TOLERANCES.get(dtype, rtol) * largest, (name, difference, largest)


def _is_result(value):
    return isinstance(value, tuple) and len(value) == 3 and value[0] in ("per-replica", "mirrored")


@functools.cache
def reference(name):
    """What the first executor that can makes of a step."""
    step, args = STEPS[name]
    able = next(each for each in EXECUTORS if each not in CANNOT.get(name, ()))
    return able, result_of(able, step, args())


@pytest.mark.parametrize(("other", "name"), ROWS)
def test_executors_agree(other, name):
    step, args = STEPS[name]
    able, wanted = reference(name)
    if other in CANNOT.get(name, ()):
        with pytest.raises(Exception, match=r"\S"):
            result_of(other, step, args())
    elif other != able:
        assert_agree(result_of(other, step, args()), wanted)


def test_extremes_are_bitwise_equal():
    """A NaN and infinities too, and a zero of either sign is a zero."""
    values = np.array([[1, -0.0, np.nan], [3, 0, 1], [-np.inf, 0, 2], [2, 0, np.inf]], np.float32)
    found = [
        [value for _, _, value in result_of(name, extremes, (PerReplica.from_stacked(values),))[1]]
        for name in EXECUTORS
    ]
    for other in found[1:]:
        for a, b in zip(other, found[0], strict=True):
            np.testing.assert_array_equal(a, b)


def extremes(x):
    return [context().all_reduce(op, (x, x.astype(jnp.float16))) for op in ("min", "max")]


def check_wide():
    """The dtypes of 64 bits, in a process of their own."""
    for step, shape in ((reductions, (3,)), (by_hand, (N, 3))):
        args = (of_dtypes(*shape, dtypes=WIDE),)
        wanted = result_of("pmap", step, args)
        assert {str(dtype) for _, dtype, _ in wanted[1]} >= set(WIDE)
        for name in ("vmap on 2", "staged", "staged in lanes"):
            assert_agree(result_of(name, step, args), wanted, rtol=1e-12)


def test_executors_agree_in_64_bits():
    fresh.run(
        """
        import tests.conftest, jax
        jax.config.update("jax_num_cpu_devices", 8)
        jax.config.update("jax_enable_x64", True)
        from tests.laws.test_conformance import check_wide
        check_wide()
        """
    )


def trained(name, create, step, num_steps):
    with executor(name) as strategy:
        state = create()
        for seed in range(num_steps):
            state = step(strategy, state, rows(6, 6, seed=seed))
        return jax.tree.map(data_of, nnx.state(state) if is_nnx(state) else state)


def is_nnx(state):
    return isinstance(state, tuple) and isinstance(state[0], nnx.Module)


def data_of(leaf):
    is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(leaf) if is_key else leaf)


def create_nnx():
    model = Regularized(nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)


def train_nnx(strategy, state, x):
    assert isinstance(strategy.run(nnx_step, (*state, x)), jax.Array)
    return state


def create_linen():
    return dict(NET.init(jax.random.key(0), jnp.ones((2, 6))))


def train_linen(strategy, state, x):
    return strategy.run(linen_step, (state, x), donate_argnums=0)[0]


TRAININGS = {"nnx": (create_nnx, train_nnx), "linen": (create_linen, train_linen)}


@pytest.mark.parametrize("name", TRAININGS)
def test_executors_train_to_the_same_weights(name):
    """Batch statistics, dropout, moments, keys and counts: the whole state."""
    on_all = [each for each in EXECUTORS if "on 2" not in each]
    trainings = {each: trained(each, *TRAININGS[name], num_steps=2) for each in on_all}
    wanted = trainings.pop("pmap")
    for each, got in trainings.items():
        for (path, a), b in zip(
            jax.tree_util.tree_flatten_with_path(got)[0], jax.tree.leaves(wanted), strict=True
        ):
            message = f"{each}: {jax.tree_util.keystr(path)}"
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5, err_msg=message)


@pytest.mark.parametrize("name", EXECUTORS)
def test_what_the_scope_creates_goes_in(name):
    with executor(name) as strategy:
        with strategy.scope():
            weights = jnp.ones(2)
        for _ in range(2):
            weights = strategy.run(lambda w, x: w + jax.lax.psum(x, REPLICA_AXIS), (weights, ONES))
        np.testing.assert_array_equal(weights, 1 + 2 * N)


def test_callbacks_see_what_replicas_see(capfd):
    seen = []

    def step(x):
        total = jax.lax.psum(x, REPLICA_AXIS)
        jax.debug.callback(lambda x, t: seen.append((float(x), float(t))), x, total)
        jax.debug.print("value {}", x)
        like = jax.ShapeDtypeStruct((), np.float32)
        doubled = jax.pure_callback(lambda x: np.float32(2 * x), like, x, vmap_method="sequential")
        return jax.lax.pmax(doubled, REPLICA_AXIS), doubled

    found = {}
    for name in EXECUTORS:
        seen.clear()
        result = result_of(name, step, (PerReplica.from_stacked(np.arange(4, dtype=np.float32)),))
        jax.effects_barrier()
        found[name] = sorted(seen), sorted(capfd.readouterr().out.split("\n")), result
    wanted = found.pop("pmap")
    assert wanted[0] == [(float(i), 6.0) for i in range(N)]
    for callbacks, lines, result in found.values():
        assert (callbacks, lines) == wanted[:2]
        assert_agree(result, wanted[2])


# Errors


class Counter(nnx.Module):
    def __init__(self):
        self.total = nnx.Param(jnp.zeros(2))


def deleted():
    array = jnp.ones(2)
    array.delete()
    return array


def forgets(model, x):
    model.total[...] += x


def forgets_to_ensure(x):
    return mirror.ensure_mirrored({"w": x * 2})


def under_cond(x):
    return jax.lax.cond(x[0] > 0, lambda: jax.lax.psum(x, REPLICA_AXIS), lambda: x)


def under_while(x):
    return jax.lax.while_loop(lambda c: c[0] < 1, lambda c: c + jax.lax.pmax(c, REPLICA_AXIS), x)


def raises(x):
    jax.lax.psum(x, REPLICA_AXIS)
    raise LookupError("mine")


def changes_structure(model, x):
    model.more = nnx.Param(jnp.ones(1))


MISTAKES = {
    "forgotten": lambda s: s.run(forgets, (Counter(), rows(2))),
    "forgotten, plain": lambda s: s.run(forgets_to_ensure, (rows(2),)),
    "under cond": lambda s: s.run(under_cond, (rows(2),)),
    "under while": lambda s: s.run(under_while, (rows(2),)),
    "raises": lambda s: s.run(raises, (rows(2),)),
    "deleted": lambda s: s.run(extremes, (deleted(),)),
    "wrong count": lambda s: s.run(extremes, (PerReplica([np.ones(2)] * (N - 1)),)),
    "wrong count, apart": lambda s: s.run(extremes, (PerReplica([np.ones(2), np.ones(3)]),)),
    "structure": lambda s: s.run(changes_structure, (Counter(), rows(2))),
    "returns text": lambda s: s.run(lambda x: "text", (rows(2),)),
    "returns a model": lambda s: s.run(lambda m: m, (Counter(),)),
    "max of complex": lambda s: s.run(extremes, (rows(2, dtype=np.complex64),)),
    "gathers a scalar": lambda s: s.run(lambda x: context().all_gather(x), (rows(),)),
    "unknown op": lambda s: s.run(lambda x: context().all_reduce("avg", x), (rows(),)),
    "shape": lambda s: s.run(lambda x: jax.lax.psum(x, REPLICA_AXIS) @ x, (rows(2, 3),)),
    "unknown axis": lambda s: s.run(lambda x: jax.lax.psum(x, "batch"), (rows(),)),
    "donates by name": lambda s: s.run(extremes, (rows(2),), donate_argnums="x"),
    "an object array": lambda s: s.run(extremes, (np.array([None]),)),
}  # fmt: skip
_ADDRESS = re.compile("0x[0-9a-f]+")


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_the_same_error_on_all(name):
    found = {}
    for each in EXECUTORS:
        with executor(each) as strategy:
            with pytest.raises(Exception, match=r"\S") as error:
                MISTAKES[name](strategy)
            assert not mirror.has_strategy()
        found[each] = type(error.value), _ADDRESS.sub("", str(error.value))
    assert len(set(found.values())) == 1, found
