"""Repeated calls of `run`: no Python work per leaf, and every check still applies."""

import _thread
import contextlib
import gc
import operator
import signal
import sys
import threading
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import mirror
from tests.support import inside
from tests.support.compilations import assert_nothing_compiled, compilations
from tests.support.messages import raises
from tests.support.tables import Made, rows
from tests.support.waiting import wait_until

# Each row of a table has its own function.
pytestmark = pytest.mark.filterwarnings("ignore:.*compiled")

MAKERS = {
    "one replica": lambda: mirror.MirroredStrategy(["/cpu:0"]),
    "pmap": lambda: mirror.MirroredStrategy(["/cpu:0", "/cpu:1"]),
    "vmap": lambda: mirror.MirroredStrategy(["/cpu:0"], replicas_per_device=2),
    "sharded": lambda: mirror.MirroredStrategy(["/cpu:0", "/cpu:1"], shard="optimizer"),
}


# Few tests depend on the executor.
STRATEGIES = Made(MAKERS)


@pytest.fixture(scope="module")
def strategy() -> mirror.Strategy:
    return MAKERS["pmap"]()


def own(strategy: mirror.Strategy, shape: tuple[int, ...] = (4,), dtype: Any = np.float32):
    return strategy.distribute_values_from_function(
        lambda context: np.full(shape, context.replica_id_in_sync_group + 1, dtype)
    )


def update(state, batch):
    grad = mirror.all_reduce("mean", batch.mean())
    return jax.tree.map(lambda w: w - 0.5 * grad.astype(w.dtype), state), grad


class Net(nnx.Module):
    def __init__(self, num_layers: int = 2) -> None:
        rngs = nnx.Rngs(0)
        self.layers = nnx.List([nnx.Linear(4, 4, rngs=rngs) for _ in range(num_layers)])
        self.rate = 1.0

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.rate * x


def train(model, batch):
    loss, grads = nnx.value_and_grad(lambda model: (model(batch) ** 2).mean())(model)
    loss, grads = mirror.all_reduce("mean", (loss, grads))
    state = nnx.state(model, nnx.Param)
    nnx.update(model, jax.tree.map(lambda w, g: w - 0.01 * g, state, grads))
    return loss


def train_in_dict(models, batch):
    return train(models["model"], batch)


def train_if(model, batch, flag=True):
    return train(model, batch) if flag else batch


def num_python_events(call: Any) -> int:
    events = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal events
        events += 1

    sys.setprofile(count)
    try:
        call()
    finally:
        sys.setprofile(None)
    return events


def num_own_calls(call: Any) -> int:
    """Returns the number of calls of mirror's functions."""
    calls = 0

    def count(frame: Any, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "call" and frame.f_globals.get("__name__", "").startswith("mirror.")

    sys.setprofile(count)
    try:
        call()
    finally:
        sys.setprofile(None)
    return calls


# The work on the host does not grow with the number of leaves.


def evaluate(params, batch):
    return mirror.all_reduce("mean", batch.mean() * params["w0"].sum())


@rows(
    "name, form",
    [
        ("pmap", "dict"),
        ("pmap", "nnx"),
        ("pmap", "constants"),
        ("pmap", "plain constants"),
        ("one replica", "plain constants"),
        ("sharded", "dict"),
        ("vmap", "nnx"),
        ("pmap", "models in a dict"),
        ("pmap", "keywords"),
        ("pmap", "flags"),
    ],
)
def test_repeated_call_does_not_visit_each_leaf_in_python(name, form, monkeypatch):
    strategy = MAKERS[name]()
    inside.stop_logging_launches(monkeypatch)

    def events_for(num_leaves: int) -> int:
        if form == "nnx":
            with strategy.scope():
                args = (Net(num_leaves), own(strategy, (2, 4)))
            call = lambda: strategy.run(train, args)  # noqa: E731
        elif form == "models in a dict":
            with strategy.scope():
                nested = ({"model": Net(num_leaves)}, own(strategy, (2, 4)))
            call = lambda: strategy.run(train_in_dict, nested)  # noqa: E731
        elif form in ("keywords", "flags"):
            with strategy.scope():
                named = {"model": Net(num_leaves), "batch": own(strategy, (2, 4))}
            named |= {"flag": True} if form == "flags" else {}
            call = lambda: strategy.run(train_if, (), named)  # noqa: E731
        else:
            with contextlib.nullcontext() if "plain" in form else strategy.scope():
                state = {f"w{i}": jnp.zeros(2) for i in range(num_leaves)}
            batch = own(strategy)
        if "constants" in form:
            call = lambda: strategy.run(evaluate, (state, batch))  # noqa: E731
        elif form == "dict":

            def call() -> None:
                nonlocal state
                state, _ = strategy.run(update, (state, batch), donate_argnums=0)

        for _ in range(5):
            call()
        assert min(num_own_calls(call) for _ in range(3)) <= 40
        return min(num_python_events(call) for _ in range(5))

    few, many = events_for(2), events_for(20)
    assert many == few
    assert many < 300


def test_each_new_leaf_costs_the_same(strategy, monkeypatch):
    """The user's names for all leaves were computed for each of them."""
    inside.stop_logging_launches(monkeypatch)
    batch = own(strategy)

    def events_for(num_leaves: int) -> int:
        def call() -> None:
            strategy.run(evaluate, ({f"w{i}": np.zeros(2) for i in range(num_leaves)}, batch))

        for _ in range(3):
            call()
        return min(num_python_events(call) for _ in range(3))

    few, more, most = map(events_for, (10, 20, 40))
    assert most - more <= 2.2 * (more - few)


def test_copy_of_a_plain_array_is_freed_with_the_array(strategy):
    batch, params = own(strategy), {"w0": jnp.ones(13)}

    def num_copies() -> int:
        inside.forget_eager_work()  # which may hold the copy until the next launch
        gc.collect()
        return sum(array.shape == (13,) for array in jax.live_arrays()) - len(params)

    for _ in range(3):
        assert strategy.run(evaluate, (params, batch)) == 19.5
    # A thread of XLA may hold an operand a moment longer than until the result is known.
    wait_until(lambda: num_copies() == 1)
    params["w0"] = params["w0"] * 0
    assert strategy.run(evaluate, (params, batch)) == 0
    wait_until(lambda: num_copies() == 1)
    params.clear()
    wait_until(lambda: num_copies() == 0)


def test_results_of_another_program_are_not_visited_in_python(monkeypatch):
    """As in adversarial training, of which each step reads what the other one returned."""
    strategy = MAKERS["pmap"]()
    inside.stop_logging_launches(monkeypatch)

    def first(state, others, batch):
        return step(state, others, batch)

    def second(state, others, batch):
        return step(state, others, batch)

    def step(state, others, batch):
        mean = mirror.all_reduce("mean", batch.mean())
        return {name: w + mean * others[name] for name, w in state.items()}

    def events_for(num_leaves: int) -> int:
        batch = own(strategy)
        with strategy.scope():
            a, b = ({f"w{i}": jnp.zeros(2) for i in range(num_leaves)} for _ in range(2))

        def call() -> None:
            nonlocal a, b
            a = strategy.run(first, (a, b, batch), donate_argnums=0)
            b = strategy.run(second, (b, a, batch), donate_argnums=0)

        for _ in range(5):
            call()
        return min(num_python_events(call) for _ in range(5))

    assert events_for(10) == events_for(20)


def test_no_call_searches_for_results_that_were_donated(monkeypatch):
    """References to them were dropped in one call of a few, by a search of all launches."""
    strategy = MAKERS["one replica"]()
    inside.stop_logging_launches(monkeypatch)
    state, batch = {f"w{i}": jnp.zeros(2) for i in range(300)}, own(strategy)

    def call() -> None:
        nonlocal state
        state, _ = strategy.run(update, (state, batch), donate_argnums=0)

    for _ in range(5):
        call()
    assert max(num_own_calls(call) for _ in range(20)) <= 40


@rows(
    "error",
    {
        "of a process that died": ValueError("UNKNOWN: Gloo all-reduce failed: [pair.cc:547]"),
        "of a rejected call": ValueError("INVALID_ARGUMENT: Gloo"),
    },
)
def test_failed_launch_is_not_repeated(strategy, error, monkeypatch):
    launches = 0

    def fails():
        nonlocal launches
        launches += 1
        raise error

    state, batch = {"w": np.ones(4, np.float32)}, own(strategy)
    for _ in range(3):
        state, _ = strategy.run(update, (state, batch))
    monkeypatch.setattr(inside.eager_guard(), "Uncounted", fails)
    with pytest.raises(ValueError, match=str(error).partition(":")[0]) as raised:
        strategy.run(update, (state, batch))
    assert raised.value is error
    assert launches == 1


# An interrupt may come at any moment of a call.


class Keyed(nnx.Module):
    """A model whose state is a random key, which JAX wraps in Python."""

    def __init__(self):
        self.rngs = nnx.Rngs(0)


def is_interrupted_at(event_number: int, call: Any) -> bool:
    """Calls, and interrupts at an event of the interpreter; returns whether it came to it."""
    countdown, is_inside = event_number, True

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal countdown
        if not is_inside or event == "c_call":  # Python handles no signal before it calls C
            return
        countdown -= 1
        if countdown == 0:
            signal.raise_signal(signal.SIGINT)

    sys.setprofile(count)
    try:
        call()
        is_inside = False
    except KeyboardInterrupt:
        return True
    finally:
        sys.setprofile(None)
    return countdown <= 0


ARRAYS = {
    "host": lambda strategy: np.ones(4, np.float32),
    "plain": lambda strategy: jnp.ones(4),
    "borrowed": lambda strategy: strategy._runner.borrow(np.ones(4, np.float32)),
    "own": own,
}


@rows("make", ARRAYS)
def test_interrupt_is_raised_although_arrays_are_freed(strategy, make):
    """Python code that ran then would lose it. Here, no Python code runs before the arrays go."""
    state, arrays = ARRAYS["host"](strategy), []
    for _ in range(3):
        arrays += [state, batch := make(strategy)]
        state = strategy.run(jnp.add, (state, batch))
    del state, batch
    with pytest.raises(KeyboardInterrupt):
        list(map(operator.call, [_thread.interrupt_main, arrays.clear]))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@rows("kind", ["plain", "keys"])
@rows("name", ["pmap", "sharded"])
def test_interrupt_never_separates_a_model_from_its_arrays(name, kind, monkeypatch):
    """At every event of a call, the model is afterwards as before the step or after it."""
    inside.stop_logging_launches(monkeypatch)
    strategy = MAKERS[name]()

    def step(model, batch):
        if kind == "keys":
            model.rngs.default()
            return batch
        for layer in model.layers:
            layer.kernel[...] += 1
        return {"own": batch, "replica": mirror.get_replica_context().replica_id_in_sync_group}

    with strategy.scope():
        model = Keyed() if kind == "keys" else Net(2)
    args = (model, own(strategy, (2, 4)))
    for _ in range(4):
        strategy.run(step, args)

    def num_steps() -> list[int]:
        if kind == "keys":
            return [int(model.rngs.default.count[...])]
        return [round(float(each.kernel[...].sum() - start) / 16) for each, start in starts]

    if kind == "plain":
        starts = [(layer, float(layer.kernel[...].sum())) for layer in model.layers]
    (before,) = set(num_steps())
    for event_number in range(1, 1000):
        was_reached = is_interrupted_at(event_number, lambda: strategy.run(step, args))
        assert not any(x.is_deleted() for x in jax.tree.leaves(nnx.state(model))), event_number
        (after,) = set(num_steps())
        assert after - before in ((0, 1) if was_reached else (1,)), event_number
        before = after
        if not was_reached:
            break
    assert not was_reached, "the call has more events"
    other = threading.Thread(target=strategy.run, args=(step, args), daemon=True)
    other.start()
    other.join(900)
    assert not other.is_alive(), "a lock is still held"
    strategy.check_mirrored(model)


# A call unlike the previous one gives the same results.


def fresh_results(strategy: mirror.Strategy, fn: Any, args: tuple) -> Any:
    """Returns the results of a new function object."""
    return strategy.run(lambda *args: fn(*args), args)


def leaves_of(tree: Any) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]


CHANGES = {
    "same": lambda s: ({"w": jnp.ones(3)}, own(s)),
    "shapes": lambda s: ({"w": jnp.ones(5)}, own(s)),
    "the batch's shape": lambda s: ({"w": jnp.ones(3)}, own(s, (6,))),
    "dtype": lambda s: ({"w": jnp.ones(3, jnp.bfloat16)}, own(s)),
    "the batch's dtype": lambda s: ({"w": jnp.ones(3)}, own(s, dtype=np.int32)),
    "structure": lambda s: ({"w": jnp.ones(3), "b": jnp.ones(())}, own(s)),
    "another container": lambda s: ([jnp.ones(3)], own(s)),
    "NumPy": lambda s: ({"w": np.ones(3, np.float32)}, own(s)),
    "a number": lambda s: ({"w": 1.0}, own(s)),
    "64-bit NumPy": lambda s: ({"w": np.ones(3)}, own(s)),
    "another device": lambda s: (
        {"w": jax.device_put(jnp.ones(3), jax.devices()[3])},
        own(s),
    ),
    "not PerReplica": lambda s: ({"w": jnp.ones(3)}, jnp.ones(4)),
    "PerReplica on the host": lambda s: (
        {"w": jnp.ones(3)},
        mirror.PerReplica([np.full(4, i + 1, np.float32) for i in range(len(s.devices))]),
    ),
    "PerReplica state": lambda s: ({"w": own(s, (3,))}, own(s)),
    "weakly typed": lambda s: ({"w": jnp.asarray(1.0)}, own(s)),
}


@pytest.mark.filterwarnings("ignore:.*distribute_dataset")
@pytest.mark.parametrize("name", ["pmap", pytest.param("sharded", marks=pytest.mark.slow)])
@rows("change", list(CHANGES))
def test_changed_call_gives_the_same_results(name, change):
    strategy = MAKERS[name]()

    def step(state, batch):
        return update(state, batch)

    for _ in range(3):
        strategy.run(step, CHANGES["same"](strategy))
    args = CHANGES[change](strategy)
    found = strategy.run(step, args)
    expected = fresh_results(strategy, update, args)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, b in zip(leaves_of(found), leaves_of(expected), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)
    again = strategy.run(step, CHANGES["same"](strategy))
    np.testing.assert_array_equal(
        *map(
            np.asarray,
            (
                again[0]["w"],
                strategy.run(lambda *args: update(*args), CHANGES["same"](strategy))[0]["w"],
            ),
        )
    )


def deleted_argument(strategy, run, state, batch):
    state["w"].delete()
    run(state, batch)


def donated_before(strategy, run, state, batch):
    run(state, batch)
    run(state, batch)


def traced(strategy, run, state, batch):
    jax.jit(lambda w: run({"w": w}, batch))(state["w"])


def differentiated(strategy, run, state, batch):
    jax.grad(lambda w: run({"w": w}, batch)[1])(state["w"])


def mapped(strategy, run, state, batch):
    jax.vmap(lambda w: run({"w": w}, batch)[1])(jnp.ones((2, 3)))


def in_a_trace(strategy, run, state, batch):
    jax.jit(lambda x: (run(state, batch), x))(1.0)


def too_many_replicas(strategy, run, state, batch):
    n = strategy.num_replicas_in_sync
    run(state, mirror.PerReplica([np.ones(4, np.float32)] * (n + 1)))


def no_array(strategy, run, state, batch):
    run({"w": object()}, batch)


def not_hashable(strategy, run, state, batch):
    run({"w": {1, 2}}, batch)


def too_large(strategy, run, state, batch):
    run({"w": 2**70}, batch)


INSIDE_JIT = {"names": "step", "fix": ["jax.jit", "strategy.run"]}
REFUSALS = {
    deleted_argument: (ValueError, {"names": "state['w']", "fix": "donate_argnums"}),
    donated_before: (ValueError, {"names": "state['w']", "fix": "donate_argnums"}),
    traced: (RuntimeError, INSIDE_JIT),
    differentiated: (RuntimeError, INSIDE_JIT),
    mapped: (RuntimeError, INSIDE_JIT),
    in_a_trace: (RuntimeError, INSIDE_JIT),
    too_many_replicas: (
        ValueError,
        {"names": ["batch", "PerReplica"], "fix": "distribute_dataset"},
    ),
    not_hashable: (TypeError, {"names": "state['w']", "values": ["{1, 2}", "set"]}),
    too_large: (ValueError, {"names": "state['w']", "values": 2**70, "fix": "jax_enable_x64"}),
}


@rows("refusal", list(REFUSALS))
def test_repeated_calls_keep_every_error_message(strategy, refusal):
    def step(state, batch):
        return update(state, batch)

    def run(state, batch):
        return strategy.run(step, (state, batch), donate_argnums=0)

    batch = own(strategy)
    with strategy.scope():
        state = {"w": jnp.zeros(3)}
    for _ in range(3):
        state, _ = run(state, batch)
    error, wanted = REFUSALS[refusal]
    with raises(error, **wanted):
        refusal(strategy, run, state, batch)
    with strategy.scope():
        state = {"w": jnp.zeros(3)}
    state, grad = run(state, batch)  # and all state is intact
    np.testing.assert_array_equal(state["w"], -0.5 * np.full(3, grad))


def test_one_array_in_two_arguments_is_copied(strategy):
    def step(state, batch):
        return update(state, batch)

    batch = own(strategy)
    with strategy.scope():
        state = {"params": jnp.zeros(3), "ema": jnp.ones(3)}
    for _ in range(3):
        state, grad = strategy.run(step, (state, batch), donate_argnums=0)
    value = np.asarray(state["params"])
    state["ema"] = state["params"]
    state, grad = strategy.run(step, (state, batch), donate_argnums=0)
    for name in state:
        np.testing.assert_array_equal(state[name], value - 0.5 * np.asarray(grad))


def sharding_of(strategy: mirror.Strategy) -> jax.sharding.NamedSharding:
    with strategy.scope():
        return jnp.ones(3).sharding


SHARED = {
    "another device": lambda strategy, x: x,
    "an equal sharding": lambda strategy, x: jax.sharding.NamedSharding(
        sharding_of(strategy).mesh, jax.sharding.PartitionSpec()
    ),
    "the scope's own sharding": lambda strategy, x: sharding_of(strategy),
}


@rows("at", list(SHARED))
@rows("met", [0, 3])
def test_one_buffer_in_two_arrays_is_copied(strategy, at, met):
    """`jax.device_put` shares memory where it can. Donated, XLA would end the process."""

    def step(state, batch):
        return update(state, batch)

    batch = own(strategy)
    with strategy.scope():
        state = {"a": jnp.zeros(3), "b": jnp.ones(3)}
    for _ in range(met):
        state, grad = strategy.run(step, (state, batch), donate_argnums=0)
    for _ in range(2):
        x = jnp.arange(3.0)
        place = SHARED[at](strategy, x)
        put = (lambda: x) if place is x else (lambda: jax.device_put(x, place))
        state = {"a": put(), "b": put()}
        state, grad = strategy.run(step, (state, batch), donate_argnums=0)
        for name in state:
            np.testing.assert_array_equal(state[name], np.arange(3.0) - 0.5 * np.asarray(grad))


def aliases_of(strategy, x: jax.Array, place: Any) -> tuple[jax.Array, jax.Array]:
    return jax.device_put(x, place), jax.device_put(x, place)


@rows("at", ["an equal sharding", "the scope's own sharding"])
def test_array_sharing_memory_with_an_earlier_one_is_copied(strategy, at):
    def step(state, other, batch):
        new, grad = update(state, batch)
        return new, jax.tree.map(lambda w: w + grad, other)

    batch, x = own(strategy), jnp.arange(3.0)
    with strategy.scope():
        plain = {"w": jnp.zeros(3)}
    for _ in range(3):
        strategy.run(step, ({"w": jnp.copy(plain["w"])}, plain, batch), donate_argnums=0)
    a, b = aliases_of(strategy, x, SHARED[at](strategy, x))
    grad = np.asarray(own(strategy).stacked).mean()
    strategy.run(lambda *args: step(*args), ({"w": a}, plain, batch))
    for _ in range(2):  # kept in the step before, donated now, beside what shares its memory
        new, other = strategy.run(step, ({"w": jnp.copy(a)}, {"w": b}, batch), donate_argnums=0)
    new, other = strategy.run(step, ({"w": a}, {"w": b}, batch), donate_argnums=0)
    np.testing.assert_array_equal(new["w"], np.arange(3.0) - 0.5 * grad)
    np.testing.assert_array_equal(other["w"], np.arange(3.0) + grad)


def test_random_key_and_its_bits_may_both_be_donated(strategy):
    def step(state, batch):
        context = mirror.get_replica_context()
        draws = jax.random.normal(context.fold_in(state["key"]), (2,)) + batch.sum()
        return state, context.all_reduce("mean", draws)

    batch = own(strategy)
    with strategy.scope():
        key = jax.random.key(0)
    for _ in range(4):
        with strategy.scope():
            state = {"key": key, "bits": jax.random.key_data(key), "again": jnp.zeros(2)}
        state, _ = strategy.run(step, (state, batch), donate_argnums=0)
        key = state["key"]
    np.testing.assert_array_equal(jax.random.key_data(key), jax.random.key_data(jax.random.key(0)))


def test_resident_rows_are_copied_before_donation():
    strategy = mirror.MirroredStrategy(["/cpu:0", "/cpu:1"], axis_name="batch")
    rows = [jax.device_put(jnp.full(3, i), jax.devices()[i]) for i in range(2)]
    x = mirror.PerReplica(rows)

    def step(x, y):
        return x + 1, y + 2

    for _ in range(3):
        one, two = strategy.run(step, (x, x), donate_argnums=(0, 1))
        np.testing.assert_array_equal(one, np.asarray(x) + 1)
        np.testing.assert_array_equal(two, np.asarray(x) + 2)


def alias_of(x: jax.Array) -> jax.Array:
    """Returns another array with the same buffers."""
    shards = [shard.data for shard in x.addressable_shards]
    return jax.make_array_from_single_device_arrays(x.shape, x.sharding, shards)


KINDS = ["returned", "constant", "alias of a constant", "alias of a result", "alias, moved"]


@rows("leaf", [*KINDS, "read", "alias of what is read"])
def test_leaf_may_become_part_of_the_model_between_calls(strategy, leaf):
    """It is donated as state then, and another function or model may have prepared it."""

    def step(model, tree, batch):
        loss = train(model, batch)
        return jax.tree.map(lambda w: w * 0.5, tree), loss

    def evaluate(model, batch):
        return mirror.all_reduce("mean", model(batch).sum())

    batch = own(strategy, (2, 4))
    with strategy.scope():
        model, other, tree = Net(), Net(), {"kernel": jnp.ones((4, 4))}
    first, second = model.layers
    for _ in range(5):
        new, _ = strategy.run(step, (model, tree, batch))
        tree = new if leaf in ("returned", "alias of a result", "alias, moved") else tree
        strategy.run(evaluate, (model, batch))
        strategy.run(step, (other, tree, batch))
    kernel = first.kernel.get_value() if "read" in leaf else tree["kernel"]
    passed = {"kernel": alias_of(kernel)} if leaf.startswith("alias") else {"kernel": kernel}
    if "read" in leaf or "moved" in leaf:  # another call finds that it shares no memory
        strategy.run(step, (other if "read" in leaf else model, passed, batch))
    if "read" not in leaf:
        first.kernel.set_value(kernel)
    strategy.run(evaluate, (model, batch))
    if "moved" in leaf:
        first.kernel.set_value(second.kernel.get_value())
        second.kernel.set_value(kernel)
    before = np.array(kernel)
    new, _ = strategy.run(step, (model, passed, batch))
    np.testing.assert_array_equal(new["kernel"], before * 0.5)


@rows("leaf", ["read", "assigned"])
def test_values_of_the_replicas_may_become_part_of_the_model(strategy, leaf):
    def step(variable, x):
        variable.assign_add(x)
        return 2 * x

    x = own(strategy)
    with strategy.scope():
        variable = mirror.Variable(jnp.zeros(4), synchronization="on_read", aggregation="sum")
    for _ in range(4):
        new = strategy.run(step, (variable, x))
    if leaf == "assigned":
        variable.set_raw_value(new)
    passed = variable.get_raw_value()
    before = np.asarray(passed)
    np.testing.assert_array_equal(strategy.run(step, (variable, passed)), 2 * before)
    np.testing.assert_array_equal(variable.get_raw_value(), 2 * before)


ROUNDS = 24


@rows("new", ["a number", "NumPy", "outside", "in the scope", "a key"])
def test_new_leaf_per_step_rarely_blocks(strategy, new):
    """The address of an array is known after its step; calls do not wait for that."""
    make = {
        "a number": lambda i: float(i),
        "NumPy": lambda i: np.float32(i),
        "outside": lambda i: jnp.float32(i),
        "in the scope": lambda i: jnp.full((), float(i)),
        "a key": lambda i: jax.random.key(i),
    }[new]

    def step(state, batch):
        rate = state["rate"]
        if jax.dtypes.issubdtype(rate.dtype, jax.dtypes.prng_key):
            rate = jax.random.uniform(rate)
        params, grad = update(state["params"], batch)
        return {"params": params, "rate": state["rate"]}, rate * grad

    batch = own(strategy)
    with strategy.scope():
        state = {"params": {"w": jnp.zeros(3)}, "rate": make(0)}
    state, _ = strategy.run(step, (state, batch), donate_argnums=0)
    with pytest.MonkeyPatch.context() as patch:
        looks = inside.count_address_checks(patch)
        for i in range(ROUNDS):
            if new == "outside":
                state["rate"] = make(i)
            else:
                with strategy.scope():
                    state["rate"] = make(i)
            state, _ = strategy.run(step, (state, batch), donate_argnums=0)
    arrays_per_look = 4
    assert len(looks) <= arrays_per_look * (4 + ROUNDS // 8)
    grad = np.asarray(own(strategy).stacked).mean()
    np.testing.assert_allclose(state["params"]["w"], np.full(3, -0.5 * grad * (ROUNDS + 1)))


def test_alternating_states_do_not_block(strategy, monkeypatch):
    def step(state, batch):
        return update(state, batch)

    batch = own(strategy)
    with strategy.scope():
        states = [{"w": jnp.full(3, float(i))} for i in range(5)]
    for i, state in enumerate(states):
        states[i], _ = strategy.run(step, (state, batch), donate_argnums=0)
    looks = inside.count_address_checks(monkeypatch)
    for _ in range(4):
        for i, state in enumerate(states):
            states[i], grad = strategy.run(step, (state, batch), donate_argnums=0)
    assert not looks
    for i, state in enumerate(states):
        np.testing.assert_allclose(state["w"], np.full(3, i - 2.5 * float(grad)))


def test_state_changed_by_alternating_steps_does_not_block(strategy, monkeypatch):
    """State that one step returned and the other donates shares no memory, so it is not checked."""
    steps = [lambda *args: update(*args), lambda *args: update(*args)]
    batch = own(strategy)
    with strategy.scope():
        state = {"w": jnp.zeros(3)}
    for i in range(12):
        if i == 6:
            looks = inside.count_address_checks(monkeypatch)
        state, grad = strategy.run(steps[i % 2], (state, batch), donate_argnums=0)
    assert not looks
    np.testing.assert_allclose(state["w"], np.full(3, -6 * float(grad)))


@rows("strategy", STRATEGIES)
def test_results_do_not_share_memory(strategy):
    """So that they can be donated unchecked, even if a step returns a value twice."""

    def step(x, y, batch):
        return {"passed on": x, "twice": (y + 1, y + 1), "again": x, "own": batch}

    with strategy.scope():
        args = (jnp.arange(3.0), jnp.arange(3.0), own(strategy))
    for _ in range(3):
        arrays = jax.tree.leaves((args, strategy.run(step, args)))
        buffers = [
            {shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards}
            for array in arrays
        ]
        assert len(set().union(*buffers)) == sum(map(len, buffers))


def test_results_are_freed_with_their_last_reference(strategy):
    """The strategy finds them among later arguments, and must not keep them for that."""

    def step(x, batch):
        return x + mirror.all_reduce("mean", batch.mean())

    batch = own(strategy)
    with strategy.scope():
        x = jnp.zeros(3)
    results = [strategy.run(step, (x, batch)) for _ in range(4)]
    references = [weakref.ref(result) for result in results]
    del results
    gc.collect()
    assert [reference() for reference in references] == [None] * 4


def test_constants_may_be_replaced(strategy):
    """Parameters that an evaluation receives repeatedly, and then others, or elsewhere."""
    with strategy.scope():
        params = {"w0": jnp.ones(3), "w1": jnp.ones(3)}
    batch = own(strategy)
    for _ in range(5):
        once = strategy.run(evaluate, (params, batch))
    params = {"w0": 2 * params["w0"], "w1": params["w1"]}
    twice = strategy.run(evaluate, (params, batch))
    assert float(twice) == 2 * float(once)
    params = {"w0": jax.device_put(params["w0"], jax.devices()[3]), "w1": params["w1"]}
    np.testing.assert_array_equal(strategy.run(evaluate, (params, batch)), twice)


# nnx objects.


def test_dict_whose_keys_do_not_sort_keeps_its_message(strategy):
    with strategy.scope():
        model = Net()
    strategy.run(train_in_dict, ({"model": model}, own(strategy, (2, 4))))
    with pytest.raises(ValueError, match="sort"):
        strategy.run(train_in_dict, ({"model": model, 1: 2}, own(strategy, (2, 4))))


def assigned_outside(model):
    model.layers[0].kernel[...] = jnp.ones((4, 4))


def attribute_changed(model):
    model.rate = 2.0


def layer_replaced(model):
    model.layers[1] = nnx.Linear(4, 4, rngs=nnx.Rngs(1))


def layer_added(model):
    model.layers.append(nnx.Linear(4, 4, rngs=nnx.Rngs(1)))


def shared(model):
    model.layers[1] = model.layers[0]


def another_dtype(model):
    kernel = model.layers[0].kernel
    kernel.set_value(kernel.get_value().astype(jnp.bfloat16))


@pytest.mark.slow
@rows(
    "change",
    [assigned_outside, attribute_changed, layer_replaced, layer_added, shared, another_dtype],
)
def test_model_changed_between_calls_is_used(strategy, change):
    def twin() -> Net:
        with strategy.scope():
            return Net()

    batch = own(strategy, (2, 4))
    first, second = twin(), twin()
    for _ in range(3):
        strategy.run(train, (first, batch))
    nnx.update(second, jax.tree.map(jnp.copy, nnx.state(first)))
    change(first)
    change(second)
    found = strategy.run(train, (first, batch))
    np.testing.assert_array_equal(found, strategy.run(lambda *a: train(*a), (second, batch)))
    for a, b in zip(leaves_of(nnx.state(first)), leaves_of(nnx.state(second)), strict=True):
        np.testing.assert_array_equal(a, b)


def test_deleted_variable_keeps_its_message(strategy):
    with strategy.scope():
        model = Net()
    batch = own(strategy, (2, 4))
    for _ in range(3):
        strategy.run(train, (model, batch))
    model.layers[0].kernel.get_value().delete()
    with raises(ValueError, names="model.layers.0.kernel", fix="jnp.copy(x)"):
        strategy.run(train, (model, batch))


def test_repeated_call_accepts_another_model_of_the_same_structure(strategy):
    batch = own(strategy, (2, 4))
    with strategy.scope():
        models = [Net(), Net()]
    alone = [float(strategy.run(train, (model, batch))) for _ in range(3) for model in models]
    assert alone[0::2] == alone[1::2]
    assert alone[0] != alone[2]


# Contexts.


def test_changed_trace_context_is_proved_again(strategy):
    traces = []

    def step(x):
        traces.append(jax.config.jax_default_matmul_precision)
        return mirror.all_reduce("sum", x @ x)

    x = own(strategy, (2, 2))
    for _ in range(3):
        strategy.run(step, (x,))
    with jax.default_matmul_precision("float32"):
        strategy.run(step, (x,))
        strategy.run(step, (x,))
    strategy.run(step, (x,))
    assert traces == [None, "float32"]


@rows("strategy", STRATEGIES)
def test_calls_inside_and_outside_a_scope_share_a_program(strategy, caplog):
    traces = []

    def step(x):
        traces.append(1)
        return mirror.all_reduce("sum", x)

    x = own(strategy)
    strategy.run(step, (x,))
    with compilations(caplog) as events:
        for _ in range(3):
            strategy.run(step, (x,))
            with strategy.scope():
                strategy.run(step, (x,))
            with jax.default_device(jax.devices()[1]):
                strategy.run(step, (x,))
    assert_nothing_compiled(events)
    assert len(traces) == 1


def test_shapes_may_alternate(strategy):
    def step(x):
        return mirror.all_reduce("sum", x)

    xs = [own(strategy), own(strategy, (5,))]
    n = strategy.num_replicas_in_sync
    for i in range(60):
        found = strategy.run(step, (xs[i % 2],))
        assert found.shape == ((4,), (5,))[i % 2]
        assert float(found[0]) == n * (n + 1) / 2


def test_static_arguments_and_keywords_work_as_before(strategy):
    def step(x, name="a", scale=1.0):
        return mirror.all_reduce("sum", x * scale), name

    x = own(strategy)
    n = strategy.num_replicas_in_sync
    total = n * (n + 1) / 2
    for _ in range(2):
        for name in "ab":
            found, same = strategy.run(step, (x, name))
            assert (float(found[0]), same) == (total, name)
        assert float(strategy.run(step, (x, "a"), {"scale": 2.0})[0][0]) == 2 * total
        assert float(strategy.run(step, (x, "a"))[0][0]) == total


def test_threads_share_a_program(strategy):
    def step(state, batch):
        return update(state, batch)

    results, batch = [], own(strategy)

    def loop() -> None:
        with strategy.scope():
            state = {"w": jnp.zeros(3)}
        for _ in range(30):
            state, _ = strategy.run(step, (state, batch), donate_argnums=0)
        results.append(np.asarray(state["w"]))

    threads = [threading.Thread(target=loop) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4
    for found in results:
        np.testing.assert_array_equal(found, results[0])


def test_optimizer_trains_the_same_with_a_log_of_its_placement():

    def losses(long: bool) -> list[float]:
        strategy = mirror.MirroredStrategy(["/cpu:0", "/cpu:1"])
        with strategy.scope():
            model = Net()
            optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

        def step(model, optimizer, batch):
            loss, grads = nnx.value_and_grad(lambda model: (model(batch) ** 2).mean())(model)
            loss, grads = mirror.all_reduce("mean", (loss, grads))
            optimizer.update(model, grads)
            return loss

        batch, found = own(strategy, (2, 4)), []
        mirror.debugging.set_log_device_placement(long)
        try:
            for _ in range(6):
                found.append(float(strategy.run(step, (model, optimizer, batch))))
        finally:
            mirror.debugging.set_log_device_placement(False)
        return found

    assert losses(long=True) == losses(long=False)


# One replica.


def test_one_replica_runs_without_collectives():
    strategy = MAKERS["one replica"]()

    def step(w, batch):
        context = mirror.get_replica_context()
        gathered = context.all_gather(batch, 0)
        index = jax.lax.axis_index(mirror.REPLICA_AXIS)
        ring = jax.lax.ppermute(batch, mirror.REPLICA_AXIS, [(0, 0)])
        return context.all_reduce("mean", (w - batch.mean(), gathered.sum() + index, ring.sum()))

    args = (jnp.ones(()), own(strategy))
    text = inside.lowered(strategy, step, args).compile().as_text()
    for word in ("all-reduce", "all-gather", "collective-permute", "partition-id", "replica-id"):
        assert word not in text
    found = strategy.run(step, args)
    assert [float(x) for x in found] == [0.0, 4.0, 4.0]


@rows("value", [1.0, 2, np.float32(3), np.ones(3, np.float32)])
def test_arrays_on_other_devices_do_not_recompile(strategy, value, caplog):
    def step(state, batch, value):
        new, _ = update(state, batch)
        return jax.tree.map(lambda w: w * value, new)

    state, batch = {"w": jnp.zeros(3)}, own(strategy)
    both = [value, jnp.asarray(value)]
    for each in both:
        state = strategy.run(step, (state, batch, each), donate_argnums=0)
    with compilations(caplog) as events:
        for each in both * 3:
            state = strategy.run(step, (state, batch, each), donate_argnums=0)
    assert_nothing_compiled(events)


def test_host_buffer_can_be_overwritten(strategy):
    """JAX reads the memory of a NumPy argument while the step runs."""

    def step(x, w):
        for _ in range(20):
            w = w @ w / 100
        return x + 0 * w.sum()

    with strategy.scope():
        w = jnp.ones((100, 100))
    buffer = np.zeros(64, np.float32)
    for i in range(10):
        buffer[:] = i
        found = strategy.run(step, (buffer, w))
        buffer[:] = -1
        np.testing.assert_array_equal(found, np.full(64, i))
