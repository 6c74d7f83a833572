"""`fingerprint`: a hash of all elements of an array, computed where the array is."""

import jax
import jax.numpy as jnp

from mirror._src.base.types import Array


def fingerprint(leaf: Array) -> Array:
    """Returns two uint32 hashes of an array's bits; changing one element changes the first hash.

    The first hash is the sum of all elements' bits, each multiplied by an odd number that depends
    on its position. Multiplication by an odd number is invertible modulo 2**32, so no change of a
    single element is lost.
    """
    bits = _bits(leaf).ravel()
    position = jax.lax.iota(jnp.uint32, bits.size)
    weight = (position * jnp.uint32(0x9E3779B1)) | jnp.uint32(1)
    mixed = (bits ^ (bits >> 15)) * jnp.uint32(0x85EBCA6B)
    mixed = (mixed ^ (mixed >> 13)) * (weight ^ jnp.uint32(0x27D4EB2E))
    return jnp.stack([jnp.sum(bits * weight), jnp.sum(mixed ^ (mixed >> 16))])


_SMALL_INTEGERS = ("int2", "uint2", "int4", "uint4")


def _bits(leaf: Array) -> Array:
    """Returns the bits of an array as uint32."""
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    if jnp.iscomplexobj(leaf):
        leaf = jnp.stack([leaf.real, leaf.imag])
    if leaf.dtype == jnp.bool_ or leaf.dtype.name in _SMALL_INTEGERS:
        return leaf.astype(jnp.int32).astype(jnp.uint32)
    if leaf.dtype.name == "float4_e2m1fn":  # two elements share a byte, so there is no bitcast
        leaf = leaf.astype(jnp.float32)
    if leaf.dtype.itemsize == 8:
        return jax.lax.bitcast_convert_type(leaf, jnp.uint32)
    unsigned = jnp.dtype(f"uint{leaf.dtype.itemsize * 8}")
    return jax.lax.bitcast_convert_type(leaf, unsigned).astype(jnp.uint32)
