"""The placement of variables: the rows of each server, as cut by a partitioner."""

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from mirror._src.base.errors import describe, require_int
from mirror._src.base.public_names import set_module

PartitionerLike = Callable[[Sequence[int], Any], int]
"""Returns the number of shards of a variable, given its shape and dtype.

A variable never has more shards than rows, nor more than there are parameter servers, because a
server holds at most one of them.
"""


@set_module("mirror.ps")
class MinSizePartitioner:
    """Cuts a variable into as many shards as have at least `min_shard_bytes` each.

    Args:
        min_shard_bytes: Least size of a shard. Smaller variables stay whole.
        max_shards: Most shards of a variable; `None` means one per parameter server.

    Raises:
        ValueError: If an argument is less than 1.
        TypeError: If an argument is not an integer.

    >>> mirror.ps.MinSizePartitioner(min_shard_bytes=1024)((1000, 4), "float32")
    15
    """

    def __init__(self, min_shard_bytes: int = 256 << 10, max_shards: int | None = None) -> None:
        require_int("min_shard_bytes", min_shard_bytes, fix="For example 256 << 10.")
        if max_shards is not None:
            require_int("max_shards", max_shards, fix="None means one per parameter server.")
        self.min_shard_bytes, self.max_shards = min_shard_bytes, max_shards

    def __call__(self, shape: Sequence[int], dtype: Any) -> int:
        """Returns into how many shards a variable is cut, at least 1."""
        shards = min(_num_bytes(shape, dtype) // self.min_shard_bytes, _rows(shape))
        return max(1, shards if self.max_shards is None else min(shards, self.max_shards))

    def __repr__(self) -> str:
        return f"MinSizePartitioner({self.min_shard_bytes}, max_shards={self.max_shards})"


@set_module("mirror.ps")
class MaxSizePartitioner:
    """Cuts a variable into as few shards as have at most `max_shard_bytes` each.

    A row is never cut, and there is at most one shard per parameter server: shards are larger where
    rows are large or servers are few.

    Args:
        max_shard_bytes: Largest size of a shard.

    Raises:
        ValueError: If the size is less than 1.
        TypeError: If the size is not an integer.

    >>> mirror.ps.MaxSizePartitioner(max_shard_bytes=1024)((1000, 4), "float32")
    16
    """

    def __init__(self, max_shard_bytes: int) -> None:
        require_int("max_shard_bytes", max_shard_bytes, fix="For example 64 << 20.")
        self.max_shard_bytes = max_shard_bytes

    def __call__(self, shape: Sequence[int], dtype: Any) -> int:
        """Returns into how many shards a variable is cut, at least 1."""
        if not (rows := _rows(shape)) or not (size := _num_bytes(shape, dtype)):
            return 1
        rows_per_shard = max(1, self.max_shard_bytes // -(-size // rows))
        return -(-rows // rows_per_shard)

    def __repr__(self) -> str:
        return f"MaxSizePartitioner({self.max_shard_bytes})"


@set_module("mirror.ps")
class FixedShardsPartitioner:
    """Cuts every variable into the same number of shards.

    Args:
        num_shards: Number of shards. Variables with fewer rows have one shard per row, and no
            variable has more shards than there are parameter servers.

    Raises:
        ValueError: If the number is less than 1.
        TypeError: If the number is not an integer.

    >>> mirror.ps.FixedShardsPartitioner(2)((1000, 4), "float32")
    2
    """

    def __init__(self, num_shards: int) -> None:
        require_int("num_shards", num_shards)
        self.num_shards = num_shards

    def __call__(self, shape: Sequence[int], dtype: Any) -> int:
        """Returns into how many shards a variable is cut, at least 1."""
        del dtype
        return max(1, min(self.num_shards, _rows(shape)))

    def __repr__(self) -> str:
        return f"FixedShardsPartitioner({self.num_shards})"


def _rows(shape: Sequence[int]) -> int:
    return shape[0] if shape else 1


def _num_bytes(shape: Sequence[int], dtype: Any) -> int:
    return math.prod(shape) * np.dtype(dtype).itemsize


class Leaf(NamedTuple):
    """A variable of the model that parameter servers hold.

    Attributes:
        name: Its name, for example `layers.0.kernel`.
        shape: Its shape.
        dtype: The name of its dtype.
        kind: `trained` if it has a gradient; `moving` if steps change it without one.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    kind: Literal["trained", "moving"]


class Slice(NamedTuple):
    """Rows `start` to `stop` of a leaf along axis 0; a scalar is the row 0 to 1."""

    leaf: str
    start: int
    stop: int
    shape: tuple[int, ...]
    dtype: str
    kind: Literal["trained", "moving"]

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


class Placement:
    """The slices of each parameter server, at most one of a leaf per server.

    Attributes:
        servers: The slices of each server, in the order of the leaves.
        leaves: All leaves by name.
        tables: Names of the leaves whose touched rows alone travel.
    """

    def __init__(
        self,
        servers: Iterable[Iterable[Slice]],
        leaves: Iterable[Leaf],
        tables: Collection[str] = (),
    ) -> None:
        self.servers = tuple(tuple(slices) for slices in servers)
        self.leaves = {leaf.name: leaf for leaf in leaves}
        self.tables = frozenset(tables)
        self.holders: dict[str, list[tuple[int, Slice]]] = {name: [] for name in self.leaves}
        """For each leaf, the servers that hold its slices, in the order of the rows."""
        for index, slices in enumerate(self.servers):
            for part in slices:
                self.holders[part.leaf].append((index, part))
        for held in self.holders.values():
            held.sort(key=lambda pair: pair[1].start)

    def is_cut(self, leaf: str) -> bool:
        """Whether the rows of a leaf are on several servers."""
        return len(self.holders[leaf]) > 1

    def split(self, values: Mapping[str, np.ndarray]) -> list[dict[str, np.ndarray]]:
        """Returns for each server its rows of the leaves among `values`, as views."""
        return [
            {part.leaf: rows(values[part.leaf], part) for part in slices if part.leaf in values}
            for slices in self.servers
        ]

    def join(
        self,
        parts: Sequence[Mapping[str, Any]],
        concatenate: Callable[[list[Any]], Any] = np.concatenate,
    ) -> dict[str, Any]:
        """Returns whole leaves, given the rows of each server; the inverse of `split`.

        A leaf that is not cut is returned as it is, without a copy. `jnp.concatenate` joins inside
        `jax.jit`.
        """
        leaves = {}
        for name, held in self.holders.items():
            found = [parts[server][name] for server, _ in held if name in parts[server]]
            if found:
                leaves[name] = found[0] if len(held) == 1 else concatenate(found)
        return leaves

    def nbytes(self) -> list[int]:
        """Returns the bytes of the values on each server."""
        return [sum(part.nbytes for part in slices) for slices in self.servers]

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Placement)
            and self.servers == other.servers
            and self.tables == other.tables
        )


def rows(values: Any, part: Slice) -> Any:
    """Returns the rows of a slice from a leaf, or from anything of the same rows."""
    return values[part.start : part.stop] if np.ndim(values) else values


def place(
    leaves: Iterable[Leaf],
    num_ps: int,
    partitioner: PartitionerLike | None,
    *,
    whole: Collection[str] = (),
    tables: Collection[str] = (),
) -> Placement:
    """Places leaves on parameter servers, such that all hold about the same number of bytes.

    A leaf is cut along axis 0 into as many slices as the partitioner says, at most one per row and
    server; the first ones have a row more if the rows do not divide. The leaves with the largest
    slices are placed first, each on the emptiest servers. Then no server ever holds more than
    another one and the largest slice together: whichever `k` servers a leaf of `k` slices goes to,
    they are the `k` emptiest.

    Args:
        leaves: The leaves, with different names.
        num_ps: Number of parameter servers.
        partitioner: Function of shape and dtype that returns a number of slices; `None` cuts no
            leaf.
        whole: Names of leaves that are not cut.
        tables: Names of the leaves whose touched rows alone travel.

    Raises:
        ValueError: If two leaves have one name.
        TypeError: If the partitioner does not return an integer.
    """
    leaves = list(leaves)
    names = [leaf.name for leaf in leaves]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"Two leaves have the name {twice!r}. Give each its own name.")
    cut = [_slices(leaf, 1 if leaf.name in whole else num_ps, partitioner) for leaf in leaves]
    loads = [0] * num_ps
    servers: list[list[tuple[int, Slice]]] = [[] for _ in range(num_ps)]
    largest_first = sorted(enumerate(cut), key=lambda pair: (-pair[1][0].nbytes, pair[0]))
    for position, slices in largest_first:
        emptiest = sorted(range(num_ps), key=lambda server: (loads[server], server))
        # A leaf that is not cut may leave servers out; the slices' sizes descend.
        for server, part in zip(emptiest, slices, strict=False):
            loads[server] += part.nbytes
            servers[server].append((position, part))
    return Placement([[part for _, part in sorted(held)] for held in servers], leaves, tables)


def _slices(leaf: Leaf, most: int, partitioner: PartitionerLike | None) -> list[Slice]:
    """Cuts a leaf by TensorFlow's rule `div`: the first slices have a row more."""
    num_rows = leaf.shape[0] if leaf.shape else 1
    number = 1
    if partitioner is not None and most > 1:
        number = partitioner(leaf.shape, leaf.dtype)
        if isinstance(number, bool) or not isinstance(number, int | np.integer) or number < 1:
            raise TypeError(
                f"`partitioner` must return a positive integer, got {describe(number)} for "
                f"{leaf.name!r}, {leaf.dtype}{list(leaf.shape)}."
            )
    number = max(1, min(int(number), most, num_rows))
    least, longer = divmod(num_rows, number)
    stops = itertools.accumulate(least + (index < longer) for index in range(number))
    slices = []
    for start, stop in itertools.pairwise([0, *stops]):
        shape = (stop - start, *leaf.shape[1:])[: len(leaf.shape)]  # a scalar has no axis
        slices.append(Slice(leaf.name, start, stop, shape, leaf.dtype, leaf.kind))
    return slices
