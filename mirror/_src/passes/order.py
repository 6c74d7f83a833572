"""The pass `order`: the replicas of a device run in turn, and sums have one order.

It follows `staging`, which has split the program at its collectives. Results have the same bits on
any number of devices. `tests/laws/test_bits.py` holds this.

The order is a binary tree over the indices of the replicas: a node of size 2**l covers the replicas
[i * 2**l, (i + 1) * 2**l) that exist, and adds its two halves. A device has a block of replicas. It
computes the largest nodes inside its block, its pieces. If each device has one piece, and their
number is a power of two, XLA adds the pieces of two devices, then of two pairs, and so on: a sum of
two has only one order. Otherwise the devices exchange the pieces, and each computes the rest of the
tree for its part of the array.

The same bits on any number of devices take the same machine code for what a replica computes. So
XLA must not connect it with arrays whose size depends on the number of devices: each replica's turn
is a loop of one iteration, of a number that XLA does not know. `optimization_barrier` is not enough
(XLA:CPU removes it before it fuses operations; JAX 0.10.2 and 0.12.0.1).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn, Literal

from mirror._src.base.types import Array, is_half, keys_like
from mirror._src.devices.replicas import ReplicaDevices
from mirror._src.jaxprs.primitives import dtype_of
from mirror._src.passes.collective_rules import canonical, sum_of_parts, uses_gloo
from mirror._src.passes.evaluate import Rule, Rules, bind
from mirror._src.passes.on_device import OfReplica, OnDevice, Values
from mirror._src.passes.program import Value
from mirror._src.passes.staged import Collective, Computation

_WHOLE_BYTES = 1 << 18  # up to here, all-reduces are cheaper than to scatter and to gather


class Node(NamedTuple):
    """The replicas from `start`, a multiple of `size`, up to `start + size` that exist."""

    start: int
    size: int

    def halves(self, num: int) -> "list[Node]":
        """Returns the halves that contain replicas."""
        half = self.size // 2
        nodes = (Node(self.start, half), Node(self.start + half, half))
        return [node for node in nodes if node.start < num]


def _root(num: int) -> Node:
    """Returns the root of the tree over `num` replicas."""
    return Node(0, 1 << (num - 1).bit_length())


def _pieces(start: int, stop: int, num: int) -> list[Node]:
    """Returns the largest nodes whose replicas are all in [start, stop)."""

    def search(node: Node) -> list[Node]:
        end = min(node.start + node.size, num)
        if end <= start or node.start >= stop:
            return []
        if node.start >= start and end <= stop:
            return [node]
        return [found for half in node.halves(num) for found in search(half)]

    return search(_root(num))


def add(left: Array, right: Array) -> Array:
    """Adds, and rounds to the dtype."""
    return _rounded(left + right)


def _rounded(total: Array) -> Array:
    """Rounds to the dtype: XLA keeps sums of small floats in float32 until they are stored."""
    if not is_half(total.dtype):
        return total
    info = jnp.finfo(total.dtype)
    if info.bits == 16:
        return jax.lax.reduce_precision(total, info.nexp, info.nmant)
    if info.bits < 8:  # which XLA:CPU rounds, and cannot cast to bits (JAX 0.10.2 and 0.12.0.1)
        return total
    # XLA removes a cast to bits and back, but does not know that this adds none.
    bits = jax.lax.bitcast_convert_type(total, jnp.uint8)
    return jax.lax.bitcast_convert_type(bits | jax.lax.population_count(bits) >> 7, total.dtype)


def _total_of(node: Node, num: int, known: Callable[[Node], Array | None]) -> Array:
    """Returns the sum of a node, given the sums of some nodes below it."""
    value = known(node)
    if value is not None:
        return value
    halves = [_total_of(half, num, known) for half in node.halves(num)]
    return halves[0] if len(halves) == 1 else add(*halves)


class TreeSum:
    """The sum over all replicas.

    Args:
        num: Number of replicas.
        per_device: Number of replicas of a device.
        axis: Name of the axis of the devices.
        over_gloo: Whether gloo runs the collectives, whose reduce-scatter returns wrong values from
            time to time (jax#40830; JAX 0.10 to 0.12.0.1).

    Attributes:
        depth: If every device computes one node of `2**depth` replicas, this depth.
    """

    def __init__(self, num: int, per_device: int, axis: str, *, over_gloo: bool = False) -> None:
        self._num, self._per_device, self._axis = num, per_device, axis
        self._num_devices = num // per_device
        starts = [i * per_device for i in range(self._num_devices)]
        self._pieces = [_pieces(start, start + per_device, num) for start in starts]
        self._slots = max(map(len, self._pieces))
        self._over_gloo = over_gloo
        sizes = {
            tuple((p.start - s, p.size) for p in of)
            for s, of in zip(starts, self._pieces, strict=True)
        }
        self._are_alike = len(sizes) == 1
        self.depth = None
        if per_device & (per_device - 1) == 0:  # a power of two, at multiples of itself
            self.depth = per_device.bit_length() - 1

    def of_rows(self, rows: Array) -> Array:
        """Returns the pieces of this device, `(slots, *shape)`, from `(per_device, *shape)`."""

        def of_device(device: int) -> Callable[[Array], Array]:
            first = device * self._per_device

            def sums(rows: Array) -> Array:
                leaf = lambda node: rows[node.start - first] if node.size == 1 else None  # noqa: E731
                found = [_total_of(piece, self._num, leaf) for piece in self._pieces[device]]
                found += [jnp.zeros_like(found[0])] * (self._slots - len(found))
                return jnp.stack(found)

            return sums

        if self._are_alike:
            return of_device(0)(rows)
        branches = [of_device(device) for device in range(self._num_devices)]
        return jax.lax.switch(jax.lax.axis_index(self._axis), branches, rows)

    def _joined(self, sums: Sequence[Array]) -> Array:
        """Returns the total of the pieces of all devices, in order, with unused slots."""
        index = {
            piece: device * self._slots + slot
            for device, of in enumerate(self._pieces)
            for slot, piece in enumerate(of)
        }
        known = lambda node: sums[index[node]] if node in index else None  # noqa: E731
        return _total_of(_root(self._num), self._num, known)

    def exchanged(self, pieces: Array) -> Array | Callable[[], Array]:
        """Returns the sum of all pieces, or what computes it from values that have been sent.

        Args:
            pieces: The pieces of this device, `(slots, *shape)`.
        """
        n, shape = self._num_devices, pieces.shape[1:]
        if n == self._slots == 1 or not pieces.size:
            return pieces[0]
        if n == 1:
            return lambda: self._joined(list(pieces))
        is_small = pieces[0].size * pieces.dtype.itemsize <= _WHOLE_BYTES
        if self._slots == 1 and n & (n - 1) == 0 and (is_small or not self._over_gloo):
            return sum_of_parts(lambda x: self._in_pairs(x, is_small), pieces[0])
        flat = pieces.reshape(self._slots, -1)
        size = flat.shape[1]
        flat = jax.lax.pad(flat, jnp.zeros((), flat.dtype), ((0, 0, 0), (0, -size % n, 0)))
        of_devices = jnp.swapaxes(flat.reshape(self._slots, n, -1), 0, 1)
        received = jax.lax.all_to_all(of_devices, self._axis, 0, 0, tiled=True)
        parts = received.reshape(n * self._slots, -1)
        total = self._joined(list(parts))
        whole = jax.lax.all_gather(total, self._axis, tiled=True)
        return whole[:size].reshape(shape)

    def _in_pairs(self, value: Array, is_small: bool) -> Array:
        """Adds the values of the devices level by level."""
        n = self._num_devices
        steps = [1 << level for level in range(n.bit_length() - 1)]
        pairs = [[[i, i | step] for i in range(n) if not i & step] for step in steps]
        if is_small:
            for groups in pairs:
                value = _rounded(jax.lax.psum(value, self._axis, axis_index_groups=groups))
            return value
        flat = jax.lax.pad(
            value.reshape(-1), jnp.zeros((), value.dtype), ((0, -value.size % n, 0),)
        )
        for groups in pairs:
            half = jax.lax.psum_scatter(flat, self._axis, axis_index_groups=groups, tiled=True)
            flat = _rounded(half)
        for groups in reversed(pairs):
            flat = jax.lax.all_gather(flat, self._axis, axis_index_groups=groups, tiled=True)
        return flat[: value.size].reshape(value.shape)


# With several devices, XLA merges equal operations before it simplifies, with one device only
# afterwards (the pass `cse` in the pipeline `spmd-cleanup`; JAX 0.10.2 and 0.12.0.1). What it
# simplifies depends on how often a value is used, so that results would differ in the last bits.
# XLA:CPU compiles loops over few bytes in another way (`small-while-loop-hoisting`), and here the
# bytes depend on the number of devices.
COMPILER_OPTIONS = {"xla_disable_hlo_passes": "cse,small-while-loop-hoisting"}


def _find_division(eqn: JaxprEqn) -> Rule | None:
    """Returns the rule for a division by a computed number.

    XLA may multiply by the inverse, and by `rsqrt` for `sqrt`. Whether it does depends on how often
    the divisor is used, but not if the divisor is hidden (JAX 0.10.2 and 0.12.0.1).
    """
    divisor = eqn.invars[1]
    if isinstance(divisor, Literal) or not jnp.issubdtype(dtype_of(divisor), jnp.inexact):
        return None
    return lambda eqn, values: bind(eqn, [values[0], jax.lax.optimization_barrier(values[1])])


RULES: Rules = {"div": _find_division}


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
        pairs = zip(stacked, kept, strict=True)
        return [keys_like(x, aval) if _is_key(aval) else x for x, aval in pairs], nodes[-1]

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
