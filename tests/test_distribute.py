"""`distribute_dataset`: global batches cut up in order, and what happens to odd ones."""
# ruff: noqa: E501 (a batch and its message are one row)

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mirror
from tests.conftest import cpu_strategy

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


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("remainder", ["error", "drop", "pad"])
def test_each_replica_gets_its_rows_in_order(name, remainder, strategy):
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


@pytest.mark.parametrize("kind", ["list", "generator", "iterator", "loader"])
def test_any_iterable_of_batches(kind, two):
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


def test_two_passes_at_once_do_not_disturb_each_other(two):
    source = two.distribute_dataset([rows, rows + 1])
    for first, second in zip(source, source, strict=True):
        np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize("remainder", ["error", "pad"])
@pytest.mark.parametrize("kind", [np.float32, np.int8])
def test_a_source_that_reuses_one_buffer(remainder, kind, two):
    def source():
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


@pytest.mark.parametrize(("n", "sizes", "kept"), SIZES)
def test_drop_leaves_out_whole_batches_that_do_not_divide(n, sizes, kept):
    strategy = cpu_strategy(n)
    source = [np.full((size, 2), size) for size in sizes]
    got = list(strategy.distribute_dataset(source, remainder="drop"))
    wanted = [size for size in sizes if size and size % n == 0]
    assert len(got) == kept
    assert [int(b.stacked.shape[0] * b.stacked.shape[1]) for b in got] == wanted


@pytest.mark.parametrize(
    ("n", "sizes"), [(2, [3, 3, 1]), (3, [7, 2, 0]), (8, [1]), (8, [24, 5]), (2, [0]), (1, [5, 2])]
)
def test_pad_yields_every_example_once(n, sizes):
    strategy = cpu_strategy(n)
    source = [{"x": np.arange(1, size + 1) * 1.0, "y": np.ones((size, 2), bool)} for size in sizes]
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
        if size:  # padded with real data, so that no log blows up
            assert np.asarray(batch["x"]).min() >= 1
            total = strategy.reduce("sum", batch["x"], axis=0, where=mask)
            assert float(total) == size * (size + 1) / 2


def test_pad_gives_one_shape_and_one_program(two):
    def step(batch, mask):
        return mirror.get_replica_context().all_reduce("sum", (batch * mask).sum())

    source = two.distribute_dataset([np.ones(5), np.ones(4), np.ones(1)], remainder="pad")
    assert [float(two.run(step, batch)) for batch in source] == [5.0, 4.0, 1.0]
    assert len(set(map(id, two._runner._programs.values()))) == 1


MESSAGES = [
    # replicas, remainder, batches, what the message says
    (2, "error", [{"image": np.ones((3, 2), np.float32)}], r"batch\['image'\] of batch 0 is float32\[3,2\]: 3 examples do not divide by 2 replicas. The nearest batch sizes that do: 2 or 4\."),
    (8, "error", [np.ones(3)], r"batch of batch 0 is float64\[3\]: .* 8 replicas. The nearest batch sizes that do: 8\."),
    (8, "error", [np.ones(16), np.ones(17)], r"batch of batch 1 .* 17 examples .* 16 or 24\.(.|\n)*remainder='pad'"),
    (2, "drop", [(np.ones(3), np.ones(3))], r"batch\[0\] of batch 0(.|\n)*this is the first: nothing trains"),
    (2, "pad", [np.ones(2), np.ones(4)], r"Batch 1 has 4 examples, more than the first one's 2\..* the first batch is the largest"),
    (2, "error", [{"a": np.ones(4), "b": np.ones(2)}], r"different leading sizes: batch\['a'\]: float64\[4\], batch\['b'\]: float64\[2\]\. The first axis"),
    (2, "error", [{"a": np.ones(4), "lr": 0.1}], r"batch\['lr'\] is the scalar 0\.1\. Each leaf .*mirrored argument: strategy\.run"),
    (2, "error", [[[1, 2], [3, 4]]], r"batch\[0\]\[0\] is the scalar 1"),
    (2, "error", [None], r"The dataset yielded None \(NoneType\), which holds no arrays"),
    (2, "error", [{}], r"The dataset yielded \{\} \(dict\), which holds no arrays"),
    (2, "error", [{"x": np.array(["a", "b"])}], r"batch\['x'\] is <U1\[2\] of dtype <U1.*Yield numbers; encode text before"),
    (2, "error", [{"x": np.array([None, 1])}], r"batch\['x'\] is object\[2\] of dtype object"),
    (2, "error", ["text"], r"batch is 'text' \(str\) of dtype <U4"),
    (2, "error", [mirror.PerReplica([np.ones(2)] * 2)], r"is a PerReplica\. distribute_dataset takes global batches"),
]  # fmt: skip


@pytest.mark.parametrize(("n", "remainder", "source", "text"), MESSAGES)
def test_messages_name_the_leaf_and_the_fix(n, remainder, source, text):
    with pytest.raises((ValueError, TypeError), match=text):
        list(cpu_strategy(n).distribute_dataset(source, remainder=remainder))


def test_a_batch_of_nothing_says_so(two):
    with pytest.raises(ValueError, match=r"batch 0 is .*0 examples"):
        list(two.distribute_dataset([np.ones((0, 2))]))


NO_SOURCES = [
    (np.ones((4, 2)), r"float64\[4,2\] is no iterable of global batches"),
    (jnp.ones(4), r"float32\[4\] is no iterable of global batches"),
    (
        {"image": np.ones(4)},
        r"\(dict\) is no iterable of global batches\. Pass a list, a generator",
    ),
    ("text", r"'text' \(str\) is no iterable"),
    (3, r"3 \(int\) is no iterable"),
    (None, r"None \(NoneType\) is no iterable"),
]


@pytest.mark.parametrize(("source", "text"), NO_SOURCES, ids=range(len(NO_SOURCES)))
def test_what_is_no_dataset_is_refused_at_once(source, text, two):
    with pytest.raises(TypeError, match=text):
        two.distribute_dataset(source)


def test_a_distributed_dataset_is_not_distributed_again(two):
    once = two.distribute_dataset([rows])
    with pytest.raises(TypeError, match=r"distributed already\. Pass the source of global batches"):
        two.distribute_dataset(once)


@pytest.mark.parametrize("remainder", ["keep", None, True, "Pad"])
def test_an_unknown_remainder_is_refused_at_once(remainder, two):
    text = re.escape(f"remainder={remainder!r} is none of 'error', 'drop' and 'pad'")
    with pytest.raises(ValueError, match=text):
        two.distribute_dataset([rows], remainder=remainder)


def test_an_error_of_the_source_comes_out(two):
    def source():
        yield rows
        raise OSError("disk")

    batches = iter(two.distribute_dataset(source()))
    next(batches)
    with pytest.raises(OSError, match="disk"):
        next(batches)


def test_a_second_pass_over_a_used_up_source_is_not_silently_empty(two):
    """`for epoch in ...: for batch in data` over a generator would train one epoch only."""
    source = two.distribute_dataset(rows for _ in range(2))
    assert len(list(source)) == 2
    with pytest.raises(ValueError, match="used up"):
        list(source)
