"""The constructor of a strategy, compared with `tf.distribute.MirroredStrategy`."""

import contextlib
import copy
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import mirror
from tests.support.messages import raises
from tests.support.strategies import cpu_strategy
from tests.support.tables import rows

CPUS = jax.devices("cpu")
JOB = "/job:localhost/replica:0/task:0"
ALL = f"({', '.join(f'/device:CPU:{i}' for i in range(8))})"


def total(strategy) -> jax.Array:
    """1 + 2 + ... + n, by a collective of float32."""
    return strategy.run(step)


def step():
    context = mirror.get_replica_context()
    return context.all_reduce("sum", jnp.float32(context.replica_id_in_sync_group + 1))


@pytest.mark.parametrize("arguments", [(), (None,)])
def test_strategy_uses_all_devices_by_default(arguments):
    strategy = mirror.MirroredStrategy(*arguments)
    assert strategy.num_replicas_in_sync == 8
    assert strategy.devices == tuple(CPUS)
    assert total(strategy) == 36


@rows("empty", [[], (), iter([])])
def test_empty_list_of_devices_is_rejected(empty):
    """In TensorFlow it means all devices. An empty list is more likely a mistake."""
    with raises(ValueError, names="devices", values="[]", fix="None"):
        mirror.MirroredStrategy(empty)


@rows("order", [[2, 0], [0, 1, 2], [7, 3, 5, 1]])
def test_replicas_follow_the_order_of_the_devices(order):
    strategy = mirror.MirroredStrategy([f"CPU:{i}" for i in order])
    assert strategy.devices == tuple(CPUS[i] for i in order)
    assert strategy.num_replicas_in_sync == len(order)
    ids = strategy.run(lambda: mirror.get_replica_context().replica_id_in_sync_group)
    assert [next(iter(v.devices())).id for v in ids.values] == order
    np.testing.assert_array_equal(ids, range(len(order)))


SAME = ["CPU:1", "/cpu:1", "/device:cpu:1", f"{JOB}/device:CPU:1", CPUS[1]]


@rows("again", SAME)
def test_repeated_device_is_rejected(again):
    """With a ValueError, like all bad devices; TensorFlow raises an AssertionError."""
    repeated = "(/device:CPU:0, /device:CPU:1, /device:CPU:1)"
    with raises(ValueError, names="devices", values=repeated):
        mirror.MirroredStrategy(["cpu:0", "CPU:1", again])


def test_devices_may_be_names_logical_devices_or_jax_devices():
    logical = mirror.config.list_logical_devices("CPU")
    for devices in (["CPU:1", "CPU:2"], ("/cpu:1", logical[2]), logical[1:3], CPUS[1:3]):
        assert mirror.MirroredStrategy(devices).devices == tuple(CPUS[1:3])


@rows("one", ["CPU:0", "foo", mirror.config.LogicalDevice("/device:CPU:0", "")])
def test_single_device_instead_of_a_list_is_rejected(one):
    fix = f"MirroredStrategy([{one!r}])"
    with raises(ValueError, names="devices", values=repr(one), fix=fix):
        mirror.MirroredStrategy(one)


def test_invalid_device_name_is_rejected():
    with raises(ValueError, values="'foo'", fix=["'/cpu:0'", "'GPU:1'"]):
        mirror.MirroredStrategy(["CPU:0", "foo"])


@pytest.mark.parametrize(
    ("devices", "missing"),
    [(["CPU:0", "CPU:9"], "/device:CPU:9"), (["GPU:0", "GPU:1"], "/device:GPU:0")],
    ids=str,
)
def test_missing_device_is_rejected_immediately(devices, missing):
    """TensorFlow puts both replicas on CPU:0, or hangs at the first collective."""
    with raises(ValueError, names="devices", values=[missing, ALL]):
        mirror.MirroredStrategy(devices)


def test_soft_placement_does_not_apply_to_strategies():
    mirror.config.set_soft_device_placement(True)
    try:
        with raises(ValueError, values="/device:CPU:9"):
            mirror.MirroredStrategy(["CPU:0", "CPU:9"])
    finally:
        mirror.config.set_soft_device_placement(False)


ELSEWHERE = {  # the devices, and the first one of another process
    "two workers": (["/job:worker/task:0/cpu:0", "/job:worker/task:1/cpu:0"], 0),
    "here and there": (["/job:localhost/cpu:0", "/job:worker/task:0/cpu:0"], 1),
    "no task": (["/job:worker/cpu:0"], 0),
    "another task": ([f"{JOB}/cpu:0", "/task:1/cpu:0"], 1),
}


@rows("devices, first", ELSEWHERE.values())
def test_devices_of_other_processes_are_rejected(devices, first):
    """With one kind of error; TensorFlow has three."""
    with raises(ValueError, values=[repr(devices[first]), JOB]):
        mirror.MirroredStrategy(devices)


CLUSTERS = {
    "a worker": ('{"worker": ["a:1", "b:1"]}', "worker", "process 1 of 2"),
    "the evaluator": ('{"worker": ["a:1", "b:1"], "evaluator": ["c:1", "d:1"]}', "evaluator", ""),
    "parameter servers": ('{"ps": ["a:1"], "worker": ["b:1", "c:1"]}', "worker", ""),
    "no JSON": ("{", "worker", ""),
}


@rows("cluster, task, warning", CLUSTERS)
def test_cluster_in_the_environment_is_a_warning(cluster, task, warning, monkeypatch):
    config = f'{{"cluster": {cluster}, "task": {{"type": "{task}", "index": 1}}}}'
    monkeypatch.setenv("TF_CONFIG", config)
    with pytest.warns(UserWarning, match=warning) if warning else contextlib.nullcontext():
        assert mirror.MirroredStrategy().devices == tuple(CPUS)


def test_all_reduce_is_the_default():
    """XLA chooses the algorithm, NCCL on GPUs; TensorFlow names its algorithms."""
    assert type(cpu_strategy(2).cross_device_ops) is mirror.AllReduce
    assert type(mirror.OneDeviceStrategy("/cpu:0").cross_device_ops) is mirror.AllReduce


def test_given_cross_device_ops_are_used():
    ops = mirror.AllReduce(pack_bytes=0)
    strategy = cpu_strategy(2, cross_device_ops=ops)
    assert strategy.cross_device_ops is ops
    assert total(strategy) == 3


@rows("ops", ["nccl", mirror.AllReduce, 0, False])
def test_invalid_cross_device_ops_are_rejected(ops):
    """TensorFlow accepts anything, and fails at the first collective."""
    fix = ["CrossDeviceOps", "mirror.AllReduce()"]
    with raises(TypeError, names="cross_device_ops", values=repr(ops), fix=fix):
        cpu_strategy(2, cross_device_ops=ops)


MADE = {
    "mirrored": lambda: mirror.MirroredStrategy(CPUS[2:5], mirror.AllReduce(pack_bytes=7)),
    "several on each": lambda: mirror.MirroredStrategy(CPUS[:2], replicas_per_device=2),
    "one device": lambda: mirror.OneDeviceStrategy("/cpu:3"),
}


@rows("make", MADE.values())
def test_shallow_copy_is_rejected(make):
    with raises(RuntimeError, names="copy.copy(strategy)", fix="copy.deepcopy(strategy)"):
        copy.copy(make())


def a_trainer():
    with cpu_strategy(2).scope():
        return mirror.Trainer(nnx.Linear(2, 1, rngs=nnx.Rngs(0)), optax.adam(0.1), "mse")


@rows("make", [*MADE.values(), lambda: cpu_strategy(2).distribute_dataset([]), a_trainer])
def test_pickle_is_rejected(make):
    with raises(TypeError, names=["strategy", "trainer", "dataset"], fix="jax.device_get("):
        pickle.dumps(make())


@rows("make", MADE.values())
def test_deep_copy_is_a_separate_strategy_on_the_same_devices(make):
    strategy = make()
    expected = total(strategy)
    held = copy.deepcopy({"a": strategy, "b": [strategy]})
    twin = held["a"]
    assert twin is held["b"][0]
    assert twin is not strategy
    assert type(twin) is type(strategy)
    assert (twin.devices, repr(twin)) == (strategy.devices, repr(strategy))
    assert twin.cross_device_ops is not strategy.cross_device_ops
    assert twin.cross_device_ops.pack_bytes == strategy.cross_device_ops.pack_bytes
    with twin.scope():
        assert mirror.get_strategy() is twin
        model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
        np.testing.assert_array_equal(total(twin), expected)
        with raises(RuntimeError, names=[f"{strategy}.run", str(twin)]):
            total(strategy)
    seen = []
    twin.run(lambda: seen.append(mirror.get_replica_context().strategy))
    assert seen
    assert all(one is twin for one in seen)
    twin.check_mirrored(model)
    strategy.check_mirrored(model)


def test_parameters_and_steps_share_the_devices(two):
    """There is no `extended`: its constants describe clusters.

    Parameters are stored where the replicas run; `devices` has both, in replica order.
    """
    with two.scope():
        model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    (batch,) = two.distribute_dataset([np.ones((4, 2), np.float32)])
    assert model.kernel[...].devices() == set(two.devices)
    assert [v.devices() for v in batch.values] == [{device} for device in two.devices]
    outputs = two.run(lambda model, x: model(x), (model, batch))
    assert [v.devices() for v in outputs.values] == [{device} for device in two.devices]
    assert not hasattr(two, "extended")


def test_strategies_of_different_devices_work_in_one_process():
    """In TensorFlow the second one's first collective fails, and after it every collective does."""
    orders = [[0, 1], [0, 1, 2, 3], [3, 2, 1, 0], [4, 5], [7], [1, 0], list(range(8))]
    strategies = [mirror.MirroredStrategy([CPUS[i] for i in order]) for order in orders]
    for _ in range(3):
        totals = [total(strategy) for strategy in strategies]
        assert totals == [len(order) * (len(order) + 1) / 2 for order in orders]


def test_reduce_ops_have_their_names():
    """`MIN` and `MAX` are ours; TensorFlow has them in single ops only.

    There is no conversion from a variable's aggregation: a variable has no reduction of its own.
    """
    assert {op.name: op.value for op in mirror.ReduceOp} == {
        "SUM": "sum",
        "MEAN": "mean",
        "MIN": "min",
        "MAX": "max",
    }
    for op in mirror.ReduceOp:
        assert mirror.ReduceOp(op.value) is op


@rows("op", ["none", "only_first_replica", "average", ""])
def test_invalid_reduce_op_is_rejected(two, op):
    with pytest.raises(ValueError, match=f"'{op}' is not a valid ReduceOp"):
        mirror.ReduceOp(op)
    known = ["'sum'", "'mean'", "'min'", "'max'"]
    with raises(ValueError, names="op", values=[repr(op), *known]):
        two.reduce(op, 1.0)
