"""`mirror.data.from_arrays`: whole arrays as a re-iterable dataset of global batches."""
# ruff: noqa: E501 (arguments and their message are one row)

import itertools
import sys
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np

import mirror
from tests.support.messages import raises
from tests.support.strategies import cpu_strategy

x = np.arange(20.0).reshape(10, 2)
TREES = {
    "array": x,
    "jax": jnp.asarray(x),
    "dict": {"image": x, "label": np.arange(10)},
    "tuple": (x, {"deep": np.arange(10) > 3, "none": None}),
}


def rows_of(batches):
    """Returns the labels of a pass, one list per batch."""
    return [np.asarray(batch).tolist() for batch in batches]


def flat(data):
    """Returns the labels of a pass."""
    return np.concatenate(list(data)).tolist()


def order_of(data, epoch):
    data.set_epoch(epoch)
    return flat(data)


def test_epoch_contains_every_row_once(subtests):
    for name, shuffle, size in itertools.product(TREES, [False, True], [1, 4, 5, 10, 12]):
        with subtests.test(name=name, shuffle=shuffle, size=size):
            arrays = TREES[name]
            data = mirror.data.from_arrays(arrays, size, shuffle=shuffle)
            for _ in range(2):
                batches = list(data)
                assert len(batches) == len(data) == -(-10 // size)
                for whole, *parts in zip(*map(jax.tree.leaves, (arrays, *batches)), strict=True):
                    got = np.concatenate(parts)
                    assert got.dtype == whole.dtype
                    np.testing.assert_array_equal(np.sort(got, axis=0) if shuffle else got, whole)


def test_drop_remainder_keeps_full_batches(subtests):
    for (size, count), shuffle in itertools.product(
        [(4, 2), (5, 2), (10, 1), (3, 3)], [False, True]
    ):
        with subtests.test(size=size, count=count, shuffle=shuffle):
            data = mirror.data.from_arrays(
                np.arange(10), size, shuffle=shuffle, drop_remainder=True
            )
            for _ in range(2):
                batches = rows_of(data)
                assert len(data) == len(batches) == count
                assert all(len(batch) == size for batch in batches)
                assert len(set(flat(batches))) == size * count


def test_order_depends_only_on_seed_and_epoch():
    def data(seed):
        return mirror.data.from_arrays(np.arange(50), 8, shuffle=True, seed=seed)

    def orders(seed):
        return [flat(d) for d in [data(seed)] for _ in range(3)]

    first = orders(1)
    assert first == orders(1) == [order_of(data(1), e) for e in range(3)]
    assert len(set(map(tuple, first + orders(2) + [list(range(50))]))) == 7


def test_epochs_are_in_order_without_shuffle():
    data = mirror.data.from_arrays(np.arange(6), 4)
    assert rows_of(data) == rows_of(data) == [[0, 1, 2, 3], [4, 5]]
    assert rows_of(mirror.data.from_arrays(np.arange(6), np.int64(4))) == rows_of(data)


def test_set_epoch_sets_the_next_epoch():
    data = mirror.data.from_arrays(np.arange(30), 7, shuffle=True)
    orders = [flat(data) for _ in range(4)]
    assert order_of(data, 2) == orders[2]
    assert flat(data) == orders[3]
    assert order_of(data, np.int64(0)) == orders[0]


def test_iterators_are_independent():
    data = mirror.data.from_arrays(np.arange(30), 7, shuffle=True)
    orders = [rows_of(data) for _ in range(2)]
    data.set_epoch(0)
    first, second = iter(data), iter(data)
    pairs = list(zip(first, second, strict=True))
    assert [rows_of(each) for each in zip(*pairs, strict=True)] == orders


def test_reading_the_first_batch_does_not_advance_the_epoch(two):
    data = mirror.data.from_arrays({"x": x, "y": np.arange(10)}, 4, shuffle=True)
    before = [batch["y"].tolist() for batch in data]
    data.set_epoch(0)
    source = two.distribute_dataset(data, remainder="pad")
    spec, mask = source.element_spec
    assert (spec["x"].shape, spec["y"].dtype, mask.shape) == ((2, 2, 2), np.int32, (2, 2))
    assert source.padded(group=2).element_spec.num_examples == 8
    assert [np.asarray(b["y"])[np.asarray(m)].tolist() for b, m in source] == before


def test_distributed_arrays_yield_the_same_rows(subtests):
    for n in [1, 3, 8]:
        with subtests.test(n=n):
            data = mirror.data.from_arrays(np.arange(50), 16, shuffle=True, seed=3)
            source = cpu_strategy(n).distribute_dataset(data, remainder="pad")
            assert len(source) == 4
            for epoch in (0, 1, 5):
                source.set_epoch(epoch)
                got = np.concatenate([np.asarray(b)[np.asarray(m)] for b, m in source])
                assert got.tolist() == order_of(data, epoch)


def test_repr_describes_the_arrays():
    arrays = {"image": np.ones((60, 3), np.float32), "label": np.arange(60)}
    assert repr(mirror.data.from_arrays(arrays, 32)) == (
        "ArrayDataset(2 batches of 32; arrays['image']: float32[60,3], arrays['label']: int64[60])"
    )
    shuffled = mirror.data.from_arrays(arrays["label"], 32, shuffle=True, seed=7)
    assert "2 batches of 32, shuffled with seed 7; arrays: int64[60]" in repr(shuffled)


BAD = [
    # arrays, further arguments, error, and the names and values in its message
    ({"x": x, "y": np.arange(9)}, {}, ValueError, ["arrays['x']", "arrays['y']"], ["float64[10,2]", "int64[9]"]),
    ({"x": np.float32(3)}, {}, ValueError, "arrays['x']", "np.float32(3.0)"),
    ([1, 2, 3], {}, ValueError, "arrays[0]", [1, "np.asarray(list)"]),
    (np.ones((0, 3)), {}, ValueError, "arrays", "float64[0,3]"),
    ({}, {}, ValueError, "arrays", "{} (dict)"),
    (None, {}, ValueError, "arrays", "None (NoneType)"),
    ("text", {}, TypeError, "arrays", ["'text' (str)", "<U4"]),
    (x, {"batch_size": 0}, ValueError, "batch_size", 0),
    (x, {"batch_size": 2.5}, TypeError, "batch_size", "2.5 (float)"),
    (x, {"batch_size": True}, TypeError, "batch_size", "True (bool)"),
    (x, {"batch_size": 11, "drop_remainder": True}, ValueError, ["batch_size", "drop_remainder"], [10, 11]),
    (x, {"seed": None}, TypeError, "seed", "None (NoneType)"),
    (x, {"seed": -1}, ValueError, "seed", -1),
    (x, {"seed": 2**32}, ValueError, "seed", [2**32, 2**32 - 1]),
]  # fmt: skip


def test_from_arrays_rejects_bad_input_immediately(subtests):
    for arrays, options, kind, names, values in BAD:
        with subtests.test(names=names, values=values), raises(kind, names=names, values=values):
            mirror.data.from_arrays(arrays, **{"batch_size": 4, "shuffle": True, **options})


def test_set_epoch_requires_a_number(subtests):
    for epoch, kind in [(-1, ValueError), ("1", TypeError)]:
        with subtests.test(epoch=epoch), raises(kind, names="epoch", values=repr(epoch)):
            mirror.data.from_arrays(x, 4).set_epoch(epoch)


def test_shuffle_needs_no_other_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "grain", None)
    assert sorted(flat(mirror.data.from_arrays(np.arange(10), 4, shuffle=True))) == [*range(10)]


def test_shuffle_keeps_the_order_of_one_epoch_in_memory():
    """A pass over `n` rows allocates one permutation, also in a late epoch."""
    data = mirror.data.from_arrays(np.zeros(100_000, "int8"), 50_000, shuffle=True)
    data.set_epoch(1000)
    tracemalloc.start()
    try:
        for _ in data:
            pass
        assert tracemalloc.get_traced_memory()[1] < 3 * 100_000 * 8
    finally:
        tracemalloc.stop()


def test_orders_are_uniform():
    """Each row is as often in each position, over epochs and seeds."""
    counts = np.zeros((4, 4), int)
    for seed in range(4):
        data = mirror.data.from_arrays(np.arange(4), 4, shuffle=True, seed=seed)
        for _ in range(250):
            counts[np.arange(4), flat(data)] += 1
    assert counts.min() > 180  # 250 expected; 5 standard deviations are 69
    assert counts.max() < 320
