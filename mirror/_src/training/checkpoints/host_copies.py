"""Copies of arrays on the host, as a checkpoint has them; PRNG keys become `KeyData`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from mirror._src.utils.errors import describe


@dataclass(frozen=True, eq=False)
class KeyData:
    """PRNG keys without JAX: `jax.random.wrap_key_data(data, impl=impl)` makes keys of them."""

    impl: str
    data: np.ndarray


def on_host(arrays: Mapping[str, Any]) -> dict[str, np.ndarray | KeyData]:
    """Copies that nobody else holds: the caller's buffers may be donated next."""
    for name, value in arrays.items():
        _check_array(name, value)
    parts = {name: _parts(value) for name, value in arrays.items()}
    datas = jax.device_get({name: data for name, (_, data) in parts.items()})  # all under way
    copies = {name: _copy(np.asarray(data)) for name, data in datas.items()}
    return {
        name: copies[name] if impl is None else KeyData(impl, copies[name])
        for name, (impl, _) in parts.items()
    }


def _copy(data: np.ndarray) -> np.ndarray:
    """A copy in C order and in the machine's byte order, which names of dtypes do not tell."""
    return np.array(data, data.dtype.newbyteorder("="), order="C")


def _parts(value: Any) -> tuple[str | None, Any]:
    """The kind of PRNG keys, if they are; and the array, of one replica."""
    if isinstance(value, KeyData):
        return value.impl, value.data
    impl = None
    if isinstance(value, jax.Array):
        if jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
            impl, value = str(jax.random.key_impl(value)), jax.random.key_data(value)
        value = value.addressable_data(0) if value.is_fully_replicated else value
    return impl, value


def _check_array(name: Any, value: Any) -> None:
    if not isinstance(name, str) or not all(name.split("/")):
        raise ValueError(f"{name!r} is no name: join parts that are not empty with '/'.")
    if isinstance(value, np.ndarray | np.generic):
        number = jax.dtypes.issubdtype(value.dtype, np.number) or value.dtype == bool
        known = number and value.dtype.char not in "gG"  # long doubles: JAX has none
    else:
        known = isinstance(value, jax.Array | KeyData | int | float | complex)
    if not known:
        raise TypeError(f"{name} is {describe(value)}. Save arrays of numbers, and PRNG keys.")
