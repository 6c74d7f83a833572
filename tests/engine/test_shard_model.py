"""`shard="model"`: each device stores 1/n of the model; steps gather what they read."""

import itertools
import json
import math
import re
import tracemalloc
from collections import Counter

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from jax import lax

import mirror
from mirror import cli
from tests.support.copies import assert_close
from tests.support.inside import (
    axis_in_slices,
    compiled_step,
    give_host_memory,
    slice_arrays_from,
)
from tests.support.strategies import cpu_strategy
from tests.support.tables import rows

N = 4
D = 16
KEY = jax.random.key(0)
RNG = np.random.RandomState(0)
BATCHES = [
    {"x": RNG.randn(8, D).astype(np.float32), "t": RNG.randint(0, 32, 8).astype(np.int32)}
    for _ in range(3)
]
ROWS = np.random.RandomState(1).randn(8 * N, 128).astype(np.float32)
DATA = RNG.randn(16, D).astype(np.float32), RNG.randn(16, D).astype(np.float32)


def normal(i, *shape):
    return jax.random.normal(jax.random.fold_in(KEY, i), shape) * 0.3


def square(*names):
    return lambda: {name: normal(i, D, D) for i, name in enumerate(names)}


def tied(p, b):
    logits = jnp.tanh(p["e"][b["t"]] @ p["w"]) @ p["e"].T
    return optax.softmax_cross_entropy_with_integer_labels(logits, b["t"]).mean()


def bfloat16(p, b):
    w, v = (p[name].astype(jnp.bfloat16) for name in "wv")
    return (jnp.tanh(b["x"].astype(jnp.bfloat16) @ w) @ v.T).astype(jnp.float32).var()


def scan_in_bfloat16(p, b):
    def layer(x, w):
        y = x @ w["w"].T.astype(jnp.bfloat16) + w["b"].astype(jnp.bfloat16)
        return jnp.tanh(y), None

    return lax.scan(layer, b["x"].astype(jnp.bfloat16), p)[0].astype(jnp.float32).var()


def scan_with_remat(p, b):
    layer = jax.checkpoint(lambda x, w: (jnp.tanh(x @ w), None))
    return ((lax.scan(layer, b["x"], p["w"])[0] @ p["o"]) ** 2).mean()


def nested_scans(p, b):
    layer = lambda x, w: (jnp.tanh(x @ w), None)  # noqa: E731
    return lax.scan(lambda x, w: (lax.scan(layer, x, w)[0], None), b["x"], p["w"])[0].var()


def recurrent(p, b):
    cell = lambda h, x: (jnp.tanh(h @ p["w"] + x @ p["u"]), h.sum())  # noqa: E731
    last = lax.scan(cell, jnp.zeros((1, D)), b["x"][:, None])[0]
    return last.var() + (p["w"] ** 2).sum() * 1e-3


def penalty_in_scan(p, b):
    def layer(carry, w):
        x, penalty = carry
        return (jnp.tanh(x @ w), penalty + (w**2).sum()), None

    x, penalty = lax.scan(layer, (b["x"], 0.0), p["w"])[0]
    return x.var() + 1e-3 * penalty


def branches(p, b):
    x = b["x"]
    y = lax.cond(x.sum() > 0, lambda x: jnp.tanh(x @ p["w"]), lambda x: x @ p["u"], x)
    once = lambda c: (c[0] + 1, c[1] @ lax.stop_gradient(p["u"]))  # noqa: E731
    return (y @ lax.while_loop(lambda c: c[0] < 2, once, (0, jnp.eye(D)))[1]).var()


@jax.custom_vjp
def product(w, x):
    return x @ w


product.defvjp(lambda w, x: (x @ w, (w, x)), lambda r, g: (r[1].T @ g, g @ r[0].T))


def custom_rule(p, b):
    inner = jax.jit(lambda w, x: jnp.tanh(product(w, x)))
    return inner(p["w"], jax.nn.gelu(b["x"] @ p["u"])).var()


def convolution(p, b):
    images = b["x"].reshape(-1, 4, 4, 1)
    numbers = ("NHWC", "HWIO", "NHWC")
    y = lax.conv_general_dilated(images, p["w"], (1, 1), "SAME", dimension_numbers=numbers)
    return (y.reshape(len(images), -1) @ p["v"]).var()


def heads(p, b):
    y = jnp.einsum("bd,dhk->bhk", b["x"], p["w"]).reshape(len(b["x"]), -1)
    return (y @ p["v"].reshape(D, D)).var()


def plain(p, b):
    return jnp.tanh(b["x"] @ p["w"] @ p["v"]).var()


def odd(p, b):
    return (jnp.tanh(b["x"] @ p["w"]) @ p["v"].T @ p["odd"]).var()


def gradient_penalty(p, b):
    gradient = jax.grad(lambda x: jnp.tanh(x @ p["w"]).sum())(b["x"])
    return (gradient**2).mean() + (p["v"] ** 2).mean()


def noisy(p, b):
    replica = mirror.get_replica_context().replica_id_in_sync_group
    noise = jax.random.normal(jax.random.fold_in(jax.random.key(3), replica), (D, D))
    return (b["x"] @ (p["w"] + 0.1 * noise) @ p["v"]).var()


def spectral(p, b):
    w = p["w"] / jnp.linalg.norm(p["w"], axis=0, keepdims=True)
    return jnp.tanh(b["x"] @ w @ p["v"]).var()


def clipped_lamb():
    return optax.chain(optax.clip_by_global_norm(0.1), optax.lamb(1e-2))


ADAM = lambda: optax.adam(1e-2)  # noqa: E731
PROGRAMS = {
    "tied weights": (lambda: {"e": normal(0, 32, D), "w": normal(1, D, D)}, tied, ADAM),
    "bfloat16": (square("w", "v"), bfloat16, ADAM),
    "scan in bfloat16": (
        lambda: {"w": normal(0, 4, D, D), "b": normal(1, 4, D)},
        scan_in_bfloat16,
        ADAM,
    ),
    "scan with remat": (
        lambda: {"w": normal(0, 4, D, D), "o": normal(1, D, D)},
        scan_with_remat,
        ADAM,
    ),
    "nested scans": (lambda: {"w": normal(0, 2, 3, D, D)}, nested_scans, ADAM),
    "recurrent": (square("w", "u"), recurrent, ADAM),
    "penalty in a scan": (lambda: {"w": normal(0, 4, D, D)}, penalty_in_scan, ADAM),
    "branches": (square("w", "u"), branches, ADAM),
    "custom rule": (square("w", "u"), custom_rule, ADAM),
    "convolution": (
        lambda: {"w": normal(0, 3, 3, 1, 8), "v": normal(1, 128, D)},
        convolution,
        ADAM,
    ),
    "heads": (lambda: {"w": normal(0, D, 4, 4), "v": normal(1, 4, 4, D)}, heads, ADAM),
    "odd shapes": (
        lambda: {"w": normal(0, D, D), "v": normal(1, 7, D), "odd": normal(2, 7, 15)},
        odd,
        ADAM,
    ),
    "gradient penalty": (square("w", "v"), gradient_penalty, ADAM),
    "noise per replica": (square("w", "v"), noisy, ADAM),
    "normalized weights": (square("w", "v"), spectral, ADAM),
    "clipped lamb": (square("w", "v"), plain, clipped_lamb),
    "adafactor": (
        square("w", "v"),
        plain,
        lambda: optax.adafactor(1e-2, min_dim_size_to_factor=4),
    ),
    "muon": (square("w", "v"), plain, lambda: optax.contrib.muon(1e-2)),
    "MultiSteps": (square("w", "v"), plain, lambda: optax.MultiSteps(optax.adam(1e-2), 2)),
}
QUICK = ("tied weights", "scan in bfloat16", "scan with remat", "penalty in a scan", "odd shapes")
ALL = [pytest.param(n, marks=[pytest.mark.slow] * (n not in QUICK), id=n) for n in PROGRAMS]


@pytest.fixture(autouse=True)
def _slices_of_small_arrays(monkeypatch):
    slice_arrays_from(256, monkeypatch)


def step_of(loss, tx):
    @mirror.per_replica_on_purpose  # some losses are variances, of the rows of a replica
    def step(state, batch):
        params, opt_state = state
        value, grads = jax.value_and_grad(loss)(params, batch)
        grads, value = mirror.all_reduce("mean", (grads, value))
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), value

    return step


def started(name, shard):
    make, loss, optimizer = PROGRAMS[name]
    strategy, tx = cpu_strategy(N, shard=shard), optimizer()
    state = strategy.init(lambda: (lambda params: (params, tx.init(params)))(make()))
    return strategy, step_of(loss, tx), state


def train(name, shard):
    strategy, step, state = started(name, shard)
    losses = []
    for batch in strategy.distribute_dataset(BATCHES):
        state, loss = strategy.run(step, (state, batch), donate_argnums=0)
        losses.append(float(loss))
    return state, losses


def is_sliced(leaf):
    return leaf.addressable_shards[0].data.size * N == leaf.size


@pytest.mark.parametrize("name", ALL)
def test_model_in_slices_trains_as_mirrored(name):
    (state, losses), (wanted, plain) = train(name, "model"), train(name, "none")
    assert_close(state, wanted, 1e-6)
    np.testing.assert_allclose(losses, plain, rtol=1e-6)
    for leaf in jax.tree.leaves(state):
        has_axis = any(size and size % N == 0 for size in leaf.shape)
        assert is_sliced(leaf) or leaf.nbytes < 256 or not has_axis


def fourier(p, x):
    def loss(p):
        return (jnp.abs(jnp.fft.fft(x) @ p["u"] @ p["v"]) ** 2).mean()

    grads = mirror.all_reduce("mean", jax.grad(loss)(p))
    return jax.tree.map(lambda p, g: p - 0.1 * jnp.conj(g), p, grads)


def with_an_empty_array(p, x):
    def loss(p):
        hidden = jnp.tanh(jnp.tanh(jnp.tanh(x @ p["u"]) @ p["v"]) @ p["w"])
        return (hidden**2).mean() + p["empty"].sum()

    grads = mirror.all_reduce("mean", jax.grad(loss)(p))
    return jax.tree.map(lambda p, g: p - 0.1 * g, p, grads)


def with_a_frozen_table(p, x):
    hidden = jnp.tanh(x @ p["w"])
    hidden = hidden + p["table"][jnp.arange(8)].astype(jnp.float32)
    return {**p, "w": p["w"] - mirror.all_reduce("mean", hidden.mean())}


def filled(value, dtype=jnp.float32):
    return jnp.full((128, 128), value, dtype)


UNUSUAL = {
    "complex64": (fourier, {"u": filled(1 / 128 + 0j, None), "v": filled(1 / 64 + 0j, None)}),
    **{
        f"an empty array, {shape}": (
            with_an_empty_array,
            {**{name: filled(1 / 128) for name in "uvw"}, "empty": jnp.zeros(shape)},
        )
        for shape in [(0, 128), (128, 0), (0,)]
        if jax.__version__ != "0.11.2"  # compiles no program for several devices with these inputs
    },
    **{
        dtype: (with_a_frozen_table, {"w": filled(1 / 128), "table": filled(1, dtype)})
        for dtype in ("int4", "uint4", "int2", "float4_e2m1fn", "float8_e5m2", "bool", "int16")
    },
}


REDUCTIONS = {
    "sum": jnp.sum,
    "max": jnp.max,
    "min": jnp.min,
    "prod": lambda x: jnp.prod(x % 3),
    "or": lambda x: jnp.bitwise_or.reduce(x, axis=None),
    "and": lambda x: jnp.bitwise_and.reduce(x, axis=None),
    "xor": lambda x: jnp.bitwise_xor.reduce(x, axis=None),
    "any": jnp.any,
    "all": jnp.all,
    "argmax": jnp.argmax,
}


@rows("dtype", ["int32", "uint32", "bool"])
def test_reductions_of_state_in_slices(dtype, subtests):
    bits = [0b101, 0b110, 0b011, 0b101]  # each slice has others
    state = jnp.broadcast_to(jnp.asarray(bits, dtype)[:, None], (N, 8))
    for name, reduction in REDUCTIONS.items():
        if dtype == "bool" and name not in ("any", "all"):
            continue

        def step(state, reduction=reduction):
            return ~state, reduction(state)

        with subtests.test(msg=name):
            strategy = cpu_strategy(N, shard="optimizer")
            found = strategy.run(step, (jnp.copy(state),), donate_argnums=0)
            jax.tree.map(np.testing.assert_array_equal, found, step(state))


@rows("name", list(UNUSUAL))
def test_unusual_state_is_gathered_with_its_bits(name):
    step, state = UNUSUAL[name]
    found = []
    for shard in ("none", "model"):
        strategy = cpu_strategy(N, shard=shard)
        (x,) = strategy.distribute_dataset([ROWS])
        result = jax.tree.map(jnp.copy, state)
        for _ in range(2):
            result = strategy.run(step, (result, x), donate_argnums=0)
        found.append(result)
    assert_close(*found)


def test_sums_carried_by_a_loop_are_slices():
    """Gradients of pieces, added in a loop that starts with the gradients of the first one."""

    def step(params, batch):
        gradients = jax.grad(lambda p, x: plain(p, {"x": x}))
        pieces = batch["x"].reshape(2, -1, D)
        add = lambda total, x: (jax.tree.map(jnp.add, total, gradients(params, x)), None)  # noqa: E731
        total, _ = lax.scan(add, gradients(params, pieces[0]), pieces)
        total = mirror.all_reduce("mean", total)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, total)

    results = {}
    for shard in ("none", "model"):
        strategy = cpu_strategy(N, shard=shard)
        params = strategy.init(square("w", "v"))
        (batch,) = strategy.distribute_dataset([{"x": DATA[0]}])
        report = strategy.inspect(step, (params, batch))
        results[shard] = strategy.run(step, (params, batch), donate_argnums=0)
    assert_close(results["model"], results["none"], 1e-6)
    found = Counter[tuple[str, str]]()
    for row in report.collectives:
        found[row.kind, row.loop] += row.num_leaves
    # Two weights do not fit: the loop gathers them. Each first sum is scattered once before it.
    assert found["reduce-scatter", "scan"] == found["reduce-scatter", ""] == 2
    assert found["all-gather", "scan"] >= 2
    small = cpu_strategy(N, shard="model")
    one = small.init(square("w"))
    recurrence = lambda p, b: lax.scan(lambda h, x: (h @ p["w"] + x, None), b["x"][0], b["x"])[0]  # noqa: E731
    (batch,) = small.distribute_dataset(BATCHES[:1])
    gathers = small.inspect(lambda p, b: mirror.all_reduce("mean", recurrence(p, b)), (one, batch))
    assert [row.loop for row in gathers.collectives if row.kind == "all-gather"] == [""]


ONES = np.ones((D, D), np.float32)
BODIES = {
    "carry before the addition": lambda total, last, row: ((total + row * ONES, total), None),
    "stacked before the addition": lambda total, last, row: ((total + row * ONES, last), total),
    "carry after the addition": lambda total, last, row: (
        (total + row * ONES, total + row * ONES),
        None,
    ),
    "swapped carries": lambda total, last, row: ((last + row * ONES, total), None),
    "carry added to itself": lambda total, last, row: ((total + total, last + row), None),
    "scalar": lambda total, last, row: ((total + row, row + last), None),
    "axis of size 1": lambda total, last, row: ((total + row * ONES[:1], last), None),
    "constant": lambda total, last, row: ((total + 1, last), None),
}


@rows("name", list(BODIES))
def test_loops_add_up_what_they_do_without_slices(name):
    @mirror.per_replica_on_purpose
    def step(w, x):
        scan = lambda carry, row: BODIES[name](*carry, row)  # noqa: E731
        (total, last), stack = lax.scan(scan, (0 * w, 0 * w + 1), x)
        means = mirror.all_reduce("mean", (total, last, jax.tree.map(lambda x: x.sum(0), stack)))
        return w - means[0] + 0.5 * means[1], means[2]

    found = []
    for shard in ("none", "model"):
        strategy = cpu_strategy(N, shard=shard)
        (x,) = strategy.distribute_dataset([np.arange(12, dtype=np.float32)])
        found.append(strategy.run(step, (jnp.ones((D, D)), x), donate_argnums=0))
    assert_close(*found, 0)


@rows("shard", ["optimizer", "model"])
def test_scalars_whose_bits_become_an_array_are_not_sliced(shard):
    def step(state, x):
        return state ^ lax.bitcast_convert_type(mirror.all_reduce("sum", x[0]), jnp.uint8)

    strategy = cpu_strategy(N, shard=shard)
    (x,) = strategy.distribute_dataset([np.arange(N, dtype=np.float32)])
    found = strategy.run(step, (jnp.arange(4, dtype=jnp.uint8), x), donate_argnums=0)
    np.testing.assert_array_equal(found, np.arange(4) ^ np.float32([6]).view(np.uint8))


HLO = {"all-gather", "reduce-scatter", "all-reduce"}


@pytest.mark.parametrize("name", ALL)
def test_gathers_are_those_of_the_compiled_program(name):
    strategy, step, state = started(name, "model")
    (batch,) = strategy.distribute_dataset(BATCHES[:1])
    planned = Counter(row.kind for row in strategy.inspect(step, (state, batch)).collectives)
    text = compiled_step(strategy, lambda _: (step, (state, batch)), (0,)).as_text()
    sent = Counter(kind for kind in re.findall(r" ([a-z-]+?)(?:-start)?\(", text) if kind in HLO)
    unread = name == "MultiSteps"  # XLA finds that a branch does not read what it gets
    assert sent["all-gather"] == planned["all-gather"] - unread
    assert sent["reduce-scatter"] == planned["reduce-scatter"]
    # The others read gradients whole: the last one in JAX 0.12.
    assert planned["reduce-scatter"] > 0 or name in ("adafactor", "muon", "MultiSteps")


def layers(count, *, scans, remat):
    def make():
        ws = [normal(i, 64, 64) for i in range(count)]
        return jnp.stack(ws) if scans else ws

    def loss(ws, b):
        layer = lambda x, w: jnp.tanh(x @ w)  # noqa: E731
        layer = jax.checkpoint(layer) if remat else layer
        x = jnp.tile(b["x"], (1, 4))
        if scans:
            return lax.scan(lambda x, w: (layer(x, w), None), x, ws)[0].var()
        for w in ws:
            x = layer(x, w)
        return x.var()

    return make, loss


@rows("scans, remat", list(itertools.product((False, True), (False, True))))
def test_whole_weights_live_about_as_long_as_a_layer(scans, remat):
    """Temporary memory does not grow with the number of layers, less their activations."""
    tx, one, count = optax.adam(1e-3), 64 * 64 * 4, 12
    make, loss = layers(count, scans=scans, remat=remat)
    memory = {}
    for shard in ("none", "model"):
        strategy = cpu_strategy(N, shard=shard)
        state = strategy.init(lambda: (lambda p: (p, tx.init(p)))(make()))
        (batch,) = strategy.distribute_dataset(BATCHES[:1])
        args = step_of(loss, tx), (state, batch)
        program = compiled_step(strategy, lambda _, args=args: args, (0,))
        memory[shard] = program.memory_analysis().temp_size_in_bytes
    activations = (count + 2) * 2 * 64 * 4 * 4
    assert memory["model"] <= 5 * one + activations, memory
    assert memory["none"] >= (count - 1) * one


class Net(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(D, 2 * D, rngs=rngs)
        self.norm = nnx.LayerNorm(2 * D, rngs=rngs)
        self.last = nnx.Linear(2 * D, D, rngs=rngs)

    def __call__(self, x):
        return self.last(nnx.relu(self.norm(self.first(x))))


def kernels(model):
    return [model.first.kernel.get_value(), model.last.kernel.get_value()]


def test_variables_are_sliced_where_they_are_created():
    """Flax has no public hook: if this fails, look at `mirror._src.strategy.scope`."""
    with cpu_strategy(N, shard="model").scope():
        model = Net(nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
        assert all(map(is_sliced, kernels(model)))
    moments = [x for x in jax.tree.leaves(nnx.state(optimizer)) if x.ndim == 2]
    assert moments
    assert all(map(is_sliced, moments))
    assert not is_sliced(model.norm.scale.get_value())  # below the limit
    outside = Net(nnx.Rngs(0))
    assert not any(map(is_sliced, kernels(outside)))
    with cpu_strategy(N, shard="model").scope(), mirror.device("/cpu:5"):
        assert kernels(Net(nnx.Rngs(0)))[0].devices() == {jax.devices("cpu")[5]}
    with cpu_strategy(N).scope():  # of which the hook knows nothing
        assert len(kernels(Net(nnx.Rngs(0)))[0].devices()) == N
    assert_close(nnx.state(model, nnx.Param), nnx.state(outside, nnx.Param), 0)


def test_init_returns_slices_of_what_a_function_creates():
    strategy = cpu_strategy(N, shard="model")
    rngs = nnx.Rngs(0)
    model = strategy.init(Net, rngs)
    assert isinstance(model, Net)
    assert all(map(is_sliced, kernels(model)))
    assert int(rngs.default.count.get_value()) == int(_advanced().default.count.get_value())
    x = jnp.ones((1, D))
    params = strategy.init(linen.Dense(2 * D).init, KEY, x)
    assert is_sliced(params["params"]["kernel"])
    assert_close(params, jax.jit(linen.Dense(2 * D).init)(KEY, x), 0)
    mlp = strategy.init(lambda key: eqx.nn.MLP(D, D, D, 2, key=key), KEY)
    assert all(is_sliced(layer.weight) for layer in mlp.layers)
    assert mlp.activation is eqx.nn.MLP(D, D, D, 2, key=KEY).activation
    assert strategy.init(lambda width: width, width=3) == 3


def _advanced():
    rngs = nnx.Rngs(0)
    Net(rngs)
    return rngs


def mean_of(model, batch):
    return mirror.all_reduce("mean", model(batch["x"]).mean())


def test_model_from_outside_is_sliced_when_run_meets_it():
    model, strategy = Net(nnx.Rngs(0)), cpu_strategy(N, shard="model")
    model.eval()
    (batch,) = strategy.distribute_dataset(BATCHES[:1])
    wanted = float(model(BATCHES[0]["x"]).mean())
    np.testing.assert_allclose(float(strategy.run(mean_of, (model, batch))), wanted, rtol=1e-5)
    before = kernels(model)
    assert all(map(is_sliced, before))
    strategy.run(mean_of, (model, batch))
    assert all(x is y for x, y in zip(before, kernels(model), strict=True))


def trainer_of(strategy, **options):
    with strategy.scope():
        model = Net(nnx.Rngs(0))
        return mirror.Trainer(model, optax.adam(1e-2), "mse", **options)


@rows("shard", ["model", "optimizer"])
def test_several_batches_per_launch_warn_that_nothing_is_saved(shard):
    with pytest.warns(UserWarning, match=rf"steps_per_execution=2 .*shard='{shard}' saves no mem"):
        trainer_of(cpu_strategy(N, shard=shard), steps_per_execution=2)
    trainer_of(cpu_strategy(N, shard="auto"), steps_per_execution=2)


@rows("steps", {"1 batch": 1, "pieces": 2})
def test_trainer_trains_evaluates_predicts_and_restores_in_slices(steps, tmp_path):
    results = {}
    for shard in ("none", "model"):
        trainer = trainer_of(cpu_strategy(N, shard=shard), accumulate_steps=steps)
        history = trainer.fit(DATA, epochs=2, batch_size=16, progress=False)
        assert all(is_sliced(k) is (shard == "model") for k in kernels(trainer.model))
        results[shard] = trainer, history, trainer.evaluate(DATA, batch_size=16)
        trainer.export(tmp_path / f"{shard}.jax", DATA[0])
        program = jax.export.deserialize((tmp_path / f"{shard}.jax").read_bytes())
        np.testing.assert_allclose(
            program.call(DATA[0]), trainer.predict(DATA[0], batch_size=16), atol=1e-5
        )
        trainer.save(tmp_path / shard)
        assert all(is_sliced(k) is (shard == "model") for k in kernels(trainer.model))
    (sliced, history, metrics), (whole, wanted, others) = results["model"], results["none"]
    assert_close(nnx.state(sliced.optimizer), nnx.state(whole.optimizer), 1e-6)
    np.testing.assert_allclose(history["loss"], wanted["loss"], rtol=1e-6)
    np.testing.assert_allclose(metrics["loss"], others["loss"], rtol=1e-5)
    np.testing.assert_allclose(
        *(each.predict(DATA[0], batch_size=16) for each in (sliced, whole)), atol=1e-5
    )
    for saved, n, shard in (("model", 2, "model"), ("model", 1, "none"), ("none", N, "model")):
        trainer = trainer_of(cpu_strategy(n, shard=shard), accumulate_steps=steps)
        trainer.restore(tmp_path / saved)
        assert_close(nnx.state(trainer.optimizer), nnx.state(results[saved][0].optimizer), 0)


WIDE = [(768, 3072), (3072,), (3072, 768)]
SHAPES = {
    "GPT-2": [(50257, 768), (1024, 768), *[*WIDE, (768, 2304), (2304,), (768, 768)] * 12],
    "ViT-B": [(16, 16, 3, 768), (1, 197, 768), (768, 1000), (1000,)]
    + [*WIDE, *[(768, 12, 64), (12, 64)] * 3, (12, 64, 768)] * 12,
    "ResNet-50": [(7, 7, 3, 64), (2048, 1000)]
    + [
        shape
        for c, first, count in ((64, 64, 3), (128, 256, 4), (256, 512, 6), (512, 1024, 3))
        for i in range(count)
        for shape in [
            (1, 1, 4 * c if i else first, c),
            *[(3, 3, c, c), (1, 1, c, 4 * c), (4 * c,)],
            *([] if i else [(1, 1, first, 4 * c)]),
        ]
    ],
}


@rows("shapes", SHAPES)
def test_nearly_all_bytes_of_known_models_are_in_slices(shapes):
    for n in (2, 4, 8, 16):
        sliced = [s for s in shapes if axis_in_slices(s, n) is not None]
        assert sum(map(math.prod, sliced)) > 0.99 * sum(map(math.prod, shapes))


def test_large_checkpoints_pass_through_the_host_one_array_at_a_time(tmp_path, monkeypatch):
    """NumPy reports its arrays to `tracemalloc`. There are 24 of 256 KiB."""

    def peak(call):
        tracemalloc.reset_peak()
        before, _ = tracemalloc.get_traced_memory()
        call()
        return (tracemalloc.get_traced_memory()[1] - before) // 2**18

    with cpu_strategy(N, shard="model").scope():
        layers = [nnx.Linear(256, 256, rngs=nnx.Rngs(i)) for i in range(8)]
        trainer = mirror.Trainer(nnx.Sequential(*layers), optax.adam(1e-3), "mse")
    give_host_memory(2**22, monkeypatch)
    tracemalloc.start()
    try:
        saving = peak(lambda: trainer.save(tmp_path / "save"))
        restoring = peak(lambda: trainer.restore(tmp_path / "save"))
        give_host_memory(None, monkeypatch)
        copying = peak(lambda: trainer.save(tmp_path / "save"))
    finally:
        tracemalloc.stop()
    assert max(saving, restoring) < 8 < 24 <= copying


def test_reports_of_slices():
    strategy, step, state = started("scan with remat", "model")
    (batch,) = strategy.distribute_dataset(BATCHES[:1])
    report = strategy.inspect(step, (state, batch))
    gathered = {row.name: row.why for row in report.sharding if "gathered" in row.why}
    assert gathered == {
        "state[0]['o']": f"1/{N} on each device, along axis 0, gathered 1 time",
        "state[0]['w']": f"1/{N} on each device, along axis 1, gathered 8 times",
    }
    strategy.check_mirrored(state)
    strategy.verify(step, (state, batch))
    explanation = strategy.explain(step, (state, batch), steps=2)
    assert explanation.num_collectives == sum(row.least_trips for row in report.collectives)


def test_sliced_state_is_copied_printed_and_averaged():
    strategy, _, (params, _) = started("bfloat16", "model")
    w = params["w"]
    copied = jax.tree.map(jnp.copy, params)
    assert is_sliced(copied["w"])
    assert np.asarray(w).shape == (D, D)
    assert "Array(" in repr(w)

    def average(old, new):
        return jax.tree.map(lambda x, y: 0.9 * x + 0.1 * y, old, new)

    averaged = strategy.run(average, (copied, params), donate_argnums=0)
    assert is_sliced(averaged["w"])
    assert_close(averaged, params, 1e-6)


class Layers(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(64, 64, rngs=rngs) for _ in range(8)])

    def __call__(self, x):
        for layer in self.layers:
            x = jnp.tanh(layer(x))
        return x


CHOICES = {  # KiB of each device: what is stored in slices, and words of the reason
    "no limit": (None, "none", ["none, because the memory"]),
    "all fits": (4096, "none", ["none; it needs"]),
    "the weights fit": (540, "optimizer", ["because none needs", "of 486.0 KiB on each device"]),
    "slices fit": (460, "model", ["because optimizer needs", "of 414.0 KiB", "and keeps"]),
    "nothing fits": (50, "model", ["model, although it needs"]),
}


@rows("name", list(CHOICES))
def test_auto_stores_state_in_the_first_way_that_fits(name, monkeypatch, caplog):
    kib, wanted, words = CHOICES[name]
    give_host_memory(None if kib is None else N * kib * 1024, monkeypatch)
    strategy = cpu_strategy(N, shard="auto")
    caplog.clear()
    data = (np.tile(DATA[0], 4),) * 2
    with caplog.at_level("INFO", logger="mirror"), strategy.scope():
        trainer = mirror.Trainer(Layers(nnx.Rngs(0)), optax.adam(1e-2), "mse")
        before = trainer.evaluate(data, batch_size=16)
        assert strategy.shard == "model"  # not chosen before a step changes state
        losses = trainer.fit(data, epochs=2, batch_size=16, progress=False)["loss"]
    (said,) = [r for r in caplog.messages if "shard='auto'" in r]
    assert all(word in said for word in words), said
    assert strategy.shard == wanted
    kernel = trainer.model.layers[0].kernel.get_value()
    assert is_sliced(kernel) is (wanted == "model")
    assert trainer.evaluate(data, batch_size=16)["loss"] < losses[0] == before["loss"]


@pytest.mark.slow
def test_memory_is_estimated_in_slices(capsys):
    options = ["estimate-memory", "mlp", "--devices", "4", "--batch-size", "32", "--json"]
    found = {}
    for shard in ("none", "model", "auto"):
        assert cli.main([*options, "--shard", shard]) == 0
        (row,) = json.loads(capsys.readouterr().out)["rows"]
        found[shard] = row["bytes"]["parameters"]
    assert found["model"] < found["none"] == found["auto"]  # which fits


def test_scope_stores_nothing_in_slices_where_it_has_no_effect(caplog):
    with caplog.at_level("INFO", logger="mirror"):
        strategy = cpu_strategy(1, shard="model")
        assert cpu_strategy(2, replicas_per_device=2, shard="auto").shard == "none"
    for shard in ("model", "auto"):
        assert [r for r in caplog.messages if f"shard={shard!r} has no effect" in r]
    assert strategy.shard == "none"
    with strategy.scope():
        model = Net(nnx.Rngs(0))
    assert all(k.addressable_shards[0].data.size == k.size for k in kernels(model))
