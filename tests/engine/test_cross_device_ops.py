"""Cross-device ops: called directly, in `run`, and implemented by a user.

Many tests show what `tf.distribute` does too, or say why it differs. Of its ops, those on sparse
slices have no counterpart here, nor have `merge_call` and hints to NCCL.
"""

import copy
import logging
import pickle
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import mirror
from mirror import AllReduce, PerReplica, ReductionToOneDevice
from tests.support import inside
from tests.support.inside import pretended_types
from tests.support.messages import assert_message, raises
from tests.support.steps import context
from tests.support.strategies import cpu_strategy
from tests.support.tables import Made, rows

CPUS = jax.devices("cpu")
OPS = Made(
    {
        "all-reduce": AllReduce,
        "on the host": ReductionToOneDevice,
        "on a device": lambda: ReductionToOneDevice("cpu:5"),
    }
)
REDUCTIONS = ["sum", "mean", "min", "max"]
KNOWN_OPS = {"fix": ["'sum'", "'mean'", "'min'", "'max'"]}
DTYPES = ["float32", "float16", "bfloat16", "int8", "int32", "uint8", "bool", "complex64"]
PLACES = {
    "on the host": lambda value, i: value,
    "on one device": lambda value, i: jax.device_put(value, CPUS[6]),
    "on one device each": lambda value, i: jax.device_put(value, CPUS[i]),
}


class InHalfPrecision(mirror.CrossDeviceOps):
    """Sends halves, and counts what it is asked for."""

    def __init__(self, pack_bytes=0):
        self.pack_bytes = pack_bytes
        self.calls = []

    def reduce_implementation(self, op, values):
        received = list(values)
        self.calls.append((op.value, received[0].dtype.name, received[0].shape, len(received)))
        if received[0].dtype == np.float32:
            received = [value.astype(np.float16).astype(np.float32) for value in received]
        return super().reduce_implementation(op, iter(received))


class StackedHalves(mirror.CrossDeviceOps):
    """Sends halves, on the devices."""

    def reduce_stacked(self, op, stacked):
        if stacked.dtype == jnp.float32:
            stacked = stacked.astype(jnp.float16).astype(jnp.float32)
        return getattr(stacked, op.value)(axis=0)


class ReturningStacked(mirror.CrossDeviceOps):
    """Returns what a function makes of all replicas' values."""

    def __init__(self, function):
        self.function = function

    def reduce_stacked(self, op, stacked):
        return self.function(stacked)


class Returning(mirror.CrossDeviceOps):
    """Returns what a function makes of the first replica's value."""

    def __init__(self, function):
        self.function = function

    def reduce_implementation(self, op, values):
        return self.function(next(values))


def per_replica(n, dtype="float32", place="on one device each", shape=(2, 3)):
    """Returns small numbers with exact sums in every dtype, and the same numbers in 64 bits."""
    rng = np.random.RandomState(n)
    values = [rng.randint(0, 4, shape).astype(jnp.dtype(dtype)) for _ in range(n)]
    wide = np.complex128 if dtype == "complex64" else np.float64
    exact = np.stack([np.asarray(value).astype(wide) for value in values])
    return PerReplica([PLACES[place](value, i) for i, value in enumerate(values)]), exact


def one_and_two():
    return PerReplica([jax.device_put(np.float32(i + 1), CPUS[i]) for i in range(2)])


small_sums = {"bool": "int32", "int8": "int32", "uint8": "uint32"}


def result_dtype(op, dtype):
    exact = dtype == "bool" or "int" in dtype
    if op == "mean" and exact:
        return "float32"
    return small_sums.get(dtype, dtype) if op == "sum" else dtype


# By hand


@pytest.mark.slow
@rows(
    "n, place",
    [
        (1, "on one device each"),
        (2, "on the host"),
        (2, "on one device"),
        (3, "on one device each"),
        (8, "on one device each"),
    ],
)
@rows("ops", OPS)
def test_reduce_matches_numpy(n, place, ops):
    values = {dtype: per_replica(n, dtype, place) for dtype in DTYPES}
    for op in REDUCTIONS:
        kept = {d: v for d, v in values.items() if op in ("sum", "mean") or d != "complex64"}
        got = ops.reduce(op, {dtype: value for dtype, (value, _) in kept.items()})
        for dtype, (value, exact) in kept.items():
            found = got[dtype]
            assert found.dtype == result_dtype(op, dtype), (op, dtype)
            wanted = getattr(np, op)(exact, axis=0)
            tolerance = 1e-2 if dtype in ("bfloat16", "float16") else 1e-6
            np.testing.assert_allclose(
                np.asarray(found).astype(exact.dtype), wanted, tolerance, err_msg=f"{op} {dtype}"
            )
            if place != "on the host":
                assert found.devices() == {d for row in value.values for d in row.devices()}


@pytest.mark.slow
@rows("shape", [(), (0,), (0, 3), (1, 1)])
@rows("ops", OPS)
def test_reduce_supports_any_shape(shape, ops):
    for place in PLACES:
        value, exact = per_replica(3, shape=shape, place=place)
        for op in REDUCTIONS:
            np.testing.assert_allclose(
                ops.reduce(op, value), getattr(np, op)(exact, axis=0), 1e-6, strict=False
            )


@rows("n", [2, 3])
@rows("ops", OPS)
def test_reduce_propagates_nan_infinity_and_signed_zeros(n, ops):
    rows = np.ones((n, 4), np.float32)
    rows[-1, 0], rows[0, 1], rows[:, 2], rows[:, 3] = np.nan, np.nan, np.inf, -0.0
    value = PerReplica(
        [jax.device_put(row, device) for row, device in zip(rows, CPUS, strict=False)]
    )
    for op in REDUCTIONS:
        got = np.asarray(ops.reduce(op, value))
        assert np.isnan(got[:2]).all(), op
        assert got[2] == np.inf, op
        assert got[3] == 0, op
    opposite = PerReplica([np.float32(np.inf), np.float32(-np.inf)])
    assert np.isnan(ops.reduce("sum", opposite))


HALVES = ["float16", "bfloat16"]


def exchanged(strategy, step, args):
    """Returns the dtypes that the collectives of a step add."""
    return sums_in(inside.lowered(strategy, step, args).as_text())


def sums_in(text):
    """Returns the dtypes that the collectives of a program add, in XLA's words."""
    collectives = re.split(r'"stablehlo\.(?:all_reduce|reduce_scatter)"', text)[1:]
    added = (re.search(r"stablehlo\.add .*?tensor<(\w+)>", each) for each in collectives)
    return {each.group(1) for each in added}


def reduced(op):
    return lambda x: mirror.all_reduce(op, x)


@rows("op", ["sum", "mean"])
@rows("dtype", HALVES)
@rows("devices, per_device", {"pmap": (4, 1), "vmap": (1, 4), "pairs": (2, 2)})
def test_steps_sum_half_precision_in_single(dtype, op, devices, per_device):
    """Host devices compute the same either way: XLA's program shows what GPUs add."""
    x = PerReplica([np.ones((4, 4), dtype)] * 4)
    wide = cpu_strategy(devices, replicas_per_device=per_device)
    narrow = cpu_strategy(
        devices, cross_device_ops=AllReduce(narrow=True), replicas_per_device=per_device
    )
    half = "f16" if dtype == "float16" else "bf16"
    for strategy, added in ((wide, "f32"), (narrow, half)):
        assert exchanged(strategy, reduced(op), (x,)) == ({added} if devices > 1 else set())
        assert strategy.run(reduced(op), (x,)).dtype == dtype


@rows("dtype", HALVES)
def test_steps_sum_half_precision_in_single_in_custom_ops(dtype):
    ops = InHalfPrecision()
    strategy = cpu_strategy(2, cross_device_ops=ops)
    x = PerReplica([np.ones(4, dtype)] * 2)
    assert strategy.run(reduced("sum"), (x,)).dtype == dtype
    assert [name for _, name, *_ in ops.calls] == ["float32"]


@rows("dtype", HALVES)
def test_sharded_update_scatters_half_precision_in_single(dtype):
    strategy = cpu_strategy(4, shard="optimizer")
    x = PerReplica([np.ones((4, 4), dtype)] * 4)
    with strategy.scope():
        total = nnx.metrics.MetricState(jnp.zeros((4, 4)))

    def step(total, x):
        total[...] += mirror.all_reduce("sum", x).astype(jnp.float32)

    text = inside.lowered(strategy, step, (total, x)).as_text()
    assert "reduce_scatter" in text
    assert sums_in(text) == {"f32"}


def test_trainers_sum_gradients_of_half_precision_in_single():
    """A step of `Trainer` sums, where many others average."""
    model = nnx.Linear(4, 2, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    trainer = mirror.Trainer(model, optax.sgd(0.1), "mse", strategy=cpu_strategy(2))
    batch = np.ones((4, 4), np.float32), np.ones((4, 2), np.float32)
    texts = []

    class Lowered(mirror.callbacks.Callback):
        def on_step(self, *_):
            texts.append(inside.lowered_text(trainer))

    trainer.fit([batch], progress=False, callbacks=Lowered())
    assert sums_in(texts[0]) == {"f32"}


@pytest.mark.slow
@rows("dtype", HALVES)
@rows("ops", OPS)
def test_reduce_sums_half_precision_in_single(dtype, ops):
    """An intermediate sum may overflow the dtype, and each summand may underflow it."""
    for place in PLACES:
        put = PLACES[place]
        large = [put(np.asarray(x, jnp.dtype(dtype)), i) for i, x in enumerate([3e4, 4e4, -4e4])]
        assert float(ops.reduce("sum", PerReplica(large))) == float(large[0])
        full = [put(np.asarray(6e4, jnp.dtype(dtype)), i) for i in range(3)]
        assert float(ops.reduce("mean", PerReplica(full))) == float(full[0])
        small = [256.0] + [1.0] * 7
        value = PerReplica([put(np.asarray(x, jnp.dtype(dtype)), i) for i, x in enumerate(small)])
        assert float(ops.reduce("sum", value)) in (263.0, 264.0)


@rows("ops", OPS)
def test_reduce_overflows_to_infinity_without_warning(ops):
    for dtype, most in [("float16", 6e4), ("float32", 3e38)]:
        rows = [jax.device_put(np.asarray(most, dtype), device) for device in CPUS[:2]]
        assert float(ops.reduce("sum", PerReplica(rows))) == np.inf
    assert int(ops.reduce("sum", PerReplica([np.uint8(200), np.uint8(201)]))) == 401


@rows("ops", OPS)
def test_reduce_places_results_on_the_destinations(ops):
    value = one_and_two()
    logical = mirror.config.LogicalDevice("/device:CPU:5", "CPU")
    destinations = {
        "/cpu:3": [3],
        ("/cpu:2", "cpu:1"): [2, 1],
        CPUS[4]: [4],
        logical: [5],
        ("CPU",): [0],
        None: [0, 1],
    }
    for destination, ids in destinations.items():
        got = ops.reduce("sum", value, destination)
        assert float(got) == 3.0
        assert [s.device.id for s in got.addressable_shards] == ids
        assert got.is_fully_replicated


NAMED, DEVICE = {"fix": "'/cpu:0'"}, {"fix": "list_logical_devices()"}
DESTINATIONS = {
    "none": ([], ValueError, {"names": "devices", "values": "[]", "fix": "None"}),
    "not a device name": ("", ValueError, {"values": "''", **NAMED}),
    "an unknown type": ("foo", ValueError, {"values": "'foo'", **NAMED}),
    "a missing device": (
        "gpu:7",
        ValueError,
        {"names": "'gpu:7'", "values": ["/device:GPU:7", "/device:CPU:0"]},
    ),
    "a repeated device": (
        ["cpu:1", "cpu:1"],
        ValueError,
        {"names": "devices", "values": "['cpu:1', 'cpu:1']"},
    ),
    "a number": (3, TypeError, {"values": "3 (int)", **DEVICE}),
    "a dict": ({"cpu:1": 1}, TypeError, {"values": "{'cpu:1': 1}", **DEVICE}),
    "a value": (PerReplica([1.0, 2.0]), TypeError, {"values": "PerReplica(1., 2.)", **DEVICE}),
}


@rows("destination, kind, wanted", DESTINATIONS)
@rows("ops", OPS)
def test_reduce_checks_destinations(destination, kind, wanted, ops):
    """The value is not a destination: by default, the result is on the devices of the value."""
    for call in (
        lambda: ops.reduce("sum", one_and_two(), destination),
        lambda: ops.batch_reduce("sum", [one_and_two()], destination),
        lambda: ops.broadcast(1.0, destination),
    ):
        with raises(kind, **wanted):
            call()


@rows("ops", OPS)
def test_reduce_accepts_any_destination(ops):
    value = one_and_two()
    assert float(ops.reduce("SUM", value)) == 3.0
    mean = ops.reduce(mirror.ReduceOp.MEAN, value)
    assert float(mean) == 1.5
    assert mean.devices() == set(CPUS[:2])
    assert ops.reduce("sum", value, "/cpu:4").devices() == {CPUS[4]}


@rows("ops", OPS)
def test_batch_reduce_and_broadcast_match_numpy(ops):
    got = ops.batch_reduce("sum", [one_and_two(), {"a": one_and_two(), "b": 1}], "cpu:1")
    assert jax.tree.map(float, got) == [3.0, {"a": 3.0, "b": 1.0}]
    assert {d for leaf in jax.tree.leaves(got) for d in leaf.devices()} == {CPUS[1]}
    copies = ops.broadcast(np.arange(3), ["/cpu:1", "/cpu:2"])
    assert [np.asarray(s.data).tolist() for s in copies.addressable_shards] == [[0, 1, 2]] * 2
    assert ops.broadcast(jnp.arange(3), "/cpu:7").devices() == {CPUS[7]}


@rows("ops", OPS)
def test_broadcast_accepts_arrays_and_rejects_other_values(ops, two):
    for value, dtype in [(3, "int32"), (3.5, "float32"), (True, "bool"), (np.uint8(3), "uint8")]:
        got = ops.broadcast(value, ["cpu:1", "cpu:2"])
        assert got.dtype == dtype
        assert got == value
    key = ops.broadcast(jax.random.key(3), ["cpu:1", "cpu:2"])
    np.testing.assert_array_equal(jax.random.key_data(key), jax.random.key_data(jax.random.key(3)))
    mirrored = two.reduce("sum", one_and_two())
    assert ops.broadcast(mirrored, ["cpu:6", "cpu:7"]).devices() == set(CPUS[6:])
    buffer = np.zeros(3, np.float32)
    kept = ops.broadcast(buffer, ["cpu:1", "cpu:2"])
    buffer[:] = 1
    assert not np.any(kept)
    for wrong, shown in [
        ("abc", "'abc' (str)"),
        (None, "None (NoneType)"),
        ([1, 2], "[1, 2] (list)"),
        (one_and_two(), "PerReplica(1., 2.)"),
        (np.array(["a"]), "<U1[1]"),
    ]:
        with raises(TypeError, names="broadcast", values=shown):
            ops.broadcast(wrong, "cpu:1")
    with pytest.raises(OverflowError, match="out of bounds for int32"):
        ops.broadcast(2**40, "cpu:1")


@rows("ops", OPS)
def test_batch_reduce_requires_a_list(ops):
    """Values are passed without destinations; TensorFlow's pairs of both have no counterpart."""
    assert ops.batch_reduce("sum", []) == []
    assert ops.batch_reduce("sum", (one_and_two(),)) == [3.0]
    with raises(TypeError, names="batch_reduce", values="PerReplica(1., 2.)"):
        ops.batch_reduce("sum", one_and_two())
    with raises(TypeError, names="PerReplica", values="'cpu:1' (str)"):
        ops.batch_reduce("sum", [(one_and_two(), "cpu:1")])


@rows("ops", OPS)
def test_reduce_treats_a_plain_array_as_one_replica(ops):
    assert float(ops.reduce("sum", 4.0, "CPU:0")) == 4.0
    both = ops.reduce("sum", 4.0, ["cpu:0", "cpu:1"])
    assert [float(s.data) for s in both.addressable_shards] == [4.0, 4.0]
    mean = ops.reduce("mean", 3)
    assert (float(mean), mean.dtype) == (3.0, np.float32)
    assert ops.reduce("sum", {"nothing": None}) == {"nothing": None}


@rows("ops", OPS)
def test_reduce_names_values_it_rejects(ops):
    keys = PerReplica.from_stacked(jax.random.split(jax.random.key(0), 2))
    unequal = PerReplica([np.ones(2), np.ones(3)])
    cases = [
        ("sum", keys, TypeError, {"fix": "jax.random.key_data(key)"}),
        (
            "max",
            PerReplica([1j, 2j]),
            TypeError,
            {"values": ["'max'", "complex128"], "fix": "abs(x)"},
        ),
        ("sum", "text", TypeError, {"names": "PerReplica", "values": "'text' (str)"}),
        (
            "sum",
            unequal,
            ValueError,
            {"values": [(2,), (3,)], "fix": "strategy.reduce(op, x, axis=0)"},
        ),
        ("median", one_and_two(), ValueError, {"names": "op", "values": "'median'", **KNOWN_OPS}),
        (3, one_and_two(), TypeError, {"names": "op", "values": "3 (int)", **KNOWN_OPS}),
    ]
    for op, value, kind, wanted in cases:
        with raises(kind, **wanted):
            ops.reduce(op, value)


@rows("ops", OPS)
def test_reduce_names_deleted_arrays(ops, two):
    value = one_and_two()
    value.stacked.delete()
    with raises(ValueError, names=["reduce", "PerReplica"], values="float32[2]"):
        ops.reduce("sum", value)
    array = two.reduce("sum", one_and_two())
    array.delete()
    with raises(ValueError, names="broadcast", values="float32[]"):
        ops.broadcast(array, "cpu:1")


@rows("ops", OPS)
def test_reduce_works_inside_a_scope_of_other_devices(ops):
    """Values on devices are reduced there; host values become arrays of the scope."""
    value, exact = per_replica(3)
    lone = [jax.device_put(np.float32(i), CPUS[6]) for i in range(2)]
    with cpu_strategy(2).scope():
        got = ops.reduce("sum", value)
        assert got.devices() == set(CPUS[:3])
        np.testing.assert_array_equal(got, exact.sum(axis=0))
        on_one = PerReplica(lone)
        assert ops.reduce("sum", on_one).devices() == {CPUS[6]}
        assert [float(v) for v in on_one.values] == [0.0, 1.0]
        assert ops.reduce("max", PerReplica([1.0, 2.0])).devices() == set(CPUS[:2])
        assert ops.reduce("mean", value, ["cpu:5", "cpu:7"]).devices() == {CPUS[5], CPUS[7]}
        assert ops.broadcast(2.0, "cpu:3").devices() == {CPUS[3]}


@rows("ops", OPS)
def test_reduce_rejects_calls_inside_a_replica(ops, two):
    """As for `strategy.reduce`: inside a replica, its context reduces values."""
    value = one_and_two()
    use = "mirror.all_reduce"
    kind = type(ops).__name__
    for step in (
        lambda x: ops.reduce("sum", x),
        lambda x: ops.batch_reduce("sum", [value]),
        lambda x: ops.reduce("sum", PerReplica([x, x])),
    ):
        with raises(RuntimeError, names=f"{kind}.reduce", fix=use):
            two.run(step, (value,))
        with raises(RuntimeError, names=f"{kind}.reduce", fix=use):
            jax.jit(step)(1.0)
    with raises(RuntimeError, names=f"{kind}.broadcast"):
        two.run(lambda x: ops.broadcast(x, "cpu:3"), (value,))


def test_log_names_the_reducing_device(caplog):
    value, _ = per_replica(3)
    mirror.debugging.set_log_device_placement(True)
    try:
        AllReduce().reduce("sum", value)
        ReductionToOneDevice().reduce("sum", value)
        AllReduce().broadcast(1.0, ["cpu:1", "cpu:2"])
    finally:
        mirror.debugging.set_log_device_placement(False)
    three, two = "(/device:CPU:0, /device:CPU:1, /device:CPU:2)", "(/device:CPU:1, /device:CPU:2)"
    for op, where in [("all_reduce", three), ("device_put", three), ("device_put", two)]:
        assert any(op in line and where in line for line in caplog.messages), (op, where)


@rows("ops", OPS)
def test_host_values_are_placed_on_the_default_device(ops):
    with mirror.device("cpu:4"):
        assert ops.reduce("sum", PerReplica([1.0, 2.0])).devices() == {CPUS[4]}
        assert ops.reduce("sum", one_and_two()).devices() == set(CPUS[:2])


# The objects


@rows(
    "make, shown",
    [
        (AllReduce, "AllReduce(pack_bytes=None)"),
        (lambda: AllReduce(64), "AllReduce(pack_bytes=64)"),
        (ReductionToOneDevice, "ReductionToOneDevice('/CPU:0')"),
        (lambda: ReductionToOneDevice(CPUS[3]), "ReductionToOneDevice('/device:CPU:3')"),
        (
            lambda: ReductionToOneDevice(mirror.config.LogicalDevice("/device:CPU:2", "CPU")),
            "ReductionToOneDevice('/device:CPU:2')",
        ),
    ],
)
def test_ops_can_be_copied_and_pickled_after_use(make, shown):
    ops = make()
    assert float(ops.reduce("sum", one_and_two())) == 3.0
    assert ops.device.platform == "cpu"
    for twin in (ops, copy.copy(ops), copy.deepcopy(ops), pickle.loads(pickle.dumps(ops))):
        assert repr(twin) == shown
        assert twin.pack_bytes == ops.pack_bytes
        assert twin.device == ops.device
    strategy = cpu_strategy(2, cross_device_ops=ops)
    for one in (strategy, copy.deepcopy(strategy)):
        assert float(one.reduce("sum", one_and_two())) == 3.0
        assert repr(one.cross_device_ops) == shown


def test_constructors_check_arguments():
    for kind in (AllReduce, lambda b: ReductionToOneDevice("cpu:0", b)):
        with raises(ValueError, names="pack_bytes", values=[-1, 0]):
            kind(-1)
        for wrong, shown in [("8", "'8' (str)"), (1.5, "1.5 (float)"), (True, "True (bool)")]:
            with raises(TypeError, names="pack_bytes", values=shown):
                kind(wrong)
    with raises(ValueError, values="'foo'", **NAMED):
        ReductionToOneDevice("foo")
    for wrong, shown in [(3, "3 (int)"), (None, "None (NoneType)")]:
        with raises(TypeError, names="device", values=shown, **NAMED):
            ReductionToOneDevice(wrong)
    absent = ReductionToOneDevice("gpu:7")
    with raises(mirror.InvalidDeviceError, values=["/device:GPU:7", "/device:CPU:0"]):
        cpu_strategy(2, cross_device_ops=absent)
    for wrong in ("nccl", AllReduce):
        names = ["cross_device_ops", "CrossDeviceOps"]
        with raises(TypeError, names=names, values=repr(wrong), fix="mirror.AllReduce()"):
            cpu_strategy(2, cross_device_ops=wrong)


# In steps


def reductions(tree):
    context = mirror.get_replica_context()
    ordered = {k: v for k, v in tree.items() if k != "complex64"}
    return {
        op: context.all_reduce(op, tree if op in ("sum", "mean") else ordered) for op in REDUCTIONS
    }


MADE = Made(
    {
        "all-reduce": AllReduce,
        "one by one": lambda: AllReduce(0),
        "packed": lambda: AllReduce(1 << 20),
        "on the host": ReductionToOneDevice,
        "on the host, one by one": lambda: ReductionToOneDevice(pack_bytes=0),
        "of the user": InHalfPrecision,
        "of the user, on the devices": StackedHalves,
    }
)


@rows("ops", MADE)
def test_ops_in_a_step_match_numpy(ops):
    """Three replicas are reduced correctly. TensorFlow's hierarchical copy loses the third."""
    n = 3
    strategy = cpu_strategy(n, cross_device_ops=ops)
    values = {dtype: per_replica(n, dtype, "on the host") for dtype in DTYPES}
    got = strategy.run(reductions, ({d: value for d, (value, _) in values.items()},))
    for op, tree in got.items():
        for dtype, found in tree.items():
            assert found.dtype == result_dtype(op, dtype), (op, dtype)
            exact = values[dtype][1]
            tolerance = 1e-2 if dtype in ("bfloat16", "float16") else 1e-3
            np.testing.assert_allclose(
                np.asarray(found).astype(exact.dtype),
                getattr(np, op)(exact, axis=0),
                0 if "int" in dtype and op != "mean" else tolerance,
                err_msg=f"{op} {dtype}",
            )


@rows("ops", OPS)
def test_ops_support_an_odd_number_of_devices(ops):
    value = PerReplica([jax.device_put(np.float32(i + 1), CPUS[i]) for i in range(3)])
    assert float(ops.reduce("sum", value)) == 6.0
    assert float(cpu_strategy(3, cross_device_ops=ops).reduce("sum", value)) == 6.0


@rows(
    "pack_bytes, shapes",
    [
        (0, [(2,), (3,), (2, 2), (20,)]),
        (16, [(20,), (9,)]),
        (12, [(2, 2), (20,), (5,)]),
        (1000, [(29,)]),
    ],
)
def test_small_leaves_share_a_collective(pack_bytes, shapes):
    """A limit on the size of each leaf, instead of a number of packs or a size of each pack."""
    ops = InHalfPrecision(pack_bytes)
    tree = [np.ones(shape, np.float32) for shape in [(2,), (3,), (2, 2), (20,)]]
    got = cpu_strategy(2, cross_device_ops=ops).run(
        lambda *leaves: context().all_reduce("sum", leaves),
        tuple(PerReplica([leaf, leaf]) for leaf in tree),
    )
    for found, leaf in zip(got, tree, strict=True):
        np.testing.assert_array_equal(found, 2 * leaf)
    assert sorted(shape for *_, shape, _ in ops.calls) == sorted(shapes)


def test_custom_ops_run_every_collective():
    """For every executor and dtype; TensorFlow does not for int32, and rarely on CPUs."""
    ops = InHalfPrecision()
    strategy = cpu_strategy(2, cross_device_ops=ops)
    tree = {"f": PerReplica([1.0, 2.0]), "i": PerReplica([1, 2]), "b": PerReplica([True, True])}
    ways = [
        lambda: strategy.reduce("sum", tree),
        lambda: ops.reduce("sum", tree),
        lambda: ops.batch_reduce("sum", [tree])[0],
        lambda: strategy.run(lambda t: context().all_reduce("sum", t), (tree,)),
        lambda: strategy.run(lambda t: jax.lax.psum(t, mirror.REPLICA_AXIS), (tree,)),
    ]
    for way in ways:
        ops.calls.clear()
        assert jax.tree.map(float, way()) == {"f": 3.0, "i": 3.0, "b": 2.0}
        assert sorted((op, shape, n) for op, _, shape, n in ops.calls) == [("sum", (), 2)] * 3


def test_custom_ops_define_the_reduction(caplog):
    """Reduces in half precision: 2049 arrives as 2048."""
    ops = InHalfPrecision()
    with caplog.at_level(logging.INFO, "mirror"):
        strategy = cpu_strategy(3, cross_device_ops=ops)
    assert_message(caplog.text, names=["staged", "cross_device_ops"])
    value = PerReplica([np.float32(2049)] * 3)
    for got in (strategy.reduce("sum", value), ops.reduce("sum", value)):
        assert float(got) == 3 * 2048
    assert float(strategy.reduce("mean", value)) == float(ops.reduce("mean", value)) == 2048
    assert float(strategy.reduce("max", value)) == 2048


LAYOUTS = {
    "pmap": lambda: cpu_strategy(4, cross_device_ops=StackedHalves()),
    "pairs": lambda: cpu_strategy(2, cross_device_ops=StackedHalves(), replicas_per_device=2),
    "vmap": lambda: cpu_strategy(1, cross_device_ops=StackedHalves(), replicas_per_device=4),
}
IN_PAIRS = [[0, 1], [2, 3]]


@rows("make", LAYOUTS)
def test_stacked_ops_define_every_reduction(make):
    """Also within groups, of parts, and packed: 2049 arrives as 2048."""
    strategy = make()
    value = PerReplica([np.float32(2049)] * 4)
    axis = mirror.REPLICA_AXIS

    def step(x):
        two = jnp.full(2, x)
        return (
            jax.lax.psum(x, axis),
            jax.lax.pmean(two, axis),
            jax.lax.pmax(x, axis),
            jax.lax.psum(x, axis, axis_index_groups=IN_PAIRS),
            jax.lax.psum_scatter(jnp.full(4, x), axis, tiled=True),
            jax.lax.pmax(x > 3, axis),
            mirror.all_reduce("sum", {"i": x.astype(int), "empty": jnp.zeros((0, 3))}),
        )

    total, mean, most, pairs, parts, above, others = strategy.run(step, (value,))
    assert (float(total), float(most), bool(above)) == (4 * 2048, 2048, True)
    np.testing.assert_array_equal(mean, [2048, 2048])
    np.testing.assert_array_equal(pairs.values, [2 * 2048] * 4)
    np.testing.assert_array_equal(np.concatenate(parts.values), [4 * 2048] * 4)
    assert (int(others["i"]), others["empty"].shape) == (4 * 2049, (0, 3))
    assert float(strategy.reduce("mean", value)) == 2048
    assert float(strategy.cross_device_ops.reduce("sum", value)) == 4 * 2048


def test_stacked_ops_are_compiled_in_order():
    """The reduction sees the replicas in order, and no stage runs on the host."""
    ops = ReturningStacked(lambda x: x[0] - x[1] * x[2])
    strategy = cpu_strategy(3, cross_device_ops=ops)
    value = PerReplica([np.float32(x) for x in (7, 2, 3)])
    assert float(strategy.reduce("sum", value)) == float(ops.reduce("sum", value)) == 1
    text = inside.lowered(strategy, reduced("sum"), (value,)).as_text()
    assert "all_gather" in text
    assert "all_reduce" not in text


def test_stacked_ops_run_on_mixed_devices_too():
    with pretended_types(["CPU", "GPU"]):
        strategy = mirror.MirroredStrategy(jax.devices("cpu")[:2], StackedHalves())
        assert float(strategy.reduce("sum", PerReplica([np.float32(2049)] * 2))) == 2 * 2048


UNEQUAL = {"values": "'sum'", "fix": "override reduce_implementation"}
WRONG_STACKED = {
    "another shape": (lambda x: x, TypeError, {"values": "float32[2,2]"}),
    "a wider kind": (lambda x: x[0] * 1j, TypeError, {"values": "complex64[2]"}),
    "nothing": (lambda x: None, TypeError, {"values": "None"}),
    "two arrays": (lambda x: (x[0], x[1]), TypeError, {"values": "float32[2], float32[2]"}),
    "an error": (lambda x: 1 // 0, RuntimeError, {"values": "ZeroDivisionError"}),
    "NumPy": (lambda x: np.asarray(x)[0], RuntimeError, {"values": "TracerArrayConversionError"}),
    "the host": (lambda x: (jax.debug.print("{}", x), x[0])[1], RuntimeError, UNEQUAL),
}
OF_A_REPLICA = {
    "a collective": (lambda x: jax.lax.psum(x[0], mirror.REPLICA_AXIS), RuntimeError, UNEQUAL),
    "the id": (lambda x: x[jax.lax.axis_index(mirror.REPLICA_AXIS)], RuntimeError, UNEQUAL),
}


@rows("function, kind, wanted", {**WRONG_STACKED, **OF_A_REPLICA})
def test_errors_of_stacked_ops_name_the_collective(function, kind, wanted):
    ops = ReturningStacked(function)
    value = PerReplica([np.ones(2, np.float32)] * 2)
    with raises(kind, names=["ReturningStacked.reduce_stacked", "test_cross_device_ops"], **wanted):
        cpu_strategy(2, cross_device_ops=ops).run(reduced("sum"), (value,))


@rows("function, kind, wanted", WRONG_STACKED)
def test_errors_of_stacked_ops_with_several_replicas_per_device(function, kind, wanted):
    strategy = cpu_strategy(1, cross_device_ops=ReturningStacked(function), replicas_per_device=2)
    value = PerReplica([np.ones(2, np.float32)] * 2)
    with raises(kind, names="ReturningStacked.reduce_stacked", **wanted):
        strategy.run(reduced("sum"), (value,))


def test_custom_ops_override_one_method():
    class Both(mirror.CrossDeviceOps):
        def reduce_stacked(self, op, stacked):
            return stacked.sum(0)

        def reduce_implementation(self, op, values):
            return sum(values)

    for kind, found in [(mirror.CrossDeviceOps, "neither"), (Both, "both")]:
        names = ["reduce_stacked", "reduce_implementation"]
        with raises(TypeError, names=[kind.__name__, *names], values=found):
            kind()


def test_custom_reduction_replaces_the_sum():
    """The custom reduction replaces the sum; the mean divides its result."""

    class Largest(mirror.CrossDeviceOps):
        def reduce_implementation(self, op, values):
            return np.max(list(values), axis=0)

    strategy = cpu_strategy(2, cross_device_ops=Largest())
    for reduce in (strategy.reduce, Largest().reduce):
        assert float(reduce("sum", one_and_two())) == 2.0
        assert float(reduce("mean", one_and_two())) == 1.0


WRONG = {  # function, error, and what its message contains
    "another shape": (lambda x: x[None], ValueError, ["float32[1,2]"]),
    "a wider kind": (lambda x: x * 1j, ValueError, ["complex64[2]"]),
    "nothing": (lambda x: None, ValueError, ["object[]"]),
    "text": (lambda x: np.array(["a", "b"]), ValueError, ["<U1[2]"]),
    "an error": (lambda x: 1 // 0, RuntimeError, ["'sum'", "ZeroDivisionError", "division"]),
    "a change": (lambda x: x.fill(0), RuntimeError, ["'sum'", "ValueError", "read-only"]),
}


@rows("function, kind, values", WRONG)
def test_errors_of_custom_ops_name_the_collective(function, kind, values):
    ops = Returning(function)
    strategy = cpu_strategy(2, cross_device_ops=ops)
    value = PerReplica([jax.device_put(np.ones(2, np.float32), CPUS[i]) for i in range(2)])

    def step(x):
        return context().all_reduce("sum", x)

    who, values = "Returning.reduce_implementation", [*values, "float32[2]"]
    with raises(kind, names=[who, "test_cross_device_ops.py", "step"], values=values):
        strategy.run(step, (value,))
    with raises(kind, names=who, values=values):
        ops.reduce("sum", value)


@rows(
    "function",
    {
        "wider": lambda x: x.astype(np.float64),
        "on a device": jnp.asarray,
        "a list": np.ndarray.tolist,
    },
)
def test_custom_ops_may_return_another_precision_or_device(function):
    strategy = cpu_strategy(2, cross_device_ops=Returning(function))
    got = strategy.reduce("sum", PerReplica([np.ones(2, np.float32)] * 2))
    np.testing.assert_array_equal(got, [1, 1])
    assert got.dtype == np.float32
    assert got.devices() == set(CPUS[:2])


@rows("ops", OPS)
def test_strategy_reduce_checks_its_values(ops):
    """The counterpart of TensorFlow's `reduce_to`; it reduces mirrored values too."""
    strategy = cpu_strategy(2, cross_device_ops=ops)
    with raises(ValueError, names="op", values="'median'", **KNOWN_OPS):
        strategy.reduce("median", one_and_two())
    mixed = {"i": PerReplica([1, 2]), "f": [PerReplica([1.0, 2.0])]}
    assert jax.tree.map(float, strategy.reduce("sum", mixed)) == {"i": 3.0, "f": [3.0]}
    use = "mirror.all_reduce"
    with raises(RuntimeError, names="strategy.reduce", fix=use):
        strategy.run(lambda x: strategy.reduce("sum", x), (1.0,))


# Collectives of a replica


@rows("n, total", [(2, 3.0), (4, 10.0)])
@rows("ops", OPS)
def test_all_reduce_accepts_ops_by_name(n, total, ops):
    strategy = cpu_strategy(n, cross_device_ops=ops)

    def step():
        replica = mirror.get_replica_context()
        number = replica.replica_id_in_sync_group.astype(jnp.float32) + 1
        names = ["sum", "SUM", mirror.ReduceOp.SUM, "Mean", mirror.ReduceOp.MEAN]
        return [replica.all_reduce(op, number) for op in names]

    assert list(map(float, strategy.run(step))) == [total] * 3 + [total / n] * 2


@rows("ops", OPS)
def test_all_reduce_rejects_unknown_ops(ops):
    strategy = cpu_strategy(2, cross_device_ops=ops)
    for wrong, kind in [(3, TypeError), (None, TypeError), ("median", ValueError)]:
        with raises(kind, names="op", values=repr(wrong), **KNOWN_OPS):
            strategy.run(lambda wrong=wrong: context().all_reduce(wrong, 1.0))


@rows("ops", OPS)
def test_all_reduce_supports_trees_of_several_dtypes(ops):
    """A number, an empty tree, and int32 beside float32 are accepted."""

    def step(x):
        tree = {"a": [x, 2.5, None], "b": (x.astype(jnp.int32), np.ones(2)), "c": []}
        return context().all_reduce("sum", tree)

    got = cpu_strategy(2, cross_device_ops=ops).run(step, (PerReplica([1.0, 2.0]),))
    assert got["c"] == []
    assert got["a"][2] is None
    assert [float(x) for x in got["a"][:2]] == [3.0, 5.0]
    assert (got["b"][0].dtype, int(got["b"][0])) == (jnp.int32, 3)
    np.testing.assert_array_equal(got["b"][1], [2, 2])


@rows("ops", OPS)
def test_all_reduce_keeps_dtypes_of_sums_and_means(ops):
    """The mean of integers is float32, as JAX has it. Small integers and complex numbers add up."""
    strategy = cpu_strategy(2, cross_device_ops=ops)
    own = PerReplica([np.uint8(200), np.uint8(201)])
    tree = {"u": own, "c": PerReplica([np.complex64(1 + 2j), np.complex64(3)]), "i": own}
    total = strategy.reduce("sum", tree)
    assert (int(total["u"]), complex(total["c"])) == (401, 4 + 2j)
    mean = strategy.reduce("mean", tree)
    assert (float(mean["u"]), complex(mean["c"])) == (200.5, 2 + 1j)
    assert mean["u"].dtype == np.float32


@rows("ops", OPS)
def test_all_reduce_counts_mirrored_values_per_replica(ops):
    """TensorFlow returns a tensor unchanged that all replicas captured or were given, so a sum
    depends on whether it was copied before.
    """
    strategy, shared = cpu_strategy(3, cross_device_ops=ops), jnp.float32(3)

    def step(given):
        captured, made = shared + 0, jnp.float32(3)
        return context().all_reduce("sum", [shared, captured, given, made])

    assert list(map(float, strategy.run(step, (shared,)))) == [9.0] * 4


@rows("ops", OPS)
def test_all_reduce_accepts_variables(ops):
    strategy = cpu_strategy(2, cross_device_ops=ops)
    with strategy.scope():
        mirrored = mirror.Variable(2.0)
        own = mirror.Variable(0.0, synchronization="on_read", aggregation="sum")

    def step(mirrored, own, x):
        own.assign(x)
        both = [mirrored[...], own[...]]
        return context().all_reduce("sum", both), context().all_reduce("mean", both)

    got = strategy.run(step, (mirrored, own, PerReplica([3.0, 5.0])))
    assert jax.tree.map(float, got) == ([4.0, 8.0], [2.0, 4.0])


@rows("ops", OPS)
def test_all_reduce_is_differentiable(ops):
    """The gradient of a sum is a sum, the gradient of a mean is a mean; second derivatives too."""
    strategy = cpu_strategy(2, cross_device_ops=ops)

    def reduced(op, x):
        return context().all_reduce(op, x)

    def step(x, c):
        square = jax.grad(lambda x: reduced("sum", x * x))
        return {
            "sum": jax.grad(lambda x: reduced("sum", x) * c)(x),
            "mean": jax.grad(lambda x: reduced("mean", x) * c)(x),
            "square": square(x),
            "twice": jax.grad(square)(x),
        }

    got = strategy.run(step, (PerReplica([2.0, 3.0]), PerReplica([1.0, 3.0])))
    wanted = {"sum": [4, 4], "mean": [2, 2], "square": [8, 12], "twice": [4, 4]}
    for name, value in got.items():
        assert np.broadcast_to(value, 2).tolist() == wanted[name], name


@rows("ops", OPS)
def test_all_reduce_works_in_a_uniform_branch(ops):
    """Under a nested jit and in a loop too. If the replicas may disagree, it is rejected."""
    strategy = cpu_strategy(2, cross_device_ops=ops)

    def step(x):
        total = jax.jit(lambda x: context().all_reduce("sum", x))(x)
        return jax.lax.fori_loop(
            0,
            2,
            lambda _, y: jax.lax.cond(
                total > 0, lambda y: context().all_reduce("sum", y), lambda y: y, y
            ),
            total,
        )

    assert float(strategy.run(step, (PerReplica([1.0, 2.0]),))) == 12.0
    with raises(mirror.ReplicaDivergenceError, names="x", values="cond", fix="all_reduce"):
        strategy.run(
            lambda x: jax.lax.cond(x > 1, lambda: context().all_reduce("sum", x), lambda: x),
            (PerReplica([1.0, 2.0]),),
        )


# Outside


def test_strategy_reduce_checks_arguments(two):
    """`axis` may be omitted: only the replica axis is reduced then."""
    value = PerReplica([np.array([1.0, 2.0]), np.array([3.0, 4.0])])
    np.testing.assert_array_equal(two.reduce("SUM", value), [4, 6])
    np.testing.assert_array_equal(two.reduce("max", value), [3, 4])
    for wrong, kind in [("median", ValueError), (3, TypeError)]:
        with raises(kind, names="op", values=repr(wrong), **KNOWN_OPS):
            two.reduce(wrong, value, axis=0)


def test_strategy_reduce_is_elementwise_over_replicas(two):
    """The result is mirrored, on all devices, also under `mirror.device`."""
    value = PerReplica([np.array([1.0, 5.0]), np.array([2.0, 6.0])])
    with mirror.device("cpu:3"):
        got = two.reduce("mean", value)
    np.testing.assert_array_equal(got, [1.5, 5.5])
    assert got.devices() == set(CPUS[:2])


def test_strategy_reduce_reduces_along_axes(two):
    value = PerReplica([np.ones((2, 3)), np.zeros((2, 3))])
    for axis, wanted in [((0, 1), 6.0), ([0, 1], 6.0), (-1, [3, 3]), ((0, -1), 6.0)]:
        np.testing.assert_array_equal(two.reduce("sum", value, axis=axis), wanted)
    assert float(two.reduce("mean", value, axis=(0, 1))) == 0.5
    with raises(ValueError, names="axis", values=[2, (2, 3)]):
        two.reduce("sum", value, axis=2)
    with raises(ValueError, names="axis", values=[0, ()]):
        two.reduce("sum", PerReplica([1.0, 2.0]), axis=0)
    for wrong in (1.5, "0"):
        with raises(TypeError, names="axis", values=repr(wrong)):
            two.reduce("sum", value, axis=wrong)


@rows("n", [1, 2])
def test_result_dtypes_do_not_depend_on_the_number_of_replicas(n):
    strategy = cpu_strategy(n)
    for dtype, of_mean in [("int32", "float32"), ("float16", "float16"), ("bool", "float32")]:
        value = PerReplica([np.ones(2, dtype)] * n)
        for axis in (None, 0):
            assert strategy.reduce("mean", value, axis=axis).dtype == of_mean
    assert strategy.reduce("sum", PerReplica([np.int32(1)] * n)).dtype == np.int32


def test_strategy_reduce_counts_plain_values_once_per_replica(two):
    """One rule for all values; TensorFlow returns some and rejects others."""
    for value in (3.0, np.float32(3), jnp.float32(3), two.reduce("mean", 3.0)):
        assert float(two.reduce("sum", value)) == 6.0
        assert float(two.reduce("mean", value)) == 3.0
    assert float(two.reduce("sum", np.array([3.0, 4.0]), axis=0)) == 14.0
    assert float(two.reduce("mean", np.array([3.0, 4.0]), axis=0)) == 3.5
    np.testing.assert_array_equal(two.reduce("sum", np.zeros(2)), [0, 0])


def test_strategy_reduce_reduces_trees_along_an_axis(two):
    tree = {"a": [PerReplica([np.ones(2), np.ones(2)])], "b": (np.ones(3), None)}
    got = two.reduce("sum", tree, axis=0)
    assert (float(got["a"][0]), float(got["b"][0]), got["b"][1]) == (4.0, 6.0, None)


def test_strategy_reduce_checks_the_contents_of_per_replica_values(two):
    for values, total in [
        ([1.0, 2.0], 3.0),
        ([1, 2], 3),
        ([True, True], 2),
        ([np.float32(1)] * 2, 2),
    ]:
        assert float(two.reduce("sum", PerReplica(values))) == total
    with raises(TypeError, names="PerReplica", values="'a' (str)"):
        PerReplica(["a", "b"])


def test_strategy_reduce_requires_the_cross_replica_context(two):
    for place in (two.scope(), mirror.device("cpu:0")):
        with place:
            assert float(two.reduce("sum", PerReplica([1.0, 2.0]))) == 3.0
    use = "mirror.all_reduce"
    with raises(RuntimeError, names="strategy.reduce", fix=use):
        two.run(lambda: two.reduce("sum", 1.0))


def test_local_results_returns_one_value_per_replica(two):
    """A tree gives one tree per replica; leaves that are not `PerReplica` are in each of them."""
    own = PerReplica([1.0, 2.0])
    assert [float(x) for x in two.local_results(own)] == [1.0, 2.0]
    assert two.local_results(5) == (5, 5)
    assert two.local_results([]) == ([], [])
    first, second = two.local_results({"a": own, "b": 7})
    assert (float(first["a"]), float(second["a"]), first["b"], second["b"]) == (1.0, 2.0, 7, 7)
