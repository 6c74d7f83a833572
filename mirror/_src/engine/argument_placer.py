"""`ArgumentPlacer`: puts arguments on the replicas' devices and copies donated ones if needed."""

import itertools
import operator
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Sharding

from mirror._src.base.errors import counted, describe
from mirror._src.base.foreign_arrays import is_plain, to_array
from mirror._src.base.types import PyTree, is_float0, long_fix, needs_64_bits
from mirror._src.devices.op_log import placement_log
from mirror._src.devices.replicas import Kind, ReplicaDevices
from mirror._src.devices.transfer import (
    ENABLE_64_BITS,
    UnstackedArrays,
    any_deleted,
    buffers_of,
    move,
    require_fits,
)
from mirror._src.engine.arguments import Call, ref_message
from mirror._src.engine.mesh import require_not_stacked
from mirror._src.engine.program import StepProgram
from mirror._src.engine.recent_arrays import RecentArrays, WeakArrays, address
from mirror._src.engine.replica_context import ReplicaGroup
from mirror._src.passes.program import Program

_get_sharding = operator.attrgetter("sharding")
_MAX_SHARDINGS = 64
_MAX_COMPARED = 8  # leaves that are compared with all others one by one, in C


class Prepared(NamedTuple):
    """The leaves of a call on the devices.

    Attributes:
        leaves: The leaves.
        new: Positions of the mirrored leaves that no recent launch has returned or received.
        unexpected: Positions of the leaves that are not as in earlier calls of the program; None
            if any leaf may be another one.
    """

    leaves: list[Any]
    new: Sequence[int]
    unexpected: Sequence[int] | None


class ArgumentPlacer:
    """Puts leaves on the replicas' devices, and copies leaves that share memory if one is donated.

    Args:
        group: The strategy.
        replicas: Devices of the replicas.

    Attributes:
        recent: The mirrored arrays that recent launches have returned.
    """

    def __init__(self, group: ReplicaGroup, replicas: ReplicaDevices) -> None:
        self._group = group
        self._replicas = replicas
        # Accepted shardings by id, because comparing the shardings of hundreds of leaves by value
        # would cost as much as a launch. JAX gives all results of a program the same object: ours,
        # or an equal one that it has seen before.
        self._mirrored: dict[int, Sharding] = {id(replicas.mirrored): replicas.mirrored}
        self._stacked: dict[int, Sharding] = {id(replicas.stacked): replicas.stacked}
        self._own_ids = {id(replicas.mirrored), id(replicas.stacked)}
        # Weak references, or the arrays of earlier steps would stay allocated. An entry is valid
        # only if it is the very array: a new array may have the id of one that has been freed.
        self._unshared = WeakArrays()  # by id, created here
        self._checked = WeakArrays()  # by id, in calls without objects
        self._owners = WeakArrays()  # by buffer address
        self.recent = RecentArrays()

    def prepare(self, call: Call, leaves: list[Any], program: StepProgram | None) -> "Prepared":
        """Returns the leaves on the replicas' devices, and which of them need more checks.

        Args:
            call: The call.
            leaves: Its leaves that are arrays or numbers.
            program: The program that will run; None if it does not exist yet.

        Raises:
            ValueError: As for `place`.
            TypeError: As for `place`.
        """
        new: Sequence[int] = call.layout.mirrored
        rows = call.layout.per_replica
        passed = leaves
        unexpected: Sequence[int] | None = None if new else ()
        if program is not None and new:
            leaves = program.copies.use(leaves)
            unexpected = program.known.find(leaves, call.state)
            new = new if unexpected is None else unexpected
            new = self.recent.exclude(leaves, new) if new else new
        are_placed = True
        if new or rows:
            mirrored = list(map(leaves.__getitem__, new))
            are_placed = self._are_placed(mirrored, list(map(leaves.__getitem__, rows)))
        if not are_placed or any_deleted(leaves):
            leaves = self.place(call, leaves)
            if program is not None:
                kept = set(call.layout.mirrored).difference(program.donated)
                program.copies.keep(passed, leaves, kept)
        return Prepared(leaves, new, unexpected)

    def _are_placed(self, mirrored: list[Any], stacked: list[Any]) -> bool:
        """Whether arrays are on the replicas' devices."""
        try:
            mirrored_ids = set(map(id, map(_get_sharding, mirrored)))
            stacked_ids = set(map(id, map(_get_sharding, stacked)))
        except AttributeError:  # a number, a NumPy array, or a tracer
            return False
        return self._mirrored.keys() >= mirrored_ids and self._stacked.keys() >= stacked_ids

    def place(self, call: Call, leaves: list[Any]) -> list[Any]:
        """Returns the leaves on the replicas' devices; mirrors arrays created elsewhere.

        JAX treats an array on other devices as a different type and would compile the program again
        for it.

        Raises:
            ValueError: If an array is deleted, a `PerReplica` has a different number of replicas,
                or an integer does not fit 32 bits while 64-bit types are disabled.
            TypeError: If a leaf cannot be converted to a JAX array.
        """
        per_replica = set(call.layout.per_replica)
        ready = []
        for i, leaf in enumerate(leaves):
            is_own = i in per_replica
            name = lambda i=i: call.leaf_names[i]  # noqa: E731
            if isinstance(leaf, jax.Array) and leaf.is_deleted():
                raise ValueError(_deleted_message(call, i))
            if isinstance(leaf, jax.Ref):
                raise TypeError(ref_message(name()))
            if is_float0(leaf):
                raise TypeError(
                    f"{name()} is {describe(leaf)}, JAX's gradient of an integer, "
                    "which has no values. Take gradients with respect to floats only."
                )
            if isinstance(leaf, np.ndarray) and not is_plain(leaf):
                leaf = to_array(name(), leaf)
            require_fits(name, leaf)
            try:
                if is_own:
                    placed = self._stack(call, i, leaf)
                else:
                    is_placed = isinstance(leaf, jax.Array) and self._replicas.is_placed(leaf)
                    placed = leaf if is_placed else self._replicas.store(leaf)
            except TypeError as error:
                raise TypeError(
                    f"{name()} is {describe(leaf)}, which cannot be converted to a JAX "
                    f"array: {error} {long_fix(leaf, '')}".strip()
                ) from error
            if placed is not leaf and not is_own:
                if placement_log.on:
                    placement_log.mirrored(name(), leaf, self._replicas.devices)
                require_not_stacked(name, leaf, self._replicas.axis_name)
                self._unshared.add(placed, id(placed))
            elif placed is leaf and isinstance(leaf, jax.Array):
                accepted, sharding = self._stacked if is_own else self._mirrored, leaf.sharding
                if id(sharding) not in accepted and sharding in accepted.values():
                    if len(accepted) >= _MAX_SHARDINGS:  # a new, equal object in every call
                        for key in [k for k in accepted if k not in self._own_ids]:
                            del accepted[key]
                    accepted[id(sharding)] = sharding
            ready.append(placed)
        return ready

    def borrow(self, tree: PyTree) -> PyTree:
        """Returns mirrored arrays that may share memory with the host arrays of a tree.

        They are arguments for `run`, which copies none of them. The host arrays must not change as
        long as the results are used.
        """
        placed = self._replicas.borrow(tree, self._replicas.mirrored)
        for leaf in jax.tree.leaves(placed):
            self._unshared.add(leaf, id(leaf))
        return placed

    def copy_repeated(
        self, call: Call, leaves: list[Any], program: StepProgram, prepared: "Prepared"
    ) -> list[Any]:
        """Returns the leaves, with copies of those that would be donated and used elsewhere.

        `{"params": p, "ema": p}` is common, and donating `p` twice would crash JAX. The second leaf
        is replaced by a copy.

        Args:
            call: The call.
            leaves: Its leaves on the devices.
            program: The program that will run.
            prepared: Which leaves may share memory with others, or be other leaves.
        """
        donated, record = program.donated, call.record
        if not donated and record is None:
            return leaves
        assigned: frozenset[int] = frozenset()
        if record is not None and record.assigned:
            assigned = assigned.union(*filter(None, map(record.assigned.get, program.changed)))
        leaves = list(leaves) if prepared.new or assigned else leaves
        for i in call.layout.mirrored if assigned else ():
            if not assigned.isdisjoint(buffers_of(leaves[i])):
                leaves[i] = self._replicas.copy(leaves[i])
        if prepared.new:
            self._copy_shared(program, call, leaves, prepared.new)
        if prepared.unexpected is not None:
            may_be_state = record is not None and (prepared.unexpected or record.structure.has_own)
            may_repeat_rows = may_be_state or program.may_repeat_rows
            if not prepared.unexpected and not may_repeat_rows:
                return leaves
            unsure = [*prepared.unexpected, *(call.layout.per_replica if may_repeat_rows else ())]
            if not _is_any_repeated(leaves, unsure, call.state if may_be_state else []):
                return leaves
        leaves = list(leaves)
        ids = list(map(address, leaves))
        distinct = set(ids)
        in_state = not distinct.isdisjoint(map(address, call.state))
        if not in_state and (not donated or len(distinct) == len(ids)):
            return leaves
        taken = set(map(address, call.state))
        first = dict.fromkeys(donated)
        for i in first | dict.fromkeys(range(len(leaves))):
            if ids[i] in taken and isinstance(leaves[i], jax.Array):
                leaves[i] = self._replicas.copy(leaves[i])
            if i in first:
                taken.add(ids[i])
        return leaves

    def expect(self, call: Call, leaves: list[Any], program: StepProgram) -> None:
        """Expects of later calls the leaves of this one, if few calls have been unexpected."""
        if program.is_rare(program.known.num_surprises):
            program.known.num_surprises += 1
            program.known.expect(leaves, call.layout.mirrored)

    def reshard(
        self, program: StepProgram, call: Call, leaves: list[Any]
    ) -> tuple[Call, list[Any]]:
        """Returns the call and its leaves, each mirrored or sharded as the program requires."""
        try:  # fast, for hundreds of leaves: most have the shardings of the last launch
            shardings = map(_get_sharding, [*call.state, *leaves])
            if program.last_shardings and all(map(operator.is_, shardings, program.last_shardings)):
                return call, leaves
        except AttributeError:  # `UnstackedArrays`
            pass
        num_state = len(call.state)
        state = list(map(self._reshard_leaf, call.state, program.kinds))
        leaves = list(map(self._reshard_leaf, leaves, program.kinds[num_state:]))
        program.last_shardings = [getattr(leaf, "sharding", None) for leaf in (*state, *leaves)]
        if call.record is not None and not all(map(operator.is_, state, call.state)):
            call.record.write(state)  # otherwise a step that only reads it would do this each time
        return call._replace(state=state), leaves

    def accept_sharded(self, program: Program) -> None:
        """Makes `are_placed` accept arrays that are sharded as the inputs of a program."""
        for axis in set(program.sharded_inputs.values()):
            sharding = self._replicas.sharding(Kind(axis=axis))
            self._mirrored[id(sharding)] = sharding
            self._own_ids.add(id(sharding))

    def require_num_replicas(self, call: Call, i: int, stacked: Any) -> None:
        """Rejects a `PerReplica` with a different number of replicas.

        Raises:
            ValueError: If leaf `i` of the call does not have one value per replica.
        """
        n = self._group.num_replicas_in_sync
        if stacked.shape[0] != n:
            raise ValueError(
                f"{call.leaf_names[i]} is a PerReplica with {counted(stacked.shape[0], 'value')}, "
                f"but the strategy has {counted(n, 'replica')}. Create it with this strategy "
                "(distribute_dataset or run), or pass one value per replica."
            )

    def _copy_shared(
        self, program: StepProgram, call: Call, leaves: list[Any], positions: Iterable[int]
    ) -> None:
        """Copies the leaves at some positions that share memory with another array, in place.

        If one of the arrays were donated, XLA would end the process. Arrays that `mirror` created,
        and results of programs, are known to share no memory. For any other array, JAX can tell its
        address, but only once it has been computed, that is, after the previous step. If most calls
        bring such arrays, they are therefore copied, which does not wait. An array that shares no
        memory with these objects may share it with others.
        """
        checked = self._checked if call.record is None else call.record.unshared
        known = (self._unshared, checked)
        new = [i for i in positions if all(k.get(id(leaves[i])) is not leaves[i] for k in known)]
        if not new:
            return
        program.num_address_checks += 1
        if not program.is_rare(program.num_address_checks):
            for i in new:
                leaves[i] = self._replicas.copy(leaves[i])
            return
        rest = set(range(len(leaves))).difference(new)
        others = [*call.state, *map(leaves.__getitem__, rest)]
        taken = set[int]().union(*map(buffers_of, others))
        for i in new:
            addresses = buffers_of(leaves[i])
            owners = map(self._owners.get, addresses)
            is_owned = any(owner is not None and owner is not leaves[i] for owner in owners)
            if is_owned or not taken.isdisjoint(addresses):
                leaves[i] = self._replicas.copy(leaves[i])
                addresses = buffers_of(leaves[i])
            checked.add(leaves[i], id(leaves[i]))
            self._owners.add(leaves[i], *addresses)

    def _reshard_leaf(self, leaf: Any, kind: Kind) -> Any:
        if kind.is_own:
            return leaf
        sharding = self._replicas.sharding(kind)
        if leaf.sharding is sharding or leaf.sharding == sharding:
            return leaf
        if kind.axis is not None:
            return self._replicas.shard(leaf, kind.axis)
        return leaf if self._replicas.is_mirrored(leaf) else self._replicas.mirror(leaf)

    def _stack(self, call: Call, i: int, stacked: Any) -> Any:
        self.require_num_replicas(call, i, stacked)
        if isinstance(stacked, UnstackedArrays):
            if any_deleted([array for array in stacked.arrays if isinstance(array, jax.Array)]):
                raise ValueError(_deleted_message(call, i))
            if not stacked.are_equal:
                shapes = ", ".join(map(str, stacked.shapes))
                raise ValueError(
                    f"{call.leaf_names[i]} is a PerReplica whose values have the shapes {shapes}, "
                    "but all replicas run one program, which requires the same shape. Pad the "
                    "values, and exclude the padding by a mask: "
                    "strategy.distribute_dataset(data, remainder='pad')."
                )
            if self._replicas.are_mixed:
                return UnstackedArrays(list(map(move, stacked.arrays, self._replicas.devices)))
            stacked = np.stack([np.asarray(array) for array in stacked.arrays])
        is_placed = isinstance(stacked, jax.Array) and stacked.sharding == self._replicas.stacked
        return stacked if is_placed else self._replicas.stack(stacked)


def _is_any_repeated(leaves: list[Any], positions: Sequence[int], state: list[Any]) -> bool:
    """Whether the leaf at one of the positions is also passed elsewhere."""
    arrays = state + leaves
    if len(positions) > _MAX_COMPARED:
        return len(set(map(address, arrays))) < len(arrays)
    return any(
        sum(map(operator.is_, arrays, itertools.repeat(leaf))) > 1
        for leaf in map(leaves.__getitem__, positions)
    )


def require_canonical(call: Call, leaves: Sequence[Any]) -> None:
    """Rejects 64-bit leaves if 64-bit types are disabled, because JAX would trace them as 32-bit.

    Raises:
        ValueError: If a leaf has a 64-bit dtype that JAX's configuration does not allow.
    """
    for name, leaf in zip(call.input_names, [*call.state, *leaves], strict=True):
        dtype = leaf.dtype
        if needs_64_bits(dtype):
            raise ValueError(
                f"{name} is {describe(leaf)}, but 64-bit types are disabled in JAX. Convert it "
                f"with x.astype('{jax.dtypes.canonicalize_dtype(dtype)}'), or enable them: "
                f"{ENABLE_64_BITS}."
            )


def _deleted_message(call: Call, i: int) -> str:
    return (
        f"{call.leaf_names[i]} has been deleted: its buffer was donated to an earlier `run` "
        "(through donate_argnums, or as part of a model's state). Use the array that `run` "
        "returned."
    )
