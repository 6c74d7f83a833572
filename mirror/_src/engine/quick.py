"""`QuickCall`: repeats an earlier call with new arguments, without Python work per leaf.

JAX's C++ code flattens the arguments and finds the executable by their structure, shapes and
dtypes. A call that JAX rejects takes the full path, `Runner._run`, which checks every leaf and
raises errors that name the leaf. This module checks only what JAX accepts although it must not run:

- Leaves on other devices: JAX would compile the program again for them.
- NumPy arrays: JAX reads their memory while the step runs, when the caller may overwrite it.
- Donated arrays that are deleted or passed twice: one device rejects them while the other devices
  wait in a collective, until XLA ends the process after 40 s.

Leaves that the last call returned, or that it received at the same position, are not checked again;
see `unchanged_arguments`.
"""

import itertools
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any
from weakref import ref

import jax

from mirror._src.devices.transfer import any_deleted, require_not_lost
from mirror._src.engine.arguments import ObjectPlaceholder
from mirror._src.engine.call import Call
from mirror._src.engine.compiled import MeshProgram
from mirror._src.engine.executor import SignatureChanged
from mirror._src.engine.nnx.table import ObjectTable
from mirror._src.engine.program import StepProgram
from mirror._src.engine.unchanged_arguments import ArgumentHistory, RecentResults, Ref

_REJECTIONS = (SignatureChanged, TypeError, ValueError, OverflowError, RuntimeError)
_FAILURES = ("UNKNOWN:", "INTERNAL:", "UNAVAILABLE:", "ABORTED:", "DEADLINE_EXCEEDED:")
_MAX_COMPARED = 8  # leaves that are compared with all others one by one, in C


class SignatureMissed(Exception):
    """Raised if a call does not match the earlier call and must take the full path."""


class QuickCall:
    """Repeats an earlier call of a function.

    Args:
        call: The earlier call.
        program: Program of that call.
        objects: Records of the nnx objects.
        are_placed: Returns whether arrays are on the replicas' devices. The first argument lists
            the positions of per-replica arrays.
        copy_shared: Copies the leaves at some positions that share memory with other arrays.
        recent_results: Returns the results of a program and of those that have run last.
        note: Notes a launch for the other processes, with the number of leaves of the objects, the
            other leaves, and the positions of those that may be new; None in a single process.
        misses: Number of calls of the function so far that did not match the call before them.
    """

    def __init__(
        self,
        call: Call,
        program: StepProgram,
        objects: ObjectTable,
        are_placed: Callable[[Sequence[int], list[Any]], bool],
        copy_shared: Callable[[StepProgram, list[Any], list[Any], Iterable[int]], None],
        recent_results: Callable[[StepProgram], Sequence[RecentResults]],
        note: Callable[[StepProgram, int, list[Any], Sequence[int]], None] | None = None,
        misses: int = 0,
    ) -> None:
        args, _ = call.tree
        assert isinstance(program.compiled, MeshProgram)
        self.program = program
        self._launch = program.compiled.launch_again
        self._num_args = len(args)
        leaves = call.layout.dynamic_leaves(call.leaves)
        self._per_replica = call.layout.per_replica
        self._mirrored = sorted(set(range(len(leaves))).difference(self._per_replica))
        self._shapes = [leaves[i].shape for i in self._per_replica]
        self._structure = call.structure
        self._objects = [i for i, arg in enumerate(args) if isinstance(arg, ObjectPlaceholder)]
        self._trees = [i for i, arg in enumerate(args) if not isinstance(arg, ObjectPlaceholder)]
        self._treedef: Any = jax.tree.structure([args[i] for i in self._trees])
        self._table = objects
        self._are_placed = are_placed
        self._copy_shared = copy_shared
        self._note = note
        self._recent_results = recent_results
        self._history = ArgumentHistory(self._mirrored)
        self._last_state: Ref | None = None  # weak: the state may be a whole trained model
        self.misses = misses

    @property
    def is_worthwhile(self) -> bool:
        """Whether few calls miss: a miss costs more than the checks of the full path."""
        return self.program.is_rare(self.misses)

    def __call__(self, args: Sequence[Any]) -> Any:
        """Runs the step and returns its results.

        Raises:
            SignatureMissed: If the step did not run because the call does not match.
        """
        if len(args) != self._num_args:
            raise SignatureMissed
        trees, state, record = list(args), list[Any](), None
        if self._structure is not None:
            record = self._table.last([args[i] for i in self._objects])
            if record is None or record.structure is not self._structure:
                raise SignatureMissed
            if record.unchecked:
                raise SignatureMissed
            state, trees = record.last or [], [args[i] for i in self._trees]
        leaves, treedef = jax.tree.flatten(trees)
        outputs: list[Any] = []
        is_noting = False
        try:
            # Inside `try`: `==` of static fields of the user's own classes may raise.
            if treedef != self._treedef:
                raise SignatureMissed
            new_positions = self._check(leaves, state)
            if self._note is not None:
                is_noting = True
                self._note(self.program, len(state), leaves, new_positions)
                is_noting = False
            self._launch(state + leaves, outputs)
            if record is not None:
                self.program.write_state(record, state, outputs)
                self._last_state = ref(record.last)
        except BaseException as error:
            if outputs:
                if record is not None:  # an interrupt must not leave a model without its arrays
                    self.program.write_state(record, state, outputs)
            elif isinstance(error, _REJECTIONS) and not is_noting and not _is_failure(error):
                require_not_lost(self.program.label, state + leaves)
                raise SignatureMissed from error
            raise
        return self.program.results_of(outputs)

    def _check(self, leaves: list[Any], state: list[Any]) -> Sequence[int]:
        """Checks the leaves that are new in this call, such as the leaves of the batch.

        Returns the positions of those that may be new and are not per-replica.
        """
        new_positions: Sequence[int] = self._mirrored
        foreign: Sequence[int] = ()
        # If another program wrote the objects' state, one of the leaves may now be part of it, and
        # would be donated. Every leaf is checked then.
        is_last = not state or (self._last_state is not None and self._last_state() is state)
        expected = self._history.find(leaves) if is_last else None
        if expected is not None:
            new_positions, foreign = expected.new_positions, expected.foreign_positions
        donates = bool(state or self.program.donated)
        unsure = [*new_positions, *foreign, *self._per_replica]
        if donates and _is_any_repeated(leaves, unsure, state):
            raise SignatureMissed
        rows = [leaves[i] for i in self._per_replica]
        new_leaves = [leaves[i] for i in new_positions]
        if not self._are_placed(range(len(rows)), rows + new_leaves) or any_deleted(leaves):
            raise SignatureMissed
        # Checked here because JAX would trace the step before it notices another shape, and some
        # batches are shorter than the others.
        if [row.shape for row in rows] != self._shapes:
            raise SignatureMissed
        if donates and new_positions:
            self._copy_shared(self.program, state, leaves, new_positions)
        if new_positions:
            recent = self._recent_results(self.program)
            self._history.update(leaves, recent, self.program.is_rare)
        return new_positions


def _is_any_repeated(leaves: list[Any], positions: Sequence[int], state: list[Any]) -> bool:
    """Whether the leaf at one of the positions is also passed elsewhere."""
    arrays = state + leaves
    if len(positions) > _MAX_COMPARED:
        return len(set(map(id, arrays))) < len(arrays)
    # Not by `id`, which costs 0.8 us per array; see `unchanged_arguments`.
    return any(
        sum(map(operator.is_, arrays, itertools.repeat(leaf))) > 1
        for leaf in map(leaves.__getitem__, positions)
    )


def _is_failure(error: BaseException) -> bool:
    """Whether a launch failed, as opposed to rejecting its arguments."""
    text = str(error)
    if "KeyboardInterrupt" in text:  # raised inside JAX's C++ code, which converts it
        return True
    if isinstance(error, jax.errors.JaxRuntimeError):
        return not text.startswith("INVALID_ARGUMENT")
    # If a process of a job on CPUs has died, the others get another class than JAX's (JAX 0.10.2):
    # ValueError("UNKNOWN: Gloo all-reduce failed: ...").
    return isinstance(error, ValueError) and text.startswith(_FAILURES)
