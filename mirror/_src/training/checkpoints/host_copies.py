"""Copies of arrays on the host, for checkpoints; PRNG keys become `KeyData`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mirror._src.base.errors import expected
from mirror._src.base.types import ARRAY_LIKE

RESERVED = "__metadata__"
"""The name that an array in a file cannot have."""


@dataclass(frozen=True, eq=False)
class KeyData:
    """The data of PRNG keys."""

    impl: str
    data: np.ndarray

    def keys(self) -> jax.Array:
        """Returns the keys."""
        return jax.random.wrap_key_data(jnp.asarray(self.data), impl=self.impl)


def on_host(arrays: Mapping[str, Any]) -> dict[str, np.ndarray | KeyData]:
    """Copies arrays to the host. The caller may donate the buffers afterwards."""
    for name, value in arrays.items():
        _check_array(name, value)
    items = {name: _impl_and_data(value) for name, value in arrays.items()}
    datas = jax.device_get({name: data for name, (_, data) in items.items()})  # concurrently
    copies = {name: _copy(np.asarray(data)) for name, data in datas.items()}
    return {
        name: copies[name] if impl is None else KeyData(impl, copies[name])
        for name, (impl, _) in items.items()
    }


def _copy(data: np.ndarray) -> np.ndarray:
    """Copies to C order and native byte order, which the name of a dtype does not include."""
    return np.array(data, data.dtype.newbyteorder("="), order="C")


def _impl_and_data(value: Any) -> tuple[str | None, Any]:
    """Returns the PRNG implementation, if the value holds keys, and the array of one replica."""
    if isinstance(value, KeyData):
        return value.impl, value.data
    impl = None
    if isinstance(value, jax.Array):
        if jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
            impl, value = str(jax.random.key_impl(value)), jax.random.key_data(value)
        value = value.addressable_data(0) if value.is_fully_replicated else value
    return impl, value


def _check_array(name: Any, value: Any) -> None:
    if not isinstance(name, str) or name == RESERVED:
        raise ValueError(expected("name", name, f"a string other than {RESERVED!r}"))
    if isinstance(value, np.ndarray | np.generic):
        is_number = jax.dtypes.issubdtype(value.dtype, np.number) or value.dtype == bool
        is_valid = is_number and value.dtype.char not in "gG"  # JAX has no long double
    else:
        is_valid = isinstance(value, (*ARRAY_LIKE, KeyData))
    if not is_valid:
        raise TypeError(expected(name, value, "an array of numbers or PRNG keys"))
