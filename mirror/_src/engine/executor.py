"""`Executor`, `MeshExecutor`, and the programs that they compile and launch."""

import abc
import contextlib
import functools
import gc
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, final
from weakref import WeakValueDictionary

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn

from mirror._src.base import interrupts
from mirror._src.base.errors import describe
from mirror._src.base.types import Array
from mirror._src.devices.described import GpuCompilerError
from mirror._src.devices.device_checks import OPTIONS_ON_GPUS, digest_of
from mirror._src.devices.eager_work import bound_eager_work
from mirror._src.devices.launch import is_needed, launch, recorded
from mirror._src.devices.launches import Described, Site
from mirror._src.devices.replicas import Kind, ReplicaDevices
from mirror._src.engine.mapping import (
    STAGED,
    Mapping,
    Outputs,
    map_replicas,
    mapping_for,
    rules_inside,
)
from mirror._src.jaxprs.collective_eqns import has_effects, is_collective, kind_of
from mirror._src.jaxprs.equations import arrays_in, equations, line_within, user_line, with_inner
from mirror._src.jaxprs.primitives import CALLBACK
from mirror._src.jaxprs.trace import abstract, abstract_row, context_token
from mirror._src.passes.callbacks import CallbackGuard, is_callback
from mirror._src.passes.collective_rules import Reduction
from mirror._src.passes.evaluate import Lowering, Rules
from mirror._src.passes.lower import compiler_options
from mirror._src.passes.on_device import CALLED_SEQUENTIALLY, OnDevice, Vectorized, vectorized
from mirror._src.passes.order import COMPILER_OPTIONS, Turns
from mirror._src.passes.program import Program, Settings
from mirror._src.passes.staged import StagedJaxpr
from mirror._src.passes.staging import stage_program

_locks: WeakValueDictionary[str, threading.RLock] = WeakValueDictionary()
_lock = threading.Lock()
_config: Any = jax.config  # JAX 0.10 does not declare its options as attributes


class CompiledProgram(abc.ABC):
    """A replica program that is ready to run."""

    @abc.abstractmethod
    def __call__(self, leaves: Sequence[Any], outputs: list[Any]) -> None:
        """Runs the program.

        Args:
            leaves: Mirrored arrays, and arrays or `UnstackedArrays` of per-replica values.
            outputs: An empty list that receives the outputs as soon as they exist. Extra elements
                may follow them.
        """

    @abc.abstractmethod
    def compile(self) -> None:
        """Makes XLA compile the program before it first runs. Not in two threads at a time."""

    @property
    def peak_bytes(self) -> int | None:
        """Bytes that the compiled program needs on each device; `None` if they are unknown."""
        return None


@final
class MeshProgram(CompiledProgram):
    """A replica program that is a single XLA program.

    Args:
        compiled: The function of `jax.jit`.
        more: Arrays that every launch gets after its leaves.
        bounded: Whether its launches are bounded; see `launch`.
        described: What it is, for reports.
        types: Types of its leaves.
        ends_in_python: Whether JAX runs Python code between a launch and its results.
        is_fixed: Whether every launch has leaves of these types, except that they may be weak.
    """

    def __init__(
        self,
        compiled: Any,
        more: Sequence[Array],
        bounded: bool,
        described: Described,
        types: Sequence[jax.ShapeDtypeStruct],
        *,
        ends_in_python: bool = False,
        is_fixed: bool = False,
    ) -> None:
        self._described = described
        self._types = types
        self._is_compiled = False
        self._executable: jax.stages.Compiled | None = None
        self._ends_in_python = ends_in_python or is_fixed  # as `jax.stages.Compiled` does
        self._is_fixed = is_fixed
        self._compiled = compiled
        self._more = list(more)
        self._bounded = bounded

    def __call__(self, leaves: Sequence[Any], outputs: list[Any]) -> None:
        """See `CompiledProgram`. If launches are bounded, the last output is a token."""
        arguments = [*leaves, *self._more] if self._more else leaves
        program, bounded = self._compiled, self._bounded
        # `jax.jit` would compile again for other weak types, but it alone names what makes a NaN.
        if self._is_fixed and not (jax.debug_nans.value or jax.debug_infs.value):
            self.compile()
            program = self._executable
        if self._is_compiled and not self._ends_in_python:
            launch(program, arguments, outputs, self._described, bounded=bounded)
            return
        # A first call runs Python code after the launch, and compiles unless `compile` has.
        with interrupts.DeferredInterrupts(watches=not self._is_compiled):
            compiles = not self._is_compiled
            launch(program, arguments, outputs, self._described, bounded=bounded, compiles=compiles)
        self._is_compiled = True

    def compile(self) -> None:
        """See `CompiledProgram`."""
        if self._executable is not None:
            return
        with interrupts.DeferredInterrupts(watches=True), recorded(self._described):
            with uncollected():
                lowered = self.lower(self._types)
            # JAX keeps the executable, which later calls with arrays of these types find; see
            # `tests/engine/test_compiling_in_threads.py`.
            with _cache_entry(self._described.name):
                self._executable = lowered.compile()
            self._is_compiled = True

    @property
    def peak_bytes(self) -> int | None:
        """See `CompiledProgram`."""
        memory = None if self._executable is None else self._executable.memory_analysis()
        if memory is None:
            return None
        sizes = memory.argument_size_in_bytes, memory.output_size_in_bytes
        return sum(sizes) - memory.alias_size_in_bytes + memory.temp_size_in_bytes

    def lower(self, leaves: Sequence[Any]) -> jax.stages.Lowered:
        """Returns the program lowered for these leaves, for its text and memory analysis."""
        return self._compiled.lower(*leaves, *self._more)


def _cache_entry(name: str) -> contextlib.AbstractContextManager[Any]:
    """Returns the lock to hold while a program is compiled, or nothing.

    A thread can read a file of JAX's compilation cache of which another one has written the first
    half (JAX 0.10.2, 0.12.0.1). JAX then warns, and compiles. Equal programs have equal names.
    """
    if not _config.jax_compilation_cache_dir:
        return contextlib.nullcontext()
    with _lock:
        return _locks.setdefault(name, threading.RLock())


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Context manager in which Python does not look for cycles: a trace keeps what it makes.

    A step of 100 layers caused two searches of all objects, which took a third of its trace.
    """
    with contextlib.ExitStack() as stack:
        if gc.isenabled():
            stack.callback(gc.enable)
            gc.disable()
        yield


_WITHOUT_RACES = "xla_gpu_exclude_nondeterministic_ops"
_SCATTER_BYTES = "xla_gpu_reduce_scatter_combine_threshold_bytes"
_BUCKET_BYTES = 30 * 2**20  # of gradients, as XLA combines all-reduces


class SignatureChanged(Exception):
    """Raised if JAX traces a program for leaves, or in a context, for which it was not proved."""


class ReplicaProgram(NamedTuple):
    """A program to compile.

    Attributes:
        name: Name in profiles and compilation logs.
        line: Where the step is defined, for reports.
        proved: The replica program that was proved. Executors evaluate exactly this object.
        finish: The program after it. Its inputs are the same inputs, then the outputs of `proved`.
        avals: Shapes and dtypes of the inputs.
        inputs: How the replicas hold each input.
        outputs: How the replicas hold each output.
        context: The context in which it was traced, see `context_token`.
        final: The program after the passes.
        donated: Positions of the inputs whose buffers are donated.
        guard: Stores exceptions of host callbacks. `None` if the program has no callbacks.
        has_races: Whether several devices compute mirrored values by operations that `is_racing`
            describes.
    """

    name: str
    line: str
    proved: ClosedJaxpr
    finish: ClosedJaxpr
    avals: Sequence[jax.ShapeDtypeStruct]
    inputs: Sequence[Kind]
    outputs: Sequence[Kind]
    context: object
    final: Program
    donated: Sequence[int] = ()
    guard: CallbackGuard | None = None
    has_races: bool = False

    @property
    def jaxprs(self) -> tuple[ClosedJaxpr, ClosedJaxpr]:
        """The proved program and the one after it."""
        return self.proved, self.finish

    def require_context(self) -> None:
        """Raises `SignatureChanged` unless the context is the one in which it was traced."""
        if context_token() is not self.context:
            raise SignatureChanged


class Executor(abc.ABC):
    """Runs replica programs on the replicas' devices.

    Attributes:
        name: Name in the log.
        replicas: Devices of the replicas.
        reduces_on: Device on which collectives are reduced. `None` if XLA reduces across devices.
        pack_bytes: Independent all-reduces of at most this many bytes are packed into one buffer.
        kept_bytes: Bytes of gathered weights that programs keep, as for the passes' `Settings`.
    """

    name: str
    reduces_on: jax.Device | None = None
    kept_bytes: int | None = None

    def __init__(self, replicas: ReplicaDevices, pack_bytes: int = 0) -> None:
        n, axis, on_cpus = len(replicas), replicas.axis_name, replicas.on_cpus
        self.replicas = replicas
        self.settings = Settings(n, pack_bytes, axis_name=axis, on_cpus=on_cpus)

    @abc.abstractmethod
    def compile(self, program: ReplicaProgram) -> CompiledProgram:
        """Prepares a program to run. XLA may compile it only when it first runs."""

    def staged(self, program: ReplicaProgram, rules: Rules) -> StagedJaxpr:
        """Returns a program split at its collectives."""
        settings = self.settings._replace(per_replica=[kind.is_own for kind in program.inputs])
        mirrored = [not kind.is_own for kind in program.outputs]
        return stage_program(program.jaxprs, settings, mirrored, rules)


@final
class MeshExecutor(Executor):
    """Runs replica programs as one program over the mesh of the devices.

    Args:
        replicas: Devices of the replicas, of one type.
        kept_bytes: As for `Executor`.
        collectives: Whether the programs contain collectives.
        pack_bytes: As for `Executor`.
        replica_ids: Indices of the replicas, for reports. Defaults to 0, 1, ...
        mapping: How to map over the devices. Defaults to what they require.
        reduction: As for `CollectiveRules`.
    """

    def __init__(
        self,
        replicas: ReplicaDevices,
        *,
        kept_bytes: int | None = None,
        collectives: bool = True,
        pack_bytes: int = 0,
        replica_ids: Sequence[int] | None = None,
        mapping: Mapping | None = None,
        reduction: Reduction | None = None,
    ) -> None:
        super().__init__(replicas, pack_bytes)
        self._reduction = reduction
        self.kept_bytes = kept_bytes
        self.name = self._mapping = mapping or mapping_for(replicas)
        self.replica_ids = range(len(replicas)) if replica_ids is None else replica_ids
        # One device needs no rendezvous, and every accelerator has its own queue.
        self._bounded = replicas.on_host and collectives and is_needed()
        if self._bounded:  # not at the first launch: other threads continue while it compiles
            bound_eager_work()
        self._filler: Any = None

    def compile(self, program: ReplicaProgram) -> MeshProgram:
        """See `Executor.compile`.

        Raises:
            GpuCompilerError: If the devices exist only to compile for, and the step calls the host.
        """
        if self.replicas.only_compile:
            _require_no_callbacks(program)
        # Arrays that the step closes over become inputs. As constants they would be copied into the
        # program, and JAX 0.10 and 0.12 reject operations inside `jax.pmap` on arrays that were
        # placed outside.
        captured = {id(array): array for jaxpr in program.jaxprs for array in arrays_in(jaxpr)}
        rules = rules_inside(self._mapping, self.replicas, program.guard, self._reduction)
        final = program.final
        start = len(program.inputs)
        end = start + len(captured)
        more: list[Any] = [*captured.values()]
        # See `Lowering`. GPUs need no unknown 0.
        late = (op for op in final.everywhere() if op.kind == "gather" and op.inputs[1:])
        delays = bool(final.sharded_inputs) and not self.replicas.on_gpus and any(late)

        def replica(*leaves: Any) -> Sequence[Any]:
            arrays = dict(zip(captured, leaves[start:end], strict=True))
            zero = leaves[-1] if delays else None
            lowering = Lowering(arrays, rules, self.settings, zero)
            results = lowering.run(lowering.joined(final), leaves[:start])
            _require_proved(results, program.finish, program.outputs, len(self.replicas))
            return results

        if self._mapping in STAGED:
            together = self._mapping == "vmap"
            staged = self.staged(program, CALLED_SEQUENTIALLY if together else rules)

            def on_device(*leaves: Any) -> Sequence[Any]:
                arrays = dict(zip(captured, leaves[start:end], strict=True))
                if together:
                    mode: OnDevice = Vectorized(self.replicas, arrays, self._reduction)
                else:
                    mode = Turns(self.replicas, arrays, leaves[-1])
                return mode.run(staged, leaves[:start])

            replica = vectorized(on_device, rules) if together else on_device
        if self._mapping == "in turn":
            if len(self.replicas.distinct) > 1 and not self.replicas.only_compile:
                digest_of(self.replicas.local_devices)
            more.append(np.int32(self.replicas.replicas_per_device))
        elif delays:
            more.append(np.int32(0))

        def check(leaves: Sequence[Any]) -> None:
            program.require_context()
            pairs = zip(leaves, program.inputs, strict=True)
            types = [abstract_row(x) if kind.is_own else abstract(x) for x, kind in pairs]
            if types != list(program.avals):
                raise SignatureChanged

        return self.compile_function(
            program,
            program.name,
            replica,
            [*program.inputs, *(Kind() for _ in more)],
            program.outputs,
            program.donated,
            program.avals,
            sites=functools.partial(sites_of, final),
            check=check,
            captured=[self.replicas.input(array, Kind()) for array in more],
            ends_in_python=any(map(_ends_in_python, program.jaxprs)),
            scatters=bool(final.sharded_inputs),
        )

    def compile_function(
        self,
        program: ReplicaProgram,
        name: str,
        fn: Callable[..., Sequence[Any]],
        kinds: Sequence[Kind],
        output_kinds: Sequence[Kind],
        donated: Sequence[int],
        avals: Sequence[jax.ShapeDtypeStruct],
        *,
        sites: Callable[[], Sequence[Site]] = tuple,
        check: Callable[[Sequence[Any]], None] = lambda _: None,
        captured: Sequence[Array] = (),
        ends_in_python: bool = False,
        scatters: bool = False,
        is_fixed: bool = False,
    ) -> MeshProgram:
        """Returns a program that runs a function of flat leaves on every replica.

        Args:
            program: The program that the function is a part of.
            name: Name in profiles and compilation logs.
            fn: Function of one replica's leaves that returns a flat sequence.
            kinds: How the replicas hold each input.
            output_kinds: How the replicas hold each output.
            donated: Positions of the inputs whose buffers are donated.
            avals: Shape and dtype of each input on one replica, except for `captured`.
            sites: Returns the collectives and host callbacks of the program, for reports.
            check: Called with the leaves whenever JAX traces the program.
            captured: Arrays that every launch gets as its last inputs.
            ends_in_python: Whether JAX runs Python code between a launch and its results.
            scatters: Whether it sums gradients by reduce-scatters.
            is_fixed: As for `MeshProgram`.
        """
        # `jax.pmap` needs an input to map over. A step without a per-replica input gets an unused
        # one.
        fill = self._mapping == "pmap" and not any(kind.is_own for kind in kinds)
        if fill and self._filler is None:
            rows = np.zeros((len(self.replicas),), np.int32)
            self._filler = self.replicas.input(rows, Kind(is_own=True))
        bounded = self._bounded

        def replica(*leaves: Any) -> Outputs:
            outputs = fn(*leaves[:-1]) if fill else fn(*leaves)
            return (*outputs, jnp.zeros((), jnp.int8)) if bounded else tuple(outputs)

        inputs = [*kinds, *([Kind(is_own=True)] if fill else [])]
        outputs = [*output_kinds, *([Kind()] if bounded else [])]
        mapped = map_replicas(self._mapping, replica, self.replicas, inputs, outputs)
        num_arguments = len(kinds) - len(captured)

        def named(*leaves: Any) -> Any:  # the `lower` method of `jax.pmap` ignores donation
            check(leaves[:num_arguments])
            return mapped(*leaves)

        vars(named)["replica"] = replica  # which `mapped` may refer to weakly

        named.__name__ = name
        # With explicit shardings, numbers, NumPy arrays and arrays on other devices all use the
        # same compiled program.
        compiled = jax.jit(
            named,
            in_shardings=tuple(map(self.replicas.sharding, inputs)),
            out_shardings=tuple(map(self.replicas.sharding, outputs)),
            donate_argnums=tuple(donated),
            compiler_options=_compiler_options(self.replicas, program.has_races, scatters),
        )
        more = [*captured, *([self._filler] if fill else [])]
        spans, devices = self.replicas.spans_processes, self.replicas.devices
        described = Described(name, program.line, devices, self.replica_ids, sites, spans)
        types = list(map(self.replicas.array_type, avals, kinds))
        how = {"ends_in_python": ends_in_python, "is_fixed": is_fixed}
        return MeshProgram(compiled, more, bounded, described, types, **how)


def _compiler_options(
    replicas: ReplicaDevices, has_races: bool, scatters: bool
) -> dict[str, Any] | None:
    """Returns XLA's options for one program; `None` for devices that need no options."""
    options: dict[str, Any] = dict(compiler_options(replicas))
    if replicas.in_turn:
        options |= COMPILER_OPTIONS
    if not replicas.on_gpus:
        return options or None
    if replicas.in_turn:
        options |= OPTIONS_ON_GPUS
    elif has_races:  # copies would differ in the last bits, and drift apart from then on
        options[_WITHOUT_RACES] = True
    if scatters and _SCATTER_BYTES not in os.environ.get("XLA_FLAGS", ""):
        # XLA compares its limit with the bytes that each GPU receives, 1/n of the gradients. The
        # buckets would be n times too large, and most would start after the backward pass.
        options[_SCATTER_BYTES] = _BUCKET_BYTES // len(replicas)
    return options or None


def collectives_and_callbacks(
    program: Program,
) -> Iterator[tuple[str, JaxprEqn, Sequence[Any], Sequence[JaxprEqn]]]:
    """Yields the collectives and host callbacks of a program, in its order, once in a loop.

    Of each, its kind, its equation, what is sent, and the equations around it.
    """
    for operation in program.everywhere():
        if operation.collective:
            yield operation.collective, operation.eqn, operation.sent, operation.around
        elif operation.kind == "equation":
            for eqn in with_inner(operation.eqn):
                if is_collective(eqn) or is_callback(eqn):
                    yield kind_of(eqn.primitive.name), eqn, eqn.invars, ()


def sites_of(program: Program) -> list[Site]:
    """Returns the collectives and host callbacks of a program, in its order."""
    return [
        Site(kind, line_within(eqn, around), eqn, is_callback(eqn))
        for kind, eqn, _, around in collectives_and_callbacks(program)
    ]


def _require_no_callbacks(program: ReplicaProgram) -> None:
    """Rejects host callbacks, which JAX lowers only for devices that exist (JAX 0.10.2).

    Raises:
        GpuCompilerError: If the program has one.
    """
    eqns = [eqn for jaxpr in program.jaxprs for eqn in equations(jaxpr.jaxpr)]
    lines = [user_line(eqn) for eqn in eqns if eqn.primitive.name in CALLBACK]
    if lines:
        raise GpuCompilerError(
            f"{program.name} calls Python on the host at {lines[0]}, which JAX cannot compile "
            "without the GPU: remove it, for example jax.debug.print, or omit --gpu."
        )


def _ends_in_python(program: ClosedJaxpr) -> bool:
    """Whether JAX runs Python code after a launch, to wrap PRNG keys or to track effects."""
    types = [var.aval.dtype for var in program.jaxpr.outvars if hasattr(var.aval, "dtype")]
    has_keys = any(jax.dtypes.issubdtype(dtype, jax.dtypes.extended) for dtype in types)
    return has_keys or has_effects(program.effects)


def _require_proved(
    outputs: Sequence[Any], program: ClosedJaxpr, kinds: Sequence[Kind], num_replicas: int
) -> None:
    """Checks that results have the shapes and dtypes of the proved program.

    Raises:
        NotImplementedError: If they differ, because an operation has a different meaning inside the
            executor's mapping.
    """
    for i, (output, var, kind) in enumerate(
        zip(outputs, program.jaxpr.outvars, kinds, strict=True)
    ):
        aval: Any = jax.typeof(output)
        proved: Any = var.aval
        shape = list(proved.shape)
        if kind.axis is not None:
            shape[kind.axis] //= num_replicas
        if (aval.shape, aval.dtype) != (tuple(shape), proved.dtype):
            raise NotImplementedError(
                f"output {i} of the compiled step is {describe(aval)}, but the proved step returns "
                f"{describe(proved)}"
            )
