"""How arguments get onto the devices of the replicas: placed, and sharing no memory if donated."""

import operator
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any
from weakref import WeakValueDictionary

import jax
import numpy as np
from jax.sharding import Sharding

from mirror._src.context.replica_context import ReplicaGroup
from mirror._src.devices.op_log import placement_log
from mirror._src.devices.replicas import Kind, ReplicaDevices
from mirror._src.devices.transfer import any_deleted, buffers_of, move
from mirror._src.devices.unstacked import UnstackedArrays
from mirror._src.program.shards import Shards
from mirror._src.run.arguments import a_ref
from mirror._src.run.call import Call
from mirror._src.run.mesh import require_not_stacked
from mirror._src.run.program import StepProgram
from mirror._src.utils.errors import describe
from mirror._src.utils.types import Array
from mirror._src.values.per_replica import is_float0, is_numeric

_sharding_of = operator.attrgetter("sharding")
_MOST_RECENT = 8


class ArgumentPlacer:
    """Puts the leaves of calls onto the devices of the replicas, where they are not there.

    Args:
        group: The strategy.
        replicas: Its devices.
        holds_slices: Whether a device may store a slice of an array that is mirrored otherwise.
    """

    def __init__(
        self, group: ReplicaGroup, replicas: ReplicaDevices, *, holds_slices: bool
    ) -> None:
        self._group = group
        self._replicas = replicas
        self._holds_slices = holds_slices
        # By identity, because comparing hundreds of shardings would cost as much as a launch. JAX
        # puts one object on all that a program returns: ours, or an equal one that it met before.
        self._mirrored: dict[int, Sharding] = {id(replicas.mirrored): replicas.mirrored}
        self._stacked: dict[int, Sharding] = {id(replicas.stacked): replicas.stacked}
        self._one_mirrored = id(replicas.mirrored)
        self._met: WeakValueDictionary[int, Array] = WeakValueDictionary()
        self._owners: WeakValueDictionary[int, Array] = WeakValueDictionary()
        self._recent: deque[StepProgram] = deque(maxlen=_MOST_RECENT)

    def are_placed(self, per_replica: Sequence[int], leaves: list[Any]) -> bool:
        """Whether every leaf is on the replicas' devices; quick, for hundreds of them."""
        try:
            found = list(map(id, map(_sharding_of, leaves)))
        except AttributeError:  # a number, a NumPy array, or a tracer
            return False
        for i in per_replica:
            if found[i] not in self._stacked:
                return False
            found[i] = self._one_mirrored
        return self._mirrored.keys() >= set(found)

    def placed(self, call: Call, leaves: list[Any]) -> list[Any]:
        """The leaves on the replicas' devices: what was made elsewhere is mirrored now.

        JAX takes an array that is not yet there for another type than one that is, and would
        compile a second time for it.

        Raises:
            ValueError: a deleted array, a `PerReplica` of another number of replicas, or an integer
                that is too large.
            TypeError: a leaf that JAX has no array type for.
        """
        per_replica = set(call.layout.per_replica)
        ready = []
        for i, leaf in enumerate(leaves):
            if isinstance(leaf, jax.Array) and leaf.is_deleted():
                raise ValueError(_deleted(call, i))
            if isinstance(leaf, jax.Ref):
                raise TypeError(a_ref(call.leaf_names[i]))
            if is_float0(leaf):
                raise TypeError(
                    f"{call.leaf_names[i]} is {describe(leaf)}, JAX's gradient of an integer, "
                    "without numbers. Leave it out: take gradients with respect to floats only."
                )
            try:
                placed = self._rows(call, i, leaf) if i in per_replica else self._mirror(leaf)
            except TypeError as error:
                raise TypeError(
                    f"{call.leaf_names[i]} is {describe(leaf)}, which is no JAX array: {error}"
                ) from error
            except OverflowError as error:
                raise ValueError(
                    f"{call.leaf_names[i]} is {describe(leaf)}, which JAX's default integer cannot "
                    "hold. Pass a float, or switch 64 bit on: jax.config.update('jax_enable_x64', "
                    "True)."
                ) from error
            if placement_log.on and placed is not leaf and i not in per_replica:
                placement_log.mirrored(call.leaf_names[i], leaf, self._replicas.devices)
            if placed is not leaf and i not in per_replica:
                require_not_stacked(call.leaf_names[i], leaf)
            known = self._stacked if i in per_replica else self._mirrored
            if placed is not leaf:
                if i not in per_replica:
                    self._met[id(placed)] = placed
            elif isinstance(leaf, jax.Array):
                sharding = leaf.sharding
                if id(sharding) not in known and sharding in known.values():
                    known[id(sharding)] = sharding
            ready.append(placed)
        return ready

    def apart(self, call: Call, leaves: list[Any], program: StepProgram) -> list[Any]:
        """The leaves, none of which shares an array with a donated one: that would crash JAX.

        `{"params": p, "ema": p}` is common; the second place gets a copy.
        """
        donated = program.donated
        if not donated and not call.state:
            return leaves
        leaves = list(leaves)
        plain = set(range(len(leaves))).difference(call.layout.per_replica)
        self.separate(program, call.state, leaves, sorted(plain))
        ids = list(map(id, leaves))
        distinct = set(ids)
        alone = distinct.isdisjoint(map(id, call.state))
        if alone and (not donated or len(distinct) == len(ids)):
            return leaves
        taken = set(map(id, call.state))
        first = dict.fromkeys(donated)
        for i in first | dict.fromkeys(range(len(leaves))):
            if ids[i] in taken and isinstance(leaves[i], jax.Array):
                leaves[i] = self._replicas.copy(leaves[i])
            if i in first:
                taken.add(ids[i])
        return leaves

    def ran(self, program: StepProgram) -> None:
        """Remembers whose results the next call may bring back."""
        if not self._recent or self._recent[-1] is not program:
            if program in self._recent:
                self._recent.remove(program)
            self._recent.append(program)

    def forget(self, programs: set[int]) -> None:
        """Forgets what programs, by identity, returned."""
        recent = [program for program in list(self._recent) if id(program) not in programs]
        self._recent = deque(recent, _MOST_RECENT)

    def forget_all(self) -> None:
        """Forgets what all programs returned."""
        self._recent = deque(maxlen=_MOST_RECENT)

    def as_wanted(
        self, program: StepProgram, call: Call, leaves: list[Any]
    ) -> tuple[Call, list[Any]]:
        """The call and its leaves, each whole or in slices as the program takes it."""
        try:  # quick, for hundreds of leaves: they lie as at the last launch
            found = map(_sharding_of, [*call.state, *leaves])
            if program.taken and all(map(operator.is_, found, program.taken)):
                return call, leaves
        except AttributeError:  # a replica's own arrays, of unequal shapes
            pass
        num_state = len(call.state)
        state = list(map(self._of_kind, call.state, program.kinds))
        leaves = list(map(self._of_kind, leaves, program.kinds[num_state:]))
        program.taken = [getattr(leaf, "sharding", None) for leaf in (*state, *leaves)]
        return call._replace(state=state), leaves

    def accept_slices(self, shards: Shards) -> None:
        """Takes arrays of which each device stores a slice, as a program does, for placed ones."""
        for axis in set(shards.inputs.values()):
            sharding = self._replicas.sharding(Kind(axis=axis))
            self._mirrored[id(sharding)] = sharding

    def require_rows(self, call: Call, i: int, stacked: Any) -> None:
        """Refuses a `PerReplica` of another number of replicas.

        Raises:
            ValueError: It is one; the message names it.
        """
        wanted = self._group.num_replicas_in_sync
        if stacked.shape[0] != wanted:
            raise ValueError(
                f"{call.leaf_names[i]} is a PerReplica of {stacked.shape[0]} values, for a "
                f"strategy of {wanted} replicas. Make it with this strategy: distribute_dataset, "
                "run, or one value for each replica."
            )

    def separate(
        self, program: StepProgram, state: list[Any], leaves: list[Any], positions: Iterable[int]
    ) -> None:
        """Copies those of some leaves that share memory with another array: one may be donated.

        What `mirror` made itself is known to share none. Whether another array does, its address
        tells, for which JAX waits until the array is there. Where there are such arrays in most
        calls, they are copied, which waits for nothing.
        """
        new = [i for i in positions if self._met.get(id(leaves[i])) is not leaves[i]]
        new = new and self._not_returned(program, leaves, new)
        if not new:
            return
        program.looks += 1
        if not program.is_rare(program.looks):
            for i in new:
                leaves[i] = self._replicas.copy(leaves[i])
            return
        chosen = frozenset(new)
        others = [*state, *(leaf for i, leaf in enumerate(leaves) if i not in chosen)]
        taken = set[int]().union(*map(buffers_of, others))
        for i in new:
            addresses = buffers_of(leaves[i])
            owners = map(self._owners.get, addresses)
            if not taken.isdisjoint(addresses) or any(o is not None for o in owners):
                leaves[i] = self._replicas.copy(leaves[i])
                addresses = buffers_of(leaves[i])
            taken |= addresses
            self._met[id(leaves[i])] = leaves[i]
            self._owners.update(dict.fromkeys(addresses, leaves[i]))

    def _not_returned(
        self, program: StepProgram, leaves: list[Any], positions: Sequence[int]
    ) -> list[int]:
        """Those of the positions that hold arrays which no program returned lately."""
        for each in dict.fromkeys([program, *reversed(self._recent)]):
            for returned in reversed(each.returns):
                known = set(map(id, map(operator.call, returned)))
                positions = [i for i in positions if id(leaves[i]) not in known]
                if not positions:
                    return []
        return list(positions)

    def _mirror(self, leaf: Any) -> Array:
        if isinstance(leaf, jax.Array):
            if self._replicas.is_mirrored(leaf):
                return leaf
            if self._holds_slices and self._replicas.is_sharded(leaf):
                return leaf  # until it is known what the program wants
        return self._replicas.mirror(leaf)

    def _of_kind(self, leaf: Any, kind: Kind) -> Any:
        if kind.is_own:
            return leaf
        wanted = self._replicas.sharding(kind)
        if leaf.sharding is wanted or leaf.sharding == wanted:
            return leaf
        if kind.axis is not None:
            return self._replicas.shard(leaf, kind.axis)
        return leaf if self._replicas.is_mirrored(leaf) else self._replicas.mirror(leaf)

    def _rows(self, call: Call, i: int, stacked: Any) -> Any:
        self.require_rows(call, i, stacked)
        if isinstance(stacked, UnstackedArrays):
            if any_deleted([part for part in stacked.arrays if isinstance(part, jax.Array)]):
                raise ValueError(_deleted(call, i))
            if self._replicas.are_mixed or not stacked.are_equal:
                return UnstackedArrays(list(map(move, stacked.arrays, self._replicas.devices)))
            stacked = np.stack([np.asarray(part) for part in stacked.arrays])
        there = isinstance(stacked, jax.Array) and stacked.sharding == self._replicas.stacked
        return stacked if there else self._replicas.stack(stacked)


def require_canonical(call: Call, leaves: Sequence[Any]) -> None:
    """Refuses leaves of 64 bit where these are switched off: JAX traces for 32 bit then.

    Raises:
        ValueError: There is one; the message names it.
    """
    for name, leaf in zip(call.input_names, [*call.state, *leaves], strict=True):
        dtype = leaf.dtype
        if is_numeric(dtype) and jax.dtypes.canonicalize_dtype(dtype) != dtype:
            raise ValueError(
                f"{name} is {describe(leaf)} while JAX's 64 bit are off. Convert it, "
                f"x.astype('{jax.dtypes.canonicalize_dtype(dtype)}'), or switch them on: "
                "jax.config.update('jax_enable_x64', True)."
            )


def _deleted(call: Call, i: int) -> str:
    return (
        f"{call.leaf_names[i]} is an array that has been deleted: an earlier `run` gave up its "
        "buffer (donate_argnums, or a model's state). Use the array that it returned."
    )
