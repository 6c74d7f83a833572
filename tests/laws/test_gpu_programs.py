"""Steps compiled by XLA for 8 H100s, on any machine: `pytest --gpu-aot -m gpu_aot`.

mirror's program must be the one that JAX users write by hand. Nothing runs. What the compiler does
with a program is the same with a GPU, except for the choice of algorithms for convolutions.
"""

import functools
import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import mirror
from tests.support import gpu_programs, inside
from tests.support.gpu_programs import GpuProgram
from tests.support.tables import rows

pytestmark = [
    pytest.mark.gpu_aot,
    pytest.mark.filterwarnings("ignore:.* differs from one device"),
]

GPUS, LOCAL = 8, 4  # GPUs, and examples on each
EXAMPLES = GPUS * LOCAL
TX = optax.adam(1e-3)


def gpus(count=GPUS, hosts=1):
    return inside.described_gpus("h100", count, hosts)


class Model(NamedTuple):
    """A model as a function.

    Attributes:
        init: Makes the parameters and other state, which is averaged.
        loss: Function of both and a batch that returns the loss and new other state.
        batch: A global batch.
    """

    init: Callable[[], tuple[Any, Any]]
    loss: Callable[..., tuple[Any, Any]]
    batch: Any

    def state(self):
        params, other = self.init()
        return params, TX.init(params), other


def step_of(
    model: Model, mean: Callable[[Any], Any], after: Callable[[Any], Any] = lambda pair: pair
) -> Callable[..., Any]:
    """Returns a training step.

    Args:
        model: The model.
        mean: Averages the gradients, other state and the loss over the replicas.
        after: Returns the gradients and the optimizer state with which the step continues.
    """

    def step(state, batch):
        params, opt_state, other = state
        (loss, other), grads = jax.value_and_grad(model.loss, has_aux=True)(params, other, batch)
        grads, other, loss = mean((grads, other, loss))
        grads, opt_state = after((grads, opt_state))
        updates, opt_state = TX.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state, other), loss

    return step


def mlp(dtype: Any = jnp.float32) -> Model:
    sizes = (32, 64, 64, 8)

    def init():
        pairs = itertools.pairwise(sizes)
        return [(jnp.zeros(pair, dtype), jnp.zeros(pair[1], dtype)) for pair in pairs], ()

    def loss(params, other, batch):
        x = batch["x"]
        for weights, bias in params[:-1]:
            x = jax.nn.relu(x @ weights + bias)
        weights, bias = params[-1]
        return jnp.mean((x @ weights + bias - batch["y"]) ** 2), other

    shapes = {"x": (EXAMPLES, sizes[0]), "y": (EXAMPLES, sizes[-1])}
    return Model(init, loss, {k: np.zeros(shape, dtype) for k, shape in shapes.items()})


def cnn() -> Model:
    """A convolution, and batch normalization whose running statistics are averaged."""

    def init():
        params = {"conv": jnp.zeros((3, 3, 3, 8)), "scale": jnp.ones(8), "out": jnp.zeros((8, 10))}
        return params, {"mean": jnp.zeros(8), "var": jnp.ones(8)}

    def loss(params, running, batch):
        dims = ("NHWC", "HWIO", "NHWC")
        x = jax.lax.conv_general_dilated(
            batch["x"], params["conv"], (1, 1), "SAME", dimension_numbers=dims
        )
        mean, var = x.mean((0, 1, 2)), x.var((0, 1, 2))
        now = {"mean": mean, "var": var}
        running = jax.tree.map(lambda old, new: 0.9 * old + 0.1 * new, running, now)
        x = jax.nn.relu((x - mean) * jax.lax.rsqrt(var + 1e-5) * params["scale"])
        logits = x.mean((1, 2)) @ params["out"]
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
        return losses.mean(), running

    images = np.zeros((EXAMPLES, 8, 8, 3), np.float32)
    return Model(init, loss, {"x": images, "y": np.zeros(EXAMPLES, np.int32)})


def transformer() -> Model:
    """One block: an embedding, causal attention with two heads, and a layer of 4 x width."""
    vocabulary, length, width, heads = 64, 16, 32, 2

    def init():
        shapes = {"embed": (vocabulary, width), "qkv": (width, 3 * width), "out": (width, width)}
        shapes |= {"up": (width, 4 * width), "down": (4 * width, width)}
        return {name: jnp.zeros(shape) for name, shape in shapes.items()}, ()

    def loss(params, other, batch):
        x = params["embed"][batch]
        split = (*batch.shape, 3, heads, width // heads)
        q, k, v = jnp.moveaxis((jax.nn.standardize(x) @ params["qkv"]).reshape(split), 2, 0)
        x += jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape) @ params["out"]
        x += jax.nn.gelu(jax.nn.standardize(x) @ params["up"]) @ params["down"]
        logits = x[:, :-1] @ params["embed"].T
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:])
        return losses.mean(), other

    return Model(init, loss, np.zeros((EXAMPLES, length), np.int32))


def wide() -> Model:
    """64 MiB of gradients."""

    def init():
        return [jnp.zeros((2048, 2048)) for _ in range(4)], ()

    def loss(params, other, x):
        for weights in params:
            x = jax.nn.relu(x @ weights)
        return jnp.mean(x**2), other

    return Model(init, loss, np.zeros((EXAMPLES, 2048), np.float32))


MODELS = {"MLP": mlp, "CNN with BatchNorm": cnn, "transformer": transformer}


def average(tree):
    return mirror.all_reduce("mean", tree)


def average_by_hand(tree):
    return jax.lax.pmean(tree, "gpus")


def compiled(step: Any, model: Model, strategy: mirror.Strategy, donate=(0,)) -> GpuProgram:
    """Compiles a step of mirror's."""
    make = lambda _: (step, (model.state(),), [model.batch])  # noqa: E731
    return gpu_programs.examine(inside.compiled_step(strategy, make, donate))


def strategy_of(devices=None, **options: Any) -> mirror.Strategy:
    """Returns a strategy without the test of the all-reduce."""
    return mirror.MirroredStrategy(list(devices or gpus()), mirror.AllReduce(), **options)


@functools.cache
def by_hand(name: str) -> GpuProgram:
    model = MODELS[name]()
    return gpu_programs.by_hand(step_of(model, average_by_hand), gpus(), model.state, model.batch)


def require_equal(program: GpuProgram, wanted: GpuProgram) -> None:
    found = gpu_programs.differences(program, wanted)
    assert not found, f"mirror's program differs from the one by hand: {'. '.join(found)}."


@rows("name", list(MODELS))
def test_program_is_the_one_by_hand(name):
    model = MODELS[name]()
    program = compiled(step_of(model, average), model, strategy_of())
    require_equal(program, by_hand(name))
    assert len(program.collectives) == 1, "small trees need one all-reduce"
    assert program.donated == len(jax.tree.leaves(jax.eval_shape(model.state)))


@rows("name", list(MODELS))
def test_fixed_replicas_compute_by_the_same_operations(name):
    """On 8 and 2 GPUs. On one, XLA transposes other operands of the transformer's products."""
    model = MODELS[name]()
    make = lambda _: (step_of(model, average), (model.state(),), [model.batch])  # noqa: E731
    programs = [
        inside.compiled_step(strategy_of(gpus(count), replicas=GPUS), make, (0,))
        for count in (8, 2, 1)
    ]
    for program in programs:
        assert not gpu_programs.examine(program).additions, "XLA adds in any order"
    eight, two, one = map(gpu_programs.operations, programs)
    assert sum(eight.values()) > 20
    assert two == eight
    assert (one == eight) == (name != "transformer"), "the page docs/one-to-eight.md says so"


def test_packed_gradients_use_the_kernel_with_low_latency():
    """XLA selects its own kernel, which JAX 0.12 uses, before it combines the arrays of a tree."""
    model = mlp()
    strategy = mirror.MirroredStrategy(list(gpus()), mirror.AllReduce(pack_bytes=2**20))
    (packed,) = compiled(step_of(model, average), model, strategy).collectives
    (combined,) = by_hand("MLP").collectives
    assert (packed.kernel, combined.kernel) == ("TRITON_ONE_SHOT", "DEFAULT")
    assert packed.bytes == combined.bytes


def test_two_replicas_per_gpu_cost_no_more_than_one():
    model = mlp()
    step = step_of(model, average)
    program = compiled(step, model, strategy_of(replicas_per_device=2))
    require_equal(program, by_hand("MLP"))


def test_two_hosts_are_one_program():
    model, devices = mlp(), gpus(4, hosts=2)
    assert [d.process_index for d in devices] == [0] * 4 + [1] * 4
    program = compiled(step_of(model, average), model, strategy_of(devices))
    wanted = gpu_programs.by_hand(
        step_of(model, average_by_hand), devices, model.state, model.batch
    )
    require_equal(program, wanted)


def sharded_by_hand(model: Model) -> GpuProgram:
    """Compiles `jit` with an optimizer state split along the first axis that 8 divides."""
    mesh = gpu_programs.mesh_of(gpus())

    def sharded(tree):
        return jax.tree.map(lambda x: gpu_programs.typed(x, mesh, *axes_of(x)), tree)

    def axes_of(x):
        axis = next((i for i, size in enumerate(x.shape) if size % GPUS == 0), None)
        return () if axis is None else (*[None] * axis, "gpus")

    params, opt_state, other = jax.eval_shape(model.state)
    state = (gpu_programs.typed(params, mesh), sharded(opt_state), other)
    batch = gpu_programs.typed(model.batch, mesh, "gpus")
    kept = jax.tree.map(lambda x: x.sharding, state)

    def split(tree):
        grads, other, loss = tree
        layout = jax.tree.map(lambda x: x.sharding, sharded(params))
        return jax.lax.with_sharding_constraint(grads, layout), other, loss

    step = jax.jit(step_of(model, split), donate_argnums=0, out_shardings=(kept, None))
    return gpu_programs.examine(step.lower(state, batch).compile())


def test_sharded_update_is_the_one_of_jit():
    model = mlp()
    wanted = sharded_by_hand(model)
    program = compiled(step_of(model, average), model, strategy_of(shard="optimizer"))
    require_equal(program, wanted)
    lost = gpu_programs.differences(by_hand("MLP"), wanted)
    assert any("reduce-scatter" in sentence for sentence in lost)


def test_sharded_update_scatters_during_the_backward_pass():
    """XLA's own buckets are so large that the gradients of all layers must exist at once."""
    model = wide()
    wanted = sharded_by_hand(model)
    program = compiled(step_of(model, average), model, strategy_of(shard="optimizer"))
    scatters = [
        [each for each in collectives if each.kind == "reduce-scatter"]
        for collectives in (program.collectives, wanted.collectives)
    ]
    assert list(map(len, scatters)) == [4, 1], list(map(str, program.collectives))
    assert program.temporaries < 0.75 * wanted.temporaries
    assert program.donated == wanted.donated


def test_model_in_slices_is_gathered_layer_by_layer():
    """A weight is read by two operations, the first one by one, the last one is kept."""
    model = wide()
    mirrored = compiled(step_of(model, average), model, strategy_of())
    program = compiled(step_of(model, average), model, strategy_of(shard="model"))
    found = Counter(each.kind for each in program.collectives)
    assert found["all-gather"] == 6, list(map(str, program.collectives))
    assert found["reduce-scatter"] == 4, list(map(str, program.collectives))
    assert program.arguments < 1.1 * mirrored.arguments / GPUS
    one = 2048 * 2048 * 4
    assert program.temporaries < 4 * one < mirrored.temporaries
    assert program.donated == mirrored.donated


class Net(nnx.Module):
    def __init__(self, dtype=jnp.float32):
        options = {"param_dtype": dtype, "rngs": nnx.Rngs(0)}
        self.first = nnx.Linear(32, 64, **options)
        self.second = nnx.Linear(64, 8, **options)

    def __call__(self, x):
        return self.second(jax.nn.relu(self.first(x)))


def losses_of(net, batch):
    return ((net(batch["x"]) - batch["y"]) ** 2).mean(axis=1)


def test_trainer_is_the_step_by_hand():
    """Sums over the examples that are not padding; their number needs no other collective."""
    data = mlp().batch

    def init():
        net = Net()
        return nnx.state((net, nnx.Optimizer(net, TX, wrt=nnx.Param)))

    def step(state, padded):
        batch, mask = padded
        net = Net()
        optimizer = nnx.Optimizer(net, TX, wrt=nnx.Param)
        nnx.update((net, optimizer), state)
        total = lambda net: jnp.where(mask, losses_of(net, batch), 0).sum()  # noqa: E731
        loss, grads = nnx.value_and_grad(total)(net)
        sums = grads, loss, mask.sum(dtype=jnp.float32)
        grads, loss, count = jax.lax.psum(sums, "gpus")
        optimizer.update(net, jax.tree.map(lambda grad: grad / count, grads))
        return nnx.state((net, optimizer)), (loss, count.astype(jnp.int32))

    padded = (data, np.ones(EXAMPLES, bool))
    wanted = gpu_programs.by_hand(step, gpus(), init, padded)
    make = lambda _: (mirror.Trainer(Net(), TX, losses_of), [data])  # noqa: E731
    program = gpu_programs.examine(inside.compiled_step(strategy_of(), make))
    require_equal(program, wanted)


def test_trainer_adds_up_everything_at_once():
    """Gradients of half precision, the loss, integer metrics and weights, and their number."""

    def loss_fn(net, batch):
        losses = losses_of(net, batch).astype(jnp.float32)
        tokens = mirror.Weighted(batch["tokens"] % 2, batch["tokens"])
        return losses, {"small": losses < 1, "odd": tokens}

    data = {**mlp(jnp.bfloat16).batch, "tokens": np.zeros(EXAMPLES, np.int32)}
    make = lambda _: (mirror.Trainer(Net(jnp.bfloat16), TX, loss_fn), [data])  # noqa: E731
    program = gpu_programs.examine(inside.compiled_step(strategy_of(), make))
    assert len(program.collectives) == 1, list(map(str, program.collectives))


def test_half_precision_is_summed_in_float32(subtests):
    """CPU devices hide it: there, XLA itself promotes."""
    model = mlp(jnp.bfloat16)
    for op, ops, dtype in [
        ("mean", mirror.AllReduce(), "f32"),
        ("sum", mirror.AllReduce(), "f32"),
        ("sum", mirror.AllReduce(narrow=True), "bf16"),
    ]:
        with subtests.test(msg=f"{op}, {ops}"):
            step = step_of(model, lambda tree, op=op: mirror.all_reduce(op, tree))
            program = compiled(step, model, mirror.MirroredStrategy(list(gpus()), ops))
            (collective,) = program.collectives
            assert collective.types == (dtype,), str(collective)


def add_rows(table, batch):
    ids, values = mirror.all_gather(batch["ids"]), mirror.all_gather(batch["values"])
    return table.at[ids.reshape(-1)].add(-0.1 * values.reshape(-1, table.shape[1]))


def sum_segments(table, batch):
    ids, values = mirror.all_gather(batch["ids"]), mirror.all_gather(batch["values"])
    rows_of_table = table.shape[0]
    values = values.reshape(-1, table.shape[1])
    return table + jax.ops.segment_sum(values, ids.reshape(-1), rows_of_table)


@rows("step", [add_rows, sum_segments])
def test_mirrored_values_are_computed_without_atomics(step):
    """GPUs that add in different orders would get copies that differ."""
    batch = {
        "ids": np.zeros(EXAMPLES, np.int32),
        "values": np.zeros((EXAMPLES, 16), np.float32),
    }
    make = lambda _: (step, (jnp.zeros((64, 16)),), [batch])  # noqa: E731
    program = gpu_programs.examine(inside.compiled_step(strategy_of(), make))
    assert program.additions == ()


# The comparison finds faults


def reduced_by_leaf(tree):
    """Each all-reduce waits for the last one, so that XLA cannot combine them."""
    leaves, structure = jax.tree.flatten(tree)
    done = [average_by_hand(leaves[0])]
    for leaf in leaves[1:]:
        leaf, _ = jax.lax.optimization_barrier((leaf, done[-1]))
        done.append(average_by_hand(leaf))
    return jax.tree.unflatten(structure, done)


def in_bfloat16(tree):
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), tree)
    return jax.tree.map(lambda x: x.astype(jnp.float32), average_by_hand(half))


def gathered(tree):
    return jax.tree.map(lambda x: x.mean(0), jax.lax.all_gather(tree, "gpus"))


def sent_twice(tree):
    one, other = average_by_hand((tree, jax.tree.map(jnp.abs, tree)))
    return jax.tree.map(jnp.minimum, one, other)


def faulty(model: Model, fault: str) -> Callable[..., Any]:
    """Returns a step by hand with a fault."""
    means = {
        "an all-reduce per leaf": reduced_by_leaf,
        "a sum in bfloat16": in_bfloat16,
        "gradients are gathered": gathered,
        "twice the bytes": sent_twice,
    }
    waits = fault == "the state waits for the gradients"
    after = jax.lax.optimization_barrier if waits else lambda pair: pair
    correct = step_of(model, means.get(fault, average_by_hand), after)

    def step(state, batch):
        new, loss = correct(state, batch)
        params, *others = new
        if fault == "a copy of the state":
            loss = (loss, state[0])
        if fault == "one more all-reduce":
            loss = average_by_hand(loss + 1)
        if fault == "atomic additions":
            (weights, bias), *layers = params
            bias = bias.at[jnp.argsort(bias)].add(weights[0])
            params = [(weights, bias), *layers]
        return (params, *others), loss

    return step


FAULTS = {  # what is planted, and what the comparison says of it
    "no donation": "0 donated arguments instead of 19",
    "an all-reduce per leaf": "7 collectives instead of 1",
    "a sum in bfloat16": "bf16",
    "gradients are gathered": "all-gather",
    "twice the bytes": "all-reduce of 54344 B f32 by DEFAULT",
    "one more all-reduce": "2 collectives instead of 1",
    "a copy of the state": "bytes of results beside donated arguments",
    "the batch is on every GPU": "bytes of arguments",
    "atomic additions": "1 additions by atomics instead of 0",
    "the state waits for the gradients": "during 0 kernels instead of",
}


@rows("fault", list(FAULTS))
def test_comparison_finds_planted_faults(fault):
    model = mlp()
    program = gpu_programs.by_hand(
        faulty(model, fault),
        gpus(),
        model.state,
        model.batch,
        donates=fault != "no donation",
        splits=fault != "the batch is on every GPU",
    )
    found = gpu_programs.differences(program, by_hand("MLP"))
    assert any(FAULTS[fault] in sentence for sentence in found), found
