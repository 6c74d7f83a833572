"""Mirrored values that XLA's GPU programs could compute differently are compiled without races."""

import jax
import jax.numpy as jnp
import numpy as np

import mirror
from mirror import PerReplica
from tests.support.compilations import compiler_options
from tests.support.inside import pretended_types
from tests.support.strategies import FOUR_REPLICAS, cpu_strategy
from tests.support.tables import rows

DETERMINISTIC = {"xla_gpu_exclude_nondeterministic_ops": True}
X = PerReplica([np.arange(4, dtype=np.float32)] * 4)
TABLE = np.zeros(8, np.float32)


def ids(x):
    return mirror.all_gather(x).astype(int)


def in_loop(table, x):
    return jax.lax.fori_loop(0, 3, lambda _, t: t.at[ids(x)].add(1.0), table)


@mirror.per_replica_on_purpose
def own_in_loop(table, x):
    """The carry is mirrored in the first iteration only."""
    body = lambda _, t: t.at[jnp.arange(2) // 2].add(1.0) + x.sum()  # noqa: E731
    return mirror.all_reduce("sum", jax.lax.fori_loop(0, 3, body, table))


def pooled(images):
    return jax.lax.reduce_window(images, -jnp.inf, jax.lax.max, (1, 2), (1, 1), "VALID").sum()


def kernel_gradient(kernel, x):
    images = mirror.all_gather(x)[None, None]
    convolved = lambda k: jax.lax.conv(images, k[None, None], (1,), "SAME").sum()  # noqa: E731
    return jax.grad(convolved)(kernel)


RACING = {
    "add": lambda t, x: t.at[ids(x)].add(mirror.all_gather(x)),
    "multiply": lambda t, x: t.at[ids(x)].multiply(2.0),
    "last write": lambda t, x: t.at[ids(x)].set(mirror.all_gather(x)),
    "segment_sum": lambda t, x: jax.ops.segment_sum(mirror.all_gather(x), ids(x), 8) + t,
    "bincount": lambda t, x: jnp.bincount(ids(x), mirror.all_gather(x), length=8) + t,
    "gradient of a gather": lambda t, x: jax.grad(lambda t: (t[ids(x)] ** 2).sum())(t),
    "gradient of pooling": lambda t, x: jax.grad(pooled)(t[None] + mirror.all_reduce("sum", x[0])),
    "gradient of a convolution": kernel_gradient,
    "in jit": lambda t, x: jax.jit(lambda t, i: t.at[i].add(1.0))(t, ids(x)),
    "in a loop": in_loop,
}
SAFE = {
    "own ids": lambda t, x: mirror.all_reduce("sum", t.at[x.astype(int)].add(x)),
    "own in a loop": own_in_loop,
    "unique": lambda t, x: t.at[ids(x)].add(1.0, unique_indices=True),
    "one index": lambda t, x: t.at[ids(x)[0]].add(1.0),
    "counts": lambda t, x: jnp.bincount(ids(x), length=8),
    "maximum": lambda t, x: t.at[ids(x)].max(mirror.all_gather(x)),
    "no scatter": lambda t, x: t + mirror.all_reduce("sum", x).sum(),
}


def options_of(strategy, step):
    """Returns the options with which XLA compiles the programs of a step, those that have any."""
    with compiler_options() as options:
        strategy.run(step, (TABLE, X))
    return options


@rows("step", RACING)
def test_races_of_mirrored_values_are_excluded_on_gpus(step):
    with pretended_types(["GPU"] * 4):
        assert options_of(cpu_strategy(4), step) == [DETERMINISTIC]


@rows("step", SAFE)
def test_other_steps_are_compiled_as_usual_on_gpus(step):
    with pretended_types(["GPU"] * 4):
        assert options_of(cpu_strategy(4), step) == []


@rows("devices, per_device, ops", FOUR_REPLICAS)
def test_races_are_excluded_by_every_executor(devices, per_device, ops):
    with pretended_types(["GPU"] * 4):
        strategy = cpu_strategy(devices, cross_device_ops=ops(), replicas_per_device=per_device)
        options = options_of(strategy, RACING["add"])
    assert all(option == DETERMINISTIC for option in options)
    assert bool(options) is (devices > 1)


def test_host_devices_need_no_option():
    options = options_of(cpu_strategy(4), RACING["add"])
    assert all(DETERMINISTIC.keys().isdisjoint(option) for option in options)
