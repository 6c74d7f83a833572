"""The choice of the executor, and devices of several types, simulated on host devices."""

import copy
import functools
import itertools
import logging
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import mirror
from mirror import AllReduce, PerReplica, ReductionToOneDevice
from tests.support.compilations import assert_nothing_compiled, compilations
from tests.support.inside import all_reduce_that, pretended_types
from tests.support.messages import assert_message, raises
from tests.support.models import MLP, SyncBatchNorm, batches, nnx_step
from tests.support.steps import context
from tests.support.strategies import cpu_strategy
from tests.support.tables import Made, rows

CPUS = jax.devices("cpu")
# The second and third host device are simulated GPUs.
GPUS = CPUS[1:3]
TYPES = ["CPU", "GPU", "GPU"]
PAIR = "(/device:GPU:0, /device:CPU:0)"
ARGUMENTS: dict[str, tuple[list[str], dict[str, Any]]] = {
    "a GPU and the CPU": (["/gpu:0", "/cpu:0"], {}),
    "two GPUs and the CPU": (["/gpu:0", "/gpu:1", "/cpu:0"], {}),
    "two on each": (["/cpu:0", "/gpu:0"], {"replicas_per_device": 2}),
    "reduced on a GPU": (
        ["/cpu:0", "/gpu:0"],
        {"cross_device_ops": ReductionToOneDevice("/gpu:0")},
    ),
    "reduced elsewhere": (
        ["/cpu:0", "/gpu:0"],
        {"cross_device_ops": ReductionToOneDevice("/gpu:1")},
    ),
}
LAYOUTS = Made(
    {
        name: functools.partial(mirror.MirroredStrategy, devices, **kwargs)
        for name, (devices, kwargs) in ARGUMENTS.items()
    }
)


@pytest.fixture(autouse=True)
def gpus():
    """Simulates a CPU and GPUs in each test."""
    with pretended_types(TYPES):
        yield


@pytest.fixture
def mixed():
    """A GPU and the CPU."""
    return mirror.MirroredStrategy(["/gpu:0", "/cpu:0"])


def numbers(n):
    return PerReplica([np.float32(i + 1) for i in range(n)])


def home_of(strategy):
    """Returns the device of mirrored arrays: the one that reduces them."""
    return strategy.cross_device_ops.device


# The choice


def said(caplog, make):
    """Returns the log lines of a strategy's construction."""
    with caplog.at_level(logging.DEBUG, "mirror"):
        made = make()
    lines = [r.getMessage() for r in caplog.records if r.name == "mirror"]
    caplog.clear()
    return made, lines


def test_devices_of_several_types_select_the_staged_executor(caplog):
    strategy, lines = said(caplog, lambda: mirror.MirroredStrategy(["/gpu:0", "/cpu:0"]))
    executor, route, made = lines
    assert_message(executor, names="staged")
    assert_message(route, values=PAIR)
    assert route.count("/device:CPU:0") == 2
    assert_message(made, names="MirroredStrategy", values=PAIR)
    assert strategy.devices == (GPUS[0], CPUS[0])
    assert repr(strategy.cross_device_ops) == "ReductionToOneDevice('/CPU:0')"
    assert str(strategy) == f"MirroredStrategy{PAIR}"


CHOICES = {  # name: the constructor of the strategy, and what its log contains
    "one replica on each device": (
        lambda: mirror.MirroredStrategy(["/cpu:0", "/cpu:1"]),
        {"names": "pmap"},
    ),
    "several replicas on each device": (
        lambda: mirror.MirroredStrategy(["/cpu:0"], replicas_per_device=2),
        {"names": "vmap"},
    ),
    "reduced on the host": (
        lambda: mirror.MirroredStrategy(["/cpu:0", "/cpu:1"], ReductionToOneDevice()),
        {
            "names": ["staged", "cross_device_ops"],
            "values": "ReductionToOneDevice('/CPU:0')",
        },
    ),
    "reduced on another GPU": (
        lambda: mirror.MirroredStrategy(["/cpu:0", "/gpu:0"], ReductionToOneDevice("/gpu:1")),
        {"values": ["/device:GPU:1", "(/device:CPU:0, /device:GPU:0)"]},
    ),
}


@rows("make, wanted", CHOICES)
def test_log_gives_the_reason_for_the_executor(make, wanted, caplog):
    _, lines = said(caplog, make)
    assert_message("\n".join(lines), **wanted)


def test_all_reduce_across_device_types_is_rejected():
    names = ["AllReduce", "cross_device_ops"]
    with raises(ValueError, names=names, values=PAIR, fix="ReductionToOneDevice()"):
        mirror.MirroredStrategy(["/gpu:0", "/cpu:0"], AllReduce())


def test_gpus_that_pass_the_check_use_all_reduce():
    with all_reduce_that(None) as asked:
        strategy = mirror.MirroredStrategy(["/gpu:0", "/gpu:1"])
    assert asked == [tuple(GPUS)]
    assert isinstance(strategy.cross_device_ops, AllReduce)


@rows("fault", ["did not finish within 30 s", "NCCL: unhandled system error"])
def test_gpus_that_fail_the_check_warn_and_use_the_staged_executor(fault, caplog):
    with all_reduce_that(fault), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        strategy, lines = said(caplog, lambda: mirror.MirroredStrategy(["/gpu:0", "/gpu:1"]))
    (warning,) = caught
    pair = "(/device:GPU:0, /device:GPU:1)"
    assert_message(str(warning.message), values=[pair, fault], fix="NCCL_P2P_DISABLE=1")
    assert warning.filename == __file__
    assert_message("\n".join(lines), values=["/device:CPU:0", pair])
    assert float(strategy.reduce("sum", numbers(2))) == 3.0
    assert strategy.run(lambda: 1.0).devices() == set(GPUS)


def test_gpus_that_hang_in_the_check_are_rejected():
    fault = "did not finish within 30 s"
    found = ["(/device:GPU:0, /device:GPU:1)", fault, "(/device:GPU:1)"]
    with (
        all_reduce_that(fault, GPUS[1:]),
        raises(RuntimeError, values=found, fix="NCCL_P2P_DISABLE=1"),
    ):
        mirror.MirroredStrategy(["/gpu:0", "/gpu:1"])


UNCHECKED = {
    "one": lambda: mirror.MirroredStrategy(["/gpu:0"]),
    "one twice": lambda: mirror.MirroredStrategy(["/gpu:0"], replicas_per_device=2),
    "one device": lambda: mirror.OneDeviceStrategy("/gpu:0"),
    "all-reduce asked for": lambda: mirror.MirroredStrategy(["/gpu:0", "/gpu:1"], AllReduce()),
    "host": lambda: mirror.MirroredStrategy(["/gpu:0", "/gpu:1"], ReductionToOneDevice()),
    "mixed": lambda: mirror.MirroredStrategy(["/gpu:0", "/gpu:1", "/cpu:0"]),
    "CPUs": lambda: mirror.MirroredStrategy(["/cpu:0", "/cpu:1"]),
}


@rows("make", UNCHECKED)
def test_check_is_skipped_when_its_result_is_unused(make):
    with all_reduce_that("it fails") as asked:
        make()
    assert not asked


# Placement of values


@rows("layout", LAYOUTS)
def test_results_are_placed_on_their_devices(layout):
    n, home = layout.num_replicas_in_sync, home_of(layout)
    with layout.scope():
        made = jnp.ones(3)
    assert made.devices() == {home}

    def step(w, x):
        return {
            "own": w * x,
            "sum": context().all_reduce("sum", x),
            "joined": context().all_gather(x[None]),
            "id": context().replica_id_in_sync_group,
            "mirrored": w + 1,
        }

    got = layout.run(step, (np.float32(3), numbers(n)))
    for name in ("own", "id"):
        value = got[name]
        assert [v.devices() for v in value.values] == [{device} for device in layout.devices]
    np.testing.assert_array_equal(got["own"], 3 * np.arange(1, n + 1))
    np.testing.assert_array_equal(got["own"].stacked, 3 * np.arange(1, n + 1))
    np.testing.assert_array_equal(got["id"], range(n))
    for name in ("sum", "joined", "mirrored"):
        assert got[name].devices() == {home}, name
    assert float(got["sum"]) == n * (n + 1) / 2
    np.testing.assert_array_equal(got["joined"], np.arange(1, n + 1))
    assert float(got["mirrored"]) == 4
    again = layout.run(step, (got["mirrored"], got["own"]))
    np.testing.assert_array_equal(again["own"], 12 * np.arange(1, n + 1))


@pytest.mark.slow
@rows("layout", LAYOUTS)
def test_reductions_gathers_and_local_results_span_types(layout):
    n = layout.num_replicas_in_sync
    value = numbers(n)
    exact = np.arange(1, n + 1)
    for op in ("mean", "max"):
        got = layout.reduce(op, value)
        assert float(got) == getattr(np, op)(exact)
        assert got.devices() == {home_of(layout)}
    local = layout.local_results(got)
    assert [x.devices() for x in local] == [{device} for device in layout.devices]
    ragged = PerReplica([np.full(i, i, np.float32) for i in range(n)])
    np.testing.assert_array_equal(layout.gather(ragged), np.concatenate(ragged.values))
    assert float(layout.reduce("sum", ragged, axis=0)) == sum(i * i for i in range(n))


@rows("layout", LAYOUTS)
def test_values_from_a_function_are_placed_on_their_devices(layout):
    own = layout.distribute_values_from_function(
        lambda context: {"id": context.replica_id_in_sync_group, "x": np.ones(2)}
    )
    for value in own.values():
        assert [v.devices() for v in value.values] == [{device} for device in layout.devices]
    assert float(layout.reduce("sum", own["x"], axis=0)) == 2 * layout.num_replicas_in_sync


@pytest.mark.slow
@rows("layout", LAYOUTS)
def test_datasets_are_split_across_types(layout):
    n = layout.num_replicas_in_sync
    batch = {"x": np.arange(2 * n, dtype=np.float32), "y": np.ones((2 * n, 3), np.float32)}

    def step(batch):
        return context().all_reduce("sum", (batch["x"].sum(), batch["y"].sum()))

    for got in layout.distribute_dataset([batch, jax.tree.map(jnp.asarray, batch)]):
        assert [v.devices() for v in got["x"].values] == [{device} for device in layout.devices]
        np.testing.assert_array_equal(np.concatenate(got["x"].values), batch["x"])
        assert list(map(float, layout.run(step, (got,)))) == [batch["x"].sum(), 6 * n]
    masked = layout.distribute_dataset([np.ones(2 * n), np.ones(2 * n - 1)], remainder="pad")
    totals = [float(layout.reduce("sum", *pair[:1], axis=0, where=pair[1])) for pair in masked]
    assert totals == [2 * n, 2 * n - 1]


def test_cross_device_ops_span_types(mixed):
    """Reduces on the host, from any devices; no array spans devices of several types."""
    own = mixed.run(lambda x: x * 2, (numbers(2),))
    for ops in (mixed.cross_device_ops, AllReduce()):
        with mixed.scope():
            assert float(ops.reduce("sum", own)) == 6.0
        assert ops.reduce("sum", own, "/gpu:1").devices() == {GPUS[1]}
        copies = ops.broadcast(np.ones(2), ["/gpu:0", "/cpu:0"])
        assert [v.devices() for v in copies.values] == [{GPUS[0]}, {CPUS[0]}]
        fix = "broadcast(x, destinations)"
        with raises(ValueError, names="destinations", values=PAIR, fix=fix):
            ops.reduce("sum", own, ["/gpu:0", "/cpu:0"])


@rows("op", ["sum", "mean", "min", "max"])
def test_reduction_may_run_on_one_gpu(op):
    ops = ReductionToOneDevice("/gpu:0")
    strategy = mirror.MirroredStrategy(["/gpu:0", "/gpu:1"], ops)
    for dtype in ("float16", "bool"):
        rows = [np.array([3, 0, 1]).astype(dtype), np.array([1, 0, 2]).astype(dtype)]
        exact = getattr(np, op)(np.stack(rows).astype(np.float64), axis=0)
        with strategy.scope():
            for got in (strategy.reduce(op, PerReplica(rows)), ops.reduce(op, PerReplica(rows))):
                np.testing.assert_array_equal(np.asarray(got).astype(np.float64), exact)
                assert got.devices() == set(GPUS)
    large = PerReplica([np.float16(6e4)] * 2)
    assert float(strategy.reduce("mean", large)) == float(np.float16(6e4))


def test_custom_ops_run_on_several_types():
    class Counting(mirror.CrossDeviceOps):
        calls = 0

        def reduce_implementation(self, op, values):
            self.calls += 1
            return super().reduce_implementation(op, values)

    ops = Counting()
    strategy = mirror.MirroredStrategy(["/gpu:0", "/cpu:0"], ops)
    assert float(strategy.reduce("sum", numbers(2))) == 3.0
    assert ops.calls == 1


def test_random_samples_differ_between_replicas(mixed):
    key = jax.random.key(0)
    own, same = mixed.run(lambda k: (context().fold_in(k), jax.random.split(k)[0]), (key,))
    first, second = (jax.random.key_data(k).tolist() for k in own.values)
    assert first != second
    assert first == jax.random.key_data(jax.random.fold_in(key, 0)).tolist()
    assert same.devices() == {CPUS[0]}
    drawn = mixed.run(
        lambda rngs, x: nnx.Dropout(0.5)(x, rngs=rngs),
        (nnx.Rngs(dropout=0), np.ones(64, np.float32)),
    )
    assert not np.array_equal(*map(np.asarray, drawn.values))


# Training


@pytest.mark.slow
def test_nnx_trains_as_one_device(mixed, caplog):
    """Its state lies on one device, and further steps compile nothing."""
    trained = []
    for strategy in (mixed, cpu_strategy(1)):
        with strategy.scope():
            model = SyncBatchNorm(nnx.Rngs(0))
            optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
        data = list(strategy.distribute_dataset(batches((12,), 5, 12)))
        losses = [float(strategy.run(nnx_step, (model, optimizer, batch))) for batch in data]
        strategy.check_mirrored((model, optimizer))
        for leaf in jax.tree.leaves(nnx.state((model, optimizer))):
            assert leaf.devices() == {CPUS[0]}
        with compilations(caplog) as events:
            strategy.run(nnx_step, (model, optimizer, data[0]))
        assert_nothing_compiled(events)
        trained.append((losses, nnx.state(model)))
    for mine, other in zip(*map(jax.tree.leaves, trained), strict=True):
        np.testing.assert_allclose(mine, other, 1e-4, 1e-5)


@pytest.mark.slow
def test_checks_span_types(mixed):
    with mixed.scope():
        model = MLP(nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    (batch,) = mixed.distribute_dataset(batches((12,), 1, 4))
    assert mixed.verify(nnx_step, (model, optimizer, batch)).largest < 1e-5
    mixed.check_mirrored(model)
    with raises(mirror.ReplicaDivergenceError, names="model.first.kernel", fix="all_reduce"):
        mixed.run(
            lambda model, x: model.first.kernel.set_value(x),
            (model, PerReplica([np.zeros((12, 32), np.float32), np.ones((12, 32), np.float32)])),
        )
    mixed.check_mirrored(model)


def test_log_names_the_devices_of_a_step(mixed, caplog):
    mirror.debugging.set_log_device_placement(True)
    try:
        with caplog.at_level(logging.INFO, "mirror"):
            mixed.run(nnx_add, (np.float32(1), numbers(2)))
    finally:
        mirror.debugging.set_log_device_placement(False)
    lines = [record.getMessage() for record in caplog.records]
    steps = [line for line in lines if "nnx_add" in line]
    assert_message("\n".join(steps), names="nnx_add", values=PAIR)
    collectives = [line for line in lines if "all-reduce" in line]
    assert_message("\n".join(collectives), values=["/device:CPU:0", PAIR, 1, "4 bytes"])


def nnx_add(w, x):
    return w + context().all_reduce("sum", x)


def test_error_names_the_lost_value(mixed):
    """A deleted row, before the step and by hand."""
    own = mixed.run(lambda x: x, (numbers(2),))
    own.values[1].delete()
    with raises(ValueError, names="x", fix="donate_argnums"):
        mixed.run(lambda x: x, (own,))
    with raises(ValueError, names="reduce", values=["PerReplica(1.", "float32[]"]):
        mixed.cross_device_ops.reduce("sum", own)


@pytest.mark.filterwarnings("ignore:.*assumes that pure_callback")
def test_types_that_disagree_on_the_number_of_rounds_are_rejected(mixed):
    """As if the GPU and the CPU had rounded differently; the lanes would need other collectives."""
    limits = itertools.count()

    def step(x):
        of_shape = jax.ShapeDtypeStruct((), jnp.int32)
        limit = jax.pure_callback(lambda: np.int32(next(limits)), of_shape)
        return jax.lax.while_loop(
            lambda c: c[0] < limit, lambda c: (c[0] + 1, context().all_reduce("sum", c[1])), (0, x)
        )[1]

    with raises(
        ValueError, names="step", values=[False, True, 0, 1], fix="all_reduce('max', condition)"
    ):
        mixed.run(step, (numbers(2),))


def test_strategy_can_be_deep_copied(mixed):
    assert float(copy.deepcopy(mixed).reduce("sum", numbers(2))) == 3.0
