"""`HostValues`: notes launches, and the values that a host passes to them, for the other processes.

Mirrored inputs that no launch has returned are equal in all processes only if each host computed
the same: a learning rate, an assigned variable, an array that was changed between two steps.
"""

import zlib
from collections.abc import Mapping, Sequence
from typing import Any, final
from weakref import WeakValueDictionary

import jax
import jax.numpy as jnp
import numpy as np

from mirror._src.base.types import Array
from mirror._src.cluster.ledger import Digest, ledger
from mirror._src.devices.launches import has_finished
from mirror._src.devices.op_log import unlogged
from mirror._src.devices.transfer import NoMesh, local_copy
from mirror._src.engine.agreement import require_same_launch
from mirror._src.engine.argument_placer import ArgumentPlacer
from mirror._src.engine.call import Call
from mirror._src.engine.nnx.table import ObjectTable
from mirror._src.engine.program import StepProgram
from mirror._src.engine.unchanged_arguments import ArgumentHistory, RecentResults, exclude_results
from mirror._src.jaxprs.fingerprint import fingerprint

_LARGE = 2**16  # bytes; of larger arrays, the device computes a fingerprint
_fingerprint_of = jax.jit(fingerprint)


@final
class _OnHost:
    """The checksum of a host value, which is copied now and read later."""

    def __init__(self, value: Any, dtype: Any) -> None:
        self._value = np.array(value, dtype)

    def is_ready(self) -> bool:
        """See `Digest`."""
        return True

    def value(self) -> str:
        """See `Digest`."""
        return _checksum(self._value)


@final
class _OnDevice:
    """The checksum of an array, whose buffer the launch may donate."""

    def __init__(self, array: Array) -> None:
        with NoMesh(), unlogged():
            mine = local_copy(array)
            if jnp.issubdtype(mine.dtype, jax.dtypes.prng_key):
                mine = jax.random.key_data(mine)
            self._array = _fingerprint_of(mine) if mine.nbytes > _LARGE else jnp.copy(mine)

    def is_ready(self) -> bool:
        """See `Digest`."""
        return has_finished(self._array)

    def value(self) -> str:
        """See `Digest`."""
        return _checksum(np.asarray(self._array))


def _checksum(value: np.ndarray) -> str:
    data = np.ascontiguousarray(value).reshape(-1).view(np.uint8).data
    return f"{zlib.crc32(data):x}" if value.size else ""


@final
class HostValues:
    """Notes the launches of one strategy in a job of several processes.

    Args:
        objects: Records of the nnx objects.
        placer: Knows the results of recent launches.
    """

    def __init__(self, objects: ObjectTable, placer: ArgumentPlacer) -> None:
        self._objects = objects
        self._placer = placer
        self._known: WeakValueDictionary[int, Array] = WeakValueDictionary()  # by id

    def note(
        self,
        call: Call,
        program: StepProgram,
        passed: Sequence[Any],
        leaves: list[Any],
        *,
        are_compared: bool,
    ) -> None:
        """Notes a launch, right before it begins.

        Args:
            call: The call.
            program: Its program.
            passed: The leaves that the user passed.
            leaves: The same leaves on the devices.
            are_compared: Whether all processes have just compared the values.
        """
        if program.passed is None:
            mirrored = set(range(len(leaves))).difference(call.layout.per_replica)
            program.passed = ArgumentHistory(sorted(mirrored))
        history = program.passed
        new_state = self._objects.unchecked(call.record) if call.record is not None else []
        expected = history.find(leaves)
        positions = history.mirrored if expected is None else expected.new_positions
        new: Sequence[int] = ()
        if positions:
            recent = self._placer.recent_results(program)
            moved = [] if passed is leaves else [i for i in positions if passed[i] is not leaves[i]]
            of_host = {i for i in moved if not isinstance(passed[i], jax.Array)}
            known = {i for i in moved if self._known.get(id(passed[i])) is passed[i]}
            arrays = [i for i in positions if i not in of_host and i not in known]
            new = [*sorted(of_host), *self._unknown(recent, leaves, arrays)]
            history.update(leaves, recent, program.is_rare)
        if are_compared:
            for i in new:
                self._remember(passed[i], leaves[i])
            new, new_state = (), ()
        digests: dict[str, Digest] = {}
        if new or new_state:
            if not program.input_names:
                program.input_names = call.input_names
            names, start = program.input_names, len(call.state)
            digests = {names[i]: _OnDevice(call.state[i]) for i in new_state}
            for i in new:
                digests[names[start + i]] = self._digest(passed[i], leaves[i])
        self._note(program, digests)

    def note_again(
        self, program: StepProgram, start: int, leaves: list[Any], mirrored: Sequence[int]
    ) -> None:
        """Notes a launch of a program like the one before.

        Args:
            program: The program.
            start: Number of leaves of the objects, none of which is new.
            leaves: The other leaves.
            mirrored: Positions of the leaves that may be new and are not per-replica.
        """
        new: Sequence[int] = ()
        if mirrored:
            new = self._unknown(self._placer.recent_results(program), leaves, mirrored)
        names = program.input_names
        digests = {names[start + i]: self._digest(leaves[i], leaves[i]) for i in new}
        self._note(program, digests)

    def _note(self, program: StepProgram, digests: Mapping[str, Digest]) -> None:
        if ledger.changes_program(program.identity):
            require_same_launch(program.identity, program.label)
        ledger.note(program.identity, program.label, digests)

    def _unknown(
        self, recent: Sequence[RecentResults], leaves: list[Any], positions: Sequence[int]
    ) -> Sequence[int]:
        """Returns the positions of the leaves that no launch returned and nothing has compared."""
        new: Sequence[int] = exclude_results(recent, leaves, positions)
        new = [i for i in new if self._known.get(id(leaves[i])) is not leaves[i]]
        return new and self._objects.exclude_checked(leaves, new)

    def _digest(self, passed: Any, leaf: Array) -> Digest:
        is_on_host = not isinstance(passed, jax.Array)
        if is_on_host and leaf.nbytes <= _LARGE:
            return _OnHost(passed, leaf.dtype)
        self._remember(passed, leaf)
        return _OnDevice(leaf)

    def _remember(self, passed: Any, leaf: Array) -> None:
        self._known[id(leaf)] = leaf
        if passed is not leaf and isinstance(passed, jax.Array):  # which no one can change
            self._known[id(passed)] = passed
