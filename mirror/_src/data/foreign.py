"""Data of other libraries: converts tensors to arrays, and advises how to batch datasets."""

import itertools
import sys
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mirror._src.base.errors import describe
from mirror._src.base.types import PyTree

_MAKES_BATCHES = {
    "datasets": "Batch the dataset first: dataset.with_format('numpy').batch(batch_size).",
    "grain": "Batch the dataset first: dataset.batch(batch_size).",
    "tensorflow": "Batch the dataset first: dataset.batch(batch_size).",
    "torch": "Batch the dataset first: torch.utils.data.DataLoader(dataset, batch_size).",
}


def advice(source: Any) -> str:
    """Returns the line of code that batches such a dataset, or `""` if its library is unknown."""
    libraries = [base.__module__.partition(".")[0] for base in type(source).__mro__]
    return next((_MAKES_BATCHES[name] for name in libraries if name in _MAKES_BATCHES), "")


def is_array(value: Any) -> bool:
    """Whether the value is an array of any library."""
    return hasattr(value, "__array__") and (is_nested(value) or hasattr(value, "shape"))


def is_nested(value: Any) -> bool:
    """Whether the value is a nested tensor of torch, which raises an error for its shape."""
    return getattr(value, "is_nested", False) is True


def is_packed(value: Any) -> bool:
    """Whether the value is a `PackedSequence` of torch, a tuple whose parts have no batch axis."""
    kind = type(value)
    return kind.__name__ == "PackedSequence" and kind.__module__.startswith("torch.")


def is_sparse(value: Any) -> bool:
    """Whether the value is a sparse array of JAX or SciPy, whose parts have no batch axis."""
    return type(value).__module__.startswith(("jax.experimental.sparse.", "scipy.sparse."))


def copied(tree: PyTree) -> PyTree:
    """Returns a batch whose buffers are its own: loaders overwrite theirs after each `next`."""
    return jax.tree.map(_copied, tree)


def taken(batches: Iterator[PyTree], count: int) -> list[PyTree]:
    """Returns up to `count` next batches, of which a later `next` overwrites none but the last."""
    group: list[PyTree] = []
    for batch in itertools.islice(batches, count):
        group.append(batch if len(group) == count - 1 else copied(batch))
    return group


def _copied(leaf: Any) -> Any:
    if isinstance(leaf, np.ndarray):
        return leaf.copy()
    torch = sys.modules.get("torch")
    return leaf.clone() if torch is not None and isinstance(leaf, torch.Tensor) else leaf


def to_array(name: str, leaf: Any) -> jax.Array | np.ndarray:
    """Returns JAX arrays unchanged and anything else as NumPy, without a copy where possible.

    Raises:
        TypeError: If NumPy cannot read it, or if it has masked values.
    """
    if isinstance(leaf, jax.Array):
        return leaf
    if isinstance(leaf, np.ndarray):
        is_plain = type(leaf) is np.ndarray and leaf.dtype.isnative
        return leaf if is_plain else _plain(name, leaf)
    if is_nested(leaf) or is_packed(leaf):
        what = "nested tensor" if is_nested(leaf) else "PackedSequence"
        raise TypeError(
            f"{name} is a {what} of torch, whose rows have different lengths. Yield padded rows, "
            "and their lengths as another leaf: torch.nn.utils.rnn.pad_sequence(rows, "
            "batch_first=True)."
        )
    if is_sparse(leaf):
        dense = "x.toarray()" if hasattr(leaf, "toarray") else "x.todense()"
        raise TypeError(
            f"{name} is a sparse array ({type(leaf).__name__}), which cannot be split into rows. "
            f"Yield a dense one: {dense}."
        )
    torch = sys.modules.get("torch")  # a tensor exists only after the import
    if torch is not None and isinstance(leaf, torch.Tensor):
        return _from_torch(name, leaf)
    try:
        return np.asarray(leaf)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(
            f"{name} is {describe(leaf)}, which NumPy cannot convert to an array: {error}. All "
            "rows must have the same shape."
        ) from error


def _plain(name: str, array: np.ndarray) -> np.ndarray:
    """Converts subclasses, such as `np.matrix`, and bytes in the order of other machines.

    Raises:
        TypeError: If a masked array has masked values, which would become ordinary ones.
    """
    if isinstance(array, np.ma.MaskedArray) and np.ma.is_masked(array):
        raise TypeError(
            f"{name} is a masked array with {np.ma.count_masked(array)} masked values, and JAX "
            "ignores masks. Fill it, array.filled(0), and yield the mask as another leaf."
        )
    array = np.asarray(array)
    if array.dtype.isnative:
        return array
    return array.astype(array.dtype.newbyteorder("="))


def _from_torch(name: str, tensor: Any) -> np.ndarray:
    shown = f"{name} is a torch tensor of shape {tuple(tensor.shape)}"
    if tensor.requires_grad:
        raise TypeError(
            f"{shown} with requires_grad=True. PyTorch cannot differentiate through JAX; yield "
            "tensor.detach()."
        )
    if tensor.device.type != "cpu":
        raise TypeError(
            f"{shown} on {tensor.device}. Yield CPU tensors, tensor.cpu(): distribute_dataset "
            "transfers each replica's examples from the host to its device."
        )
    try:
        return _with_small_floats(tensor)
    except (TypeError, RuntimeError) as error:
        raise TypeError(
            f"{shown} ({tensor.dtype}, {tensor.layout}), which NumPy cannot convert to an array: "
            f"{error}. Yield dense tensors of numbers."
        ) from error


def _with_small_floats(tensor: Any) -> np.ndarray:
    """Converts bfloat16 and float8 tensors through their bits: NumPy lacks these dtypes."""
    small = getattr(jnp, str(tensor.dtype).removeprefix("torch."), None)
    if small is None or not tensor.is_floating_point() or np.dtype(small).kind == "f":
        return tensor.numpy()
    bits = {1: "uint8", 2: "int16"}[tensor.element_size()]
    return tensor.view(getattr(sys.modules["torch"], bits)).numpy().view(small)
