"""Other libraries' data: tensors as arrays, and what makes batches where there are none."""

import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mirror._src.utils.errors import describe

_MAKES_BATCHES = {
    "datasets": "Distribute batches of it: dataset.with_format('numpy').batch(batch_size).",
    "grain": "Distribute batches of it: dataset.batch(batch_size).",
    "tensorflow": "Distribute batches of it: dataset.batch(batch_size).",
    "torch": "Distribute batches of it: torch.utils.data.DataLoader(dataset, batch_size).",
}


def advice(source: Any) -> str:
    """The line that makes batches of such a dataset; empty for those of no known library."""
    libraries = [base.__module__.partition(".")[0] for base in type(source).__mro__]
    return next((_MAKES_BATCHES[name] for name in libraries if name in _MAKES_BATCHES), "")


def is_array(value: Any) -> bool:
    """Whether the value is one array, of whatever library."""
    return hasattr(value, "__array__") and hasattr(value, "shape")


def to_array(name: str, leaf: Any) -> jax.Array | np.ndarray:
    """JAX's own array as it is, or NumPy's of anything else; the same memory where it can be.

    Raises:
        TypeError: NumPy cannot read it.
    """
    if isinstance(leaf, jax.Array | np.ndarray):
        return leaf
    torch = sys.modules.get("torch")  # who holds a tensor has imported it
    if torch is not None and isinstance(leaf, torch.Tensor):
        return _from_torch(name, leaf)
    try:
        return np.asarray(leaf)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(
            f"{name} is {describe(leaf)}, of which NumPy makes no array: {error}. Yield arrays, "
            "whose rows have one shape."
        ) from error


def _from_torch(name: str, tensor: Any) -> np.ndarray:
    shown = f"{name} is a torch tensor {tuple(tensor.shape)}"
    if tensor.requires_grad:
        raise TypeError(
            f"{shown} that requires grad: torch would have to differentiate through JAX, which it "
            "cannot. Yield tensor.detach()."
        )
    if tensor.device.type != "cpu":
        raise TypeError(
            f"{shown} on {tensor.device}. Each replica's rows go from the host to its own device: "
            "yield CPU tensors, tensor.cpu(), and leave the transfer to distribute_dataset."
        )
    try:
        return _with_small_floats(tensor)
    except (TypeError, RuntimeError) as error:
        raise TypeError(
            f"{shown} of {tensor.dtype}, {tensor.layout}, of which NumPy makes no array: {error}. "
            "Yield dense tensors of numbers."
        ) from error


def _with_small_floats(tensor: Any) -> np.ndarray:
    """NumPy gets bfloat16 and the like as bits: it knows them by JAX's dtypes only."""
    small = getattr(jnp, str(tensor.dtype).removeprefix("torch."), None)
    if small is None or not tensor.is_floating_point() or np.dtype(small).kind == "f":
        return tensor.numpy()
    bits = {1: "uint8", 2: "int16"}[tensor.element_size()]
    return tensor.view(getattr(sys.modules["torch"], bits)).numpy().view(small)
