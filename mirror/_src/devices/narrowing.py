"""Rejects 64-bit integers that do not fit the 32 bits to which JAX narrows them.

Without `jax_enable_x64`, JAX converts host arrays of 64 bits as it transfers them, and integers
lose their upper bits without a warning: the label `2**32 + 3` becomes 3. Floats are rounded.
"""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from mirror._src.base.errors import describe

ENABLE_64_BITS = "jax.config.update('jax_enable_x64', True)"


def require_fits(name: str | Callable[[], str], leaf: Any) -> None:
    """Checks an array of the user before its transfer; reads only arrays of 64-bit integers.

    Args:
        name: Name of the array for the message, or a function that returns it.
        leaf: A NumPy or JAX array or a number; anything else is ignored.

    Raises:
        ValueError: If an integer would change.
    """
    dtype = getattr(leaf, "dtype", None)
    if dtype is None or dtype not in (np.int64, np.uint64):
        return
    narrow = jax.dtypes.canonicalize_dtype(dtype)
    if narrow == dtype or isinstance(leaf, jax.core.Tracer) or not leaf.size:
        return
    values, limits = np.asarray(leaf), np.iinfo(narrow)
    for value in (values.max(), values.min()):
        if not limits.min <= value <= limits.max:
            name = name if isinstance(name, str) else name()
            raise ValueError(does_not_fit(name, leaf, int(value), str(narrow)))


def does_not_fit(name: str, leaf: Any, value: int, dtype: str) -> str:
    """Returns the message for an integer that does not fit a dtype of 32 bits."""
    contains = "" if isinstance(leaf, int) else f" and contains {value}"
    return (
        f"{name} is {describe(leaf)}{contains}, which does not fit {dtype}, JAX's default for it. "
        f"Pass smaller integers or a float, or enable 64-bit types: {ENABLE_64_BITS}."
    )
