"""Checksums of values, which processes compare before a program first runs."""

import jax.numpy as jnp
import numpy as np

from mirror._src.jaxprs.text import checksum

LARGE = 24 * 2**20  # bytes; from 16 MiB on, the device computes the checksum


def test_a_checksum_covers_every_element(subtests):
    for dtype in ("float32", "bfloat16", "int8", "bool"):
        count = LARGE // jnp.dtype(dtype).itemsize
        for size in (1, 1000, *[count] * (dtype in ("float32", "bool"))):
            for kind in (np.array, jnp.array):
                values = np.zeros(size, jnp.dtype(dtype))
                before = checksum(kind(values))
                assert checksum(kind(values)) == before
                for i in {0, size // 2, size - 1}:
                    with subtests.test(msg=f"{kind.__name__} {dtype}[{size}], element {i}"):
                        values[i] = 1
                        assert checksum(kind(values)) != before
                        values[i] = 0
