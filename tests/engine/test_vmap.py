"""Several replicas per device, where they differ from one; `tests/laws` has the rest."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import mirror
from tests.support import inside
from tests.support.messages import raises
from tests.support.models import CNN, MLP, batches, nnx_step
from tests.support.tables import rows

CPUS = jax.devices("cpu")
N = 8
LAYOUTS = {"8 on 1": (1, 8), "4 on 2": (2, 4), "2 on 4": (4, 2), "1 on 8": (8, 1)}


def strategy_of(name):
    num_devices, replicas_per_device = LAYOUTS[name]
    return mirror.MirroredStrategy(CPUS[:num_devices], replicas_per_device=replicas_per_device)


@rows("name", list(LAYOUTS))
def test_replica_ids_count_device_by_device(name):
    strategy = strategy_of(name)
    num_devices, on_each = LAYOUTS[name]
    assert strategy.num_replicas_in_sync == N
    assert strategy.devices == tuple(d for d in CPUS[:num_devices] for _ in range(on_each))
    (batch,) = strategy.distribute_dataset([np.arange(2 * N)])
    ids = strategy.run(lambda x: mirror.get_replica_context().replica_id_in_sync_group, (batch,))
    np.testing.assert_array_equal(ids, np.arange(N))
    for i, (row, device) in enumerate(zip(batch.values, strategy.devices, strict=True)):
        assert row.devices() == {device}
        np.testing.assert_array_equal(row, [2 * i, 2 * i + 1])


def collectives(x):
    """Every `jax.lax` collective, over the axis of all replicas."""
    axis = mirror.REPLICA_AXIS
    i = jax.lax.axis_index(axis)
    ring = [(j, (j + 1) % N) for j in range(N)]
    return {
        "psum": jax.lax.psum(x, axis),
        "pmean": jax.lax.pmean(x, axis),
        "pmax": jax.lax.pmax(x, axis),
        "pmin": jax.lax.pmin(x, axis),
        "all_gather": jax.lax.all_gather(x, axis),
        "ppermute": jax.lax.ppermute(x, axis, ring),
        "psum_scatter": jax.lax.psum_scatter(jnp.arange(N) * 1.0 + i, axis),
        "all_to_all": jax.lax.all_to_all(jnp.arange(N) + 10 * i, axis, 0, 0),
        "size": jax.lax.axis_size(axis),
        "in a scan": jax.lax.scan(lambda c, _: (c + jax.lax.psum(x, axis), None), x, None, 3)[0],
        "in a cond": jax.lax.cond(
            jax.lax.psum(1, axis) > 0, lambda: jax.lax.psum(x, axis), lambda: x
        ),
        "gradient": jax.grad(lambda x: jnp.sum(jax.lax.pmean(x**2, axis)))(x),
        "random": jax.random.normal(mirror.get_replica_context().fold_in(jax.random.key(0)), (2,)),
    }


@pytest.mark.slow
def test_lax_collectives_span_all_replicas():
    rows = np.random.RandomState(0).randn(N, 3).astype("float32")
    found = {}
    for name in LAYOUTS:
        strategy = strategy_of(name)
        out = strategy.run(collectives, (mirror.PerReplica(list(rows)),))
        types = {key: type(value) for key, value in out.items()}
        found[name] = types, jax.tree.map(np.asarray, out)
    types, wanted = found.pop("1 on 8")
    for name, (other_types, got) in found.items():
        assert other_types == types, name
        for key, value in wanted.items():
            np.testing.assert_allclose(got[key], value, rtol=1e-6, err_msg=f"{name}: {key}")


@pytest.mark.nightly
def test_every_layout_trains_to_the_same_weights():
    trained = []
    for name in LAYOUTS:
        strategy = strategy_of(name)
        with strategy.scope():
            net = CNN(rngs=nnx.Rngs(0))
            optimizer = nnx.Optimizer(net, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)
        for batch in strategy.distribute_dataset(batches(CNN.features, 10)):
            strategy.run(nnx_step, (net, optimizer, batch))
        strategy.check_mirrored((net, optimizer))
        assert strategy.verify(nnx_step, (net, optimizer, batch)).largest <= 1e-5
        trained.append(jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(net))))
    for other in trained[1:]:
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), trained[0], other
        )


MEANS = {
    "the context's": lambda tree: mirror.all_reduce("mean", tree),
    "pmean": lambda tree: jax.lax.pmean(tree, mirror.REPLICA_AXIS),
    "psum of each leaf": lambda tree: jax.tree.map(
        lambda leaf: jax.lax.psum(leaf, mirror.REPLICA_AXIS) / N, tree
    ),
}


@rows("name", ["8 on 1", "2 on 4"])
@rows("mean", MEANS)
def test_gradient_is_computed_once_per_device(name, mean):
    """Not once per replica and then summed, which needs a gradient copy per replica."""

    def step(weight, batch):
        gradient = jax.grad(lambda w: (jnp.tanh(batch @ w) ** 2).mean())(weight)
        return weight - mean(gradient)

    strategy = strategy_of(name)
    with strategy.scope():
        weight = jnp.ones((24, 40))
    (batch,) = strategy.distribute_dataset([np.ones((4 * N, 24), np.float32)])
    text = inside.lowered(strategy, step, (weight, batch)).compile().as_text()
    _, on_each = LAYOUTS[name]
    assert "f32[24,40]" in text
    assert f"f32[{on_each},24,40]" not in text


def test_each_device_stores_one_copy_of_the_state():
    strategy = strategy_of("4 on 2")
    with strategy.scope():
        model = MLP(rngs=nnx.Rngs(0))
    assert [s.device for s in model.first.kernel[...].addressable_shards] == list(CPUS[:2])


def test_second_step_compiles_nothing():
    strategy = strategy_of("8 on 1")
    traces = []

    def step(x):
        traces.append(1)
        return mirror.all_reduce("sum", x)

    (batch,) = strategy.distribute_dataset([np.ones(N)])
    strategy.run(step, (batch,))
    before = len(traces)
    strategy.run(step, (batch,))
    assert len(traces) == before


def test_check_mirrored_finds_a_differing_copy():
    strategy = strategy_of("4 on 2")
    parts = [
        jax.device_put(np.full(3, value), d) for value, d in zip([1.0, 2.0], CPUS[:2], strict=True)
    ]
    with strategy.scope():
        sharding = jnp.ones(3).sharding
    broken = jax.make_array_from_single_device_arrays((3,), sharding, parts)
    wanted = {"names": "['w']", "values": 1, "fix": "local_results(x)"}
    with raises(mirror.ReplicaDivergenceError, **wanted):
        strategy.check_mirrored({"w": broken})


def test_repeated_device_runs_several_replicas():
    split = (CPUS[0], CPUS[0], CPUS[1], CPUS[1])
    with inside.repeated_devices(split):
        strategy = mirror.MirroredStrategy()
        assert strategy.devices == split
        assert mirror.MirroredStrategy(replicas_per_device=2).num_replicas_in_sync == 8
    (batch,) = strategy.distribute_dataset([np.arange(4)])
    assert int(strategy.reduce("sum", batch, axis=0)) == 6


def test_unequal_numbers_of_replicas_per_device_are_rejected():
    for devices in [(CPUS[0], CPUS[0], CPUS[1]), (CPUS[0], CPUS[1], CPUS[0], CPUS[1])]:
        found = ", ".join(f"/device:CPU:{device.id}" for device in devices)
        with inside.repeated_devices(devices), raises(ValueError, values=f"({found})"):
            mirror.MirroredStrategy()


@rows(
    "count, error, values",
    [
        (0, ValueError, [0]),
        (-2, ValueError, [-2]),
        (1.5, TypeError, [1.5, "float", "integer"]),
        (True, TypeError, [True, "bool", "integer"]),
    ],
)
def test_replicas_per_device_rejects_invalid_values(count, error, values):
    with raises(error, names="replicas_per_device", values=values):
        mirror.MirroredStrategy(CPUS[:1], replicas_per_device=count)


def count(x, **options):
    return jax.experimental.io_callback(lambda x: x, x, x, **options)


@rows(
    "operation",
    {
        "ordered": lambda x: count(x, ordered=True),
        "in a branch": lambda x: jax.lax.cond(x > 3, count, jnp.sin, x),
        "in a loop": lambda x: jax.lax.while_loop(lambda x: x < 9, lambda x: count(x) + 9, x),
    },
)
def test_operations_without_a_batching_rule_are_named(operation):
    strategy = strategy_of("8 on 1")

    def step(x):
        return jax.lax.psum(operation(x), mirror.REPLICA_AXIS)

    with raises(NotImplementedError, names="jax.vmap"):
        strategy.run(step, (mirror.PerReplica(list(np.arange(8.0))),))


def test_missing_reduction_is_found():
    strategy = strategy_of("4 on 2")
    with strategy.scope():
        model = MLP(rngs=nnx.Rngs(0))

    def step(model, batch):
        model.first.bias[...] += batch["image"].mean()

    (batch,) = strategy.distribute_dataset(batches((12,), 1))
    names = ["step", "model.first.bias", "batch['image']"]
    with raises(mirror.ReplicaDivergenceError, names=names, fix="all_reduce"):
        strategy.run(step, (model, batch))
