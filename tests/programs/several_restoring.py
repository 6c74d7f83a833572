"""Restores a checkpoint that only some processes have: prints the cases that passed.

python several_restoring.py DIRECTORY

Each process has a directory of its own, as on machines that share no file system.
"""

import hashlib
import os
import shutil
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import mirror
from tests.support import inside
from tests.support.checkpoints import path_of

strategy = mirror.MultiWorkerMirroredStrategy()
me = mirror.distributed.process_index()
last = mirror.distributed.process_count() - 1
mine = Path(sys.argv[1], str(me))
from_chief = inside.checkpoint_of_chief()
agreement_secs = from_chief.agreement_secs
from_chief._PIECE = 2**8  # several pieces, of which the last is short
received = []
broadcast = from_chief.BroadcastRestore._broadcast


def counted(self, num_bytes, parts=()):
    received.append(num_bytes)
    return broadcast(self, num_bytes, parts)


from_chief.BroadcastRestore._broadcast = counted


class Net(nnx.Module):
    def __init__(self, width, seed, counts):
        self.layer = nnx.Linear(3, width, rngs=nnx.Rngs(seed))
        self.dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(seed))
        self.half = nnx.Variable(jnp.asarray([-0.0, jnp.nan, seed], jnp.bfloat16))
        self.flags = nnx.Variable(jnp.asarray([seed > 0, False, True]))
        self.weak = nnx.Variable(jnp.full(2, -0.0))
        self.empty = nnx.Variable(jnp.zeros((0, 2)))
        if counts:
            self.calls = mirror.Variable(0, synchronization="on_read", aggregation="sum")


def trainer_of(width=4, seed=0, counts=True):
    with strategy.scope():
        model = Net(width, seed, counts)
        return mirror.Trainer(
            model, optax.adam(0.1), lambda m, b: m.dropout(m.layer(b["x"])).sum(-1) ** 2
        )


def digest_of(trainer):
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(nnx.state((trainer.model, trainer.optimizer))):
        if not leaf.is_fully_replicated:  # of the "on_read" variable
            continue
        digest.update(bytes([jax.typeof(leaf).weak_type]))
        is_key = jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        digest.update(np.asarray(jax.random.key_data(leaf) if is_key else leaf).tobytes())
    return digest.hexdigest()


DATA = {"x": np.random.default_rng(0).normal(size=(24, 3)).astype(np.float32)}
trained = trainer_of(seed=1)
trained.model.calls.assign(5)
# The directory, which the chief alone creates, differs from process to process.
trained.fit(
    DATA, 2, batch_size=8, callbacks=mirror.callbacks.Checkpoint(mine, every_steps=2, keep=None)
)
wanted = digest_of(trained)
assert mine.exists() == strategy.is_chief


def restored(step="last"):
    received.clear()
    trainer = trainer_of()
    assert digest_of(trainer) != wanted
    trainer.restore(mine, step)
    strategy.check_mirrored((trainer.model, trainer.optimizer))
    return trainer


def only_the_chief_has_it():
    trainer = restored()
    assert len(received) == 1
    assert received[0] % from_chief._PIECE, "the last piece is filled up"
    assert received[0] > 3 * from_chief._PIECE
    assert digest_of(trainer) == wanted
    assert int(trainer.model.calls[...]) == 5
    assert trainer._position.step == 6
    assert trainer._position.epoch == 2
    assert restored(5)._position.step == 5
    undisturbed = trainer_of(seed=1)
    for each in (trainer, undisturbed):
        each.fit(DATA, 3, batch_size=8, progress=False)
    assert digest_of(trainer) == digest_of(undisturbed) != wanted


def all_have_it():
    if me:
        shutil.copytree(mine.with_name("0"), mine)
    mirror.distributed.barrier("copied", 60)
    assert digest_of(restored()) == wanted
    assert not received


def damage(path):
    os.truncate(path, path.stat().st_size - 1)


def one_is_damaged():
    if me == last:
        damage(path_of(mine, 6))
    mirror.distributed.barrier("damaged", 60)
    assert digest_of(restored()) == wanted
    assert len(received) == 1


def the_chiefs_counts():
    """Another process has a newer checkpoint."""
    if me == last:
        os.rename(path_of(mine, 6), path_of(mine, 7))
    mirror.distributed.barrier("renamed", 60)
    trainer = restored()
    assert trainer._position.step == 6
    assert digest_of(trainer) == wanted


def refused(kind, trainer, step, *parts):
    before = digest_of(trainer)
    with pytest.raises(kind) as raised:
        trainer.restore(mine, step)
    text = str(raised.value)
    assert all(part in text for part in parts), text
    assert not me or "process 0" in text, text
    assert digest_of(trainer) == before


def absent_processes_are_named():
    """Also by a process that comes too late."""
    from_chief.agreement_secs = lambda: 2.0
    directory = mine / "alone"
    trainer = trainer_of(counts=False)  # nothing to aggregate, which would be a collective
    trainer.save(directory)
    assert directory.exists() == strategy.is_chief
    for first in (0, last):
        for caller in ({first}, {*range(last + 1)} - {first}):
            if me in caller:
                with pytest.raises(RuntimeError, match=r"processes \[[0-9, ]+\] have not called"):
                    trainer.restore(directory)
            mirror.distributed.barrier("called", 60)
    from_chief.agreement_secs = agreement_secs


def errors_of_one_are_raised_by_all():
    received.clear()
    refused(FileNotFoundError, trainer_of(), 4, "step 4")
    refused(TypeError, trainer_of(), 2.5, "2.5")
    refused(ValueError, trainer_of(width=5), "last", "model.layer.kernel", "float32[3,5]")
    refused(RuntimeError, trainer_of(width=4 + (me == last)), "last", f"processes 0 and {last} ")
    steps = f"process {last} restores step=5", "process 0 step='last'"
    refused(RuntimeError, trainer_of(), 5 if me == last else "last", *steps)
    if strategy.is_chief:
        damage(path_of(mine, 6))
    refused(ValueError, trainer_of(), "last", "step 6")
    assert not received
    if strategy.is_chief:
        shutil.rmtree(mine)
    refused(FileNotFoundError, trainer_of(), "last", "does not exist")


for case in (
    only_the_chief_has_it,
    all_have_it,
    one_is_damaged,
    the_chiefs_counts,
    absent_processes_are_named,
    errors_of_one_are_raised_by_all,
):
    case()
    print("passed", case.__name__, flush=True)
