"""Copies of arrays: mirrored ones that differ, and arrays that must be equal."""

from typing import Any

import jax
import numpy as np

import mirror


def assert_close(got: Any, wanted: Any, tolerance: float = 1e-6) -> None:
    """Checks that the leaves of two trees are equal, up to a part of their values."""
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=tolerance, atol=tolerance)


def mirrored(strategy: mirror.Strategy, copies: list[np.ndarray]) -> jax.Array:
    """Returns a mirrored array with one copy per device, whatever their values."""
    shards = [jax.device_put(c, d) for c, d in zip(copies, strategy.devices, strict=True)]
    sharding = strategy._replicas.mirrored
    return jax.make_array_from_single_device_arrays(np.shape(copies[0]), sharding, shards)


def with_one_bit_flipped(
    strategy: mirror.Strategy, array: np.ndarray, replica: int, byte: int
) -> jax.Array:
    """Returns a mirrored array with one bit flipped in the copy of one replica."""
    host = np.array(array)
    copies = [host.copy() for _ in strategy.devices]
    flat = copies[replica].reshape(-1).view(np.uint8)
    flat[byte % flat.size] ^= 1
    return mirrored(strategy, copies)
