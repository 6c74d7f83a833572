"""Evaluation of a staged program on a device that runs its replicas in turn.

The same bits on any number of devices take the same machine code for what a replica computes. So
XLA must not connect it with arrays whose size depends on the number of devices: each replica's turn
is a loop of one iteration, of a number that XLA does not know. `optimization_barrier` is not enough
(XLA:CPU removes it before it fuses operations; JAX 0.10.2 and 0.12.0.1).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from mirror._src.base.dtypes import keys_like
from mirror._src.base.types import Array
from mirror._src.devices.replicas import ReplicaDevices
from mirror._src.passes.collective_rules import canonical, uses_gloo
from mirror._src.passes.order.tree import TreeSum, add
from mirror._src.passes.program import Value
from mirror._src.passes.staging.ir import Collective, Computation
from mirror._src.passes.staging.on_device import OfReplica, OnDevice, Values

# With several devices, XLA merges equal operations before it simplifies, with one device only
# afterwards (the pass `cse` in the pipeline `spmd-cleanup`; JAX 0.10.2 and 0.12.0.1). What it
# simplifies depends on how often a value is used, so that results would differ in the last bits.
# XLA:CPU compiles loops over few bytes in another way (`small-while-loop-hoisting`), and here the
# bytes depend on the number of devices.
COMPILER_OPTIONS = {"xla_disable_hlo_passes": "cse,small-while-loop-hoisting"}


class Turns(OnDevice):
    """Runs the replicas of a device in turn, and adds in the order of a tree.

    Args:
        replicas: Devices of the replicas.
        arrays: As for `OnDevice`.
        count: The number of replicas of a device, as an array that XLA does not know.
    """

    def __init__(self, replicas: ReplicaDevices, arrays: Mapping[int, Any], count: Array) -> None:
        super().__init__(replicas, arrays)
        n, self._count = len(replicas), count
        self._sum = TreeSum(n, self._per_device, self._axis, over_gloo=uses_gloo(replicas))

    def each(self, one: OfReplica, rows: Mapping[Value, Any], kept: Sequence[Any]) -> list[Any]:
        """See `OnDevice.each`."""
        return self._turns(one, rows, kept)[0]

    def computed(
        self, steps: list[Computation], values: Values, needed: set[Value], sums: list[Collective]
    ) -> list[Any]:
        """See `OnDevice.computed`."""
        operands = [step.operand for step in sums]
        made = [value for step in steps for value in step.outputs]
        last: list[Value] = []
        if self._sum.depth is not None:  # the others need the rows
            last = [v for v in made if operands.count(v) == 1 and v not in needed]
        kept = [v for v in made if v in needed.union(operands).difference(last)]
        pieces: dict[Value, Array] = {}
        if steps:
            one, rows = self.function(steps, values, [*kept, *last])
            types = [[v.aval for v in each] for each in (kept, last)]
            stacked, totals = self._turns(one, rows, *types)
            values.rows.update(zip(kept, stacked, strict=True))
            pieces.update(zip(last, (total[None] for total in totals), strict=True))
        for value in dict.fromkeys(v for v in operands if v not in pieces):
            pieces[value] = self._sum.of_rows(self.rows_of(value, values))
        return self._sums([pieces[value] for value in operands])

    def _turns(
        self,
        one: OfReplica,
        rows: Mapping[Value, Any],
        kept: Sequence[Any],
        summed: Sequence[Any] = (),
    ) -> tuple[list[Any], list[Any]]:
        """Calls `one` for every replica of this device.

        Args:
            one: Function of a reader of rows, and of the index of the replica.
            rows: The rows that it reads.
            kept: Types of the first results, which are stacked.
            summed: Types of the others, which are added in the order of the tree. This keeps one
                array per level of the tree, not one per replica.
        """
        last, levels = self._per_device - 1, self._sum.depth or 0

        def at(i: Any) -> list[Any]:
            i = jnp.minimum(i, last)
            return [jax.lax.dynamic_index_in_dim(x, i, 0, keepdims=False) for x in rows.values()]

        def turn(i: Any, mine: list[Any], before: list[Any]) -> tuple[list[Any], list[Any]]:
            """Returns the next replica's slices, and this one's results."""

            def body(state: Any) -> Any:
                j, mine, _ = state
                named = dict(zip(rows, mine, strict=True))
                results = list(map(_bits, one(named.__getitem__, self._first + i)))
                # Slices of this turn would be invariant, so that XLA could move the computation
                # out of the loop.
                return j + 1, at(i + 1), results

            return self._few_times(1, body, (mine, before))

        def body(state: Any) -> Any:
            i, mine, results, stacked, nodes = state
            mine, results = turn(i, mine, results)
            pairs = zip(stacked, results, strict=False)
            stacked = [jax.lax.dynamic_update_index_in_dim(s, r, i, 0) for s, r in pairs]
            nodes = _joined(i, [*nodes], results[len(kept) :], levels)
            return i + 1, mine, results, stacked, nodes

        types = [*map(_bits_of, kept), *summed]
        blank = [jnp.zeros(x.shape, x.dtype) for x in types]
        stacked = [jnp.zeros((self._per_device, *x.shape), x.dtype) for x in types[: len(kept)]]
        nodes = [blank[len(kept) :]] * max(levels, 1)
        state = at(0), blank, stacked, nodes
        _, _, stacked, nodes = self._few_times(self._per_device, body, state)
        return [_unbits(bits, aval) for bits, aval in zip(stacked, kept, strict=True)], nodes[-1]

    def _few_times(self, count: int, body: Callable[..., Any], state: tuple[Any, ...]) -> Any:
        """Runs a loop of at most `count` iterations; XLA does not know how many."""
        most = jnp.minimum(self._count, count)
        return jax.lax.while_loop(lambda s: s[0] < most, body, (jnp.int32(0), *state))[1:]

    def _sums(self, pieces: Sequence[Array]) -> list[Array]:
        """Returns sums over all replicas; XLA does not connect the additions with their readers.

        XLA's all-reduce of two devices may return either zero, and either NaN.
        """
        return list(map(canonical, self._added(pieces)))

    def _added(self, pieces: Sequence[Array]) -> list[Array]:
        totals = [self._sum.exchanged(of_device) for of_device in pieces]
        waiting = [total for total in totals if not isinstance(total, jax.Array)]
        if not waiting:
            return [total for total in totals if isinstance(total, jax.Array)]
        like = jax.eval_shape(lambda: [add_up() for add_up in waiting])
        blank = [jnp.zeros(x.shape, x.dtype) for x in like]
        body = lambda s: (s[0] + 1, [add_up() for add_up in waiting])  # noqa: E731
        added = iter(self._few_times(1, body, (blank,))[0])
        return [total if isinstance(total, jax.Array) else next(added) for total in totals]


def _joined(i: Any, nodes: list[list[Array]], sums: list[Array], levels: int) -> list[list[Array]]:
    """Adds the sums of a replica to the nodes of the tree that wait for them.

    Args:
        i: Index of the replica on this device.
        nodes: The last complete node of each level below the root, then of the root.
        sums: What the replica contributes.
        levels: The level of the root.
    """
    if not levels:
        return [sums]
    top = levels - 1
    completed = jax.lax.population_count(i ^ (i + 1)) - 1  # the level of the node that is complete
    for level in range(levels + 1 if sums else 0):
        at = min(level, top)

        def body(state: Any, level: int = level, below: Any = nodes[:at]) -> Any:
            # XLA would compute what does not depend on the iteration before the loop.
            (done, node), total, below = jax.lax.optimization_barrier((state, sums, below))
            for left in [*below, *([node] if level == levels else [])]:
                total = list(map(add, left, total))
            return ~done, total

        # A loop, because XLA:CPU copies all operands of a `cond` (JAX 0.10.2 and 0.12.0.1).
        is_next = lambda state, level=level: ~state[0] & (completed == level)  # noqa: E731
        _, nodes[at] = jax.lax.while_loop(is_next, body, (jnp.bool_(False), nodes[at]))
    return nodes


def _is_key(aval: Any) -> bool:
    return jnp.issubdtype(aval.dtype, jax.dtypes.extended)


def _bits(value: Any) -> Any:
    """Returns the key data of keys, whose rows JAX cannot write, and other arrays as they are."""
    return jax.random.key_data(value) if _is_key(value) else value


def _bits_of(aval: Any) -> Any:
    """Returns the type of `_bits`."""
    return jax.eval_shape(_bits, jax.ShapeDtypeStruct(aval.shape, aval.dtype))


def _unbits(bits: Array, aval: Any) -> Array:
    """Returns what `_bits` has converted."""
    return keys_like(bits, aval) if _is_key(aval) else bits
