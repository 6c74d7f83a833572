"""Sums of integers are exact, or an error that names the value."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mirror
from tests.support.messages import raises
from tests.support.strategies import EXECUTORS, cpu_strategy

SMALL = ("int8", "uint8", "int16", "uint16", "int4", "uint4", "bool")


@pytest.mark.parametrize("make", EXECUTORS.values(), ids=EXECUTORS)
def test_sums_of_small_integers_do_not_wrap(make):
    strategy = make()
    values = {
        dtype: mirror.PerReplica(
            [np.full(3, 1 if dtype == "bool" else jnp.iinfo(dtype).max, dtype)] * 2
        )
        for dtype in SMALL
    }

    def step(values):
        return mirror.all_reduce("sum", values)

    most = {dtype: 1 if dtype == "bool" else int(jnp.iinfo(dtype).max) for dtype in SMALL}
    in_step, reduced = strategy.run(step, (values,)), strategy.reduce("sum", values)
    over_rows = strategy.reduce("sum", values, axis=0)
    for dtype, largest in most.items():
        assert {int(x) for x in in_step[dtype]} == {int(x) for x in reduced[dtype]} == {2 * largest}
        assert int(over_rows[dtype]) == 6 * largest


@pytest.mark.parametrize("make", EXECUTORS.values(), ids=EXECUTORS)
def test_reduce_rejects_sums_that_do_not_fit(make):
    strategy = make()
    for dtype, value in {"int32": 2**30, "uint32": 2**31}.items():
        fits = {"n": mirror.PerReplica([np.full(2, value // 2, dtype)] * 2)}
        assert int(strategy.reduce("sum", fits)["n"][0]) == value
        wraps = {"n": mirror.PerReplica([np.array([1, value], dtype)] * 2)}
        with raises(OverflowError, names="value['n']", values=dtype, fix="x.astype('float32')"):
            strategy.reduce("sum", wraps)
        floats = jax.tree.map(lambda x: x.astype("float32"), wraps)  # as the message advises
        assert float(strategy.reduce("sum", floats)["n"][1]) == 2.0 * value
        with raises(OverflowError, names="value['n']", values=dtype):
            strategy.reduce("sum", fits, axis=0)


def test_counts_of_replicas_are_exact_or_rejected():
    for dtype, value in {"int32": 2**30, "uint32": 2**31}.items():
        strategy = cpu_strategy(2)
        with strategy.scope():
            count = mirror.Variable(
                np.zeros(2, dtype), name="count", synchronization="on_read", aggregation="sum"
            )

        def step(count, new):
            count.assign_add(new)

        strategy.run(step, (count, np.array([1, value // 2], dtype)))
        assert np.asarray(count).tolist() == [2, value]
        strategy.run(step, (count, np.array([1, value // 2], dtype)))
        with raises(OverflowError, names="count", values=dtype, fix="float32"):
            count.get_value()
        assert "count" in repr(count)


def test_masked_sums_count_only_what_is_kept():
    strategy = cpu_strategy(2)
    value = mirror.PerReplica([np.array([2**30, 5], "int32")] * 2)
    kept = mirror.PerReplica([np.array([False, True])] * 2)
    assert int(strategy.reduce("sum", value, axis=0, where=kept)) == 10
