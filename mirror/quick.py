"""The way of a call that was made before: find the objects' state, launch, write it back.

JAX's C++ flattens the trees and finds the program by their structure, shapes and dtypes. What it
refuses goes the long way, which looks closely and has the words. What is looked at here is what JAX
does not refuse: leaves that lie elsewhere, for which it would compile again; NumPy arrays, whose
memory it would read while the step runs; donated arrays that are deleted or passed twice, which one
device refuses while the others wait, until XLA ends the process.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from mirror import calls
from mirror.executors.executor import MeshProgram, SignatureChanged
from mirror.objects import ObjectTable
from mirror.step import Call, Program

_REFUSALS = (SignatureChanged, TypeError, ValueError, OverflowError, RuntimeError)
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
        misses: How often calls of this function were not like the one before them.
    """

    def __init__(
        self,
        call: Call,
        program: Program,
        objects: ObjectTable,
        are_placed: Callable[[list[int], list[Any]], bool],
        misses: int = 0,
    ) -> None:
        args, _ = call.tree
        assert isinstance(program.compiled, MeshProgram)
        self.program = program
        self._launch = program.compiled.launch_trees
        self._num_args = len(args)
        self._own = call.layout.per_replica
        leaves = call.layout.dynamic_leaves(call.leaves)
        self._shapes = [leaves[i].shape for i in self._own]
        self._num_leaves = len(leaves)
        self._structure = call.structure
        self._hoisted = [i for i, arg in enumerate(args) if isinstance(arg, calls.Hoisted)]
        self._trees = [i for i, arg in enumerate(args) if not isinstance(arg, calls.Hoisted)]
        self._table = objects
        self._are_placed = are_placed
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
        if len(args) != self._num_args:
            raise Missed
        trees, state, record = args, [], None
        if self._structure is not None:
            record = self._table.last([args[i] for i in self._hoisted])
            if record is None or record.structure is not self._structure:
                raise Missed
            state, trees = record.last or [], [args[i] for i in self._trees]
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
        return self.program.results_of(outputs)

    def _look(self, trees: Sequence[Any], state: list[Any]) -> None:
        leaves = jax.tree.leaves(trees)
        if len(leaves) != self._num_leaves or not self._are_placed(self._own, leaves):
            raise Missed
        # JAX would trace before it finds that they differ. Of batches, some are shorter than most.
        if [leaves[i].shape for i in self._own] != self._shapes:
            raise Missed
        if self.program.donated or state:
            distinct = set(map(id, leaves))
            if len(distinct) < len(leaves) or not distinct.isdisjoint(map(id, state)):
                raise Missed


def _is_failure(error: BaseException) -> bool:
    """Whether a launch failed, and was not refused for its arguments."""
    text = str(error)
    if "KeyboardInterrupt" in text:  # it came out in JAX's C++, which makes another error of it
        return True
    return isinstance(error, jax.errors.JaxRuntimeError) and not text.startswith("INVALID_ARGUMENT")
