"""`HostValues`: notes launches, and the values that a host passes to them, for the other processes.

Mirrored inputs that no launch has returned are equal in all processes only if each host computed
the same: a learning rate, an assigned variable, an array that was changed between two steps.
"""

import operator
import zlib
from collections import deque
from collections.abc import Sequence
from typing import Any, final
from weakref import ref

import jax
import jax.numpy as jnp
import numpy as np

from mirror._src.base.types import Array
from mirror._src.cluster.ledger import Digest, ledger
from mirror._src.devices.launches import has_finished
from mirror._src.devices.op_log import unlogged
from mirror._src.devices.transfer import NoMesh, local_copy
from mirror._src.engine.agreement import require_same_launch
from mirror._src.engine.arguments import Call
from mirror._src.engine.nnx.record import ObjectTable
from mirror._src.engine.program import StepProgram
from mirror._src.engine.recent_arrays import WeakArrays
from mirror._src.jaxprs.text import fingerprint

_LARGE = 2**16  # bytes; of larger arrays, the device computes a fingerprint
_MAX_LAUNCHES = 128
_ORIGINS = "arrays that earlier steps returned or received, in another order"
_fingerprint_of = jax.jit(fingerprint)


@final
class _Checksum:
    """The checksum of an array, which may still be computed."""

    def __init__(self, array: Array | np.ndarray) -> None:
        self._array = array

    def is_ready(self) -> bool:
        """See `Digest`."""
        return isinstance(self._array, np.ndarray) or has_finished(self._array)

    def value(self) -> str:
        """See `Digest`."""
        value = np.asarray(self._array)
        data = np.ascontiguousarray(value).reshape(-1).view(np.uint8).data
        return f"{zlib.crc32(data):x}" if value.size else ""


def _on_device(array: Array) -> _Checksum:
    """Returns the checksum of an array, whose buffer the launch may donate."""
    with NoMesh(), unlogged():
        mine = local_copy(array)
        if jnp.issubdtype(mine.dtype, jax.dtypes.prng_key):
            mine = jax.random.key_data(mine)
        return _Checksum(_fingerprint_of(mine) if mine.nbytes > _LARGE else jnp.copy(mine))


@final
class HostValues:
    """Notes the launches of one strategy in a job of several processes.

    Args:
        objects: Records of the nnx objects.
    """

    def __init__(self, objects: ObjectTable) -> None:
        self._objects = objects
        self._known = WeakArrays()  # by id
        # What the last launches received and returned, newest first. Weak references; the places
        # are the same in all processes, whatever Python has freed.
        self._launches: deque[list[Any]] = deque(maxlen=_MAX_LAUNCHES)

    def note(
        self,
        call: Call,
        program: StepProgram,
        passed: Sequence[Any],
        leaves: list[Any],
        positions: Sequence[int],
        *,
        unexpected: Sequence[int],
        are_compared: bool,
    ) -> None:
        """Notes a launch, right before it begins.

        Args:
            call: The call.
            program: Its program.
            passed: The leaves that the user passed.
            leaves: The same leaves on the devices.
            positions: Positions of the mirrored leaves that may be new.
            unexpected: Positions of the mirrored leaves that are not as in the last call.
            are_compared: Whether all processes have just compared the values.
        """
        assigned = call.record.unchecked if call.record is not None else ()
        new_state = self._objects.unchecked(call.record) if call.record is not None else []
        new: Sequence[int] = ()
        if positions:
            moved = [] if passed is leaves else [i for i in positions if passed[i] is not leaves[i]]
            of_host = {i for i in moved if not isinstance(passed[i], jax.Array)}
            same = {i for i in moved if self._known.get(id(passed[i])) is passed[i]}
            others = [i for i in positions if i not in of_host and i not in same]
            arrays = [i for i in others if self._known.get(id(leaves[i])) is not leaves[i]]
            new = [*sorted(of_host), *self._objects.exclude_checked(leaves, arrays)]
        if are_compared:
            for i in new:
                self._remember(passed[i], leaves[i])
            new, new_state = (), ()
        digests: dict[str, Digest] = {}
        if new or new_state:
            if not program.input_names:
                program.input_names = call.input_names
            names, start = program.input_names, len(call.state)
            digests = {names[i]: _on_device(call.state[i]) for i in new_state}
            for i in new:
                digests[names[start + i]] = self._digest(passed[i], leaves[i])
        origins = ""
        if not are_compared:
            of_state, of_leaves = set(assigned) - {*new_state}, set(unexpected) - {*new}
            known = [call.state[i] for i in sorted(of_state)]
            origins = self._origins([*known, *(leaves[i] for i in sorted(of_leaves))])
        if origins != program.origins:  # two steps that alternate do not post it every time
            program.origins = origins
            digests[_ORIGINS] = _Checksum(np.array(origins))
        mirrored = map(leaves.__getitem__, call.layout.mirrored)
        self._launches.appendleft([*map(ref, call.state), *map(ref, mirrored)])
        if ledger.changes_program(program.identity):
            require_same_launch(program.identity, program.label)
        ledger.note(program.identity, program.label, digests)

    def note_results(self, call: Call, program: StepProgram) -> None:
        """Notes what the launch has returned."""
        state = call.record.last if call.record is not None else None
        self._launches[0] += [*map(ref, state or ()), *program.known.last.references]

    def _origins(self, arrays: Sequence[Any]) -> str:
        """Returns which launch had each of these arrays last, and in which place; "" for none."""
        found: dict[int, Any] = dict.fromkeys(map(id, arrays))
        missing = set(found)
        for age, references in enumerate(self._launches):
            if not missing:
                break
            for place, array in enumerate(map(operator.call, references)):
                if id(array) in missing:
                    found[id(array)] = (age, place)
                    missing.remove(id(array))
        return repr([found[id(array)] for array in arrays]) if arrays else ""

    def _digest(self, passed: Any, leaf: Array) -> Digest:
        is_on_host = not isinstance(passed, jax.Array)
        if is_on_host and leaf.nbytes <= _LARGE:
            return _Checksum(np.array(passed, leaf.dtype))
        self._remember(passed, leaf)
        return _on_device(leaf)

    def _remember(self, passed: Any, leaf: Array) -> None:
        self._known.add(leaf, id(leaf))
        if passed is not leaf and isinstance(passed, jax.Array):  # which no one can change
            self._known.add(passed, id(passed))
