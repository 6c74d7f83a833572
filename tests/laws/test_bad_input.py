"""Mistakes of users: each raises its message and leaves the models unchanged."""
# ruff: noqa: E501 (a mistake and its message are one row)

import collections
import functools
import gc
import threading
import traceback
import types
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import mirror
from mirror import PerReplica
from tests.programs import donated_buffers
from tests.support import fresh, inside
from tests.support.counters import Counter, count, read
from tests.support.messages import assert_message, raises
from tests.support.strategies import STRATEGIES, cpu_strategy, executors
from tests.support.tables import rows


def deleted():
    array = jnp.ones(4)
    array.delete()
    return array


def one_of(value):
    return PerReplica([value, value])


OTHER = Counter(5.0)


def reads_a_global(x):
    return x + OTHER.total[...].sum()


def through_a_helper(x):
    return reads_a_global(x)


class Checked(collections.namedtuple("Checked", ["rows"])):
    """Has a type of leaves that a pytree cannot be rebuilt with, as `PackedSequence` of torch."""

    def __new__(cls, rows):
        return super().__new__(cls, rows.reshape(-1))


class Holder:
    """Not an nnx object, but holds one."""

    def __init__(self):
        self.model = Counter()

    def step(self, x):
        return x + self.model.total[...].sum()

    def loss(self, model, batch):
        return self.step(model(batch))[:, 0]


def trainer_of(strategy, loss_fn="mse", model=nnx.Linear, tx=None, **options):
    model = model(2, 1, rngs=nnx.Rngs(0))
    return mirror.Trainer(model, tx or optax.sgd(0.1), loss_fn, strategy=strategy, **options)


def fit_to(strategy, loss_fn, **options):
    batch = np.ones((4, 2), np.float32)
    data = (batch, batch[:, :1]) if loss_fn == "mse" else batch
    trainer_of(strategy, loss_fn, **options).fit([data], progress=False)


class ReadsAGlobal(nnx.Linear):
    def __call__(self, *args, **kwargs):
        return reads_a_global(super().__call__(*args, **kwargs))


class NamedLike(nnx.Module):
    """Has an attribute with the name of a global nnx object."""

    def __init__(self):
        self.OTHER = nnx.Param(jnp.ones(2))


@jax.jit
def jitted(x):
    return cpu_strategy(2).run(lambda x: x, (x,))


OPS = ["sum", "mean", "min", "max"]
CALLS = {
    "fn not callable": (lambda s: s.run(3, ()), TypeError, {"names": "fn", "values": [3, "int"], "fix": "strategy.run(step, args)"}),
    "args not a tuple": (lambda s: s.run(read, Counter()), TypeError, {"names": ["args", "Counter"], "fix": "strategy.run(read, (model,))"}),
    "args is an array": (lambda s: s.run(read, np.ones(3)), TypeError, {"names": "args", "values": "float64[3]", "fix": "strategy.run(read, (model,))"}),
    "kwargs not a dict": (lambda s: s.run(read, (), [1]), TypeError, {"names": "kwargs", "values": ["[1]", "list"]}),
    "donated out of range": (lambda s: s.run(lambda x: x, (1.0,), donate_argnums=1), ValueError, {"names": ["donate_argnums", "<lambda>"], "values": ["(1,)", 1]}),
    "donated negative": (lambda s: s.run(lambda x: x, (1.0,), donate_argnums=(0, -1)), ValueError, {"names": ["donate_argnums", "<lambda>"], "values": -1}),
    "donated by name": (lambda s: s.run(lambda x: x, (1.0,), donate_argnums="x"), (ValueError, TypeError), {"names": "donate_argnums", "values": ["'x'", "str"], "fix": "donate_argnums=0"}),
    "donated None": (lambda s: s.run(lambda x: x, (1.0,), donate_argnums=None), (ValueError, TypeError), {"names": "donate_argnums", "values": "None", "fix": "donate_argnums=0"}),
    "other replicas": (lambda s: s.run(lambda batch: batch, ({"a": PerReplica([1, 2, 3])},)), ValueError, {"names": "batch['a']", "values": [3, 2], "fix": "distribute_dataset"}),
    "a large integer": (lambda s: s.run(lambda x: x, (2**40,)), ValueError, {"names": "x", "values": [2**40, "int"], "fix": "jax.config.update('jax_enable_x64', True)"}),
    "returns a large integer": (lambda s: s.run(lambda: {"a": 2**31}), ValueError, {"names": ["<lambda>", "result['a']"], "values": [2**31, "int32"], "fix": "jax.config.update('jax_enable_x64', True)"}),
    "returns an array of large integers": (lambda s: s.run(lambda: np.array([1, 2**40])), ValueError, {"names": ["<lambda>", "result"], "values": [2**40, "int64[2]"], "fix": "jax.config.update('jax_enable_x64', True)"}),
    "returns more than 64 bits": (lambda s: s.run(lambda: -(2**70)), ValueError, {"names": ["<lambda>", "result"], "values": [-(2**70), "int32"], "fix": "jax.config.update('jax_enable_x64', True)"}),
    "a deleted batch": (lambda s: list(s.distribute_dataset([deleted()])), ValueError, {"names": "batch", "fix": "donate_argnums"}),
    "a string array": (lambda s: s.run(lambda x: x, (np.array("a"),)), TypeError, {"names": "x", "values": "<U1[]"}),
    "an object array": (lambda s: s.run(lambda x: x, (), {"y": np.array([None])}), TypeError, {"names": "y", "values": "object[1]"}),
    "a container of its own leaves": (lambda s: s.run(lambda x: x, (Checked(np.ones(1)),)), TypeError, {"values": "AttributeError", "fix": "a tuple or dict"}),
    "an unhashable static": (lambda s: s.run(lambda x, y: x, (1.0, {2})), TypeError, {"names": "y", "values": ["{2}", "set"]}),
    "returns text": (lambda s: s.run(lambda: {"a": "text"}), TypeError, {"names": ["<lambda>", "result['a']"], "values": ["'text'", "str"]}),
    "returns a set": (lambda s: s.run(lambda: {"a": {1}}), TypeError, {"names": ["<lambda>", "result['a']"], "values": ["{1}", "set"], "fix": "a list"}),
    "returns an array of text": (lambda s: s.run(lambda: {"a": np.array(["b"])}), TypeError, {"names": ["<lambda>", "result['a']"], "values": "<U1[1]", "fix": "numbers"}),
    "returns a date": (lambda s: s.run(lambda: np.datetime64("2020-01-01")), TypeError, {"names": ["<lambda>", "result"], "values": "datetime64[D][]", "fix": "numbers"}),
    "returns a long double": (lambda s: s.run(lambda: {"a": np.ones(1, np.longdouble)}), TypeError, {"names": ["<lambda>", "result['a']"], "values": "float128[1]", "fix": "x.astype('float32')"}),
    "a variable of long doubles": (lambda s: mirror.Variable(np.ones(1, np.longdouble)), TypeError, {"names": "variable", "values": "float128[1]", "fix": "x.astype('float32')"}),
    "a batch of long doubles": (lambda s: list(s.distribute_dataset([{"x": np.ones((2, 1), np.longdouble)}])), TypeError, {"names": "batch['x']", "values": "float128[2,1]", "fix": "x.astype('float32')"}),
    "an argument of long doubles": (lambda s: s.run(lambda x: x, (np.ones(1, np.longdouble),)), TypeError, {"names": "x", "values": "float128[1]", "fix": "x.astype('float32')"}),
    "an object as a batch": (lambda s: list(s.distribute_dataset([types.SimpleNamespace(x=1)])), TypeError, {"names": "batch", "values": "SimpleNamespace", "fix": "{'x': x, 'y': y}"}),
    "long doubles as values": (lambda s: PerReplica([np.ones(1, np.clongdouble)] * 2), TypeError, {"names": "PerReplica", "values": "complex256[1]", "fix": "x.astype('complex64')"}),
    "an argument with masked values": (lambda s: s.run(lambda x: x, ({"a": np.ma.masked_array([1.0, 2.0], [0, 1])},)), TypeError, {"names": "x['a']", "values": 1, "fix": "array.filled(0)"}),
    "returns a model": (lambda s: s.run(lambda m: {"m": m}, (Counter(),)), TypeError, {"names": ["<lambda>", "Counter", "result['m']"]}),
    "returns a function": (lambda s: s.run(lambda: print), TypeError, {"names": ["<lambda>", "result"], "values": "print"}),
    "in jit": (lambda s: jitted(1.0), RuntimeError, {"names": "<lambda>", "fix": ["jax.jit", "strategy.run"]}),
    "in grad": (lambda s: jax.grad(lambda x: s.run(lambda x: x, (x,)))(1.0), RuntimeError, {"names": "<lambda>", "fix": ["jax.jit", "strategy.run"]}),
    "in vmap": (lambda s: jax.vmap(lambda x: s.run(lambda x: x, (x,)))(np.ones(2)), RuntimeError, {"names": "<lambda>", "fix": ["jax.jit", "strategy.run"]}),
    "in nnx.jit": (lambda s: nnx.jit(lambda m: s.run(read, (m,)))(Counter()), RuntimeError, {"names": "read", "fix": ["jax.jit", "strategy.run"]}),
    "in nnx.grad": (lambda s: nnx.grad(lambda m: s.run(read, (m,)))(Counter()), RuntimeError, {"names": "read", "fix": ["jax.jit", "strategy.run"]}),
    "in jit, of concrete values": (lambda s: jax.jit(lambda x: s.run(lambda y: y, (1.0,)) + x)(1.0), (RuntimeError, ValueError), {"names": "<lambda>", "fix": ["jax.jit", "strategy.run"]}),
    "closure": (lambda s: (lambda net: s.run(lambda x: x + read(net), (1.0,)))(Counter()), ValueError, {"names": ["<lambda>", "net"], "fix": "strategy.run(<lambda>"}),
    "a global": (lambda s: s.run(reads_a_global, (1.0,)), ValueError, {"names": ["reads_a_global", "OTHER"], "fix": "strategy.run(reads_a_global"}),
    "a global through a helper": (lambda s: s.run(through_a_helper, (1.0,)), ValueError, {"names": ["through_a_helper", "OTHER"], "fix": "strategy.run(through_a_helper, (OTHER, x))"}),
    "in a dict by closure": (lambda s: (lambda models: s.run(lambda x: x + read(models["a"]), (1.0,)))({"a": Counter()}), ValueError, {"names": "<lambda>", "values": "models['a']", "fix": "strategy.run(<lambda>"}),
    "partial": (lambda s: s.run(functools.partial(read, Counter())), ValueError, {"names": ["read", "args[0]"], "fix": "strategy.run(read"}),
    "partial by name": (lambda s: s.run(functools.partial(lambda net: read(net), net=Counter())), ValueError, {"names": ["<lambda>", "net"], "fix": "strategy.run(<lambda>"}),
    "partial in a list": (lambda s: s.run(functools.partial(lambda ms, x: read(ms[0]), [Counter()]), (1.0,)), ValueError, {"names": "<lambda>", "values": "args[0][0]", "fix": "strategy.run(<lambda>"}),
    "a model's method": (lambda s: s.run(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), (np.ones((2, 2)),)), ValueError, {"names": "Linear", "fix": "strategy.run(Linear"}),
    "a bound method of a model": (lambda s: s.run(nnx.Linear(2, 2, rngs=nnx.Rngs(0)).__call__, (np.ones((2, 2)),)), ValueError, {"names": "__call__", "fix": "strategy.run(__call__"}),
    "a jitted method of an object with a model": (lambda s: s.run(jax.jit(Holder().step), (1.0,)), ValueError, {"names": "step", "values": "self.model", "fix": "strategy.run(step"}),
    "a loss that captures a model": (lambda s: fit_to(s, lambda m, b: reads_a_global(m(b))[:, 0]), ValueError, {"names": ["<lambda>", "OTHER"], "fix": "mirror.Trainer(wrt="}),
    "a penalty that captures a model": (lambda s: fit_to(s, "mse", penalty=lambda m: reads_a_global(m.bias[0])), ValueError, {"names": ["<lambda>", "OTHER"], "fix": "mirror.Trainer(wrt="}),
    "weights that capture a model": (lambda s: fit_to(s, "mse", sample_weight=lambda b: reads_a_global(b[1][:, 0])), ValueError, {"names": ["<lambda>", "OTHER"], "fix": "mirror.Trainer(wrt="}),
    "a metric that captures a model": (lambda s: fit_to(s, "mse", metrics={"m": lambda outputs, labels: reads_a_global(outputs)[:, 0]}), ValueError, {"names": ["<lambda>", "OTHER"], "fix": "mirror.Trainer(wrt="}),
    "labels that capture a model": (lambda s: fit_to(s, lambda m, b: m(b)[:, 0], labels=lambda b: reads_a_global(b[:, 0]).astype(int), num_classes=99, class_weight={6: 2.0}), ValueError, {"names": ["<lambda>", "OTHER"], "fix": "mirror.Trainer(wrt="}),
    "a schedule that captures a model": (lambda s: fit_to(s, "mse", tx=optax.adam(reads_a_global)), ValueError, {"names": ["tx.update", "OTHER"], "fix": "mirror.Trainer(wrt="}),
    "a model that reads another one": (lambda s: fit_to(s, "mse", model=ReadsAGlobal), ValueError, {"names": ["ReadsAGlobal", "OTHER"], "fix": "mirror.Trainer(wrt="}),
    "a model of a step that reads another one": (lambda s: s.run(lambda m, x: m(x), (ReadsAGlobal(2, 1, rngs=nnx.Rngs(0)), np.ones((2, 2)))), ValueError, {"names": ["ReadsAGlobal", "OTHER"], "fix": "mirror.Trainer(wrt="}),
    "a loss that is a method of an object with a model": (lambda s: fit_to(s, Holder().loss), ValueError, {"names": ["loss", "self.model"], "fix": "mirror.Trainer(wrt="}),
    "predicted keys": (lambda s: trainer_of(s).predict(np.ones((4, 2), np.float32), lambda m, x: {"k": jax.random.split(jax.random.key(0), len(x))}, batch_size=4), TypeError, {"names": ["<lambda>", "result['k']"], "values": "PRNG", "fix": "jax.random.key_data(key)"}),
    "keys as in-memory arrays": (lambda s: mirror.data.from_arrays({"k": jax.random.split(jax.random.key(0), 4)}, 2), TypeError, {"names": "arrays['k']", "values": "key<fry>[4]", "fix": "integer seeds"}),
    "a jitted partial": (lambda s: s.run(jax.jit(functools.partial(read, Counter()))), ValueError, {"names": ["read", "args[0]"], "fix": "strategy.run(read"}),
    "a method of an object with a model": (lambda s: s.run(Holder().step, (1.0,)), ValueError, {"names": "step", "values": "self.model", "fix": "strategy.run(step"}),
    "an all_gather of scalars": (lambda s: s.run(lambda x: mirror.all_gather(x), (1.0,)), ValueError, {"names": ["all_gather", "axis"], "values": [0, "()"], "fix": "x[None]"}),
    "an unknown op": (lambda s: s.run(lambda x: mirror.all_reduce("avg", x), (1.0,)), ValueError, {"names": "op", "values": "'avg'", "fix": OPS}),
    "an op of another type": (lambda s: s.run(lambda x: mirror.all_reduce(0, x), (1.0,)), TypeError, {"names": "op", "values": [0, "int"], "fix": OPS}),
    "a reduced key": (lambda s: s.run(lambda: mirror.all_reduce("sum", jax.random.key(0))), TypeError, {"fix": ["PRNG", "jax.random.key_data(key)"]}),
    "reduce of nothing": (lambda s: s.reduce("sum", {"a": None}), ValueError, {"names": "reduce", "values": "{'a': None}"}),
    "reduce of text": (lambda s: s.reduce("sum", ["text"]), TypeError, {"names": "reduce", "values": ["'text'", "str"], "fix": ["strategy.run", "PerReplica"]}),
    "gather of nothing": (lambda s: s.gather([]), ValueError, {"names": "gather", "values": "[]"}),
    "gather of text": (lambda s: s.gather("text"), TypeError, {"names": "gather", "values": ["'text'", "str"], "fix": ["strategy.run", "PerReplica"]}),
    "reduce of a key": (lambda s: s.reduce("max", one_of(jax.random.split(jax.random.key(0), 3)), axis=0), TypeError, {"fix": ["PRNG", "jax.random.key_data(key)"]}),
    "max of complex numbers": (lambda s: s.reduce("max", one_of(np.ones(2) * 1j)), TypeError, {"values": ["max", "complex64"], "fix": "abs(x)"}),
    "no such axis": (lambda s: s.reduce("sum", one_of(np.ones(3)), axis=1), ValueError, {"names": "axis", "values": [1, "(3,)"]}),
    "a fractional axis": (lambda s: s.reduce("sum", one_of(np.ones(3)), axis=1.0), TypeError, {"names": "axis", "values": 1.0, "fix": ["None", "int", "tuple"]}),
    "a boolean axis": (lambda s: s.reduce("sum", one_of(np.ones(3)), axis=True), TypeError, {"names": "axis", "values": True, "fix": ["None", "int", "tuple"]}),
    "an axis twice": (lambda s: s.reduce("sum", one_of(np.ones(3)), axis=(0, -1)), ValueError, {"names": "axis"}),
    "gather of a scalar": (lambda s: s.gather(one_of(1.0)), ValueError, {"names": "axis", "values": [0, "()"]}),
    "gather along two axes": (lambda s: s.gather(one_of(np.ones((1, 1))), axis=(0, 1)), TypeError, {"names": "axis", "values": "(0, 1)", "fix": "int"}),
    "gather along axis None": (lambda s: s.gather(one_of(np.ones(1)), axis=None), TypeError, {"names": "axis", "values": "None", "fix": "int"}),
    "a mask of numbers": (lambda s: s.reduce("sum", one_of(np.ones(3)), where=np.ones(3)), TypeError, {"names": "where", "values": ["float32", "boolean"], "fix": "weights > 0"}),
    "a mask of another shape": (lambda s: s.reduce("sum", one_of(np.ones(3)), where=np.ones(2, bool)), ValueError, {"names": "where", "values": ["(2,)", "(3,)"]}),
    "an unknown reduction": (lambda s: s.reduce("average", 1.0), ValueError, {"names": "op", "values": "'average'", "fix": OPS}),
    "local results of another strategy": (lambda s: s.local_results(PerReplica([1, 2, 3])), ValueError, {"values": ["PerReplica(1, 2, 3)", 3, 2]}),
    "local results in a step": (lambda s: s.run(s.local_results, (1.0,)), RuntimeError, {"names": "strategy.local_results", "fix": "The value is this replica's."}),
    "no values": (lambda s: PerReplica([]), ValueError, {"names": "PerReplica", "values": "[]"}),
    "values of other ranks": (lambda s: PerReplica([np.ones(2), np.ones((3, 1))]), ValueError, {"values": ["float64[2]", "float64[3,1]"]}),
    "values of other dtypes": (lambda s: PerReplica([np.ones(2), np.ones(2, int)]), ValueError, {"values": ["float64[2]", "int64[2]"]}),
    "one array of values": (lambda s: PerReplica(np.ones(2)), TypeError, {"names": "PerReplica", "values": "float64[2]", "fix": "mirror.PerReplica.from_stacked"}),
    "a PerReplica of one": (lambda s: PerReplica(one_of(1.0)), TypeError, {"values": "PerReplica(1., 1.)", "fix": "mirror.PerReplica.from_stacked"}),
    "a dict of values": (lambda s: PerReplica({"a": 1, "b": 2}), TypeError, {"names": "PerReplica", "values": ["{'a': 1, 'b': 2}", "dict"], "fix": "mirror.PerReplica.from_stacked"}),
    "one number as values": (lambda s: PerReplica(3), TypeError, {"names": "PerReplica", "values": [3, "int"], "fix": "a list with one value per replica"}),
    "a PerReplica per replica": (lambda s: PerReplica([one_of(1.0), one_of(2.0)]), TypeError, {"names": "PerReplica", "values": "PerReplica(1., 1.)"}),
    "trees as values": (lambda s: PerReplica([{"a": 1}, {"a": 2}]), TypeError, {"names": "PerReplica", "values": ["{'a': 1}", "dict"]}),
    "texts as values": (lambda s: PerReplica(["a", "b"]), TypeError, {"names": "PerReplica", "values": ["'a'", "str"]}),
    "stacked without an axis": (lambda s: PerReplica.from_stacked(np.float32(1)), ValueError, {"values": "float32[]", "fix": "(num_replicas, *shape)"}),
    "stacked of no replicas": (lambda s: PerReplica.from_stacked(np.ones((0, 2))), ValueError, {"values": "float64[0,2]", "fix": "(num_replicas, *shape)"}),
    "stacked of a list": (lambda s: PerReplica.from_stacked([1, 2]), ValueError, {"values": ["[1, 2]", "list"], "fix": "(num_replicas, *shape)"}),
    "invalid cross_device_ops": (lambda s: cpu_strategy(2, cross_device_ops="nccl"), TypeError, {"names": "cross_device_ops", "values": ["'nccl'", "str"], "fix": "mirror.AllReduce()"}),
    "a class of ops": (lambda s: cpu_strategy(2, cross_device_ops=mirror.AllReduce), TypeError, {"names": ["cross_device_ops", "CrossDeviceOps"], "fix": "mirror.AllReduce()"}),
    "narrow, not a bool": (lambda s: mirror.AllReduce(narrow="bfloat16"), TypeError, {"names": "narrow", "values": "'bfloat16'", "fix": "narrow=True"}),
    "negative packing": (lambda s: mirror.AllReduce(-1), ValueError, {"names": "pack_bytes", "values": [-1, 0]}),
    "no devices": (lambda s: mirror.MirroredStrategy([]), ValueError, {"names": "devices", "values": "[]", "fix": "None"}),
    "one device": (lambda s: mirror.MirroredStrategy("/cpu:0"), ValueError, {"names": "devices", "values": "'/cpu:0'", "fix": "MirroredStrategy(['/cpu:0'])"}),
    "a repeated device": (lambda s: mirror.MirroredStrategy(["/cpu:1", "CPU:1"]), ValueError, {"names": "devices", "values": ["['/cpu:1', 'CPU:1']", "/device:CPU:1"]}),
    "an index as a device": (lambda s: mirror.MirroredStrategy([0]), TypeError, {"values": [0, "int"], "fix": ["jax.Device", "'/cpu:0'"]}),
    "an abstract strategy": (lambda s: mirror.Strategy(), TypeError, {"names": "Strategy", "fix": "abstract"}),
}  # fmt: skip


def test_mistakes_raise_their_message(subtests, two):
    for name in CALLS:
        with subtests.test(msg=name):
            call, kind, wanted = CALLS[name]
            with raises(kind, **wanted):
                call(two)
            assert not mirror.has_strategy()


def test_captured_model_is_found_after_gc_freeze(two):
    """Programs call it before they fork; the model is found by its name, and stays frozen."""
    gc.freeze()
    num_frozen = gc.get_freeze_count()
    call, kind, wanted = CALLS["a global"]
    with raises(kind, **wanted):
        call(two)
    assert gc.get_freeze_count() >= 0.9 * num_frozen > 0  # some objects are deleted


def test_run_rejects_values_of_another_replica_count(subtests):
    """Also if the array has the placement of a valid argument."""
    for num_rows in [1, 3, 4]:
        with subtests.test(msg=f"{num_rows}"):
            check_run_rejects_values_of_another_replica_count(num_rows, cpu_strategy(2))


def check_run_rejects_values_of_another_replica_count(rows, two):

    def step(batch):
        return mirror.all_gather(batch)

    for _ in range(2):
        two.run(step, (one_of(np.ones(2)),))
        with two.scope():
            mirrored = jnp.ones((rows, 2))
        two.run(lambda x: x, (mirrored,))
        for stacked in (mirrored, np.ones((rows, 2)), jnp.ones((rows, 2))):
            with raises(ValueError, names="batch", values=[rows, 2], fix="distribute_dataset"):
                two.run(step, (PerReplica.from_stacked(stacked),))


@pytest.mark.filterwarnings("ignore:.*step.*distribute_dataset")
def test_run_accepts_arrays_placed_like_another_argument(subtests):
    """A mirrored array wrapped as per-replica rows, and rows passed as one whole array."""
    for layout, make in STRATEGIES.items():
        with subtests.test(msg=layout):
            strategy = make()
            check_run_accepts_arrays_placed_like_another_argument(strategy)


def check_run_accepts_arrays_placed_like_another_argument(strategy):
    n = strategy.num_replicas_in_sync
    rows = np.arange(2.0 * n).reshape(n, 2)
    with strategy.scope():
        mirrored = jnp.asarray(rows)
    (batch,) = strategy.distribute_dataset([rows])

    def step(x):
        return mirror.all_gather(x.ravel()), x

    for _ in range(2):
        for held in (batch, PerReplica.from_stacked(mirrored), PerReplica.from_stacked(rows)):
            joined, own = strategy.run(step, (held,))
            np.testing.assert_array_equal(joined, rows.ravel())
            np.testing.assert_array_equal(np.asarray(own).reshape(n, 2), rows)
        for whole in (mirrored, batch.stacked.reshape(n, 2), rows):
            joined, own = strategy.run(step, (whole,))
            np.testing.assert_array_equal(own, rows)
            np.testing.assert_array_equal(joined, np.tile(rows.ravel(), n))


def test_run_ignores_attributes_named_like_a_global_model(two):
    def step(model, x):
        return x + model.OTHER[...].sum()

    assert float(two.run(step, (NamedLike(), 1.0))) == 3.0


def adds(model):
    model.more = nnx.Param(jnp.ones(1))


def removes(model):
    del model.total


def ties(model):
    model.more = model.total
    del model.total


def fills(model):
    model.none.set_value(jnp.ones(2))


def empties(model):
    model.total.set_value(None)


def sows(model):
    model.hidden = nnx.Intermediate(jnp.ones(1))


def nests(model):
    model.total.set_value({"a": model.total[...]})


STRUCTURES = {
    adds: "model.more",
    removes: "model.total",
    ties: ["model.total", "model.more"],
    sows: "model.hidden",
    fills: "model.none",
    empties: "model.total",
    nests: "model.total",
}


def test_run_rejects_and_reverts_a_changed_structure(subtests, two):
    for step in STRUCTURES:
        with subtests.test(msg=f"{step}"):
            model = Counter(1.0)
            before = nnx.graphdef(model)
            with raises(
                ValueError, names=step.__name__, fix="nnx.pop(model, nnx.Intermediate)"
            ) as error:
                two.run(step, (model,))
            assert_message(error, names=STRUCTURES[step])
            assert nnx.graphdef(model) == before
            two.run(count, (model,))
            np.testing.assert_array_equal(model.total[...], 2.0)


def test_run_rejects_variables_set_to_objects(two):
    def step(model):
        model.total.set_value(object())

    with raises(ValueError, names="total", values="object"):
        two.run(step, (Counter(),))


def test_run_rejects_variables_without_an_array(two):
    model = Counter()
    model.bad = nnx.Variable("text")
    with raises((ValueError, TypeError), names="bad", values=["'text'", "str"]):
        two.run(read, (model,))


def test_run_rejects_variables_set_to_non_arrays(subtests):
    for when in ["before any run", "after a run"]:
        for value in ["PerReplica", "tuple", "text"]:
            with subtests.test(msg=f"{when}, {value}"):
                check_run_rejects_variables_set_to_non_arrays(when, value, cpu_strategy(2))


def check_run_rejects_variables_set_to_non_arrays(when, value, two):
    model = Counter()
    if when == "after a run":
        two.run(read, (model,))
    values = {"PerReplica": one_of(np.ones(4)), "tuple": (jnp.ones(1), jnp.ones(2)), "text": "text"}
    model.total.set_value(values[value])
    if value == "tuple":  # a variable may hold a tree
        got = two.run(lambda model: sum(x.sum() for x in model.total.get_value()), (model,))
        assert float(got) == 3.0
        return
    found = "'text'" if value == "text" else "PerReplica"
    with raises((ValueError, TypeError), names="total", values=found):
        two.run(read, (model,))


def test_run_reads_variables_filled_between_calls(two):
    model = Counter()
    two.run(read, (model,))
    model.none.set_value(jnp.ones(3))
    assert float(two.run(lambda model: model.none[...].sum(), (model,))) == 3.0


def test_run_rejects_reference_variables(subtests, two):
    for kind in ["ref", "hijax"]:
        with subtests.test(msg=kind):
            model = Counter()
            model.w = nnx.Param(jnp.ones(2), **{kind: True})
            with raises(TypeError, names="w", values=["ref=True", "hijax=True"]):
                two.run(read, (model,))


def test_missing_reduction_leaves_the_model_unchanged(two):
    model = Counter(1.0)
    fix = 'all_reduce("mean", grads)'
    with raises(mirror.ReplicaDivergenceError, names=["count", "model.total", "by"], fix=fix):
        two.run(count, (model, PerReplica([1.0, 2.0])))
    np.testing.assert_array_equal(model.total[...], 1.0)
    two.run(count, (model,))
    np.testing.assert_array_equal(model.total[...], 2.0)


def test_error_in_a_step_is_raised_once_and_leaves_the_model_unchanged(subtests):
    for error in [ZeroDivisionError, KeyboardInterrupt, ValueError, RuntimeError]:
        for warm in [False, True]:
            with subtests.test(msg=f"{error}, {warm}"):
                check_error_in_a_step_is_raised_once_and_leaves_the_model_unchanged(
                    error, warm, cpu_strategy(2)
                )


def check_error_in_a_step_is_raised_once_and_leaves_the_model_unchanged(error, warm, two):
    model, calls = Counter(1.0), []

    def step(model, x):
        count(model)
        if x.shape == (3,):
            calls.append(1)
            raise error("mine")
        return x

    if warm:
        two.run(step, (model, np.ones(2)))
    with pytest.raises(error, match="mine") as caught:
        two.run(step, (model, np.ones(3)))
    assert len(calls) == 1
    assert caught.value.__context__ is None or isinstance(caught.value.__cause__, Exception)
    frames = [
        f.name for f in traceback.extract_tb(caught.value.__traceback__) if f.filename == __file__
    ]
    assert frames[-1] == "step"
    two.run(step, (model, np.ones(2)))
    np.testing.assert_array_equal(model.total[...], 3.0 if warm else 2.0)
    assert not mirror.has_strategy()


def test_nan_passes_through_a_step(two):
    model = Counter(np.nan)
    two.run(count, (model,))
    two.check_mirrored(model)
    assert np.isnan(np.asarray(model.total[...])).all()


def test_model_stays_usable_after_a_step_under_debug_nans(two):
    model = Counter()

    def step(model):
        model.total[...] = model.total[...] / model.total[...]

    with jax.debug_nans(True), pytest.raises(FloatingPointError):
        two.run(step, (model,))
    np.testing.assert_array_equal(model.total[...], 0.0)


KEEPING = executors(2) | {
    "in slices": lambda: cpu_strategy(2, shard="model"),
    "fixed": lambda: cpu_strategy(1, replicas=2),
}


@pytest.mark.slow
@rows("make", KEEPING)
def test_model_keeps_its_values_in_a_step_under_debug_nans(make):
    strategy = make()
    with strategy.scope():
        model = nnx.Linear(256, 64, rngs=nnx.Rngs(0))  # 64 KiB: in slices with shard="model"
    before = np.asarray(model.kernel[...])

    def step(model, x):
        model.kernel[...] = model.kernel[...] + jnp.log(x)
        return mirror.all_reduce("mean", jnp.log(x))

    with jax.debug_nans(True):
        strategy.run(step, (model, np.float32(1)))
        with pytest.raises(FloatingPointError):
            strategy.run(step, (model, np.float32(-1)))
        np.testing.assert_array_equal(model.kernel[...], before)
        strategy.run(step, (model, np.float32(np.e)))
    assert (np.asarray(model.kernel[...]) > before).all()


@rows("check, number", {"nan": (jax.debug_nans, -1), "inf": (jax.debug_infs, 0)})
def test_check_for_nans_that_is_turned_on_late_is_explained(two, check, number):
    """The step has donated the state, so JAX cannot repeat it to find the operation."""

    def step(model, x):
        x = x + model.kernel[...].sum() * 0
        model.kernel[...] = model.kernel[...] + jnp.log(x)
        return mirror.all_reduce("mean", jnp.log(x))

    for earlier in (1, 3):
        model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
        for _ in range(earlier):
            two.run(step, (model, np.float32(1)))
        with check(True), pytest.raises(FloatingPointError) as caught:
            two.run(step, (model, np.float32(number)))
        fix = f"jax.config.update('{check.name}', True)"
        assert_message(caught.value, names=["step"], fix=fix)


# An interrupt may strike in a callback of the garbage collector, where Python drops it.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("n", [1, 2])
def test_interrupt_leaves_the_model_after_a_complete_step(n, repeat_until_interrupted):
    """At any time: a step donates the arrays it was given, so its new arrays must be kept."""
    strategy, models = cpu_strategy(n), [Counter() for _ in range(10)]

    def step(models):
        for model in models:
            count(model)

    strategy.run(step, (models,))
    for i in range(100):
        repeat_until_interrupted(0.0005 + 0.00005 * i, lambda: strategy.run(step, (models,)))
        assert len({float(model.total[...][0]) for model in models}) == 1
    assert not mirror.has_strategy()


# Unusual but valid uses


def test_run_accepts_one_array_in_two_donated_arguments(subtests):
    for layout, make in STRATEGIES.items():
        with subtests.test(msg=layout):
            strategy = make()
            check_run_accepts_one_array_in_two_donated_arguments(strategy)


def check_run_accepts_one_array_in_two_donated_arguments(strategy):
    with strategy.scope():
        p = jnp.arange(4.0)

    def step(state):
        return {"params": state["params"] + 1, "ema": state["ema"] * 2}

    state = {"params": p, "ema": p}
    for _ in range(3):
        state = strategy.run(step, (state,), donate_argnums=0)
        state["ema"] = state["params"]
    np.testing.assert_array_equal(state["ema"], np.arange(4.0) + 3)


def test_run_accepts_one_array_in_two_variables(subtests):
    for layout, make in STRATEGIES.items():
        with subtests.test(msg=layout):
            strategy = make()
            check_run_accepts_one_array_in_two_variables(strategy)


def check_run_accepts_one_array_in_two_variables(strategy):
    with strategy.scope():
        array = jnp.ones(4)
    first, second = Counter(), Counter()
    first.total.set_value(array)
    second.total.set_value(array)

    def step(first, second):
        count(first, 1)
        count(second, 10)

    for _ in range(3):
        strategy.run(step, (first, second))
    np.testing.assert_array_equal(first.total[...], 4.0)
    np.testing.assert_array_equal(second.total[...], 31.0)


def test_run_accepts_a_models_array_as_another_argument(subtests):
    for layout, make in STRATEGIES.items():
        with subtests.test(msg=layout):
            strategy = make()
            check_run_accepts_a_models_array_as_another_argument(strategy)


def check_run_accepts_a_models_array_as_another_argument(strategy):
    model = Counter(1.0)
    for wanted in (2.0, 4.0, 8.0):
        strategy.run(count, (model, model.total[...]))
        np.testing.assert_array_equal(model.total[...], wanted)


def test_run_accepts_models_placed_anywhere(subtests):
    for place in ["another device", "scope", "another scope", "numpy", "nowhere"]:
        for layout, make in STRATEGIES.items():
            with subtests.test(msg=f"{place}, {layout}"):
                strategy = make()
                check_run_accepts_models_placed_anywhere(place, strategy)


def check_run_accepts_models_placed_anywhere(place, strategy):
    if place == "scope":
        with strategy.scope():
            model = Counter()
    elif place == "another scope":
        with mirror.MirroredStrategy(["/cpu:7", "/cpu:0"]).scope():
            model = Counter()
    else:
        model = Counter()
    host = np.zeros(4, np.float32)
    if place == "another device":
        model.total.set_value(jax.device_put(host, jax.devices("cpu")[6]))
    elif place == "numpy":
        model.total.set_value(host)
    for _ in range(3):
        strategy.run(count, (model,))
    np.testing.assert_array_equal(model.total[...], 3.0)
    np.testing.assert_array_equal(host, 0.0)
    strategy.check_mirrored(model)


def test_run_keeps_the_callers_arrays(two):
    """Arrays that a user put into a model are not donated with its state."""
    outside, model = jnp.ones(4), Counter()
    model.total.set_value(outside)
    two.run(count, (model,))
    view = np.asarray(model.total[...])
    result = two.run(lambda model: model.total[...], (model,))
    for _ in range(2):
        two.run(count, (model,))
    np.testing.assert_array_equal(outside, 1.0)
    np.testing.assert_array_equal(view, 2.0)
    np.testing.assert_array_equal(result, 2.0)


def test_run_accepts_one_model_twice(two):
    model = Counter()

    def step(first, second):
        assert first is second
        count(first)
        count(second)

    two.run(step, (model, model))
    np.testing.assert_array_equal(model.total[...], 2.0)


def test_run_finds_models_anywhere_in_the_arguments(two):
    models = {"a": [Counter(), (Counter(),)], "b": Counter()}

    def step(models, *, more):
        count(models["a"][0], 1)
        count(models["a"][1][0], 2)
        count(models["b"], more["x"])
        count(more["model"], 4)

    last = Counter()
    two.run(step, (models,), {"more": {"x": 3, "model": last}})
    values = [
        float(m.total[...][0]) for m in (*[models["a"][0]], models["a"][1][0], models["b"], last)
    ]
    assert values == [1, 2, 3, 4]


def test_steps_keep_the_values_of_many_layers_separate(two):
    """More than ten, so that '10' comes before '2' wherever names are sorted as text."""

    class Deep(nnx.Module):
        def __init__(self):
            self.layers = nnx.List([Counter() for _ in range(13)])
            self.named = nnx.Dict({k: Counter() for k in ("b", "a", "Z", "a10", "a2", "_")})

    model = Deep()

    def step(model):
        for i, layer in enumerate(
            [*model.layers, *(model.named[k] for k in sorted(["b", "a", "Z", "a10", "a2", "_"]))]
        ):
            count(layer, i)

    for _ in range(2):
        two.run(step, (model,))
    values = [*model.layers, *(model.named[k] for k in sorted(["b", "a", "Z", "a10", "a2", "_"]))]
    assert [float(x.total[...][0]) for x in values] == [2.0 * i for i in range(19)]


def test_shared_references_survive_a_step(two):
    class Tied(nnx.Module):
        def __init__(self):
            self.first = Counter()
            self.second = self.first
            self.weight = self.first.total

    model = Tied()
    for _ in range(2):
        two.run(lambda model: count(model.second), (model,))
    assert model.first is model.second
    assert model.weight is model.first.total
    np.testing.assert_array_equal(model.weight[...], 2.0)


def test_modes_set_in_a_step_persist(two):
    dropout = nnx.Sequential(nnx.Dropout(0.5, rngs=nnx.Rngs(0)), nnx.BatchNorm(2, rngs=nnx.Rngs(0)))

    def step(model, method):
        getattr(model, method)()

    for mode, method in [(True, "eval"), (False, "train"), (True, "eval")]:
        for _ in range(2):
            two.run(step, (dropout, method))
            assert dropout.layers[0].deterministic is mode
            assert dropout.layers[1].use_running_average is mode


def test_modes_set_between_steps_take_effect(two):
    model = Counter()

    def step(model):
        return 1 if model.deterministic else 2

    seen = []
    for mode in (False, True, False):
        model.deterministic = mode
        seen.append(int(two.run(step, (model,))))
    assert seen == [2, 1, 2]


def test_structure_changed_between_steps_takes_effect(two):
    model = Counter()
    two.run(count, (model,))
    kept = model.total
    model.total = nnx.Param(jnp.full(2, 5.0))  # another variable of another shape
    model.extra = nnx.Param(jnp.ones(1))
    two.run(count, (model,))
    np.testing.assert_array_equal(model.total[...], [6.0, 6.0])
    np.testing.assert_array_equal(kept[...], 1.0)
    del model.extra
    model.total.set_value(model.total[...].astype(jnp.bfloat16))
    two.run(count, (model,))
    assert model.total.dtype == jnp.bfloat16


def test_threads_run_steps_on_separate_models(eight):
    models, problems = [Counter() for _ in range(2)], []

    def train(model, by):
        try:
            for _ in range(20):
                eight.run(count, (model, by))
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=train, args=(m, i + 1.0)) for i, m in enumerate(models)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(900)
    assert not problems
    assert [float(m.total[...][0]) for m in models] == [20.0, 40.0]


def test_run_warns_once_of_a_new_function_per_step(subtests, two):
    for make in ["lambda", "partial"]:
        with subtests.test(msg=""):
            check_run_warns_once_of_a_new_function_per_step(make, two)


def check_run_warns_once_of_a_new_function_per_step(make, two):
    def scaled(x, by):
        return x * by

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for i in range(8):
            fresh = functools.partial(scaled, by=2.0) if make == "partial" else lambda x: x * 2
            two.run(fresh, (float(i),))
    (warning,) = caught
    name = "scaled" if make == "partial" else "<lambda>"
    assert_message(str(warning.message), names=[name, f"{__file__}:"], values=3)
    assert warning.filename == __file__


def test_run_does_not_warn_of_new_shapes_or_functions(two):
    def step(x):
        return x

    for i in range(5):
        two.run(step, (np.ones(i + 1),))
    for fn in (lambda x: x, lambda x: x + 1, lambda x: x + 2, lambda x: x + 3):
        two.run(fn, (1.0,))
    for number in range(4):  # other functions behind one decorator
        fn = (lambda x: x, lambda x: -x, lambda x: 2 * x, lambda x: x + 5)[number]
        two.run(functools.wraps(fn)(lambda *args, fn=fn: fn(*args)), (1.0,))


def test_run_accepts_a_compiled_or_decorated_partial(two):
    partial = functools.partial(lambda by, x: by * x, 3.0)
    for fn in (jax.jit(partial), nnx.jit(partial), functools.wraps(partial)(lambda x: partial(x))):
        assert float(two.run(fn, (2.0,))) == 6.0


def test_run_does_not_recompile_for_new_numbers(two):
    def step(x):
        return x * 2

    assert [float(two.run(step, (x,))) for x in (1.0, 2.0, 3.5)] == [2.0, 4.0, 7.0]
    assert len(inside.programs(two)) == 1
    assert two.run(step, (3,)).dtype == jnp.int32
    assert float(two.run(step, (np.float32(4),))) == 8.0


@pytest.mark.slow
def test_host_buffer_can_be_overwritten_after_run_returns(subtests):
    """Results are computed later, from the values as they were."""
    for kind in ["mirrored", "per replica", "variable"]:
        for n in [1, 2]:
            with subtests.test(msg=f"{kind}, {n}"):
                check_host_buffer_can_be_overwritten_after_run_returns(kind, n)


def check_host_buffer_can_be_overwritten_after_run_returns(kind, n):
    strategy = cpu_strategy(n)

    def step(x):
        x = x.total[...] if isinstance(x, Counter) else x
        y = x
        for _ in range(20):
            y = jnp.sin(y) + x
        return x.max(), y.max()

    buffer = np.zeros((n, 1 << 18), np.float32)
    for i in range(8):
        buffer[:] = i
        model = Counter()
        model.total.set_value(buffer)
        value = {
            "mirrored": buffer,
            "per replica": PerReplica.from_stacked(buffer),
            "variable": model,
        }
        largest, _ = strategy.run(step, (value[kind],))
        buffer[:] = -1
        assert (np.asarray(largest) == i).all()


# Errors that would end the process run in another one


@pytest.fixture(scope="module")
def donated():
    """The output of all cases, in another process, which prints its progress."""
    return fresh.start_program("donated_buffers", timeout=900).stdout


@pytest.mark.slow
def test_errors_that_crash_jax_0_10_in_a_subprocess(subtests, donated):
    for name in donated_buffers.CASES:
        with subtests.test(msg=name):
            assert f"done: {name}\n" in donated, donated[-2000:]


def test_run_donates_an_optax_training_state(two):
    """NamedTuples, None and counters in donated arguments."""
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2))
    params = {"w": jnp.ones(3)}
    state = (params, tx.init(params), None)

    def step(state, batch):
        params, moments, nothing = state
        grads = mirror.all_reduce("mean", {"w": batch.mean(0)})
        updates, moments = tx.update(grads, moments, params)
        return optax.apply_updates(params, updates), moments, nothing

    for batch in two.distribute_dataset([np.ones((4, 3), np.float32)] * 3):
        state = two.run(step, (state, batch), donate_argnums=0)
    assert state[2] is None
    assert int(optax.tree.get(state[1], "count")) == 3
    two.check_mirrored(state)


@pytest.mark.slow
def test_warning_names_the_calling_line_of_a_script():
    """`__main__` has no package, and a function made by `exec` no module."""
    fresh.run_program("warned_script")
