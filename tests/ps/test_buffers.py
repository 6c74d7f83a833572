"""Buffers: slices come back as they were, in NumPy and in compiled functions."""

import jax
import numpy as np
import pytest

from mirror._src.ps.messages import BufferLayout
from mirror._src.ps.placement import Slice

SHAPES = [(), (3,), (0, 5), (2, 3, 4), (200, 100), (16384,), (16385,), (1,), (4, 0)]
DTYPES = ["float32", "bfloat16", "float16"]
SLICES = [
    Slice(f"{dtype}.{i}", 0, shape[0] if shape else 1, shape, dtype, "trained")
    for i, shape in enumerate(SHAPES)
    for dtype in DTYPES
]
CASES = {"mixed": SLICES, "none": [], "empty": SLICES[6:9], "one": SLICES[:1]}


def values_of(slices):
    rng = np.random.default_rng(0)
    return {p.leaf: np.asarray(rng.normal(size=p.shape)).astype(p.dtype) for p in slices}


def test_values_come_back(subtests):
    for case in CASES:
        with subtests.test(case=case):
            slices = CASES[case]
            layout, values = BufferLayout(slices), values_of(slices)
            buffers = layout.pack_np(values)
            assert sum(buffer.nbytes for buffer in buffers) == layout.nbytes
            traced = jax.jit(layout.pack)(values)
            for one, other in zip(buffers, traced, strict=True):
                np.testing.assert_array_equal(one, other)
                assert one.dtype == other.dtype
                assert one.ndim == 1
            for found in (layout.unpack(buffers), jax.jit(layout.unpack)(buffers)):
                assert found.keys() == values.keys()
                for name, value in values.items():
                    np.testing.assert_array_equal(found[name], value)
                    assert (found[name].shape, found[name].dtype) == (value.shape, value.dtype)


def test_small_slices_travel_together_and_large_ones_alone():
    layout = BufferLayout(SLICES)
    large = sum(part.nbytes > 64 << 10 for part in SLICES)
    assert 0 < large < len(SLICES) - len(DTYPES)
    assert len(layout.pack_np(values_of(SLICES))) == len(DTYPES) + large


def test_unpacked_values_are_views():
    layout = BufferLayout(SLICES)
    buffers = layout.pack_np(values_of(SLICES))
    for value in layout.unpack(buffers).values():
        assert not value.size or any(np.shares_memory(value, buffer) for buffer in buffers)


def test_buffers_of_other_slices_are_refused():
    with pytest.raises(ValueError, match=r"reshape|zip"):
        BufferLayout(SLICES).unpack([np.zeros(3, np.float32)])
