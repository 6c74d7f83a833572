"""`reduce`, `gather` and `local_results` against NumPy."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np

import mirror
from mirror import PerReplica
from tests.support import inside
from tests.support.strategies import cpu_strategy, each_layout
from tests.support.tables import rows

DTYPES = ["float32", "int32", "uint8", "bool", "bfloat16", "float16"]
AXES = [None, 0, (0, -1)]
OPS = ["sum", "mean", "min", "max"]
EXACT = {
    "sum": lambda x, keep, axis: np.where(keep, x, 0).sum(axis=axis),
    "mean": lambda x, keep, axis: np.where(keep, x, 0).sum(axis=axis) / keep.sum(axis=axis),
    "min": lambda x, keep, axis: np.where(keep, x, np.inf).min(axis=axis),
    "max": lambda x, keep, axis: np.where(keep, x, -np.inf).max(axis=axis),
}


def expected(op, values, axis, where=None):
    """Reduces the stacked values in NumPy; axis 0 is the replica axis."""
    x = np.asarray(values).astype(np.float64)
    keep = np.ones(x.shape, bool)
    if where is not None:
        where = np.asarray(where)
        keep = np.broadcast_to(where.reshape(where.shape + (1,) * (x.ndim - where.ndim)), x.shape)
    axes = () if axis is None else axis if isinstance(axis, tuple) else (axis,)
    within = tuple(a + 1 if a >= 0 else x.ndim + a for a in axes)
    return EXACT[op](x, keep, (0, *within))


small_sums = {"bool": "int32", "int8": "int32", "uint8": "uint32"}


def result_dtype(op, dtype):
    if op == "mean" and (dtype == "bool" or "int" in dtype):
        return "float32"
    return small_sums.get(dtype, dtype) if op == "sum" else dtype


def some_values(n, dtype, shape=(4, 3)):
    rng = np.random.RandomState(n)
    # Small enough that a sum over 8 replicas fits into an int8.
    return [rng.randint(0, 2, shape).astype(jnp.dtype(dtype)) for _ in range(n)]


def each_reduction():
    """Yields each op with each layout, and with each pair of mask and axes."""
    for i, strategy in enumerate(each_layout()):
        for j, op in enumerate(OPS):
            yield strategy, op, (i + j) % 2 == 1, AXES[(i // 2 + j) % len(AXES)]


@rows("strategy, op, masked, axis", each_reduction)
def test_reduce_matches_numpy(strategy, op, masked, axis):
    n = strategy.num_replicas_in_sync
    rng = np.random.RandomState(0)
    rows = np.array([[True] * 4] + [list(rng.rand(4) < 0.5) for _ in range(n - 1)])
    where = PerReplica(list(rows)) if masked else None
    tree = {dtype: some_values(n, dtype) for dtype in DTYPES}
    held = {dtype: PerReplica(values) for dtype, values in tree.items()}
    got = strategy.reduce(op, held, axis=axis, where=where)
    for dtype, values in tree.items():
        wanted = expected(op, values, axis, rows if masked else None)
        array = got[dtype]
        assert isinstance(array, jax.Array), (dtype, axis)
        assert array.dtype == result_dtype(op, dtype), (dtype, axis)
        assert array.devices() == set(strategy.devices)
        tolerance = 1e-2 if "float16" in dtype else 1e-6
        np.testing.assert_allclose(
            np.asarray(array).astype(np.float64), wanted, tolerance, err_msg=f"{dtype} {axis}"
        )


@rows("axis", [-1, 1, (), (1,), np.int64(0)])
def test_reduce_accepts_axes_in_several_forms(axis, two):
    values = some_values(2, "int32")
    got = two.reduce("mean", PerReplica(values), axis=axis)
    np.testing.assert_allclose(got, expected("mean", values, axis), 1e-6)


def test_where_accepts_every_leading_shape():
    n, strategy = 3, cpu_strategy(3)
    values = some_values(n, "float32")
    for shape, op in itertools.product([(), (4,), (4, 3)], OPS):
        keep = [np.ones(shape, bool)] + [np.zeros(shape, bool)] * (n - 1)
        got = strategy.reduce(op, PerReplica(values), axis=0, where=PerReplica(keep))
        np.testing.assert_allclose(got, expected(op, values, 0, keep), 1e-6)


@rows("strategy", each_layout)
def test_mirrored_mask_applies_to_all_replicas(strategy):
    values = some_values(strategy.num_replicas_in_sync, "float32")
    mask = np.array([True, False, True, True])
    got = strategy.reduce("mean", PerReplica(values), axis=0, where=mask)
    np.testing.assert_allclose(got, np.mean([v[mask] for v in values], axis=(0, 1)), 1e-6)


def test_mean_covers_all_elements_not_replica_means(two):
    """The example of the docstring, and masks of different lengths."""
    rows = PerReplica([np.array([1.0, 2.0]), np.array([3.0, 8.0])])
    assert float(two.reduce("mean", rows, axis=0)) == 3.5
    keep = PerReplica([np.array([True, False]), np.array([True, True])])
    assert float(two.reduce("mean", rows, axis=0, where=keep)) == 4.0


@rows("op", OPS)
@rows("strategy", [cpu_strategy(3), cpu_strategy(2, replicas_per_device=2)])
def test_mirrored_value_counts_once_per_replica(op, strategy):
    n = strategy.num_replicas_in_sync
    for make in (float, np.float32, jnp.float32):
        got = strategy.reduce(op, make(3.0))
        assert float(got) == (3.0 * n if op == "sum" else 3.0), make


def test_reduce_keeps_the_structure_of_trees(two):
    tree = {"a": [PerReplica([1.0, 2.0]), None], "b": (3.0, PerReplica([1, 2]))}
    got = two.reduce("sum", tree)
    assert jax.tree.structure(got) == jax.tree.structure({"a": [0, None], "b": (0, 0)})
    assert [float(x) for x in jax.tree.leaves(got)] == [3.0, 6.0, 3.0]


@rows("op", ["SUM", "Sum", mirror.ReduceOp.SUM])
def test_reduce_accepts_several_spellings_of_an_op(op, two):
    assert float(two.reduce(op, PerReplica([1.0, 2.0]))) == 3.0


def test_reduce_of_an_empty_tree_is_empty(two):
    empty = PerReplica([np.zeros((0, 2), np.float32)] * 2)
    none = PerReplica([np.zeros(2, bool)] * 2)
    two_numbers = PerReplica([np.ones(2, np.float32)] * 2)
    for value, where in [(empty, None), (two_numbers, none)]:
        assert np.isnan(two.reduce("mean", value, axis=0, where=where)).all()
        assert not np.any(two.reduce("sum", value, axis=0, where=where))
        assert np.all(np.asarray(two.reduce("min", value, axis=0, where=where)) == np.inf)
        assert np.all(np.asarray(two.reduce("max", value, axis=0, where=where)) == -np.inf)


@rows("axis", [None, 0])
@rows("op", OPS)
def test_nan_of_any_replica_propagates(op, axis):
    strategy = cpu_strategy(3)
    within = 0 if axis is None else (0, 1)
    for at in range(3):
        values = [np.ones(2, np.float32) for _ in range(3)]
        values[at][0] = np.nan
        got = np.asarray(strategy.reduce(op, PerReplica(values), axis=axis))
        np.testing.assert_array_equal(got, getattr(np, op)(values, axis=within))


@rows("op", OPS)
def test_masked_nan_does_not_count(op, two):
    values = PerReplica([np.array([np.nan, 2.0]), np.array([2.0, np.nan])])
    keep = PerReplica([np.array([False, True]), np.array([True, False])])
    got = two.reduce(op, values, axis=0, where=keep)
    assert float(got) == (4.0 if op == "sum" else 2.0)


@rows("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_extremes_of_floats_without_infinities(dtype, two):
    value = PerReplica([jnp.array([1, -2], dtype), jnp.array([3, -4], dtype)])
    assert float(two.reduce("max", value, axis=0)) == 3
    assert float(two.reduce("min", value, axis=0)) == -4


def test_partial_sums_of_half_precision_are_not_rounded(two):
    """257 rounds to 256 in bfloat16."""
    value = PerReplica([np.array([256, 1], jnp.bfloat16), np.array([0, 1], jnp.bfloat16)])
    total = two.reduce("sum", value, axis=0)
    assert (float(total), total.dtype) == (258, jnp.bfloat16)


def test_mean_of_half_precision_does_not_overflow(two):
    """The sum of 140000 ones overflows float16; their mean does not."""
    ones = PerReplica([np.ones(70000, np.float16)] * 2)
    assert float(two.reduce("mean", ones, axis=0)) == 1.0
    large = PerReplica([np.full(2, 40000, np.float16)] * 2)
    np.testing.assert_array_equal(two.reduce("mean", large), [40000, 40000])


def test_many_different_reductions_do_not_warn(two):
    """Each is compiled once, which is not a mistake of the user."""
    for op, axis in itertools.product(OPS, AXES):
        two.reduce(op, PerReplica([np.ones((2, 5))] * 2), axis=axis)
    for axis in (0, 1, 2, -1):
        two.gather(PerReplica([np.ones((2, 3, 4))] * 2), axis=axis)


def test_reduce_compiles_once(two):
    for i in range(3):
        two.reduce("mean", PerReplica([np.float32(i)] * 2))
    programs = len(inside.programs(two))
    two.reduce("mean", PerReplica([np.float32(9)] * 2))
    assert len(inside.programs(two)) == programs


@rows("axis", [0, 1, -1])
@rows("strategy", [cpu_strategy(3), cpu_strategy(2, replicas_per_device=2)])
def test_gather_joins_in_replica_order(axis, strategy):
    n = strategy.num_replicas_in_sync
    tree = {d: some_values(n, d, (2, 3)) for d in ("float32", "bool", "int8", "bfloat16")}
    got = strategy.gather({d: PerReplica(values) for d, values in tree.items()}, axis=axis)
    for dtype, values in tree.items():
        np.testing.assert_array_equal(got[dtype], np.concatenate(values, axis=axis))
        assert got[dtype].dtype == jnp.dtype(dtype)


@rows("strategy", each_layout)
def test_gather_joins_copies_of_a_mirrored_value(strategy):
    got = strategy.gather(np.arange(2))
    np.testing.assert_array_equal(got, np.tile(np.arange(2), strategy.num_replicas_in_sync))


def test_gather_of_an_empty_tree_is_empty(two):
    got = two.gather(PerReplica([np.zeros((0, 3), np.float32)] * 2))
    assert got.shape == (0, 3)


def test_gather_supports_prng_keys(two):
    keys = jax.random.split(jax.random.key(0), (2, 3))
    got = two.gather(PerReplica.from_stacked(keys))
    np.testing.assert_array_equal(
        jax.random.key_data(got), jax.random.key_data(keys).reshape(6, -1)
    )


@rows("strategy", each_layout)
def test_local_results_returns_one_tree_per_replica(strategy):
    n = strategy.num_replicas_in_sync
    tree = {
        "own": strategy.run(lambda: mirror.get_replica_context().replica_id_in_sync_group),
        "mirrored": strategy.reduce("max", 3.0),
        "host": np.arange(2),
        "number": 5,
    }
    found = strategy.local_results(tree)
    assert isinstance(found, tuple)
    assert len(found) == n
    for i, (local, device) in enumerate(zip(found, strategy.devices, strict=True)):
        assert (int(local["own"]), float(local["mirrored"]), local["number"]) == (i, 3.0, 5)
        assert local["own"].devices() == local["mirrored"].devices() == {device}
        assert local["host"] is tree["host"]
    assert strategy.local_results({}) == ({},) * n


def test_local_results_repeat_an_array_from_another_device(two):
    lone = jax.device_put(np.arange(3), jax.devices("cpu")[5])
    assert all(local is lone for local in two.local_results(lone))
