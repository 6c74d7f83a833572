"""Resumes trainings from the states of data loaders in one process of several; prints the cases.

python several_loaders.py DIRECTORY
"""

import sys
import warnings
from pathlib import Path

import grain
import numpy as np
import optax
import pytest
from flax import nnx

import mirror
from tests.support import loaders

SIZE, STEPS = 2, 6  # of the parts of an epoch
directory = Path(sys.argv[1])
strategy = mirror.MultiWorkerMirroredStrategy()
me, count = mirror.distributed.process_index(), mirror.distributed.process_count()
X = np.random.RandomState(0).randn(100, 3).astype("float32")


class Rows(loaders.Rows):
    def __init__(self, start=0, size=SIZE * STEPS * count):
        super().__init__()
        self.start, self.size = start, size

    def __len__(self):
        return self.size

    def __getitem__(self, i):
        self.read[int(i)] += 1
        return {"x": X[self.start + i], "y": X[self.start + i].sum()}


def trainer_of(**options):
    def loss_fn(model, batch):
        return (model(batch["x"])[:, 0] - batch["y"]) ** 2

    with strategy.scope():
        model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
        return mirror.Trainer(model, optax.adam(0.1), loss_fn, **options)


def whole(rows):
    return grain.MapDataset.source(rows).shuffle(seed=3).batch(SIZE * count)


def own(rows):
    return grain.MapDataset.source(rows).shuffle(seed=3)[me::count].batch(SIZE)


def in_order(rows):
    return grain.MapDataset.source(rows).batch(SIZE)


def iterator(rows):
    return iter(own(rows).to_iter_dataset(grain.ReadOptions(num_threads=1)))


def torchdata_of(sampler):
    from torchdata.stateful_dataloader import StatefulDataLoader

    def make(rows):
        return StatefulDataLoader(rows, SIZE, sampler=sampler(rows))

    return make


def torch_shards(rows):
    from torch.utils.data import DistributedSampler

    return DistributedSampler(rows, num_replicas=count, rank=me)


def torch_all(rows):
    from torch.utils.data import SequentialSampler

    return SequentialSampler(rows)


def local(data, remainder="pad"):
    return strategy.distribute_dataset(data, input="local", remainder=remainder)


def unchanged(data):
    return data


def interrupted(step, data, epochs, **options):
    """Returns a trainer that has saved its checkpoint of a step, and was then interrupted."""

    class Stops(mirror.callbacks.Callback):
        def on_step(self, fit):
            if fit.position.step == step:
                fit.trainer.save(directory)
                raise InterruptedError

    trainer = trainer_of(**options)
    with pytest.raises(InterruptedError):
        trainer.fit(data, epochs, callbacks=Stops(), progress=False)
    return trainer


def resumes(make, step, *, distributed=local, rows=Rows, epochs=2, left=None, **options):
    """Compares a training that is interrupted after a step with one that is not."""
    whole, losses = trainer_of(**options), loaders.Losses()
    history = whole.fit(distributed(make(rows())), epochs, callbacks=losses, progress=False)
    trainers = [interrupted(step, distributed(make(rows())), epochs, **options)]
    trainers.append(trainer_of(**options))
    trainers[1].restore(directory)
    for trainer in trainers:
        after, read = loaders.Losses(), rows()
        data = distributed(make(read))
        found = trainer.fit(data, epochs, callbacks=after, progress=False)
        assert found["loss"] == history["loss"], (found, history)
        assert after.of_steps == {n: loss for n, loss in losses.of_steps.items() if n > step}
        assert all(map(np.array_equal, loaders.weights(trainer), loaders.weights(whole)))
        assert left is None or read.read.total() == left, (read.read.total(), left)


def global_input():
    size = SIZE * count
    resumes(whole, 4, distributed=unchanged, left=(2 * STEPS - 4) * size)


def each_process_continues_its_own_part():
    resumes(own, 4, left=(2 * STEPS - 4) * SIZE)
    resumes(own, STEPS + 2, left=(STEPS - 2) * SIZE)
    resumes(iterator, 4, epochs=1, left=(STEPS - 4) * SIZE)


def launches_of_several_steps():
    resumes(own, 4, left=(2 * STEPS - 4) * SIZE, steps_per_execution=4)


def uneven(more=2):
    """Each process has `more` batches more than the one before."""
    return Rows(20 * me, SIZE * (4 + more * me))


def parts_of_other_lengths():
    """The part of process 0 is used up at step 4; it then needs a batch, for its shapes."""
    for step in (3, 4, 5):
        left = None if me == 0 and step > 3 else SIZE * (4 + 2 * me - step)
        resumes(in_order, step, rows=uneven, epochs=1, left=left)
        resumes(in_order, step, rows=uneven)


def last_batches_are_dropped():
    def dropping(data):
        return local(data, "drop")

    resumes(in_order, 3, rows=uneven, distributed=dropping)
    resumes(in_order, 4, rows=uneven, distributed=dropping)


def replayed(state, warning):
    """Process 1 has such a state, which cannot be stored: all read again what they have used."""

    def make(rows):
        return loaders.Stateful(state if me == 1 else 1)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        resumes(make, 5, epochs=1)
    assert any(warning in str(each.message) for each in caught) == (me == 1)


def states_that_cannot_be_stored():
    replayed(object(), "contains a object")
    replayed("x" * 70_000, "70,")


def states_that_one_process_does_not_accept():
    interrupted(5, local(loaders.Stateful(1)), 1)
    trainer = trainer_of()
    trainer.restore(directory)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with pytest.raises(ValueError, match=r"skip=40 by the state of the loader on process 0"):
            trainer.fit(local(loaders.Stateful(1, fails=me == 1)), progress=False)
    assert any("another pipeline" in str(each.message) for each in caught) == (me == 1)


def torchdata():
    resumes(torchdata_of(torch_shards), 4)
    resumes(torchdata_of(torch_all), 4, rows=uneven, epochs=1)


CASES = (
    global_input,
    each_process_continues_its_own_part,
    launches_of_several_steps,
    parts_of_other_lengths,
    last_batches_are_dropped,
    states_that_cannot_be_stored,
    states_that_one_process_does_not_accept,
)
for case in (torchdata,) if "torchdata" in sys.argv else CASES:
    case()
    print("passed", case.__name__, flush=True)
