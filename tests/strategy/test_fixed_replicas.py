"""`MirroredStrategy(replicas=)`: arguments, reports and warnings. For bits, see `test_bits`."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import mirror
from tests.support import fresh
from tests.support.compilations import compiler_options
from tests.support.inside import devices_of_other_bits, pretended_types
from tests.support.messages import raises
from tests.support.strategies import ON_HOST, cpu_strategy
from tests.support.tables import rows as rows_of

HOST = "threads of host devices"


def rows(strategy, *shape):
    values = np.arange(np.prod((strategy.num_replicas_in_sync, *shape)), dtype=np.float32)
    return mirror.PerReplica.from_stacked(values.reshape(-1, *shape))


def total(x):
    return mirror.all_reduce("sum", x)


@pytest.mark.parametrize(
    ("replicas", "available", "used"), [(8, 3, 2), (8, 5, 4), (6, 5, 3), (2, 4, 2), (7, 2, 1)]
)
@pytest.mark.filterwarnings("ignore:.*will be used")
def test_the_largest_number_of_devices_that_divides_the_replicas(replicas, available, used):
    strategy = cpu_strategy(available, replicas=replicas)
    assert strategy.num_replicas_in_sync == replicas
    assert len(set(strategy.devices)) == used
    x = rows(strategy, 3)
    np.testing.assert_array_equal(strategy.run(total, (x,)), np.asarray(x.stacked).sum(0))


def test_a_warning_if_fewer_devices_take_longer_or_are_idle():
    with pytest.warns(UserWarning, match=r"8 replicas on 3 devices: 2 .* replicas=9 to use all"):
        cpu_strategy(3, replicas=8)
    with pytest.warns(UserWarning, match=r"2 replicas on 4 devices: 2 .* replicas=4 to use all"):
        cpu_strategy(4, replicas=2)


def test_replicas_are_numbered_over_the_devices():
    strategy = cpu_strategy(2, replicas=4)
    ids = strategy.run(lambda: jax.lax.axis_index(mirror.REPLICA_AXIS))
    assert [int(x) for x in ids.values] == [0, 1, 2, 3]
    assert strategy.devices == tuple(jax.devices("cpu")[i] for i in (0, 0, 1, 1))


ODD_VALUES = {
    "negative zeros": [0x80000000],
    "zeros": [0x80000000, 0],
    "NaN": [0x7FC00000, 0xFFC00000, 0x7FC00123, 0xFFF00001, 0x3F800000],
}
COLLECTIVES = {
    "sum": lambda x: jax.lax.psum(x, mirror.REPLICA_AXIS),
    "mean": lambda x: jax.lax.pmean(x, mirror.REPLICA_AXIS),
    "max": lambda x: jax.lax.pmax(x, mirror.REPLICA_AXIS),
    "min": lambda x: jax.lax.pmin(x, mirror.REPLICA_AXIS),
    "scattered": lambda x: jax.lax.psum_scatter(x, mirror.REPLICA_AXIS, tiled=True),
    "complex": lambda x: jax.lax.psum(jax.lax.complex(x, -x), mirror.REPLICA_AXIS),
    "bfloat16": lambda x: jax.lax.psum(x.astype(jnp.bfloat16), mirror.REPLICA_AXIS),
    "empty": lambda x: jax.lax.psum(x[:0].astype(jnp.uint8), mirror.REPLICA_AXIS),
}


@rows_of("replicas", [6, 8])
@rows_of("size", [24, 3 << 15])  # sent in pairs of devices, and in parts
def test_zeros_and_nan_have_the_same_bits_on_any_number_of_devices(replicas, size):
    def step(x):
        return {name: reduce(x) for name, reduce in COLLECTIVES.items()}

    counts = [n for n in (1, 2, 3, 8) if replicas % n == 0]
    strategies = [cpu_strategy(n, replicas=replicas) for n in counts]
    for odd, values in ODD_VALUES.items():
        bits = np.random.RandomState(0).choice(np.asarray(values, np.uint32), (replicas, size))
        stacked = mirror.PerReplica.from_stacked(bits.view(np.float32))
        found = []
        for strategy in strategies:
            results = strategy.run(step, (stacked,))
            arrays = jax.tree.map(lambda x: getattr(x, "stacked", x), results)
            found.append({name: np.asarray(x).tobytes() for name, x in arrays.items()})
        assert not [name for name in COLLECTIVES if len({each[name] for each in found}) > 1], odd


# Not float8_e5m2fnuz: with the flags of the tests, XLA:CPU rounds it wrongly (JAX 0.10.2).
SMALL = """float8_e3m4 float8_e4m3 float8_e4m3b11fnuz float8_e4m3fn float8_e4m3fnuz float8_e5m2
float4_e2m1fn bfloat16 float16"""


@rows_of("dtype", SMALL.split())
def test_sums_of_small_floats_are_rounded_to_their_format(dtype):
    """In subnormal numbers, and near the largest one; formats differ in both."""
    info = jnp.finfo(dtype)
    scale = np.random.RandomState(0).choice([0, 1, -3, 5], (4, 64))
    x = (scale * float(info.smallest_subnormal)).astype(info.dtype)
    x[:, 32:] = (np.float32(info.max) * scale[:, 32:] / 20).astype(info.dtype)
    a, b, c, d = map(jnp.asarray, x)
    wanted = np.asarray((a + b) + (c + d))
    for n in (1, 2, 4):
        strategy = cpu_strategy(n, replicas=4)
        found = np.asarray(strategy.run(COLLECTIVES["sum"], (mirror.PerReplica([a, b, c, d]),)))
        assert (found + 0).tobytes() == (wanted + 0).tobytes()


@pytest.mark.parametrize("value", [0, -1, 2.0, True, "8"])
def test_a_number_that_is_none(value):
    with raises((ValueError, TypeError), names="replicas"):
        mirror.MirroredStrategy(2, replicas=value)


@pytest.mark.parametrize("value", [4097, 10**20])
def test_a_number_that_is_too_large(subtests, value):
    for options in ({"replicas": value}, {"replicas_per_device": value}, {"devices": value}):
        said = {"names": list(options), "values": [4096, value]}
        with subtests.test(msg=str(options)), raises(ValueError, **said):
            mirror.MirroredStrategy(**options)
    with raises(ValueError, values=[4096, 8192]):
        mirror.MirroredStrategy(2, replicas_per_device=4096)


def test_arguments_that_do_not_go_with_it():
    with raises(ValueError, names=("replicas=4", "replicas_per_device=2")):
        mirror.MirroredStrategy(2, replicas=4, replicas_per_device=2)
    with raises(ValueError, names=("replicas=4", "cross_device_ops"), fix="Omit"):
        mirror.MirroredStrategy(2, ON_HOST, replicas=4)
    with pretended_types(["CPU", "GPU"]), raises(ValueError, names="several types"):
        mirror.MirroredStrategy(jax.devices("cpu")[:2], replicas=4)


def test_shard_has_no_effect_and_says_so():
    with pytest.warns(UserWarning, match=r"'optimizer' has no effect.*replicas is fixed.*Omit"):
        assert cpu_strategy(2, replicas=2, shard="optimizer").shard == "none"


def test_devices_that_compute_other_bits_are_named():
    devices = tuple(jax.devices("cpu")[2:4])
    strategy = mirror.MirroredStrategy(devices, replicas=2)
    expected = r"CPU:3\) computes other bits than .*CPU:2\).*replicas="
    with devices_of_other_bits(), pytest.warns(UserWarning, match=expected):
        strategy.run(total, (rows(strategy, 3),))


def test_gpus_neither_add_in_any_order_nor_search_for_the_fastest_kernels():
    """In the step and in the comparison of the devices; checked on an H100 by `test_gpu`."""
    with pretended_types(["GPU"] * 2), compiler_options() as options:
        strategy = cpu_strategy(2, replicas=2)
        strategy.run(total, (rows(strategy, 3),))
    assert len(options) == 2
    assert all(each["xla_gpu_deterministic_ops"] for each in options)


def test_resize_keeps_the_state_and_accepts_batches_of_before():
    strategy = cpu_strategy(4, replicas=4)
    with strategy.scope():
        model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    (batch,) = strategy.distribute_dataset([np.ones((8, 3), np.float32)])

    def step(model, x):
        return mirror.all_reduce("mean", model(x).sum())

    before = strategy.run(step, (model, batch))
    smaller = strategy.resize(jax.devices("cpu")[1:2])
    assert (len(set(smaller.devices)), smaller.num_replicas_in_sync) == (1, 4)
    np.testing.assert_array_equal(smaller.run(step, (model, batch)), before)
    smaller.check_mirrored(model)
    with raises(ValueError, names="resize", fix="replicas=2"):
        cpu_strategy(2).resize(1)


def test_inspect_names_what_the_host_decides():
    strategy = cpu_strategy(2, replicas=2)
    shape = jax.ShapeDtypeStruct((), np.float32)

    def asks(x):
        jax.debug.print("{}", x)
        return mirror.all_reduce("sum", jax.pure_callback(lambda x: x, shape, x.sum()))

    x = rows(strategy, 3)
    report = strategy.inspect(asks, (x,))
    (found,) = report.device_dependent
    assert found.startswith("pure_callback at ")
    assert "the number of devices may change pure_callback" in report.heading
    same = strategy.inspect(total, (x,))
    assert same.device_dependent == ()
    assert same.heading.endswith("same bits on any number of devices")
    assert cpu_strategy(2).inspect(total, (x,)).device_dependent is None


def test_verify_compares_bits_with_one_device():
    strategy = cpu_strategy(2, replicas=2)
    x = rows(strategy, 4)
    report = strategy.verify(lambda x: mirror.all_reduce("mean", jnp.tanh(x).mean()), (x,))
    assert report.same_bits
    assert "same bits" in str(report)
    assert (
        cpu_strategy(1, replicas=2).verify(lambda x: total(x.mean()), (x,), rtol=2).same_bits
        is None
    )
    calls = []

    def counts(x):
        number = jax.pure_callback(
            lambda x: np.float32(calls.append(1) or len(calls)),
            jax.ShapeDtypeStruct((), np.float32),
            x.sum(),
        )
        return mirror.all_reduce("mean", x.mean() + number)

    with raises(mirror.VerifyError, names=("result", "number of devices"), fix="inspect"):
        strategy.verify(counts, (x,))


def test_a_step_that_cannot_be_split_says_why():
    def counts(x):
        ref = jax.new_ref(x.sum())
        ref[...] += mirror.all_reduce("sum", x.sum())
        return ref[...]

    strategy = cpu_strategy(2, replicas=2)
    with raises(NotImplementedError, names=("Ref", "replicas="), fix="without replicas="):
        strategy.run(counts, (rows(strategy, 3),))


def trainer_of(strategy):
    def losses(model, batch):
        return optax.squared_error(model(batch["x"]), batch["y"])[:, 0]

    with strategy.scope():
        return mirror.Trainer(nnx.Linear(3, 1, rngs=nnx.Rngs(0)), optax.sgd(0.1), losses)


def test_a_restore_says_what_the_bits_depend_on(tmp_path):
    data = {"x": np.ones((8, 3), np.float32), "y": np.ones((8, 1), np.float32)}
    trainer = trainer_of(cpu_strategy(2, replicas=4))
    trainer.fit(data, batch_size=4, progress=False)
    trainer.save(tmp_path)
    trainer_of(cpu_strategy(1, replicas=4)).restore(tmp_path)  # a warning would fail the test
    with pytest.warns(UserWarning, match="replicas: 4, now 2"):
        trainer_of(cpu_strategy(2, replicas=2)).restore(tmp_path)
    with pytest.warns(UserWarning, match="replicas: 4, now not fixed; JAX: "):
        trainer_of(cpu_strategy(2)).restore(tmp_path)


@pytest.mark.slow
def test_the_strategy_sets_the_number_of_threads_before_jax_starts():
    fresh.run("""
        import warnings, mirror
        warnings.simplefilter("error")
        before = mirror.config.get_num_cpu_threads()
        mirror.MirroredStrategy(2, replicas=32)
        assert mirror.config.get_num_cpu_threads() == max(before, 32)
        mirror.config.set_num_cpu_threads(max(before, 32))
    """)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("environment", "start", "words"),
    [
        ({"PJRT_NPROC": "2"}, "", "PJRT_NPROC=2 is too small"),
        ({}, "mirror.config.set_num_cpu_threads(3)", "3 threads"),
        ({"PJRT_NPROC": "3"}, "jax.devices()", "3 threads"),
    ],
)
def test_a_warning_if_the_number_of_threads_depends_on_the_devices(environment, start, words):
    output = fresh.run(
        f"""
        import jax, warnings, mirror
        {start}
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            mirror.MirroredStrategy(["/cpu:0"], replicas=8)
        print([str(warning.message) for warning in caught])
        """,
        environment=environment,
    )
    assert words in output
    assert "set_num_cpu_threads(8)" in output


@pytest.mark.slow
def test_the_number_of_threads_cannot_change_after_jax_has_started():
    output = fresh.run("""
        import jax, mirror
        mirror.config.set_num_cpu_threads(5)
        assert mirror.config.get_num_cpu_threads() == 5
        jax.devices()
        mirror.config.set_num_cpu_threads(5)
        try:
            mirror.config.set_num_cpu_threads(6)
        except RuntimeError as error:
            print(error)
    """)
    assert "The number of threads cannot be modified" in output
