"""The parts of a synchronous step: how a batch is cut, and how results are joined."""

import itertools

import jax
import numpy as np

import mirror
from mirror._src.ps.parts import bounds, cut, joined, num_rows
from mirror._src.ps.replies import PerReplicaResult, Result
from tests.support.messages import raises


def step(batch, extra=None):
    """Stands for the user's function."""


def test_every_row_is_in_one_part_that_the_devices_divide(subtests):
    for devices, workers, units in itertools.product([1, 2, 3], [1, 2, 5], [1, 2, 4, 7]):
        with subtests.test(devices=devices, workers=workers, units=units):
            size = units * devices
            parts = bounds(size, workers, devices, "step")
            assert [row for a, b in parts for row in range(a, b)] == list(range(size))
            sizes = [b - a for a, b in parts]
            assert len(parts) == min(workers, units)
            assert all(rows > 0 and rows % devices == 0 for rows in sizes)
            assert max(sizes) - min(sizes) <= devices
            assert sizes == sorted(sizes, reverse=True)


def test_rows_that_the_devices_do_not_divide_are_rejected():
    with raises(ValueError, names=("step", "devices_per_worker=2"), values=7):
        bounds(7, 2, 2, "step")


def test_only_arrays_with_rows_are_cut():
    batch = {"x": np.arange(6).reshape(3, 2), "scale": np.float32(2), "name": "a", "n": 3}
    part = cut(batch, 1, 3)
    assert part["x"].tolist() == [[2, 3], [4, 5]]
    assert (part["scale"], part["name"], part["n"]) == (2, "a", 3)


def test_rows_are_counted_and_compared():
    assert num_rows(step, ({"x": np.zeros((3, 2)), "y": np.zeros(3)}, 0.1), {}) == 3
    assert num_rows(step, (1,), {"extra": "text"}) is None
    with raises(ValueError, names=("batch['x']", "extra"), values=(3, 2)):
        num_rows(step, ({"x": np.zeros(3)},), {"extra": np.zeros(2)})
    with raises(TypeError, names="batch", values="PerReplica"):
        num_rows(step, (mirror.PerReplica([1, 2]),), {})
    with raises(ValueError, names="step"):
        num_rows(step, (np.zeros((0, 2)),), {})


def results_of(values, weights, joins):
    return [Result(v, w, joins=joins) for v, w in zip(values, weights, strict=True)]


def test_results_are_joined_as_their_reductions_are():
    joins = {"loss": "mean", "count": "sum", "most": "max", "ok": "min", "rows": "own"}
    values = [
        {
            "loss": np.float32(loss),
            "count": np.int32(count),
            "most": np.float32(loss),
            "ok": np.bool_(ok),
            "rows": PerReplicaResult((np.full(2, loss),)),
            "none": None,
            "name": "a",
        }
        for loss, count, ok in [(1.0, 3, True), (4.0, 1, False)]
    ]
    names = ("count", "loss", "most", "name", "ok", "rows")  # in the order of leaves
    results = results_of(values, [3.0, 1.0], tuple(joins.get(name, "same") for name in names))
    total = joined(results)
    assert total["loss"] == 1.75
    assert total["loss"].dtype == np.float32
    assert (total["count"], total["ok"], total["most"]) == (4, False, 4.0)
    assert (total["none"], total["name"]) == (None, "a")
    assert [list(value) for value in total["rows"].values] == [[1, 1], [4, 4]]
    assert joined(results[:1])["loss"] == 1.0
    assert joined([Result(values[0], 3.0)])["loss"] == 1.0  # of a batch in one part


def test_part_without_weight_does_not_spoil_the_mean():
    values = [np.float32(2), np.float32(np.nan)]
    assert joined(results_of(values, [1.0, 0.0], ("mean",))) == 2
    for join in ("mean", "sum", "max", "min"):
        assert np.isnan(joined(results_of(values, [1.0, 1.0], (join,))))


def test_results_of_different_structure_are_rejected():
    with raises(ValueError, values="structure"):
        joined(results_of([{"a": np.float32(1)}, {"b": np.float32(1)}], [1.0, 1.0], ("mean",)))


def test_results_of_different_shapes_are_not_broadcast():
    values = [np.ones(2, np.float32), np.ones(1, np.float32)]
    with raises(ValueError, values=("[2]", "[1]")):
        joined(results_of(values, [2.0, 1.0], ("mean",)))


def test_random_keys_are_not_arguments(subtests):
    for batch in [{}, {"x": np.ones((3, 2))}]:
        with (
            subtests.test(batch=batch),
            raises(TypeError, names=("extra", "step"), fix="jax.random.key(seed)"),
        ):
            num_rows(step, (batch,), {"extra": jax.random.key(0)})
