"""`PerReplica`: a pytree with one leaf, which cannot be mistaken for an array."""

import operator
import pickle

import jax
import jax.numpy as jnp
import numpy as np

import mirror
from mirror import PerReplica
from tests.support.messages import raises
from tests.support.tables import rows

VALUES = {
    "numbers": [1.0, 2.0],
    "numpy": [np.arange(3), np.arange(3, 6)],
    "jax": [jnp.arange(3), jnp.arange(3, 6)],
    "numpy and jax": [np.arange(3, dtype=np.int32), jnp.arange(3, 6)],
    "empty": [np.zeros((0, 2)), np.zeros((0, 2))],
    "bool": [True, False],
}


@rows("name", list(VALUES))
def test_per_replica_holds_one_array_per_replica(name):
    values = VALUES[name]
    held = PerReplica(values)
    assert held.num_replicas == 2
    assert held.stacked.shape == (2, *np.shape(values[0]))
    assert held.dtype == held.stacked.dtype
    for mine, given in zip(held.values, values, strict=True):
        np.testing.assert_array_equal(mine, given)
    np.testing.assert_array_equal(np.asarray(held), np.stack([np.asarray(v) for v in values]))


def test_per_replica_keeps_arrays_on_their_devices():
    devices = jax.devices("cpu")[:3]
    held = PerReplica([jax.device_put(np.full(2, i), d) for i, d in enumerate(devices)])
    assert [next(iter(v.devices())) for v in held.values] == devices
    np.testing.assert_array_equal(held, [[0, 0], [1, 1], [2, 2]])


def test_values_of_a_result_are_stored_on_their_replicas_devices(eight):
    held = eight.run(lambda: jnp.full(3, mirror.get_replica_context().replica_id_in_sync_group))
    assert [next(iter(v.devices())) for v in held.values] == list(eight.devices)
    assert [value.shape for value in held.values] == [(3,)] * 8
    np.testing.assert_array_equal(np.stack(held.values), np.asarray(held))


def test_values_split_a_stacked_array_on_one_device():
    rows = PerReplica.from_stacked(jnp.arange(6).reshape(2, 3)).values
    np.testing.assert_array_equal(np.stack(rows), [[0, 1, 2], [3, 4, 5]])


def test_per_replica_is_a_pytree_with_one_leaf():
    held = PerReplica([1.0, 2.0])
    (path, leaf), *rest = jax.tree_util.tree_flatten_with_path({"x": held})[0]
    assert not rest
    assert jax.tree_util.keystr(path) == "['x'].stacked"
    assert leaf is held.stacked
    doubled = jax.tree.map(lambda x: 2 * x, held)
    assert isinstance(doubled, PerReplica)
    np.testing.assert_array_equal(doubled, [2.0, 4.0])
    placeholder = jax.tree.map(lambda _: "anything", held)
    assert repr(placeholder) == "PerReplica('anything')"


def test_per_replica_passes_through_jit_and_pickle():
    held = PerReplica([1.0, 2.0])
    np.testing.assert_array_equal(jax.jit(lambda x: x)(held), held)
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(held)), held)


@rows(
    "held, text",
    [
        (PerReplica([1.0, 2.0]), "PerReplica(1., 2.)"),
        (PerReplica([[1, 2], [3, 4]]), "PerReplica([1, 2], [3, 4])"),
        (PerReplica([np.zeros(64, np.int8)] * 2), "PerReplica(2 x int8[64])"),
        (PerReplica([np.zeros((8, 9), bool)] * 3), "PerReplica(3 x bool[8,9])"),
    ],
)
def test_repr_is_short(held, text):
    assert repr(held) == text


def test_repr_supports_prng_keys_and_deleted_arrays(two):
    keys = two.run(lambda: mirror.get_replica_context().fold_in(jax.random.key(0)))
    assert repr(keys).startswith("PerReplica(2 x key<")
    gone = PerReplica([jnp.zeros(3)] * 2)
    gone.stacked.delete()
    assert "deleted" in repr(gone)


def test_array_conversion_honors_dtype_and_copy():
    held = PerReplica([1, 2])
    assert np.asarray(held, dtype=np.float32).dtype == np.float32
    copy = np.array(held)
    copy[:] = 9
    np.testing.assert_array_equal(held, [1, 2])


BINARY = ["add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul"]
BINARY += ["lt", "le", "gt", "ge"]
UNARY = [operator.neg, abs, float, int, bool, len, iter, list, operator.itemgetter(0)]


@rows("name", BINARY)
@rows("other", [2.0, np.float32(2), np.ones(2), jnp.ones(2)])
@rows("side", ["left", "right"])
def test_arithmetic_is_rejected_outside_a_replica(name, other, side):
    held = PerReplica([1.0, 2.0])
    pair = (held, other) if side == "left" else (other, held)
    with raises(TypeError, values="PerReplica(1., 2.)", fix="strategy.reduce('mean', x)"):
        getattr(operator, name)(*pair)


@rows("operation", UNARY)
def test_conversion_to_one_value_is_rejected(operation):
    with raises(TypeError, values="PerReplica(1., 2.)", fix=["x.values", "x.stacked"]):
        operation(PerReplica([1.0, 2.0]))


def test_format_spec_is_rejected():
    held = PerReplica([1.0, 2.0])
    assert f"{held}" == repr(held)
    with raises(TypeError, names="format()", values=repr(held), fix="strategy.reduce"):
        f"{held:.3f}"


def test_numpy_reads_per_replica_values():
    np.testing.assert_array_equal(np.asarray(PerReplica([1.0, 2.0])) + 1, [2.0, 3.0])


@rows("n", [1, 2, 3])
def test_from_stacked_does_not_copy(n):
    rows = np.arange(n * 2).reshape(n, 2)
    held = PerReplica.from_stacked(rows)
    assert held.stacked is rows
    assert held.num_replicas == n
    assert not hasattr(held, "__dict__")
