"""Batches on the host: their named and checked arrays, and what to do with an uneven batch."""

from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import jax
import jax.numpy as jnp
import numpy as np

from mirror._src.base.errors import describe, expected, listing
from mirror._src.base.foreign_arrays import is_packed, is_sparse, to_array
from mirror._src.base.naming import keys
from mirror._src.base.types import PyTree, is_numeric, long_fix
from mirror._src.devices.transfer import host_view, require_fits
from mirror._src.engine.per_replica import PerReplica, is_per_replica

Remainder: TypeAlias = Literal["error", "drop", "pad"]


class HostBatch(NamedTuple):
    """A validated global batch.

    Attributes:
        number: Index of the batch in the source, from 0.
        names: Name of each leaf, for messages.
        leaves: JAX or NumPy arrays of shape `(size, ...)`.
        treedef: Structure of the tree.
        size: Number of examples.
        state: State of the source after this batch, or None.
    """

    number: int
    names: tuple[str, ...]
    leaves: tuple[Any, ...]
    treedef: Any
    size: int
    state: dict[str, Any] | None = None

    def map(self, fn: Callable[[Any], Any]) -> PyTree:
        """Returns the tree with `fn` applied to each leaf."""
        return self.treedef.unflatten(map(fn, self.leaves))

    def part(self, rows: slice) -> "HostBatch":
        """Returns some of the examples of the batch."""
        leaves = tuple(leaf[rows] for leaf in self.leaves)
        return self._replace(leaves=leaves, size=len(range(self.size)[rows]))


def host_batches(
    batches: Iterator[PyTree],
    advice: str,
    state: Callable[[], dict[str, Any] | None] = lambda: None,
) -> Iterator[HostBatch]:
    """Yields the batches of one pass after validating them.

    Args:
        batches: The batches of the source.
        advice: The line of code that makes batches of the source, for messages.
        state: Returns the state of the source.

    Raises:
        ValueError: If a batch has no arrays, contains scalars, has leaves of different leading
            sizes, does not have the structure of the first batch, or contains integers that do not
            fit 32 bits while 64-bit types are disabled.
        TypeError: If a leaf is not an array of numbers.
    """
    first: HostBatch | None = None
    for number, tree in enumerate(batches):
        batch = host_batch("batch", tree, advice, number)._replace(state=state())
        first = first or batch
        require_integers_fit(batch)
        _require_same_structure(first, batch)
        yield batch


def host_batch(root: str, tree: PyTree, advice: str = "", number: int = 0) -> HostBatch:
    """Validates one batch, called `root` in messages; see `host_batches`."""
    items, treedef = jax.tree_util.tree_flatten_with_path(tree, is_leaf=_is_leaf)
    if not items:
        raise ValueError(f"{root} is {describe(tree)}, which contains no arrays. Yield arrays.")
    names = tuple(root + keys(path) for path, _ in items)
    named = zip(names, items, strict=True)
    leaves = tuple(_rows(name, path, leaf, advice) for name, (path, leaf) in named)
    sizes = {leaf.shape[0] for leaf in leaves}
    if len(sizes) > 1:
        received = ", ".join(map("{}: {}".format, names, map(describe, leaves)))
        raise ValueError(
            f"The leaves of a batch have different leading sizes: {received}. The first axis of "
            "every leaf must be the batch axis. If a leaf is a list of rows, stack it: "
            "np.stack(rows)."
        )
    return HostBatch(number, names, leaves, treedef, sizes.pop())


def _is_leaf(value: Any) -> bool:
    return is_per_replica(value) or is_packed(value) or is_sparse(value)


def require_integers_fit(batch: HostBatch) -> None:
    """Rejects integers that would change on the devices, before anything pads or transfers them.

    Raises:
        ValueError: If a leaf contains one.
    """
    for name, leaf in zip(batch.names, batch.leaves, strict=True):
        require_fits(name, leaf)


def array_of(name: str, leaf: Any) -> Any:
    """Returns a leaf as an array of numbers, of NumPy unless JAX has it on other devices.

    Raises:
        TypeError: If it is a `PerReplica`, or of a dtype that JAX does not support.
        ValueError: If it is a deleted array.
    """
    if isinstance(leaf, PerReplica):
        raise TypeError(
            f"{name} is a PerReplica, but distribute_dataset expects global batches. Pass the "
            "dataset itself, not its distributed batches."
        )
    is_traced = isinstance(leaf, jax.core.Tracer)
    if isinstance(leaf, jax.Array) and not is_traced and leaf.is_deleted():
        raise ValueError(
            f"{name} has been deleted: its buffer was donated to an earlier step (donate_argnums). "
            "Yield a new array every time, or keep the data in NumPy arrays."
        )
    array = to_array(name, leaf)
    if isinstance(array, jax.Array):
        return host_view(array)
    if not is_numeric(array.dtype):
        fix = "Yield numbers; encode text first."
        if array.dtype == object:
            fix = "All rows must have the same length; encode text first."
            if array.ndim == 0:
                fix = (
                    "A batch is a tree of arrays, such as {'x': x, 'y': y}; for an object, vars(x)."
                )
        raise TypeError(
            f"{name} is {describe(leaf)} of dtype {array.dtype}, which JAX does not support. "
            f"{long_fix(array, fix)}"
        )
    return array


def shape_on_devices(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    """Returns the spec of a host array once on the devices: 64 bits need `jax_enable_x64`."""
    on_devices = jax.dtypes.canonicalize_dtype(dtype) if is_numeric(dtype) else dtype
    return jax.ShapeDtypeStruct(shape, on_devices)


def _rows(name: str, path: Any, leaf: Any, advice: str) -> Any:
    """Returns the leaf as an array with a batch axis."""
    in_list = path and isinstance(path[-1], jax.tree_util.SequenceKey)
    if in_list and isinstance(leaf, int | float | complex) and not isinstance(leaf, np.generic):
        raise ValueError(
            f"{name} is the scalar {leaf!r}, because a list of Python numbers is a tree of scalars."
            " Convert it to an array: np.asarray(list), with rows of the same length. "
            + (advice or "For a Hugging Face dataset, use dataset.with_format('numpy').")
        )
    array = array_of(name, leaf)
    if array.ndim == 0:
        fix = advice or (
            "If the data yield single examples, batch them: DataLoader(dataset, batch_size=32), "
            "dataset.batch(32), or mirror.data.from_arrays(arrays, 32)."
        )
        raise ValueError(
            f"{name} is the scalar {leaf!r}. Each leaf of a batch needs a leading batch axis. "
            f"{fix} Pass a value that all examples share as another argument, "
            "strategy.run(step, (batch, x)), or for each of them, np.full(batch_size, x)."
        )
    return array


def _require_same_structure(first: HostBatch, batch: HostBatch) -> None:
    if first.treedef == batch.treedef:
        return
    missing = [f"{name} is missing" for name in first.names if name not in batch.names]
    new = [f"{name} is new" for name in batch.names if name not in first.names]
    changes = missing + new or [f"it was {first.treedef}", f"it is {batch.treedef}"]
    raise ValueError(
        f"Batch {batch.number} has a different structure than batch {first.number}:\n"
        f"{listing(changes)}\nEvery batch must have the same keys."
    )


def require_remainder(remainder: Any) -> None:
    """Checks the argument `remainder`.

    Raises:
        ValueError: If it is unknown.
    """
    if remainder not in get_args(Remainder):
        raise ValueError(expected("remainder", remainder, "one of 'error', 'drop', 'pad'"))


def is_kept(batch: HostBatch, num_replicas: int, remainder: Remainder) -> bool:
    """Whether the batch is distributed.

    Raises:
        ValueError: If it cannot be split evenly, and `remainder` is `"error"` or it is the first.
    """
    if remainder == "pad" or (batch.size and batch.size % num_replicas == 0):
        return True
    if remainder == "error" or batch.number == 0:
        raise ValueError(_indivisible(batch, num_replicas, remainder))
    return False


def padded_size(first_size: int, divisor: int) -> int:
    """Returns the padded batch size: the first size rounded up to a multiple, at least one."""
    return max(-(-first_size // divisor) * divisor, divisor)


def grown(size: int, needed: int, divisor: int) -> int:
    """Returns the padded size of the next batch: few different ones in a pass.

    The first batch determines it. If a later one is larger, it is doubled, so that the step is
    compiled again only a few times.

    Args:
        size: The padded size so far; 0 before the first batch.
        needed: Size of the next batch.
        divisor: The padded size is a multiple of this.
    """
    if not size:
        return padded_size(needed, divisor)
    while size < needed:
        size *= 2
    return size


def reject_keys(batch: HostBatch) -> None:
    """Rejects arrays of PRNG keys.

    Raises:
        TypeError: If a leaf is one.
    """
    for name, leaf in zip(batch.names, batch.leaves, strict=True):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            raise TypeError(
                f"{name} is {describe(leaf)}: PRNG keys cannot be padded. Yield integer seeds and "
                "create the keys in the step, or use a batch size that can be split evenly."
            )


def padded(leaf: Any, full: int) -> np.ndarray:
    """Repeats the last row up to the full size, which cannot introduce NaN or Inf."""
    widths = [(0, full - leaf.shape[0])] + [(0, 0)] * (leaf.ndim - 1)
    return np.pad(np.asarray(leaf), widths, mode="edge" if len(leaf) else "constant")


def _indivisible(batch: HostBatch, n: int, remainder: Remainder) -> str:
    what = f"{batch.names[0]} in batch {batch.number} is {describe(batch.leaves[0])}"
    if batch.size == 0:
        return (
            f"{what}, which has 0 examples. Every batch needs at least {n}, one per replica. Set "
            "remainder='drop' to skip empty batches."
        )
    advice = (
        ". remainder='drop' would skip this batch, but it is the first: nothing would be trained."
        if remainder == "drop"
        else ", or set `remainder`: distribute_dataset(dataset, remainder='pad') yields "
        "(batch, mask); remainder='drop' skips the batch."
    )
    return (
        f"{what}: {batch.size} examples cannot be split evenly across {n} replicas. Use a batch "
        f"size of {nearest_multiples(batch.size, n)}{advice}"
    )


def nearest_multiples(size: int, n: int) -> str:
    """Returns the multiples of `n` on both sides of a size, for messages: `8 or 12`."""
    below = size // n * n
    return f"{below} or {below + n}" if below else str(n)
