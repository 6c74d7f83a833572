"""The batch of a step: its rows, and what cannot be sent to a worker."""

import jax
import numpy as np

import mirror
from mirror._src.ps.step_data import num_rows
from tests.support.messages import raises


def step(batch, extra=None):
    """Stands for the user's function."""


def test_rows_are_counted_and_compared():
    assert num_rows(step, ({"x": np.zeros((3, 2)), "y": np.zeros(3)}, 0.1), {}) == 3
    assert num_rows(step, (1,), {"extra": "text"}) is None
    with raises(ValueError, names=("batch['x']", "extra"), values=(3, 2)):
        num_rows(step, ({"x": np.zeros(3)},), {"extra": np.zeros(2)})
    with raises(TypeError, names="batch", values="PerReplica"):
        num_rows(step, (mirror.PerReplica([1, 2]),), {})
    with raises(ValueError, names="step"):
        num_rows(step, (np.zeros((0, 2)),), {})


def test_random_keys_are_not_arguments(subtests):
    for batch in [{}, {"x": np.ones((3, 2))}]:
        with (
            subtests.test(batch=batch),
            raises(TypeError, names=("extra", "step"), fix="jax.random.key(seed)"),
        ):
            num_rows(step, (batch,), {"extra": jax.random.key(0)})


def test_integers_that_do_not_fit_are_rejected(subtests):
    """They would lose their upper bits on the worker."""
    for ids in [np.array([2**40, 5]), 2**40]:
        with (
            subtests.test(ids=ids),
            raises(ValueError, names="batch['ids']", values=2**40, fix="jax_enable_x64"),
        ):
            num_rows(step, ({"ids": ids},), {})
    assert num_rows(step, ({"ids": np.array([2**31 - 1, -5])},), {}) == 2
