"""Operations that a platform executes slowly are replaced by equivalent ones."""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax

import mirror
from mirror._src.jaxprs.equations import equations
from mirror._src.passes import lower
from mirror._src.passes.lower import lowered
from tests.support import inside
from tests.support.keras_models import WARNINGS, keras
from tests.support.messages import raises
from tests.support.strategies import ONE, PAIRS, cpu_strategy, executors
from tests.support.tables import mostly_slow, rows

RULES = lower._BY_PLATFORM["CPU"]
EXECUTORS = {
    **ONE,
    **PAIRS,
    **executors(2),
    "in turn": functools.partial(cpu_strategy, 2, replicas=4),
    "slices": functools.partial(cpu_strategy, 2, shard="model"),
}
# Seeds of random operations.
SEEDS = [
    range(3),
    pytest.param(range(3, 34), marks=pytest.mark.slow),
    pytest.param(range(34, 1000), marks=pytest.mark.nightly),
]


def both(fn, *args):
    """Returns the results of XLA's operations and of the rules, compiled as for users."""
    options = {"xla_backend_optimization_level": 3, "xla_llvm_disable_expensive_passes": False}
    compiled = [jax.jit(each, compiler_options=options) for each in (fn, lowered(fn, RULES))]
    return [list(map(np.array, jax.tree.leaves(each(*args)))) for each in compiled]


def replaced(fn, *args):
    """Returns the names of operations that a rule replaces."""
    eqns = equations(jax.make_jaxpr(fn)(*args).jaxpr)
    return {e.primitive.name for e in eqns if RULES.get(e.primitive.name, lambda _: None)(e)}


def require_equal(fn, *args):
    """Compares results to the last bit, except for the bits of a NaN."""
    for x, y in zip(*both(fn, *args), strict=True):
        same_bits(x, y)


def same_bits(x, y):
    assert (x.shape, x.dtype) == (y.shape, y.dtype)
    for value in (x, y) if x.dtype.kind == "f" else ():
        value[np.isnan(value)] = np.nan
    assert x.tobytes() == y.tobytes()


def numbers(rng, shape):
    """Returns random numbers: with ties, NaN, infinities or zeros of both signs."""
    x = rng.randn(*map(int, shape))
    match rng.randint(5):
        case 0:
            x = np.round(x)
        case 1:
            x[rng.rand(*shape) < 0.2] = np.nan
        case 2:
            x[rng.rand(*shape) < 0.6] = rng.choice([-np.inf, np.inf])
        case 3:
            x = np.where(rng.rand(*shape) < 0.5, 0.0, -0.0)
    return x.astype(np.float32)


def pool(x, dims, strides, padding, extreme=lax.max, **spread):
    start = -jnp.inf if extreme is lax.max else jnp.inf
    return lax.reduce_window(x, start, extreme, dims, strides, padding, **spread)


def random_pool(rng):
    """Returns a function that pools, and its input."""
    rank = rng.choice([1, 2, 2, 2, 3])
    around = lambda inner: (1, *map(int, inner), 1)  # noqa: E731
    dims = around(rng.randint(1, 4 if rank < 3 else 3, rank))
    strides = dims if rng.randint(2) else around(rng.randint(1, 4, rank))
    padding = rng.choice(["SAME", "VALID"])
    extreme = [lax.max, lax.min][rng.randint(2)]
    shape = (2, *rng.randint(3, 9, rank), rng.choice([3, 16]))
    return functools.partial(pool, dims=dims, strides=strides, padding=padding, extreme=extreme), (
        numbers(rng, shape)
    )


def pooled_by_numpy(x, dims, strides, padding, extreme):
    """Returns the extremes of all windows, with zeros of any sign."""
    identity, extreme = (-np.inf, np.max) if extreme is lax.max else (np.inf, np.min)
    ends = lax.padtype_to_pads(x.shape, dims, strides, padding)
    windows = np.lib.stride_tricks.sliding_window_view(
        np.pad(x, ends, constant_values=identity), dims
    )[tuple(slice(None, None, stride) for stride in strides)]
    return extreme(windows, axis=tuple(range(x.ndim, windows.ndim)))


@pytest.mark.parametrize("seeds", SEEDS)
def test_max_pooling_and_its_derivatives(subtests, seeds):
    for seed in seeds:
        with subtests.test(msg=str(seed)):
            rng = np.random.RandomState(seed)
            fn, x = random_pool(rng)
            dy = rng.randn(*jax.eval_shape(fn, x).shape).astype(np.float32)

            def value_and_gradient(x, dy, fn=fn):
                y, vjp = jax.vjp(fn, x)
                return y, vjp(dy)

            (by_xla, *gradients), (value, *others) = both(value_and_gradient, x, dy)
            np.testing.assert_array_equal(value, pooled_by_numpy(x, **fn.keywords))
            if x.shape[-1] < 16:  # otherwise XLA's reduction may omit NaN
                same_bits(by_xla, value)
            same_bits(*gradients, *others)
            # With ties or NaN, XLA's result depends on the order in which it walks a window.
            x, dx = (rng.permutation(x.size).reshape(x.shape).astype(np.float32) for _ in range(2))
            require_equal(lambda x, dx, fn=fn: jax.jvp(fn, [x], [dx]), x, dx)


@rows("x", [[1, np.nan], [np.nan, 1], [np.nan, np.nan], [-np.inf, -np.inf]])
@rows("padding", [(0, 1), (1, 0), (1, 2)])
def test_directional_derivative_of_max_pooling_with_nan_and_padding(x, padding):
    x, dx = np.array(x, np.float32), np.array([10, 20], np.float32)
    fn = functools.partial(pool, dims=(2,), strides=(1,), padding=[padding])
    require_equal(lambda x, dx: jax.jvp(fn, [x], [dx]), x, dx)


def extremes(x, axis, dtype):
    return lax.argmax(x, axis, dtype), lax.argmin(x, axis, dtype)


@pytest.mark.parametrize("seeds", SEEDS)
def test_argmax_and_argmin(subtests, seeds):
    for seed in seeds:
        with subtests.test(msg=str(seed)):
            rng = np.random.RandomState(seed)
            x = numbers(rng, rng.randint(1, 7, rng.randint(1, 4)))
            axis, dtype = int(rng.randint(x.ndim)), [np.int32, np.int8, np.uint32][rng.randint(3)]
            find = functools.partial(extremes, axis=axis, dtype=dtype)
            require_equal(find, x)


@rows("shape", [(8, 1000), (1000, 8), (3, 16, 300), (64, 64), (2000,)])
def test_argmax_and_argmin_of_arrays_that_xla_vectorizes(shape):
    """In the maximum of such arrays, XLA:CPU omits NaN, but not in `argmax`."""
    rng = np.random.RandomState(0)
    x = np.where(rng.rand(*shape) < 0.2, np.nan, np.round(rng.randn(*shape)))
    for axis in range(len(shape)):
        require_equal(functools.partial(extremes, axis=axis, dtype=np.int32), x.astype(np.float32))


def random_convolution(rng):
    """Returns a function that convolves, and its operands."""
    rank = int(rng.choice([1, 2, 2, 2, 3]))
    pick = lambda *options: [int(rng.choice(options)) for _ in range(rank)]  # noqa: E731
    kind = rng.choice(["dense", "depthwise", "one channel", "grouped", "pointwise"])
    groups, inputs, outputs = {
        "depthwise": (int(rng.choice([3, 8, 64])), 1, int(rng.choice([1, 1, 2]))),
        "one channel": (1, 1, int(rng.choice([2, 5]))),
        "grouped": (int(rng.choice([2, 4])), int(rng.choice([2, 3])), int(rng.choice([2, 3]))),
    }.get(kind, (1, int(rng.choice([2, 4])), int(rng.choice([2, 3, 5]))))
    kernel = [1] * rank if kind == "pointwise" else pick(1, 2, 3)
    lhs_dilation, rhs_dilation = pick(1, 1, 1, 2), pick(1, 1, 1, 2)
    # More padding than this is negative in the input's gradient, where XLA reads outside the input
    # (JAX 0.10.2, not 0.12.0.1).
    most = [min(2, (k - 1) * d) for k, d in zip(kernel, rhs_dilation, strict=True)]
    letters = "DHW"[3 - rank :]
    layout = (f"N{letters}C", f"{letters}IO", f"N{letters}C")
    match rng.randint(4):
        case 0:
            layout = (f"NC{letters}", f"OI{letters}", f"NC{letters}")
        case 1:
            layout = tuple("".join(rng.permutation(list(axes))) for axes in layout)
    sizes = dict(zip(letters, pick(5, 6, 8), strict=True), N=rng.choice([1, 2, 2]))
    sizes |= {"C": groups * inputs, "I": inputs, "O": groups * outputs}
    x = rng.randn(*map(sizes.get, layout[0])).astype(np.float32)
    sizes |= zip(letters, kernel, strict=True)
    w = rng.randn(*map(sizes.get, layout[1])).astype(np.float32)
    fn = functools.partial(
        lax.conv_general_dilated,
        window_strides=[1] * rank if max(lhs_dilation) > 1 else pick(1, 1, 2),
        padding=[(int(rng.randint(n + 1)), int(rng.randint(n + 1))) for n in most],
        lhs_dilation=lhs_dilation,
        rhs_dilation=rhs_dilation,
        dimension_numbers=layout,
        feature_group_count=groups,
    )
    return fn, x, w


@pytest.mark.parametrize("seeds", SEEDS)
def test_convolutions_and_their_gradients(subtests, seeds):
    for seed in seeds:
        with subtests.test(msg=str(seed)):
            rng = np.random.RandomState(seed)
            fn, x, w = random_convolution(rng)
            shape = jax.eval_shape(fn, x, w).shape
            dy = rng.randn(*shape).astype(np.float32)

            def value_and_gradients(x, w, dy, fn=fn):
                y, vjp = jax.vjp(fn, x, w)
                return y, vjp(dy)

            mapped = [(None, None, None), (0, None, 0), (None, 0, 0), (0, 0, 0)][rng.randint(4)]
            if 0 in mapped:
                pairs = zip((x, w, dy), mapped, strict=True)
                x, w, dy = (np.stack([v, 1 + v]) if axis == 0 else v for v, axis in pairs)
                value_and_gradients = jax.vmap(value_and_gradients, mapped)
            require_close(value_and_gradients, x, w, dy)


def require_close(fn, *args):
    """Compares results up to the rounding of sums."""
    for x, y in zip(*both(fn, *args), strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        if x.size:
            np.testing.assert_allclose(y, x, rtol=1e-6, atol=1e-6 * np.abs(x).max())


def net(x, w):
    """Uses every family."""
    filters = np.full((3, 3, 1, 3), 0.1, np.float32)
    layout = ("NHWC", "HWIO", "NHWC")
    x = lax.conv_general_dilated(jnp.tanh(x), w * filters, (1, 1), "SAME", dimension_numbers=layout)
    y = pool(jnp.tanh(x), (1, 2, 2, 1), (1, 2, 2, 1), "SAME")
    x = lax.conv_general_dilated(
        y, filters, (1, 1), "SAME", dimension_numbers=layout, feature_group_count=3
    )
    y = jnp.tanh(x.mean((1, 2)) * w)
    return (y**2).sum() + lax.stop_gradient(jnp.argmax(y, -1).astype(np.float32).sum())


def scanned(x, w):
    return lax.scan(lambda total, row: (total + net(row, w), row), 0.0, x[None])[0]


def looped(x, w):
    again = lambda carry: (carry[0] + 1, carry[1] + net(x, w))  # noqa: E731
    return lax.while_loop(lambda carry: carry[0] < 2, again, (0, 0.0))[1]


def test_replacements_keep_lines_scopes_and_names_of_functions():
    @jax.jit
    def block(x):
        with jax.named_scope("layer"):
            return net(x, ARGS[1])

    text = jax.jit(lowered(lambda x: block(x), RULES)).lower(IMAGES).as_text(debug_info=True)
    assert "jit(block)/layer/max" in text
    assert "test_lower.py" in text


def test_xla_does_not_inline_depthwise_convolutions():
    """It would compute them again in each operation that reads them."""
    text = jax.jit(lowered(net, RULES)).lower(*ARGS).compile().as_text()
    assert " call(" in text


def test_branches_for_other_platforms_are_not_compiled():
    fn = functools.partial(lax.platform_dependent, cpu=net, tpu=looped, default=scanned)
    text = jax.jit(lowered(lambda *args: fn(*args), RULES)).lower(*ARGS).as_text()
    assert "while" not in text
    require_close(fn, *ARGS)


def test_recomputation_remains():
    """XLA must not merge it with the original."""
    fn = jax.grad(jax.checkpoint(net), (0, 1))
    texts = [jax.jit(each).lower(*ARGS).as_text() for each in (fn, lowered(fn, RULES))]
    for operation in ("stablehlo.tanh", "stablehlo.optimization_barrier"):
        assert len({text.count(operation) for text in texts}) == 1
        assert operation in texts[0]


@jax.custom_vjp
def custom(x, w):
    return net(x, w)


custom.defvjp(lambda x, w: (net(x, w), (x, w)), lambda saved, dy: jax.vjp(net, *saved)[1](dy))


@jax.custom_jvp
def custom_jvp(x, w):
    return net(x, w)


custom_jvp.defjvp(lambda xs, dxs: jax.jvp(net, xs, dxs))

WITHIN = {
    "nothing": net,
    "jit": jax.jit(net),
    "scan": scanned,
    "cond": lambda x, w: lax.cond(x.sum() > 0, net, lambda x, w: 2 * net(x, w), x, w),
    "remat": jax.checkpoint(net),
    "custom_vjp": custom,
    "vmap": lambda x, w: jax.vmap(net, (0, None))(x[None], w).sum(),
}
DERIVATIVES = {
    "value": lambda fn: fn,
    "grad": lambda fn: jax.grad(fn, (0, 1)),
    "jvp(grad)": lambda fn: lambda x, w: jax.jvp(lambda x: jax.grad(fn)(x, w), [x], [x]),
}
IMAGES = np.random.RandomState(0).randn(2, 5, 6, 1).astype(np.float32)
ARGS = IMAGES, np.eye(1, 3, dtype=np.float32)
CASES = {
    **{
        f"{of} of {name}": DERIVATIVES[of](fn)
        for (name, fn), of in itertools.product(WITHIN.items(), DERIVATIVES)
        if (name, of) != ("custom_vjp", "jvp(grad)")
    },
    "while": looped,
    "custom_jvp": jax.grad(custom_jvp, (0, 1)),
    "hessian": jax.hessian(net),
}


@rows("fn", CASES)
def test_rules_reach_into_calls_loops_and_branches(fn):
    assert replaced(fn, *ARGS)
    assert not replaced(lowered(fn, RULES), *ARGS)


@pytest.mark.parametrize("names", mostly_slow(CASES, nightly=list(CASES)[1::2]))
def test_values_within_calls_loops_and_branches(names, subtests):
    """Every second row in CI has each call with one or two derivatives, and each derivative."""
    for name in names:
        with subtests.test(msg=name):
            require_close(CASES[name], *ARGS)


def convolution(x, w, **options):
    layout = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(x, w, (1, 1), "VALID", dimension_numbers=layout, **options)


HALF = np.ones((2, 6, 6, 2), jnp.bfloat16)
DECLINED = {
    "integers": lambda x: pool(x.astype(np.int32), (1, 2, 2, 1), (1, 2, 2, 1), "VALID"),
    "half precision": lambda x: pool(x, (1, 2, 2, 1), (1, 2, 2, 1), "VALID"),
    "windows of one element": lambda x: pool(x.astype(np.float32), (1,) * 4, (1, 2, 2, 1), "SAME"),
    "large windows": lambda x: pool(x.astype(np.float32), (1, 6, 6, 1), (1, 1, 1, 1), "SAME"),
    "windows larger than the input": lambda x: pool(
        x.astype(np.float32), (1, 3, 7, 1), (1, 1, 1, 1), "VALID"
    ),
    "no channels": lambda x: pool(
        x[..., :0].astype(np.float32), (1, 2, 2, 1), (1, 2, 2, 1), "VALID"
    ),
    "convolution of half precision": lambda x: convolution(
        x[..., :1], jnp.ones((2, 2, 1, 4), x.dtype)
    ),
    "convolution of integers": lambda x: convolution(
        x[..., :1].astype(np.int32), np.ones((2, 2, 1, 4), np.int32)
    ),
    "convolution with negative padding": lambda x: lax.conv_general_dilated(
        x.astype(np.float32), np.ones((4, 6, 2, 2), np.float32), (1, 1), [(-1, 1), (0, 0)]
    ),
    "kernel larger than the input": lambda x: convolution(
        x[..., :1].astype(np.float32), np.ones((7, 1, 1, 4), np.float32)
    ),
    "convolution of no channels": lambda x: convolution(
        x[..., :0].astype(np.float32), np.ones((3, 3, 0, 4), np.float32)
    ),
    "too many groups": lambda x: jax.grad(
        lambda w: convolution(jnp.ones((1, 4, 4, 130)), w, feature_group_count=65).sum()
    )(jnp.ones((2, 2, 2, 65))),
    "argmax of integers": lambda x: jnp.argmax(x.astype(np.int32), 1),
    "argmax of half precision": lambda x: jnp.argmax(x, 1),
    "argmax of nothing": lambda x: jnp.argmax(x[:0].astype(np.float32), 1),
    "too many for the index": lambda x: lax.argmax(jnp.zeros(127), 0, np.int8),
}


@rows("fn", DECLINED)
def test_other_operations_remain(fn):
    assert not replaced(fn, HALF)


def test_half_precision_in_loops_gets_the_layout_of_the_fast_kernel():
    """The same convolution: XLA changes the layout itself, but not inside loops."""
    x = jnp.asarray(np.random.RandomState(0).randn(4, 6, 6, 3), jnp.bfloat16)
    w = jnp.asarray(np.random.RandomState(1).randn(3, 3, 3, 4), jnp.bfloat16)

    def gradient(x, w):
        return jax.grad(lambda w: (convolution(x, w) ** 2).sum())(w)

    assert replaced(gradient, x, w)
    with_rules = lowered(gradient, RULES)(x, w)
    np.testing.assert_allclose(
        with_rules.astype("float32"), gradient(x, w).astype("float32"), rtol=1e-2
    )


# A rule that users would see: the cosine instead of the sine.
COSINE = {"sin": lambda _: lambda _, arguments: [lax.cos(*arguments)]}


def own(strategy):
    return mirror.PerReplica([np.zeros(3, np.float32)] * strategy.num_replicas_in_sync)


def step(x):
    return mirror.all_reduce("mean", jnp.sin(x).mean()), jnp.sin(x)


@rows("make", EXECUTORS)
def test_every_executor_uses_the_table(monkeypatch, make):
    monkeypatch.setitem(lower._BY_PLATFORM, "CPU", COSINE)
    strategy = make()
    mean, each = strategy.run(step, (own(strategy),))
    assert float(mean) == 1
    for value in each.values:
        np.testing.assert_array_equal(value, 1)
    assert strategy.verify(step, (own(strategy),)).largest == 0


def test_trainer_uses_the_table(monkeypatch, two):
    monkeypatch.setitem(lower._BY_PLATFORM, "CPU", COSINE)
    with two.scope():
        model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    loss = lambda model, x: jnp.sin(x).mean(1) + 0 * model(x)[:, 0]  # noqa: E731
    trainer = mirror.Trainer(model, optax.sgd(0.0), loss, strategy=two)
    data = [np.zeros((4, 2), np.float32)] * 2
    assert trainer.fit(data, progress=False)["loss"] == [1]
    assert trainer.evaluate(data)["loss"] == 1


@pytest.mark.dev("keras")
@pytest.mark.filterwarnings(*WARNINGS)
def test_keras_models_use_the_table(monkeypatch, two):
    monkeypatch.setitem(lower._BY_PLATFORM, "CPU", COSINE)
    with two.scope():
        dense = keras.layers.Dense(2, kernel_initializer="zeros")
        layers = [keras.Input((2,)), dense, keras.layers.Lambda(keras.ops.sin)]
        model = keras.Sequential(layers)
        model.compile(loss="mse")
    zeros = np.zeros((4, 2), np.float32)
    assert model.fit(zeros, zeros, batch_size=4, verbose=0).history["loss"] == [1]


@pytest.mark.slow
@pytest.mark.dev("keras")
@pytest.mark.filterwarnings(*WARNINGS)
def test_keras_convolutions_on_several_devices():
    """XLA's partitioner splits the operations of the rules by the batch."""
    four = cpu_strategy(4)
    convolution, depthwise = keras.layers.Conv2D, keras.layers.DepthwiseConv2D
    with four.scope():
        model = keras.Sequential(
            [
                keras.Input((12, 12, 1)),
                convolution(4, 3, padding="same", activation="tanh"),
                keras.layers.MaxPooling2D(2),
                depthwise(3, strides=2, padding="same"),
                convolution(8, 1, activation="tanh"),
                convolution(8, 2, groups=2, padding="same"),
                keras.layers.Flatten(),
                keras.layers.Dense(3),
            ]
        )
        model.compile("adam", "mse")
    rng = np.random.RandomState(0)
    images = rng.randn(8, 12, 12, 1).astype(np.float32)
    four.verify(model, (images, rng.randn(8, 3).astype(np.float32)))


@rows("make", EXECUTORS)
def test_variable_switches_the_table_off(monkeypatch, make):
    monkeypatch.setitem(lower._BY_PLATFORM, "CPU", COSINE)
    monkeypatch.setenv("MIRROR_LOWERING", "xla")
    strategy = make()
    assert float(strategy.run(step, (own(strategy),))[0]) == 0


def test_variable_with_another_value(monkeypatch, two):
    monkeypatch.setenv("MIRROR_LOWERING", "XLA")
    with raises(ValueError, names=["MIRROR_LOWERING"], values=["'XLA'"], fix="unset"):
        two.run(step, (own(two),))


def test_devices_of_other_types_have_no_rules(monkeypatch):
    assert list(lower._BY_PLATFORM) == ["CPU"]
    monkeypatch.setitem(lower._BY_PLATFORM, "CPU", COSINE)
    with inside.pretended_types(["GPU"]):
        gpu = cpu_strategy(1)
        assert float(gpu.run(step, (own(gpu),))[0]) == 0
        mixed = cpu_strategy(2)  # the second replica is on a CPU
        _, each = mixed.run(step, (own(mixed),))
        assert [float(value[0]) for value in each.values] == [0, 1]


def test_program_for_gpus_is_the_same_with_and_without_the_table(monkeypatch):
    def program():
        strategy = cpu_strategy(2)
        images = mirror.PerReplica([IMAGES] * 2)
        return inside.lowered(strategy, gradient_step, (images,)).as_text()

    on_cpus = program()
    with inside.pretended_types(["GPU"] * 2):
        on_gpus = program()
        monkeypatch.setenv("MIRROR_LOWERING", "xla")
        assert program() == on_gpus
    assert program() != on_cpus


def test_proof_does_not_depend_on_the_table(monkeypatch, two):
    images = mirror.PerReplica([IMAGES] * 2)
    report = str(two.inspect(gradient_step, (images,)))
    monkeypatch.setenv("MIRROR_LOWERING", "xla")
    assert str(two.inspect(gradient_step, (images,))) == report


def gradient_step(x):
    return mirror.all_reduce("mean", jax.grad(net)(x, ARGS[1]))


def wide_convolution(x):
    return lax.conv_general_dilated(x, WIDE, (1, 1), "VALID", dimension_numbers=LAST)


def dense_with_sums(x):
    weights = jax.nn.softmax(x @ WIDE[0, 0])
    return jnp.tanh(weights @ WIDE[1, 1].T).sum(-1)


WIDE, LAST = np.ones((3, 3, 64, 64), np.float32), ("NHWC", "HWIO", "NHWC")


@pytest.mark.skipif(jax.__version_info__ >= (0, 13), reason="not measured")
@rows("make", {name: make for name, make in EXECUTORS.items() if name != "staged"})
def test_convolutions_do_not_use_a_library_with_one_thread(monkeypatch, make):
    def text(fn):
        strategy = make()
        rows = mirror.PerReplica([np.ones((2, 13, 13, 64), np.float32)] * len(own(strategy).values))
        compiled = inside.lowered(strategy, fn, (rows,)).compile().as_text()
        return re.sub(r", (metadata|backend_config)=.*|^ *\d+ \{.*", "", compiled, flags=re.M)

    fast, dense = text(wide_convolution), text(dense_with_sums)
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_experimental_ynn_fusion_type=")
    assert "convolution(" in fast
    assert "ynn_fusion" not in fast
    assert "ynn_fusion" in text(wide_convolution)
    assert text(dense_with_sums) == dense
