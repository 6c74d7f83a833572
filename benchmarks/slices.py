"""Measures models in slices against mirrored ones, and against FSDP written by hand.

    python -m benchmarks.slices [--models mlp,transformer] [--devices 8] [--rounds 9]

prints for each way to store the state: MiB of state and of temporaries on each device, the
collectives of the compiled step, the seconds of the first call, and the CPU time of a step, divided
by the time of the mirrored one. Steps take turns in one process. By hand means `jit` with a
sharding for each array, and `shard_map` with an all-gather at each read and `jax.checkpoint`.
`python -m benchmarks --suites memory` measures each in a process of its own.
"""

import argparse
import re
import resource
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import mirror
from benchmarks import plan
from benchmarks.devices import names_of
from mirror._src.devices.replicas import stored_axis
from mirror._src.engine.choice import SLICE_BYTES

TX = optax.adam(1e-3)
WIDTH, LAYERS, VOCABULARY, LENGTH, HEADS = 256, 8, 2048, 64, 4
_MIB = 2**20
_STEPS = 7
_KINDS = ("all-gather", "reduce-scatter", "all-reduce")
_AXIS = "replica"

Gather = Callable[[Any], Any]


class Model(NamedTuple):
    """A model, its loss and the batch of one device."""

    init: Callable[[Any], Any]
    loss: Callable[[Any, Any, Gather], Any]
    batch: np.ndarray


def mlp() -> Model:
    """16 layers of 1024 x 1024."""

    def loss(params: Any, x: Any, gather: Gather) -> Any:
        for w in params:
            x = jax.checkpoint(lambda x, w: jnp.tanh(x @ gather(w)))(x, w)
        return (x**2).mean()

    def init(key: Any) -> Any:
        return [jax.random.normal(k, (1024, 1024)) / 32 for k in jax.random.split(key, 16)]

    return Model(init, loss, np.ones((64, 1024), np.float32))


def transformer() -> Model:
    """8 blocks of width 256, with recomputed activations."""
    shapes = {"qkv": (WIDTH, 3 * WIDTH), "o": (WIDTH, WIDTH)}
    shapes |= {"up": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH)}

    def init(key: Any) -> Any:
        def normal(*shape: int) -> Any:
            return jax.random.normal(next(keys), shape) * 0.02

        keys = iter(jax.random.split(key, 100))
        blocks = [{name: normal(*shape) for name, shape in shapes.items()} for _ in range(LAYERS)]
        return {"tokens": normal(VOCABULARY, WIDTH), "head": normal(WIDTH, VOCABULARY), "b": blocks}

    def normalized(x: Any) -> Any:
        return (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)

    def block(x: Any, p: Any, gather: Gather) -> Any:
        count, length, _ = x.shape
        split = (normalized(x) @ gather(p["qkv"])).reshape(count, length, HEADS, -1)
        q, k, v = jnp.split(split, 3, -1)
        y = jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape)
        x = x + y @ gather(p["o"])
        return x + jax.nn.gelu(normalized(x) @ gather(p["up"])) @ gather(p["down"])

    def loss(params: Any, tokens: Any, gather: Gather) -> Any:
        x = jnp.take(gather(params["tokens"]), tokens[:, :-1], axis=0)
        for p in params["b"]:
            x = jax.checkpoint(lambda x, p: block(x, p, gather))(x, p)
        logits = normalized(x) @ gather(params["head"])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
        return losses.mean()

    batch = np.arange(2 * (LENGTH + 1)).reshape(2, -1) * 7 % VOCABULARY
    return Model(init, loss, batch.astype(np.int32))


MODELS = {"mlp": mlp, "transformer": transformer}


class Contender(NamedTuple):
    """A compiled step: `state = step(state, batch)`, its state, its batch and its program."""

    step: Callable[[Any, Any], Any]
    state: Any
    batch: Any
    compiled: jax.stages.Compiled


def through_mirror(model: Model, num_devices: int, shard: Any) -> Contender:
    """Returns a step of mirror's."""
    strategy = mirror.MirroredStrategy(names_of(num_devices), shard=shard)

    def step(state: Any, batch: Any) -> Any:
        params, moments = state
        grads = jax.grad(model.loss)(params, batch, lambda w: w)
        updates, moments = TX.update(mirror.all_reduce("mean", grads), moments, params)
        return optax.apply_updates(params, updates), moments

    state = strategy.init(lambda key: state_of(model, key), jax.random.key(0))
    (batch,) = strategy.distribute_dataset([np.concatenate([model.batch] * num_devices)])
    examined = strategy._runner.examined_without_arrays(step, (state, batch), (0,))
    assert examined.lowered is not None  # it is one program
    run = lambda state, batch: strategy.run(step, (state, batch), donate_argnums=0)  # noqa: E731
    return Contender(run, state, batch, examined.lowered.compile())


def state_of(model: Model, key: Any) -> Any:
    """Returns the parameters and the state of the optimizer."""
    params = model.init(key)
    return params, TX.init(params)


def by_hand(model: Model, num_devices: int, *, gathers: bool) -> Contender:
    """Returns FSDP by `jit` with shardings, or by `shard_map` with gathers at the reads."""
    mesh = Mesh(np.asarray(jax.devices()[:num_devices]), (_AXIS,))
    types = jax.eval_shape(lambda: state_of(model, jax.random.key(0)))

    def spec(leaf: Any) -> Any:
        axis = stored_axis(leaf, num_devices, SLICE_BYTES)
        return P() if axis is None else P(*[None] * axis, _AXIS)

    specs = jax.tree.map(spec, types)
    axes = {}  # by the shape of the slice
    for leaf in jax.tree.leaves(types[0]):
        axis = stored_axis(leaf, num_devices, SLICE_BYTES)
        if axis is not None:
            shape = list(leaf.shape)
            shape[axis] //= num_devices
            axes[tuple(shape)] = axis

    def gather(w: Any) -> Any:
        if not gathers or w.shape not in axes:
            return w
        return jax.lax.all_gather(w, _AXIS, axis=axes[w.shape], tiled=True)

    def step(state: Any, batch: Any) -> Any:
        params, moments = state
        grads = jax.grad(model.loss)(params, batch, gather)
        if gathers:  # whose transpositions have summed the gradients of slices
            mean = lambda g: (g if g.shape in axes else jax.lax.psum(g, _AXIS)) / num_devices  # noqa: E731
            grads = jax.tree.map(mean, grads)
        updates, moments = TX.update(grads, moments, params)
        return optax.apply_updates(params, updates), moments

    def placed(specs: Any) -> Any:
        named = lambda each: NamedSharding(mesh, each)  # noqa: E731
        return jax.tree.map(named, specs, is_leaf=lambda x: isinstance(x, P))

    if gathers:
        mapped = jax.shard_map(
            step, mesh=mesh, in_specs=(specs, P(_AXIS)), out_specs=specs, check_vma=False
        )
        run = jax.jit(mapped, donate_argnums=0)
    else:
        run = jax.jit(step, donate_argnums=0, out_shardings=placed(specs))
    create = jax.jit(lambda key: state_of(model, key), out_shardings=placed(specs))
    state = create(jax.random.key(0))
    whole = np.concatenate([model.batch] * num_devices)
    batch = jax.device_put(whole, NamedSharding(mesh, P(_AXIS)))
    return Contender(run, state, batch, run.lower(state, batch).compile())


CONTENDERS: dict[str, Callable[[Model, int], Contender]] = {
    plan.MIRRORED: lambda model, n: through_mirror(model, n, "none"),
    plan.SLICED_STATE: lambda model, n: through_mirror(model, n, "optimizer"),
    plan.SLICED: lambda model, n: through_mirror(model, n, "model"),
    plan.JIT_BY_HAND: lambda model, n: by_hand(model, n, gathers=False),
    plan.SHARD_MAP_BY_HAND: lambda model, n: by_hand(model, n, gathers=True),
}


def started(name: str, key: str, num_devices: int) -> tuple[Contender, float]:
    """Returns a contender after its first step, and the seconds of that."""
    start = time.perf_counter()
    contender = CONTENDERS[key](MODELS[name](), num_devices)
    contender, _ = advanced(contender)
    return contender, time.perf_counter() - start


def advanced(contender: Contender) -> tuple[Contender, float]:
    """Returns the contender after a step, and the CPU seconds of the step."""
    start = time.process_time()
    state = jax.block_until_ready(contender.step(contender.state, contender.batch))
    return contender._replace(state=state), time.process_time() - start


def measure_alone(name: str, key: str, num_devices: int) -> dict[str, float]:
    """Measures one contender, alone in this process: bytes of a device and of the process."""
    contender, first = started(name, key, num_devices)
    times = []
    for _ in range(_STEPS):
        contender, secs = advanced(contender)
        times.append(secs)
    memory: Any = contender.compiled.memory_analysis()
    return {
        "state": memory.argument_size_in_bytes,
        "temporaries": memory.temp_size_in_bytes,
        "process": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "first": first,
        "step": statistics.median(times),
    }


def measure(name: str, num_devices: int, rounds: int) -> None:
    """Prints the rows of a model."""
    built, first = {}, {}
    for key in CONTENDERS:
        built[key], first[key] = started(name, key, num_devices)
    times: dict[str, list[float]] = {key: [] for key in built}
    for _ in range(rounds):
        for key, contender in built.items():
            built[key], secs = advanced(contender)
            times[key].append(secs)
    for key, contender in built.items():
        memory: Any = contender.compiled.memory_analysis()
        text = contender.compiled.as_text() or ""
        sent = Counter(re.findall(r" (all-gather|reduce-scatter|all-reduce)(?:-start)?\(", text))
        pairs = zip(times[key], times["mirrored"], strict=True)
        ratio = statistics.median(mine / mirrored for mine, mirrored in pairs)
        state = memory.argument_size_in_bytes / _MIB
        sizes = f"{state:7.1f} {memory.temp_size_in_bytes / _MIB:7.1f}"
        counts = " ".join(f"{sent[kind]:4}" for kind in _KINDS)
        print(f"{name:12} {key:20} {sizes} {counts} {first[key]:6.1f} {ratio:6.2f}", flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args(arguments)
    mirror.config.set_num_cpu_devices(options.devices)
    print("model        state                 state   temp.   AG   RS   AR  first  ratio")
    for name in options.models.split(","):
        measure(name, options.devices, options.rounds)


if __name__ == "__main__":
    main()
