"""What the executors have in common: one program of flat leaves, compiled with its shardings."""

import abc
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, final

import jax
import jax.numpy as jnp
import numpy as np

from mirror._types import Array
from mirror.devices.replicas import ReplicaDevices
from mirror.executors.launch import launch

Outputs = tuple[Any, ...]


class SignatureChanged(Exception):
    """A program was traced anew for leaves that it was not proved for."""


class Variant(NamedTuple):
    """What the replicas of one set of shapes run.

    Attributes:
        fn: one replica's function of flat leaves, which returns a flat sequence.
        avals: shapes and dtypes of its leaves.
        replicas: which replicas run it.
    """

    fn: Callable[..., Sequence[Any]]
    avals: Sequence[jax.ShapeDtypeStruct]
    replicas: Sequence[int]


class ReplicaProgram(NamedTuple):
    """What is to be compiled.

    Attributes:
        name: what profiles and compilation logs call it.
        variants: one for each set of shapes that replicas have.
        per_replica_inputs: for each input, whether each replica gets its own row.
        per_replica_outputs: for each output, whether each replica's own is kept.
        donated: positions of the inputs whose buffers are given up.
    """

    name: str
    variants: Sequence[Variant]
    per_replica_inputs: Sequence[bool]
    per_replica_outputs: Sequence[bool]
    donated: Sequence[int] = ()


class CompiledProgram(abc.ABC):
    """A replica program that is ready to run."""

    @abc.abstractmethod
    def __call__(self, leaves: Sequence[Any], outputs: list[Any]) -> None:
        """Runs it.

        Args:
            leaves: mirrored arrays, and arrays or `Parts` that hold the replicas' own.
            outputs: an empty list; holds the outputs from the moment they are there, of the same
                kinds, and possibly something more at its end.
        """


class Executor(abc.ABC):
    """Runs replica programs on the replicas' devices.

    Attributes:
        replicas: those devices.
        reduces_on: where exchanges are reduced; `None`: among the devices themselves.
    """

    reduces_on: jax.Device | None = None

    def __init__(self, replicas: ReplicaDevices) -> None:
        self.replicas = replicas

    @abc.abstractmethod
    def compile(self, program: ReplicaProgram) -> CompiledProgram:
        """Makes a program ready; XLA may compile it only when it first runs."""


class MeshExecutor(Executor):
    """Runs replica programs as one program over the mesh of the devices.

    Args:
        replicas: the devices, of one type.
        exchanges: whether replicas talk in the programs.
    """

    def __init__(self, replicas: ReplicaDevices, *, exchanges: bool = True) -> None:
        super().__init__(replicas)
        # One device needs no rendezvous, and an accelerator has a queue of its own.
        self._bounded = replicas.on_host and exchanges
        self._filler: Any = None

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
    def compile(self, program: ReplicaProgram) -> "MeshProgram":
        """See `Executor.compile`. All replicas have one set of shapes."""
        (variant,) = program.variants
        fn, per_replica_inputs = variant.fn, program.per_replica_inputs
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
        outputs = [*program.per_replica_outputs, *([False] if bounded else [])]
        mapped = self._mapped(replica, inputs, outputs)

        def named(*leaves: Any) -> Any:  # pmap's own `lower`, which knows no donation, ends here
            return mapped(*leaves)

        named.__name__ = program.name
        # With the shardings said, a number, a NumPy array and an array not yet placed are all the
        # same program.
        compiled = jax.jit(
            named,
            in_shardings=tuple(map(self._sharding, inputs)),
            out_shardings=tuple(map(self._sharding, outputs)),
            donate_argnums=tuple(program.donated),
        )
        return MeshProgram(compiled, self._filler if fill else None, bounded)

    def _sharding(self, per_replica: bool) -> jax.sharding.NamedSharding:
        return self.replicas.stacked if per_replica else self.replicas.mirrored


@final
class MeshProgram(CompiledProgram):
    """A replica program that is one program of XLA's."""

    def __init__(self, compiled: Any, filler: Array | None, bounded: bool) -> None:
        self._compiled = compiled
        self._filler = filler
        self._bounded = bounded

    def __call__(self, leaves: Sequence[Any], outputs: list[Any]) -> None:
        """See `CompiledProgram`; on host devices a token comes out at the end."""
        if self._filler is not None:
            leaves = [*leaves, self._filler]
        launch(self._compiled, leaves, outputs, bounded=self._bounded)

    def lower(self, leaves: Sequence[Any]) -> jax.stages.Lowered:
        """The program lowered for these leaves, for its text and its memory analysis."""
        if self._filler is not None:
            leaves = [*leaves, self._filler]
        return self._compiled.lower(*leaves)
