"""What the executors have in common: one program of flat leaves, compiled with its shardings."""

import abc
import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, final

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr

from mirror._src.devices.launch import is_needed, launch
from mirror._src.devices.replicas import Kind, ReplicaDevices
from mirror._src.executors.callbacks import CallbackGuard
from mirror._src.executors.collectives import extremes
from mirror._src.executors.shards import ShardedUpdate
from mirror._src.program.evaluate import Lowering, Rules
from mirror._src.program.flat import has_effects
from mirror._src.program.jaxprs import arrays_in
from mirror._src.program.shards import Shards
from mirror._src.program.trace import abstract, abstract_row, context_token
from mirror._src.utils import interrupts
from mirror._src.utils.types import Array

Outputs = tuple[Any, ...]
_AT_ONCE = contextlib.nullcontext()


class SignatureChanged(Exception):
    """JAX asks for a program with leaves, or in a context, that were not proved."""


class Variant(NamedTuple):
    """What the replicas of one set of shapes run.

    Attributes:
        proved: The replica program that was proved: this very object is evaluated.
        finish: The program after it, of the same inputs and then the outputs of `proved`.
        avals: Shapes and dtypes of the inputs.
        replicas: The replicas that run it.
    """

    proved: ClosedJaxpr
    finish: ClosedJaxpr
    avals: Sequence[jax.ShapeDtypeStruct]
    replicas: Sequence[int]


class ReplicaProgram(NamedTuple):
    """What is to be compiled.

    Attributes:
        name: The name in profiles and compilation logs.
        variants: One for each set of shapes that replicas have.
        inputs: How the replicas hold each input.
        outputs: How they are to hold each output.
        context: The context that it was traced in, see `context_token`.
        donated: Positions of the inputs whose buffers are donated.
        guard: Keeps what host callbacks raise; `None` if the program has none.
        shards: What of the program is sharded; `None`: nothing.
    """

    name: str
    variants: Sequence[Variant]
    inputs: Sequence[Kind]
    outputs: Sequence[Kind]
    context: object
    donated: Sequence[int] = ()
    guard: CallbackGuard | None = None
    shards: Shards | None = None

    def require_context(self) -> None:
        """Raises `SignatureChanged` in another context than the one it was traced in."""
        if context_token() is not self.context:
            raise SignatureChanged


class CompiledProgram(abc.ABC):
    """A replica program that is ready to run."""

    @abc.abstractmethod
    def __call__(self, leaves: Sequence[Any], outputs: list[Any]) -> None:
        """Runs it.

        Args:
            leaves: mirrored arrays, and arrays or `UnstackedArrays` that hold the replicas' own.
            outputs: an empty list; holds the outputs from the moment they are there, of the same
                kinds, and possibly something more at its end.
        """


class Executor(abc.ABC):
    """Runs replica programs on the replicas' devices.

    Attributes:
        replicas: those devices.
        reduces_on: where collectives are reduced; `None`: among the devices themselves.
        pack_bytes: All-reduces of at most this many bytes that do not depend on each other travel
            in one buffer.
        can_shard: Whether it runs programs with sharded inputs and outputs.
    """

    reduces_on: jax.Device | None = None
    can_shard = False

    def __init__(self, replicas: ReplicaDevices, pack_bytes: int = 0) -> None:
        self.replicas = replicas
        self.pack_bytes = pack_bytes

    @abc.abstractmethod
    def compile(self, program: ReplicaProgram) -> CompiledProgram:
        """Makes a program ready; XLA may compile it only when it first runs."""


class MeshExecutor(Executor):
    """Runs replica programs as one program over the mesh of the devices.

    Args:
        replicas: the devices, of one type.
        collectives: whether replicas communicate in the programs.
        pack_bytes: As of `Executor`.

    Attributes:
        needs_row: Whether each replica must have its own of one input at least.
    """

    needs_row = True

    def __init__(
        self, replicas: ReplicaDevices, *, collectives: bool = True, pack_bytes: int = 0
    ) -> None:
        super().__init__(replicas, pack_bytes)
        # One device needs no rendezvous, and an accelerator has a queue of its own.
        self._bounded = replicas.on_host and collectives and is_needed()
        self._filler: Any = None

    @abc.abstractmethod
    def _mapped(
        self,
        replica: Callable[..., Outputs],
        inputs: Sequence[Kind],
        outputs: Sequence[Kind],
        guard: CallbackGuard | None,
    ) -> Callable[..., Outputs]:
        """A function of all replicas' leaves that runs `replica` for each.

        Args:
            replica: Runs one.
            inputs: How the replicas hold each input.
            outputs: How they are to hold each output.
            guard: As of `ReplicaProgram`.
        """

    def _rules(self, guard: CallbackGuard | None) -> Rules:
        """The operations of a replica program that are replaced inside the mapping."""
        return {**extremes(self.replicas.axis_name), **(guard.rules if guard else {})}

    def _lowering(self, arrays: Mapping[int, Any], rules: Rules) -> Lowering:
        """What evaluates a replica program inside the mapping; arguments as of `Lowering`."""
        return Lowering(arrays, rules, self.pack_bytes)

    @final
    def compile(self, program: ReplicaProgram) -> "MeshProgram":
        """See `Executor.compile`. All replicas have one set of shapes."""
        (variant,) = program.variants
        # Arrays that the step closed over are inputs like others: the program does not hold a copy
        # as a constant, and they have the types of the mapping (JAX 0.10 and 0.12 reject an
        # operation on arrays of the scope alone inside `jax.pmap`).
        held = {id(array): array for each in variant[:2] for array in arrays_in(each)}
        rules = self._rules(program.guard)
        update = None
        if program.shards is not None:
            n, axis_name = len(self.replicas), self.replicas.axis_name
            update = ShardedUpdate(program.shards, axis_name, n, self.pack_bytes)
        start = len(program.inputs)

        def replica(*leaves: Any) -> Sequence[Any]:
            own = leaves[:start]
            arrays = dict(zip(held, leaves[start:], strict=True))
            lowering = self._lowering(arrays, rules)
            if update is None:
                found = lowering.in_turn(variant[:2], own)
            else:
                found = update.evaluate(lowering, own)
            _require_proved(found, variant.finish, program.outputs, len(self.replicas))
            return found

        def check(leaves: Sequence[Any]) -> None:
            program.require_context()
            pairs = zip(leaves, program.inputs, strict=True)
            types = [abstract_row(x) if kind.is_own else abstract(x) for x, kind in pairs]
            if types != list(variant.avals):
                raise SignatureChanged

        return self.compile_function(
            program.name,
            replica,
            [*program.inputs, *(Kind() for _ in held)],
            program.outputs,
            program.donated,
            guard=program.guard,
            check=check,
            held=list(map(self.replicas.mirror, held.values())),
            ends_in_python=any(map(_ends_in_python, variant[:2])),
        )

    @final
    def compile_function(
        self,
        name: str,
        fn: Callable[..., Sequence[Any]],
        kinds: Sequence[Kind],
        output_kinds: Sequence[Kind],
        donated: Sequence[int],
        *,
        guard: CallbackGuard | None = None,
        check: Callable[[Sequence[Any]], None] = lambda _: None,
        held: Sequence[Array] = (),
        ends_in_python: bool = False,
    ) -> "MeshProgram":
        """Makes a program of one replica's function of flat leaves.

        Args:
            name: As of `ReplicaProgram`, like what follows.
            fn: One replica's function, which returns a flat sequence.
            kinds: How the replicas hold each input.
            output_kinds: How they are to hold each output.
            donated: Positions of the inputs whose buffers are donated.
            guard: Keeps what host callbacks raise.
            check: Called with the leaves each time that JAX traces the program.
            held: Arrays that every launch gets as its last inputs.
            ends_in_python: Whether JAX runs Python between each launch and its results.
        """
        # Something must be mapped over; a step without such an input gets an unused row of zeros.
        fill = self.needs_row and not any(kind.is_own for kind in kinds)
        if fill and self._filler is None:
            rows = np.zeros((len(self.replicas),), np.int32)
            self._filler = self.replicas.stack(rows)
        bounded = self._bounded

        def replica(*leaves: Any) -> Outputs:
            outputs = fn(*leaves[:-1]) if fill else fn(*leaves)
            return (*outputs, jnp.zeros((), jnp.int8)) if bounded else tuple(outputs)

        inputs = [*kinds, *([Kind(is_own=True)] if fill else [])]
        outputs = [*output_kinds, *([Kind()] if bounded else [])]
        mapped = self._mapped(replica, inputs, outputs, guard)
        num_own = len(kinds) - len(held)

        def named(*leaves: Any) -> Any:  # pmap's own `lower` knows no donation
            check(leaves[:num_own])
            return mapped(*leaves)

        named.__name__ = name
        # With the shardings said, a number, a NumPy array and an array not yet placed are all the
        # same program.
        compiled = jax.jit(
            named,
            in_shardings=tuple(map(self.replicas.sharding, inputs)),
            out_shardings=tuple(map(self.replicas.sharding, outputs)),
            donate_argnums=tuple(donated),
        )
        more = [*held, *([self._filler] if fill else [])]
        return MeshProgram(compiled, more, bounded, ends_in_python=ends_in_python)


@final
class MeshProgram(CompiledProgram):
    """A replica program that is one program of XLA's."""

    def __init__(
        self,
        compiled: Any,
        more: Sequence[Array],
        bounded: bool,
        *,
        ends_in_python: bool = False,
    ) -> None:
        self._ends_in_python = ends_in_python
        self._compiled = compiled
        self._more = list(more)
        self._bounded = bounded

    def __call__(self, leaves: Sequence[Any], outputs: list[Any]) -> None:
        """See `CompiledProgram`; on host devices a token comes out at the end."""
        with interrupts.DeferredInterrupts():  # a first call ends in Python, after the launch
            launch(self._compiled, [*leaves, *self._more], outputs, bounded=self._bounded)

    def launch_again(self, leaves: list[Any], outputs: list[Any]) -> None:
        """Runs it as `__call__` does, where it is compiled already."""
        with interrupts.DeferredInterrupts() if self._ends_in_python else _AT_ONCE:
            launch(self._compiled, leaves + self._more, outputs, bounded=self._bounded)

    def lower(self, leaves: Sequence[Any]) -> jax.stages.Lowered:
        """The program lowered for these leaves, for its text and its memory analysis."""
        return self._compiled.lower(*leaves, *self._more)


def _ends_in_python(program: ClosedJaxpr) -> bool:
    """Whether JAX wraps results, random keys, or looks after effects, when it has launched it."""
    types = [var.aval.dtype for var in program.jaxpr.outvars if hasattr(var.aval, "dtype")]
    has_keys = any(jax.dtypes.issubdtype(dtype, jax.dtypes.extended) for dtype in types)
    return has_keys or has_effects(program.effects)


def _require_proved(
    outputs: Sequence[Any], program: ClosedJaxpr, kinds: Sequence[Kind], num_replicas: int
) -> None:
    """Refuses results of other shapes or dtypes than what was proved.

    Raises:
        NotImplementedError: An operation has another meaning inside the executor's mapping.
    """
    for output, var, kind in zip(outputs, program.jaxpr.outvars, kinds, strict=True):
        found: Any = jax.typeof(output)
        proved: Any = var.aval
        shape = list(proved.shape)
        if kind.axis is not None:
            shape[kind.axis] //= num_replicas
        if (found.shape, found.dtype) != (tuple(shape), proved.dtype):
            raise NotImplementedError(
                f"a result is {found.str_short()} where {proved.str_short()} was proved"
            )
