"""The staged executor: for devices that XLA cannot connect by collectives.

A replica program is split at its collectives. Each stage is one program without collectives, which
runs on a lane: replicas on distinct devices of one type. Every lane launches a stage before the
host waits for a result. The host then reduces the operands of the collectives, each as it arrives,
and broadcasts the results.

Mirrored results are taken from one lane and copied to the other lanes. Programs that are compiled
for different devices round differently, and replicas must not drift apart.
"""

import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np

from mirror._src.base.types import Array
from mirror._src.devices import backend, launch
from mirror._src.devices.launches import Described, StalledError
from mirror._src.devices.replicas import ReplicaDevices
from mirror._src.devices.transfer import UnstackedArrays, any_deleted, copies_of, without_axis
from mirror._src.engine.cross_device_ops import CrossDeviceOps, LostValueError
from mirror._src.engine.executor import (
    CompiledProgram,
    Executor,
    MeshProgram,
    ReplicaProgram,
    SignatureChanged,
)
from mirror._src.engine.lane import Lane, compile_stage
from mirror._src.engine.reduce_op import ReduceOp, aligned
from mirror._src.jaxprs.primitives import op_of
from mirror._src.passes.program import Value, values_of
from mirror._src.passes.staged import Branch, Collective, Loop, Stage, StagedJaxpr

Read = Callable[[int], np.ndarray]


def run_on_host(
    collective: Collective, read: Read, num_replicas: int, ops: CrossDeviceOps
) -> list[Any]:
    """Returns each replica's result. Replicas with equal results share one array.

    Args:
        collective: The collective to run.
        read: Waits for the operand of a replica and returns it. Called once per replica.
        num_replicas: Number of replicas.
        ops: Implements the reductions.

    Raises:
        ValueError: If `ops` returned an array of the wrong shape or dtype.
        RuntimeError: If `ops` raised an error.
        LostValueError: If the operand of a replica cannot be read.
    """
    groups = collective.params.get("axis_index_groups") or [range(num_replicas)]
    results: list[Any] = [None] * num_replicas
    for group in groups:
        outputs = _run_in_group(collective, read, list(group), ops)
        for replica, output in zip(group, outputs, strict=True):
            results[replica] = output
    return results


def _run_in_group(
    collective: Collective, read: Read, group: list[int], ops: CrossDeviceOps
) -> list[Any]:
    params, n = collective.params, len(group)
    match collective.primitive:
        case "psum" | "pmax" | "pmin":
            return [_reduce(collective, read, group, ops)] * n
        case "reduce_scatter":
            total = np.asarray(_reduce(collective, read, group, ops))
            axis = params["scatter_dimension"]
            slices = np.split(total, n, axis)
            return slices if params["tiled"] else [part.squeeze(axis) for part in slices]
        case "all_gather":
            return [_gather(params, read, group)] * n
        case "all_to_all":
            # `tiled` does not matter: JAX adds and removes the axes of the untiled form outside.
            sent: list[Any] = [np.split(read(i), n, params["split_axis"]) for i in group]
            joined = params["concat_axis"]
            return [np.concatenate([parts[i] for parts in sent], joined) for i in range(n)]
        case "ppermute":  # a replica that receives nothing gets zeros
            source = {target: origin for origin, target in params["perm"]}
            values = {replica: read(replica) for replica in group}
            zeros = np.zeros_like(values[group[0]])
            return [values[source[i]] if i in source else zeros for i in group]
        case _:  # pbroadcast
            return [read(params["source"])] * n


def _reduce(collective: Collective, read: Read, group: list[int], ops: CrossDeviceOps) -> Any:
    op = ReduceOp(op_of(collective.primitive))
    aval = collective.operand.aval
    total = ops._carry_out(op, map(read, group), aval.shape, aval.dtype, collective.description)
    if op in (ReduceOp.MIN, ReduceOp.MAX) and jnp.issubdtype(aval.dtype, jnp.floating):
        total = np.asarray(total)
        # 0.0 instead of -0.0, as in the other executors.
        return np.where(total == 0, np.zeros((), total.dtype), total)
    return total


def _gather(params: dict[str, Any], read: Read, group: list[int]) -> np.ndarray:
    """Joins or stacks the operands in one buffer. Writes each operand as it arrives."""
    first, axis = read(group[0]), params["all_gather_dimension"]
    shape, size = list(first.shape), 1
    if params["tiled"]:
        size = shape[axis]
        shape[axis] *= len(group)
    else:
        shape.insert(axis, len(group))
    whole = aligned(tuple(shape), first.dtype)
    for i, replica in enumerate(group):
        value = first if i == 0 else read(replica)
        place = (slice(None),) * axis + (slice(i * size, (i + 1) * size),)
        whole[place] = value if params["tiled"] else np.expand_dims(value, axis)
    return whole


class StagedProgram(CompiledProgram):
    """A replica program that runs as stages on lanes."""

    def __init__(
        self,
        replicas: ReplicaDevices,
        ops: CrossDeviceOps,
        program: ReplicaProgram,
        lanes: list[Lane],
        staged: StagedJaxpr,
    ) -> None:
        self._replicas = replicas
        self._lanes = lanes
        self._per_replica_inputs = [kind.is_own for kind in program.inputs]
        self._per_replica_outputs = [kind.is_own for kind in program.outputs]
        home = self._replicas.on_mesh[0]
        self._home = next((i for i, lane in enumerate(lanes) if home in lane.replicas.devices), 0)
        # With several lanes nothing is donated: another lane may still read a donated buffer, and
        # the old state must survive an interrupt.
        self._is_single = len(lanes) == 1
        donated = program.donated if self._is_single else ()
        self._avals = program.avals
        self._types: list[Any] | None = None
        self._require_context = program.require_context
        self._part = _Part(ops, lanes, staged, program, donated, self._home)

    def __call__(self, leaves: Sequence[Any], outputs: list[Any]) -> None:
        """See `CompiledProgram`."""
        self._require_context()
        # A loop passes the results of one step to the next, with identical type objects. Comparing
        # those skips the slower check.
        types = [getattr(leaf, "aval", leaf) for leaf in leaves]
        if self._types is None or not all(map(operator.is_, types, self._types)):
            _require_signature(leaves, self._avals, self._per_replica_inputs)
            self._types = types
        inputs = [lane.select(leaves, self._per_replica_inputs) for lane in self._lanes]
        if self._is_single:
            self._part.run(inputs, outputs)
        else:
            outputs.extend(self._join(self._part.run(inputs, [])))

    def compile(self) -> None:
        """See `CompiledProgram`."""
        self._require_context()
        self._part.compile()

    def _join(self, lane_outputs: list[list[Any]]) -> list[Any]:
        """Joins the outputs of the lanes."""
        iterators = list(map(iter, lane_outputs))
        return [
            self._join_slices([next(iterator) for iterator in iterators])
            if differs
            else self._mirror(next(iterators[self._home]))
            for differs in self._per_replica_outputs
        ]

    def _mirror(self, array: Array) -> Array:
        lane = self._lanes[self._home]
        if lane.replicas.mesh == self._replicas.mesh:
            return array
        copies = copies_of(array)
        home = self._replicas.on_mesh[0]
        return self._replicas.broadcast_through_host(copies.get(home, lane.slice(array, 0)))

    def _join_slices(self, arrays: list[Array]) -> Any:
        slices: list[Any] = [None] * len(self._replicas)
        for lane, array in zip(self._lanes, arrays, strict=True):
            for place, replica in enumerate(lane.ids):
                slices[replica] = lane.slice(array, place)
        return UnstackedArrays(list(map(without_axis, slices)))


class _Part:
    """A staged program on lanes: the whole program, or the program inside a loop or branch."""

    def __init__(
        self,
        ops: CrossDeviceOps,
        lanes: list[Lane],
        staged: StagedJaxpr,
        program: ReplicaProgram,
        donated: Sequence[int] = (),
        home: int | None = None,
    ) -> None:
        self._ops = ops
        self._lanes = lanes
        self._staged = staged
        self._program = program
        self._num_replicas = sum(len(lane.ids) for lane in lanes)
        compiled: dict[Any, MeshProgram] = {}  # lanes on the same devices share programs

        def compile_on(place: int, number: int) -> MeshProgram:
            lane, keeps_all = lanes[place], home in (None, place)
            key = number, lane.replicas.devices, keeps_all
            if key not in compiled:
                compiled[key] = compile_stage(
                    lane, staged, number, program, donated, keeps_all=keeps_all
                )
            return compiled[key]

        self._stages = [
            [compile_on(place, number) for place in range(len(lanes))]
            for number in range(len(staged.stages))
        ]
        self._inner: dict[Any, list[_Part]] = {
            communication: [_Part(ops, lanes, inner, program) for inner in _programs(communication)]
            for stage in staged.stages
            for communication in stage.communications
            if not isinstance(communication, Collective)
        }
        # Copies, because the user may delete an array that the step closes over.
        self._constants = [
            {value: lane.copy(array) for value, array in staged.constants} for lane in lanes
        ]

    def compile(self) -> None:
        """Makes XLA compile all stages, loops and branches."""
        for programs in self._stages:
            for lane, program in zip(self._lanes, programs, strict=True):
                with lane.on_mesh():
                    program.compile()
        for part in itertools.chain.from_iterable(self._inner.values()):
            part.compile()

    def run(self, inputs: list[list[Any]], last: list[Any]) -> list[list[Any]]:
        """Runs all stages and returns the outputs of every lane.

        Args:
            inputs: Inputs of every lane.
            last: An empty list. With a single lane, it receives the outputs as soon as they exist.
        """
        staged = self._staged
        values: list[dict[Value, Any]] = []
        for lane, constants, leaves in zip(self._lanes, self._constants, inputs, strict=True):
            arguments = dict(zip(staged.inputs, leaves, strict=True))
            values.append({staged.replica_id: lane.replica_ids, **constants, **arguments})
        for number, (stage, programs) in enumerate(zip(staged.stages, self._stages, strict=True)):
            is_last = number == len(self._stages) - 1
            results = [last if is_last and len(self._lanes) == 1 else [] for _ in self._lanes]
            for lane, program, env, outputs in zip(
                self._lanes, programs, values, results, strict=True
            ):
                leaves = [env[value] for value in stage.inputs]
                # `run` has checked the inputs of the first stage.
                if number and any_deleted(leaves):
                    raise RuntimeError(
                        f"{self._program.name}: an array that stage {number + 1} of "
                        f"{len(self._stages)} needs was deleted while the step was running. Do not "
                        "donate or delete a step's arguments before the step has finished: check "
                        "host callbacks and reduce_implementation."
                    )
                with lane.on_mesh():
                    program(leaves, outputs)
            if not is_last:
                self._communicate(stage, values, results)
        return results

    def _communicate(
        self, stage: Stage, values: list[dict[Value, Any]], results: list[list[Any]]
    ) -> None:
        """Stores the results of a stage, and runs the collectives after it."""
        for env, outputs in zip(values, results, strict=True):
            env.update(zip(values_of(stage.outputs), outputs, strict=True))
            outputs.clear()
        for communication in stage.communications:
            match communication:
                case Collective():
                    self._run_collective(communication, values)
                case Loop():
                    self._run_loop(communication, values)
                case Branch():
                    self._run_branch(communication, values)
        for env in values:
            for value in stage.last_read:
                env.pop(value, None)

    def _run_collective(self, collective: Collective, values: list[dict[Value, Any]]) -> None:
        slices: dict[int, Any] = {}
        for lane, env in zip(self._lanes, values, strict=True):
            # Pop the operand: only the collective reads it, and a stacked array would keep the
            # slices alive that the host has already read.
            slices.update(lane.slices_of(env.pop(collective.operand)))

        def read(replica: int) -> np.ndarray:
            try:
                operand = slices.pop(replica)
                for following in itertools.islice(slices.values(), 1):  # prefetch the next one
                    following.copy_to_host_async()
                launch.wait(operand)
                return np.asarray(operand)[0]  # host sync, on purpose
            except StalledError:
                raise
            except Exception as error:
                raise LostValueError(
                    f"Could not read replica {replica}'s operand of the {collective.description}: "
                    f"{str(error).rstrip('.')}. Check what that replica computes, and its device."
                ) from error

        described = Described(self._program.name, self._program.line)
        with launch.recorded(described, collective.description, slices):
            results = run_on_host(collective, read, self._num_replicas, self._ops)
        (out,) = collective.outputs
        for lane, env in zip(self._lanes, values, strict=True):
            if out.is_mirrored:
                env[out] = lane.broadcast(results[0])
            else:
                env[out] = lane.replicas.stack(np.stack([results[i] for i in lane.ids]))

    def _run_loop(self, loop: Loop, values: list[dict[Value, Any]]) -> None:
        body, *tests = self._inner[loop]
        inputs = [[env[value] for value in values_of(loop.inputs)] for env in values]

        def continues(trip: int) -> bool:
            if not tests:
                return trip < loop.trips
            predicates = [outputs[0] for outputs in tests[0].run(inputs, [])]
            return bool(self._agreed(loop, predicates))

        trip = 0
        while continues(trip):
            pairs = zip(inputs, body.run(inputs, []), strict=True)
            inputs = [[*old[: len(old) - len(new)], *new] for old, new in pairs]
            trip += 1
        for env, end in zip(values, inputs, strict=True):
            env.update(zip(loop.outputs, end[len(end) - len(loop.outputs) :], strict=True))

    def _run_branch(self, branch: Branch, values: list[dict[Value, Any]]) -> None:
        branches = self._inner[branch]
        inputs = [[env[value] for value in values_of(branch.inputs)] for env in values]
        indices = [first for first, *_ in inputs]
        index = min(max(int(self._agreed(branch, indices)), 0), len(branches) - 1)
        results = branches[index].run([rest for _, *rest in inputs], [])
        for env, outputs in zip(values, results, strict=True):
            env.update(zip(branch.outputs, outputs, strict=True))

    def _agreed(self, communication: Loop | Branch, arrays: Sequence[Array]) -> Any:
        """Returns the condition of a loop or branch, read from every lane.

        Raises:
            ValueError: If the lanes disagree, as when devices of several types round differently.
        """
        pairs = zip(self._lanes, arrays, strict=True)
        slices = [lane.slice(array, 0) for lane, array in pairs]
        launch.wait_for(slices)
        values = [np.asarray(slice_)[0] for slice_ in slices]  # host sync
        if any(value != values[0] for value in values):
            conditions = ", ".join(
                f"{value} on replica {lane.ids[0]}"
                for lane, value in zip(self._lanes, values, strict=True)
            )
            raise ValueError(
                f"{communication.line}: the replicas disagree on the condition ({conditions}) "
                "and would execute different collectives. Make it identical on all replicas, e.g. "
                "mirror.all_reduce('max', condition)."
            )
        return values[0]


def _require_signature(
    leaves: Sequence[Any], avals: Sequence[jax.ShapeDtypeStruct], per_replica: Sequence[bool]
) -> None:
    """Rejects leaves that the program was not staged for, before anything runs.

    Shapes of per-replica leaves are not compared: programs are already cached by them.
    """
    for leaf, aval, differs in zip(leaves, avals, per_replica, strict=True):
        is_weak = getattr(leaf, "weak_type", False)  # PRNG keys do not have this attribute
        same = differs or (leaf.shape == aval.shape and is_weak == aval.weak_type)
        if not same or leaf.dtype != aval.dtype:
            raise SignatureChanged


def _programs(communication: Loop | Branch) -> list[StagedJaxpr]:
    if isinstance(communication, Branch):
        return communication.branches
    return [communication.body, *([communication.test] if communication.test else [])]


_PACK_BYTES = 256 * 1024


@final
class StagedExecutor(Executor):
    """Runs replica programs stage by stage.

    Args:
        replicas: Devices of the replicas, of any types.
        ops: Implements the reductions.
    """

    name = "staged"

    def __init__(self, replicas: ReplicaDevices, ops: CrossDeviceOps) -> None:
        super().__init__(replicas, _PACK_BYTES if ops.pack_bytes is None else ops.pack_bytes)
        self.ops = ops
        self.reduces_on = ops.device
        self._lanes = _lanes(replicas)

    def compile(self, program: ReplicaProgram) -> StagedProgram:
        """See `Executor.compile`. Traces and stages the program now.

        Raises:
            NotImplementedError: If the program cannot be split at its collectives.
        """
        staged = self.staged(program, program.guard.rules() if program.guard is not None else {})
        return StagedProgram(self.replicas, self.ops, program, self._lanes, staged)


def _lanes(replicas: ReplicaDevices) -> list[Lane]:
    """Groups the replicas by the type of their device, with each device at most once per group."""
    groups: dict[Any, list[int]] = {}
    counts: dict[jax.Device, int] = {}
    for replica, device in enumerate(replicas.devices):
        count = counts[device] = counts.get(device, 0) + 1
        groups.setdefault((backend.type_of(device), count), []).append(replica)
    return [Lane(tuple(ids), replicas) for ids in groups.values()]
