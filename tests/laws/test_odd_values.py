"""Odd values in every public method: a result, or a documented error."""

import itertools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax

import mirror
from mirror import PerReplica
from tests.support.messages import raises
from tests.support.strategies import EXECUTORS, cpu_strategy

AXIS = mirror.REPLICA_AXIS
N = 2
CPUS = jax.devices("cpu")
DOCUMENTED = (ValueError, TypeError, RuntimeError, NotImplementedError, OverflowError)


def deleted():
    array = jnp.ones(3) * 2
    array.delete()
    return array


def split():
    mesh = jax.sharding.Mesh(CPUS[:4], ("x",))
    place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    return jax.device_put(np.arange(8.0, dtype=np.float32), place)


def weak():
    return jnp.asarray(1.0)


VALUES = {
    "weak": weak,
    "weak in a tree": lambda: {"a": weak(), "b": [jnp.asarray(2), weak() * jnp.ones(())]},
    "0-d": lambda: jnp.zeros(()),
    "zero-size": lambda: jnp.zeros((0, 3)),
    "float0": lambda: np.zeros((2,), jax.dtypes.float0),
    "key": lambda: jax.random.key(0),
    "keys": lambda: jax.random.split(jax.random.key(0), 2),
    "rbg key": lambda: jax.random.key(0, impl="rbg"),
    "unsafe_rbg key": lambda: jax.random.key(0, impl="unsafe_rbg"),
    "raw key": lambda: jax.random.PRNGKey(0),
    "int2": lambda: jnp.ones(4, "int2"),
    "int4": lambda: jnp.ones(4, "int4"),
    "uint4": lambda: jnp.ones(3, "uint4"),
    "float8": lambda: jnp.ones(4, "float8_e4m3fn"),
    "float8_e8m0fnu": lambda: jnp.ones(4, "float8_e8m0fnu"),
    "float4": lambda: jnp.ones(4, "float4_e2m1fn"),
    "float16": lambda: jnp.ones(2, "float16"),
    "complex": lambda: jnp.ones(2, "complex64"),
    "bool array": lambda: jnp.ones(2, bool),
    "numpy scalar": lambda: np.float32(1),
    "numpy int64": lambda: np.int64(2**40),
    "numpy bool": lambda: np.True_,
    "numpy object": lambda: np.array([object()]),
    "numpy string": lambda: np.array(["a"]),
    "int": lambda: 3,
    "large int": lambda: 2**70,
    "float": lambda: 1.5,
    "nan": lambda: float("nan"),
    "complex number": lambda: 1j,
    "bool": lambda: True,
    "string": lambda: "text",
    "none": lambda: None,
    "function": lambda: jnp.tanh,
    "set": lambda: {1, 2},
    "deleted": deleted,
    "elsewhere": lambda: jax.device_put(np.ones(3, np.float32), CPUS[7]),
    "sharded otherwise": split,
    "struct": lambda: jax.ShapeDtypeStruct((2,), np.float32),
}
FORMS = {
    "itself": lambda value: value,
    "per-replica": lambda value: jax.tree.map(lambda leaf: PerReplica([leaf] * N), value),
    "stacked": lambda value: jax.tree.map(
        lambda leaf: PerReplica.from_stacked(jnp.stack([leaf] * N)), value
    ),
}


def run_twice(strategy, value):
    again = strategy.run(returned, (value,))
    return strategy.run(returned, (again,))


def returned(x):
    return x


def total(x):
    return jax.tree.map(lambda leaf: lax.psum(leaf, AXIS), x)


class Holder(nnx.Module):
    def __init__(self, value):
        self.held = nnx.Param(value)


def held(model):
    model.held.set_value(model.held.get_value())


METHODS = {
    "run": run_twice,
    "run, psum": lambda s, v: s.run(total, (v,)),
    "run, all_reduce": lambda s, v: s.run(reduced, (v,)),
    "run, all_gather": lambda s, v: s.run(gathered, (v,)),
    "run, closed over": lambda s, v: s.run(lambda: v),
    "run, donated": lambda s, v: s.run(returned, (jax.tree.map(copied, v),), donate_argnums=0),
    "run, nnx": lambda s, v: s.run(held, (Holder(v),)),
    "run, keyword": lambda s, v: s.run(returned, kwargs={"x": v}),
    "reduce": lambda s, v: s.reduce("mean", v),
    "reduce, axis": lambda s, v: s.reduce("max", v, axis=0),
    "gather": lambda s, v: s.gather(v),
    "local_results": lambda s, v: s.local_results(v),
    "distribute_dataset": lambda s, v: list(s.distribute_dataset([v])),
    "distribute_values": lambda s, v: s.distribute_values_from_function(lambda _: v),
    "check_mirrored": lambda s, v: s.check_mirrored(v),
    "verify": lambda s, v: s.verify(returned, (v,)),
    "inspect": lambda s, v: str(s.inspect(returned, (v,))),
    "ops.reduce": lambda s, v: mirror.AllReduce().reduce("sum", v),
    "ops.broadcast": lambda s, v: mirror.AllReduce().broadcast(v, list(s.devices)[:1]),
    "Variable": lambda s, v: mirror.Variable(v),
    "ensure_mirrored": lambda s, v: mirror.ensure_mirrored(v),
    "Trainer": lambda s, v: mirror.Trainer(v, optax.sgd(0.1), returned),
    "from_arrays": lambda s, v: list(mirror.data.from_arrays(v, batch_size=2)),
}


def reduced(x):
    return mirror.all_reduce("mean", x)


def gathered(x):
    return mirror.all_gather(x)


def copied(leaf):
    return jnp.copy(leaf) if isinstance(leaf, jax.Array) and not leaf.is_deleted() else leaf


# Operations that compile for every value, on each executor, and the others, whose executor does not
# matter.
COMPILING = [m for m in METHODS if m.startswith(("run", "reduce", "gather", "verify"))]


@pytest.mark.slow
def test_odd_values_give_a_result_or_a_documented_error(subtests):
    for method in METHODS:
        if method not in COMPILING:
            with subtests.test(msg=method):
                assert not undocumented_errors(cpu_strategy(N), method)


@pytest.mark.nightly
@pytest.mark.parametrize("executor", EXECUTORS)
def test_steps_with_odd_values_give_a_result_or_a_documented_error(subtests, executor):
    for method in COMPILING:
        with subtests.test(msg=method):
            assert not undocumented_errors(EXECUTORS[executor](), method)


def undocumented_errors(strategy, method):
    """Returns the values that raise an error that is not documented, as lines."""
    undocumented = []
    for (name, make), (form, wrap) in itertools.product(VALUES.items(), FORMS.items()):
        try:
            value = wrap(make())
        except Exception:  # it cannot be created: an error of JAX or `PerReplica`
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                jax.block_until_ready(jax.tree.leaves(METHODS[method](strategy, value)))
            except DOCUMENTED as error:
                ours = type(error).__module__.startswith("mirror")
                internal = ours and type(error).__name__ not in dir(mirror)
                if internal or not str(error).strip():
                    undocumented.append((name, form, repr(error)))
            except Exception as error:
                undocumented.append((name, form, repr(error)[:200]))
    return "\n".join(map(str, undocumented))


@pytest.mark.filterwarnings("ignore:(?=.*first).*compiled")
def test_run_accepts_its_own_weakly_typed_results(subtests):
    """Alone and in trees, mirrored and per-replica, and without a trace for each call."""
    for number in (lambda: 1.0, lambda: jnp.asarray(1.0), lambda: 2, lambda: 1j):
        for executor, make in EXECUTORS.items():
            with subtests.test(msg=f"{number()!r}, {executor}"):
                check_run_accepts_its_own_weakly_typed_results(make(), number)


def check_run_accepts_its_own_weakly_typed_results(strategy, number):
    def first():
        i = lax.axis_index(AXIS)
        return {"mirrored": number() * 1, "own": [number() * i, i * 1.0]}

    traced = []

    def second(tree):
        traced.append(1)
        return jax.tree.map(lambda leaf: leaf * 2, tree)

    found = strategy.run(first)
    for _ in range(4):
        found = strategy.run(second, (found,))
    assert isinstance(found["own"][0], PerReplica)
    np.testing.assert_allclose(found["mirrored"], 16 * number())
    np.testing.assert_allclose(np.asarray(found["own"][1].stacked), [0, 16])
    assert len(traced) <= 2


def test_steps_take_and_return_every_kind_of_numpy_array(subtests):
    """As batches and `PerReplica` do; JAX reads the bytes of another machine as other numbers."""
    x = np.arange(4).reshape(2, 2)
    kinds = [*map(x.astype, (">f4", ">i2", ">c8")), np.ma.masked_array(x)]
    for array in kinds:
        with subtests.test(msg=f"{type(array).__name__}, {array.dtype}"):
            taken, made = cpu_strategy(N).run(lambda x, made=array: (x, made), (array,))
            np.testing.assert_array_equal(taken, x)
            np.testing.assert_array_equal(made, x)


def test_check_mirrored_supports_small_dtypes(subtests):
    for dtype in ["int2", "uint2", "int4", "uint4", "float4_e2m1fn", "bfloat16"]:
        for size in [1, 3]:
            with subtests.test(msg=f"{dtype}, {size}"):
                strategy = cpu_strategy(N)
                with strategy.scope():
                    array = jnp.ones(size, "float32").astype(dtype)
                strategy.check_mirrored({"a": array})


def test_batch_statistics_keep_their_dtype_or_are_rejected(subtests):
    for executor, make in EXECUTORS.items():
        with subtests.test(msg=executor):
            strategy = make()

            class Counted(nnx.Module):
                def __init__(self, dtype):
                    self.seen = nnx.BatchStat(jnp.zeros(2, dtype))

            def step(model, x):
                model.seen[...] = (model.seen[...] + x).astype(model.seen.dtype)

            x = PerReplica([np.full(2, i, np.float32) for i in range(N)])
            for dtype in ("float16", "bfloat16", "float32"):
                model = Counted(dtype)
                strategy.run(step, (model, x))
                assert model.seen[...].dtype == dtype
                np.testing.assert_allclose(np.asarray(model.seen[...], np.float32), 0.5)
            for dtype in ("int32", "bool"):
                names = ["model.seen", "nnx.BatchStat"]
                with raises(TypeError, names=names, values=dtype, fix='all_reduce("sum", x)'):
                    strategy.run(step, (Counted(dtype), x))
