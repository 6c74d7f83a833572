"""Loaders of Grain and torchdata resume where they were, although batches are read ahead."""

import json
import warnings
from typing import Any

import grain
import numpy as np
import optax
import pytest
from flax import nnx

import mirror
from mirror import callbacks
from tests.support.loaders import ROWS, SIZE, STEPS, Losses, Rows, Stateful, weights
from tests.support.messages import assert_message
from tests.support.packages import optional

torch: Any = optional("torch")
stateful: Any = optional("torchdata") and __import__("torchdata.stateful_dataloader")


def grain_map(rows):
    return grain.MapDataset.source(rows).shuffle(seed=3).batch(SIZE)


def grain_iter(rows):
    options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=3)
    return grain.MapDataset.source(rows).shuffle(seed=3).to_iter_dataset(options).batch(SIZE)


def grain_iterator(rows):
    """An iterator, which is not started again by each `iter`."""
    return iter(grain_iter(rows))


def grain_loader(rows):
    sampler = grain.samplers.IndexSampler(
        num_records=ROWS,
        num_epochs=1,
        shard_options=grain.sharding.NoSharding(),
        shuffle=True,
        seed=3,
    )
    operations = [grain.transforms.Batch(SIZE)]
    options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=3)
    return grain.DataLoader(
        data_source=rows, sampler=sampler, operations=operations, read_options=options
    )


def torch_loader(rows):
    sampler = torch.utils.data.DistributedSampler(rows, num_replicas=1, rank=0)
    return stateful.stateful_dataloader.StatefulDataLoader(rows, SIZE, sampler=sampler)


def torch_loader_that_shuffles(rows):
    generator = torch.Generator().manual_seed(3)
    return stateful.stateful_dataloader.StatefulDataLoader(
        rows, SIZE, shuffle=True, generator=generator
    )


LOADERS = {"map": grain_map, "iter": grain_iter, "iterator": grain_iterator, "loader": grain_loader}
OF_TORCH = {"by epoch": torch_loader, "shuffle": torch_loader_that_shuffles}
ONE_EPOCH = ("iterator", "shuffle")  # torchdata restores the order of one epoch


def new_trainer(n=2, **options) -> mirror.Trainer:
    def loss_fn(model, batch):
        return (model(batch["x"])[:, 0] - batch["y"]) ** 2

    with mirror.MirroredStrategy([f"/cpu:{i}" for i in range(n)]).scope():
        model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
        return mirror.Trainer(model, optax.adam(0.1), loss_fn, **options)


def order_of(make, rows) -> list[int]:
    return [int(i) for batch in make(rows) for i in batch["i"]]


def resumes(make, step: int, epochs: int, **options) -> None:
    """Compares a training that is interrupted after a step with one that is not."""
    whole, losses = new_trainer(**options), Losses()
    history = whole.fit(make(Rows()), epochs, callbacks=losses, progress=False)
    first, before = new_trainer(**options), Losses(step)
    with pytest.raises(InterruptedError):
        first.fit(make(Rows()), epochs, callbacks=before, progress=False)
    again, after, rows = new_trainer(**options), Losses(), Rows()
    again.restore("ckpt")
    assert again.fit(make(rows), epochs, callbacks=after, progress=False)["loss"] == history["loss"]
    assert all(map(np.array_equal, weights(again), weights(whole)))
    assert after.of_steps == {n: loss for n, loss in losses.of_steps.items() if n > step}
    assert rows.read.total() == ROWS * epochs - SIZE * step  # none that the steps had used


@pytest.mark.parametrize("name", LOADERS)
def test_grain_resumes_without_replaying_the_epoch(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    resumes(LOADERS[name], 7, 1 if name in ONE_EPOCH else 2)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of torchdata
@pytest.mark.dev("torch", "torchdata")
@pytest.mark.parametrize("name", OF_TORCH)
def test_torchdata_resumes_without_replaying_the_epoch(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    resumes(OF_TORCH[name], 7, 1 if name in ONE_EPOCH else 2)


def test_state_belongs_to_the_batches_of_launches(tmp_path, monkeypatch):
    """A launch takes four batches; `steps_per_epoch` splits one."""
    monkeypatch.chdir(tmp_path)
    resumes(grain_iter, 8, 2, steps_per_execution=4)
    trainer, rows = new_trainer(steps_per_execution=4), Rows()
    trainer.fit(grain_iter(rows), 1, steps_per_epoch=6, progress=False)
    trainer.save("six")
    again, left = new_trainer(), Rows()
    again.restore("six")
    again.fit(grain_iter(left), 2, steps_per_epoch=6, progress=False)
    assert set(left.read) == set(order_of(grain_iter, Rows())[6 * SIZE :])


def test_state_is_restored_on_another_number_of_replicas(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InterruptedError):
        new_trainer().fit(grain_map(Rows()), callbacks=Losses(5), progress=False)
    again, rows = new_trainer(4), Rows()
    again.restore("ckpt")
    again.fit(grain_map(rows), progress=False)
    assert rows.read.total() == ROWS - 5 * SIZE


def test_last_batch_is_padded_as_without_an_interrupt(tmp_path, monkeypatch):
    """It is smaller; a padding of its own would split it otherwise, and change the bits."""
    monkeypatch.chdir(tmp_path)

    def make(rows):
        return grain.MapDataset.source(rows).shuffle(seed=3).batch(10)  # 10, 10, 10, 10, 8

    class Shapes(Losses):
        def on_step(self, fit):
            shapes.append(fit.last_batch.mask.stacked.shape)
            super().on_step(fit)

    shapes: list[tuple[int, int]] = []
    whole = new_trainer(3)
    whole.fit(make(Rows()), progress=False, callbacks=Shapes())
    with pytest.raises(InterruptedError):
        new_trainer(3).fit(make(Rows()), progress=False, callbacks=Shapes(4))
    again = new_trainer(3)
    again.restore("ckpt")
    again.fit(make(Rows()), progress=False, callbacks=Shapes())
    assert shapes == [(3, 4)] * 10
    assert all(map(np.array_equal, weights(again), weights(whole)))


def test_interrupted_fit_continues_in_the_same_process():
    class Stops(callbacks.Callback):
        def on_step(self, fit):
            if fit.position.step == 5:
                raise InterruptedError

    rows, trainer = Rows(), new_trainer()
    data = grain_map(rows)
    with pytest.raises(InterruptedError):
        trainer.fit(data, callbacks=Stops(), progress=False)
    rows.read.clear()
    trainer.fit(data, progress=False)
    assert rows.read.total() == ROWS - 5 * SIZE


def test_every_state_that_json_can_hold_is_restored(subtests, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tree = {"a": [1, (2.5, None), True], 3: "text", "bytes": b"\0\xff", "empty": {}, "list": []}
    array = np.arange(6, dtype=">i2").reshape(2, 3)
    for state in (tree, array, np.float32(3), b"", 0):
        with subtests.test(msg=repr(state)):
            with pytest.raises(InterruptedError):
                new_trainer().fit(Stateful(state), callbacks=Losses(5), progress=False)
            again, source = new_trainer(), Stateful(state)
            again.restore("ckpt")
            again.fit(source, progress=False)
            assert source.read == STEPS - 5


def test_epoch_is_replayed_without_a_state(subtests, tmp_path, monkeypatch):
    """If it cannot be stored, is not accepted, or is of another loader."""
    monkeypatch.chdir(tmp_path)
    whole = new_trainer()
    whole.fit(Stateful(1), progress=False)
    with subtests.test(msg="not stored"):
        warns = pytest.warns(UserWarning, match="cannot be stored")
        with warns as caught, pytest.raises(InterruptedError):
            new_trainer().fit(Stateful(object()), callbacks=Losses(5), progress=False)
        (warning,) = caught
        assert_message(warning.message, names="Stateful", values="contains a object")
        position = mirror.load_checkpoint("ckpt").position
        assert position["loader"] is None
        again, source = new_trainer(), Stateful(1)
        again.restore("ckpt")
        again.fit(source, progress=False)
        assert source.read == STEPS
        assert all(map(np.array_equal, weights(again), weights(whole)))
    with pytest.raises(InterruptedError):
        new_trainer().fit(Stateful(1), callbacks=Losses(5), progress=False)
    assert json.dumps(mirror.load_checkpoint("ckpt").position["loader"])
    for case, source in {
        "not accepted": Stateful(1, fails=True),
        "other": list(Stateful(1)),
    }.items():
        with subtests.test(msg=case), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            again = new_trainer()
            again.restore("ckpt")
            again.fit(source, progress=False)
            assert all(map(np.array_equal, weights(again), weights(whole)))
        messages = [str(each.message) for each in caught]
        assert len(messages) == (case == "not accepted")
        assert all("Stateful" in text and "another pipeline" in text for text in messages)
