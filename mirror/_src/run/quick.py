"""The way of a call that was made before: find the objects' state, launch, write it back.

JAX's C++ flattens the trees and finds the program by their structure, shapes and dtypes. What it
refuses goes the long way, which looks closely and has the words. What is looked at here is what JAX
does not refuse: leaves that lie elsewhere, for which it would compile again; NumPy arrays, whose
memory it would read while the step runs; donated arrays that are deleted or passed twice, which one
device refuses while the others wait, until XLA ends the process. An array that the last call
returned, or that it was passed in the same place, needs no such look.
"""

import itertools
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any
from weakref import ref

import jax

from mirror._src.devices.transfer import any_deleted
from mirror._src.executors.executor import MeshProgram, SignatureChanged
from mirror._src.run.arguments import ObjectPlaceholder
from mirror._src.run.call import Call
from mirror._src.run.familiar import Familiar, Ref
from mirror._src.run.nnx.table import ObjectTable
from mirror._src.run.program import StepProgram

_REFUSALS = (SignatureChanged, TypeError, ValueError, OverflowError, RuntimeError)
_FEW = 8  # compared with all others, one by one


class Missed(Exception):
    """The call is not like the one before it."""


class QuickCall:
    """Calls of one function like one that was made.

    Args:
        call: That call.
        program: Its program.
        objects: The records of the nnx objects.
        are_placed: Whether arrays lie on the replicas' devices; the first argument says which of
            them hold the replicas' own.
        separate: Sees to it that the leaves in some places share no memory with other arrays.
        misses: How often calls of this function were not like the one before them.
    """

    def __init__(
        self,
        call: Call,
        program: StepProgram,
        objects: ObjectTable,
        are_placed: Callable[[Sequence[int], list[Any]], bool],
        separate: Callable[[StepProgram, list[Any], list[Any], Iterable[int]], None],
        misses: int = 0,
    ) -> None:
        args, _ = call.tree
        assert isinstance(program.compiled, MeshProgram)
        self.program = program
        self._launch = program.compiled.launch_again
        self._num_args = len(args)
        leaves = call.layout.dynamic_leaves(call.leaves)
        self._own = call.layout.per_replica
        self._plain = sorted(set(range(len(leaves))).difference(self._own))
        self._shapes = [leaves[i].shape for i in self._own]
        self._structure = call.structure
        self._hoisted = [i for i, arg in enumerate(args) if isinstance(arg, ObjectPlaceholder)]
        self._trees = [i for i, arg in enumerate(args) if not isinstance(arg, ObjectPlaceholder)]
        self._treedef: Any = jax.tree.structure([args[i] for i in self._trees])
        self._table = objects
        self._are_placed = are_placed
        self._separate = separate
        self._familiar: Familiar | None = None
        self._last_state: list[Any] | None = None
        self._before: list[Ref] = []
        self._lessons = 0
        self.misses = misses

    @property
    def is_worth_it(self) -> bool:
        """Whether it is rarely missed; a refused call costs more than a look."""
        return self.program.is_rare(self.misses)

    def __call__(self, args: Sequence[Any]) -> Any:
        """Runs the step.

        Raises:
            Missed: It did not run, and has to go the long way.
        """
        if len(args) != self._num_args:
            raise Missed
        trees, state, record = list(args), [], None
        if self._structure is not None:
            record = self._table.last([args[i] for i in self._hoisted])
            if record is None or record.structure is not self._structure:
                raise Missed
            state, trees = record.last or [], [args[i] for i in self._trees]
        leaves, treedef = jax.tree.flatten(trees)
        outputs: list[Any] = []
        try:
            if treedef != self._treedef:  # static fields of the user's own classes may refuse
                raise Missed
            self._look(leaves, state)
            self._launch(state + leaves, outputs)
            if record is not None:
                self.program.write_state(record, state, outputs)
                self._last_state = record.last
        except BaseException as error:
            if outputs:
                if record is not None:  # an interrupt must not leave a model without its arrays
                    self.program.write_state(record, state, outputs)
            elif isinstance(error, _REFUSALS) and not _is_failure(error):
                raise Missed from error
            raise
        return self.program.results_of(outputs)

    def _look(self, leaves: list[Any], state: list[Any]) -> None:
        """Looks at the leaves that are not where they were: a batch, and little else."""
        strange: Sequence[int] = self._plain
        # What another run left in the objects may be one of the leaves.
        familiar = self._familiar if not state or state is self._last_state else None
        if familiar is not None and familiar.are_back(leaves, self.program.returns[-1]):
            strange = familiar.strange
        donates = bool(state or self.program.donated)
        if donates and _is_any_twice(leaves, [*strange, *self._own], state):
            raise Missed
        rows = [leaves[i] for i in self._own]
        found = [leaves[i] for i in strange]
        if not self._are_placed(range(len(rows)), rows + found) or any_deleted(leaves):
            raise Missed
        # JAX would trace before it finds that they differ. Of batches, some are shorter than most.
        if [row.shape for row in rows] != self._shapes:
            raise Missed
        if donates and strange:
            self._separate(self.program, state, leaves, strange)
        if strange and self.program.is_rare(self._lessons):
            self._familiar = Familiar(leaves, self._plain, self.program.returns[-1], self._before)
            self._before = list(map(ref, leaves))
            self._lessons += 1


def _is_any_twice(leaves: list[Any], strange: Sequence[int], state: list[Any]) -> bool:
    """Whether one of the strange leaves is also passed elsewhere."""
    arrays = state + leaves
    if len(strange) > _FEW:
        return len(set(map(id, arrays))) < len(arrays)
    return any(
        sum(map(operator.is_, arrays, itertools.repeat(leaf))) > 1
        for leaf in map(leaves.__getitem__, strange)
    )


def _is_failure(error: BaseException) -> bool:
    """Whether a launch failed, and was not refused for its arguments."""
    text = str(error)
    if "KeyboardInterrupt" in text:  # it came out in JAX's C++, which makes another error of it
        return True
    return isinstance(error, jax.errors.JaxRuntimeError) and not text.startswith("INVALID_ARGUMENT")
