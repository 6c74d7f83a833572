"""`StagedProgram`: runs the stages of a cut program on its lanes, and their collectives."""

import itertools
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mirror._src.collectives.cross_device_ops import CrossDeviceOps, LostValueError
from mirror._src.devices.replicas import Kind, ReplicaDevices
from mirror._src.devices.transfer import any_deleted, copies_of, without_axis
from mirror._src.devices.unstacked import UnstackedArrays
from mirror._src.executors.executor import CompiledProgram, ReplicaProgram, SignatureChanged
from mirror._src.executors.staged.host import carry_out
from mirror._src.executors.staged.lane import Lane
from mirror._src.program.staging.ir import (
    Branch,
    Collective,
    Constant,
    Loop,
    Stage,
    StagedJaxpr,
    Value,
    values_of,
)
from mirror._src.utils.types import Array


class StagedProgram(CompiledProgram):
    """A replica program as stages on lanes."""

    def __init__(
        self,
        replicas: ReplicaDevices,
        ops: CrossDeviceOps,
        program: ReplicaProgram,
        lanes: list[Lane],
        staged: list[StagedJaxpr],
    ) -> None:
        self._replicas = replicas
        self._lanes = lanes
        self._per_replica_inputs = [kind.is_own for kind in program.inputs]
        self._per_replica_outputs = [kind.is_own for kind in program.outputs]
        home = self._replicas.on_mesh[0]
        holders = [i for i, lane in enumerate(lanes) if home in lane.replicas.devices]
        self._home = next(iter(holders), 0)
        # What a lane gives up another may still read, and an interrupt must find the old state.
        self._whole = len(lanes) == 1
        donated = program.donated if self._whole else ()
        self._avals = program.variants[0].avals
        self._types: list[Any] | None = None
        self._require_context = program.require_context
        self._part = _Part(ops, lanes, staged, program.name, donated, self._home)

    def __call__(self, leaves: Sequence[Any], outputs: list[Any]) -> None:
        """See `CompiledProgram`."""
        # A step's results go into the next one, with the very types that the last one gave them.
        self._require_context()
        types = [getattr(leaf, "aval", leaf) for leaf in leaves]
        if self._types is None or not all(map(operator.is_, types, self._types)):
            _require_same(leaves, self._avals, self._per_replica_inputs)
            self._types = types
        taken = [lane.takes(leaves, self._per_replica_inputs) for lane in self._lanes]
        if self._whole:
            self._part.run(taken, outputs)
            return
        found = self._part.run(taken, [])
        outputs.extend(self._joined(found))

    def _joined(self, found: list[list[Any]]) -> list[Any]:
        of_lanes = [iter(each) for each in found]
        return [
            self._parts([next(each) for each in of_lanes])
            if differs
            else self._mirrored(next(of_lanes[self._home]))
            for differs in self._per_replica_outputs
        ]

    def _mirrored(self, array: Array) -> Array:
        lane = self._lanes[self._home]
        if lane.replicas.mesh == self._replicas.mesh:
            return array
        copies = copies_of(array)
        home = self._replicas.on_mesh[0]
        return self._replicas.broadcast_through_host(copies.get(home, lane.row(array, 0)))

    def _parts(self, of_lanes: list[Array]) -> Any:
        rows: list[Any] = [None] * len(self._replicas)
        for lane, array in zip(self._lanes, of_lanes, strict=True):
            for place, replica in enumerate(lane.ids):
                rows[replica] = lane.row(array, place)
        alike = len({row.shape for row in rows}) == 1
        if alike and not self._replicas.are_mixed and self._replicas.replicas_per_device == 1:
            return self._replicas.from_rows(rows)
        return UnstackedArrays(list(map(without_axis, rows)))


class _Part:
    """A cut program on its lanes: the whole one, or that inside a loop or a branch."""

    def __init__(
        self,
        ops: CrossDeviceOps,
        lanes: list[Lane],
        staged: list[StagedJaxpr],
        name: str,
        donated: Sequence[int] = (),
        home: int | None = None,
    ) -> None:
        self._ops = ops
        self._lanes = lanes
        self._staged = staged
        self._name = name
        self._num_replicas = sum(len(lane.ids) for lane in lanes)
        made: dict[Any, CompiledProgram] = {}  # lanes on the same devices share them

        def stage_on(place: int, number: int) -> CompiledProgram:
            lane, each, keeps_all = lanes[place], staged[place], home in (None, place)
            key = number, id(each), lane.replicas.devices, keeps_all
            if key not in made:
                made[key] = _compiled(lane, each, number, name, donated, keeps_all=keeps_all)
            return made[key]

        self._stages = [
            [stage_on(place, number) for place in range(len(lanes))]
            for number in range(len(staged[0].stages))
        ]
        self._inner: dict[Any, list[_Part]] = {}
        for stage in staged[0].stages:
            for i, communication in enumerate(stage.communications):
                if not isinstance(communication, Collective):
                    self._inner[communication] = self._parts_of(stage, i)
        # Copies: the user may delete an array that the step has closed over.
        self._held = [
            {value: lane.copied(array) for value, array in each.held}
            for lane, each in zip(lanes, staged, strict=True)
        ]

    def _parts_of(self, stage: Stage, i: int) -> "list[_Part]":
        number = self._staged[0].stages.index(stage)
        communications = [each.stages[number].communications[i] for each in self._staged]
        inner = [list(filter(None, _programs(communication))) for communication in communications]
        return [
            _Part(self._ops, self._lanes, [programs[k] for programs in inner], self._name)
            for k in range(len(inner[0]))
        ]

    def run(self, inputs: list[list[Any]], last: list[Any]) -> list[list[Any]]:
        """Runs all stages; each lane's outputs. The last launch of a lone lane fills `last`."""
        values: list[dict[Value, Any]] = []
        for lane, staged, held, leaves in zip(
            self._lanes, self._staged, self._held, inputs, strict=True
        ):
            own = dict(zip(staged.inputs, leaves, strict=True))
            values.append({staged.replica_id: lane.replica_ids, **held, **own})
        for number, compiled in enumerate(self._stages):
            final = number == len(self._stages) - 1
            found = [last if final and len(self._lanes) == 1 else [] for _ in self._lanes]
            for lane, staged, program, env, outputs in zip(
                self._lanes, self._staged, compiled, values, found, strict=True
            ):
                leaves = [env[value] for value in staged.stages[number].inputs]
                if number:  # at first, `run` has looked
                    self._require_alive(leaves, number)
                with lane.on_mesh():
                    program(leaves, outputs)
            if not final:
                self._talk(number, values, found)
        return found

    def _require_alive(self, leaves: list[Any], number: int) -> None:
        if any_deleted(leaves):
            raise RuntimeError(
                f"{self._name}: an array that stage {number + 1} of {len(self._stages)} needs was "
                "deleted while the step ran. Nothing may give up the buffers of a step's arguments "
                "before it has ended: look at callbacks and at reduce_implementation."
            )

    def _talk(self, number: int, values: list[dict[Value, Any]], found: list[list[Any]]) -> None:
        stages = [staged.stages[number] for staged in self._staged]
        for stage, env, outputs in zip(stages, values, found, strict=True):
            env.update(zip(values_of(stage.outputs), outputs, strict=True))
            outputs.clear()
        for communications in zip(*(stage.communications for stage in stages), strict=True):
            match communications[0]:
                case Collective():
                    self._collective(communications, values)
                case Loop():
                    self._loop(communications, values)
                case Branch():
                    self._branch(communications, values)
        for stage, env in zip(stages, values, strict=True):
            for value in stage.last_read:
                env.pop(value, None)

    def _collective(self, communications: Sequence[Any], values: list[dict[Value, Any]]) -> None:
        collective: Collective = communications[0]
        rows: dict[int, Any] = {}
        for lane, communication, env in zip(self._lanes, communications, values, strict=True):
            # Nobody else reads it; a whole array would keep what the host has read of its rows.
            rows.update(lane.rows_of(env.pop(communication.operand)))

        def row(replica: int) -> np.ndarray:
            try:
                own = rows.pop(replica)
                for following in itertools.islice(rows.values(), 1):  # on its way meanwhile
                    following.copy_to_host_async()
                return np.asarray(own)[0]  # host sync, on purpose
            except Exception as error:
                raise LostValueError(
                    f"Replica {replica}'s value for the {collective.in_words} is lost: {error}. "
                    "Look at what that replica computes, or at its device."
                ) from error

        results = carry_out(collective, row, self._num_replicas, self._ops)
        for lane, communication, env in zip(self._lanes, communications, values, strict=True):
            (out,) = communication.outputs
            env[out] = lane.broadcast(results[0]) if out.mirrored else lane.scatter(results)

    def _loop(self, communications: Sequence[Any], values: list[dict[Value, Any]]) -> None:
        body, *tests = self._inner[communications[0]]
        num_carried = len(communications[0].outputs)
        given = [
            [env[value] for value in communication.inputs]
            for communication, env in zip(communications, values, strict=True)
        ]
        trip = 0
        while (
            self._goes_on(communications, tests, given) if tests else trip < communications[0].trips
        ):
            carried = body.run(given, [])
            given = [
                [*old[: len(old) - num_carried], *new]
                for old, new in zip(given, carried, strict=True)
            ]
            trip += 1
        for communication, env, end in zip(communications, values, given, strict=True):
            env.update(zip(communication.outputs, end[len(end) - num_carried :], strict=True))

    def _goes_on(
        self, communications: Sequence[Any], tests: "list[_Part]", given: list[list[Any]]
    ) -> bool:
        return bool(
            self._decided(communications, [outputs[0] for outputs in tests[0].run(given, [])])
        )

    def _branch(self, communications: Sequence[Any], values: list[dict[Value, Any]]) -> None:
        branches = self._inner[communications[0]]
        chosen = [
            env[communication.inputs[0]]
            for communication, env in zip(communications, values, strict=True)
        ]
        index = min(max(int(self._decided(communications, chosen)), 0), len(branches) - 1)
        given = [
            [env[value] for value in communication.inputs[1:]]
            for communication, env in zip(communications, values, strict=True)
        ]
        found = branches[index].run(given, [])
        for communication, env, outputs in zip(communications, values, found, strict=True):
            env.update(zip(communication.outputs, outputs, strict=True))

    def _decided(self, communications: Sequence[Any], arrays: Sequence[Array]) -> Any:
        """A value that is the same on all replicas, read from each lane.

        Raises:
            ValueError: the lanes disagree, as where a loop's length depends on a batch's.
        """
        pairs = list(zip(self._lanes, arrays, strict=True))
        found = [np.asarray(lane.row(array, 0))[0] for lane, array in pairs]  # host sync
        if any(value != found[0] for value in found):
            said = ", ".join(
                f"{value} on replica {lane.ids[0]}"
                for (lane, _), value in zip(pairs, found, strict=True)
            )
            raise ValueError(
                f"{communications[0].line}: the replicas disagree on the condition ({said}) "
                "and would execute different collectives. Make it identical on all replicas, e.g. "
                "replica_context.all_reduce('max', condition)."
            )
        return found[0]


def _require_same(
    leaves: Sequence[Any], avals: Sequence[jax.ShapeDtypeStruct], per_replica: Sequence[bool]
) -> None:
    """Refuses leaves that the program was not cut for, before anything runs.

    The replicas' own shapes are what programs are told apart by; so it is about the rest.
    """
    for leaf, aval, differs in zip(leaves, avals, per_replica, strict=True):
        same = differs or (leaf.shape == aval.shape and _is_weak(leaf) == aval.weak_type)
        if not same or leaf.dtype != aval.dtype:
            raise SignatureChanged


def _is_weak(leaf: Array) -> bool:
    return getattr(leaf, "weak_type", False)  # PRNG keys have no such type


def _programs(communication: Any) -> list[StagedJaxpr | None]:
    return (
        [communication.body, communication.test]
        if isinstance(communication, Loop)
        else list(communication.branches)
    )


def _compiled(
    lane: Lane,
    staged: StagedJaxpr,
    number: int,
    name: str,
    donated: Sequence[int],
    *,
    keeps_all: bool,
) -> CompiledProgram:
    """One stage on one lane; XLA compiles it when it first runs."""
    stage = staged.stages[number]
    final = number == len(staged.stages) - 1
    mirrored = staged.mirrored_outputs if final else [False] * len(stage.outputs)
    pairs = list(zip(stage.outputs, mirrored, strict=True))
    if not keeps_all:  # the mirrored ones are those of another lane
        pairs = [(atom, is_mirrored) for atom, is_mirrored in pairs if not is_mirrored]

    def run(*leaves: Any) -> list[Any]:
        found: dict[Value, Any] = dict(zip(stage.inputs, leaves, strict=True))

        def read(atom: Any) -> Any:
            return atom.value if isinstance(atom, Constant) else found[atom]

        for operation in stage.operations:
            made = operation.run(*map(read, operation.inputs))
            found.update(zip(operation.outputs, made, strict=True))
        return [jnp.asarray(read(atom)) for atom, _ in pairs]

    given_up = {staged.inputs[i] for i in donated} if final else set[Value]()
    title = name if len(staged.stages) == 1 else f"{name}_stage_{number + 1}"
    return lane.executor.compile_function(
        title,
        run,
        Kind.of(not value.mirrored for value in stage.inputs),
        Kind.of(not is_mirrored for _, is_mirrored in pairs),
        [i for i, value in enumerate(stage.inputs) if value in given_up],
    )
