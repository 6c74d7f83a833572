"""`mirror.data.from_arrays`: whole arrays as a re-iterable dataset of global batches."""
# ruff: noqa: E501 (arguments and their message are one row)

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mirror
from tests.conftest import cpu_strategy

x = np.arange(20.0).reshape(10, 2)
TREES = {
    "array": x,
    "jax": jnp.asarray(x),
    "dict": {"image": x, "label": np.arange(10)},
    "tuple": (x, {"deep": np.arange(10) > 3, "none": None}),
}


def rows_of(batches):
    """The labels of a pass, batch by batch."""
    return [np.asarray(batch).tolist() for batch in batches]


def flat(data):
    """The labels of a pass."""
    return np.concatenate(list(data)).tolist()


def order_of(data, epoch):
    data.set_epoch(epoch)
    return flat(data)


@pytest.mark.parametrize("name", TREES)
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("size", [1, 4, 5, 10, 12])
def test_an_epoch_has_every_row_once(name, shuffle, size):
    arrays = TREES[name]
    data = mirror.data.from_arrays(arrays, size, shuffle=shuffle)
    for _ in range(2):
        batches = list(data)
        assert len(batches) == len(data) == -(-10 // size)
        for whole, *parts in zip(*map(jax.tree.leaves, (arrays, *batches)), strict=True):
            got = np.concatenate(parts)
            assert got.dtype == whole.dtype
            np.testing.assert_array_equal(np.sort(got, axis=0) if shuffle else got, whole)


@pytest.mark.parametrize(("size", "count"), [(4, 2), (5, 2), (10, 1), (3, 3)])
@pytest.mark.parametrize("shuffle", [False, True])
def test_drop_remainder_leaves_whole_batches(size, count, shuffle):
    data = mirror.data.from_arrays(np.arange(10), size, shuffle=shuffle, drop_remainder=True)
    for _ in range(2):
        batches = rows_of(data)
        assert len(data) == len(batches) == count
        assert all(len(batch) == size for batch in batches)
        assert len(set(flat(batches))) == size * count


def test_the_order_is_a_function_of_seed_and_epoch_alone():
    def data(seed):
        return mirror.data.from_arrays(np.arange(50), 8, shuffle=True, seed=seed)

    def orders(seed):
        return [flat(d) for d in [data(seed)] for _ in range(3)]

    first = orders(1)
    assert first == orders(1) == [order_of(data(1), e) for e in range(3)]
    assert len(set(map(tuple, first + orders(2) + [list(range(50))]))) == 7


def test_without_shuffle_every_epoch_is_in_order():
    data = mirror.data.from_arrays(np.arange(6), 4)
    assert rows_of(data) == rows_of(data) == [[0, 1, 2, 3], [4, 5]]


def test_set_epoch_chooses_the_next_and_those_after_it_follow():
    data = mirror.data.from_arrays(np.arange(30), 7, shuffle=True)
    orders = [flat(data) for _ in range(4)]
    assert order_of(data, 2) == orders[2]
    assert flat(data) == orders[3]
    assert order_of(data, np.int64(0)) == orders[0]


def test_two_iterators_are_independent():
    data = mirror.data.from_arrays(np.arange(30), 7, shuffle=True)
    orders = [rows_of(data) for _ in range(2)]
    data.set_epoch(0)
    first, second = iter(data), iter(data)
    pairs = list(zip(first, second, strict=True))
    assert [rows_of(each) for each in zip(*pairs, strict=True)] == orders


def test_looking_at_the_first_batch_uses_up_no_epoch(two):
    data = mirror.data.from_arrays({"x": x, "y": np.arange(10)}, 4, shuffle=True)
    before = [batch["y"].tolist() for batch in data]
    data.set_epoch(0)
    source = two.distribute_dataset(data, remainder="pad")
    spec, mask = source.element_spec
    assert (spec["x"].shape, spec["y"].dtype, mask.shape) == ((2, 2, 2), np.int32, (2, 2))
    assert source.padded(group=2).element_spec.num_examples == 8
    assert [np.asarray(b["y"])[np.asarray(m)].tolist() for b, m in source] == before


@pytest.mark.parametrize("n", [1, 3, 8])
def test_distributed_it_is_the_same_rows(n):
    data = mirror.data.from_arrays(np.arange(50), 16, shuffle=True, seed=3)
    source = cpu_strategy(n).distribute_dataset(data, remainder="pad")
    assert len(source) == 4
    for epoch in (0, 1, 5):
        source.set_epoch(epoch)
        got = np.concatenate([np.asarray(b)[np.asarray(m)] for b, m in source])
        assert got.tolist() == order_of(data, epoch)


def test_the_repr_says_what_it_holds():
    arrays = {"image": np.ones((60, 3), np.float32), "label": np.arange(60)}
    assert repr(mirror.data.from_arrays(arrays, 32)) == (
        "ArrayDataset(2 batches of 32; arrays['image']: float32[60,3], arrays['label']: int64[60])"
    )
    shuffled = mirror.data.from_arrays(arrays["label"], 32, shuffle=True, seed=7)
    assert "2 batches of 32, shuffled with seed 7; arrays: int64[60]" in repr(shuffled)


BAD = [
    # arrays, further arguments, error, message
    ({"x": x, "y": np.arange(9)}, {}, ValueError, r"different leading sizes: arrays\['x'\]: float64\[10,2\], arrays\['y'\]: int64\[9\]"),
    ({"x": np.float32(3)}, {}, ValueError, r"arrays\['x'\] is the scalar np\.float32\(3\.0\)\. Each leaf"),
    ([1, 2, 3], {}, ValueError, r"arrays\[0\] is the scalar 1: a list of Python numbers is no array"),
    (np.ones((0, 3)), {}, ValueError, r"arrays is float64\[0,3\]: it has no rows\. Pass at least one"),
    ({}, {}, ValueError, r"arrays is \{\} \(dict\), which holds no arrays"),
    (None, {}, ValueError, r"arrays is None \(NoneType\), which holds no arrays"),
    ("text", {}, TypeError, r"arrays is 'text' \(str\) of dtype <U4, which JAX has no arrays for"),
    (x, {"batch_size": 0}, ValueError, r"batch_size=0 is less than 1\. Pass how many, 1 or more"),
    (x, {"batch_size": 2.5}, TypeError, r"batch_size=2\.5 \(float\) is no int"),
    (x, {"batch_size": True}, TypeError, r"batch_size=True \(bool\) is no int"),
    (x, {"batch_size": 11, "drop_remainder": True}, ValueError, r"10 rows, fewer than batch_size=11, .*there is no batch\. Pass a smaller"),
    (x, {"seed": None}, TypeError, r"seed=None \(NoneType\) is no int"),
    (x, {"seed": -1}, ValueError, r"seed=-1 is less than 0"),
    (x, {"seed": 2**32}, ValueError, r"seed=4294967296 is more than 2\*\*32 - 1\. Pass 0 to 4294967295"),
]  # fmt: skip


@pytest.mark.parametrize(("arrays", "options", "kind", "text"), BAD, ids=range(len(BAD)))
def test_bad_input_is_refused_at_once(arrays, options, kind, text):
    with pytest.raises(kind, match=text):
        mirror.data.from_arrays(arrays, **{"batch_size": 4, "shuffle": True, **options})


@pytest.mark.parametrize(("epoch", "kind"), [(-1, ValueError), ("1", TypeError)])
def test_an_epoch_is_a_number(epoch, kind):
    with pytest.raises(kind, match=f"epoch={epoch!r}"):
        mirror.data.from_arrays(x, 4).set_epoch(epoch)


def test_shuffle_without_grain_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "grain", None)
    assert len(list(mirror.data.from_arrays(x, 4))) == 3
    with pytest.raises(ImportError, match=r"Grain, .* pip install \"mirror-jax\[train\]\""):
        mirror.data.from_arrays(x, 4, shuffle=True)
