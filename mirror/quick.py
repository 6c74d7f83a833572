"""The way of a call that was made before: find the objects' state, launch, write it back.

JAX's C++ flattens the trees and finds the program by their structure, shapes and shardings. Where
it does not find it, or refuses an argument, the call goes the long way, which looks closely and has
the words. Two things are looked at here. The types of the leaves, because JAX would read the
memory of a NumPy array while the step runs. And, on several devices, whether a donated array is
deleted, lies elsewhere, or is passed twice: one device then refuses its part of a launch, and the
others wait for it until XLA ends the process (JAX 0.10 to 0.12).
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from mirror import calls
from mirror.executors.executor import MeshProgram, SignatureChanged
from mirror.objects import ObjectTable
from mirror.step import Call, Program

_REFUSALS = (SignatureChanged, TypeError, ValueError, OverflowError, RuntimeError)
_TAKEN: set[type] = set()
_MISSES_FREE = 4
_RUNS_PER_MISS = 8


class Missed(Exception):
    """The call is not like the one before it."""


class QuickCall:
    """Calls of one function like one that was made.

    Args:
        call: That call.
        program: Its program.
        objects: The records of the nnx objects.
        are_placed: Whether arrays lie on the replicas' devices and are not deleted; the first
            argument says which of them hold the replicas' own.
        num_devices: How many devices a launch occupies.
        misses: How often calls of this function were not like the one before them.
    """

    def __init__(
        self,
        call: Call,
        program: Program,
        objects: ObjectTable,
        are_placed: Callable[[list[int], list[Any]], bool],
        num_devices: int,
        misses: int = 0,
    ) -> None:
        args, _ = call.tree
        assert isinstance(program.compiled, MeshProgram)
        self.program = program
        self._launch = program.compiled.launch_trees
        self._num_args = len(args)
        self._num_changed = program.compiled.form.num_changed if program.compiled.form else 0
        self._own = call.layout.per_replica
        leaves = call.layout.dynamic_leaves(call.leaves)
        self._shapes = [leaves[i].shape for i in self._own]
        self._least = 1 + max(self._own, default=-1)
        self._structure = call.structure
        self._hoisted = [i for i, arg in enumerate(args) if isinstance(arg, calls.Hoisted)]
        self._trees = [i for i, arg in enumerate(args) if not isinstance(arg, calls.Hoisted)]
        self._table = objects
        self._are_placed = are_placed
        self._is_careful = num_devices > 1
        self.misses = misses

    @property
    def is_worth_it(self) -> bool:
        """Whether it is rarely missed; a refused call costs more than a look."""
        return self.misses <= _MISSES_FREE + self.program.runs // _RUNS_PER_MISS

    def __call__(self, args: Sequence[Any]) -> Any:
        """Runs the step.

        Raises:
            Missed: It did not run, and has to go the long way.
        """
        try:
            return self._run(args)
        except Missed:
            self.misses += 1
            raise

    def _run(self, args: Sequence[Any]) -> Any:
        if len(args) != self._num_args:
            raise Missed
        trees, state, record = args, [], None
        if self._structure is not None:
            objects = [args[i] for i in self._hoisted]
            record = self._table.last(objects, are_checked=self._is_careful)
            if record is None or record.structure is not self._structure or record.last is None:
                raise Missed
            state, trees = record.last, [args[i] for i in self._trees]
        self._look(trees, state)
        outputs: list[Any] = []
        try:
            self._launch(state, trees, outputs)
            if record is not None:
                self.program.write_state(record, state, outputs)
        except BaseException as error:
            if outputs:
                if record is not None:  # an interrupt must not leave a model without its arrays
                    self.program.write_state(record, state, outputs)
            elif isinstance(error, _REFUSALS) and not _is_failure(error):
                raise Missed from error
            raise
        self.program.runs += 1
        return outputs[self._num_changed]

    def _look(self, trees: Sequence[Any], state: list[Any]) -> None:
        leaves = jax.tree.leaves(trees)
        types = set(map(type, leaves))
        if not _TAKEN.issuperset(types) and not all(map(_is_taken, types)):
            raise Missed
        # JAX would trace before it finds that they differ. Of batches, some are shorter than most.
        if len(leaves) < self._least or [leaves[i].shape for i in self._own] != self._shapes:
            raise Missed
        if not self._is_careful:
            return
        own = self._own
        if len(types) > 1:  # numbers have no device
            arrays = [i for i, leaf in enumerate(leaves) if isinstance(leaf, jax.Array)]
            leaves, own = [leaves[i] for i in arrays], [arrays.index(i) for i in own]
        if not self._are_placed(own, leaves):
            raise Missed
        if self.program.donated or state:
            distinct = set(map(id, leaves))
            if len(distinct) < len(leaves) or not distinct.isdisjoint(map(id, state)):
                raise Missed


def _is_taken(leaf_type: type) -> bool:
    """Whether JAX may take values of this type as they are: nobody changes them meanwhile.

    A NumPy array is copied the long way: JAX would read its memory while the step runs.
    """
    changes_program = issubclass(leaf_type, bool | jax.core.Tracer)
    taken = issubclass(leaf_type, jax.Array | int | float | complex | np.generic)
    if taken and not changes_program:
        _TAKEN.add(leaf_type)
    return taken and not changes_program


def _is_failure(error: BaseException) -> bool:
    """Whether a launch failed, and was not refused for its arguments."""
    refused = str(error).startswith("INVALID_ARGUMENT")
    return isinstance(error, jax.errors.JaxRuntimeError) and not refused
