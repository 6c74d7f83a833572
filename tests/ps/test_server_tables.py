"""Tables that the main program does not hold."""

import numpy as np
import optax
import pytest
from flax import nnx

import mirror
from tests.ps.digits import arrays
from tests.ps.local_tables import TABLE, Cluster, batches, create
from tests.support import fast, fresh, inside
from tests.support.messages import raises
from tests.support.tables import rows

DATA = batches(4)
OPTIMIZERS = {
    "sgd": optax.sgd(0.5, momentum=0.9),
    "adam": optax.adam(0.05),
    "chain": optax.chain(optax.scale_by_schedule(lambda count: 0.9**count), optax.adagrad(0.1)),
}


def on_servers(tx, num_rows=40):
    """The model and optimizer of `create`, whose table is on servers only."""
    model, _ = create(tx, num_rows)
    first = np.asarray(model.embed.embedding[...])
    model.embed.embedding = mirror.ps.ServerTable(first.shape, lambda a, b: first[a:b])
    return model, nnx.Optimizer(model, tx, wrt=nnx.Param)


def table_of(cluster):
    ids = np.arange(40, dtype=np.int32)
    parts = [(s, ids[p.start : p.stop]) for s, p in cluster.placement.holders[TABLE]]
    return np.concatenate([cluster.stores[server].rows(TABLE, own) for server, own in parts])


@rows("name", list(OPTIMIZERS))
def test_trains_as_a_table_of_the_main_program(name):
    tx = OPTIMIZERS[name]
    held, reference = Cluster(*on_servers(tx)), Cluster(*create(tx))
    for cluster in (held, reference):
        cluster.train(DATA)
    np.testing.assert_array_equal(table_of(held), table_of(reference))
    own = arrays(held.objects.model, held.objects.optimizer)
    wanted = arrays(reference.objects.model, reference.objects.optimizer)
    same = [key for key, value in own.items() if value.dtype != object and key in wanted]
    assert len(same) > 2
    for key in same:
        np.testing.assert_array_equal(own[key], wanted[key])
    assert not any(TABLE in snapshot.values for snapshot in held.snapshots())


@rows("name", list(OPTIMIZERS))
def test_server_continues_from_its_snapshot_bit_by_bit(name):
    lost, undisturbed = (Cluster(*on_servers(OPTIMIZERS[name])) for _ in range(2))
    undisturbed.train(DATA)
    lost.train(DATA[:2])
    lost.restart()
    lost.train(DATA[2:])
    np.testing.assert_array_equal(table_of(lost), table_of(undisturbed))


def test_bad_tables_are_rejected(subtests):
    def table(*arguments):
        return lambda: mirror.ps.ServerTable(*arguments)

    for make, kind, names in [
        (table(3, len), TypeError, "shape"),
        (table((), len), TypeError, "shape"),
        (table((0, 4), len), ValueError, "shape"),
        (table((4, 4), 3), TypeError, "first_rows"),
    ]:
        with subtests.test(names=names), raises(kind, names=names):
            make()
    with raises(ValueError, names=TABLE, fix="sparse={"):
        model, optimizer = on_servers(optax.sgd(0.1))
        inside.require_tables({}, model, optimizer)
    with raises(ValueError, names=TABLE, values=["float32[20,4]", "float32[20,3]"]):
        model, _ = create(optax.sgd(0.1))
        model.embed.embedding = mirror.ps.ServerTable((40, 4), lambda a, b: np.zeros((b - a, 3)))
        Cluster(model, nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param))


def test_main_program_cannot_evaluate_or_save(tmp_path):
    def losses(model, batch):
        return model(batch["ids"])[:, 0]

    model, optimizer = on_servers(optax.sgd(0.1))
    trainer = mirror.Trainer(model, optimizer, losses, strategy=mirror.OneDeviceStrategy("/cpu:0"))
    why = ["mirror.ps.ServerTable", "strategy.read_rows"]
    with raises(ValueError, names=why, values="float32[40,4]"):
        trainer.evaluate(DATA)
    with raises(TypeError, names=["model.embed.embedding", *why]):
        trainer.save(tmp_path)
    with raises(TypeError, names=["model.embed.embedding", *why]):
        trainer.fit(DATA, callbacks=mirror.callbacks.Checkpoint(tmp_path), progress=False)


PROGRAM = """
import os, resource, signal
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
import mirror
from tests.support import inside
from tests.support.messages import raises

ROWS, WIDTH = 2_000_000, 32
BYTES = ROWS * WIDTH * 4

class Bag(nnx.Module):
    def __init__(self):
        self.table = mirror.ps.ServerTable((ROWS, WIDTH), first_rows)
        self.out = nnx.Linear(WIDTH, 2, rngs=nnx.Rngs(0))
    def __call__(self, ids):
        return self.out(self.table[...][ids].mean(1))

def first_rows(start, stop):
    return np.full((stop - start, WIDTH), 0.5, np.float32)

def losses(model, batch):
    logits = model(batch["ids"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])

class Kill(mirror.callbacks.Callback):
    def on_step(self, fit):
        if fit.position.step == 8:
            os.kill(inside.servers_and_workers(strategy)["servers"][1], signal.SIGKILL)

def trained(*callbacks):
    trainer = mirror.Trainer(Bag(), optax.adagrad(0.1), losses, strategy=strategy)
    trainer.fit(data, epochs=2, batch_size=8, shuffle=False, progress=False, callbacks=callbacks)
    kernel = np.asarray(trainer.model.out.kernel[...])
    return trainer, kernel, strategy.read_rows("table", data["ids"])

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10

if __name__ == "__main__":
    draw = np.random.default_rng(0)
    data = {"ids": draw.integers(0, ROWS, (48, 3)), "y": draw.integers(0, 2, 48)}
    with mirror.ps.ParameterServerStrategy(
        ps=2, workers=2, snapshot_every=3, sparse={"table": lambda batch: batch["ids"]}
    ) as strategy:
        with raises(ValueError, names="table"):
            strategy.read_rows("table", [0])
        before = peak()
        _, *undisturbed = trained()
        trainer, *disturbed = trained(Kill())
        for one, other in zip(undisturbed, disturbed):
            np.testing.assert_array_equal(one, other)
        assert (disturbed[1] != 0.5).any()
        assert strategy.report().lost_servers == 1
        grown = peak() - before
        assert grown < BYTES / 2, f"{grown >> 20} of {BYTES >> 20} MiB"
        with raises(ValueError, names="verify", fix="nnx.Param"):
            trainer.verify(data, batch_size=8)
        late = [{"validation_split": 0.5}, {"callbacks": mirror.callbacks.Checkpoint("ckpt")}]
        for options in late:  # an epoch would be lost
            with raises(TypeError, names="model.table", fix="strategy.read_rows"):
                trainer.fit(data, epochs=4, batch_size=8, progress=False, **options)
        assert trainer._position.step == 12
        os.kill(inside.servers_and_workers(strategy)["servers"][0], signal.SIGKILL)
        np.testing.assert_array_equal(strategy.read_rows("table", data["ids"]), disturbed[1])
        trainer.model.out.kernel[...] += 1  # the next step loads the objects, but not the table
        before = strategy.read_rows("table", data["ids"])
        # Both batches are padded for two workers.
        trainer.fit(data, epochs=3, batch_size=47, shuffle=False, progress=False)
        rows = strategy.read_rows("table", data["ids"])
        assert 0 < abs(rows - before).max() < 0.5
    with mirror.ps.ParameterServerStrategy(
        ps=1, workers=1, sparse={"table": lambda batch: batch["ids"]}
    ) as strategy:
        other = mirror.Trainer(trainer.model, optax.adagrad(0.1), losses, strategy=strategy)
        with raises(RuntimeError, names="table", fix="read_rows"):
            other.fit(data, batch_size=48, progress=False)
"""


@pytest.mark.slow
@pytest.mark.dev("ray")
def test_table_larger_than_the_main_program_trains_and_survives_a_lost_server(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    code = f"import runpy; runpy.run_path({str(program)!r}, run_name='__main__')"
    fresh.run(code, environment=fast.ENVIRONMENT)
