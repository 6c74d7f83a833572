"""Placement: every row once, balanced, by TensorFlow's rules."""

import itertools

import numpy as np

import mirror
from mirror._src.ps.placement import (
    FixedShardsPartitioner,
    Leaf,
    MaxSizePartitioner,
    MinSizePartitioner,
    place,
)
from tests.support.messages import raises

PARTITIONERS = [
    None,
    MinSizePartitioner(64),
    MinSizePartitioner(64, max_shards=2),
    MaxSizePartitioner(100),
    FixedShardsPartitioner(3),
    FixedShardsPartitioner(100),
    lambda shape, dtype: 2,
]


def random_leaves(seed):
    """Leaves of all sorts: scalars, empty ones, few rows, and one larger than all others."""
    rng = np.random.default_rng(seed)
    shapes = [(), (), (0,), (0, 4), (1, 50), (3,), (4, 0), (2, 3, 4), (700, 8)]
    shapes += [tuple(rng.integers(1, 40, size=rng.integers(1, 4))) for _ in range(12)]
    shapes = [tuple(map(int, shape)) for shape in shapes]
    dtypes = ["float32", "bfloat16", "float16"]
    return [
        Leaf(f"layers.{i}.w", shapes[i], dtypes[rng.integers(3)], "moving" if i % 5 else "trained")
        for i in rng.permutation(len(shapes))
    ]


CASES = list(itertools.product(range(3), range(len(PARTITIONERS)), (1, 2, 3, 7)))


def test_placement_laws(subtests):
    for seed, partitioner, num_ps in CASES:
        with subtests.test(seed=seed, partitioner=partitioner, num_ps=num_ps):
            leaves = random_leaves(seed)
            placement = place(leaves, num_ps, PARTITIONERS[partitioner])
            assert len(placement.servers) == num_ps
            for leaf in leaves:
                held = placement.holders[leaf.name]
                assert len({server for server, _ in held}) == len(held), (
                    "one slice of a leaf per server"
                )
                num_rows = leaf.shape[0] if leaf.shape else 1
                rows = [row for _, part in held for row in range(part.start, part.stop)]
                assert rows == list(range(num_rows)), "every row once, in order"
                counts = [part.stop - part.start for _, part in held]
                assert counts == sorted(counts, reverse=True), "the first ones have a row more"
                assert max(counts) - min(counts) <= 1
                assert all(part.shape[1:] == leaf.shape[1:] for _, part in held)
            sizes = placement.nbytes()
            largest = max(part.nbytes for slices in placement.servers for part in slices)
            assert max(sizes) - min(sizes) <= largest
            assert max(sizes) <= sum(sizes) / num_ps + largest
            assert placement == place(leaves, num_ps, PARTITIONERS[partitioner]), "deterministic"
            values = {
                leaf.name: np.full(leaf.shape, i, leaf.dtype) for i, leaf in enumerate(leaves)
            }
            parts = placement.split(values)
            assert all(np.shares_memory(p[n], values[n]) for p in parts for n in p if p[n].size)
            joined = placement.join(parts)
            assert joined.keys() == values.keys()
            for name, value in values.items():
                np.testing.assert_array_equal(joined[name], value)
                assert joined[name].dtype == value.dtype


def test_split_and_join_take_some_of_the_leaves():
    leaves = [Leaf("a", (4, 2), "float32", "trained"), Leaf("b", (4,), "float32", "trained")]
    placement = place(leaves, 2, FixedShardsPartitioner(2))
    parts = placement.split({"a": np.arange(8.0).reshape(4, 2)})
    assert [list(part) for part in parts] == [["a"], ["a"]]
    assert list(placement.join(parts)) == ["a"]


def test_whole_leaves_are_not_cut():
    leaves = [Leaf(name, (8, 2), "float32", "trained") for name in "ab"]
    placement = place(leaves, 2, FixedShardsPartitioner(2), whole={"a"})
    assert not placement.is_cut("a")
    assert placement.is_cut("b")


def test_number_of_shards(subtests):
    for partitioner, shape, dtype, shards in [
        # As in TensorFlow's documentation of its partitioners.
        (MinSizePartitioner(4, max_shards=2), (6, 1), "float32", 2),
        (MinSizePartitioner(4), (6, 1), "float32", 6),
        (MinSizePartitioner(4, max_shards=10), (6, 1), "float32", 6),
        (MinSizePartitioner(16), (6, 1), "float32", 1),
        (MinSizePartitioner(), (1 << 16, 1), "float32", 1),
        (MinSizePartitioner(), (1 << 17, 1), "float32", 2),
        (MaxSizePartitioner(4), (6, 1), "float32", 6),
        (MaxSizePartitioner(8), (6, 1), "float32", 3),
        (MaxSizePartitioner(1024), (6, 1), "float32", 1),
        (MaxSizePartitioner(1), (6, 1), "float32", 6),
        (MaxSizePartitioner(8), (0, 1), "float32", 1),
        (MaxSizePartitioner(8), (), "float32", 1),
        (MinSizePartitioner(1), (), "bfloat16", 1),
        (FixedShardsPartitioner(2), (10, 3), "float32", 2),
        (FixedShardsPartitioner(20), (10, 3), "float32", 10),
        (FixedShardsPartitioner(20), (), "float32", 1),
    ]:
        with subtests.test(partitioner=partitioner, shape=shape, dtype=dtype, shards=shards):
            assert partitioner(shape, dtype) == shards


def test_bad_numbers_are_refused(subtests):
    for (make, name), value in itertools.product(
        [
            (MinSizePartitioner, "min_shard_bytes"),
            (MaxSizePartitioner, "max_shard_bytes"),
            (FixedShardsPartitioner, "num_shards"),
            (lambda value: MinSizePartitioner(max_shards=value), "max_shards"),
        ],
        [0, -1, True, "x", 1.5],
    ):
        with subtests.test(name=name, value=value):
            wanted = ValueError if value in (0, -1) and value is not True else TypeError
            with raises(wanted, names=name, values=value):
                make(value)


LEAF = Leaf("a.kernel", (4, 2), "float32", "trained")


def test_partitioners_must_return_a_positive_integer(subtests):
    for number in [0, -1, True, "x", 1.5, None, [2, 1]]:
        with (
            subtests.test(number=number),
            raises(TypeError, names=("partitioner", "'a.kernel'"), values=str(number)),
        ):
            place([LEAF], 2, lambda shape, dtype: number)


def test_leaves_of_one_name_are_refused():
    with raises(ValueError, names="'a.kernel'"):
        place([LEAF, LEAF], 2, None)


def test_partitioners_say_what_they_do():
    assert repr(MinSizePartitioner(8)) == "MinSizePartitioner(8, max_shards=None)"
    assert repr(MaxSizePartitioner(8)) == "MaxSizePartitioner(8)"
    assert repr(FixedShardsPartitioner(8)) == "FixedShardsPartitioner(8)"
    for partitioner in (MinSizePartitioner, MaxSizePartitioner, FixedShardsPartitioner):
        assert partitioner.__module__ == mirror.ps.__name__
