"""What the executors have in common: one program of flat leaves, compiled with its shardings."""

import abc
from collections.abc import Callable, Sequence
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np

from mirror._types import Array
from mirror.devices.replicas import ReplicaDevices
from mirror.executors.launch import launch

Outputs = tuple[Any, ...]


class Executor(abc.ABC):
    """Runs replica programs. Abstract: it says what they have in common."""

    def __init__(self, replicas: ReplicaDevices) -> None:
        self.replicas = replicas
        # One device needs no rendezvous, and an accelerator has a queue of its own.
        self._bounded = replicas.on_host
        self._filler: Array | None = None

    @abc.abstractmethod
    def _mapped(
        self, replica: Callable[..., Outputs], inputs: Sequence[bool], outputs: Sequence[bool]
    ) -> Callable[..., Outputs]:
        """A function of all replicas' leaves that runs `replica` for each.

        Args:
            replica: runs one.
            inputs: for each input, whether each replica gets its own row; one of them is true.
            outputs: for each output, whether each replica's own is kept, as a row.
        """

    @final
    def compile(
        self,
        fn: Callable[..., Sequence[Any]],
        per_replica_inputs: Sequence[bool],
        per_replica_outputs: Sequence[bool],
        donated: Sequence[int],
        name: str,
    ) -> "CompiledProgram":
        """Makes a program of `fn`, a function of flat leaves that returns a flat sequence.

        Args:
            fn: runs one replica; traced when the program first runs.
            per_replica_inputs: for each input, whether each replica gets its own row.
            per_replica_outputs: for each output, whether each replica's own is kept.
            donated: positions of the inputs whose buffers are given up.
            name: what profiles and compilation logs call it.
        """
        # Something must be mapped over; a step without such an input gets an unused row of zeros.
        fill = not any(per_replica_inputs)
        if fill and self._filler is None:
            rows = np.zeros((len(self.replicas),), np.int32)
            self._filler = self.replicas.stack(rows)
        bounded = self._bounded

        def replica(*leaves: Any) -> Outputs:
            outputs = fn(*leaves[:-1]) if fill else fn(*leaves)
            return (*outputs, jnp.zeros((), jnp.int8)) if bounded else tuple(outputs)

        inputs = [*per_replica_inputs, *([True] if fill else [])]
        outputs = [*per_replica_outputs, *([False] if bounded else [])]
        mapped = self._mapped(replica, inputs, outputs)

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
        return CompiledProgram(compiled, self._filler if fill else None, bounded)

    def _sharding(self, per_replica: bool) -> jax.sharding.NamedSharding:
        return self.replicas.stacked if per_replica else self.replicas.mirrored


@final
class CompiledProgram:
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
