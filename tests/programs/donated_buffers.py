"""Mistakes with donated buffers that would end the process if mirror did not find them.

`tests/laws/test_bad_input.py` runs it, and expects a line for each of `CASES`.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import mirror
from tests.support.counters import Counter, count, read
from tests.support.messages import raises
from tests.support.strategies import cpu_strategy

CASES: dict[str, Callable[[mirror.Strategy], None]] = {}


def case(name):
    def register(fn):
        CASES[name] = fn
        return fn

    return register


def rejects(fn, **wanted):
    with raises(ValueError, **wanted):
        fn()


def another_array_of(x):
    """Returns an array over the buffers of another one, with an equivalent sharding."""
    devices = sorted(x.devices(), key=lambda device: device.id)
    mesh = jax.sharding.Mesh(np.asarray(devices), ("other",))
    return jax.device_put(x, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()))


@case("a donated argument used again")
def _(s):
    def step(state):
        return {"w": state["w"] + 1}

    with s.scope():
        state = {"w": jnp.ones(4)}
    for _ in range(3):
        after = s.run(step, (state,), donate_argnums=0)
        rejects(
            lambda state=state: s.run(step, (state,), donate_argnums=0),
            names="state['w']",
            fix="donate_argnums",
        )
        rejects(lambda state=state: s.run(step, (state,)), names="state['w']", fix="donate_argnums")
        state = after
    assert float(state["w"][0]) == 4


@case("a donated PerReplica used again")
def _(s):
    def step(x):
        return x + 1

    x = s.run(step, (mirror.PerReplica([jnp.ones(2)] * 2),))
    s.run(step, (x,), donate_argnums=0)
    for _ in range(2):
        rejects(lambda: s.run(step, (x,)), names="x", fix="donate_argnums")
    rejects(lambda: s.reduce("sum", x), names="value", fix="donate_argnums")


@case("a model whose arrays another one donated")
def _(s):
    model, ema = Counter(), Counter()
    for _ in range(2):
        s.run(count, (model,))
        s.run(read, (ema,))
    nnx.update(ema, nnx.state(model))
    s.run(read, (ema,))
    s.run(count, (model,))
    for _ in range(2):
        rejects(lambda: s.run(lambda ema: read(ema), (ema,)), names="ema.total", fix="jnp.copy(x)")
    nnx.update(ema, jax.tree.map(jnp.copy, nnx.state(model)))
    assert float(s.run(read, (ema,))) == 12


@case("a deleted variable")
def _(s):
    model = Counter()
    s.run(count, (model,))
    model.total[...].delete()
    for _ in range(2):
        rejects(lambda: s.run(count, (model,)), names="model.total", fix="jnp.copy(x)")
    model.total.set_value(jnp.zeros(4))
    s.run(count, (model,))
    assert float(model.total[...][0]) == 1


@case("two arrays of one buffer, both donated")
def _(s):
    with s.scope():
        p = jnp.ones(1024)

    def step(state):
        return {k: v + 1 for k, v in state.items()}

    state = s.run(step, ({"a": p, "b": another_array_of(p)},), donate_argnums=0)
    state = s.run(step, ({"a": state["a"], "b": another_array_of(state["a"])},), donate_argnums=0)
    assert float(state["a"][0]) == float(state["b"][0]) == 3


@case("an argument over the buffer of a variable")
def _(s):
    model = Counter(1.0)
    s.run(count, (model,))
    s.run(count, (model, another_array_of(model.total[...])))
    assert float(model.total[...][0]) == 4
    s.run(count, (model, another_array_of(model.total[...])))
    assert float(model.total[...][0]) == 8


@case("one copy of a variable")
def _(s):
    model = Counter(1.0)
    for wanted in (2, 4, 8):
        s.run(count, (model, s.local_results(model.total[...])[1]))
        assert float(model.total[...][0]) == wanted


@case("arrays of another order of the devices")
def _(s):
    there = mirror.MirroredStrategy(["/cpu:1", "/cpu:0"])
    (batch,) = there.distribute_dataset([np.arange(4)])
    with there.scope():
        x = jnp.arange(4)

    def step(batch, x):
        return (mirror.all_gather(batch), x)

    for _ in range(3):
        for got in s.run(step, (batch, x)):
            np.testing.assert_array_equal(got, range(4))


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    for name, run in CASES.items():
        run(cpu_strategy(2))
        print(f"done: {name}", flush=True)
