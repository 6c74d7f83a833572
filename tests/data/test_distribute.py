"""`distribute_dataset`: global batches are split in order; odd batch sizes follow `remainder`."""
# ruff: noqa: E501 (a batch and its message are one row)

import collections
import importlib
import itertools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.sparse import BCOO

import mirror
from tests.support.compilations import assert_nothing_compiled, compilations
from tests.support.messages import raises
from tests.support.strategies import LAYOUTS, cpu_strategy

rows = np.arange(48, dtype=np.float32).reshape(24, 2)
BATCHES = {
    "array": rows,
    "jax": jnp.asarray(rows),
    "dict": {"image": rows, "label": np.arange(24)},
    "tuple": (rows, np.arange(24)),
    "list": [rows, {"deep": (np.arange(24) > 3, None)}],
    "empty rows": np.zeros((24, 0), np.float32),
    "strided": rows[:, ::-1],
    "bfloat16": rows.astype(jnp.bfloat16),
    "mixed": {"host": rows, "device": jnp.arange(24)},
}


def test_replicas_get_their_rows_in_order(subtests):
    for layout, name, remainder in itertools.product(LAYOUTS, BATCHES, ["error", "drop", "pad"]):
        with subtests.test(layout=layout, name=name, remainder=remainder):
            num_devices, replicas_per_device = LAYOUTS[layout]
            strategy = cpu_strategy(num_devices, replicas_per_device=replicas_per_device)
            n, batch = strategy.num_replicas_in_sync, BATCHES[name]
            (got,) = strategy.distribute_dataset([batch], remainder=remainder)
            if remainder == "pad":
                got, mask = got
                assert np.asarray(mask).all()
                assert mask.stacked.shape == (n, 24 // n)
            is_leaf = lambda x: isinstance(x, mirror.PerReplica)  # noqa: E731
            assert jax.tree.structure(
                jax.tree.map(lambda x: 0, got, is_leaf=is_leaf)
            ) == jax.tree.structure(jax.tree.map(lambda x: 0, batch))
            for mine, whole in zip(
                jax.tree.leaves(got, is_leaf=is_leaf), jax.tree.leaves(batch), strict=True
            ):
                assert [next(iter(v.devices())) for v in mine.values] == list(strategy.devices)
                np.testing.assert_array_equal(np.concatenate(mine.values), whole)


def test_distribute_accepts_any_iterable_of_batches(two, subtests):
    for kind in ["list", "generator", "iterator", "loader"]:
        with subtests.test(kind=kind):

            class Loader:
                def __iter__(self):
                    return iter([rows, rows + 1])

                def __len__(self):
                    return 2

            sources = {
                "list": [rows, rows + 1],
                "generator": (rows + i for i in range(2)),
                "iterator": iter([rows, rows + 1]),
                "loader": Loader(),
            }
            source = two.distribute_dataset(sources[kind])
            np.testing.assert_array_equal(
                np.stack([two.gather(b) for b in source]), np.stack([rows, rows + 1])
            )
            if kind in ("list", "loader"):
                assert len(source) == 2
                assert len(list(source)) == 2


def test_concurrent_passes_are_independent(two):
    source = two.distribute_dataset([rows, rows + 1])
    for first, second in zip(source, source, strict=True):
        np.testing.assert_array_equal(first, second)


def test_source_may_reuse_one_buffer(two, subtests):
    for remainder, kind in itertools.product(["error", "pad"], [np.float32, np.int8]):
        with subtests.test(remainder=remainder, kind=kind):

            def source(kind=kind):
                buffer = np.zeros((1024, 256), kind)
                for i in range(8):
                    buffer[:] = i
                    yield buffer

            for i, batch in enumerate(two.distribute_dataset(source(), remainder=remainder)):
                batch = batch[0] if remainder == "pad" else batch
                assert (np.asarray(batch) == i).all()


SIZES = [
    # replicas, sizes of the batches, how many batches `drop` yields
    (2, [4, 4, 3], 2),
    (2, [4, 3, 4], 2),
    (3, [6, 0, 5, 3], 2),
    (8, [16, 1], 1),
    (1, [3, 1, 2], 3),
]


def test_drop_skips_whole_batches_that_do_not_divide(subtests):
    for n, sizes, kept in SIZES:
        with subtests.test(n=n, sizes=sizes, kept=kept):
            strategy = cpu_strategy(n)
            source = [np.full((size, 2), size) for size in sizes]
            got = list(strategy.distribute_dataset(source, remainder="drop"))
            wanted = [size for size in sizes if size and size % n == 0]
            assert len(got) == kept
            assert [int(b.stacked.shape[0] * b.stacked.shape[1]) for b in got] == wanted


def test_pad_yields_every_example_once(subtests):
    for n, sizes in [(2, [3, 3, 1]), (3, [7, 2, 0]), (8, [1]), (8, [24, 5]), (2, [0]), (1, [5, 2])]:
        with subtests.test(n=n, sizes=sizes):
            strategy = cpu_strategy(n)
            source = [
                {"x": np.arange(1, size + 1) * 1.0, "y": np.ones((size, 2), bool)} for size in sizes
            ]
            full = max(-(-sizes[0] // n) * n, n)
            for size, (batch, mask) in zip(
                sizes, strategy.distribute_dataset(source, remainder="pad"), strict=True
            ):
                assert batch["x"].stacked.shape == mask.stacked.shape == (n, full // n)
                assert batch["y"].stacked.shape == (n, full // n, 2)
                assert mask.dtype == np.bool_
                kept = np.concatenate(mask.values)
                np.testing.assert_array_equal(kept, np.arange(full) < size)
                np.testing.assert_array_equal(
                    np.concatenate(batch["x"].values)[kept], np.arange(1, size + 1)
                )
                if size:  # padded with real data, so that no logarithm gives Inf
                    assert np.asarray(batch["x"]).min() >= 1
                    total = strategy.reduce("sum", batch["x"], axis=0, where=mask)
                    assert float(total) == size * (size + 1) / 2


def test_pad_gives_one_shape_and_one_program(two, caplog):
    shapes = set()

    def step(batch, mask):
        shapes.add((batch.shape, mask.shape))
        return mirror.all_reduce("sum", (batch * mask).sum())

    source = two.distribute_dataset([np.ones(5), np.ones(4), np.ones(1)], remainder="pad")
    first, *others = source
    assert float(two.run(step, first)) == 5.0
    with compilations(caplog) as events:
        assert [float(two.run(step, batch)) for batch in others] == [4.0, 1.0]
    assert_nothing_compiled(events)
    assert shapes == {((3,), (3,))}


class Ragged:
    """A stand-in for another library's rows of different lengths."""

    def __array__(self, dtype=None, copy=None):
        return np.array([[1, 2], [3]])

    def __repr__(self):
        return "a ragged array"


MESSAGES = [
    # replicas, remainder, batches, what the message has
    (2, "error", [{"image": np.ones((3, 2), np.float32)}], {"names": "batch['image']", "values": [0, "float32[3,2]", 3, 2, 4], "fix": ["remainder='pad'", "remainder='drop'"]}),
    (8, "error", [np.ones(3)], {"names": "batch", "values": [0, "float64[3]", 3, 8]}),
    (8, "error", [np.ones(16), np.ones(17)], {"names": "batch", "values": [1, 17, 8, 16, 24], "fix": "remainder='pad'"}),
    (2, "drop", [(np.ones(3), np.ones(3))], {"names": "batch[0]", "values": [0, 3, 2, 4], "fix": "remainder='drop'"}),
    (2, "error", [{"a": np.ones(4), "b": np.ones(2)}], {"names": ["batch['a']", "batch['b']"], "values": ["float64[4]", "float64[2]"]}),
    (2, "error", [{"a": np.ones(4), "lr": 0.1}], {"names": "batch['lr']", "values": 0.1, "fix": "strategy.run"}),
    (2, "error", [[[1, 2], [3, 4]]], {"names": "batch[0][0]", "values": 1, "fix": "np.asarray(list)"}),
    (2, "error", [{"x": [[1, 2], [3]]}], {"names": "batch['x'][0][0]", "values": 1, "fix": "dataset.with_format('numpy')"}),
    (2, "error", [{"x": [np.ones(2), np.ones(3)]}], {"names": ["batch['x'][0]", "batch['x'][1]"], "values": ["float64[2]", "float64[3]"], "fix": "np.stack"}),
    (2, "error", [{"x": Ragged()}], {"names": ["batch['x']", "Ragged"], "values": ["a ragged array", "inhomogeneous"]}),
    (2, "error", [{"x": np.ones(2), "y": np.ones(2)}, {"x": np.ones(2), "z": np.ones(2)}], {"names": ["batch['y']", "batch['z']"], "values": [1, 0]}),
    (2, "pad", [(np.ones(2), np.ones(2)), [np.ones(2), np.ones(2)]], {"values": [1, 0, "PyTreeDef((*, *))", "PyTreeDef([*, *])"]}),
    (2, "drop", [np.ones(2), np.ones(3), {"x": np.ones(2)}], {"names": ["batch", "batch['x']"], "values": [2, 0]}),
    (2, "pad", [jax.random.split(jax.random.key(0), 4)], {"names": "batch", "values": "key<fry>[4]"}),
    (2, "error", [None], {"names": "batch", "values": [None, "NoneType"]}),
    (2, "error", [{}], {"names": "batch", "values": ["{}", "dict"]}),
    (2, "error", [{"x": np.array(["a", "b"])}], {"names": "batch['x']", "values": ["<U1[2]", "<U1"]}),
    (2, "error", [{"x": np.array([None, 1])}], {"names": "batch['x']", "values": ["object[2]", "object"]}),
    (2, "error", ["text"], {"names": "batch", "values": ["'text'", "str", "<U4"]}),
    (2, "error", [mirror.PerReplica([np.ones(2)] * 2)], {"names": ["batch", "PerReplica"], "fix": "dataset itself"}),
]  # fmt: skip


def test_messages_name_the_leaf_and_the_fix(subtests):
    for n, remainder, source, wanted in MESSAGES:
        with subtests.test(n=n, wanted=wanted), raises((ValueError, TypeError), **wanted):
            list(cpu_strategy(n).distribute_dataset(source, remainder=remainder))


def test_empty_batch_is_rejected(two):
    with raises(ValueError, names="batch", values=[0, 2, "float64[0,2]"], fix="remainder='drop'"):
        list(two.distribute_dataset([np.ones((0, 2))]))


def of_library(name, base=object):
    """An instance of a class that another library defines."""
    return type("Dataset", (base,), {"__module__": f"{name}.sub", "__repr__": lambda _: "data"})()


Columns = collections.namedtuple("Columns", "x y")
FROM_ARRAYS = "mirror.data.from_arrays(arrays, batch_size)"
NO_SOURCES = [
    (np.ones((4, 2)), {"values": "float64[4,2]", "fix": FROM_ARRAYS}),
    (jnp.ones(4), {"values": "float32[4]", "fix": FROM_ARRAYS}),
    ({"image": np.ones(4)}, {"names": "image", "values": "dict", "fix": FROM_ARRAYS}),
    (
        types.MappingProxyType({"train": [1]}),
        {"values": "mappingproxy", "fix": "datasets['train']"},
    ),
    ((rows, np.arange(24)), {"values": "tuple", "fix": FROM_ARRAYS}),
    (Columns(rows, rows), {"names": "Columns", "fix": FROM_ARRAYS}),
    ("text", {"values": ["'text'", "str"], "fix": "DataLoader"}),
    (3, {"values": [3, "int"], "fix": "DataLoader"}),
    (None, {"values": [None, "NoneType"], "fix": "DataLoader"}),
    (of_library, {"values": "of_library", "fix": "__iter__"}),
    (
        of_library("torch"),
        {"names": "Dataset", "fix": "torch.utils.data.DataLoader(dataset, batch_size)"},
    ),
]


def test_distribute_rejects_non_datasets_immediately(two, subtests):
    for source, wanted in NO_SOURCES:
        with subtests.test(wanted=wanted), raises(TypeError, **wanted):
            two.distribute_dataset(source)


def test_sparse_arrays_are_rejected(two, subtests):
    """The numbers that are not zero are no rows, though they are leaves of a tree."""
    dense = np.eye(4, 3, dtype=np.float32)
    csr_array = importlib.import_module("scipy.sparse").csr_array
    for make, fix in ((BCOO.fromdense, "x.todense()"), (csr_array, "x.toarray()")):
        wanted = {"names": "batch['x']", "values": "sparse array", "fix": fix}
        with subtests.test(fix=fix), raises(TypeError, **wanted):
            list(two.distribute_dataset([{"x": make(dense)}], remainder="pad"))


def test_distribute_rejects_a_distributed_dataset(two):
    once = two.distribute_dataset([rows])
    with raises(TypeError, names="dataset"):
        two.distribute_dataset(once)


def test_distribute_rejects_an_unknown_remainder_immediately(two, subtests):
    for remainder in ["keep", None, True, "Pad"]:
        with subtests.test(remainder=remainder):
            values = [repr(remainder), "'error'", "'drop'", "'pad'"]
            with raises(ValueError, names="remainder", values=values):
                two.distribute_dataset([rows], remainder=remainder)


def test_source_error_is_raised(two):
    def source():
        yield rows
        raise OSError("disk")

    batches = iter(two.distribute_dataset(source()))
    next(batches)
    with pytest.raises(OSError, match="disk"):
        next(batches)


def test_second_pass_over_an_exhausted_source_raises(two):
    """`for epoch in ...: for batch in data` over a generator would train one epoch only."""
    source = two.distribute_dataset(rows for _ in range(2))
    assert len(list(source)) == 2
    with raises(ValueError, names="dataset", fix="iterator"):
        list(source)


SPECS = [
    # batch, what a leaf is on two replicas
    (rows, ((2, 12, 2), np.float32)),
    ({"x": jnp.ones((4, 3), jnp.bfloat16)}, ((2, 2, 3), jnp.bfloat16)),
    ((np.arange(6), None), ((2, 3), np.int32)),
    (np.ones((2, 0)), ((2, 1, 0), np.float32)),
]


def test_element_spec_matches_the_batches(two, subtests):
    for (batch, expected), remainder in itertools.product(SPECS, ["error", "drop", "pad"]):
        with subtests.test(expected=expected, remainder=remainder):
            source = two.distribute_dataset([batch], remainder=remainder)
            spec = source.element_spec
            if remainder == "pad":
                spec, mask = spec
                assert mask == jax.ShapeDtypeStruct(expected[0][:2], bool)
            (leaf,) = jax.tree.leaves(spec)
            assert leaf == jax.ShapeDtypeStruct(*expected)
            assert shapes_of(next(iter(source))) == shapes_of(source.element_spec)


def shapes_of(tree):
    return jax.tree.map(
        lambda x: (x.shape, x.dtype) if hasattr(x, "shape") else x,
        jax.tree.map(lambda x: x.stacked if isinstance(x, mirror.PerReplica) else x, tree,
                     is_leaf=lambda x: isinstance(x, mirror.PerReplica)),
    )  # fmt: skip


def test_element_spec_does_not_consume_a_batch(two, subtests):
    for kind in ["list", "generator"]:
        with subtests.test(kind=kind):
            batches = [rows + i for i in range(3)]
            source = two.distribute_dataset(batches if kind == "list" else (b for b in batches))
            for _ in range(2):
                assert source.element_spec.shape == (2, 12, 2)
            np.testing.assert_array_equal(
                np.stack([two.gather(b) for b in source]), np.stack(batches)
            )
            assert source.element_spec.shape == (2, 12, 2)


def test_element_spec_describes_per_replica_batches(two):
    batches = [{"x": np.arange(3)}, {"x": np.arange(3)}]
    source = two.distribute_datasets_from_function(lambda _: iter(batches))
    assert source.element_spec == {"x": jax.ShapeDtypeStruct((2, 3), np.int32)}
    assert [np.asarray(got["x"]).tolist() for got in source] == [[[0, 1, 2]] * 2]


def test_element_spec_of_an_empty_dataset_raises(two):
    for source in (two.distribute_dataset([]), two.distribute_dataset([]).padded()):
        with raises(ValueError, names="dataset", fix="element_spec"):
            _ = source.element_spec
    used = two.distribute_dataset(iter([rows]))
    list(used)
    with raises(ValueError, names="dataset", fix="iterator"):
        _ = used.element_spec


PADDED = [
    # sizes of the batches, multiple, group, skip
    ([4, 4, 4], 1, 1, 0),
    ([5, 5, 2], 1, 1, 0),
    ([5, 5, 2], 3, 1, 6),
    ([7, 0, 7, 7, 1], 1, 2, 0),
    ([7, 7, 7, 7], 2, 3, 9),
    ([6, 6, 6, 6, 6], 1, 5, 6),
    ([6, 6, 1], 1, 4, 12),
    ([3], 1, 2, 0),
    ([6, 6], 1, 2, 12),
]


def test_padded_yields_every_example_once_in_one_shape(subtests):
    for (sizes, multiple, group, skip), n in itertools.product(PADDED, [1, 3, 8]):
        with subtests.test(sizes=sizes, multiple=multiple, group=group, skip=skip, n=n):
            strategy, seen = cpu_strategy(n), []
            x = np.arange(1, sum(sizes) + 1) * 1.0
            source = [
                {"x": b, "y": np.stack([b, -b], 1)} for b in np.split(x, np.cumsum(sizes)[:-1])
            ]
            data = strategy.distribute_dataset(source, remainder="pad").padded(
                multiple=multiple,
                group=group,
                skip=skip,
                inspect=lambda i, b, seen=seen: seen.append((i, b)),
            )
            full = -(-sizes[0] // (n * multiple)) * n * multiple
            assert data.element_spec.num_examples == sizes[0] * group
            got = list(data)
            read = []
            for padded in got:
                assert shapes_of(padded)[:2] == shapes_of(data.element_spec)[:2]
                lead = (n, full // n) if group == 1 else (n, group, full // n)
                assert padded.mask.stacked.shape == padded.batch["x"].stacked.shape == lead
                mask = (
                    np.asarray(padded.mask)
                    .reshape(n, group, -1)
                    .swapaxes(0, 1)
                    .reshape(group, full)
                )
                rows = (
                    np.asarray(padded.batch["x"])
                    .reshape(n, group, -1)
                    .swapaxes(0, 1)
                    .reshape(group, full)
                )
                assert padded.num_examples == mask.sum()
                assert (
                    padded.num_batches
                    == mask.any(axis=1).sum()
                    == mask[: padded.num_batches].any(1).sum()
                )
                assert rows.min() >= 1  # padding is real data
                both = np.asarray(padded.batch["y"])
                np.testing.assert_array_equal(both[..., 0], np.asarray(padded.batch["x"]))
                np.testing.assert_array_equal(both[..., 1], -both[..., 0])
                read.append(rows[mask])
            np.testing.assert_array_equal(np.concatenate([*read, []]), x[skip:])
            np.testing.assert_array_equal(
                np.concatenate([*(b["x"] for _, b in seen), []]), x[skip:]
            )
            starts = np.cumsum([0, *sizes])
            assert [i for i, _ in seen] == [
                i for i, s in enumerate(sizes) if s and starts[i] + s > skip
            ]
            # `skip` is for the first pass only; the next is whole
            if skip:
                assert sum(padded.num_examples for padded in data) == sum(sizes)


def test_padded_on_the_host_has_the_rows_of_the_devices(two, subtests):
    for name, group in itertools.product(BATCHES, [1, 2]):
        with subtests.test(name=name, group=group):
            batch = jax.tree.map(lambda x: x.copy(), BATCHES[name])
            data = two.distribute_dataset([batch, batch], remainder="pad")
            placed, got = (next(iter(data.padded(group=group, on_host=it))) for it in (False, True))
            for leaf in jax.tree.leaves(batch):
                if isinstance(leaf, np.ndarray):
                    leaf[...] = 0  # as loaders refill it
            for mine, want in zip(*map(jax.tree.leaves, (got[:2], placed[:2])), strict=True):
                assert type(mine) is np.ndarray
                assert mine.dtype == want.dtype
                np.testing.assert_array_equal(mine, want)


def test_padded_length_counts_launches(two):
    source = two.distribute_dataset([rows] * 7, remainder="pad")
    assert [len(source.padded(group=k)) for k in (1, 2, 7, 8)] == [7, 4, 1, 1]
    with pytest.raises(TypeError, match="has no len"):
        len(two.distribute_dataset(b for b in [rows]).padded())


def test_padded_works_on_every_layout(subtests):
    """Two replicas on one device, devices that share a host: the same rows."""
    for layout, prefetch in itertools.product(LAYOUTS, [0, 2]):
        with subtests.test(layout=layout, prefetch=prefetch):
            num_devices, replicas_per_device = LAYOUTS[layout]
            strategy = cpu_strategy(num_devices, replicas_per_device=replicas_per_device)
            n = strategy.num_replicas_in_sync
            with strategy.scope():
                source = [jnp.arange(4.0 * n), np.arange(4.0 * n), np.arange(3.0 * n)]
                data = strategy.distribute_dataset(source, remainder="pad", prefetch=prefetch)
                first, second = data.padded(group=2)
            assert (first.num_batches, second.num_batches) == (2, 1)
            for value, device in zip(first.batch.values, strategy.devices, strict=True):
                assert value.devices() == {device}
            np.testing.assert_array_equal(
                np.asarray(first.batch).swapaxes(0, 1).reshape(2, -1), [np.arange(4.0 * n)] * 2
            )


KEEPS = [("drop", [6, 3, 4], [0, 2]), ("pad", [6, 3, 0, 4], [0, 1, 3]), ("error", [6, 4], [0, 1])]


def test_padded_keeps_the_examples_of_the_remainder(two, subtests):
    for remainder, sizes, kept in KEEPS:
        with subtests.test(remainder=remainder, sizes=sizes, kept=kept):
            source = [np.full(size, i) for i, size in enumerate(sizes)]
            data = two.distribute_dataset(source, remainder=remainder).padded(multiple=2)
            got = list(data)
            assert [int(np.asarray(p.batch).max()) for p in got] == kept
            assert [p.num_examples for p in got] == [sizes[i] for i in kept]
            assert {p.mask.stacked.shape for p in got} == {(2, 4)}
            skipping = two.distribute_dataset(source, remainder=remainder).padded(skip=sizes[0] + 1)
            assert (
                sum(p.num_examples for p in skipping) == sum(sizes[i] for i in kept) - sizes[0] - 1
            )


def test_padded_rejects_indivisible_batches_when_remainder_is_error(two):
    with raises(ValueError, names="batch", values=[1, "float64[3]", 3, 2], fix="remainder='pad'"):
        list(two.distribute_dataset([np.ones(4), np.ones(3)]).padded())


BAD_PADDED = [
    ({"multiple": 0}, ValueError, {"names": "multiple", "values": 0}),
    ({"group": 0}, ValueError, {"names": "group", "values": 0}),
    ({"skip": -1}, ValueError, {"names": "skip", "values": -1}),
    ({"group": 2.0}, TypeError, {"names": "group", "values": "2.0 (float)"}),
    ({"skip": True}, TypeError, {"names": "skip", "values": "True (bool)"}),
]


def test_padded_rejects_invalid_counts(two, subtests):
    for options, kind, wanted in BAD_PADDED:
        with subtests.test(options=options), raises(kind, **wanted):
            two.distribute_dataset([rows]).padded(**options)


def test_skip_rejects_more_examples_than_the_dataset_has(two):
    data = two.distribute_dataset([rows, rows]).padded(skip=50)
    with raises(ValueError, names="dataset", values=[50, 48]):
        list(data)


def test_grouped_batches_must_have_one_shape_and_dtype(two, subtests):
    for other, shown in [
        (np.ones((4, 3)), "float64[4,3]"),
        (np.ones((4, 2), np.float16), "float16[4,2]"),
    ]:
        with subtests.test(shown=shown):
            source = two.distribute_dataset([{"x": np.ones((4, 2))}, {"x": other}], remainder="pad")
            assert len(list(source.padded())) == 2
            with raises(ValueError, names="batch['x']", values=[1, shown, 0, "float64[4,2]"]):
                list(source.padded(group=2))


def test_inspect_error_is_raised_in_its_place(two):
    def inspect(number, batch):
        if number == 2:
            raise ValueError(f"label {batch.max()}")

    batches = iter(two.distribute_dataset([rows] * 4).padded(inspect=inspect))
    assert [next(batches).num_examples for _ in range(2)] == [24, 24]
    with pytest.raises(ValueError, match="label 47"):
        next(batches)
    assert list(batches) == []


def test_plain_and_padded_iteration_share_the_source(two):
    source = two.distribute_dataset(rows for _ in range(2))
    assert len(list(source.padded())) == 2
    with raises(ValueError, names="dataset", fix="iterator"):
        iter(source)


def test_set_epoch_reaches_the_source_and_its_members(two):
    told = []

    class Shuffled(list):
        def set_epoch(self, epoch):
            told.append(epoch)

    class Loader(list):
        sampler, dataset, batch_sampler = Shuffled(), Shuffled(), object()

    for source in (Shuffled([rows]), Loader([rows]), [rows]):
        two.distribute_dataset(source).set_epoch(3)
        two.distribute_dataset(source).padded().set_epoch(4)
    assert told == [3, 4, 3, 3, 4, 4]


def test_pass_starts_at_the_first_request(two):
    """Not when its thread starts to read: `set_epoch` after `iter` applies to the next pass."""
    data = mirror.data.from_arrays(np.arange(8), 8, shuffle=True, seed=1)
    orders = [np.concatenate([np.asarray(b) for b in data]).tolist() for _ in range(3)]
    data.set_epoch(0)
    source = two.distribute_dataset(data)
    first, second = iter(source), iter(source)
    source.set_epoch(2)
    third = iter(source)
    assert [np.ravel(list(p)).tolist() for p in (first, second, third)] == orders


def test_batches_of_a_launch_that_is_split_keep_their_examples(two):
    data = [np.ones((size, 2), np.float32) for size in (4, 3, 4, 1)]
    (group,) = two.distribute_dataset(data, remainder="pad").padded(group=4)
    for count, examples in (1, 4), (2, 7), (3, 11):
        head, rest = group.split(count)
        assert (head.num_examples, rest.num_examples) == (examples, 12 - examples)
