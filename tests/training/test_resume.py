"""Resuming: what `save` and `restore` keep, and that an interrupt does not change the result."""

import contextlib
import functools
import itertools
import os
import random
import resource
import signal
import tempfile
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import mirror
from mirror import callbacks
from tests.support import inside
from tests.support.checkpoints import (
    START,
    in_a_process,
    is_interrupted,
    killed,
    path_of,
    same,
    steps_in,
)
from tests.support.kills import kill_me_at
from tests.support.messages import assert_message, raises
from tests.support.strategies import cpu_strategy
from tests.support.tables import mostly_nightly, mostly_slow
from tests.support.variables import on_read, set_copies, variable
from tests.support.waiting import wait_until

KeyData = inside.key_data()
SIZE, STEPS = 4, 25  # examples in a batch, of which the last of an epoch has 2; batches
ROWS = (STEPS - 1) * SIZE + 2

# Batches of all sizes, on several replicas.
pytestmark = pytest.mark.filterwarnings(
    "ignore:The batch normalization at .* counts the padding",
    "ignore:The batch normalization at .* uses the statistics of one of",
)


class MLP(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, width: int = 8):
        self.first = nnx.Linear(3, width, rngs=rngs)
        self.second = nnx.Linear(width, 1, rngs=rngs)

    def __call__(self, x):
        return self.second(jax.nn.tanh(self.first(x)))[:, 0]


class Noisy(MLP):
    """Has dropout and running statistics, which depend on the number of replicas."""

    def __init__(self, rngs: nnx.Rngs):
        super().__init__(rngs)
        self.norm = nnx.BatchNorm(8, momentum=0.9, rngs=rngs)
        self.dropout = nnx.Dropout(0.3, rngs=rngs)

    def __call__(self, x):
        return self.second(self.dropout(self.norm(jax.nn.tanh(self.first(x)))))[:, 0]


def loss_fn(model, batch):
    error = model(batch["x"]) - batch["y"]
    return error**2, {"close": abs(error) < 0.5}


def arrays() -> dict[str, np.ndarray]:
    x = np.random.RandomState(0).randn(ROWS, 3).astype(np.float32)
    return {"x": x, "y": np.sin(x).sum(1)}


def shuffled() -> mirror.data.ArrayDataset:
    return mirror.data.from_arrays(arrays(), SIZE, shuffle=True, seed=3)


def a_trainer(model=MLP, n: int = 2, seed: int = 0, tx=None, **options) -> mirror.Trainer:
    tx, options = tx or optax.adam(1e-2), {"strategy": cpu_strategy(n), **options}
    return mirror.Trainer(model(nnx.Rngs(seed)), tx, loss_fn, require_equal=False, **options)


def fit(trainer, epochs: int, *others, data=None, **options) -> mirror.History:
    data = shuffled() if data is None else data
    return trainer.fit(data, epochs, callbacks=others, progress=False, **options)


BEGINNINGS: list[str] = []


@pytest.fixture(scope="module", autouse=True)
def beginnings(tmp_path_factory) -> None:
    """Sets the directory for the checkpoints of `compiled`."""
    BEGINNINGS[:] = [str(tmp_path_factory.mktemp("beginnings"))]


@functools.cache
def compiled(model, n: int, **options) -> tuple[mirror.Trainer, str]:
    trainer, directory = a_trainer(model, n, **options), tempfile.mkdtemp(dir=BEGINNINGS[0])
    trainer.save(directory)
    return trainer, directory


def new_trainer(model=MLP, n: int = 2, **options) -> mirror.Trainer:
    """Returns an untrained trainer, which is compiled once for all tests."""
    trainer, beginning = compiled(model, n, **options)
    trainer.restore(beginning)
    return trainer


def in_numpy(x) -> np.ndarray:
    is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(x) if is_key else x)


def arrays_of(trainer) -> dict[str, np.ndarray]:
    """Returns the arrays of its checkpoint."""
    return {name: in_numpy(x) for name, x in inside.checkpoint_state(trainer)[0].items()}


def plain(found) -> dict:
    return {name: x.data if isinstance(x, KeyData) else x for name, x in found.items()}


def differing(one: dict, other: dict) -> list[str]:
    """Returns the names of arrays that are not bitwise equal."""
    assert list(one) == list(other)
    return [name for name in one if not same(one[name], other[name])]


def without_seconds(history) -> dict:
    return {**history, "epochs": history.epochs, "rows": len(history.epoch_secs)}


class Crash(callbacks.Callback):
    """Saves at a step and raises, once per training."""

    def __init__(self, at: int, directory=None):
        self.at, self.directory = at, directory

    def on_step(self, fit):
        if fit.position.step >= self.at and self.at:
            self.at = 0
            if self.directory is not None:
                fit.trainer.save(self.directory)
            raise LookupError("of the test")


# Contents of a checkpoint


class Whole(Noisy):
    """Has one of everything that a model can hold, except bare arrays."""

    def __init__(self, rngs: nnx.Rngs):
        super().__init__(rngs)
        self.written = variable(np.arange(3.0, dtype=np.float32))
        self.sum, self.mean = on_read("sum", 0), on_read("mean")
        self.only = on_read("only_first_replica")
        self.tree = nnx.Variable({"a": jnp.ones(2), "b": (jnp.zeros((0, 3)), 3)})
        self.number = nnx.Variable(0.5)
        self.keys = nnx.Variable(jax.random.split(jax.random.key(5, impl="rbg"), 3))
        self.small = nnx.Variable(jnp.asarray([1.5, -2], jnp.bfloat16))


@pytest.fixture(scope="module")
def eight(tmp_path_factory):
    """A trainer of 8 replicas that has trained, and its checkpoint."""
    trainer = a_trainer(Whole, 8)
    fit(trainer, 1, data=list(shuffled())[:3])
    set_copies(trainer.strategy, trainer.model.sum, trainer.model.mean, trainer.model.only)
    directory = tmp_path_factory.mktemp("eight")
    trainer.save(directory)
    return trainer, directory


def test_checkpoint_contains_one_copy_of_everything(eight):
    trainer, directory = eight
    found = mirror.load_checkpoint(directory)
    assert differing(plain(found.arrays), arrays_of(trainer)) == []
    names = found.arrays.keys()
    assert {"model.norm.mean", "model.dropout.rngs.count", "optimizer.step"} <= names
    assert {"model.tree['a']", "model.tree['b'][0]", "model.tree['b'][1]"} <= names
    assert isinstance(found.arrays["model.dropout.rngs.key"], KeyData)
    assert found.arrays["model.first.kernel"].shape == (3, 8)
    assert found.arrays["model.sum"] == sum(range(3, 19, 2))
    assert found.arrays["model.dropout.rngs.count"] == found.arrays["optimizer.step"] == 3
    assert found.arrays["model.number"].dtype == np.float32
    assert found.position["step"] == 3


@pytest.mark.parametrize("rows", mostly_nightly([1, 2, 3, 8], 3))
def test_restore_works_on_any_number_of_replicas(subtests, tmp_path_factory, eight, rows):
    for n in rows:
        with subtests.test(msg=str(n)):
            tmp_path = tmp_path_factory.mktemp("row")
            trainer, wanted = a_trainer(Whole, n, seed=1), arrays_of(eight[0])
            trainer.save(tmp_path)
            before = arrays_of(trainer)
            for scope in (trainer.strategy.scope, contextlib.nullcontext):
                with scope():
                    trainer.restore(eight[1])
                assert differing(arrays_of(trainer), wanted) == []
                assert len(trainer.strategy.local_results(trainer.model.sum)) == n
                trainer.restore(tmp_path)
                assert differing(arrays_of(trainer), before) == []
            trainer.strategy.check_mirrored((trainer.model, trainer.optimizer))
            assert len(differing(before, wanted)) > len(wanted) / 2


def test_restore_keeps_weak_types(eight):
    """A strongly typed float32 would promote bfloat16 to float32 from then on."""
    trainer = a_trainer(Whole, 8, seed=1)
    trainer.restore(eight[1])
    found = [made.model.number.get_value() for made in (eight[0], trainer)]
    assert [x.weak_type for x in found] == [True, True]


class Weak(MLP):
    """Has weakly typed arrays: until the first update, always, and from the first step on."""

    def __init__(self, rngs: nnx.Rngs):
        super().__init__(rngs)
        self.trained = nnx.Param(jnp.asarray(1.3))
        self.scale = nnx.Variable(jnp.full(2**16, 1.3))  # so large that it may be stored in slices
        self.bits = nnx.Variable(jnp.full((3, 2), 0.0).at[...].set(ODD_BITS))
        self.changed = nnx.Variable(jnp.float32(1.3))

    def __call__(self, x):
        self.changed[...] = jnp.asarray(1.1)
        return super().__call__(x) * self.trained[...]


# NaN that numbers of Python would change, denormal numbers, and the negative zero
ODD_BITS = np.asarray([0x7FC12345, 0x7F812345, 0xFF800001, 1, 0x80000000, 0], np.uint32)
ODD_BITS = ODD_BITS.view(np.float32).reshape(3, 2)


def weak_names(trainer) -> list[str]:
    """Returns the names of the weakly typed arrays."""
    found = inside.checkpoint_state(trainer)[0]
    return [name for name, x in found.items() if jax.typeof(x).weak_type]


@pytest.mark.parametrize("shard", ["none", "model"])
def test_restore_keeps_the_weak_types_of_the_checkpoint(tmp_path, shard):
    strategy = cpu_strategy(2, shard=shard)
    trainer, other = (a_trainer(Weak, strategy=strategy) for _ in range(2))
    at_first = weak_names(trainer)
    fit(trainer, 1, data=list(shuffled())[:3])
    weak = weak_names(trainer)
    assert weak == ["model.bits", "model.changed", "model.scale"]
    assert ("model.trained" in at_first, "model.changed" in at_first) == (True, False)
    trainer.save(tmp_path)
    with jax.set_mesh(jax.make_mesh((4,), ("of the user",))):
        other.restore(tmp_path)
    assert weak_names(other) == weak
    assert differing(arrays_of(other), arrays_of(trainer)) == []
    assert same(other.model.bits[...], ODD_BITS)
    layouts = [each.model.scale[...].sharding for each in (trainer, other)]
    assert [each.is_fully_replicated for each in layouts] == [shard == "none"] * 2


def test_restore_of_a_checkpoint_without_weak_types_keeps_weak_numbers(tmp_path):
    """Checkpoints of earlier versions do not contain them."""
    trainer, other = a_trainer(Weak), a_trainer(Weak)
    saved, position = inside.checkpoint_state(trainer)
    del position["weak"]
    with inside.checkpoint_store()(tmp_path) as store:
        store.save(0, saved, position)
    other.restore(tmp_path)
    assert [name for name in weak_names(other) if name.startswith("model.")] == ["model.trained"]


def test_restore_supports_bare_arrays(tmp_path):
    class Bare(MLP):
        def __init__(self, rngs):
            super().__init__(rngs)
            self.bare = nnx.data(rngs.normal((3,)))
            self.nested = nnx.data({"a": [rngs.normal((2,)), np.arange(3.0)]})

        def __call__(self, x):
            return super().__call__(x) + self.bare[0]

    one, other = a_trainer(Bare, 2), a_trainer(Bare, 3, seed=1)
    one.save(tmp_path)
    before = arrays_of(one)
    assert {"model.bare", "model.nested.a.0", "model.nested.a.1"} <= before.keys()
    assert before["model.nested.a.1"].dtype == np.float32  # as it is on the devices
    other.restore(tmp_path)
    assert differing(arrays_of(other), before) == []
    other.strategy.check_mirrored(other.model)


# mirror.Variable, as tf.distribute saves and restores its variables

AGGREGATED = {  # of [3, 5]: the saved value, and each replica's value on this number of replicas
    "sum": (8.0, {1: [8], 2: [4, 4], 4: [2, 2, 2, 2]}),
    "mean": (4.0, {1: [4], 2: [4, 4], 4: [4, 4, 4, 4]}),
    "only_first_replica": (3.0, {1: [3], 2: [3, 3], 4: [3, 3, 3, 3]}),
}


class Holder(nnx.Module):
    def __init__(self, v):
        self.v = v


def holding(n: int, make) -> mirror.Trainer:
    with cpu_strategy(n).scope():
        return mirror.Trainer(Holder(make()), optax.sgd(0.1), loss_fn)


def values_of(trainer) -> list:
    return [np.asarray(x).tolist() for x in trainer.strategy.local_results(trainer.model.v)]


@pytest.mark.parametrize("rows", mostly_slow(AGGREGATED, "sum"))
def test_per_replica_variables_are_saved_aggregated(subtests, tmp_path_factory, rows):
    for aggregation in rows:
        with subtests.test(msg=aggregation):
            tmp_path = tmp_path_factory.mktemp("row")
            check_per_replica_variables_are_saved_aggregated(tmp_path, aggregation)


def check_per_replica_variables_are_saved_aggregated(tmp_path, aggregation):
    saved, restored = AGGREGATED[aggregation]
    trainer = holding(2, lambda: on_read(aggregation))
    set_copies(trainer.strategy, trainer.model.v)
    assert values_of(trainer) == [3, 5]
    trainer.save(tmp_path)
    assert mirror.load_checkpoint(tmp_path).arrays["model.v"] == saved
    for n, values in restored.items():
        other = holding(n, lambda: on_read(aggregation, 7.0))
        other.restore(tmp_path)
        assert values_of(other) == values
        mirrored = holding(n, lambda: variable(7.0))
        mirrored.restore(tmp_path)
        assert values_of(mirrored) == [saved] * n


def test_mirrored_variables_are_saved_once(tmp_path):
    holding(2, lambda: variable(np.array([1.0, 2], np.float32))).save(tmp_path)
    found = mirror.load_checkpoint(tmp_path).arrays
    assert found["model.v"].tolist() == [1, 2]
    for n in (1, 4):
        for make in (variable, nnx.Param, nnx.BatchStat):
            trainer = holding(n, lambda make=make: make(jnp.zeros(2)))
            trainer.restore(tmp_path)
            assert values_of(trainer) == [[1, 2]] * n


def test_save_rejects_variables_without_aggregation(tmp_path):
    trainer = holding(2, on_read)
    set_copies(trainer.strategy, trainer.model.v)
    with raises(ValueError, values="'on_read'", fix="aggregation='sum'"):
        trainer.save(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_file_size_does_not_depend_on_the_number_of_replicas(tmp_path):
    sizes = []
    for n in (1, 8):
        directory = tmp_path / str(n)
        trainer = a_trainer(lambda rngs: MLP(rngs, 5000), n)
        trainer.strategy.run(lambda model: model.first.bias[...] * 0, (trainer.model,))
        assert len(trainer.model.first.kernel[...].sharding.device_set) == n
        trainer.save(directory)
        sizes.append(sum(p.stat().st_size for p in directory.rglob("*") if p.is_file()))
    assert max(sizes) < 1.1 * min(sizes)


def load_without_devices(directory) -> None:
    jax.config.update("jax_platforms", "of mine")  # a backend that starts would fail
    found = mirror.load_checkpoint(directory)
    assert found.arrays["model.sum"] == 80
    assert {type(x) for x in found.arrays.values()} == {np.ndarray, KeyData}
    jax.config.update("jax_num_cpu_devices", 5)  # raises once a backend has started


@pytest.mark.slow
def test_load_checkpoint_needs_no_devices(eight):
    in_a_process(load_without_devices, eight[1])


# Another model


class Other(MLP):
    """Lacks the second layer's bias, has a third; other shapes and dtypes."""

    def __init__(self, rngs: nnx.Rngs):
        super().__init__(rngs, width=9)
        self.second = nnx.Linear(9, 1, use_bias=False, rngs=rngs)
        self.first.bias[...] = jnp.zeros(9)
        self.second.kernel = nnx.Param(jnp.zeros((8, 1), jnp.bfloat16))
        self.third = nnx.Dropout(0.1, rngs=rngs)


WRONG = {  # the checkpoint's and the model's, where both have an entry
    "model.first.bias": ["float32[8]", "float32[9]"],
    "model.first.kernel": ["float32[3,8]", "float32[3,9]"],
    "model.second.bias": [],
    "model.second.kernel": ["float32[8,1]", "bfloat16[8,1]"],
    "model.third.rngs.count": [],
    "model.third.rngs.key": [],
    "optimizer.opt_state.0.count": [],
}


def test_restore_rejects_another_model_and_leaves_it_unchanged(tmp_path):
    a_trainer(tx=optax.adam(0.1)).save(tmp_path)
    trainer = a_trainer(Other, 3, tx=optax.sgd(0.1))
    before = arrays_of(trainer)
    with raises(ValueError, fix="mirror.load_checkpoint") as caught:
        trainer.restore(tmp_path)
    lines = [line for line in str(caught.value).splitlines() if line.startswith("  ")]
    for line, (name, values) in zip(lines[: len(WRONG)], WRONG.items(), strict=True):
        assert_message(line, names=name, values=values)
    assert differing(before, arrays_of(trainer)) == []
    assert trainer._position.step == 0


def test_restore_rejects_another_key_implementation(tmp_path):
    def key(impl):
        return nnx.Variable(jax.random.split(jax.random.key(0, impl=impl), 2))

    holding(2, lambda: key("rbg")).save(tmp_path)
    with raises(ValueError, names="model.v", values=["key<rbg>[2]", "key<threefry2x32>[2]"]):
        holding(2, lambda: key("threefry2x32")).restore(tmp_path)


def test_restore_rejects_an_empty_directory(tmp_path):
    trainer = a_trainer()
    with raises(FileNotFoundError, values=tmp_path / "no"):
        trainer.restore(tmp_path / "no")
    trainer.save(tmp_path)
    with raises(FileNotFoundError, values=[tmp_path, 7, 0]):
        trainer.restore(tmp_path, 7)


def test_save_rejects_unusable_directories(tmp_path):
    (tmp_path / "file").touch()
    with raises(OSError, values=tmp_path / "file"):
        a_trainer().save(tmp_path / "file")


class TwoNames(nnx.Module):
    def __init__(self):
        self.b = nnx.Dict({"c.d": nnx.Param(jnp.ones(2)), "c": nnx.Dict(d=nnx.Param(jnp.zeros(2)))})


def test_save_rejects_two_arrays_with_one_name(tmp_path):
    """One would replace the other."""
    trainer = a_trainer(lambda rngs: TwoNames())
    with raises(ValueError, names="model.b.c.d"):
        trainer.save(tmp_path)
    with raises(ValueError, names="model.b.c.d"):  # before the first step
        fit(trainer, 1, callbacks.Checkpoint(tmp_path))
    assert list(tmp_path.iterdir()) == []


# these steps of 100, a crash, and the rest

RESUMED = {  # options of the trainer, and the step to crash after
    "mid-epoch": ({}, 40),
    "end of an epoch": ({}, 50),
    "first step": ({}, 1),
    "last step": ({}, 100),
    "launches": ({"steps_per_execution": 4}, 40),
    "end of an epoch, launches": ({"steps_per_execution": 4}, 50),
    "pieces": ({"accumulate_steps": 2}, 40),
}


@functools.cache
def uninterrupted(model, n: int, **options) -> tuple[dict, dict]:
    trainer = new_trainer(model, n, **options)
    return without_seconds(fit(trainer, 4)), arrays_of(trainer)


def crashed(at: int, directory, model=Noisy, n: int = 2, **options) -> mirror.Trainer:
    """A training that crashes, with a checkpoint."""
    trainer = new_trainer(model, n, **options)
    with pytest.raises(LookupError):
        fit(trainer, 4, Crash(at, directory))
    return trainer


def assert_goes_on(trainer, wanted) -> None:
    """Trains to the end; checks that it equals the uninterrupted training bitwise."""
    history = fit(trainer, 4)
    assert without_seconds(history) == wanted[0]
    assert differing(arrays_of(trainer), wanted[1]) == []
    assert trainer._position.step == 100


@pytest.mark.parametrize("rows", mostly_slow(RESUMED, "mid-epoch"))
def test_resume_on_the_same_number_of_replicas_is_bitwise_equal(subtests, tmp_path_factory, rows):
    for case in rows:
        with subtests.test(msg=case):
            options, at = RESUMED[case]
            tmp_path = tmp_path_factory.mktemp("row")
            wanted = uninterrupted(Noisy, 2, **options)
            trainer = crashed(at, tmp_path / "before", **options)
            trainer.save(tmp_path / "after")
            assert_goes_on(trainer, wanted)  # in the same process
            for directory in ("before", "after"):
                trainer.restore(tmp_path / directory)
                assert_goes_on(trainer, wanted)


@pytest.mark.parametrize("rows", mostly_slow([1, 3, 8], 3))
def test_resume_works_on_another_number_of_replicas(subtests, tmp_path_factory, rows):
    for n in rows:
        with subtests.test(msg=str(n)):
            tmp_path = tmp_path_factory.mktemp("row")
            wanted_history, wanted = uninterrupted(MLP, 2)
            crashed(40, tmp_path, MLP, 2)
            trainer = a_trainer(MLP, n, seed=1)
            trainer.restore(tmp_path)
            history = fit(trainer, 4)
            for name, value in arrays_of(trainer).items():
                np.testing.assert_allclose(value, wanted[name], rtol=1e-5, atol=1e-5, err_msg=name)
            for name in history:
                np.testing.assert_allclose(history[name], wanted_history[name], rtol=1e-5)


class Seen(callbacks.Callback):
    """Adds the number of epochs that it has seen to the metrics, and fails once, perhaps."""

    def __init__(self, fails_at: int = 0):
        self.count, self.fails_at = 0, fails_at

    def on_epoch_end(self, fit, logs):
        self.count += 1
        if self.count == self.fails_at:
            raise LookupError("of the test")
        logs["seen"] = self.count

    def to_dict(self):
        return {"count": self.count}

    def from_dict(self, state):
        self.count = state["count"]


class Saves(callbacks.Callback):
    """Saves at the end of each epoch, and calls a function then."""

    def __init__(self, directory, then=lambda: None):
        self.directory, self.then = directory, then

    def on_epoch_end(self, fit, logs):
        fit.trainer.save(self.directory)
        assert mirror.load_checkpoint(self.directory).step == fit.position.step
        self.then()


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("fails_at", [0, 2])
def test_save_at_the_end_of_an_epoch_loses_no_callback(tmp_path, is_first, fails_at):
    """Also if a callback after it fails: then the epoch has not ended."""
    wanted = fit(new_trainer(), 3, Seen())
    seen, saves = Seen(fails_at), Saves(tmp_path)
    ends = pytest.raises(LookupError) if fails_at else contextlib.nullcontext()
    with ends:
        fit(new_trainer(), 2, *([saves, seen] if is_first else [seen, saves]))
    trainer = new_trainer()
    trainer.restore(tmp_path)
    ended = mirror.load_checkpoint(tmp_path).position["epoch"]
    assert ended == (1 if fails_at else 2)
    assert without_seconds(fit(trainer, 3, Seen())) == without_seconds(wanted)
    assert wanted["seen"] == [1, 2, 3]


def test_save_at_the_end_of_an_epoch_that_fails_keeps_what_decides_the_bits(tmp_path):
    trainer = a_trainer(strategy=cpu_strategy(2, replicas=2))
    with pytest.raises(LookupError):
        fit(trainer, 1, Saves(tmp_path), Seen(fails_at=1))
    position = mirror.load_checkpoint(tmp_path).position
    assert (position["epoch"], position["bits"]["replicas"]) == (0, "2")


def test_save_at_the_end_of_an_epoch_keeps_the_arrays_that_were_saved(tmp_path):
    """As with `ema.weights(trainer)`; and a file that was moved away is not written again."""
    trainer = new_trainer()

    class Averages(callbacks.Callback):
        def on_epoch_end(self, fit, logs):
            kernel = trainer.model.first.kernel
            own, kernel[...] = kernel[...], kernel[...] * 0
            trainer.save(tmp_path / "averages")
            kernel[...] = own

    moved = Saves(tmp_path / "new", lambda: os.rename(tmp_path / "new", tmp_path / "old"))
    fit(trainer, 1, Averages(), moved, Seen())
    found = mirror.load_checkpoint(tmp_path / "averages")
    assert not found.arrays["model.first.kernel"].any()
    assert found.position["callbacks"] == {"Seen 1": {"count": 1}}
    assert trainer.model.first.kernel[...].any()
    assert sorted(os.listdir(tmp_path)) == ["averages", "old"]


def test_finished_training_has_nothing_to_resume(tmp_path):
    wanted, trainer = uninterrupted(Noisy, 2), new_trainer(Noisy)
    history, end = fit(trainer, 2, callbacks.Checkpoint(tmp_path)), arrays_of(trainer)
    trainer = new_trainer(Noisy)
    trainer.restore(tmp_path)
    assert without_seconds(fit(trainer, 2)) == without_seconds(history)
    assert differing(arrays_of(trainer), end) == []
    trainer.restore(tmp_path)
    assert_goes_on(trainer, wanted)


def endless():
    """An endless dataset that starts with the same batches each time."""
    draw = np.random.RandomState(1)
    while True:
        x = draw.randn(SIZE, 3).astype(np.float32)
        yield {"x": x, "y": x.sum(1)}


@pytest.mark.parametrize("rows", mostly_slow([endless, shuffled], shuffled))
def test_resume_supports_steps_per_epoch(subtests, tmp_path_factory, rows):
    """With endless data, and with data of another length."""
    for data in rows:
        with subtests.test(msg=data.__name__):
            tmp_path = tmp_path_factory.mktemp("row")
            trainer, options = new_trainer(Noisy), {"steps_per_epoch": 10}
            wanted, end = (
                without_seconds(fit(trainer, 6, data=data(), **options)),
                arrays_of(trainer),
            )
            assert trainer._position.step == 60
            for at in (10, 34):
                trainer = new_trainer(Noisy)
                with pytest.raises(LookupError):
                    fit(trainer, 6, Crash(at, tmp_path / str(at)), data=data(), **options)
                trainer.restore(tmp_path / str(at))
                assert without_seconds(fit(trainer, 6, data=data(), **options)) == wanted
                assert differing(arrays_of(trainer), end) == []


def test_resume_detects_other_data(tmp_path):
    trainer = crashed(20, tmp_path)
    trainer.restore(tmp_path)
    with raises(ValueError, values=[80, 20]):
        fit(trainer, 4, data=list(shuffled())[:5])


class Failing:
    """An iterator that raises an error once."""

    def __init__(self, batches, at: int):
        self.batches, self.at = list(batches), at

    def __iter__(self):
        return self

    def __next__(self):
        if len(self.batches) == self.at:
            self.at = -1
            raise LookupError("of the test")
        if not self.batches:
            raise StopIteration
        return self.batches.pop(0)


def test_iterator_that_has_failed_continues_where_it_is():
    """It skipped as many examples again, which were then never used."""
    trainer, data = new_trainer(), list(shuffled())[:6]
    wanted = fit(trainer, 1, data=data)
    trainer, batches = new_trainer(), Failing(data, at=3)
    with pytest.raises(LookupError):
        fit(trainer, 1, data=batches)
    assert trainer._position.step == 3
    with pytest.warns(UserWarning, match="12 examples"):
        history = fit(trainer, 1, data=batches)
    assert trainer._position.step == 6
    assert without_seconds(history) == without_seconds(wanted)
    trainer, batches = new_trainer(), Failing(data, at=3)
    with pytest.raises(LookupError):
        fit(trainer, 1, data=batches)
    assert without_seconds(fit(trainer, 1, data=iter(data))) == without_seconds(wanted)


OTHER_ROWS = {
    "seed": lambda: mirror.data.from_arrays(arrays(), SIZE, shuffle=True, seed=4),
    "not shuffled": lambda: mirror.data.from_arrays(arrays(), SIZE),
    "fewer": lambda: mirror.data.from_arrays(
        {name: x[:90] for name, x in arrays().items()}, SIZE, shuffle=True, seed=3
    ),
}


def test_resume_detects_rows_in_another_order(subtests, tmp_path):
    """Or the rest of the epoch would have some examples again, and others not at all."""
    trainer = crashed(20, tmp_path)
    for name, other in OTHER_ROWS.items():
        with subtests.test(msg=name):
            trainer.restore(tmp_path)
            with raises(ValueError, values=[80, "98 rows", "seed 3"], fix="initial_epoch=0"):
                fit(trainer, 1, data=other())
            assert fit(trainer, 1, data=other(), initial_epoch=0).epochs == [0]
    trainer.restore(tmp_path)
    same_rows = mirror.data.from_arrays(arrays(), 2 * SIZE, shuffle=True, seed=3)
    fit(trainer, 1, data=same_rows)
    assert trainer.optimizer.step[...] == 20 + 3


def far(model, batch):
    return loss_fn(model, batch)[0], {"far": model(batch["x"]) > batch["y"]}


def weighted(model, batch):
    losses, metrics = loss_fn(model, batch)
    return losses, {"close": mirror.Weighted(metrics["close"] * 1.0, losses * 0 + 2)}


def weighted_loss(model, batch):
    losses, metrics = loss_fn(model, batch)
    return mirror.Weighted(losses, losses * 0 + 2), metrics


def only_loss(model, batch):
    return loss_fn(model, batch)[0]


OTHER_METRICS = {  # the loss function, makers of other options, and which metrics the epoch lacks
    "same": (loss_fn, {}, set()),
    "removed": (only_loss, {}, {"close"}),
    "renamed": (far, {}, {"close", "far"}),
    "weighted": (weighted, {}, {"close"}),
    "weighted loss": (weighted_loss, {}, {"loss"}),
    "loss scale": (loss_fn, {"loss_scale": mirror.LossScale}, {"loss_scale", "skipped"}),
}


def test_metric_of_a_part_of_the_epoch_is_nan(subtests, tmp_path):
    """Other metrics after a restore within an epoch: no sum of a part is a mean of the epoch."""
    with pytest.raises(LookupError):
        fit(new_trainer(), 2, Crash(STEPS + 5, tmp_path))
    for name, (loss, options, lacking) in OTHER_METRICS.items():
        with subtests.test(msg=name):
            with cpu_strategy(2).scope():
                model, tx = MLP(nnx.Rngs(0)), optax.adam(1e-2)
                others = {option: make() for option, make in options.items()}
                trainer = mirror.Trainer(model, tx, loss, require_equal=False, **others)
            trainer.restore(tmp_path)
            history = fit(trainer, 3)
            assert {key for key, column in history.items() if np.isnan(column[1])} == lacking
            assert not np.isnan([history[key][2] for key in history.keys() - {"close"}]).any()


# Processes of their own: SIGTERM, kill -9, a full disk

LONG = 16  # epochs


class Tells(callbacks.Callback):
    """Sends the step, after the checkpoint of the previous step, and then dies in a save."""

    runs_last = True

    def __init__(self, says, directory, number):
        self.says, self.directory, self.number = says, directory, number

    def on_step(self, fit):
        self.says.send(fit.position.step)
        if self.number is not None:
            kill_me_at(self.directory, self.number)
            self.number = None


class Ends(callbacks.Callback):
    """Ends its own process."""

    def __init__(self, at: int):
        self.at = at

    def on_step(self, fit):
        if fit.position.step == self.at:
            os.kill(os.getpid(), signal.SIGTERM)


class Quick(nnx.Module):
    """Created and traced together."""

    def __init__(self, rngs: nnx.Rngs):
        self.w = nnx.Param(np.array([1.0, -1, 0.5], np.float32))
        self.dropout = nnx.Dropout(0.3, rngs=rngs)

    def __call__(self, x):
        return self.dropout(x) @ self.w[...]


def train(directory, cache, others=(), **options) -> None:
    """Trains for some hundred steps, and resumes where the last run ended."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 2)
    jax.config.update("jax_compilation_cache_dir", str(cache))  # filled by the first process
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    trainer = a_trainer(Quick, tx=optax.sgd(1e-2, momentum=0.9))
    with contextlib.suppress(FileNotFoundError):
        trainer.restore(directory)
    fit(trainer, LONG, callbacks.Checkpoint(directory, **options), *others)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The directories of an uninterrupted training and of compiled programs."""
    directory, cache = tmp_path_factory.mktemp("whole"), tmp_path_factory.mktemp("cache")
    in_a_process(train, directory, cache)
    assert mirror.load_checkpoint(directory).step == LONG * STEPS
    return directory, cache


def assert_same_end(directory, whole) -> None:
    found, wanted = mirror.load_checkpoint(directory), mirror.load_checkpoint(whole[0])
    assert differing(plain(found.arrays), plain(wanted.arrays)) == []
    for position in (found.position, wanted.position):
        del position["history"]["seconds"], position["training"]
    assert found.position == wanted.position


def last_step(directory) -> int:
    """Returns the step of the last checkpoint, which must be complete; 0 without a checkpoint."""
    with contextlib.suppress(FileNotFoundError):
        return mirror.load_checkpoint(directory).step
    return 0


@pytest.mark.slow
def test_sigterm_saves_and_ends(tmp_path, whole):
    options = {"every_epochs": 4, "others": (Ends(130),)}
    process = START.Process(target=train, args=(tmp_path, whole[1]), kwargs=options)
    process.start()
    process.join(900)
    assert process.exitcode == 143
    assert last_step(tmp_path) == 130
    in_a_process(train, tmp_path, whole[1])
    assert_same_end(tmp_path, whole)


def train_and_tell(directory, cache, number, says) -> None:
    train(directory, cache, every_steps=1, others=(Tells(says, directory, number),))


@pytest.mark.nightly
def test_killed_training_resumes_from_a_complete_checkpoint(tmp_path, whole):
    draw, before, interrupted = random.Random(0), 0, 0
    for _ in range(20):
        told = killed(train_and_tell, tmp_path, whole[1], draw.randrange(60))
        assert before < told < LONG * STEPS
        before = last_step(tmp_path)
        assert before >= told - 1  # during the write of its checkpoint
        interrupted += is_interrupted(tmp_path)
    assert interrupted >= 5  # otherwise the kill comes when nothing happens
    in_a_process(train, tmp_path, whole[1])
    assert_same_end(tmp_path, whole)


class FullDisk(callbacks.Callback):
    """Prevents files from growing after the first checkpoint."""

    def __init__(self, first):
        self.first = first

    def on_step(self, fit):
        if fit.position.step == STEPS + 5:
            wait_until(self.first.exists)  # it is written in the background
            self.limits = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (500, self.limits[1]))

    def on_fit_end(self, fit):
        resource.setrlimit(resource.RLIMIT_FSIZE, self.limits)


def train_on_a_full_disk(directory, cache) -> None:
    with raises(OSError, values=[50, directory, 25]):
        train(directory, cache, (FullDisk(path_of(directory, 25)),))
    assert steps_in(directory) == [25]


@pytest.mark.slow
def test_training_survives_a_full_disk(tmp_path, whole):
    in_a_process(train_on_a_full_disk, tmp_path, whole[1])
    assert mirror.load_checkpoint(tmp_path).step == 25
    in_a_process(train, tmp_path, whole[1])
    assert_same_end(tmp_path, whole)


# Handlers of SIGTERM


class Looks(callbacks.Callback):
    """Records the handler of SIGTERM, and sends one on request."""

    def __init__(self, send_in: str = ""):
        self.found: list = []
        if send_in:
            setattr(self, send_in, self.send)

    def send(self, *_):
        assert signal.getsignal(signal.SIGTERM) != signal.SIG_DFL  # or it ends the tests
        os.kill(os.getpid(), signal.SIGTERM)

    def on_epoch_begin(self, fit):
        self.found.append(signal.getsignal(signal.SIGTERM))


def fit_quickly(directory, *others, **options) -> None:
    fit(new_trainer(), 1, callbacks.Checkpoint(directory, **options), *others)


def test_sigterm_handler_is_installed_during_fit_only(tmp_path):
    looks = Looks()
    fit_quickly(tmp_path, looks)
    assert looks.found != [signal.SIG_DFL]
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    with pytest.raises(LookupError):
        fit_quickly(tmp_path, Crash(1))
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_users_sigterm_handler_is_kept(tmp_path):
    met: list = []
    signal.signal(signal.SIGTERM, lambda *_: met.append("term"))
    try:
        fit_quickly(tmp_path, Looks("on_epoch_end"))
        assert met == ["term"]
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def test_no_handler_is_installed_in_another_thread(tmp_path):
    looks = Looks()
    thread = threading.Thread(target=fit_quickly, args=(tmp_path, looks))
    thread.start()
    thread.join()
    assert looks.found == [signal.SIG_DFL]


MOMENTS = {"on_epoch_begin": 0, "on_step": 1, "on_metrics": 9, "on_epoch_end": STEPS}


def test_sigterm_at_any_moment_is_safe(subtests, tmp_path_factory, capsys):
    """The last step is saved, and a line says so."""
    for every_epochs, moment in itertools.product([0, 1], MOMENTS):
        with subtests.test(msg=f"{moment}, {every_epochs=}"):
            tmp_path = tmp_path_factory.mktemp("row")
            with pytest.raises(SystemExit) as caught:
                fit_quickly(tmp_path, Looks(moment), every_epochs=every_epochs)
            assert caught.value.code == 143
            assert last_step(tmp_path) == MOMENTS[moment]
            is_saved = f"step {MOMENTS[moment]} is saved in {tmp_path}"
            is_not = f"no checkpoint was written to {tmp_path}, because no step has ended"
            words = capsys.readouterr().err
            assert words == f"SIGTERM: {is_saved if MOMENTS[moment] else is_not}.\n"
            assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
