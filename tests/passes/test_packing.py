"""Independent all-reduces are packed, wherever the step contains them."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import mirror
from mirror._src.passes.pack import packed
from mirror._src.passes.program import Settings
from tests.support import inside
from tests.support.strategies import cpu_strategy
from tests.support.tables import rows

AXIS = mirror.REPLICA_AXIS
RNG = np.random.RandomState(0)
PARAMS = {"w": RNG.randn(6, 4), "b": RNG.randn(4), "v": RNG.randn(4, 3)}
PARAMS = {k: v.astype(np.float32) for k, v in PARAMS.items()}
BATCH = RNG.randn(8, 6).astype(np.float32)


def loss_of(params, x):
    return jnp.mean(jnp.tanh(x @ params["w"] + params["b"]) @ params["v"])


def loss_and_gradients_apart(params, x):
    context = mirror.get_replica_context()
    loss, grads = jax.value_and_grad(loss_of)(params, x)
    grads = context.all_reduce("mean", grads)
    new = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
    return new, context.all_reduce("mean", loss)


def by_hand(params, x):
    loss, grads = jax.value_and_grad(loss_of)(params, x)
    return jax.lax.pmean(grads, AXIS), jax.lax.pmean(loss, AXIS), jax.lax.psum(x.sum(), AXIS)


@jax.jit
def inner(params, x):
    loss, grads = jax.value_and_grad(loss_of)(params, x)
    return jax.lax.pmean(grads, AXIS), loss


def nested_jit(params, x):
    grads, loss = inner(params, x)
    return grads, jax.lax.pmean(loss, AXIS)


def in_a_scan(params, x):
    def body(carry, part):
        loss, grads = jax.value_and_grad(loss_of)(carry, part[None])
        grads, loss = jax.lax.pmean(grads, AXIS), jax.lax.pmean(loss, AXIS)
        return jax.tree.map(lambda p, g: p - 0.1 * g, carry, grads), loss

    return jax.lax.scan(body, params, x)


def in_a_while(params, x):
    def body(state):
        i, total, _ = state
        total = total + jax.lax.psum(x.sum(), AXIS) + jax.lax.psum(x[0], AXIS).sum()
        return i + 1, total, jax.lax.pmax(total, AXIS)

    return jax.lax.while_loop(lambda state: state[0] < 3, body, (0, 0.0, 0.0))


def in_a_branch(params, x):
    def yes():
        return jax.lax.psum(x.sum(), AXIS) + jax.lax.psum(x.mean(0), AXIS).sum()

    return jax.lax.cond(params["b"].sum() < 1e9, yes, lambda: 0.0)


@jax.custom_vjp
def scaled(x, scale):
    return x * scale


def _scaled_backward(residuals, cotangent):
    x, scale = residuals
    # The gradient of a mirrored value, reduced where it is computed.
    return cotangent * scale, jax.lax.psum((cotangent * x).sum(), AXIS)


scaled.defvjp(lambda x, scale: (x * scale, (x, scale)), _scaled_backward)


def custom_vjp(params, x):
    def loss(params, scale):
        return loss_of(params, scaled(x, scale))

    grads, scale = jax.grad(loss, (0, 1))(params, jnp.float32(1.5))
    return jax.lax.pmean(grads, AXIS), scale


@mirror.per_replica_on_purpose  # a standard deviation of a replica
def remat(params, x):
    @jax.checkpoint
    def hidden(params, x):
        y = jnp.tanh(x @ params["w"] + params["b"])
        return y - jax.lax.pmean(y.mean(), AXIS), jax.lax.pmean(y.std(), AXIS)

    def loss(params):
        y, spread = hidden(params, x)
        return (y @ params["v"]).mean() + spread

    return jax.lax.pmean(jax.grad(loss)(params), AXIS)


def one_after_the_other(params, x):
    first = jax.lax.psum(x.sum(), AXIS)
    return jax.lax.psum(x.mean() * first, AXIS)


def several_kinds(params, x):
    counts = jnp.arange(3) + (x[0, :3] > 0)
    return (
        [jax.lax.psum(x[0], AXIS), jax.lax.psum(x.mean(), AXIS)],
        [jax.lax.psum(counts, AXIS), jax.lax.psum(counts[0], AXIS)],
        [jax.lax.pmax(counts, AXIS), jax.lax.pmax(counts[:2] * 2, AXIS)],
    )


def large_ones_alone(params, x):
    large = jnp.outer(jnp.arange(128.0), jnp.arange(128.0)) * x.sum()
    return [jax.lax.psum(y, AXIS) for y in (large, large + 1, x.sum(), x.mean(), x[0])]


def groups_alone(params, x):
    groups = [[0, 1], [2, 3]]
    return (
        [jax.lax.psum(x[0] * i, AXIS, axis_index_groups=groups) for i in (1, 2)],
        [jax.lax.psum(x[0] * i, AXIS) for i in (1, 2)],
    )


def a_loss_that_waits(params, x):
    """The all-reduce of the loss could run first, but is packed with later gradients."""
    total = jax.lax.psum(jnp.arange(3) + (x[0, :3] > 0), AXIS)  # int32: another buffer
    loss, grads = jax.value_and_grad(loss_of)(params, x * total.sum().astype(jnp.float32))
    return jax.lax.pmean(x.mean(), AXIS), jax.lax.pmean(grads, AXIS), jax.lax.pmean(loss, AXIS)


def many(params, x):
    """So many that the buffer is split at offsets that XLA does not know; the first is a NaN."""
    parts = [x[0, : 1 + i % 5] * i for i in range(20)]
    counts = [jnp.arange(1 + i % 3) + (x[0, 0] > i) for i in range(20)]
    return jax.lax.psum([parts[0] * jnp.nan, *parts, *counts], AXIS)


# For each step, the number of reduced buffers, packed and unpacked. A maximum of floats takes two:
# one of them marks NaN.
STEPS = {
    "loss and gradients apart": (loss_and_gradients_apart, 1, 4),
    "by hand": (by_hand, 1, 5),
    "nested jit": (nested_jit, 1, 4),
    "scan": (in_a_scan, 1, 4),
    "while": (in_a_while, 3, 4),
    "cond": (in_a_branch, 1, 2),
    "custom_vjp": (custom_vjp, 1, 4),
    "remat": (remat, None, None),
    "dependent": (one_after_the_other, 2, 2),
    "kinds": (several_kinds, 3, 6),
    "large": (large_ones_alone, 3, 5),
    "groups": (groups_alone, 3, 4),
    "waits": (a_loss_that_waits, 2, 6),
    "many": (many, 2, 41),
}


def arguments(strategy):
    (batch,) = strategy.distribute_dataset([BATCH])
    return PARAMS, batch


def same(got, wanted, rtol=0.0):
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=rtol)


@rows("step, packed, apart", STEPS)
def test_independent_all_reduces_are_packed(step, packed, apart):
    together = cpu_strategy(4)
    alone = cpu_strategy(4, cross_device_ops=mirror.AllReduce(pack_bytes=0))
    counts = [inside.num_all_reduces(each, step, arguments(each)) for each in (together, alone)]
    if packed is None:  # XLA decides what it computes twice
        assert counts[0] < counts[1]
    else:
        assert counts == [packed, apart]
    # Without fusion emitters, XLA rounds the body of the loop differently in the two programs.
    rtol = 1e-6 if step is in_a_scan else 0.0
    same(together.run(step, arguments(together)), alone.run(step, arguments(alone)), rtol)


@pytest.mark.slow
@rows("step, packed", {name: row[:2] for name, row in STEPS.items() if name != "groups"})
@rows("devices, on_each", {"2-on-2": (2, 2), "4-on-1": (1, 4)})
def test_packing_gives_the_same_for_several_replicas_per_device(step, packed, devices, on_each):
    strategy = cpu_strategy(devices, replicas_per_device=on_each)
    count = inside.num_all_reduces(strategy, step, arguments(strategy))
    if devices == 1:
        assert count == 0
    elif packed is not None:
        assert count == packed
    one = cpu_strategy(4)
    got, wanted = (each.run(step, arguments(each)) for each in (strategy, one))
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=2e-6, atol=1e-6)


class Net(nnx.Module):
    def __init__(self, rngs, axis_name=None):
        self.first = nnx.Linear(6, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, axis_name=axis_name, rngs=rngs)
        self.second = nnx.Linear(4, 3, rngs=rngs)

    def __call__(self, x):
        return self.second(jax.nn.relu(self.norm(self.first(x))))


@mirror.per_replica_on_purpose  # batch statistics
def nnx_step(model, optimizer, metric, x):
    def loss_fn(model):
        return (model(x) ** 2).mean()

    context = mirror.get_replica_context()
    loss, grads = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, context.all_reduce("mean", grads))
    metric.update(values=loss)
    return context.all_reduce("mean", loss)


@rows("axis_name, most", {"local": (None, 1), "synced": (AXIS, 3)})
def test_batch_statistics_and_metrics_are_packed_with_the_gradients(axis_name, most):
    """`run` averages and merges these after the step; the forward pass synchronizes its own."""
    found = []
    for ops in (None, mirror.AllReduce(pack_bytes=0)):
        strategy = cpu_strategy(4, cross_device_ops=ops)
        with strategy.scope():
            model = Net(nnx.Rngs(0), axis_name)
            optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
            metric = nnx.metrics.Average()
        (batch,) = strategy.distribute_dataset([BATCH])
        args = (model, optimizer, metric, batch)
        # float32 in one buffer for each level, and the metric's count of integers in its own.
        count = inside.num_all_reduces(strategy, nnx_step, args)
        assert count <= most + 1 if ops is None else count >= 8
        losses = [strategy.run(nnx_step, args) for _ in range(3)]
        found.append((losses, nnx.state(model), metric.compute()))
    for x, y in zip(*map(jax.tree.leaves, found), strict=True):
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=1e-6, atol=1e-7)


def test_packing_keeps_the_order_of_effects(two):
    seen = []

    def step(x):
        jax.debug.callback(lambda v: seen.append(("before", float(v))), x.sum(), ordered=False)
        total = jax.lax.psum(x.sum(), AXIS)
        jax.debug.callback(lambda v: seen.append(("total", float(v))), total, ordered=False)
        jax.debug.callback(lambda v: seen.append(("after", float(v))), x.max(), ordered=False)
        return total, jax.lax.psum(x.mean(), AXIS)

    program = jax.make_jaxpr(step, axis_env=[(AXIS, 2)])(np.ones(3, np.float32))
    packs = packed(program, Settings(pack_bytes=1024)).operations
    names = [[operation.name for operation in pack.members] for pack in packs]
    assert ["psum", "psum"] in names
    first, second, third = (i for i, name in enumerate(names) if "callback" in name[0])
    assert first < names.index(["psum", "psum"]) < second < third
    (maximum,) = (i for i, name in enumerate(names) if name == ["reduce_max"])
    assert maximum < second, "the last callback would have been ready before the second"
    x = mirror.PerReplica([np.full(3, r, np.float32) for r in range(2)])
    total, mean = two.run(step, (x,))
    jax.effects_barrier()
    assert (float(total), float(mean)) == (3.0, 1.0)
    assert sorted(seen) == [
        *(("after", 0.0), ("after", 1.0), ("before", 0.0), ("before", 3.0)),
        *(("total", 3.0), ("total", 3.0)),
    ]


@rows(
    "options",
    {
        "mirrored": {},
        "slices": {"shard": "model"},
        "two on each": {"replicas_per_device": 2},
        "fixed": {"replicas": 4},
    },
)
def test_no_kernel_is_compiled_for_each_array_of_a_buffer(options):
    """XLA compiles a kernel for each slice at a constant offset."""
    strategy = cpu_strategy(2, **options)

    def step(params, batch):
        grads = jax.grad(lambda p: batch.mean() * sum(jnp.square(x).sum() for x in p))(params)
        grads = jax.lax.pmean(grads, AXIS)
        return [p - 0.1 * g for p, g in zip(params, grads, strict=True)]

    params = strategy.init(lambda: [jnp.arange(8.0 + 8 * (i % 2)) for i in range(20)])
    (batch,) = strategy.distribute_dataset([BATCH])
    text = inside.lowered(strategy, step, (params, batch)).compile().as_text()
    assert "dynamic-slice(" in text
    assert text.count(" slice(") < 10
    new = strategy.run(step, (params, batch))
    same(new, [p - 0.2 * BATCH.mean() * np.asarray(p) for p in params], rtol=1e-5)


def test_small_slices_are_gathered_in_64_bits():
    strategy, optimizer = cpu_strategy(2, shard="optimizer"), optax.sgd(0.1, momentum=0.9)

    def step(state, batch):
        params, optimizer_state = state
        grads = jax.grad(lambda p: batch.mean() * sum(jnp.square(x).sum() for x in p))(params)
        updates, new = optimizer.update(jax.lax.pmean(grads, AXIS), optimizer_state)
        return optax.apply_updates(params, updates), new

    with jax.enable_x64(True):
        params = strategy.init(lambda: [jnp.arange(8.0) for _ in range(20)])
        (batch,) = strategy.distribute_dataset([BATCH])
        arguments = (params, optimizer.init(params)), batch
        new, _ = strategy.run(step, arguments, donate_argnums=0)
        assert new[0].dtype == np.float64
        same(new, [(1 - 0.2 * BATCH.mean()) * np.arange(8.0)] * 20, rtol=1e-5)


def test_report_shows_packed_collectives(two):
    report = two.inspect(loss_and_gradients_apart, arguments(two))
    (row,) = report.collectives
    assert (row.kind, row.op, row.num_leaves) == ("all-reduce", "sum", 4)
    assert row.num_bytes == 4 * (24 + 4 + 12 + 1)
    looped = two.inspect(in_a_scan, arguments(two)).collectives
    assert [(row.num_leaves, row.loop, row.trips) for row in looped] == [(4, "scan", 4)]
    apart = cpu_strategy(2, cross_device_ops=mirror.AllReduce(pack_bytes=0))
    assert len(apart.inspect(by_hand, arguments(apart)).collectives) == 5


def test_packing_keeps_calls_without_collectives(two):
    @jax.jit
    def closed(x):
        return jnp.tanh(x) * 2

    def step(x):
        return jax.lax.psum(closed(x), AXIS), jax.lax.psum(closed(x).sum(), AXIS)

    program = jax.make_jaxpr(step, axis_env=[(AXIS, 2)])(np.ones(3, np.float32))
    flat = packed(program, Settings(pack_bytes=1024))
    assert [each.name for each in flat.operations].count("jit") == 2
    assert "tanh" not in [each.name for each in flat.operations]
