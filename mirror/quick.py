"""The way of a call that was made before: find the objects' state, launch, write it back.

No argument is looked at but by JAX's C++, which flattens the trees and finds the program by their
structure, shapes and shardings. Where it does not find it, or refuses an argument, the call goes
the long way, which looks closely and has the words. One thing JAX before 0.12 does not check on
several devices, and the process ends: a donated array that is deleted or passed twice.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from mirror import calls
from mirror.executors.executor import MeshProgram, SignatureChanged
from mirror.executors.launch import is_needed
from mirror.objects import ObjectTable
from mirror.step import Call, Program

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
    """

    def __init__(
        self,
        call: Call,
        program: Program,
        objects: ObjectTable,
        are_placed: Callable[[list[int], list[Any]], bool],
        num_devices: int,
    ) -> None:
        args, _ = call.tree
        assert isinstance(program.compiled, MeshProgram)
        self.program = program
        self._launch = program.compiled.launch_trees
        self._num_args = len(args)
        self._num_changed = program.compiled.form.num_changed if program.compiled.form else 0
        self._own = call.layout.per_replica
        self._structure = call.structure
        self._hoisted = [i for i, arg in enumerate(args) if isinstance(arg, calls.Hoisted)]
        self._trees = [i for i, arg in enumerate(args) if not isinstance(arg, calls.Hoisted)]
        self._table = objects
        self._are_placed = are_placed
        self._is_careful = is_needed() and num_devices > 1
        self._misses = 0

    @property
    def is_worth_it(self) -> bool:
        """Whether it is rarely missed; a refused call costs more than a look."""
        return self._misses <= _MISSES_FREE + self.program.runs // _RUNS_PER_MISS

    def __call__(self, args: Sequence[Any]) -> Any:
        """Runs the step.

        Raises:
            Missed: It did not run, and has to go the long way.
        """
        try:
            return self._run(args)
        except (Missed, SignatureChanged, TypeError, ValueError, OverflowError) as error:
            self._misses += 1
            raise Missed from error
        except RuntimeError as error:
            if isinstance(error, jax.errors.JaxRuntimeError):
                raise
            self._misses += 1
            raise Missed from error

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
        if self._is_careful:
            self._look(trees, state)
        outputs: list[Any] = []
        try:
            self._launch(state, trees, outputs)
            if record is not None:
                self.program.write_state(record, state, outputs)
        except BaseException:  # an interrupt must not leave a model without its arrays
            if record is not None and outputs:
                self.program.write_state(record, state, outputs)
            raise
        self.program.runs += 1
        return outputs[self._num_changed]

    def _look(self, trees: Sequence[Any], state: list[Any]) -> None:
        leaves = jax.tree.leaves(trees)
        if not self._are_placed(self._own, leaves):
            raise Missed
        if self.program.donated or state:
            distinct = set(map(id, leaves))
            if len(distinct) < len(leaves) or not distinct.isdisjoint(map(id, state)):
                raise Missed
