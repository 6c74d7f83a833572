"""The cost of a step: only the first call traces, compiles, copies and transfers."""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import mirror
from tests.support import inside
from tests.support.compilations import assert_nothing_compiled, compilations
from tests.support.models import MLP, OPTIMIZERS, TRAININGS, batches, nnx_step
from tests.support.strategies import LAYOUTS, cpu_strategy
from tests.support.tables import rows

# Trainings on one layout, and one training on layouts of other kinds.
ROWS = [(name, "8") for name in TRAININGS] + [
    ("nnx-MLP", layout) for layout in ("1", "2-on-2", "3-on-1")
]


@pytest.mark.parametrize(
    "table",
    [[("plain-MLP", "2")], pytest.param(ROWS, marks=pytest.mark.nightly)],
    ids=["one", "all"],
)
def test_later_steps_compile_and_transfer_nothing(table, caplog, subtests):
    for name, layout in table:
        with subtests.test(f"{name}, {layout}"):
            require_only_launches(name, layout, caplog)


def require_only_launches(name, layout, caplog):
    make, features = TRAININGS[name]
    num_devices, replicas_per_device = LAYOUTS[layout]
    strategy = cpu_strategy(num_devices, replicas_per_device=replicas_per_device)
    training, data = make(OPTIMIZERS["adam"]), batches(features, 3)
    with strategy.scope():
        state = training.create()
    first, second, third = list(strategy.distribute_dataset(data))
    state, _ = training.step(strategy, state, first)
    with compilations(caplog) as events, jax.transfer_guard("disallow"):
        state, _ = training.step(strategy, state, second)  # outside the scope
        with strategy.scope():
            state, loss = training.step(strategy, state, third)  # and inside
    assert_nothing_compiled(events)
    assert np.isfinite(np.asarray(loss))


def test_compilations_are_detected(two, caplog):
    with compilations(caplog) as events:
        two.run(lambda x: x * 3, (np.ones(3),))
    assert any("ompil" in event for event in events)


def test_alternating_shapes_compile_once_each(two, caplog):
    model = MLP(rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    large = list(two.distribute_dataset(batches((12,), 2, size=24)))
    small = list(two.distribute_dataset(batches((12,), 2, size=6)))
    two.run(nnx_step, (model, optimizer, large[0]))
    two.run(nnx_step, (model, optimizer, small[0]))
    with compilations(caplog) as events:
        for batch in (large[1], small[1], large[0]):
            two.run(nnx_step, (model, optimizer, batch))
    assert_nothing_compiled(events)


def copies_of(shape, dtype):
    """Returns the number of live arrays of this shape and dtype."""
    gc.collect()  # arrays of other tests
    return sum(a.shape == shape and a.dtype == dtype for a in jax.live_arrays())


@pytest.mark.slow
def test_state_is_never_stored_twice(eight):
    """Old buffers are donated; no device stores more than one copy of any variable."""
    with eight.scope():
        model = MLP(rngs=nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    kernel = model.first.kernel[...]
    eight.reduce("sum", 1.0)  # the guard releases small results of eager ops
    before = copies_of((12, 32), jnp.float32)
    for batch in eight.distribute_dataset(batches((12,), 4)):
        eight.run(nnx_step, (model, optimizer, batch))
    assert kernel.is_deleted()
    after = copies_of((12, 32), jnp.float32)
    assert after == before  # the kernel and Adam's two moments
    for device in eight.devices:
        held = [s for s in model.first.kernel[...].addressable_shards if s.device == device]
        assert len(held) == 1


def test_an_optimizer_whose_state_is_a_list_trains_as_one_device(eight):
    """`nnx.Optimizer.update` makes an `nnx.State` of it, which has the same leaves."""
    kernels = []
    for strategy in (cpu_strategy(1), eight):
        with strategy.scope():
            model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
            optimizer = nnx.Optimizer(model, optax.sm3(0.1), wrt=nnx.Param)

        def step(model, optimizer, x):
            grads = nnx.grad(lambda m: (m(x) ** 2).mean())(model)
            optimizer.update(model, mirror.all_reduce("mean", grads))

        (batch,) = strategy.distribute_dataset([np.arange(48, dtype=np.float32).reshape(16, 3)])
        for _ in range(3):
            strategy.run(step, (model, optimizer, batch))
        assert isinstance(optimizer.opt_state[0].mu["kernel"].get_raw_value(), list)
        kernels.append(model.kernel[...])
    np.testing.assert_allclose(*kernels, rtol=1e-5)


def test_step_needs_only_memory_for_state_and_activations(eight):
    """The output of every changed variable reuses the buffer of its input."""
    with eight.scope():
        model = nnx.Linear(256, 256, rngs=nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)

    def step(model, optimizer, x):
        grads = nnx.grad(lambda m: m(x).mean())(model)
        optimizer.update(model, mirror.all_reduce("mean", grads))

    batch = mirror.PerReplica([np.ones((2, 256), np.float32)] * 8)
    lowered = inside.lowered(eight, step, (model, optimizer, batch))
    memory = lowered.compile().memory_analysis()
    state = sum(x.nbytes for x in jax.tree.leaves(nnx.state((model, optimizer))))
    assert memory.alias_size_in_bytes >= 0.99 * state
    assert memory.output_size_in_bytes - memory.alias_size_in_bytes < 1024
    assert memory.temp_size_in_bytes < 0.75 * state  # gradients and their packed copy


def test_frozen_variables_keep_their_arrays(two):
    """Variables that a step does not change are neither copied nor donated."""
    model = MLP(rngs=nnx.Rngs(0))
    two.run(lambda m, x: m(x), (model, np.ones((2, 12), np.float32)))
    before = model.first.kernel[...]
    out = two.run(lambda m, x: m(x), (model, np.ones((2, 12), np.float32)))
    assert model.first.kernel[...] is before
    assert isinstance(out, jax.Array)


def test_first_step_keeps_arrays_of_an_unscoped_model(two):
    """`run` mirrors copies: the user's own arrays are not donated."""
    model = MLP(rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    held = model.first.kernel[...]
    (batch,) = two.distribute_dataset(batches((12,), 1))
    two.run(nnx_step, (model, optimizer, batch))
    assert not held.is_deleted()
    assert np.isfinite(np.asarray(held)).all()


@pytest.mark.slow
def test_dead_model_is_released(two):
    gc.collect()
    before = copies_of((12, 32), jnp.float32)
    model = MLP(rngs=nnx.Rngs(0))
    two.run(lambda m, x: m(x), (model, np.ones((2, 12), np.float32)))
    assert copies_of((12, 32), jnp.float32) > before
    del model
    gc.collect()
    assert copies_of((12, 32), jnp.float32) == before


def test_small_leaves_share_one_collective(eight):
    """Fifty small leaves and two large ones: one packed buffer and two separate ones."""

    def step(tree):
        return mirror.all_reduce("mean", tree)

    small = {
        f"s{i}": mirror.PerReplica([np.full((7, i + 1), r, np.float32) for r in range(8)])
        for i in range(50)
    }
    large = {f"l{i}": mirror.PerReplica([np.ones((128, 128), np.float32)] * 8) for i in range(2)}
    text = inside.lowered(eight, step, (small | large,)).as_text()
    assert text.count("stablehlo.all_reduce") == 3
    out = eight.run(step, (small | large,))
    for i in range(50):
        np.testing.assert_array_equal(out[f"s{i}"], np.full((7, i + 1), 3.5))


WIDENED = {np.dtype(bool): jnp.int32, np.dtype(np.uint8): jnp.uint32}  # by sums


@pytest.mark.slow
@rows("pack_bytes", [0, 1, 10**9, None])
@rows("op", ["sum", "mean", "min", "max"])
def test_packing_keeps_every_value(op, pack_bytes):
    strategy = cpu_strategy(3, cross_device_ops=mirror.AllReduce(pack_bytes))
    rng = np.random.RandomState(0)
    dtypes = [np.float32, np.int32, np.uint8, np.bool_, np.float16, np.float32, np.int32]
    stacked = [(rng.rand(3, 5, i + 1) * 2).astype(d) for i, d in enumerate(dtypes)]

    def step(*leaves):
        return mirror.all_reduce(op, leaves)

    got = strategy.run(step, [mirror.PerReplica.from_stacked(x) for x in stacked])
    for x, y in zip(stacked, got, strict=True):
        exact = x.dtype.kind in "iub"
        wide = x.astype(np.float64)
        want = getattr(np, {"min": "min", "max": "max"}.get(op, op))(wide, axis=0)
        np.testing.assert_allclose(
            np.asarray(y, np.float64), want, rtol=0 if exact and op != "mean" else 2e-3
        )
        if op == "mean" and exact:
            assert y.dtype == jnp.float32
        elif op == "sum" and x.dtype in WIDENED:
            assert y.dtype == WIDENED[x.dtype]
        else:
            assert y.dtype == x.dtype


def test_structure_of_a_model_is_not_traversed_every_step(two, monkeypatch):
    model = MLP(rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    first, second = list(two.distribute_dataset(batches((12,), 2)))
    two.run(nnx_step, (model, optimizer, first))

    def walked(*_, **__):
        raise AssertionError("the graph was split again")

    monkeypatch.setattr(nnx, "split", walked)
    monkeypatch.setattr(nnx, "iter_graph", walked)
    two.run(nnx_step, (model, optimizer, second))


def test_changed_structure_is_detected(two):
    model = MLP(rngs=nnx.Rngs(0))
    x = np.ones((2, 12), np.float32)
    step = lambda m, x: m(x)  # noqa: E731
    assert two.run(step, (model, x)).shape == (2, 5)
    model.second = nnx.Linear(32, 7, rngs=nnx.Rngs(1))
    assert two.run(step, (model, x)).shape == (2, 7)
    model.first.bias = nnx.Param(jnp.full(32, 100.0))
    np.testing.assert_allclose(two.run(step, (model, x)), model(x), rtol=1e-5)


def test_second_strategy_over_the_same_devices_does_not_recompile(caplog):
    """JAX gives its outputs the first strategy's shardings: equal ones, but other objects."""
    first, second = cpu_strategy(2), cpu_strategy(2)

    def step(state):
        return [x + 1 for x in state]

    for strategy in (first, second):
        state = [jnp.ones(8) * i for i in range(10)]
        for _ in range(3):
            state = strategy.run(step, (state,), donate_argnums=0)
    with compilations(caplog) as events:
        second.run(step, (state,), donate_argnums=0)
    assert_nothing_compiled(events)


@rows("op", ["sum", "mean"])
def test_packed_collectives_are_differentiable(op, two):
    """The gradient of an all-reduce is the all-reduce of the gradients that come in."""

    def step(x, y, weight):
        def total(leaves):
            a, b = mirror.all_reduce(op, leaves)
            return weight * (a.sum() + b.sum())

        return jax.grad(total)((x, y))

    weight = mirror.PerReplica([np.float32(1), np.float32(3)])
    got = two.run(step, (np.ones(3, np.float32), np.ones(2, np.float32), weight))
    for leaf in got:
        np.testing.assert_array_equal(leaf, np.full(leaf.shape, 4.0 if op == "sum" else 2.0))


def test_calls_that_donate_other_arguments_are_other_programs(two):
    def step(x, y):
        return x + 1, y + 1

    x, y = two.run(step, (np.ones(3), np.ones(3)))
    for argnums in ((0,), (), (0, 1), (1,), ()):
        before = x, y
        x, y = two.run(step, before, donate_argnums=argnums)
        assert [array.is_deleted() for array in before] == [0 in argnums, 1 in argnums]


def test_programs_of_many_shapes_are_forgotten(two, monkeypatch):
    inside.limit_programs(monkeypatch, 3)
    step = lambda x: x + 1  # noqa: E731
    kept = []
    for size in range(1, 13):
        two.run(step, (np.ones(size, np.float32),))
        kept.append(len(inside.programs(two)))
    assert max(kept) <= 8  # each has two keys
    assert two.run(step, (np.ones(1, np.float32),)).tolist() == [2.0]
