"""`jax.lax` collectives: all executors and layouts agree with NumPy, in every form and dtype."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax

import mirror
from mirror import PerReplica
from tests.support import strategies
from tests.support.messages import raises
from tests.support.tables import Made, rows

AXIS, N = mirror.REPLICA_AXIS, 4
pytestmark = pytest.mark.filterwarnings("ignore:(?=.*<lambda>).*compiled")  # new steps, on purpose
STRATEGIES = Made({**strategies.PAIRS, **strategies.executors(N)})
PAIRS = [[0, 1], [2, 3]]
RING = [(i, (i + 1) % N) for i in range(N)]


def members(i):
    return next(group for group in PAIRS if i in group)


def sent(values, perm):
    source = {target: origin for origin, target in perm}
    zeros = np.zeros_like(values[0])
    return [values[source[i]] if i in source else zeros for i in range(N)]


def all_to_all(values, split, joined):
    parts = [np.split(value, N, split) for value in values]
    return [np.concatenate([part[i] for part in parts], joined) for i in range(N)]


# name: what the step does with its (4, 4), and what NumPy does with all of them
FORMS = {
    "psum": (lambda x: lax.psum(x, AXIS), lambda v: [sum(v)] * N),
    "psum of pairs": (
        lambda x: lax.psum(x, AXIS, axis_index_groups=PAIRS),
        lambda v: [sum(v[j] for j in members(i)) for i in range(N)],
    ),
    "pmax": (lambda x: lax.pmax(x, AXIS), lambda v: [np.max(v, 0)] * N),
    "pmax of pairs": (
        lambda x: lax.pmax(x, AXIS, axis_index_groups=PAIRS),
        lambda v: [np.max([v[j] for j in members(i)], 0) for i in range(N)],
    ),
    "pmin": (lambda x: lax.pmin(x, AXIS), lambda v: [np.min(v, 0)] * N),
    "all_gather": (lambda x: lax.all_gather(x, AXIS), lambda v: [np.stack(v)] * N),
    "all_gather, axis 1": (
        lambda x: lax.all_gather(x, AXIS, axis=1),
        lambda v: [np.stack(v, 1)] * N,
    ),
    "all_gather, tiled": (
        lambda x: lax.all_gather(x, AXIS, axis=1, tiled=True),
        lambda v: [np.concatenate(v, 1)] * N,
    ),
    "all_gather of pairs": (
        lambda x: lax.all_gather(x, AXIS, axis_index_groups=PAIRS),
        lambda v: [np.stack([v[j] for j in members(i)]) for i in range(N)],
    ),
    "psum_scatter": (
        lambda x: lax.psum_scatter(x, AXIS, scatter_dimension=1),
        lambda v: [sum(v)[:, i] for i in range(N)],
    ),
    "psum_scatter, tiled": (
        lambda x: lax.psum_scatter(x, AXIS, tiled=True),
        lambda v: [sum(v)[i : i + 1] for i in range(N)],
    ),
    "ring": (lambda x: lax.ppermute(x, AXIS, RING), lambda v: sent(v, RING)),
    "part of a ring": (
        lambda x: lax.ppermute(x, AXIS, RING[:2]),
        lambda v: sent(v, RING[:2]),
    ),
    "all_to_all": (
        lambda x: lax.all_to_all(x, AXIS, 0, 1),
        lambda v: [np.stack([value[i] for value in v], 1) for i in range(N)],
    ),
    "all_to_all, tiled": (
        lambda x: lax.all_to_all(x, AXIS, 1, 0, tiled=True),
        lambda v: all_to_all(v, 1, 0),
    ),
    "index": (lambda x: x + lax.axis_index(AXIS), lambda v: [v[i] + i for i in range(N)]),
    "inner vmap": (
        lambda x: jax.vmap(lambda row: lax.psum(row, AXIS))(x),
        lambda v: [sum(v)] * N,
    ),
    "over both axes": (
        lambda x: jax.vmap(lambda row: lax.psum(row, ("rows", AXIS)), axis_name="rows")(x),
        lambda v: [np.broadcast_to(sum(v).sum(0), (4, 4))] * N,
    ),
}
WRAPS = {
    "top": lambda form, x: form(x),
    "jit": lambda form, x: jax.jit(form)(x),
    "scan": lambda form, x: lax.scan(lambda c, _: (c, form(x)), 0, None, 2)[1][1],
    "cond": lambda form, x: lax.cond(lax.psum(1, AXIS) > 0, form, form, x),
}


def numbers(dtype):
    values = np.random.RandomState(0).randint(-9, 9, (N, 4, 4))
    return list(values.astype(dtype))


def run_all(strategy, forms, value, wrap=WRAPS["top"]):
    step = lambda x: {name: wrap(form, x) for name, (form, _) in forms.items()}  # noqa: E731
    return strategy.run(step, (value,))


def check(found, wanted, name):
    values = [np.asarray(v) for v in found.values] if isinstance(found, PerReplica) else [found] * N
    for value, right in zip(values, wanted, strict=True):
        np.testing.assert_array_equal(np.asarray(value), right, err_msg=name)


@pytest.mark.parametrize(
    "wrap",
    [name if name == "top" else pytest.param(name, marks=pytest.mark.slow) for name in WRAPS],
)
@rows("strategy", STRATEGIES)
def test_collectives_match_numpy(strategy, wrap):
    values = numbers(np.float32)
    found = run_all(strategy, FORMS, PerReplica(values), WRAPS[wrap])
    for name, (_, wanted) in FORMS.items():
        check(found[name], wanted(values), name)


@rows("strategy", STRATEGIES)
def test_keys_move_as_numbers_do(strategy):
    def of_keys(move):
        keys_of = lambda x: jax.random.wrap_key_data(jnp.stack([x, x], -1))  # noqa: E731
        return lambda x: jax.random.key_data(move(keys_of(x)))[..., 0]

    kinds = ("all_gather", "all_to_all", "ring", "part")
    moves = {name: form for name, form in FORMS.items() if name.startswith(kinds)}
    values = numbers(np.uint32)
    found = run_all(
        strategy, {k: (of_keys(v), None) for k, (v, _) in moves.items()}, PerReplica(values)
    )
    for name, (_, wanted) in moves.items():
        check(found[name], wanted(values), name)
    gather = of_keys(lambda key: lax.all_gather(key, AXIS))
    scalars = strategy.run(lambda x: gather(x[0, 0]), (PerReplica(values),))
    np.testing.assert_array_equal(scalars, [value[0, 0] for value in values])


@pytest.mark.slow
@rows("dtype", [np.int8, np.int32, ml_dtypes.bfloat16, np.complex64])
@rows("strategy", STRATEGIES)
def test_collectives_keep_the_dtype(strategy, dtype):
    forms = {
        k: f
        for k, f in FORMS.items()
        if dtype != np.complex64 or not k.startswith(("pmax", "pmin"))
    }
    found = run_all(strategy, forms, PerReplica(numbers(dtype)))
    for name, (_, wanted) in forms.items():
        check(
            found[name],
            [np.asarray(w).astype(found[name].dtype) for w in wanted(numbers(dtype))],
            name,
        )
        assert name == "index" or found[name].dtype == dtype


@pytest.mark.slow
@rows("strategy", STRATEGIES)
def test_collectives_of_mirrored_values_match_numpy(strategy):
    value = numbers(np.float32)[0]
    found = run_all(strategy, FORMS, value)
    for name, (_, wanted) in FORMS.items():
        check(found[name], wanted([value] * N), name)
    mirrored = {name for name, x in found.items() if not isinstance(x, PerReplica)}
    assert "ring" in mirrored, "a full permutation of equal values"
    assert "part of a ring" not in mirrored


def extremes(x):
    return lax.pmax(x, AXIS), lax.pmin(x, AXIS)


def extremes_of_pairs(x):
    return tuple(reduce(x, AXIS, axis_index_groups=PAIRS) for reduce in (lax.pmax, lax.pmin))


@rows("strategy", STRATEGIES)
@rows("size", [3, 3000])  # in the maximum of larger arrays, XLA:CPU omits NaN
def test_extremes_have_a_nan_and_a_zero_wherever_any_replica_has(strategy, size):
    values = np.random.RandomState(0).choice(np.float32([np.nan, 0.0, -0.0]), (N, size))
    stacked = PerReplica.from_stacked(values)
    for step, groups in ((extremes, [range(N)]), (extremes_of_pairs, PAIRS)):
        for found in strategy.run(step, (stacked,)):
            found = found.stacked if isinstance(found, PerReplica) else [found] * N
            for replica, value in enumerate(map(np.asarray, found)):
                group = next(group for group in groups if replica in group)
                is_nan = np.isnan(values[list(group)]).any(0)
                np.testing.assert_array_equal(np.isnan(value), is_nan)
                assert not np.signbit(value[~is_nan]).any()


@rows("strategy", STRATEGIES)
def test_extremes_propagate_nan(strategy):
    for place in range(N):
        values = [np.full(3, i, np.float32) for i in range(N)]
        values[place][1] = np.nan
        found = strategy.run(extremes, (PerReplica(values),))
        for value, edge in zip(found, (N - 1, 0), strict=True):
            np.testing.assert_array_equal(value, [edge, np.nan, edge], f"replica {place}")
        strategy.check_mirrored(found)


@rows("strategy", STRATEGIES)
def test_extremes_of_both_zeros_agree_on_the_sign(strategy):
    values = [np.float32(z) for z in (0.0, -0.0, -0.0, 0.0)]
    found = strategy.run(extremes, (PerReplica(values),))
    assert not np.signbit(found).any()


@rows("strategy", STRATEGIES)
def test_sum_of_scaled_values_does_not_overflow(strategy):
    """1.2e19 ** 2 / 100 fits float32; the sum of four such squares does not."""
    values = [np.full(1, 1.2e19, np.float32)] * N
    found = strategy.run(lambda a: lax.psum((a @ a) * 0.01, AXIS), (PerReplica(values),))
    np.testing.assert_allclose(found, N * 1.2e19**2 * 0.01, rtol=1e-5)


LAYOUTS = Made(
    {
        **strategies.PAIRS,
        **strategies.executors(N),
        "slices": functools.partial(strategies.cpu_strategy, N, shard="model"),
        "in turn": functools.partial(strategies.cpu_strategy, 2, replicas=N),
    }
)


@rows("strategy", LAYOUTS)
def test_complex_constants_are_summed(strategy):
    """As gradients of what a loss does not read; XLA ended the process (JAX 0.10.2, 0.12.0.1)."""

    def step(x):
        ones = jnp.ones(3, jnp.complex64)
        looped = lax.fori_loop(0, 2, lambda _, c: c + lax.psum(ones, AXIS), 0 * ones)
        reduced = mirror.all_reduce("mean", {"two": 2 * ones, "zeros": jnp.zeros((2, 4), "c8")})
        table = jnp.broadcast_to(1j * jnp.arange(8), (3, 8)).astype("c8")
        scattered = [
            lax.psum_scatter(4 * ones[:1].repeat(4), AXIS),
            lax.psum_scatter(table, AXIS, scatter_dimension=1, tiled=True),
            lax.psum_scatter(table[:, :2], AXIS, scatter_dimension=1, axis_index_groups=PAIRS),
        ]
        return lax.psum(1j * ones, AXIS), looped, reduced, scattered

    total, looped, reduced, scattered = strategy.run(step, (np.float32(0),))
    for i, (one, tiled, in_pairs) in enumerate(zip(*(x.values for x in scattered), strict=True)):
        np.testing.assert_array_equal(one, 4 * N)
        np.testing.assert_array_equal(tiled, [[8j * i, 8j * i + 4j]] * 3)
        np.testing.assert_array_equal(in_pairs, [2j * (i % 2)] * 3)
    np.testing.assert_array_equal(total, [N * 1j] * 3)
    np.testing.assert_array_equal(looped, [2 * N] * 3)
    np.testing.assert_array_equal(reduced["two"], [2] * 3)
    np.testing.assert_array_equal(reduced["zeros"], np.zeros((2, 4)))


@pytest.mark.slow
@rows("strategy", STRATEGIES)
def test_loop_with_collectives_reads_packed_sums(strategy):
    def step(x):
        a, b = lax.psum(x, AXIS), lax.psum(2 * x, AXIS)
        looped = lax.scan(lambda c, _: (lax.psum(c + a, AXIS) + b, None), x, None, length=2)[0]
        chosen = lax.cond(a.sum() > 0, lambda: lax.psum(x + b, AXIS), lambda: a)
        return looped, chosen

    for shape in ((), (1,), (2, 3)):
        values = [np.full(shape, i + 1, np.float32) for i in range(N)]
        looped, chosen = strategy.run(step, (PerReplica(values),))
        np.testing.assert_array_equal(looped.values[0], np.full(shape, looped_by_hand()))
        np.testing.assert_array_equal(chosen, np.full(shape, 10 + 4 * 20))


def looped_by_hand():
    a, b, carry = 10, 20, [1, 2, 3, 4]
    for _ in range(2):
        total = sum(c + a for c in carry)
        carry = [total + b] * N
    return carry[0]


REFUSED = {
    "2-bit integers": (lambda x: lax.all_gather(x.astype("int2"), AXIS), "int2"),
    "largest complex": (lambda x: lax.pmax(x.astype("complex64"), AXIS), "complex64"),
    "flags that are scattered": (lambda x: lax.psum_scatter(x > 0, AXIS), "bool"),
    "powers of two": (lambda x: lax.psum(x.astype("float8_e8m0fnu"), AXIS), "float8_e8m0fnu"),
}


@rows("form, dtype", REFUSED)
@rows("strategy", STRATEGIES)
def test_collectives_reject_dtypes_that_xla_cannot_send(strategy, form, dtype):
    with raises(TypeError, names="<lambda>", values=dtype):
        strategy.run(form, (PerReplica(numbers(np.float32)),))


@rows("strategy", STRATEGIES)
def test_step_without_collectives_supports_refs(strategy):
    def step(x):
        ref = jax.new_ref(jnp.zeros(()))

        def test(i):
            ref[...] += 1
            return i < x

        lax.while_loop(test, lambda i: i + 1, 0.0)
        return ref[...]

    found = strategy.run(step, (PerReplica([np.float32(i) for i in range(N)]),))
    assert isinstance(found, PerReplica), "how often the test runs depends on the replica"
    assert [float(v) for v in found.values] == [float(jax.jit(step)(float(i))) for i in range(N)]


@pytest.mark.slow
@rows("strategy", STRATEGIES)
def test_replica_keys_support_every_implementation(strategy):
    def step(x):
        context = mirror.get_replica_context()
        keys = [context.fold_in(jax.random.key(0, impl=i)) for i in ("threefry2x32", "unsafe_rbg")]
        return [context.all_gather(jax.random.key_data(key)[None]) for key in keys]

    for found in strategy.run(step, (PerReplica([np.float32(i) for i in range(N)]),)):
        assert len(np.unique(np.asarray(found), axis=0)) == N


def test_collectives_of_64_bits_in_a_step_keep_their_bits():
    def step(x):
        with jax.enable_x64(True):
            wide = x.astype(jnp.float64) + 123456784
            both = wide, -wide.astype(jnp.int64)
            exact = [reduce(both, AXIS) for reduce in (lax.psum, lax.pmax, lax.pmin)]
            scattered = lax.psum_scatter(wide * 1j, AXIS, tiled=True).imag
            pairs = lax.pmax(wide, AXIS, axis_index_groups=PAIRS)
            found = [*jax.tree.leaves(exact), scattered, pairs, lax.all_gather(wide[:0], AXIS)]
            return [(value - 123456700).astype(jnp.float32) for value in found]

    rows = [np.arange(4, dtype=np.float32) + 4 * i for i in range(N)]
    found = strategies.cpu_strategy(N).run(step, (PerReplica(rows),))
    # float64 and int64 of the sum, maximum and minimum
    wide = np.stack(rows).astype(np.float64) + 123456784
    both = [getattr(y, op)(0) for op in ("sum", "max", "min") for y in (wide, -wide)]
    for got, right in zip(found, both, strict=False):
        np.testing.assert_array_equal(got, (right - 123456700).astype(np.float32))
    for i in range(N):
        total = wide.sum(0)[i : i + 1] - 123456700
        np.testing.assert_array_equal(found[6].values[i], total.astype(np.float32))
        pair = wide[members(i)].max(0) - 123456700
        np.testing.assert_array_equal(found[7].values[i], pair.astype(np.float32))
    assert found[8].shape == (N, 0)
