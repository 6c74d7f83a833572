"""Scopes: nesting, replicas and threads."""

import asyncio
import functools
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import mirror
from tests.support.contexts import standing
from tests.support.messages import raises
from tests.support.strategies import EXECUTORS, LAYOUTS, cpu_strategy
from tests.support.tables import Made, rows

STRATEGIES = Made(
    {
        **{
            name: functools.partial(cpu_strategy, num_devices, replicas_per_device=on_each)
            for name, (num_devices, on_each) in LAYOUTS.items()
            if name not in ("2", "3")
        },
        "staged": EXECUTORS["staged"],
    }
)


def in_thread(fn):
    found = []
    thread = threading.Thread(target=lambda: found.append(fn()))
    thread.start()
    thread.join(30)
    return found[0]


def test_default_strategy_has_one_replica():
    strategy, inside, cross, in_replica = standing()
    assert (inside, cross, in_replica) == (False, False, True)
    assert strategy.num_replicas_in_sync == 1
    assert mirror.get_strategy() is strategy
    context = mirror.get_replica_context()
    assert context.num_replicas_in_sync == 1
    assert int(context.replica_id_in_sync_group) == 0
    for op in mirror.ReduceOp:
        np.testing.assert_array_equal(context.all_reduce(op, {"x": jnp.arange(3.0)})["x"], range(3))
    assert context.all_reduce("mean", True).dtype == jnp.float32
    assert context.all_reduce("sum", True).dtype == jnp.int32
    np.testing.assert_array_equal(context.all_gather(np.arange(3)), range(3))


@rows("strategy", STRATEGIES)
def test_context_functions_follow_scope_and_replica(strategy):
    seen = []
    before = standing()
    with strategy.scope() as entered:
        assert entered is strategy
        assert standing() == (strategy, True, True, False)
        strategy.run(lambda: seen.append(standing()))
        assert standing() == (strategy, True, True, False)
    assert standing() == before
    strategy.run(lambda: seen.append(standing()), ())
    assert set(seen) == {(strategy, True, False, True)}


@rows("error", [ValueError, KeyboardInterrupt])
def test_error_leaves_scope_and_replica(two, error):
    def step():
        raise error("in the step")

    with pytest.raises(error, match="in the step"), two.scope():
        two.run(step)
    assert not mirror.has_strategy()
    assert jax.sharding.get_abstract_mesh().empty


def test_scope_is_reentrant_and_reusable(two):
    scope = two.scope()
    for _ in range(2):
        with scope, scope, two.scope():
            assert standing() == (two, True, True, False)
        assert not mirror.has_strategy()


@rows("strategy", STRATEGIES)
def test_arrays_created_in_a_scope_are_mirrored(strategy):
    with strategy.scope():
        made = [jnp.ones(3), jax.random.normal(jax.random.key(0)), nnx.Rngs(0).params()]
    for array in made:
        assert array.devices() == set(strategy.devices)
        assert array.is_fully_replicated


def test_scope_of_another_strategy_is_rejected_without_changes(two):
    other = cpu_strategy(2)
    with two.scope():
        with raises(RuntimeError, names=[f"{other}.scope", str(two)]):
            other.scope().__enter__()
        assert standing() == (two, True, True, False)
        assert jnp.ones(2).devices() == set(two.devices)


CALLS = {
    "run": lambda s: s.run(lambda: 1),
    "scope": lambda s: s.scope().__enter__(),
    "reduce": lambda s: s.reduce("sum", 1.0),
    "gather": lambda s: s.gather(np.ones(1)),
    "distribute_dataset": lambda s: s.distribute_dataset([]),
    "check_mirrored": lambda s: s.check_mirrored(jnp.ones(1)),
    "verify": lambda s: s.verify(lambda: 1),
}


@rows("name", [*CALLS, "distribute_values_from_function"])
def test_cross_replica_calls_are_rejected_in_a_replica(two, name):
    call = CALLS.get(name, lambda s: s.distribute_values_from_function(lambda _: 1.0))
    for callee in (two, cpu_strategy(2)):
        with raises(RuntimeError, names=[f"strategy.{name}", str(two)], fix="replica"):
            two.run(lambda callee=callee: call(callee))
        assert not mirror.has_strategy()


@rows("name", list(CALLS))
def test_methods_of_another_strategy_are_rejected_in_a_scope(two, name):
    other = cpu_strategy(3)
    with two.scope(), raises(RuntimeError, names=[f"{other}.{name}", str(two)]):
        CALLS[name](other)


def test_message_names_both_strategies(two):
    one, both = "MirroredStrategy(/device:CPU:0)", "MirroredStrategy(/device:CPU:0, /device:CPU:1)"
    with two.scope(), raises(RuntimeError, names=[f"{one}.run", both]):
        cpu_strategy(1).run(lambda: 1)


def test_scopes_are_per_thread(two):
    with two.scope():
        assert in_thread(standing)[1:] == (False, False, True)
        other = cpu_strategy(3)

        def elsewhere():
            with other.scope():
                return standing()[0] is other and other.run(lambda: jnp.ones(2)).shape == (2,)

        assert in_thread(elsewhere)
        assert standing() == (two, True, True, False)


def test_scope_object_works_in_two_threads(two):
    """Leaving a scope restores the mesh of this thread."""
    scope, entered, leave = two.scope(), threading.Event(), threading.Event()
    problems = []

    def elsewhere():
        try:
            with scope:
                entered.set()
                leave.wait(900)
            assert jax.sharding.get_abstract_mesh().empty
        except BaseException as error:
            problems.append(error)
            entered.set()

    thread = threading.Thread(target=elsewhere)
    with scope:
        thread.start()
        assert entered.wait(900)
    empty = jax.sharding.get_abstract_mesh().empty
    leave.set()
    thread.join(30)
    assert not problems
    assert empty


def test_replica_context_expires_with_its_step(two):
    kept = []
    two.run(lambda: kept.append(mirror.get_replica_context()))
    for context in kept:
        for use in (
            lambda c: c.strategy,
            lambda c: c.devices,
            lambda c: c.num_replicas_in_sync,
            lambda c: c.replica_id_in_sync_group,
            lambda c: c.all_reduce("sum", 1.0),
            lambda c: c.all_gather(np.ones(1)),
            lambda c: c.fold_in(jax.random.key(0)),
        ):
            with raises(RuntimeError, names="ReplicaContext", fix="mirror.get_replica_context()"):
                use(context)
            with raises(RuntimeError, names="ReplicaContext", fix="mirror.get_replica_context()"):
                two.run(lambda use=use, context=context: use(context))


@rows("strategy", STRATEGIES)
def test_replica_context_describes_the_replica(strategy):
    n = strategy.num_replicas_in_sync

    def step(x):
        context = mirror.get_replica_context()
        assert context.strategy is strategy
        assert mirror.get_strategy() is strategy
        assert context.num_replicas_in_sync == n
        assert context.devices == strategy.devices
        assert isinstance(context.replica_id_in_sync_group, jax.core.Tracer)
        assert context.replica_id_in_sync_group.dtype == jnp.int32
        assert context.replica_id_in_sync_group.shape == ()
        return (
            context.replica_id_in_sync_group,
            context.all_gather(x),
            context.all_gather(x[None], axis=-1),
            jax.random.key_data(context.fold_in(jax.random.key(0))),
        )

    x = mirror.PerReplica([np.array([2.0 * i, 2 * i + 1]) for i in range(n)])
    number, joined, last, keys = strategy.run(step, (x,))
    np.testing.assert_array_equal(number, range(n))
    np.testing.assert_array_equal(joined, np.arange(2.0 * n))
    np.testing.assert_array_equal(last, np.arange(2.0 * n)[None])
    assert len(np.unique(np.asarray(keys), axis=0)) == n


@rows("strategy", STRATEGIES)
def test_module_functions_are_the_collectives_of_the_replica(strategy):
    n = strategy.num_replicas_in_sync

    def step(x):
        of_owners = []
        for owner in (mirror, mirror.get_replica_context()):
            reduced = [owner.all_reduce(op, x.sum()) for op in ("mean", mirror.ReduceOp.MAX)]
            of_owners.append((reduced, owner.all_gather(x), owner.all_gather({"x": x[None]}, -1)))
        return of_owners

    of_module, of_context = strategy.run(step, (mirror.PerReplica([np.arange(2.0, 4)] * n),))
    assert of_module[1].shape == (2 * n,)
    for mine, theirs in zip(jax.tree.leaves(of_module), jax.tree.leaves(of_context), strict=True):
        np.testing.assert_array_equal(mine, theirs)


OUTSIDE = {
    "all_reduce": (lambda x: mirror.all_reduce("sum", {"x": x}), 'strategy.reduce("sum", x)'),
    "all_gather": (lambda x: mirror.all_gather({"x": x}), "strategy.gather(x, axis=0)"),
}


@rows("call, instead", OUTSIDE)
def test_collectives_outside_a_step_say_what_to_call(two, call, instead):
    names = "mirror.all_reduce" if "reduce" in instead else "mirror.all_gather"
    with two.scope(), raises(RuntimeError, names=[names, str(two)], fix=["strategy.run", instead]):
        call(jnp.ones(2))
    with raises(RuntimeError, names=[names, "PerReplica"], fix=instead):
        call(mirror.PerReplica([jnp.ones(2), jnp.ones(2)]))
    for mapped in (jax.pmap, _shard_mapped):
        with raises(RuntimeError, names=[names, "jax.pmap"], fix=["strategy.run", "jax.lax.pmean"]):
            mapped(call)(jnp.ones((2, 3)))


def _shard_mapped(fn):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("batch",))
    spec = jax.sharding.PartitionSpec("batch")
    return jax.shard_map(fn, mesh=mesh, in_specs=spec, out_specs=spec)


def test_step_can_be_called_outside_every_scope():
    """Outside every scope a step runs as one replica, and its collectives change nothing."""

    def step(x):
        loss = mirror.all_reduce("mean", mirror.all_gather(x).sum())
        return loss * mirror.get_strategy().num_replicas_in_sync

    np.testing.assert_allclose(step(jnp.arange(4.0)), 6.0)
    np.testing.assert_allclose(jax.jit(step)(jnp.arange(4.0)), 6.0)


def test_scope_is_rejected_inside_jit(two):
    def jitted(x):
        with two.scope():
            return x

    with raises(RuntimeError, names=f"{two}.scope()", fix="jax.jit"):
        jax.jit(jitted)(1.0)
    assert not mirror.has_strategy()


def test_open_scope_is_reentrant_in_a_trace(two):
    """For example in a function that is traced only for its shapes."""

    def create():
        with two.scope():
            assert mirror.get_strategy() is two
            return jnp.ones(3)

    with cpu_strategy(3).scope():
        other_mesh = jnp.ones(3).sharding.mesh
    with two.scope():
        assert jax.jit(create)().sharding.is_equivalent_to(jnp.ones(3).sharding, 1)
        assert jax.eval_shape(create).shape == (3,)
        with jax.set_mesh(other_mesh), raises(RuntimeError, names=f"{two}.scope()", fix="jax.jit"):
            jax.eval_shape(create)
    assert not mirror.has_strategy()


def test_scope_of_another_asyncio_task_is_named():
    first, second = cpu_strategy(2), cpu_strategy(3)

    async def train(strategy, entered, ends):
        with strategy.scope():
            entered.set()
            await ends.wait()

    async def interleaved():
        entered, ends = asyncio.Event(), asyncio.Event()
        task = asyncio.create_task(train(first, entered, ends))
        await entered.wait()
        try:
            await asyncio.create_task(train(second, asyncio.Event(), ends))
        finally:
            ends.set()
            await task

    with raises(
        RuntimeError, names=[str(second), str(first), "asyncio task"], fix="asyncio.to_thread("
    ):
        asyncio.run(interleaved())
    assert not mirror.has_strategy()
