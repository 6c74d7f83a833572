"""Global batches on the host: named leaf by leaf, and refused where they are none."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from mirror._src.data.foreign import to_array
from mirror._src.utils.errors import describe, listing
from mirror._src.utils.naming import keys
from mirror._src.utils.types import PyTree
from mirror._src.values.per_replica import PerReplica, is_numeric, is_per_replica


class HostBatch(NamedTuple):
    """A global batch that has been checked.

    Attributes:
        number: which of the source's batches it is, from 0.
        names: what messages call each leaf.
        leaves: arrays `(size, ...)`: JAX's own, or NumPy's.
        treedef: the structure of the tree.
        size: how many examples there are.
    """

    number: int
    names: tuple[str, ...]
    leaves: tuple[Any, ...]
    treedef: Any
    size: int

    def map(self, fn: Callable[[Any], Any]) -> PyTree:
        """The tree, of what `fn` makes of each leaf."""
        return self.treedef.unflatten(map(fn, self.leaves))

    def without(self, count: int) -> "HostBatch":
        """The batch without its first examples; itself without none."""
        if not count:
            return self
        leaves = tuple(leaf[count:] for leaf in self.leaves)
        return self._replace(leaves=leaves, size=self.size - count)


def host_batches(batches: Iterator[PyTree], advice: str) -> Iterator[HostBatch]:
    """The batches of one pass, each checked by itself and for the structure of the first.

    Args:
        batches: what the source yields.
        advice: the line that makes batches of the source, for messages.

    Raises:
        ValueError: a batch has no arrays, scalars, leaves of different leading sizes, or another
            structure than the first.
        TypeError: a leaf is no array of numbers.
    """
    first: HostBatch | None = None
    for number, tree in enumerate(batches):
        batch = host_batch("batch", tree, advice, number)
        first = first or batch
        _require_same_structure(first, batch)
        yield batch


def host_batch(root: str, tree: PyTree, advice: str = "", number: int = 0) -> HostBatch:
    """One batch, checked, which messages call `root`; see `host_batches`."""
    found, treedef = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_per_replica)
    if not found:
        raise ValueError(f"{root} is {describe(tree)}, which holds no arrays. Yield some.")
    names = tuple(root + keys(path) for path, _ in found)
    named = zip(names, found, strict=True)
    leaves = tuple(_rows(name, path, leaf, advice) for name, (path, leaf) in named)
    sizes = {leaf.shape[0] for leaf in leaves}
    if len(sizes) > 1:
        received = ", ".join(map("{}: {}".format, names, map(describe, leaves)))
        raise ValueError(
            f"The leaves of a batch have different leading sizes: {received}. The first axis is "
            "the batch axis of every leaf. A list is no axis: join rows of one shape, np.stack."
        )
    return HostBatch(number, names, leaves, treedef, sizes.pop())


def array_of(name: str, leaf: Any) -> Any:
    """A leaf as an array of numbers: JAX's own, or NumPy's of whatever it is.

    Raises:
        TypeError: it is a `PerReplica`, or nothing that JAX has arrays for.
        ValueError: it is an array that has been deleted.
    """
    if isinstance(leaf, PerReplica):
        raise TypeError(f"{name} is a PerReplica. distribute_dataset takes global batches.")
    is_traced = isinstance(leaf, jax.core.Tracer)
    if isinstance(leaf, jax.Array) and not is_traced and leaf.is_deleted():
        raise ValueError(
            f"{name} is an array that has been deleted: a step gave up its buffer "
            "(donate_argnums). Yield a fresh one, or keep NumPy arrays."
        )
    array = to_array(name, leaf)
    if not isinstance(array, jax.Array) and not is_numeric(array.dtype):
        fix = "Join rows of one length" if array.dtype == object else "Yield numbers"
        raise TypeError(
            f"{name} is {describe(leaf)} of dtype {array.dtype}, which JAX has no arrays for. "
            f"{fix}; encode text before."
        )
    return array


def _rows(name: str, path: Any, leaf: Any, advice: str) -> Any:
    """The leaf as an array with a batch axis."""
    in_list = path and isinstance(path[-1], jax.tree_util.SequenceKey)
    if in_list and isinstance(leaf, int | float | complex) and not isinstance(leaf, np.generic):
        raise ValueError(
            f"{name} is the scalar {leaf!r}: a list of Python numbers is no array. Yield arrays, "
            "np.asarray(list), of rows of one length. "
            + (advice or "A Hugging Face dataset does after dataset.with_format('numpy').")
        )
    array = array_of(name, leaf)
    if array.ndim == 0:
        raise ValueError(
            f"{name} is the scalar {leaf!r}. Each leaf of a batch needs a leading batch axis; what "
            "is the same for all examples is a mirrored argument: strategy.run(step, (batch, x))."
            f"{advice and ' ' + advice}"
        )
    return array


def _require_same_structure(first: HostBatch, batch: HostBatch) -> None:
    if first.treedef == batch.treedef:
        return
    missing = [f"{name} is missing" for name in first.names if name not in batch.names]
    new = [f"{name} is new" for name in batch.names if name not in first.names]
    changes = missing + new or [f"it was {first.treedef}", f"it is {batch.treedef}"]
    raise ValueError(
        f"Batch {batch.number} has another structure than batch {first.number}:\n"
        f"{listing(changes)}\nYield the same keys each time."
    )
