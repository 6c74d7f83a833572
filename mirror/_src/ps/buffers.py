"""The buffers in which the values of a parameter server travel."""

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from mirror._src.base.types import Array
from mirror._src.ps.placement import Slice, rows

_MOST_PACKED_BYTES = 64 << 10


class BufferLayout:
    """Packs slices into flat buffers: small slices of one dtype together, each large one alone.

    One buffer instead of a hundred small arrays is one transfer from a device instead of a hundred.
    Large slices are not packed, because the copy would cost more.

    Args:
        slices: The slices. Their order determines the buffers.
    """

    def __init__(self, slices: Iterable[Slice]) -> None:
        self.slices = tuple(slices)
        packed: dict[str, list[Slice]] = {}
        alone = []
        for part in self.slices:
            if part.nbytes <= _MOST_PACKED_BYTES:
                packed.setdefault(part.dtype, []).append(part)
            else:
                alone.append([part])
        self._groups = [*packed.values(), *alone]

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(part.nbytes for part in self.slices)

    def pack_np(self, values: Mapping[str, np.ndarray]) -> tuple[np.ndarray, ...]:
        """Returns flat buffers with the slices' values; of a slice alone, a view if possible."""
        return tuple(
            values[group[0].leaf].reshape(-1)
            if len(group) == 1
            else np.concatenate([values[part.leaf].reshape(-1) for part in group])
            for group in self._groups
        )

    def unpack_np(self, buffers: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
        """Returns the slices' values by leaf, as views of the buffers."""
        values = {}
        for buffer, group in zip(buffers, self._groups, strict=True):
            start = 0
            for part in group:
                size = math.prod(part.shape)
                values[part.leaf] = buffer[start : start + size].reshape(part.shape)
                start += size
        return values

    def pack(self, values: Mapping[str, Array]) -> tuple[Array, ...]:
        """Does what `pack_np` does with arrays of JAX, inside `jax.jit`."""

        def flat(part: Slice) -> Array:
            return jax.lax.reshape(values[part.leaf], (math.prod(part.shape),))

        # jax.numpy would convert 64-bit arrays to 32 bits where JAX's x64 mode is disabled.
        return tuple(jax.lax.concatenate([*map(flat, group)], 0) for group in self._groups)

    def pack_shared(self, values: Mapping[str, Array]) -> tuple[Array, ...]:
        """Returns the buffers that hold several slices, inside `jax.jit`; see `add_alone`."""
        return self._shared.pack(values)

    def add_alone(
        self, shared: Sequence[np.ndarray], whole: Callable[[str], np.ndarray]
    ) -> tuple[np.ndarray, ...]:
        """Returns all buffers, given the result of `pack_shared`.

        A slice alone in its buffer is a view of the leaf, so that no program has to copy it.

        Args:
            shared: What `pack_shared` returned.
            whole: Returns all rows of a leaf.
        """
        packed = iter(shared)
        return tuple(
            next(packed) if len(group) > 1 else rows(whole(group[0].leaf), group[0]).reshape(-1)
            for group in self._groups
        )

    @functools.cached_property
    def _shared(self) -> "BufferLayout":
        """The layout of the slices that share a buffer."""
        return BufferLayout(part for group in self._groups if len(group) > 1 for part in group)

    def unpack(self, buffers: Sequence[Array]) -> dict[str, Array]:
        """Does what `unpack_np` does with arrays of JAX, inside `jax.jit`."""
        values: dict[str, Any] = {}
        for buffer, group in zip(buffers, self._groups, strict=True):
            start = 0
            for part in group:
                stop = start + math.prod(part.shape)
                values[part.leaf] = jax.lax.reshape(
                    jax.lax.slice(buffer, (start,), (stop,)), part.shape
                )
                start = stop
        return values
