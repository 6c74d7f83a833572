"""Merging of nnx metrics: one metric over the batches of all replicas.

Every replica starts a step with the same metric and updates it with its own batch. The rule for a
metric computes, from its states before the step and after it on each replica, the states that one
device would have after it had seen all batches.

A rule merges all states of a metric together: the number of examples is often the same constant on
every replica, and still has to be summed when the total is.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from typing import TypeAlias

import jax.numpy as jnp
import numpy as np
from flax import nnx

from mirror._src.base.types import Array, accumulator, widened
from mirror._src.jaxprs.additive import Dependence

States: TypeAlias = Mapping[str, Array]
Dependences: TypeAlias = Mapping[str, Dependence]
Psum: TypeAlias = Callable[[list[Array]], list[Array]]
Rounds: TypeAlias = Generator[list[Array], list[Array], dict[str, Array]]


class Additive:
    """Rule for metrics whose states are sums: what each replica added is summed."""

    def unmergeable(self, dependences: Dependences) -> list[str]:
        """Returns the names of the states that are not sums.

        Args:
            dependences: How each state after the step depends on the same state before it.
        """
        return [name for name, how in dependences.items() if how is Dependence.OTHER]

    def rounds(self, before: States, after: States, dependences: Dependences) -> Rounds:
        """Sums what each replica added; for a state that was reset, all of it.

        Yields the arrays to sum over the replicas, receives the sums, returns the states.
        """
        added = {name for name, how in dependences.items() if how is Dependence.ADDED}
        increments = [
            _increment(before[name], value) if name in added else widened(value)
            for name, value in after.items()
        ]
        sums = yield increments
        merged = {}
        for (name, value), total in zip(after.items(), sums, strict=True):
            whole = widened(before[name]) + total if name in added else total
            merged[name] = whole.astype(value.dtype)
        return merged


class Moments:
    """Rule for `nnx.metrics.Welford`: counts, means and squared deviations of disjoint batches.

    With N examples in all, n' of them known to a replica afterwards, and e the change of its mean,
    the mean of all changes by d = sum(n' e) / N, and the squared deviations are
    m2 + n d^2 + sum((m2' - m2) + n' (e - d)^2 - n d^2). Nothing large cancels in either sum.
    """

    names = ("count", "mean", "m2")

    def unmergeable(self, dependences: Dependences) -> list[str]:
        """Returns the names of the states that `update`, or `reset` and `update`, do not explain.

        `update` adds to the count and to the squared deviations. It moves the mean by an amount
        that depends on the mean.
        """
        unknown = [name for name in dependences if name not in self.names]
        if dependences["count"] is Dependence.INDEPENDENT:
            wrong = [n for n in self.names if dependences[n] is not Dependence.INDEPENDENT]
        else:
            wrong = [n for n in ("count", "m2") if dependences[n] is not Dependence.ADDED]
            wrong += ["mean"] * (dependences["mean"] is Dependence.INDEPENDENT)
        return wrong + unknown

    def rounds(self, before: States, after: States, dependences: Dependences) -> Rounds:
        """Merges the moments in two rounds: the counts and means, then the deviations."""
        reset = dependences["count"] is Dependence.INDEPENDENT
        start = {n: jnp.zeros_like(after[n]) if reset else before[n] for n in self.names}
        real = np.promote_types(*(accumulator(after[name].dtype) for name in ("mean", "m2")))
        mean, m2 = (start[name].astype(real) for name in ("mean", "m2"))
        new_examples = after["count"] - start["count"]
        updated = new_examples != 0  # without examples, the mean of a batch is NaN
        change = jnp.where(updated, after["mean"].astype(real) - mean, 0)
        squares = jnp.where(updated, after["m2"].astype(real) - m2, 0)
        known, examples = after["count"].astype(real), start["count"].astype(real)

        new_examples, moved = yield [new_examples, known * change]
        count = start["count"] + new_examples
        shift = moved / jnp.maximum(count, 1).astype(real)

        common = examples * shift * shift
        (squares,) = yield [squares + known * (change - shift) ** 2 - common]
        merged = {
            "count": count,
            "mean": mean + shift,
            # The deviations of equal values may round to less than zero, whose root is NaN.
            "m2": jnp.maximum(m2 + (common + squares), 0),
        }
        return {name: value.astype(after[name].dtype) for name, value in merged.items()}


Rule: TypeAlias = Additive | Moments
"""How the states of one metric are merged."""


def merge_rule(metric: object) -> Rule | None:
    """Returns the rule for the object that holds the metric states; `None` if it has no rule.

    A subclass of `nnx.metrics.Average` may have an `update` of its own, because the dependences
    show whether its states are sums. They cannot show that an `update` is Welford's.
    """
    if isinstance(metric, nnx.metrics.Average):
        return Additive()
    if isinstance(metric, nnx.metrics.Welford):
        return Moments() if type(metric).update is nnx.metrics.Welford.update else None
    return None


def merge(metrics: Sequence[Rounds], psum: Psum) -> list[dict[str, Array]]:
    """Merges metrics over all replicas.

    Args:
        metrics: The rounds of the metrics that a replica may have updated differently.
        psum: Sums each array of a list over the replicas. It is called once if all metrics are
            sums, and twice if there are moments among them.

    Returns:
        For each metric its merged states, the same on all replicas, in their dtypes after the step.
    """
    running = dict(enumerate(metrics))
    merged: dict[int, dict[str, Array]] = {}
    received: dict[int, list[Array]] = {}
    while running:
        asked: dict[int, list[Array]] = {}
        for i, rounds in list(running.items()):
            try:
                asked[i] = rounds.send(received[i]) if i in received else next(rounds)
            except StopIteration as done:
                merged[i] = done.value
                del running[i]
        if asked:
            sums = iter(psum([array for arrays in asked.values() for array in arrays]))
            received = {i: [next(sums) for _ in arrays] for i, arrays in asked.items()}
    return [merged[i] for i in range(len(metrics))]


def _increment(before: Array, after: Array) -> Array:
    """Returns what was added; all of `after` where `before` is infinite already."""
    before, after = widened(before), widened(after)
    if not jnp.issubdtype(after.dtype, jnp.inexact):
        return after - before
    return jnp.where(jnp.isinf(before), after, after - before)
