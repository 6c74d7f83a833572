"""Data loaders of other libraries: replicas get the rows of the source, in order."""
# ruff: noqa: E501 (a loader and its message are one row)

import collections
import contextlib
import functools
import itertools
import threading
from typing import Any

import grain
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mirror
from tests.support.messages import raises
from tests.support.packages import optional, row_groups
from tests.support.strategies import cpu_strategy

torch: Any = optional("torch")
datasets: Any = optional("datasets")
if datasets:
    datasets.disable_progress_bars()

NUM_ROWS, SIZE = 50, 24  # 24, 24, 2: the last one divides by 1 replica only of 1, 3 and 8
X = np.arange(NUM_ROWS * 3, dtype=np.float32).reshape(NUM_ROWS, 3)
Y = np.arange(NUM_ROWS)
Rows = collections.namedtuple("Rows", "x y")


def batches():
    """The batches, as dicts of NumPy arrays."""
    for start in range(0, NUM_ROWS, SIZE):
        yield {"x": X[start : start + SIZE], "y": Y[start : start + SIZE]}


class Again:
    """A source that can be iterated repeatedly."""

    def __init__(self, make):
        self._make = make

    def __iter__(self):
        return self._make()


class Tensor:
    """The NumPy interface of the eager tensors that tf.data yields."""

    def __init__(self, array):
        self._array = array
        self.shape, self.dtype = array.shape, array.dtype

    def __array__(self, dtype=None, copy=None):
        return np.array(self._array, dtype=dtype, copy=copy)

    def __len__(self):
        return len(self._array)

    def __iter__(self):
        return map(Tensor, self._array)


class TfData:
    """The interface of a tf.data.Dataset."""

    element_spec = {"x": "TensorSpec(None, 3)", "y": "TensorSpec(None,)"}

    def __iter__(self):
        return ({k: Tensor(v) for k, v in batch.items()} for batch in batches())

    def cardinality(self):
        return Tensor(np.int64(len(self)))

    def __len__(self):
        return -(-NUM_ROWS // SIZE)


if torch:

    class TorchRows(torch.utils.data.Dataset):
        def __len__(self):
            return NUM_ROWS

        def __getitem__(self, i):
            return {"x": X[i], "y": Y[i]}

    class TorchStream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return ({"x": x, "y": y} for x, y in zip(X, Y, strict=True))


class GrainRows:
    """A random-access source for grain's loader."""

    def __len__(self):
        return NUM_ROWS

    def __getitem__(self, i):
        return {"x": X[i], "y": Y[i]}


def grain_map():
    return grain.MapDataset.source(GrainRows()).batch(SIZE)


def grain_loader():
    sampler = grain.samplers.IndexSampler(
        num_records=NUM_ROWS,
        num_epochs=1,
        shard_options=grain.sharding.NoSharding(),
        shuffle=False,
        seed=0,
    )
    operations = [grain.transforms.Batch(SIZE, drop_remainder=False)]
    return grain.DataLoader(data_source=GrainRows(), sampler=sampler, operations=operations)


def hugging_face():
    return datasets.Dataset.from_dict({"x": X, "y": Y}).with_format("numpy")


def torch_loader(dataset, **options):
    return torch.utils.data.DataLoader(dataset, SIZE, **options)


LOADERS = {
    # constructor; whether it can be iterated again; whether it has a length
    "list": (lambda: list(batches()), True, True),
    "generator": (batches, False, False),
    "namedtuples": (lambda: [Rows(**b) for b in batches()], True, True),
    "tuples": (lambda: [tuple(b.values()) for b in batches()], True, True),
    "jax": (lambda: [jax.tree.map(jnp.asarray, b) for b in batches()], True, True),
    "from_arrays": (lambda: mirror.data.from_arrays({"x": X, "y": Y}, SIZE), True, True),
    "grain map": (grain_map, True, True),
    "grain iter": (lambda: grain_map().to_iter_dataset(), True, False),
    "grain iterator": (lambda: iter(grain_map().to_iter_dataset()), False, False),
    "grain loader": (grain_loader, True, False),
    "torch": (lambda: torch_loader(TorchRows()), True, True),
    "torch tensors": (
        lambda: torch_loader(
            torch.utils.data.TensorDataset(torch.asarray(X), torch.asarray(Y.copy()))
        ),
        True,
        True,
    ),
    "torch stream": (lambda: torch_loader(TorchStream()), True, False),
    "torch namedtuples": (
        lambda: torch_loader([Rows(x, y) for x, y in zip(X, Y, strict=True)]),
        True,
        True,
    ),
    "datasets": (lambda: hugging_face().batch(SIZE), True, True),
    "datasets iter": (lambda: hugging_face().iter(batch_size=SIZE), False, False),
    "datasets iter again": (
        lambda: Again(lambda: hugging_face().iter(batch_size=SIZE)),
        True,
        False,
    ),
    "datasets stream": (lambda: hugging_face().to_iterable_dataset().batch(SIZE), True, False),
    "datasets torch": (lambda: hugging_face().with_format("torch").batch(SIZE), True, True),
    "datasets jax": (lambda: hugging_face().with_format("jax").batch(SIZE), True, True),
    "tf.data": (TfData, True, True),
}


@functools.cache
def made(name):
    """One source for all tests that can share it."""
    make, again, _ = LOADERS[name]
    source = make()
    return (lambda: source) if again else make


def leaves_of(tree):
    """The `PerReplica`s of a batch: rows, then labels."""
    return jax.tree.leaves(tree, is_leaf=lambda leaf: isinstance(leaf, mirror.PerReplica))


def rows_of(source, num_examples):
    """Returns all rows and labels of a pass, in replica order."""
    columns = [], []
    for batch in source:
        for column, leaf in zip(columns, leaves_of(batch), strict=True):
            column.append(np.concatenate(leaf.values))
    x, y = map(np.concatenate, columns)
    assert (x.dtype, y.dtype) == (np.float32, np.int32)
    np.testing.assert_array_equal(x, X[:num_examples])
    np.testing.assert_array_equal(y, Y[:num_examples])


@pytest.fixture
def source_of():
    """Creates the source of a loader, and closes iterators; the threads of grain end later."""
    before, iterators = set(threading.enumerate()), []

    def make(name):
        source = made(name)()
        if not LOADERS[name][1]:
            iterators.append(source)
        return source

    yield make
    for iterator in iterators:
        iterator.close()
    for thread in set(threading.enumerate()) - before if iterators else ():
        thread.join(1)


@pytest.mark.parametrize("names", row_groups(LOADERS))
def test_replicas_get_the_rows_of_the_source(names, source_of, subtests):
    for name, n in itertools.product(names, [1, 3, 8]):
        with subtests.test(name=name, n=n):
            _, again, has_length = LOADERS[name]
            strategy, whole = cpu_strategy(n), NUM_ROWS if n == 1 else NUM_ROWS - 2
            for remainder in ("drop", "pad"):
                data = strategy.distribute_dataset(source_of(name), remainder=remainder)
                assert jax.tree.leaves(data.element_spec)[0].shape == (n, SIZE // n, 3)
                if has_length:
                    assert len(data) == 3
                for _ in range(1 + again):
                    if remainder == "drop":
                        rows_of(data, whole)
                    else:
                        rows_of((kept(*batch) for batch in data), NUM_ROWS)
            if n > 1:
                with raises(ValueError, values=[2, n], fix=["remainder='pad'", "remainder='drop'"]):
                    list(strategy.distribute_dataset(source_of(name)))


def kept(batch, mask):
    """Returns the rows selected by the mask, as for one replica."""
    where = np.concatenate(mask.values)
    return [mirror.PerReplica([np.concatenate(leaf.values)[where]]) for leaf in leaves_of(batch)]


@pytest.mark.parametrize("names", row_groups(LOADERS))
def test_padded_iteration_yields_the_same_rows(names, source_of, subtests):
    for name in names:
        with subtests.test(msg=name):
            data = cpu_strategy(3).distribute_dataset(source_of(name), remainder="pad")
            read = []
            for padded in data.padded(multiple=2, group=2, skip=30):
                mask, labels = np.asarray(padded.mask), np.asarray(leaves_of(padded.batch)[-1])
                read.append(labels.swapaxes(0, 1)[mask.swapaxes(0, 1)])
            np.testing.assert_array_equal(np.concatenate(read), Y[30:])


TORCH_DTYPES = ["bfloat16", "float16", "float32", "float8_e4m3fn", "uint8", "int16", "bool"]


@pytest.mark.dev("torch")
def test_torch_dtypes_are_converted(two, subtests):
    for name, transposed in itertools.product(TORCH_DTYPES, [False, True]):
        with subtests.test(name=name, transposed=transposed):
            tensor = torch.arange(-4, 4).reshape(4, 2).abs().to(getattr(torch, name))
            tensor = tensor[:2].t() if transposed else tensor
            (got,) = two.distribute_dataset([tensor])
            assert got.dtype == getattr(jnp, name)
            wanted = tensor.to(torch.float32).numpy()
            np.testing.assert_array_equal(np.concatenate(got.values).astype(np.float32), wanted)


UNREADABLE = {
    "grad": (lambda: torch.ones(4, requires_grad=True), {"values": [(4,)], "fix": "tensor.detach()"}),
    "device": (lambda: torch.ones(4, device="meta"), {"values": [(4,), "meta"], "fix": "tensor.cpu()"}),
    "sparse": (lambda: torch.eye(2).to_sparse(), {"values": [(2, 2), "torch.float32", "torch.sparse_coo"]}),
    "nested": (lambda: torch.nested.nested_tensor([torch.ones(3), torch.ones(2)]), {"values": "nested tensor", "fix": "torch.nn.utils.rnn.pad_sequence(rows"}),
    "packed": (lambda: torch.nn.utils.rnn.pack_sequence([torch.ones(3), torch.ones(2)]), {"values": "PackedSequence", "fix": "torch.nn.utils.rnn.pad_sequence(rows"}),
}  # fmt: skip


@pytest.mark.dev("torch")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_unreadable_torch_tensors_are_rejected(two, subtests):
    for name in UNREADABLE:
        with subtests.test(msg=name):
            make, wanted = UNREADABLE[name]
            with raises(TypeError, names="batch['x']", **wanted):
                list(two.distribute_dataset([{"x": make()}]))


TAKES_ARRAYS = {
    "PerReplica": lambda s, x: mirror.PerReplica([x, x]),
    "from_stacked": lambda s, x: mirror.PerReplica.from_stacked(x),
    "reduce": lambda s, x: s.reduce("sum", mirror.PerReplica([x, x])),
    "distribute_values": lambda s, x: s.distribute_values_from_function(lambda _: x),
    "Variable": lambda s, x: mirror.Variable(x),
    "distribute_dataset": lambda s, x: next(iter(s.distribute_dataset([x]))),
}


@pytest.mark.parametrize("place", TAKES_ARRAYS)
def test_masked_values_are_rejected_wherever_values_enter(two, place):
    """JAX would take them for ordinary ones."""
    array = np.ma.array(np.ones((2, 3), np.float32), mask=np.eye(2, 3))
    with raises(TypeError, values=["2 masked values"], fix="array.filled(0)"):
        TAKES_ARRAYS[place](two, array)
    TAKES_ARRAYS[place](two, np.ma.array(np.ones((2, 3), np.float32)))


@pytest.mark.dev("torch")
@pytest.mark.parametrize("place", TAKES_ARRAYS)
def test_tensors_are_read_the_same_wherever_values_enter(two, place):
    for dtype in ("float32", "bfloat16"):
        taken = TAKES_ARRAYS[place](two, torch.ones((2, 3), dtype=getattr(torch, dtype)))
        assert taken.dtype == getattr(jnp, dtype)
    with raises(TypeError, values=[(2, 3), "requires_grad=True"], fix="tensor.detach()"):
        TAKES_ARRAYS[place](two, torch.ones((2, 3), requires_grad=True))


@pytest.mark.dev("torch")
@pytest.mark.parametrize(
    "wrap", [lambda x: x, lambda x: {"x": [x]}, lambda x: torch.nn.Parameter(x)]
)
def test_tensors_are_no_arguments_of_a_step(two, wrap):
    """Their numbers would be constants, which stay when a loader refills the tensor."""
    with raises(TypeError, names="data", values="torch.", fix="numpy.asarray(x)"):
        two.run(lambda data: jnp.asarray(jax.tree.leaves(data)[0]).sum(), (wrap(torch.ones(3)),))


def unformatted():
    return datasets.Dataset.from_dict({"x": X, "y": Y})


WITH_FORMAT = "dataset.with_format('numpy')"
BATCH_FORMATTED = "dataset.with_format('numpy').batch(batch_size)"
BATCH = "dataset.batch(batch_size)"
LOADER = "torch.utils.data.DataLoader(dataset, batch_size)"
FROM_ARRAYS = "mirror.data.from_arrays(arrays, batch_size)"
NO_BATCHES = {
    # the argument; the names, values and fix of its message
    "datasets by example": (hugging_face, "batch['y']", "np.int64(0)", BATCH_FORMATTED),
    "datasets unformatted": (unformatted, "batch['x'][0]", 0.0, BATCH_FORMATTED),
    "datasets unformatted batch": (lambda: unformatted().batch(4), "batch['x'][0]", 0.0, WITH_FORMAT),
    "datasets unformatted iter": (lambda: unformatted().iter(batch_size=4), "batch['x'][0]", 0.0, WITH_FORMAT),
    "datasets stream": (lambda: unformatted().to_iterable_dataset(), "batch['x'][0]", 0.0, BATCH_FORMATTED),
    "datasets ragged": (lambda: datasets.Dataset.from_dict({"x": [[1], [2, 3]]}).with_format("numpy").batch(2), "batch['x']", "object", ()),
    "datasets text": (lambda: datasets.Dataset.from_dict({"x": ["a", "b"]}).with_format("numpy").batch(2), "batch['x']", (), ()),
    "datasets splits": (lambda: datasets.DatasetDict(train=hugging_face()), "DatasetDict", (), "datasets['train']"),
    "grain unbatched": (lambda: grain.MapDataset.source(GrainRows()), "batch['y']", 0, BATCH),
    "torch unbatched": (lambda: TorchRows(), "TorchRows", (), LOADER),
    "torch stream unbatched": (lambda: TorchStream(), "batch['y']", 0, LOADER),
    "torch loader unbatched": (lambda: torch.utils.data.DataLoader(TorchRows(), batch_size=None), "batch['y']", 0, LOADER),
    "torch tensor": (lambda: torch.ones(4, 2), "Tensor", (), FROM_ARRAYS),
    "torch tensors": (lambda: (torch.ones(4, 2), torch.ones(4)), "tuple", (), FROM_ARRAYS),
    "a tf tensor": (lambda: Tensor(X), "Tensor", (), FROM_ARRAYS),
}  # fmt: skip


@pytest.mark.parametrize("names", row_groups(NO_BATCHES))
def test_errors_name_the_batched_form_of_a_dataset(names, two, subtests):
    for name in names:
        with subtests.test(msg=name):
            make, named, values, fix = NO_BATCHES[name]
            with raises((TypeError, ValueError), names=named, values=values, fix=fix):
                list(two.distribute_dataset(make()))


@pytest.mark.dev("torch")
def test_from_arrays_accepts_torch_tensors(two):
    tensors = {"x": torch.asarray(X), "y": torch.arange(NUM_ROWS)}
    rows_of(two.distribute_dataset(mirror.data.from_arrays(tensors, 10)), NUM_ROWS)


@pytest.mark.dev("torch")
def test_torch_sampler_receives_the_epoch(two):
    sampler = torch.utils.data.DistributedSampler(range(8), num_replicas=1, rank=0, seed=3)
    data = two.distribute_dataset(torch.utils.data.DataLoader(range(8), 8, sampler=sampler))
    orders = []
    for epoch in (0, 1, 0):
        data.set_epoch(epoch)
        (batch,) = data
        orders.append(np.ravel(batch).tolist())
    assert orders[0] == orders[2] != orders[1]


def sampled(count):
    sampler = torch.utils.data.DistributedSampler(range(8), num_replicas=count, rank=0)
    return torch.utils.data.DataLoader(range(8), 2, sampler=sampler)


def sharded(count):
    return mirror.data.from_arrays(X, 8, shard=(0, count))


@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("part", [pytest.param(sampled, marks=pytest.mark.dev("torch")), sharded])
def test_part_for_one_process_per_device_is_a_warning(two, part, count):
    """Each of four processes of DDP reads a quarter, so one process alone would too."""
    loader = part(count)
    with (
        pytest.warns(UserWarning, match="one of 4 parts") if count > 1 else contextlib.nullcontext()
    ):
        two.distribute_dataset(loader)


def test_tensorflow_datasets_are_read(two):
    tf = pytest.importorskip("tensorflow")
    dataset = tf.data.Dataset.from_tensor_slices({"x": X, "y": Y}).batch(10)
    rows_of(two.distribute_dataset(dataset), NUM_ROWS)
    with raises(ValueError, fix=BATCH):
        list(two.distribute_dataset(dataset.unbatch()))
