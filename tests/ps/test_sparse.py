"""Sparse tables on workers: what one device with dense gradients computes, from few rows."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import mirror
from mirror._src.ps.objects import TrainingObjects
from mirror._src.ps.sparse import SparseTables
from tests.ps.digits import arrays, largest_difference
from tests.ps.local_tables import (
    TABLE,
    Cluster,
    batches,
    create,
    losses,
    on_one_device,
    step_of,
    train_step,
)
from tests.support.messages import raises
from tests.support.tables import mostly_nightly, mostly_slow

DATA = batches(4)
TOUCHED = np.unique(np.concatenate([batch["ids"].ravel() for batch in DATA]))
OPTIMIZERS = {"sgd": optax.sgd(0.5), "adagrad": optax.adagrad(0.1)}


LAYOUTS = list(itertools.product([1, 2, 3], [1, 2, 3], OPTIMIZERS))


@pytest.mark.parametrize("rows", mostly_nightly(LAYOUTS, (2, 3, "adagrad")))
def test_equals_one_device_with_dense_gradients(rows, subtests):
    for workers, servers, tx in rows:
        with subtests.test(workers=workers, servers=servers, tx=tx):
            model, optimizer = create(OPTIMIZERS[tx])
            before = np.array(model.embed.embedding[...])
            Cluster(model, optimizer, workers, servers).train(DATA)
            reference = create(OPTIMIZERS[tx])
            on_one_device(*reference, DATA)
            assert largest_difference(arrays(model, optimizer), arrays(*reference)) <= 1e-6
            after = np.asarray(model.embed.embedding[...])
            untouched = np.setdiff1d(np.arange(len(after)), TOUCHED)
            assert len(untouched)
            assert np.array_equal(after[untouched], before[untouched])
            assert not np.any(np.all(after[TOUCHED] == before[TOUCHED], axis=1))


@pytest.mark.slow
def test_all_devices_of_a_worker_touch_the_rows_of_its_part():
    model, optimizer = create(OPTIMIZERS["adagrad"])
    Cluster(model, optimizer, 2, 2, devices=2).train(DATA)
    reference = create(OPTIMIZERS["adagrad"])
    on_one_device(*reference, DATA)
    assert largest_difference(arrays(model, optimizer), arrays(*reference)) <= 1e-6


@pytest.mark.slow
def test_adam_is_lazy():
    rate, b1, b2, eps = 0.01, 0.9, 0.999, 1e-8
    model, optimizer = create(optax.adam(rate))
    reference = create(optax.adam(rate))[0]
    Cluster(model, optimizer).train(DATA)
    others = optax.adam(rate)
    state = others.init(nnx.state(reference.out))
    table = np.array(reference.embed.embedding[...])
    m, v = np.zeros_like(table), np.zeros_like(table)
    for count, batch in enumerate(DATA, 1):
        grads = nnx.grad(lambda model, b=batch: losses(model, b).mean())(reference)
        updates, state = others.update(grads["out"], state)
        nnx.update(reference.out, optax.apply_updates(nnx.state(reference.out), updates))
        rows, grad = np.unique(batch["ids"]), np.asarray(grads["embed"]["embedding"][...])
        m[rows] = b1 * m[rows] + (1 - b1) * grad[rows]
        v[rows] = b2 * v[rows] + (1 - b2) * grad[rows] ** 2
        m_hat, v_hat = m[rows] / (1 - b1**count), v[rows] / (1 - b2**count)
        table[rows] -= rate * m_hat / (np.sqrt(v_hat) + eps)
        reference.embed.embedding[...] = jnp.asarray(table)
    assert largest_difference(arrays(model), arrays(reference)) <= 1e-6
    moments = optimizer.opt_state[0].mu["embed"]["embedding"][...]
    np.testing.assert_allclose(moments, m, atol=1e-6)


def test_bytes_do_not_depend_on_the_size_of_the_table():
    moved = []
    for num_rows in (40, 4000):
        model, optimizer = create(OPTIMIZERS["adagrad"], num_rows)
        cluster = Cluster(model, optimizer)
        for batch in DATA:
            cluster.step(batch)
        moved.append(cluster.bytes_moved())
        held = jax.tree.leaves(nnx.state(cluster.worker._programs[0, 1]._model))
        assert sum(leaf.nbytes for leaf in held) < 100  # the worker keeps no table either
    assert moved[0] == moved[1]
    parts = [part for batch in DATA for part in np.split(batch["ids"], 2)]
    row = 4 * 4
    ids, rows = 4, sum(len(np.unique(part)) for part in parts)
    dense = 4 * (4 * 2 + 2)
    assert moved[0] == rows * (row + row + ids) + len(parts) * 2 * dense


def test_steps_with_other_ids_do_not_compile_again():
    cluster = Cluster(*create(OPTIMIZERS["sgd"]))
    for batch in batches(6, seed=3):
        cluster.step(batch)
    # 18 ids of a part, of which 9 to 15 differ.
    assert len(cluster.worker._programs[0, 1]._compiled) == 1


def table_of(model):
    return model.embed.embedding[...]


def decayed(model, grads):
    grads["embed"]["embedding"][...] += 0.1 * table_of(model)
    return grads


def tied(model, batch):
    logits = model.embed.attend(model.embed(batch["ids"]).mean(1))
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["ids"][:, 0])


READS_OF_OTHER_ROWS = {
    "other ids": step_of(lambda model, b: losses(model, {**b, "ids": (b["ids"] + 1) % 40})),
    "penalty": step_of(lambda model, b: losses(model, b) + (table_of(model) ** 2).sum()),
    "linear penalty": step_of(lambda model, b: losses(model, b) + table_of(model).sum()),
    "decay in the step": step_of(losses, decayed),
    "tied softmax": step_of(tied),
}


@pytest.mark.parametrize("cases", mostly_slow(READS_OF_OTHER_ROWS, "penalty", "other ids"))
def test_gradient_of_other_rows_is_not_dropped(cases, subtests):
    for case in cases:
        with subtests.test(case=case):
            model, optimizer = create(OPTIMIZERS["sgd"])
            cluster = Cluster(model, optimizer, step=READS_OF_OTHER_ROWS[case])
            with raises(ValueError, names=(TABLE, f"sparse[{TABLE!r}]"), values="40"):
                cluster.step(DATA[0])


def test_reading_other_rows_without_gradient_is_nan():
    def loss_fn(model, batch):
        return losses(model, batch) + jax.lax.stop_gradient(table_of(model)).mean()

    model, optimizer = create(OPTIMIZERS["sgd"])
    cluster = Cluster(model, optimizer, step=step_of(loss_fn))
    assert np.isnan(cluster.part((DATA[0],)).value)


def test_gradients_without_all_reduce_are_named():
    def step(model, optimizer, batch):
        optimizer.update(model, nnx.grad(lambda m: losses(m, batch).mean())(model))

    model, optimizer = create(OPTIMIZERS["sgd"])
    reply = Cluster(model, optimizer, step=step, devices=2).part((DATA[0],))
    assert f"optimizer.gradients.{TABLE}" in reply.text


def rows_of(ids):
    return {TABLE: lambda batch: ids}


WRONG_IDS = {
    "negative": (rows_of([3, -1]), ValueError, {"names": TABLE, "values": (-1, 40)}),
    "too large": (rows_of(np.uint64([3, 40])), ValueError, {"names": TABLE, "values": (40, 40)}),
    "floats": (rows_of(np.array([1.0])), TypeError, {"names": TABLE, "values": "float64"}),
    "bools": (rows_of(np.array([True])), TypeError, {"names": TABLE, "values": "bool"}),
    "nothing": (rows_of(None), TypeError, {"names": TABLE, "values": "object"}),
    "other key": ({TABLE: lambda batch: batch["id"]}, KeyError, {"values": "id"}),
}


def test_wrong_ids_are_rejected(subtests):
    for case in WRONG_IDS:
        with subtests.test(case=case):
            sparse, kind, texts = WRONG_IDS[case]
            cluster = Cluster(*create(OPTIMIZERS["sgd"]), sparse=sparse)
            with raises(kind, **texts):
                cluster.step(DATA[0])
            reply = cluster.part((DATA[0],))
            assert case != "other key" or f"sparse[{TABLE!r}]" in reply.traceback


def test_part_without_ids_moves_no_rows():
    def step(model, optimizer, batch):
        grads = nnx.grad(lambda m: m.out(batch["x"]).mean())(model)
        optimizer.update(model, mirror_mean(grads))

    model, optimizer = create(OPTIMIZERS["adagrad"])
    before = np.array(table_of(model))
    cluster = Cluster(model, optimizer, step=step, sparse=rows_of([]))
    cluster.train([{"x": np.ones((4, 4), np.float32), "y": np.zeros(4)}])
    assert np.array_equal(before, table_of(model))
    assert int(optimizer.step[...]) == 1


def mirror_mean(grads):
    return mirror.all_reduce("mean", grads)


def test_functions_receive_the_arguments_without_model_optimizer_and_mask():
    received = []

    def ids(*args, **kwargs):
        received.append((args, kwargs))
        return args[0]["ids"]

    def step(model, optimizer, batch, scale):
        return train_step(model, optimizer, batch)

    model, optimizer = create(OPTIMIZERS["sgd"])
    cluster = Cluster(model, optimizer, step=step, sparse={TABLE: ids})
    cluster.part((DATA[0], 2.0))
    cluster.part((DATA[0], 2.0), 1, weight_of=lambda value: 1.0)
    assert [(len(args), kwargs) for args, kwargs in received] == [(2, {}), (1, {})]
    assert received[0][0][1] == 2.0
    assert isinstance(received[0][0][0]["ids"], np.ndarray)


BAD_ARGUMENTS = [
    ([TABLE], TypeError, {"names": "sparse"}),
    ({3: len}, TypeError, {"names": "sparse", "values": 3}),
    ({TABLE: "ids"}, TypeError, {"names": f"sparse[{TABLE!r}]", "values": "'ids'"}),
]


def test_bad_arguments_are_rejected(subtests):
    for sparse, kind, texts in BAD_ARGUMENTS:
        with subtests.test(texts=texts), raises(kind, **texts):
            SparseTables(sparse)


class Odd(nnx.Module):
    def __init__(self):
        self.embed = nnx.Embed(7, 2, rngs=nnx.Rngs(0))
        self.scale = nnx.Param(jnp.ones(()))
        self.empty = nnx.Param(jnp.ones((0, 2)))
        self.mean = nnx.BatchStat(jnp.ones(3))
        self.count = nnx.Variable(jnp.ones(3, jnp.int32))


def test_names_must_be_trained_variables_with_rows(subtests):
    for name, value, fix in [
        ("embed.embeddings", "embed.embedding", "Did you mean 'embed.embedding'?"),
        ("model.embed.embedding", "embed.embedding", "Did you mean 'embed.embedding'?"),
        ("nothing", "scale", ()),
        ("scale", "float32[]", "Omit it"),
        ("empty", "float32[0, 2]", "Omit it"),
        ("mean", "float32[3]", "Omit it"),
        ("count", "'count'", ()),
    ]:
        with subtests.test(name=name, value=value):
            model = Odd()
            leaves = TrainingObjects(
                model, nnx.Optimizer(model, optax.sgd(1), wrt=nnx.Param)
            ).leaves
            with raises(ValueError, names=name, values=value, fix=fix):
                SparseTables({name: len}).require_in(leaves)
