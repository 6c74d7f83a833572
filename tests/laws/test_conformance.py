"""The executors agree: a table of executors, steps and dtypes, and a table of errors."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import mirror
from mirror import REPLICA_AXIS, PerReplica
from tests.support import fresh
from tests.support.conformance import (
    NET,
    ONES,
    STEPS,
    N,
    Regularized,
    assert_agree,
    by_pmap,
    linen_step,
    nnx_step,
    result_of,
    rows,
)
from tests.support.steps import context
from tests.support.strategies import FOUR_REPLICAS, executor

# Steps that may differ with two replicas on each of two devices.
ON_TWO = ("reductions", "collectives by hand", "closures", "edges", "containers")
WITHOUT_CONTEXT = ("part of a ring", "groups", "inside calls", "loops", "closures", "rounds")
# Steps that compile for a second or less on all executors.
QUICK = ("shapes of moves", "part of a ring", "groups", "keys", "rounds", "containers")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in QUICK)) for name in STEPS]
)
def test_executors_agree(subtests, name):
    step, args = STEPS[name]
    first, *others = [each for each in FOUR_REPLICAS if "on 2" not in each or name in ON_TWO]
    wanted = result_of(first, step, args())
    for other in others:
        with subtests.test(msg=other):
            assert_agree(result_of(other, step, args()), wanted)


@pytest.mark.parametrize("name", WITHOUT_CONTEXT)
def test_pmap_agrees_with_jax_alone(name):
    """Which does not share the interpreter of the executors."""
    step, args = STEPS[name]
    _, results = result_of("pmap", step, args())
    for (_, _, values), wanted in zip(results, by_pmap(step, args()), strict=True):
        values = np.broadcast_to(values, wanted.shape)
        np.testing.assert_allclose(values, wanted, rtol=1e-5, atol=1e-5)


def test_executors_agree_bitwise_on_extremes():
    """Including NaN, infinities and zeros of either sign."""
    values = np.array([[1, -0.0, np.nan], [3, 0, 1], [-np.inf, 0, 2], [2, 0, np.inf]], np.float32)
    found = [
        [value for _, _, value in result_of(name, extremes, (PerReplica.from_stacked(values),))[1]]
        for name in FOUR_REPLICAS
    ]
    for other in found[1:]:
        for a, b in zip(other, found[0], strict=True):
            np.testing.assert_array_equal(a, b)


def extremes(x):
    return [context().all_reduce(op, (x, x.astype(jnp.float16))) for op in ("min", "max")]


@pytest.mark.slow
def test_executors_agree_in_64_bits():
    fresh.run_program("wide_dtypes")


def trained(name, create, step, num_steps):
    with executor(name) as strategy:
        state = create()
        for seed in range(num_steps):
            state = step(strategy, state, rows(6, 6, seed=seed))
        return jax.tree.map(data_of, nnx.state(state) if is_nnx(state) else state)


def is_nnx(state):
    return isinstance(state, tuple) and isinstance(state[0], nnx.Module)


def data_of(leaf):
    is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(leaf) if is_key else leaf)


def create_nnx():
    model = Regularized(nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)


def train_nnx(strategy, state, x):
    assert isinstance(strategy.run(nnx_step, (*state, x)), jax.Array)
    return state


def create_linen():
    return dict(NET.init(jax.random.key(0), jnp.ones((2, 6))))


def train_linen(strategy, state, x):
    return strategy.run(linen_step, (state, x), donate_argnums=0)[0]


TRAININGS = {"nnx": (create_nnx, train_nnx), "linen": (create_linen, train_linen)}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.* differs from one device")
def test_executors_train_to_the_same_weights(subtests):
    """Batch statistics, dropout, moments, keys and counts: the whole state."""
    for name in TRAININGS:
        with subtests.test(msg=name):
            on_all = [each for each in FOUR_REPLICAS if "on 2" not in each]
            trainings = {each: trained(each, *TRAININGS[name], num_steps=2) for each in on_all}
            wanted = trainings.pop("pmap")
            for each, got in trainings.items():
                for (path, a), b in zip(
                    jax.tree_util.tree_flatten_with_path(got)[0],
                    jax.tree.leaves(wanted),
                    strict=True,
                ):
                    message = f"{each}: {jax.tree_util.keystr(path)}"
                    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5, err_msg=message)


def test_steps_accept_state_created_in_the_scope(subtests):
    for name in FOUR_REPLICAS:
        with subtests.test(msg=name), executor(name) as strategy:
            with strategy.scope():
                weights = jnp.ones(2)
            for _ in range(2):
                weights = strategy.run(
                    lambda w, x: w + jax.lax.psum(x, REPLICA_AXIS), (weights, ONES)
                )
            np.testing.assert_array_equal(weights, 1 + 2 * N)


def test_callbacks_see_what_replicas_see(capfd):
    seen = []

    def step(x):
        total = jax.lax.psum(x, REPLICA_AXIS)
        jax.debug.callback(lambda x, t: seen.append((float(x), float(t))), x, total)
        jax.debug.print("value {}", x)
        like = jax.ShapeDtypeStruct((), np.float32)
        doubled = jax.pure_callback(lambda x: np.float32(2 * x), like, x, vmap_method="sequential")
        return jax.lax.pmax(doubled, REPLICA_AXIS), doubled

    found = {}
    for name in FOUR_REPLICAS:
        seen.clear()
        result = result_of(name, step, (PerReplica.from_stacked(np.arange(4, dtype=np.float32)),))
        jax.effects_barrier()
        found[name] = sorted(seen), sorted(capfd.readouterr().out.split("\n")), result
    wanted = found.pop("pmap")
    assert wanted[0] == [(float(i), 6.0) for i in range(N)]
    for callbacks, lines, result in found.values():
        assert (callbacks, lines) == wanted[:2]
        assert_agree(result, wanted[2])


# Errors


class Counter(nnx.Module):
    def __init__(self):
        self.total = nnx.Param(jnp.zeros(2))


def deleted():
    array = jnp.ones(2)
    array.delete()
    return array


def forgets(model, x):
    model.total[...] += x


def forgets_to_ensure(x):
    return mirror.ensure_mirrored({"w": x * 2})


def under_cond(x):
    return jax.lax.cond(x[0] > 0, lambda: jax.lax.psum(x, REPLICA_AXIS), lambda: x)


def under_while(x):
    return jax.lax.while_loop(lambda c: c[0] < 1, lambda c: c + jax.lax.pmax(c, REPLICA_AXIS), x)


def raises(x):
    jax.lax.psum(x, REPLICA_AXIS)
    raise LookupError("mine")


def changes_structure(model, x):
    model.more = nnx.Param(jnp.ones(1))


MISTAKES = {
    "forgotten": lambda s: s.run(forgets, (Counter(), rows(2))),
    "forgotten, plain": lambda s: s.run(forgets_to_ensure, (rows(2),)),
    "under cond": lambda s: s.run(under_cond, (rows(2),)),
    "under while": lambda s: s.run(under_while, (rows(2),)),
    "raises": lambda s: s.run(raises, (rows(2),)),
    "deleted": lambda s: s.run(extremes, (deleted(),)),
    "wrong count": lambda s: s.run(extremes, (PerReplica([np.ones(2)] * (N - 1)),)),
    "wrong count, apart": lambda s: s.run(extremes, (PerReplica([np.ones(2), np.ones(3)]),)),
    "structure": lambda s: s.run(changes_structure, (Counter(), rows(2))),
    "returns text": lambda s: s.run(lambda x: "text", (rows(2),)),
    "returns a model": lambda s: s.run(lambda m: m, (Counter(),)),
    "max of complex": lambda s: s.run(extremes, (rows(2, dtype=np.complex64),)),
    "gathers a scalar": lambda s: s.run(lambda x: context().all_gather(x), (rows(),)),
    "unknown op": lambda s: s.run(lambda x: context().all_reduce("avg", x), (rows(),)),
    "shape": lambda s: s.run(lambda x: jax.lax.psum(x, REPLICA_AXIS) @ x, (rows(2, 3),)),
    "unknown axis": lambda s: s.run(lambda x: jax.lax.psum(x, "batch"), (rows(),)),
    "donates by name": lambda s: s.run(extremes, (rows(2),), donate_argnums="x"),
    "an object array": lambda s: s.run(extremes, (np.array([None]),)),
}  # fmt: skip
_ADDRESS = re.compile("0x[0-9a-f]+")


def test_executors_raise_the_same_error_for_a_mistake(subtests):
    for name in MISTAKES:
        with subtests.test(msg=name):
            found = {}
            for each in FOUR_REPLICAS:
                with executor(each) as strategy:
                    with pytest.raises(Exception, match=r"\S") as error:
                        MISTAKES[name](strategy)
                    assert not mirror.has_strategy()
                found[each] = type(error.value), _ADDRESS.sub("", str(error.value))
            assert len(set(found.values())) == 1, found
