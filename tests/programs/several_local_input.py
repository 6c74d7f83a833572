"""Checks of local input in one process of several: prints the passed ones."""

import functools
import itertools
import sys
import time
import warnings

import grain
import jax
import numpy as np
import optax
from flax import nnx

import mirror
from tests.support import inside
from tests.support.messages import refused

_, step_exchange, _ = inside.local_input()
store = inside.messages()
# Most of the time is for compiling.
jax.config.update("jax_disable_most_optimizations", True)
strategy = mirror.MultiWorkerMirroredStrategy()
me, count = mirror.distributed.process_index(), mirror.distributed.process_count()
last = count - 1
n = strategy.num_replicas_in_sync
mine = len(strategy.local_replica_ids)
one = mirror.OneDeviceStrategy("/cpu:0")
CHECKS = []


def check(fn):
    CHECKS.append(fn)
    return fn


def rows(start, size):
    return np.arange(start, start + size, dtype=np.float32)


def local(data, **options):
    return strategy.distribute_dataset(data, input="local", **options)


def taken(data, **options):
    """Returns the rows of all processes, step by step, and the shapes of the steps."""
    steps, shapes = [], []
    for batch, mask in local(data, remainder="pad", **options):
        values, is_example = strategy.gather((batch, mask))
        steps.append(np.asarray(values)[np.asarray(is_example)].tolist())
        shapes.append(batch.stacked.shape)
    return steps, shapes


# ---- before any other padding


@check
def example_keys_that_count_padding_are_a_warning():
    """Once, whichever comes first: padding at the end only moves no example."""

    def step(batch, mask):
        return mirror.all_reduce("sum", len(mirror.example_keys(jax.random.key(0), batch)))

    sizes = [2 * mine] * count, [2 * mine] * last + [1], [1] + [2 * mine] * last
    said = []
    for of_process in [*sizes, sizes[2]]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            start = sum(of_process[:me])
            for batch in padded([rows(start, of_process[me])]):
                strategy.run(step, batch)
        said.append([str(w.message) for w in caught if "example_keys" in str(w.message)])
    assert [len(texts) for texts in said] == [0, 0, 1, 0], said
    assert "batch 0 of the dataset of several_local_input.py:" in said[2][0], said
    assert f"1 on process 0, {2 * mine} on process 1" in said[2][0], said


# ---- steps of unequal parts


@check
def parts_of_unequal_sizes_are_used_once():
    """Process i has i + 2 batches, of other sizes than those of the others; some are empty."""
    sizes = [[(3 * i + 2 * j) % 5 for j in range(i + 2)] for i in range(count)]
    for i in range(count):
        sizes[i][0] = 4 - i % 2  # none starts empty
    parts, start = [], 0
    for of_process in sizes:
        parts.append([])
        for size in of_process:
            parts[-1].append(rows(start, size))
            start += size
    wanted = [[x for of in parts if len(of) > j for x in of[j].tolist()] for j in range(count + 1)]
    for prefetch in (2, 0):
        steps, shapes = taken(parts[me], prefetch=prefetch)
        assert steps == wanted, (steps, wanted)
        assert len(set(shapes)) == 1, shapes


@check
def padding_repeats_the_last_example():
    batches = [rows(1, 4)] * (2 if me else 4)
    for batch, mask in local(batches, remainder="pad", prefetch=0):
        for value, is_example in zip(batch.values, mask.values, strict=True):
            value, is_example = np.asarray(value), np.asarray(is_example)
            assert (value >= 1).all()
            assert is_example.all() or (value[~is_example] == 4).all()


@check
def growing_parts_have_few_shapes():
    batches = [rows(100 * size, size if me else 1) for size in range(1, 33)]
    steps, shapes = taken(batches)
    assert sum(map(len, steps)) == sum(range(1, 33)) * (count - 1) + 32
    per_replica = [shape[1] for shape in shapes]
    assert per_replica == sorted(per_replica)
    assert len(set(per_replica)) <= 6, shapes
    assert max(per_replica) < 2 * 32


@check
def equal_parts_need_no_mask():
    batches = [rows(100 * me + 10 * i, 2 * mine) for i in range(3)]
    for remainder in ("error", "drop"):
        dataset = local(batches, remainder=remainder)
        assert dataset.element_spec.shape == (n, 2)
        seen = [np.asarray(strategy.gather(batch)).tolist() for batch in dataset]
        wanted = [
            [x for i in range(count) for x in rows(100 * i + 10 * j, 2 * mine).tolist()]
            for j in range(3)
        ]
        assert seen == wanted
    refused(NotImplementedError, lambda: local(batches, remainder="pad").element_spec, "pad")


@check
def unequal_parts_are_errors_or_dropped():
    more = [rows(0, 2 * mine)] * 3
    short = [more[0], rows(0, mine if me == last else 2 * mine), more[0]]
    refused(ValueError, lambda: list(local(short)), "Batch 1", f"on process {last}", "'pad'")
    assert len(list(local(short, remainder="drop"))) == 2
    fewer = more[: 2 if me == last else 3]
    refused(ValueError, lambda: list(local(fewer)), "Batch 2", f"none left on process {last}")
    assert len(list(local(fewer, remainder="drop"))) == 2
    refused(
        ValueError,
        lambda: list(local([rows(0, me + 1)], remainder="drop")),
        "it is the first",
        "1 on process 0, 2 on process 1",
    )


# ---- mistakes


@check
def a_source_that_raises_is_named_by_all():
    def broken():
        yield rows(0, 4)
        yield rows(0, 4)
        if me == last:
            raise OSError("the disk of this process is gone")
        yield rows(0, 4)

    for prefetch in (2, 0):
        names = () if me == last else (f"Process {last} could not read", "batch 2", "OSError")
        seen = []

        def loop(seen=seen, prefetch=prefetch):
            for batch in local(broken(), remainder="pad", prefetch=prefetch):
                seen.append(batch)

        error = OSError if me == last else RuntimeError
        refused(error, loop, "the disk of this process is gone", *names)
        assert len(seen) == 2


@check
def a_bad_batch_is_named_by_all():
    """Of the chief, and rejected by mirror, also in `fit` by `labels`."""
    batches = [{"x": rows(0, 4), "y": rows(0, 4 if me else 3)}]
    names = ["leading sizes"] + ["Process 0 could not read", "batch 0"] * (me > 0)
    refused(RuntimeError if me else ValueError, lambda: list(local(batches)), *names)
    with strategy.scope():
        model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
        loss = "sparse_categorical_crossentropy"
        trainer = mirror.Trainer(model, optax.sgd(0.1), loss, num_classes=2)
    x, y = np.ones((4, 3), np.float32), np.zeros(4, np.int32) + (9 if me == last else 0)
    refused(
        ValueError if me == last else RuntimeError,
        lambda: trainer.fit(local([(x, y)]), progress=False),
        "9",
        *([] if me == last else [f"Process {last} could not read"]),
    )


@check
def different_structures_are_errors_on_all():
    other = me == last
    x = np.ones((4, 3), np.float32)
    for batch, shown in (
        ({"x": x, **({} if other else {"y": x})}, ["batch['y']", "missing on process"]),
        ({"x": x.astype(np.float16) if other else x}, ["float16[3]", "float32[3]"]),
        ({"x": np.ones((4, 2 if other else 3), np.float32)}, ["float32[2]", "float32[3]"]),
    ):
        refused(
            ValueError,
            lambda batch=batch: list(local([batch], remainder="pad")),
            "process 0",
            f"process {last}",
            "batch 0",
            *shown,
        )
    remainder = "drop" if other else "pad"
    refused(
        ValueError,
        lambda: list(local([x], remainder=remainder)),
        "remainder='drop'",
        "remainder='pad'",
    )


@check
def a_process_without_a_batch_is_an_error():
    batches = [] if me == last else [rows(0, 4)]
    refused(ValueError, lambda: list(local(batches)), f"Process {last} has no batch", "empty batch")
    assert list(local([])) == []


@check
def a_loop_that_ends_earlier_is_named():
    batches = [rows(0, 2 * mine)] * 9
    taken = []

    def loop():
        for batch in local(batches, prefetch=1):
            taken.append(batch)
            if me == 0 and len(taken) == 2:
                break
        else:
            assert me, "the loop of the chief has not ended"

    if me == 0:
        loop()
    else:  # not "within 300 s": that one has waited for the end of the time
        refused(RuntimeError, loop, "Process 0 has stopped iterating", "the same batch")


@check
def a_process_that_does_not_iterate_is_named():
    batches = [rows(0, 2 * mine)]
    secs = step_exchange.agreement_secs
    step_exchange.agreement_secs = lambda: 1.0
    try:
        dataset = local(batches)
        if me == 0:
            refused(RuntimeError, lambda: list(dataset), f"Process {last}", "batch 0", "within 1 s")
        elif me != last:
            refused(RuntimeError, lambda: list(dataset), f"Process {last}", "within 1 s")
    finally:
        step_exchange.agreement_secs = secs
    mirror.distributed.barrier("one process does not iterate")


@check
def the_same_end_of_all_loops_is_no_error():
    for prefetch in (0, 1, 3):
        for _ in range(2):
            for i, _ in enumerate(local([rows(0, 2 * mine)] * 20, prefetch=prefetch)):
                if i == 3:
                    break


@check
def wrong_shards_are_rejected():
    shard = lambda i: mirror.data.from_arrays(rows(0, 12), 4, shard=(i, count))  # noqa: E731
    refused(ValueError, lambda: strategy.distribute_dataset(shard(me)), "input='local'", "shard")
    refused(ValueError, lambda: local(shard((me + 1) % count)), f"process {me} of {count}", "shard")
    data = mirror.data.from_arrays(
        rows(0, 24), 8, shuffle=True, seed=int(me == last), shard=(me, count)
    )
    refused(
        ValueError,
        lambda: list(local(data)),
        "seed 0",
        "seed 1",
        "process 0",
        f"process {last}",
        "batch 0",
    )


@check
def the_same_batches_on_all_processes_warn():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        list(local(mirror.data.from_arrays(rows(0, 12), 2 * mine), remainder="pad"))
    assert any("the same first batch" in str(w.message) for w in caught), caught


# ---- per-replica datasets


@check
def datasets_from_functions():
    contexts = []

    def make(context):
        contexts.append(context)
        size = context.get_per_replica_batch_size(3 * n)
        first = context.input_pipeline_id * 100
        return [{"x": rows(first + 10 * i, size)} for i in range(2 * mine)]

    steps = [
        np.asarray(strategy.gather(batch["x"])).tolist()
        for batch in strategy.distribute_datasets_from_function(make)
    ]
    assert contexts == [mirror.InputContext(count, me, n)]
    wanted = [
        [
            x
            for i in range(count)
            for j in range(mine)
            for x in rows(100 * i + 10 * (step * mine + j), 3).tolist()
        ]
        for step in range(2)
    ]
    assert steps == wanted, (steps, wanted)


@check
def datasets_from_functions_of_unequal_lengths():
    def distributed(batches, **options):
        return list(strategy.distribute_datasets_from_function(lambda _: batches, **options))

    batches = [rows(0, 2)] * (mine * (2 if me == last else 3))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert len(distributed(batches, prefetch=0)) == 2
    dropped = [str(w.message) for w in caught if "Dropped" in str(w.message)]
    assert len(dropped) == (me != last), dropped
    assert all(f"none left on process {last}" in text for text in dropped)
    assert all("the same number of batches on every process" in text for text in dropped)
    sizes = [rows(0, 3 if me == last else 2)] * mine
    refused(ValueError, lambda: distributed(sizes), "float32[3]", "float32[2]", f"process {last}")
    if mine > 1:
        unequal = [rows(0, i + 1) for i in range(mine)]
        error = NotImplementedError if me == 0 else RuntimeError
        refused(error, lambda: distributed(unequal if me == 0 else sizes), "remainder='pad'")


# ---- trainers


def padded(data):
    return local(data, remainder="pad")


RANDOM = np.random.default_rng(0)
ARRAYS = {
    "x": RANDOM.normal(size=(50, 3)).astype(np.float32),
    "y": RANDOM.normal(size=(50, 1)).astype(np.float32),
}


def loss_fn(model, batch):
    losses = optax.squared_error(model(batch["x"]), batch["y"])[:, 0]
    return losses, {"large": losses > 1}


def trainer_of(strategy, **options):
    with strategy.scope():
        model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
        return mirror.Trainer(model, optax.sgd(0.05, momentum=0.9), loss_fn, **options)


def weights(trainer):
    """Returns the parameters and the momentum."""
    leaves = map(np.asarray, jax.tree.leaves(nnx.state((trainer.model, trainer.optimizer))))
    return [leaf for leaf in leaves if leaf.dtype == np.float32]


def bits(trainer):
    return b"".join(leaf.tobytes() for leaf in weights(trainer))


def close(a, b, tolerance=1e-6):
    """Compares relative to the largest weight."""
    largest = max(np.abs(y).max() for y in weights(b))
    off = max(np.abs(x - y).max() for x, y in zip(weights(a), weights(b), strict=True))
    assert off < tolerance * largest, (off, largest)


def sharded(batch_size=8, **options):
    return mirror.data.from_arrays(ARRAYS, batch_size, shard=(me, count), **options)


def trained_on_shards(batch_size, **options):
    """Trains with local and global input and alone; the last batch is short."""
    whole = mirror.data.from_arrays(ARRAYS, batch_size, shuffle=True, seed=3)
    ours, globally = trainer_of(strategy, **options), trainer_of(strategy, **options)
    history = ours.fit(padded(sharded(batch_size, shuffle=True, seed=3)), epochs=3, progress=False)
    globally.fit(whole, epochs=3, progress=False)
    strategy.check_mirrored((ours.model, ours.optimizer))  # bitwise, in all processes
    close(ours, globally)
    if strategy.is_chief:
        alone = trainer_of(one, **options)
        wanted = alone.fit(whole, epochs=3, progress=False)
        close(ours, alone)
        np.testing.assert_allclose(history["loss"], wanted["loss"], rtol=1e-5)
        assert history["large"] == wanted["large"], "counts are exact"
        assert ours._position.step == alone._position.step


@check
def training_on_shards_equals_training_on_whole_batches():
    trained_on_shards(8)


@check
def training_on_shards_with_options_of_the_trainer():
    trained_on_shards(10, accumulate_steps=2, steps_per_execution=3)


@check
def training_on_unequal_parts_equals_training_on_their_union():
    """Some processes have fewer steps, and the padded size grows."""
    sizes = [
        [5, *(1 + (i + j) % 3 if i else 7 * (j == 1) for j in range(1, 4 + i % 2))]
        for i in range(count)
    ]
    start, parts = 0, []
    for of_process in sizes:
        parts.append([])
        for size in of_process:
            parts[-1].append({name: rows[start : start + size] for name, rows in ARRAYS.items()})
            start = (start + size) % 40
    union = [
        jax.tree.map(lambda *x: np.concatenate(x), *[of[j] for of in parts if len(of) > j])
        for j in range(5)
        if any(len(of) > j for of in parts)
    ]
    ours = trainer_of(strategy)
    ours.fit(padded(parts[me]), epochs=2, progress=False)
    strategy.check_mirrored((ours.model, ours.optimizer))
    if strategy.is_chief:
        alone = trainer_of(one)
        alone.fit(union, epochs=2, progress=False)
        assert ours._position.step == alone._position.step == 10
        close(ours, alone)


@check
def evaluation_and_prediction():
    ours, alone = trainer_of(strategy), trainer_of(one)
    data = padded(sharded())
    history = ours.fit(data, epochs=2, validation_data=padded(sharded(12)), progress=False)
    wanted = alone.fit(
        mirror.data.from_arrays(ARRAYS, 8),
        epochs=2,
        validation_data=mirror.data.from_arrays(ARRAYS, 12),
        progress=False,
    )
    np.testing.assert_allclose(history["val_loss"], wanted["val_loss"], rtol=1e-5)
    a, b = ours.evaluate(data), alone.evaluate(mirror.data.from_arrays(ARRAYS, 8))
    assert abs(a["loss"] - b["loss"]) < 1e-5
    assert a["large"] == b["large"]
    predict = lambda model, batch: model(batch["x"])  # noqa: E731
    a, b = ours.predict(data, predict), alone.predict(ARRAYS, predict, batch_size=8)
    assert a.shape == b.shape == (50, 1)
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    assert ours.verify(data).largest < 1e-5


class Counts(nnx.Module):
    """A linear layer that counts the examples."""

    def __init__(self):
        self.linear = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
        self.seen = nnx.Variable(np.zeros((), np.float32))


@jax.custom_vjp
def clipping(z):
    """Returns `z`, whose gradient is clipped."""
    return z


clipping.defvjp(lambda z: (z, None), lambda _, g: (g.clip(-0.01, 0.01),))


@check
def losses_that_padding_changes_are_refused_by_all():
    """Process 0 alone has padding, or it alone has an example."""

    def squares(model, batch):
        return (model.linear(batch["x"]) ** 2)[:, 0]

    def of_all(model, batch):
        loss = squares(model, batch)
        return loss / mirror.all_reduce("sum", len(loss))

    def root(model, batch):
        loss = squares(model, batch)
        total, size = mirror.all_reduce("sum", (loss, len(loss)))
        return loss / np.sqrt(len(loss)) + total / (size - 1.5)

    def counted(model, batch):
        model.seen[...] += mirror.all_reduce("sum", float(len(batch["x"])))
        return squares(model, batch)

    def clipped(model, batch):
        return (clipping(model.linear(batch["x"])) ** 2)[:, 0]

    def masked(model, batch):
        loss, mask = squares(model, batch), mirror.example_mask(batch)
        total, size = mirror.all_reduce("sum", ((loss * mask).sum(), mask.sum()))
        return loss + total / size

    rows = ARRAYS["x"][me::count][: 2 * mine]
    sources = padded([{"x": rows[int(me == 0) :]}]), [{"x": ARRAYS["x"][:1]}]
    for loss, data in itertools.product((of_all, root, counted, clipped, masked), sources):
        with strategy.scope():
            ours = mirror.Trainer(Counts(), optax.sgd(0.05), loss, require_equal=False)
        train = functools.partial(ours.fit, data, epochs=1, progress=False)
        if loss is masked:
            train()
        else:
            refused(ValueError, train, loss.__name__, "several_local_input.py", "drop_remainder")
        ours.fit(padded([{"x": rows}]), epochs=1, progress=False)


class FailsAt(mirror.callbacks.Callback):
    def __init__(self, step):
        self._step = step

    def on_step(self, fit):
        if fit.position.step == self._step:
            raise ZeroDivisionError("in all processes")


@check
def resuming_within_an_epoch_changes_no_bit():
    def fit(trainer, batch_size=8, **options):
        data = padded(sharded(batch_size, shuffle=True))
        trainer.fit(data, epochs=3, progress=False, **options)

    whole, resumed = trainer_of(strategy), trainer_of(strategy)
    fit(whole)
    refused(ZeroDivisionError, lambda: fit(resumed, callbacks=FailsAt(9)))
    assert resumed._position.step == 9
    refused(ValueError, lambda: fit(resumed, 12), "Cannot resume in the middle of batch 1", "4 of")
    assert resumed._position.step == 9
    fit(resumed)
    assert resumed._position.step == whole._position.step == 21
    assert bits(resumed) == bits(whole)


@check
def passes_of_a_number_of_steps():
    class Batches:
        def __iter__(self):
            for i in range(4):
                yield {name: rows[8 * i + me : 8 * i + 8 : count] for name, rows in ARRAYS.items()}

    ours = trainer_of(strategy)
    ours.fit(padded(Batches()), epochs=2, steps_per_epoch=6, progress=False)
    assert ours._position.step == 12
    assert ours._position.passes == 2


# ---- loaders of other libraries


def loaders_train(loader):
    ours = trainer_of(strategy)
    ours.fit(padded(loader), epochs=1, progress=False)
    seen = ours.predict(padded(loader), lambda model, batch: batch["x"][:, 0])
    assert sorted(seen.tolist()) == sorted(ARRAYS["x"][:48, 0].tolist()), "each example once"
    if strategy.is_chief:
        index = {float(row[0]): i for i, row in enumerate(ARRAYS["x"])}
        order = [index[float(x)] for x in seen]
        in_order = {name: rows[order] for name, rows in ARRAYS.items()}
        alone = trainer_of(one)
        alone.fit(mirror.data.from_arrays(in_order, 8), progress=False)
        close(ours, alone)


EXAMPLES = [{"x": ARRAYS["x"][i], "y": ARRAYS["y"][i]} for i in range(48)]


def torch_sampler():
    from torch.utils.data import DataLoader
    from torch.utils.data.distributed import DistributedSampler

    sampler = DistributedSampler(EXAMPLES, num_replicas=count, rank=me, shuffle=True, seed=0)
    loaders_train(DataLoader(EXAMPLES, batch_size=8 // count, sampler=sampler))


@check
def shards_of_grain():
    options = grain.sharding.ShardByJaxProcess(drop_remainder=True)
    sampler = grain.samplers.IndexSampler(
        len(EXAMPLES), shard_options=options, shuffle=True, num_epochs=1, seed=0
    )
    operations = [grain.transforms.Batch(batch_size=8 // count)]
    loaders_train(grain.DataLoader(data_source=EXAMPLES, sampler=sampler, operations=operations))
    dataset = grain.MapDataset.source(EXAMPLES).shuffle(seed=0)[me::count]
    loaders_train(dataset.batch(8 // count))


# ---- the end


@check
def no_keys_are_left():
    mirror.distributed.barrier("all passes have ended")
    if me == 0:
        inside.consensus_of_processes().sweep()
        left = store._client().key_value_dir_get("mirror/local/")
        passes = {"/".join(key.split("/")[2:5]) for key, _ in left}
        # In one of them, a process has never iterated.
        assert len(passes) == ("a_process_that_does_not_iterate_is_named" in ran), passes


ran = []
OPTIONAL = {"torch": torch_sampler}
wanted = sys.argv[1:]
for each in [OPTIONAL[name] for name in wanted if name in OPTIONAL] or CHECKS:
    if set(wanted) - set(OPTIONAL) and each.__name__ not in wanted:
        continue
    started = time.monotonic()
    each()
    ran.append(each.__name__)
    print(f"passed {each.__name__} {time.monotonic() - started:.1f}", flush=True)
