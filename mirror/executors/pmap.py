"""The pmap executor: n distinct devices of one kind. The one owner of `jax.pmap`.

Mirrored values go in and come out with axis `None`, so there is no stacked copy of the state and
no reading of `y[0]`. `jax.pmap` is `jit(shard_map)` with a Python front (JAX 0.8 and later); the
`jax.jit` around it takes that front off the path of every step after the first.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mirror._types import REPLICA_AXIS, Array
from mirror.devices.replicas import ReplicaDevices
from mirror.executors.launch import launch


class PmapExecutor:
    """Runs replica programs on the devices of the replicas, one replica on each."""

    def __init__(self, replicas: ReplicaDevices) -> None:
        self.replicas = replicas
        # One device needs no rendezvous, and an accelerator has a queue of its own.
        self._bounded = replicas.on_host and len(replicas) > 1
        self._filler: Array | None = None

    def compile(
        self,
        fn: Callable[..., Sequence[Any]],
        per_replica_inputs: Sequence[bool],
        per_replica_outputs: Sequence[bool],
        donated: Sequence[int],
        name: str,
    ) -> "PmapProgram":
        """Makes a program of `fn`, a function of flat leaves that returns a flat sequence.

        Args:
            fn: runs one replica; traced when the program first runs.
            per_replica_inputs: for each input, whether each replica gets its own row.
            per_replica_outputs: for each output, whether each replica's own is kept.
            donated: positions of the inputs whose buffers are given up.
            name: what profiles and compilation logs call it.
        """
        # pmap wants one mapped argument at least; a step without one gets an unused row of zeros.
        fill = not any(per_replica_inputs)
        if fill and self._filler is None:
            rows = np.zeros((len(self.replicas),), np.int32)
            self._filler = self.replicas.stack(rows)
        bounded = self._bounded

        def replica(*leaves: Any) -> tuple[Any, ...]:
            outputs = fn(*leaves[:-1]) if fill else fn(*leaves)
            return (*outputs, jnp.zeros((), jnp.int8)) if bounded else tuple(outputs)

        inputs = [*per_replica_inputs, *([True] if fill else [])]
        outputs = [*per_replica_outputs, *([False] if bounded else [])]
        mapped = jax.pmap(
            replica,
            axis_name=REPLICA_AXIS,
            in_axes=tuple(0 if differs else None for differs in inputs),
            out_axes=tuple(0 if differs else None for differs in outputs),
            devices=self.replicas.devices,
        )

        def program(*leaves: Any) -> Any:  # pmap's own `lower`, which knows no donation, ends here
            return mapped(*leaves)

        program.__name__ = name
        # With the shardings said, a number, a NumPy array and an array not yet placed are all the
        # same program.
        compiled = jax.jit(
            program,
            in_shardings=tuple(map(self._sharding, inputs)),
            out_shardings=tuple(map(self._sharding, outputs)),
            donate_argnums=tuple(donated),
        )
        return PmapProgram(compiled, self._filler if fill else None, bounded)

    def _sharding(self, per_replica: bool) -> jax.sharding.NamedSharding:
        return self.replicas.stacked if per_replica else self.replicas.mirrored


class PmapProgram:
    """A compiled replica program."""

    def __init__(self, compiled: Any, filler: Array | None, bounded: bool) -> None:
        self._compiled = compiled
        self._filler = filler
        self._bounded = bounded

    def __call__(self, leaves: Sequence[Any], outputs: list[Any]) -> None:
        """Runs it; on host devices, one token more than `fn` returned comes out, at the end."""
        if self._filler is not None:
            leaves = [*leaves, self._filler]
        launch(self._compiled, leaves, outputs, bounded=self._bounded)

    def lower(self, leaves: Sequence[Any]) -> jax.stages.Lowered:
        """The program lowered for these leaves, for its text and its memory analysis."""
        if self._filler is not None:
            leaves = [*leaves, self._filler]
        return self._compiled.lower(*leaves)
