"""Arrays of other libraries, such as tensors of torch, as arrays of NumPy."""

import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mirror._src.base.errors import describe


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


def to_array(name: str, leaf: Any) -> jax.Array | np.ndarray:
    """Returns JAX arrays unchanged and anything else as NumPy, without a copy where possible.

    Raises:
        TypeError: If NumPy cannot read it, or if it has masked values.
    """
    if isinstance(leaf, jax.Array):
        return leaf
    if isinstance(leaf, np.ndarray):
        return leaf if is_plain(leaf) else _plain(name, leaf)
    if is_nested(leaf) or is_packed(leaf):
        what = "nested tensor" if is_nested(leaf) else "PackedSequence"
        raise TypeError(
            f"{name} is a {what} of torch, whose rows have different lengths. Pass padded rows, "
            "and their lengths as another array: torch.nn.utils.rnn.pad_sequence(rows, "
            "batch_first=True)."
        )
    if is_sparse(leaf):
        dense = "x.toarray()" if hasattr(leaf, "toarray") else "x.todense()"
        raise TypeError(
            f"{name} is a sparse array ({type(leaf).__name__}), which cannot be split into rows. "
            f"Pass a dense one: {dense}."
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


def is_plain(array: np.ndarray) -> bool:
    """Whether it is not of a subclass, such as `np.matrix`, and in this machine's byte order."""
    return type(array) is np.ndarray and array.dtype.isnative


def _plain(name: str, array: np.ndarray) -> np.ndarray:
    """Converts subclasses, such as `np.matrix`, and bytes in the order of other machines.

    Raises:
        TypeError: If a masked array has masked values, which would become ordinary ones.
    """
    if isinstance(array, np.ma.MaskedArray) and np.ma.is_masked(array):
        raise TypeError(
            f"{name} is a masked array with {np.ma.count_masked(array)} masked values, and JAX "
            "ignores masks. Fill it, array.filled(0), and pass the mask as another array."
        )
    array = np.asarray(array)
    if array.dtype.isnative:
        return array
    return array.astype(array.dtype.newbyteorder("="))


def _from_torch(name: str, tensor: Any) -> np.ndarray:
    shown = f"{name} is a torch tensor of shape {tuple(tensor.shape)}"
    if tensor.requires_grad:
        raise TypeError(
            f"{shown} with requires_grad=True. PyTorch cannot differentiate through JAX; pass "
            "tensor.detach()."
        )
    if tensor.device.type != "cpu":
        raise TypeError(
            f"{shown} on {tensor.device}. Pass CPU tensors, tensor.cpu(): mirror transfers "
            "each replica's part from the host to its device."
        )
    try:
        return _with_small_floats(tensor)
    except (TypeError, RuntimeError) as error:
        raise TypeError(
            f"{shown} ({tensor.dtype}, {tensor.layout}), which NumPy cannot convert to an array: "
            f"{str(error).rstrip('.')}. Pass dense tensors of numbers."
        ) from error


def _with_small_floats(tensor: Any) -> np.ndarray:
    """Converts bfloat16 and float8 tensors through their bits: NumPy lacks these dtypes."""
    small = getattr(jnp, str(tensor.dtype).removeprefix("torch."), None)
    if small is None or not tensor.is_floating_point() or np.dtype(small).kind == "f":
        return tensor.numpy()
    bits = {1: "uint8", 2: "int16"}[tensor.element_size()]
    return tensor.view(getattr(sys.modules["torch"], bits)).numpy().view(small)
