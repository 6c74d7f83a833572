"""Checks of values, placing and refusals in one process of several: prints the passed ones."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.experimental import multihost_utils

import mirror
from tests.support.inside import name_of
from tests.support.messages import refused

strategy = mirror.MultiWorkerMirroredStrategy(replicas_per_device=int(sys.argv[1]))
n = strategy.num_replicas_in_sync
mine = strategy.local_replica_ids
rows = np.arange(n * 2, dtype=np.float32).reshape(n, 2)
CHECKS = []


def check(fn):
    CHECKS.append(fn)
    return fn


def exchange(*args, **kwargs):
    raise AssertionError("JAX compares host values across processes")


multihost_utils.assert_equal = multihost_utils.process_allgather = exchange


@check
def nothing_is_compared_by_jax():
    """`jax.device_put` to devices of several processes compares, so mirror must not use it."""
    refused(AssertionError, lambda: jax.device_put(np.ones(3), strategy._replicas.mirrored))


@check
def members():
    me, count = mirror.distributed.process_index(), mirror.distributed.process_count()
    assert me == jax.process_index()
    assert strategy.num_workers == count == jax.process_count()
    assert strategy.is_chief == mirror.distributed.is_chief() == (me == 0)
    assert strategy.cluster_resolver.task_id == me
    assert [d.process_index for d in strategy.devices] == sorted(
        d.process_index for d in strategy.devices
    )
    assert set(strategy.local_devices) == set(jax.local_devices())
    assert len(mine) * count == n
    assert all(strategy.devices[i] in jax.local_devices() for i in mine)


@check
def names():
    there = [d for d in strategy.devices if d.process_index != jax.process_index()][-1]
    expected = f"/job:worker/replica:0/task:{there.process_index}/device:CPU:"
    assert name_of(there).startswith(expected), name_of(there)
    assert len(name_of(there)) == len(expected) + 1, "the index counts the process's devices"
    assert expected in repr(strategy)
    assert expected in str(strategy)
    refused(ValueError, lambda: mirror.device(name_of(there)), "another process")


class Halves(mirror.CrossDeviceOps):
    def reduce_stacked(self, op, stacked):
        halves = stacked.astype(jnp.float16).astype(stacked.dtype)
        return getattr(halves, op.value)(axis=0)


@check
def stacked_ops():
    compressed = mirror.MultiWorkerMirroredStrategy(
        cross_device_ops=Halves(), replicas_per_device=int(sys.argv[1])
    )
    value = compressed.distribute_values_from_function(lambda _: np.float32(2049))
    assert float(compressed.reduce("sum", value)) == n * 2048
    assert float(strategy.reduce("sum", value)) == n * 2049


@check
def mirrored_arguments():
    def step(x, y):
        return x * 2, y + 1

    local = jax.device_put(jnp.ones(3), jax.local_devices()[-1])
    for value in (
        2.0,
        3,
        True,
        np.float32(2),
        np.arange(4),
        rows,
        local,
        jnp.asarray(2.0),
        jnp.full(4, 2.0),
    ):
        doubled, more = strategy.run(step, (mirrored(value), value))
        assert (np.asarray(doubled) == np.asarray(value) * 2).all()
        one = mirror.OneDeviceStrategy("/cpu:0").run(lambda y: y + 1, (value,))
        assert (doubled.is_fully_replicated, more.dtype) == (True, one.dtype)
        assert jax.typeof(more).weak_type == jax.typeof(one).weak_type, value


def mirrored(value):
    with strategy.scope():
        return jnp.asarray(value)


@check
def keys():
    bits = lambda key: jax.random.key_data(key)  # noqa: E731
    with strategy.scope():
        key = jax.random.key(3)
    for each in (key, jax.random.key(3)):
        assert (np.asarray(strategy.run(bits, (each,))) == np.asarray(bits(key))).all()
    local = jax.random.split(jax.random.key(0), n)
    own = strategy.run(bits, (mirror.PerReplica.from_stacked(local),))
    expected = np.asarray(bits(local))
    for i, value in zip(mine, own.values, strict=True):
        assert (np.asarray(value) == expected[i]).all()


@check
def donated_arguments_survive():
    start = jnp.zeros(4)
    w = mirrored(start)
    add = lambda w, x: w + mirror.all_reduce("sum", x.sum())  # noqa: E731
    for _ in range(3):
        w = strategy.run(add, (w, per_replica()), donate_argnums=0)
    assert (np.asarray(w) == 3 * rows.sum()).all()
    assert (np.asarray(start) == 0).all()
    host = np.zeros(4, np.float32)
    strategy.run(add, (host, per_replica()), donate_argnums=0)
    assert (host == 0).all()


def per_replica():
    return mirror.PerReplica.from_stacked(rows)


@check
def per_replica_values_are_local():
    x = strategy.run(lambda x: x * 2, (per_replica(),))
    assert x.num_replicas == n
    assert x.stacked.shape == (n, 2)
    assert not x.stacked.is_fully_addressable
    assert [v.tolist() for v in x.values] == (rows[list(mine)] * 2).tolist()
    local = [v.tolist() for v in strategy.local_results(x)]
    assert local == [v.tolist() for v in x.values]
    assert f"{len(mine)} of {n} here" in repr(x), repr(x)
    assert "[0." in repr(x) or mine[0] > 0
    refused(ValueError, lambda: np.asarray(x), "strategy.gather(x)", "x.values")
    refused(ValueError, lambda: strategy.run(lambda y: y, (x.stacked,)), "strategy.gather(x)")
    again = strategy.run(lambda x: x + 0, (x,))
    assert [v.tolist() for v in again.values] == local
    assert len(strategy.local_results(mirrored(1.0))) == len(mine)
    refused(
        NotImplementedError,
        lambda: mirror.ReductionToOneDevice().reduce("sum", x),
        "strategy.reduce",
    )


@check
def collectives():
    x = per_replica()
    assert strategy.reduce("sum", x, axis=0) == rows.sum()
    assert (np.asarray(strategy.reduce("mean", x)) == rows.mean(0)).all()
    assert (np.asarray(strategy.reduce("max", x)) == rows.max(0)).all()
    assert (np.asarray(strategy.gather(x)) == rows.reshape(-1)).all()
    done = strategy.run(lambda x: x, (x,))
    assert (np.asarray(mirror.AllReduce().reduce("sum", done)) == rows.sum(0)).all()
    values = strategy.distribute_values_from_function(
        lambda c: np.float32(c.replica_id_in_sync_group)
    )
    assert (
        np.asarray(strategy.gather(strategy.run(lambda v: v[None], (values,)))) == range(n)
    ).all()
    ids = strategy.run(lambda: mirror.get_replica_context().replica_id_in_sync_group)
    assert [int(v) for v in ids.values] == list(mine)
    strategy.check_mirrored({"w": mirrored(np.ones(3))})


@check
def datasets():
    batches = [np.arange(i * 10, i * 10 + 2 * n + i, dtype=np.float32) for i in range(2)]
    batches = sorted(batches, key=len, reverse=True)
    total = 0.0
    for batch, mask in strategy.distribute_dataset(batches, remainder="pad"):
        total += float(strategy.reduce("sum", batch, axis=0, where=mask))
    assert total == sum(b.sum() for b in batches)
    (batch,) = strategy.distribute_dataset([np.arange(2 * n)])
    assert [v.tolist() for v in batch.values] == [[2 * i, 2 * i + 1] for i in mine]


@check
def on_read_variables():
    for aggregation, expected in (
        ("sum", rows.sum()),
        ("mean", rows.sum(1).mean()),
        ("only_first_replica", rows[0].sum()),
    ):
        with strategy.scope():
            v = mirror.Variable(0.0, synchronization="on_read", aggregation=aggregation)
        strategy.run(assign_sum, (v, per_replica()))
        assert "of" in repr(v)
        assert float(v[...]) == expected, (aggregation, float(v[...]), expected)
        v.assign(5.0)
        assert float(v[...]) == 5.0, aggregation
    with strategy.scope():
        count = mirror.Variable(np.int32(0), synchronization="on_read", aggregation="sum")
    strategy.run(assign_sum, (count, np.int32(7)))
    assert int(count[...]) == 7 * n
    strategy.run(assign_sum, (count, np.int32(2**30)))
    with strategy.scope():
        refused(OverflowError, count.get_value, "int32")


def assign_sum(v, x):
    v.assign(x.sum())


@check
def mirrored_variables():
    """Each process assigns to its own copies, also if only one of them does."""
    with strategy.scope():
        v = mirror.Variable(np.arange(3, dtype=np.float32))
    step = lambda x: x * 2  # noqa: E731
    expected = np.arange(3) * 2.0
    assert (np.asarray(strategy.run(step, (v[...],))) == expected).all()
    v.assign(np.float32([5, 6, 7]))
    v.assign_add(jnp.ones(3))
    v.assign_sub(v[...] * 0)
    assert v[...].sharding.is_equivalent_to(strategy._replicas.mirrored, 1)
    assert np.asarray(v[...]).tolist() == [6, 7, 8]
    strategy.check_mirrored(v[...])
    assert np.asarray(strategy.run(step, (v[...],))).tolist() == [12, 14, 16]
    if strategy.is_chief:
        v.assign(np.zeros(3, np.float32))  # the others do not wait for it
        assert np.asarray(v[...]).tolist() == [0, 0, 0]


@check
def a_flipped_bit_is_named_by_all():
    """On the second device of the last process; every other copy is the same."""
    if len(jax.local_devices()) == 1:  # the ledger compares first copies, and ends the job
        return
    tree = {"layer": [mirrored(np.ones(5)), mirrored(np.arange(4))], "b": mirrored(np.ones(2))}
    strategy.check_mirrored(tree)
    whole = tree["layer"][1]
    copies = [shard.data for shard in whole.addressable_shards]
    if mirror.distributed.process_index() == mirror.distributed.process_count() - 1:
        bits = np.array(copies[-1])
        bits[2] ^= 1
        copies[-1] = jax.device_put(bits, copies[-1].device)
    tree["layer"][1] = jax.make_array_from_single_device_arrays((4,), whole.sharding, copies)
    refused(
        mirror.ReplicaDivergenceError, lambda: strategy.check_mirrored(tree), "layer'][1]", "1 of 3"
    )
    strategy.check_mirrored(tree["b"])


@check
def no_reduce_scatter_over_gloo():
    """Its large results are wrong from time to time (jax#40830)."""
    axis, size = mirror.REPLICA_AXIS, 2**12
    halves = [list(range(n // 2)), list(range(n // 2, n))]

    def step(x):
        scatter = jax.lax.psum_scatter
        parts = scatter(x.reshape(n, -1), axis), scatter(x, axis, tiled=True)
        return *parts, scatter(x, axis, axis_index_groups=halves, tiled=True)

    values = np.random.default_rng(0).integers(0, 99, (n, n * size)).astype(np.float32)
    x = mirror.PerReplica.from_stacked(values)
    text = strategy._runner.lower(step, (x,), {}).as_text()
    assert "all_reduce" in text
    assert "reduce_scatter" not in text
    one, tiled, grouped = strategy.run(step, (x,))
    total = values.sum(0)
    for k, i in enumerate(mine):
        part = total[i * size : (i + 1) * size]
        assert (np.asarray(one.values[k]) == part).all()
        assert (np.asarray(tiled.values[k]) == part).all()
        (group,) = [group for group in halves if i in group]
        place = group.index(i) * 2 * size
        part = values[group].sum(0)[place : place + 2 * size]
        assert (np.asarray(grouped.values[k]) == part).all()
    local = mirror.MirroredStrategy(jax.local_devices(), shard="optimizer")
    if len(local.devices) > 1:
        assert local.shard == "none"
        rows = mirror.PerReplica.from_stacked(values[: len(local.devices)])
        assert "reduce_scatter" not in local._runner.lower(halved, (rows,), {}).as_text()


def halved(x):
    return jax.lax.psum_scatter(x, mirror.REPLICA_AXIS, tiled=True)


@check
def refusals():
    unequal = mirror.PerReplica([np.zeros(i + 1, np.float32) for i in range(n)])
    refused(ValueError, lambda: strategy.run(lambda x: x, (unequal,)), "remainder='pad'")
    assert (np.asarray(strategy.gather(unequal)) == np.zeros(n * (n + 1) // 2)).all()
    assert strategy.reduce("sum", unequal, axis=0) == 0
    if len(mine) > 1:
        refused(
            NotImplementedError,
            lambda: strategy.distribute_values_from_function(
                lambda context: np.zeros(context.replica_id_in_sync_group + 1)
            ),
            "remainder='pad'",
        )
    for ops in (mirror.ReductionToOneDevice(), OnHost()):
        refused(
            NotImplementedError,
            lambda: mirror.MultiWorkerMirroredStrategy(cross_device_ops=ops),
            type(ops).__name__,
            "cross_device_ops",
        )


class OnHost(mirror.CrossDeviceOps):
    def reduce_implementation(self, op, values):
        return sum(values)


class Spread:
    """The standard deviation of the errors, as libraries define metrics."""

    def __init__(self, errors):
        self.errors = errors

    def merge(self, other):
        return Spread(np.concatenate([self.errors, other.errors]))

    def compute(self):
        assert len(self.errors) == len(ARRAYS["x"]), "not each example once"
        return np.std(self.errors)


def loss_fn(model, batch):
    errors = optax.squared_error(model(batch["x"]), batch["y"])[:, 0]
    metrics = {"spread": Spread, "number": np.std}
    inputs = {"spread": "errors", "number": "a"}
    return errors, {n: mirror.Metric(m, **{inputs[n]: errors}) for n, m in metrics.items()}


ARRAYS = {
    "x": np.random.default_rng(0).normal(size=(22, 3)).astype(np.float32),
    "y": np.random.default_rng(1).normal(size=(22, 1)).astype(np.float32),
}


def trained(strategy):
    with strategy.scope():
        model = nnx.Sequential(
            nnx.Linear(3, 4, rngs=nnx.Rngs(0)), nnx.Linear(4, 1, rngs=nnx.Rngs(1))
        )
        trainer = mirror.Trainer(model, optax.adam(0.05), loss_fn)
    trainer.fit(ARRAYS, epochs=2, batch_size=8, progress=False)
    return trainer


@check
def trainer():
    many, one = trained(strategy), trained(mirror.OneDeviceStrategy("/cpu:0"))
    strategy.check_mirrored((many.model, many.optimizer))
    for a, b in zip(*(jax.tree.leaves(nnx.state(t.model)) for t in (many, one)), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-5, atol=1e-6)
    a, b = (t.evaluate(ARRAYS, batch_size=8) for t in (many, one))
    assert a.keys() == b.keys() == {"loss", "spread", "number"}
    assert all(abs(a[name] - b[name]) < 1e-5 for name in a)
    predict = lambda model, batch: model(batch["x"])  # noqa: E731
    a, b = (t.predict(ARRAYS, predict, batch_size=8) for t in (many, one))
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    assert many.verify(ARRAYS, batch_size=8).largest < 1e-5


def prints(model, batch):
    jax.debug.print("{}", batch["x"].sum())
    return model(batch["x"])


def forward(model, batch):
    return model(batch["x"])


@check
def exports_that_fail_do_not_let_the_others_wait():
    trainer = trained(strategy)
    for path, fn, error in (("model.jax", prints, ValueError), ("/proc/no/m", forward, OSError)):
        if strategy.is_chief:
            refused(error, lambda: trainer.export(path, ARRAYS, fn))
        else:
            trainer.export(path, ARRAYS, fn)


for each in CHECKS:
    if len(sys.argv) > 2 and each.__name__ not in sys.argv[2:]:
        continue
    each()
    print(f"passed {each.__name__}", flush=True)
