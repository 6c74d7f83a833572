"""Compiled programs: how a program is compiled, launched and lowered."""

import abc
import contextlib
import threading
from collections.abc import Sequence
from typing import Any, final
from weakref import WeakValueDictionary

import jax

from mirror._src.base import interrupts
from mirror._src.base.types import Array
from mirror._src.devices.launch import compiling, launch
from mirror._src.devices.launches import Described

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
    ) -> None:
        self._described = described
        self._types = types
        self._is_compiled = False
        self._executable: jax.stages.Compiled | None = None
        self._weak_outputs: dict[tuple[bool, ...], Sequence[bool]] = {}
        self._ends_in_python = ends_in_python
        self._compiled = compiled
        self._more = list(more)
        self._bounded = bounded

    def __call__(self, leaves: Sequence[Any], outputs: list[Any]) -> None:
        """See `CompiledProgram`. If launches are bounded, the last output is a token."""
        arguments = [*leaves, *self._more]
        if self._is_compiled and not self._ends_in_python:
            launch(self._compiled, arguments, outputs, self._described, bounded=self._bounded)
            return
        # A first call runs Python code after the launch, and compiles unless `compile` has.
        with interrupts.DeferredInterrupts(watches=not self._is_compiled):
            launch(
                self._compiled,
                arguments,
                outputs,
                self._described,
                bounded=self._bounded,
                compiles=not self._is_compiled,
            )
        self._is_compiled = True

    def compile(self) -> None:
        """See `CompiledProgram`."""
        self.compile_for([type_.weak_type for type_ in self._types])

    def compile_for(self, weak: Sequence[bool]) -> Sequence[bool]:
        """Compiles the program, and returns whether the type of each output is weak.

        Args:
            weak: Whether the type of each input is weak.
        """
        key = tuple(weak)
        if key not in self._weak_outputs:
            types = [
                type_.update(weak_type=is_weak)
                for type_, is_weak in zip(self._types, weak, strict=True)
            ]
            with interrupts.DeferredInterrupts(watches=True), compiling(self._described):
                traced = self._compiled.trace(*types, *self._more)
                lowered = traced.lower()
                # JAX keeps the executable, which later calls with arrays of these types find; see
                # `tests/engine/test_compiling_in_threads.py`.
                with _cache_entry(self._described.name):
                    self._executable = lowered.compile()
                avals = traced.jaxpr.out_avals
                self._weak_outputs[key] = [getattr(aval, "weak_type", False) for aval in avals]
                self._is_compiled = True
        return self._weak_outputs[key]

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
