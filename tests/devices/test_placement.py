"""`mirror.device`, soft placement, `mirror.add_n`, and model parallelism built on them."""

import functools
import logging
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

import mirror
from tests.support.inside import forget_placement_warnings
from tests.support.messages import assert_message, raises
from tests.support.strategies import cpu_strategy
from tests.support.tables import rows

CPUS = jax.devices("cpu")
JOB = "/job:localhost/replica:0/task:0"
ALL = f"({', '.join(f'/device:CPU:{i}' for i in range(8))})"


def place(array):
    """Returns the ids of the devices of an array."""
    return sorted(d.id for d in array.devices())


def created():
    """Returns the device of a newly created array."""
    return place(jnp.zeros(2))


@pytest.fixture(autouse=True)
def leaves_no_device():
    yield
    assert jax.config.jax_default_device is None
    assert created() == [0]


SPELLINGS = [
    "/cpu:3",
    "CPU:3",
    "/device:CPU:3",
    f"{JOB}/device:CPU:3",
    mirror.config.LogicalDevice("/device:CPU:3", "CPU"),
    CPUS[3],
]


@rows("name", SPELLINGS)
def test_ops_run_on_the_device_of_the_context(name):
    with mirror.device(name) as entered:
        assert entered is CPUS[3]
        x = jnp.ones(2)
        assert place(x) == place(x + 1) == place(jax.random.key(0)) == [3]
        assert place(jax.jit(lambda x: x * 2)(np.ones(2))) == [3]
    assert repr(mirror.device(name)) == "mirror.device('/device:CPU:3')"


def test_every_logical_device_has_a_context():
    for k, device in enumerate(mirror.config.list_logical_devices("CPU")):
        with mirror.device(device):
            assert created() == [k]


@rows("name", ["/cpu", "cpu:*", "/device:CPU:*"])
def test_omitted_index_means_the_first(name):
    with mirror.device("/cpu:5"), mirror.device(name):
        assert created() == [0]


def test_arrays_of_the_context_follow_other_arrays():
    """The towers of the TensorFlow guide: inputs created on the CPU, multiplied elsewhere."""
    with mirror.device("/cpu:1"):
        a = jnp.array([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
        b = jnp.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    with mirror.device("/cpu:2"):
        c = a @ b
    assert (place(a), place(b), place(c)) == ([1], [1], [2])
    np.testing.assert_array_equal(c, [[22, 28], [49, 64]])
    assert not c.committed
    bound = jax.device_put(a, CPUS[6])
    with mirror.device("/cpu:2"):
        assert place(bound + 1) == place(bound + a) == [6]


def test_contexts_nest_and_end():
    with mirror.device("/cpu:1"):
        with mirror.device("/cpu:2"):
            with mirror.device(None):
                assert created() == [0]
            assert created() == [2]
        assert created() == [1]
    with mirror.device(None) as entered:
        assert entered is None
        assert created() == [0]
    assert repr(mirror.device(None)) == "mirror.device(None)"


def test_context_can_be_reused():
    context = mirror.device("/cpu:4")
    for _ in range(2):
        with context:
            with mirror.device("/cpu:1"), context:
                assert created() == [4]
            with context:
                assert created() == [4]
            assert created() == [4]
        assert created() == [0]


@rows("error", [ValueError, KeyboardInterrupt, GeneratorExit])
def test_exception_ends_the_context(error):
    context = mirror.device("/cpu:4")

    @context_function(context)
    def fails():
        assert created() == [4]
        raise error("mine")

    for _ in range(2):
        with pytest.raises(error, match="mine"):
            fails()
        assert created() == [0]
    with cpu_strategy(2).scope():
        with pytest.raises(error, match="mine"):
            fails()
        assert created() == [0, 1]


def context_function(context):
    def decorate(fn):
        def inside():
            with context:
                return fn()

        return inside

    return decorate


def test_contexts_are_per_thread():
    shared, barrier = mirror.device("/cpu:7"), threading.Barrier(6)
    found: dict[int, list[list[int]]] = {}

    def work(k):
        for _ in range(5):
            barrier.wait()
            with mirror.device(f"/cpu:{k}"):
                inner = created()
                with shared:
                    barrier.wait()
                    found.setdefault(k, []).append([*inner, *created()])
        found[k].append(created())

    threads = [threading.Thread(target=work, args=(k,)) for k in range(6)]
    with mirror.device("/cpu:6"):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert created() == [6]
    assert found == {k: [[k, 7]] * 5 + [[0]] for k in range(6)}


def test_context_inside_a_scope_takes_precedence(two):
    context = mirror.device("/cpu:5")
    with two.scope():
        with context:
            assert created() == [5]
            assert place(nnx.Linear(2, 2, rngs=nnx.Rngs(0)).kernel[...]) == [5]
            with two.scope():
                assert created() == [0, 1]
                with context:
                    assert created() == [5]
            assert created() == [5]
            assert mirror.get_strategy() is two
        assert created() == [0, 1]
        with mirror.device(None):
            assert created() == [0]


def test_scope_inside_a_context_takes_precedence(two):
    with mirror.device("/cpu:5"):
        with two.scope():
            assert created() == [0, 1]
        assert created() == [5]


TRANSFORMS = {
    "grad": lambda fn: jax.grad(lambda x: fn(x).sum()),
    "jvp": lambda fn: lambda x: jax.jvp(fn, (x,), (x,))[1],
    "vmap": lambda fn: jax.vmap(fn),
    "vmap of grad": lambda fn: jax.vmap(jax.grad(lambda x: fn(x).sum())),
    "grad of grad": lambda fn: jax.grad(lambda x: jax.grad(lambda x: fn(x).sum())(x).sum()),
    "nnx.grad": lambda fn: lambda x: nnx.grad(lambda m: fn(m[...]).sum())(nnx.Param(x))[...],
}


@rows("name", list(TRANSFORMS))
def test_context_works_inside_and_around_a_transformation(two, name):
    def fn(x):
        return jnp.sin(x) * x**2

    def inside(x):
        with mirror.device("/cpu:3"):
            assert created() == [3]
            return fn(x)

    x = np.linspace(0, 1, 3, dtype=np.float32)
    plain = TRANSFORMS[name](fn)(jnp.asarray(x))
    is_scoped = list(TRANSFORMS).index(name) % 2 == 1
    with two.scope() if is_scoped else mirror.device("/cpu:1"):
        np.testing.assert_array_equal(TRANSFORMS[name](inside)(jnp.asarray(x)), plain)
        before = created()
        with mirror.device("/cpu:6"):
            around = TRANSFORMS[name](fn)(jnp.asarray(x))
        assert created() == before
    np.testing.assert_array_equal(around, plain)
    assert place(around) == [6]


def step(x):
    with mirror.device("/cpu:1"):
        return x


MESH = Mesh(np.asarray(CPUS[:2]), ("i",))
COMPILED = {
    "jit": lambda fn: jax.jit(fn)(1.0),
    "grad in jit": lambda fn: jax.jit(jax.grad(fn))(1.0),
    "scan": lambda fn: jax.lax.scan(lambda c, x: (fn(c), x), 0.0, jnp.ones(2)),
    "run": lambda fn: cpu_strategy(2).run(fn, (1.0,)),
    "run of one replica": lambda fn: cpu_strategy(1).run(fn, (1.0,)),
    "nnx.jit": lambda fn: nnx.jit(lambda m: fn(m[...]))(nnx.Param(jnp.ones(2))),
    "shard_map": lambda fn: jax.shard_map(
        fn, mesh=MESH, in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False
    )(jnp.ones(2)),
    "pmap": lambda fn: jax.pmap(fn)(jnp.ones(2)),
}


@rows("name", list(COMPILED))
def test_context_is_rejected_inside_compiled_functions(two, name):
    line = f"test_placement.py:{step.__code__.co_firstlineno + 1}"
    names = ["mirror.device('/device:CPU:1')", line, 'with mirror.device("/cpu:1"):']
    fix = ["jax.jit", "strategy.run"]
    with raises(RuntimeError, names=names, fix=fix):
        COMPILED[name](step)
    if "run" not in name and name not in ("pmap", "shard_map"):
        with two.scope(), raises(RuntimeError, names=names, fix=fix):
            COMPILED[name](step)
    with raises(RuntimeError, names=["mirror.device(None)", "test_placement.py"]):
        jax.jit(lambda x: mirror.device(None).__enter__())(1.0)


def test_context_is_accepted_inside_uncompiled_functions():
    def known(x):
        with jax.ensure_compile_time_eval():
            y = jnp.ones(2) + step(1.0)
            assert place(y) == [0]
            with mirror.device("/cpu:4"):
                assert created() == [4]
        return x + y

    np.testing.assert_array_equal(jax.jit(known)(1.0), [3, 3])
    with cpu_strategy(2).scope():
        np.testing.assert_array_equal(jax.jit(known_in_scope)(1.0), [2, 2])
    with jax.disable_jit():
        assert float(jax.jit(step)(1.0)) == 1


def known_in_scope(x):
    with jax.ensure_compile_time_eval(), mirror.device("/cpu:4"):
        assert created() == [4]
        return x + np.ones(2)


def everything(strategy):
    """Calls all methods of a strategy, and returns their results."""
    data = strategy.distribute_dataset(
        [np.arange(8, dtype=np.float32).reshape(4, 2) + k for k in range(2)]
    )
    with strategy.scope():
        model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    results = []
    for batch in data:
        results += [batch.stacked, strategy.run(train, (model, optimizer, batch))]
        results += [strategy.reduce("mean", batch, axis=0), strategy.gather(batch)]
        results += [*strategy.local_results(batch)]
    strategy.check_mirrored(model)
    return [*results, *jax.tree.leaves(nnx.state((model, optimizer)))]


def train(model, optimizer, batch):
    loss, grads = nnx.value_and_grad(lambda model: (model(batch) ** 2).mean())(model)
    grads, loss = mirror.all_reduce("mean", (grads, loss))
    optimizer.update(model, grads)
    return loss


@pytest.fixture(scope="module")
def outside():
    return everything(cpu_strategy(2))


@rows("name", ["/cpu:0", "/cpu:6", None])
def test_strategy_ignores_an_outer_context(name, outside):
    with mirror.device(name):
        inside = everything(cpu_strategy(2))
    for a, b in zip(outside, inside, strict=True):
        assert a.sharding == b.sharding
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("scoped", [False, True])
def test_run_mirrors_a_model_created_on_one_device(two, scoped):
    (batch,) = two.distribute_dataset([np.ones((4, 2), np.float32)])

    def make():
        model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

    with two.scope():
        wanted = two.run(train, (*make(), batch))
    with two.scope() if scoped else mirror.device(None), mirror.device("/cpu:5"):
        model, optimizer = make()
        assert place(model.kernel[...]) == [5]
        loss = two.run(train, (model, optimizer, batch))
    assert place(model.kernel[...]) == place(optimizer.step[...]) == place(loss) == [0, 1]
    assert loss == wanted
    two.check_mirrored(model)


UNKNOWN = {
    "/cpu:8": "/device:CPU:8",
    "/gpu:0": "/device:GPU:0",
    "GPU:2": "/device:GPU:2",
    "/device:GPU:2": "/device:GPU:2",
    "/tpu:0": "/device:TPU:0",
    "/device:wormhole:1": "/device:WORMHOLE:1",
}


@rows("name", list(UNKNOWN))
def test_unknown_device_error_lists_existing_devices(name):
    with raises(mirror.InvalidDeviceError, values=[UNKNOWN[name], ALL]):
        mirror.device(name)


@pytest.mark.parametrize("soft", [False, True])
def test_invalid_device_is_rejected(soft):
    mirror.config.set_soft_device_placement(soft)
    try:
        for name in ("foo", "/cpu:0/gpu:1", "cpu:x"):
            with raises(ValueError, values=repr(name), fix="'/cpu:0'"):
                mirror.device(name)
        with raises(ValueError, values="''", fix="'/cpu:0'"):
            mirror.device("")
        (physical,) = mirror.config.list_physical_devices("CPU")
        for other, shown in ((3, "3"), (["/cpu:0"], "['/cpu:0']"), (physical, physical.name)):
            found, fix = [shown, type(other).__name__], "mirror.config.list_logical_devices()"
            with raises(TypeError, values=found, fix=fix):
                mirror.device(other)
    finally:
        mirror.config.set_soft_device_placement(False)


def test_placement_is_strict_by_default():
    """TensorFlow's default is soft: a typo then trains on the CPU. Here it is an error."""
    assert mirror.config.get_soft_device_placement() is False
    with raises(RuntimeError, values="/device:GPU:7"):
        mirror.device("GPU:7")


def test_soft_placement_falls_back_to_an_existing_device(caplog):
    """This is logged once per name; TensorFlow is silent. The devices of a strategy stay strict."""
    forget_placement_warnings()
    mirror.config.set_soft_device_placement(True)
    try:
        assert mirror.config.get_soft_device_placement() is True
        unknown = [*UNKNOWN, mirror.config.LogicalDevice("/device:GPU:9", "GPU")]
        with caplog.at_level(logging.INFO, "mirror"):
            for name in unknown * 3:
                with mirror.device("/cpu:5"), mirror.device(name):
                    assert created() == [0]
            with mirror.device("/cpu:5"):
                assert created() == [5]
        assert [r.levelno for r in caplog.records] == [logging.WARNING] * len(unknown)
        for record, name in zip(caplog.records, [*UNKNOWN, "/device:GPU:9"], strict=True):
            assert_message(record.getMessage(), names=name, values="/device:CPU:0")
        with pytest.raises(mirror.InvalidDeviceError):
            mirror.OneDeviceStrategy("/gpu:0")
    finally:
        mirror.config.set_soft_device_placement(False)
        forget_placement_warnings()
    with pytest.raises(mirror.InvalidDeviceError):
        mirror.device("/gpu:0")


def on(k, value=1.0):
    return jax.device_put(jnp.full(3, value), CPUS[k])


SUMS = {
    "numbers": ([1, 2, 3], 6),
    "one": ([2.5], 2.5),
    "one array": ([jnp.ones(2)], [1, 1]),
    "one bound": ([on(2)], [1, 1, 1]),
    "a generator": ((float(k) for k in range(4)), 6),
    "NumPy": ([np.arange(2), np.arange(2)], [0, 2]),
    "free": ([jnp.ones(2), jnp.ones(2)], [2, 2]),
    "bound": ([on(1), on(2), on(3, 2.0)], [4, 4, 4]),
    "bound and free": ([jnp.ones(3), on(2)], [2, 2, 2]),
    "bound to one": ([on(2), on(2)], [2, 2, 2]),
    "variables": ([nnx.Param(jnp.ones(2)), nnx.Param(jnp.ones(2))], [2, 2]),
}


@rows("name", list(SUMS))
def test_add_n_adds_on_the_current_device(name):
    values, wanted = SUMS[name]
    values = list(values)
    np.testing.assert_array_equal(mirror.add_n(values), wanted)
    with mirror.device("/cpu:5"):
        total = mirror.add_n(iter(values))
        np.testing.assert_array_equal(total, wanted)
        assert place(total) == [5]


def test_add_n_stays_on_the_common_device():
    assert place(mirror.add_n([on(2), on(2)])) == [2]
    assert place(mirror.add_n([on(2), jnp.ones(3)])) == [2]
    assert place(mirror.add_n([on(2), on(1)])) == [0]


def test_add_n_adds_in_order():
    values = [np.float32(1e8), np.float32(-1e8), np.float32(1)]
    assert mirror.add_n(values) == 1
    assert mirror.add_n(values[::-1]) == 0


def test_add_n_in_a_scope_is_mirrored(two):
    free = jnp.full(3, 2.0)
    with two.scope():
        x = jnp.ones(3)
        on_host = np.ones(3, np.float32)
        several = [x, x], [x, on(0)], [on(5), on(6)], [x, on_host], [on_host, on_host]
        for values in (*several, [on(5, 2.0)], [free]):
            total = mirror.add_n(values)
            np.testing.assert_array_equal(total, [2, 2, 2])
            assert place(total) == [0, 1]
        assert place(jax.grad(lambda x: mirror.add_n([x, x * x]).sum())(x)) == [0, 1]
        with mirror.device("/cpu:5"):
            assert place(mirror.add_n([x, x])) == [5]
    ids = two.run(lambda: mirror.get_replica_context().replica_id_in_sync_group + 1)
    assert mirror.add_n(two.local_results(ids)) == 3
    assert two.run(lambda x: mirror.add_n([x, x, 1.0]), (2.0,)) == 5


@pytest.mark.parametrize("device", [None, "/cpu:4"])
def test_add_n_is_differentiable(device):
    def loss(x, y):
        with mirror.device(device):
            return (mirror.add_n([x**2, y**3, x]) * 2).sum()

    x, y = on(1, 2.0), on(2, 3.0)
    found = jax.grad(loss, argnums=(0, 1))(x, y)
    np.testing.assert_array_equal(found[0], [10, 10, 10])
    np.testing.assert_array_equal(found[1], [54, 54, 54])
    assert (place(found[0]), place(found[1])) == ([1], [2])
    second = jax.grad(lambda x: jax.grad(loss)(x, y).sum())(x)
    np.testing.assert_array_equal(second, [4, 4, 4])
    np.testing.assert_array_equal(jax.vmap(lambda a, b: mirror.add_n([a, b]))(x, y), [5, 5, 5])
    free = jax.jit(lambda a, b: mirror.add_n([a, b]))
    np.testing.assert_array_equal(free(np.ones(3), np.ones(3)), [2, 2, 2])


BAD_SUMS: dict[str, tuple] = {
    "nothing": ([], ValueError, "[]"),
    "shapes": (
        [np.ones(2, np.float32), np.ones(3, np.float32)],
        ValueError,
        ["float32[2]", "float32[3]"],
    ),
    "dtypes": ([1, 2.0], ValueError, ["int32[]", "float32[]"]),
    "an array": (jnp.ones(2), TypeError, "float32[2]"),
    "a NumPy array": (np.ones(2), TypeError, "float64[2]"),
    "a variable": (nnx.Param(jnp.ones(2)), TypeError, "Param"),
    "a number": (3, TypeError, "3 (int)"),
    "None": (None, TypeError, "None (NoneType)"),
    "text": ("ab", TypeError, "'ab' (str)"),
    "a dict": ({"a": 1}, TypeError, "{'a': 1} (dict)"),
    "texts": (["one"], TypeError, "'one' (str)"),
    "Nones": ([None], TypeError, "None (NoneType)"),
}


@rows("name", list(BAD_SUMS))
def test_add_n_rejects_invalid_arguments(name):
    values, error, found = BAD_SUMS[name]
    with raises(error, names="add_n", values=found):
        mirror.add_n(values)


def test_towers_are_summed():
    """Each device computes a product; the first one computes the sum."""
    a = jnp.arange(1.0, 7.0).reshape(2, 3)
    b = jnp.arange(1.0, 7.0).reshape(3, 2)
    towers = []
    for device in mirror.config.list_logical_devices("CPU")[:2]:
        with mirror.device(device):
            towers.append(a @ b)
    assert [place(tower) for tower in towers] == [[0], [1]]
    with mirror.device("/cpu:0"):
        total = mirror.add_n(towers)
    assert place(total) == [0]
    np.testing.assert_array_equal(total, [[44, 56], [98, 128]])


class Half(nnx.Module):
    def __init__(self, sizes, key):
        self.first = nnx.Linear(*sizes, rngs=nnx.Rngs(key))

    def __call__(self, x):
        return jnp.tanh(self.first(x))


@pytest.mark.slow
def test_model_parallel_layers_train():
    """The first half of a network on one device, the second on another; it trains as on one."""
    x = np.linspace(-1, 1, 12, dtype=np.float32).reshape(4, 3)

    def build(devices):
        halves = []
        for key, (device, sizes) in enumerate(zip(devices, [(3, 5), (5, 2)], strict=True)):
            with mirror.device(device):
                halves.append(Half(sizes, key))
        return halves

    def loss_fn(halves, devices):
        out = x
        for half, device in zip(halves, devices, strict=True):
            with mirror.device(device):
                out = half(out)
        return (out**2).mean()

    def trained(devices):
        halves = build(devices)
        losses = []
        for _ in range(3):
            loss, grads = nnx.value_and_grad(functools.partial(loss_fn, devices=devices))(halves)
            losses.append(float(loss))
            for half, grad, device in zip(halves, grads, devices, strict=True):
                with mirror.device(device):
                    nnx.update(half, jax.tree.map(lambda p, g: p - 0.1 * g, nnx.state(half), grad))
        return losses, halves

    wanted, alone = trained(["/cpu:0", "/cpu:0"])
    losses, halves = trained(["/cpu:1", "/cpu:2"])
    assert losses == wanted
    assert losses[2] < losses[0]
    assert [place(half.first.kernel[...]) for half in halves] == [[1], [2]]
    for a, b in zip(alone, halves, strict=True):
        np.testing.assert_array_equal(a.first.kernel[...], b.first.kernel[...])


def test_model_parallel_layers_train_with_bound_parameters():
    """JAX does not copy what is bound to a device; `add_n` brings the two halves together."""
    w1, w2 = on(1), on(2, 2.0)

    def loss(w1, w2):
        hidden = jnp.sin(w1)
        with mirror.device("/cpu:3"):
            return mirror.add_n([hidden, w2 * w2]).sum()

    value, grads = jax.value_and_grad(loss, argnums=(0, 1))(w1, w2)
    assert place(value) == [3]
    assert [place(g) for g in grads] == [[1], [2]]
    np.testing.assert_array_equal(grads[0], np.asarray(jnp.cos(w1)))
    np.testing.assert_array_equal(grads[1], [4, 4, 4])
