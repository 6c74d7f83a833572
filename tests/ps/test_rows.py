"""Tables: touched rows alone, as with the dense gradient."""

import itertools

import numpy as np
import optax
import pytest

from mirror._src.ps.placement import FixedShardsPartitioner, place
from mirror._src.ps.separable import place_separably, require_separable, structs
from mirror._src.ps.sparse import bucket, split_ids
from tests.ps.servers import (
    Servers,
    leaves_of,
    random_leaves,
    trained_by_optax,
)
from tests.support.compilations import assert_nothing_compiled, compilations
from tests.support.messages import raises
from tests.support.tables import mostly_slow

TABLE = "embed.table"
SHAPES = {TABLE: (37, 4), "other.table": (11, 3), "dense.kernel": (4, 6)}
TABLES = (TABLE, "other.table")
IDS = [
    {TABLE: [3, 3, 36, 0], "other.table": [10]},
    {TABLE: [5], "other.table": []},
    {TABLE: [3, 18, 19, 20, 21, 22, 1, 1, 1, 2], "other.table": [0, 10, 0]},
]
EXACT = {
    "sgd": optax.sgd(0.1),
    "adagrad": optax.adagrad(0.1),
    "clip": optax.chain(optax.clip(0.1), optax.sgd(0.1)),
}
LAZY = {
    "adam": optax.adam(1e-2),
    "momentum": optax.sgd(0.1, momentum=0.9),
    "rmsprop": optax.rmsprop(0.1),
    "decay": optax.chain(optax.add_decayed_weights(0.1), optax.sgd(0.1)),
}
REFUSED = {
    "lamb": optax.lamb(0.1),
    "adafactor": optax.adafactor(0.1, min_dim_size_to_factor=2),
    "multi_steps": optax.MultiSteps(optax.sgd(0.1), 2),
    "apply_every": optax.chain(optax.apply_every(2), optax.sgd(0.1)),
    "norm of values": optax.stateless_with_tree_map(lambda g, value: g / (value**2).sum()),
}


def sparse_gradients(seed, ids):
    """Gradients that are zero in the rows that are not in `ids`."""
    gradients = random_leaves(seed, SHAPES)
    for table in TABLES:
        gradients[table][np.setdiff1d(np.arange(SHAPES[table][0]), ids[table])] = 0
    return gradients


def arrays(ids):
    return {table: np.asarray(numbers, np.int32) for table, numbers in ids.items()}


def split_evenly(ids, rows):
    """Ids that are repeated share the gradient of their row."""
    unique, counts = np.unique(ids, return_counts=True)
    share = dict(zip(unique.tolist(), counts.tolist(), strict=True))
    return np.stack([rows[i] / share[i] for i in ids.tolist()]) if len(ids) else rows[:0]


@pytest.mark.parametrize("names", mostly_slow(EXACT, "adagrad"))
def test_exact_optimizers_compute_what_a_dense_gradient_computes(names, subtests):
    for name in names:
        with subtests.test(msg=name):
            num_ps = 3
            tx, values = EXACT[name], random_leaves(0, SHAPES)
            servers = Servers(tx, values, num_ps, tables=TABLES)
            gradients = [sparse_gradients(seed, ids) for seed, ids in enumerate(IDS, 1)]
            for each, ids in zip(gradients, IDS, strict=True):
                servers.step(each, ids=arrays(ids))
            whole, _ = trained_by_optax(tx, values, gradients)
            got = servers.values()
            for leaf, value in whole.items():
                np.testing.assert_allclose(got[leaf], value, rtol=1e-6, atol=1e-6, err_msg=leaf)
            for table in TABLES:
                untouched = np.setdiff1d(
                    np.arange(len(values[table])), np.concatenate([i[table] for i in IDS])
                )
                np.testing.assert_array_equal(got[table][untouched], values[table][untouched])


@pytest.mark.parametrize("names", mostly_slow(LAZY, "decay"))
def test_lazy_optimizers_leave_untouched_rows_alone(names, subtests):
    """Values and state; a row that every step touches trains as with a dense gradient."""
    for name in names:
        with subtests.test(msg=name):
            tx, values = LAZY[name], random_leaves(0, SHAPES)
            ids = {TABLE: [3, 4, 20], "other.table": [2]}
            servers = Servers(tx, values, 2, tables=TABLES)
            gradients = [sparse_gradients(seed, ids) for seed in range(1, 4)]
            for each in gradients:
                servers.step(each, ids=arrays(ids))
            whole, _ = trained_by_optax(tx, values, gradients)
            got = servers.values()
            for table in TABLES:
                touched = ids[table]
                np.testing.assert_allclose(
                    got[table][touched], whole[table][touched], rtol=1e-5, atol=1e-6
                )
                untouched = np.setdiff1d(np.arange(len(values[table])), touched)
                np.testing.assert_array_equal(got[table][untouched], values[table][untouched])
            np.testing.assert_allclose(
                got["dense.kernel"], whole["dense.kernel"], rtol=1e-5, atol=1e-6
            )


def test_repeated_ids_are_summed(subtests):
    """In one part, and across the parts of a step, whose mean is applied."""
    for is_sync in [True, False]:
        with subtests.test(is_sync=is_sync):
            tx, values = optax.adagrad(0.1), random_leaves(0, SHAPES)
            gradients, ids = sparse_gradients(1, IDS[2]), arrays(IDS[2])
            once = Servers(tx, values, 2, tables=TABLES, is_sync=is_sync)
            once.step(gradients, ids=ids)
            repeated = Servers(tx, values, 2, tables=TABLES, is_sync=is_sync)
            parts = (0, 1) if is_sync else (0,)
            for part in parts:
                pushes = repeated.pushes(gradients, ids=ids, part=part)
                for server, (store, push) in enumerate(zip(repeated.stores, pushes, strict=True)):
                    rows = {}
                    for table in push.rows:
                        own = split_ids(repeated.placement, {table: ids[table]})[server][table]
                        here = ids[table][np.isin(ids[table], own)]
                        rows[table] = here, split_evenly(here, gradients[table])
                    store.push(push._replace(rows=rows))
            if is_sync:
                for store in repeated.stores:
                    store.commit(0, 0, 0, 2)
            for leaf, value in once.values().items():
                np.testing.assert_allclose(repeated.values()[leaf], value, rtol=1e-6, atol=1e-6)


def test_rows_are_pulled():
    values = random_leaves(0, SHAPES)
    servers = Servers(optax.sgd(0.1), values, 3, tables=TABLES)
    ids = {TABLE: np.array([[36, 0], [20, 20]]), "other.table": np.array([], np.int64)}
    by_server = split_ids(servers.placement, ids)
    pulled = [s.pull(0, 0, None, own) for s, own in zip(servers.stores, by_server, strict=True)]
    found = servers.placement.join([each.rows for each in pulled])[TABLE]
    np.testing.assert_array_equal(found, values[TABLE][[0, 20, 36]])
    empty = servers.placement.join([each.rows for each in pulled])["other.table"]
    assert empty.shape == (0, 3)
    dense = [servers.layout(i).unpack(each.trained) for i, each in enumerate(pulled)]
    assert all(TABLE not in each for each in dense)


def test_buckets_are_powers_of_two(subtests):
    for count, size in [(0, 8), (1, 8), (8, 8), (9, 16), (16, 16), (17, 32)]:
        with subtests.test(count=count, size=size):
            assert bucket(count) == size


def test_numbers_of_rows_in_one_bucket_compile_once(caplog):
    values = random_leaves(0, SHAPES)
    servers = Servers(optax.adagrad(0.1), values, 1, tables=TABLES)
    (store,) = servers.stores

    def step(count):
        ids = {TABLE: np.arange(count, dtype=np.int32)}
        store.pull(0, servers.version, None, ids)
        servers.step(random_leaves(1, SHAPES), ids=ids)

    step(3)
    with compilations(caplog) as events:
        for count in (1, 8, 5):
            step(count)
    assert_nothing_compiled(events)


def test_ids_out_of_range_are_refused():
    values = random_leaves(0, SHAPES)
    servers = Servers(optax.sgd(0.1), values, 2, tables=TABLES)
    for wrong in (-1, 37):
        with raises(ValueError, names=f"'{TABLE}'", values=(wrong, 37)):
            split_ids(servers.placement, {TABLE: np.array([0, wrong])})
    with raises(TypeError, names=f"'{TABLE}'", values="float32"):
        split_ids(servers.placement, {TABLE: np.zeros(2, np.float32)})


@pytest.mark.parametrize("names", mostly_slow(REFUSED, "apply_every", "norm of values"))
def test_optimizers_that_need_other_rows_or_later_steps_are_refused(names, subtests):
    for name, num_ps in itertools.product(names, [1, 2]):
        with subtests.test(name=name, num_ps=num_ps):
            leaves = leaves_of(random_leaves(0, SHAPES))
            with raises(ValueError, names=("tx", f"'{TABLE}'"), fix="optax.adagrad"):
                place_separably(
                    REFUSED[name], leaves, num_ps, FixedShardsPartitioner(2), tables=TABLES
                )


def test_clipping_by_the_global_norm_is_exact_for_tables_on_one_server():
    """A row without a gradient adds nothing to the norm."""
    tx = optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(0.1))
    values = random_leaves(0, SHAPES)
    placement = place(leaves_of(values), 1, None, tables=TABLES)
    assert require_separable(tx, structs(values), placement, TABLES) == frozenset()
    servers = Servers(tx, values, placement=placement, tables=TABLES)
    gradients = sparse_gradients(1, IDS[0])
    servers.step(gradients, ids=arrays(IDS[0]))
    whole, _ = trained_by_optax(tx, values, [gradients])
    for leaf, value in whole.items():
        np.testing.assert_allclose(servers.values()[leaf], value, rtol=1e-6, atol=1e-6)
