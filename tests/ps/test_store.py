"""One server's state: exactly once, the order of parts, snapshots."""

import itertools
import pickle

import jax
import numpy as np
import optax
import pytest

from mirror._src.ps.messages import Definition, Push, Rejected, ServerSnapshot
from mirror._src.ps.objects import by_path, flatten, nest
from mirror._src.ps.placement import Slice
from mirror._src.ps.store import Numbers, Store
from tests.ps.servers import (
    SHAPES,
    Servers,
    assert_equal_trees,
    random_leaves,
    trained_by_optax,
)
from tests.support.compilations import assert_nothing_compiled, compilations
from tests.support.messages import raises
from tests.support.tables import mostly_slow

ADAM = optax.adam(1e-2)
MOVING = {"norm.mean": (6,), "norm.count": ()}
SLICES = (
    Slice("w", 0, 3, (3, 2), "float32", "trained"),
    Slice("mean", 0, 2, (2,), "float32", "moving"),
)
VALUES = {
    "w": np.arange(6, dtype=np.float32).reshape(3, 2),
    "mean": np.array([1, 2], np.float32),
}


def make_store(tx=ADAM, is_sync=True, incarnation=0, slices=SLICES):
    store = Store()
    store.load(Definition(slices, tx, is_sync), ServerSnapshot(VALUES), incarnation)
    return store


def push_of(gradient, *, part=0, task=0, based_on=0, weight=1.0, change=0.0, incarnation=0):
    gradients = (np.full(6, gradient, np.float32),)
    changes = (np.full(2, change, np.float32),)
    return Push(incarnation, task, part, based_on, weight, gradients, changes, result="sums")


def w_of(store):
    return store.snapshot().values["w"]


def contents(store):
    """All that a store knows, bit for bit."""
    leaves, treedef = jax.tree.flatten(tuple(store.snapshot()))
    return treedef, [(x.dtype, x.shape, x.tobytes()) for x in map(np.asarray, leaves)]


def test_parts_are_averaged_by_weight_in_the_order_of_parts():
    """Whatever the order of arrival, bit for bit."""
    gradients = [random_leaves(seed) for seed in range(1, 5)]
    weights = [3.0, 3.0, 2.0, 1.0]
    results = []
    servers = Servers(ADAM, random_leaves(0), 2)
    initial = servers.snapshots()
    for order in ((0, 1, 2, 3), (3, 2, 1, 0), (1, 3, 0, 2), (2, 0, 3, 1)):
        servers.load(initial)
        for part in order:
            servers.push(gradients[part], part=part, weight=weights[part])
        for store in servers.stores:
            store.commit(0, 0, 0, 4)
        results.append(servers.values())
    for other in results[1:]:
        assert_equal_trees(other, results[0])
    mean = {
        name: sum(w * g[name] for w, g in zip(weights, gradients, strict=True)) / sum(weights)
        for name in SHAPES
    }
    whole, _ = trained_by_optax(ADAM, random_leaves(0), [mean])
    assert_equal_trees(results[0], whole, 1e-6)


def test_a_part_of_weight_zero_is_left_out_even_if_it_is_nan():
    store, other = make_store(), make_store()
    store.push(push_of(2.0))
    store.push(push_of(np.nan, part=1, weight=0.0))
    store.commit(0, 0, 0, 2)
    other.push(push_of(2.0))
    other.commit(0, 0, 0, 1)
    np.testing.assert_array_equal(w_of(store), w_of(other))
    store.push(push_of(np.nan, weight=0.0, based_on=1))
    assert store.commit(0, 1, 0, 1) == 2
    assert np.isfinite(w_of(store)).all()


def test_pushes_and_commits_that_are_repeated_are_ignored():
    store, other = make_store(), make_store()
    for each in (store, other):
        each.push(push_of(1.0))
    assert store.push(push_of(7.0)) == 0, "the first is kept"
    for each in (store, other):
        assert each.commit(0, 0, 0, 1) == 1
    assert store.commit(0, 0, 0, 1) == 1
    assert not isinstance(store.pull(0, 1, (0, 0, 1), {}), Rejected)
    assert store.push(push_of(1.0)) == Rejected("late")
    assert store.pull(0, 0, None, {}) == Rejected("late", (0, {0: "sums"}))
    assert contents(store) == contents(other)
    statistics = store.statistics()
    assert (statistics["repeated"], statistics["pushes"], statistics["version"]) == (1, 1, 1)


def test_gradients_of_a_step_that_failed_are_left_out():
    """Its task is never committed, and the next task is the same step."""
    store, other = make_store(), make_store()
    for each in (store, other):
        each.push(push_of(1.0, task=4))
    assert store.push(push_of(np.nan, task=3)) == 0
    for each in (store, other):
        each.commit(0, 0, 4, 1)
    np.testing.assert_array_equal(w_of(store), w_of(other))


def test_a_pull_commits_the_step_before():
    store, other = make_store(), make_store()
    for each in (store, other):
        each.push(push_of(1.0))
    pulled = store.pull(0, 1, (0, 0, 1), {})
    other.commit(0, 0, 0, 1)
    assert pulled.version == 1
    np.testing.assert_array_equal(pulled.trained[0], w_of(other).reshape(-1))


def test_values_do_not_change_before_the_commit():
    store = make_store()
    before = store.pull(0, 0, None, {})
    store.push(push_of(1.0, change=5.0))
    after = store.pull(0, 0, None, {})
    for one, other in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("mu_dtype", [None, "bfloat16"])  # NumPy has no view of it by DLPack
def test_pulled_values_and_snapshots_do_not_change_later(mu_dtype):
    store = make_store(optax.adam(1e-2, mu_dtype=mu_dtype))
    pulled, snapshot = store.pull(0, 0, None, {}), store.snapshot()
    copies = jax.tree.map(np.array, (pulled.trained, pulled.moving, dict(snapshot.values)))
    state = jax.tree.map(np.array, snapshot.state)
    for step in range(3):
        store.push(push_of(1.0, change=1.0, based_on=step))
        store.commit(0, step, 0, 1)
    assert_equal_trees((pulled.trained, pulled.moving, dict(snapshot.values)), copies)
    assert_equal_trees(snapshot.state, state)
    assert not any(buffer.flags.writeable for buffer in pulled.trained)


def test_what_was_loaded_may_change_later():
    """The memory of a snapshot is not kept: its arrays may be overwritten at once."""
    values = {name: value.copy() for name, value in VALUES.items()}
    store, other = Store(), make_store()
    store.load(Definition(SLICES, ADAM, True), ServerSnapshot(values), 0)
    for value in values.values():
        value[...] = 9
    assert contents(store) == contents(other)


def test_what_was_applied_may_change_later():
    """The memory of a push is not kept after its update."""
    store, other = make_store(is_sync=False), make_store(is_sync=False)
    push = push_of(1.0, change=1.0)
    store.push(push)
    other.push(push_of(1.0, change=1.0))
    for buffer in (*push.gradients, *push.changes):
        buffer[...] = 9
    assert contents(store) == contents(other)


def test_what_was_sent_is_not_overwritten():
    """Arrays may be read-only, as those of shared memory are."""
    store = make_store()
    pushes = [push_of(1.0, weight=3.0, change=1.0), push_of(2.0, part=1, change=1.0)]
    for push in pushes:
        for buffer in (*push.gradients, *push.changes):
            buffer.flags.writeable = False
        store.push(push)
    store.commit(0, 0, 0, 2)
    np.testing.assert_array_equal(pushes[0].gradients[0], np.full(6, 1.0, np.float32))


def test_moving_values_move_by_the_mean_change():
    store = make_store()
    store.push(push_of(0.0, change=1.0, weight=100.0))
    store.push(push_of(0.0, part=1, change=2.0))
    store.commit(0, 0, 0, 2)
    np.testing.assert_array_equal(store.snapshot().values["mean"], VALUES["mean"] + 1.5)
    store = make_store(is_sync=False)
    for task, change in enumerate((1.0, 2.0)):
        store.push(push_of(0.0, task=task, change=change))
    np.testing.assert_array_equal(store.snapshot().values["mean"], VALUES["mean"] + 3)


def test_moving_and_trained_leaves_are_on_all_servers(subtests):
    for num_ps in [1, 2, 9]:
        with subtests.test(num_ps=num_ps):
            values = random_leaves(0) | random_leaves(1, MOVING)
            servers = Servers(ADAM, values, num_ps, moving=MOVING)
            gradients, changes = random_leaves(2), random_leaves(3, MOVING)
            servers.step(gradients, changes=changes)
            got = servers.values()
            whole, _ = trained_by_optax(ADAM, random_leaves(0), [gradients])
            for name in MOVING:
                np.testing.assert_array_equal(got[name], values[name] + changes[name])
            for name in SHAPES:
                np.testing.assert_allclose(got[name], whole[name], rtol=1e-6, atol=1e-6)


def test_asynchronous_tasks_are_applied_once():
    store, other = make_store(is_sync=False), make_store(is_sync=False)
    for task in (2, 0, 5, 2, 0, 5, 1):
        store.push(push_of(task + 1.0, task=task, part=0))
    for version, task in enumerate((2, 0, 5, 1)):
        assert other.push(push_of(task + 1.0, task=task)) == version + 1
    np.testing.assert_array_equal(w_of(store), w_of(other))
    statistics = store.statistics()
    assert (statistics["version"], statistics["repeated"]) == (4, 3)
    assert statistics["staleness"] == {0: 1, 1: 1, 2: 1, 3: 1}


def test_staleness_reaches_optimizers_that_ask_for_it():
    def update(updates, state, params=None, *, staleness, **extra):
        return jax.tree.map(lambda g: -g * (1 + staleness), updates), state

    tx = optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)
    store = make_store(tx, is_sync=False)
    for task in range(3):
        store.push(push_of(1.0, task=task))
    np.testing.assert_array_equal(w_of(store), VALUES["w"] - 6)


def test_other_incarnations_and_servers_without_state_are_rejected():
    empty, store = Store(), make_store(incarnation=2)
    for incarnation in (1, 3):
        wrong = Rejected("other incarnation")
        assert store.pull(incarnation, None, None, {}) == wrong
        assert store.push(push_of(1.0, incarnation=incarnation)) == wrong
        assert store.commit(incarnation, 0, 0, 1) == wrong
    assert empty.pull(0, None, None, {}) == Rejected("not loaded")
    assert empty.push(push_of(1.0)) == Rejected("not loaded")
    assert empty.commit(0, 0, 0, 1) == Rejected("not loaded")
    assert empty.snapshot() == Rejected("not loaded")


OPTIMIZERS = {
    "adam": ADAM,
    "inject": optax.inject_hyperparams(optax.adam)(learning_rate=1e-2),
    "multi_steps": optax.MultiSteps(optax.adam(1e-2), 2),
    "noise": optax.chain(optax.add_noise(0.1, 0.9, jax.random.key(3)), optax.sgd(0.1)),
    "schedule_free": optax.contrib.schedule_free_sgd(0.1),
}


ROWS = list(itertools.product(OPTIMIZERS, [True, False]))


@pytest.mark.parametrize("rows", mostly_slow(ROWS, ("noise", True), ("schedule_free", False)))
def test_training_continues_from_a_snapshot_bit_for_bit(rows, subtests):
    """Also through pickle, and back in a store that has trained further."""
    for name, is_sync in rows:
        with subtests.test(name=name, is_sync=is_sync):
            store = make_store(OPTIMIZERS[name], is_sync)

            def train(store, steps, incarnation):
                for step in steps:
                    store.push(push_of(step, task=step, based_on=step, incarnation=incarnation))
                    if is_sync:
                        store.commit(incarnation, step, step, 1)

            train(store, range(3), 0)
            snapshot = pickle.loads(pickle.dumps(store.snapshot()))
            assert all(type(leaf) is np.ndarray for leaf in jax.tree.leaves(snapshot.state))
            train(store, range(3, 6), 0)
            undisturbed = contents(store)
            other = Store()
            for each in (store, other):
                each.load(Definition(SLICES, OPTIMIZERS[name], is_sync), snapshot, 1)
                assert each.push(push_of(1.0, based_on=3)) == Rejected("other incarnation")
                train(each, range(3, 6), 1)
                assert contents(each) == undisturbed
                if not is_sync:
                    assert each.push(push_of(1.0, task=2, based_on=2, incarnation=1)) == 6


def test_updates_compile_once(caplog):
    store = make_store()
    store.push(push_of(1.0))
    store.commit(0, 0, 0, 1)
    with compilations(caplog) as events:
        for step, parts in enumerate((1, 3, 2), 1):
            for part in range(parts):
                store.push(push_of(1.0, part=part, based_on=step))
            store.pull(0, step + 1, (step, 0, parts), {})
        store.snapshot()
    assert_nothing_compiled(events)


def test_servers_may_hold_one_kind_of_leaves_or_none(subtests):
    for kinds in [("moving",), ("trained",), ()]:
        with subtests.test(kinds=kinds):
            slices = tuple(part for part in SLICES if part.kind in kinds)
            store = make_store(None if "trained" not in kinds else ADAM, slices=slices)
            pulled = store.pull(0, 0, None, {})
            assert (len(pulled.trained), len(pulled.moving)) == (
                "trained" in kinds,
                "moving" in kinds,
            )
            push = Push(0, 0, 0, 0, 1.0, pulled.trained, pulled.moving)
            assert store.push(push) == 0
            assert store.commit(0, 0, 0, 1) == 1
            assert store.snapshot().values.keys() == {part.leaf for part in slices}


def test_bad_buffers_are_refused():
    store, push = make_store(), push_of(1.0)
    for wrong in ((), (np.zeros(5, np.float32),), (np.zeros(6, np.float16),)):
        with raises(ValueError, names="gradients", values="float32[6]"):
            store.push(push._replace(gradients=wrong))
    with raises(ValueError, names="changes", values="float32[2]"):
        store.push(push._replace(changes=()))
    assert store.push(push) == 0


def test_bad_snapshots_are_refused():
    store, definition = Store(), Definition(SLICES, ADAM, True)
    with raises(ValueError, names="'mean'", values="float32[2]"):
        store.load(definition, ServerSnapshot({"w": VALUES["w"]}), 0)
    for wrong in (VALUES["w"].T, VALUES["w"].astype(np.float16)):
        with raises(ValueError, names="'w'", values="float32[3,2]"):
            store.load(definition, ServerSnapshot(VALUES | {"w": wrong}), 0)
    with raises(ValueError, values="state", fix="another optimizer"):
        store.load(definition, ServerSnapshot(VALUES, state={}), 0)
    state = by_path(ADAM.init({"w": np.zeros((2, 2), np.float32)}))
    with raises(ValueError, values=("float32[3,2]", "float32[2,2]")):
        store.load(definition, ServerSnapshot(VALUES, state=state), 0)
    assert store.pull(0, None, None, {}) == Rejected("not loaded")


def test_steps_out_of_order_are_errors():
    """They cannot happen, and must not pass silently if they do."""
    store = make_store()
    store.push(push_of(1.0))
    with raises(RuntimeError, values=(1, 0)):
        store.commit(0, 1, 0, 1)
    with raises(RuntimeError, values=("[0]", 2)):
        store.commit(0, 0, 0, 2)
    with raises(RuntimeError, values=(1, 0)):
        store.pull(0, 1, None, {})
    with raises(RuntimeError, values=(5, 0)):
        store.push(push_of(1.0, based_on=5))
    assert store.commit(0, 0, 0, 1) == 1


def test_statistics_count_bytes():
    store = make_store()
    store.pull(0, 0, None, {})
    store.push(push_of(1.0))
    statistics = store.statistics()
    assert (statistics["bytes_out"], statistics["bytes_in"]) == (32, 32)


def test_numbers_are_a_set(subtests):
    for seed in range(5):
        with subtests.test(seed=seed):
            rng = np.random.default_rng(seed)
            numbers, expected = Numbers(), set()
            for number in rng.integers(0, 40, size=200).tolist():
                assert (number in numbers) == (number in expected)
                assert numbers.add(number) == (number not in expected)
                expected.add(number)
                covered = [n for start, stop in numbers.ranges for n in range(start, stop)]
                assert covered == sorted(expected)
                gaps = itertools.pairwise(numbers.ranges)
                assert all(stop < start for (_, stop), (start, _) in gaps), "ranges do not touch"
                numbers = Numbers(numbers.ranges)


def test_nested_names():
    leaves = {"a.b": 1, "a.c.d": 2, "e": 3}
    tree = nest(leaves)
    assert tree == {"a": {"b": 1, "c": {"d": 2}}, "e": 3}
    assert flatten(tree, [*leaves]) == leaves
    for names in (("a", "a.b"), ("a.b", "a")):
        with raises(ValueError, names=f"'{names[1]}'"):
            nest(dict.fromkeys(names, 1))
