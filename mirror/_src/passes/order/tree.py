"""Sums over all replicas in one order, whatever the number of devices.

The order is a binary tree over the indices of the replicas: a node of size 2**l covers the replicas
[i * 2**l, (i + 1) * 2**l) that exist, and adds its two halves. A device has a block of replicas. It
computes the largest nodes inside its block, its pieces. If each device has one piece, and their
number is a power of two, XLA adds the pieces of two devices, then of two pairs, and so on: a sum of
two has only one order. Otherwise the devices exchange the pieces, and each computes the rest of the
tree for its part of the array.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from mirror._src.base.types import Array
from mirror._src.passes.collective_rules import sum_of_parts

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
    if jnp.issubdtype(total.dtype, jnp.floating) and total.dtype.itemsize < 4:
        info = jnp.finfo(total.dtype)
        return jax.lax.reduce_precision(total, info.nexp, info.nmant)
    return total


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
        if n == self._slots == 1:
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
