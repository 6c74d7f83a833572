"""Flattens a program by inlining calls that contain collectives, and splits it into stages."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from mirror._src.base.dtypes import is_numeric
from mirror._src.base.types import REPLICA_AXIS, Array
from mirror._src.jaxprs.atoms import Atom, Constant, Value
from mirror._src.jaxprs.collective_eqns import (
    ALL_REDUCES,
    MIRRORING,
    axes_of,
    contains_collective,
    is_collective,
    names_axis,
    reduce_locally,
    spans_whole_axis,
)
from mirror._src.jaxprs.equations import (
    Scan,
    While,
    arrays_in,
    arrays_of,
    called,
    inner_programs,
    is_ref,
    jaxpr_of,
    walk,
    with_inner,
)
from mirror._src.jaxprs.primitives import PRIMITIVES
from mirror._src.jaxprs.trace import struct_of, trace
from mirror._src.jaxprs.user_lines import user_line
from mirror._src.passes.evaluate import Evaluation, Lowering, Rule, Rules
from mirror._src.passes.staging.ir import (
    Branch,
    Collective,
    Communication,
    Computation,
    Loop,
    StagedJaxpr,
)
from mirror._src.passes.staging.pack import pack_collectives
from mirror._src.passes.staging.schedule import drop_unused, schedule_stages


def stage_program(
    program: ClosedJaxpr,
    mirrored_inputs: Sequence[bool],
    mirrored_outputs: Sequence[bool],
    num_replicas: int,
    pack_bytes: int,
    finish: ClosedJaxpr | None = None,
    rules: Rules | None = None,
    axis_name: str = REPLICA_AXIS,
) -> StagedJaxpr:
    """Splits a replica program into stages at its collectives.

    Args:
        program: The replica program.
        mirrored_inputs: For each input, whether it is a mirrored array.
        mirrored_outputs: For each output, whether to return it as a mirrored array.
        num_replicas: Size of the replica axis.
        pack_bytes: All-reduces of at most this many bytes are packed.
        finish: A program to run after it, whose inputs are the same inputs and then its outputs.
        rules: Replacements of operations, as for `Lowering`.
        axis_name: Name of the replica axis.

    Raises:
        NotImplementedError: If an operation that contains a collective cannot be inlined, or if a
            collective cannot run on the host.
    """
    inputs = [
        Value(var.aval, mirrored=mirrored)
        for var, mirrored in zip(program.jaxpr.invars, mirrored_inputs, strict=True)
    ]
    builder = _Builder(num_replicas, pack_bytes, rules or {}, axis_name)
    outputs = builder.add_program(program, inputs)
    if finish is not None:
        outputs = builder.walk(finish, [*inputs, *outputs])
    steps = pack_collectives(drop_unused(builder.steps, outputs), pack_bytes)
    stages = schedule_stages(steps, outputs)
    constants = list(builder.constants.values())
    return StagedJaxpr(inputs, builder.replica_id, constants, stages, list(mirrored_outputs))


class _Builder:
    """Builder of the flat list of steps of a program."""

    def __init__(self, num_replicas: int, pack_bytes: int, rules: Rules, axis_name: str) -> None:
        self.axis_name = axis_name
        self.num_replicas = num_replicas
        self.rules = rules
        self.pack_bytes = pack_bytes
        self.steps: list[Computation | Communication] = []
        self.constants: dict[int, tuple[Value, Array]] = {}
        self.replica_id = Value(jax.core.ShapedArray((), jnp.int32))

    def add_program(self, program: ClosedJaxpr, arguments: Sequence[Atom]) -> Sequence[Atom]:
        """Adds a program, as a single step if it has no collectives, so that it may use a `Ref`."""
        if contains_collective(program.jaxpr):
            return self.walk(program, arguments)
        avals = [var.aval for var in program.jaxpr.outvars]
        arrays = {id(array): self.constant(array) for array in arrays_in(program)}

        def run(lowering: Lowering, arguments: Sequence[Any]) -> list[Any]:
            return lowering.call(program, arguments)

        return self.add_evaluation(run, list(program.jaxpr.eqns), avals, arguments, arrays)

    def walk(self, program: ClosedJaxpr | Jaxpr, arguments: Sequence[Atom]) -> list[Atom]:
        return walk(program, arguments, self.constant, self.equation)

    def constant(self, value: Any) -> Atom:
        """Returns a value for an array, which is an input of stages, or a constant for a number."""
        if not isinstance(value, jax.Array):
            return Constant(value)
        if id(value) not in self.constants:
            self.constants[id(value)] = Value(value.aval, mirrored=True), value
        return self.constants[id(value)][0]

    def equation(self, eqn: JaxprEqn, inputs: list[Atom]) -> Sequence[Atom]:
        name = eqn.primitive.name
        if is_collective(eqn):
            pairs = zip(inputs, eqn.outvars, strict=True)
            return [self.collective(eqn, atom, var.aval) for atom, var in pairs]
        if name == "axis_index" and names_axis(eqn):
            return [self.replica_id]
        if not any(map(contains_collective, map(jaxpr_of, inner_programs(eqn.params.values())))):
            return self.operation(eqn, inputs)
        program = called(eqn)
        if program is not None:
            return self.walk(program, inputs)
        rule = {"scan": self.scan, "while": self.while_loop, "cond": self.cond}.get(name)
        if rule is None:
            raise NotImplementedError(_message(eqn, f"`{name}` contains a collective"))
        return rule(eqn, inputs)

    def operation(self, eqn: JaxprEqn, inputs: list[Atom]) -> list[Value]:
        for atom in (*eqn.invars, *eqn.outvars):
            if is_ref(atom):
                name = eqn.primitive.name
                raise NotImplementedError(_message(eqn, f"`{name}` uses a mutable `Ref`"))
        arrays = {id(array): self.constant(array) for array in arrays_of(eqn)}

        def run(lowering: Lowering, arguments: Sequence[Any]) -> list[Any]:
            return lowering.apply(eqn, list(arguments))

        return self.add_evaluation(run, [eqn], [var.aval for var in eqn.outvars], inputs, arrays)

    def add_evaluation(
        self,
        evaluate: Callable[[Lowering, Sequence[Any]], list[Any]],
        eqns: Sequence[JaxprEqn],
        avals: Sequence[Any],
        inputs: Sequence[Atom],
        arrays: dict[int, Atom],
    ) -> list[Value]:
        """Adds a computation that evaluates operations on the mesh of a lane.

        Args:
            evaluate: Evaluates the operations.
            eqns: The operations.
            avals: Types of the results.
            inputs: The operands.
            arrays: Values of the constant arrays, by their `id`.
        """
        needs_id = any(names_axis(inner) for eqn in eqns for inner in with_inner(eqn))
        more = [*arrays.values(), *([self.replica_id] if needs_id else [])]
        num = len(inputs)

        def run(*arguments: Any) -> list[Any]:
            def replica_id(eqn: JaxprEqn) -> Rule | None:
                return (lambda *_: [arguments[-1]]) if names_axis(eqn) else None

            replacements = dict(zip(arrays, arguments[num:], strict=False))
            lowering = Lowering(replacements, {**self.rules, "axis_index": replica_id})
            return evaluate(lowering, arguments[:num])

        outputs = [Value(aval) for aval in avals]
        effects = [effect for eqn in eqns for effect in eqn.effects]
        is_ordered = any("Ordered" in type(effect).__name__ for effect in effects)
        return self.add(Computation([*inputs, *more], outputs, run, bool(effects), is_ordered))

    def add(self, step: Computation | Communication) -> list[Value]:
        self.steps.append(step)
        return step.outputs

    def local(self, atom: Atom) -> Value:
        """Returns the value as a per-replica output of a stage."""
        aval = atom.aval if isinstance(atom, Value) else jax.typeof(atom.value)
        return self.add(Computation([atom], [Value(aval)], lambda x: [jnp.asarray(x)]))[0]

    def collective(self, eqn: JaxprEqn, operand: Atom, aval: Any) -> Value:
        name = eqn.primitive.name
        if name not in PRIMITIVES or not PRIMITIVES[name].runs_on_host:
            raise NotImplementedError(_message(eqn, f"`{name}` is not implemented on the host"))
        others = tuple(axis for axis in axes_of(eqn) if not isinstance(axis, str))
        if others and (name not in ALL_REDUCES or not all(isinstance(a, int) for a in others)):
            raise NotImplementedError(_message(eqn, f"`{name}` also reduces the axes {others}"))
        value = self.local(operand)
        dtype = value.aval.dtype
        if is_numeric(dtype) and jax.dtypes.canonicalize_dtype(dtype) != dtype:
            reason = f"the operand of `{name}` is {dtype}, but jax_enable_x64 is off"
            raise NotImplementedError(_message(eqn, reason))
        if jnp.issubdtype(dtype, jax.dtypes.prng_key):
            return self.collective_of_keys(eqn, value, aval)
        if others:
            shape = tuple(s for i, s in enumerate(value.aval.shape) if i not in others)
            run = lambda x: [reduce_locally(name, x, others)]  # noqa: E731
            reduced = Value(jax.core.ShapedArray(shape, dtype))
            (value,) = self.add(Computation([value], [reduced], run))
        return self.add_collective(eqn, value, aval)

    def add_collective(self, eqn: JaxprEqn, operand: Value, aval: Any) -> Value:
        result = Value(aval, mirrored=spans_whole_axis(eqn) and eqn.primitive.name in MIRRORING)
        lines = [user_line(eqn)]
        return self.add(Collective(eqn.primitive.name, eqn.params, [operand], [result], lines))[0]

    def collective_of_keys(self, eqn: JaxprEqn, keys: Value, aval: Any) -> Value:
        """Adds a collective of PRNG keys, which are sent as their key data."""
        impl: list[Any] = []

        def data_of(keys: Array) -> list[Array]:
            impl[:] = [jax.random.key_impl(keys)]
            return [jax.random.key_data(keys)]

        def data_like(aval: Any) -> Any:
            return jax.eval_shape(data_of, struct_of(aval))[0]

        wrap = lambda bits: [jax.random.wrap_key_data(bits, impl=impl[0])]  # noqa: E731
        (bits,) = self.add(Computation([keys], [Value(data_like(keys.aval))], data_of))
        result = self.add_collective(eqn, bits, data_like(aval))
        return self.add(Computation([result], [Value(aval)], wrap))[0]

    def stage(self, program: ClosedJaxpr, inputs: Sequence[Atom]) -> StagedJaxpr:
        """Stages an inner program, whose results are per-replica."""
        mirrored = [isinstance(atom, Value) and atom.mirrored for atom in inputs]
        per_replica = [False] * len(program.jaxpr.outvars)
        n, limit = self.num_replicas, self.pack_bytes
        return stage_program(
            program, mirrored, per_replica, n, limit, rules=self.rules, axis_name=self.axis_name
        )

    def scan(self, eqn: JaxprEqn, inputs: list[Atom]) -> Sequence[Atom]:
        scan = Scan(eqn)
        consts, carry, xs = scan.split(inputs)
        stacked: list[Any] = eqn.outvars[scan.num_carry :]
        if any(jnp.issubdtype(var.aval.dtype, jax.dtypes.extended) for var in stacked):
            raise NotImplementedError(
                _message(eqn, "`scan` stacks PRNG keys (stack jax.random.key_data(key) instead)")
            )
        if not scan.length:  # no slice exists to trace an iteration with
            return [*carry, *(self.empty(var.aval) for var in stacked)]
        step = -1 if scan.reverse else 1

        def iteration(*values: Any) -> list[Any]:
            reads, (i, *carried) = values[:num_reads], values[num_reads:]
            ys = carried[scan.num_carry :]
            xs = [jax.lax.dynamic_index_in_dim(x, i, 0, keepdims=False) for x in reads[first_x:]]
            outputs = Evaluation().call(
                scan.body, [*reads[:first_x], *carried[: scan.num_carry], *xs]
            )
            new = [
                jax.lax.dynamic_update_index_in_dim(y, value, i, 0)
                for y, value in zip(ys, outputs[scan.num_carry :], strict=True)
            ]
            return [i + step, *outputs[: scan.num_carry], *new]

        first_x, num_reads = len(consts), len(consts) + len(xs)
        start = np.int32(scan.length - 1 if scan.reverse else 0)
        empty = [self.empty(var.aval) for var in stacked]
        reads = [self.value(atom) for atom in (*consts, *xs)]
        carried = [self.local(Constant(start)), *map(self.local, carry), *empty]
        avals = [struct_of(value.aval) for value in (*reads, *carried)]
        body = self.stage(
            trace(iteration, avals, self.num_replicas, self.axis_name), [*reads, *carried]
        )
        outputs = [Value(value.aval) for value in carried]
        loop = Loop([*reads, *carried], outputs, body, None, scan.length, user_line(eqn))
        return self.add(loop)[1:]

    def while_loop(self, eqn: JaxprEqn, inputs: list[Atom]) -> Sequence[Atom]:
        loop = While(eqn)
        test_consts, consts, carry = loop.split(inputs)
        num_test, num_consts = len(test_consts), len(consts)
        reads = [self.value(atom) for atom in (*test_consts, *consts)]
        carried = [self.local(atom) for atom in carry]

        def run_test(*values: Any) -> list[Any]:
            operands = [*values[:num_test], *values[num_test + num_consts :]]
            return Evaluation().call(loop.test, operands)

        def run_body(*values: Any) -> list[Any]:
            return Evaluation().call(loop.body, values[num_test:])

        both = [*reads, *carried]
        avals = [struct_of(value.aval) for value in both]
        test = self.stage(trace(run_test, avals, self.num_replicas, self.axis_name), both)
        body = self.stage(trace(run_body, avals, self.num_replicas, self.axis_name), both)
        outputs = [Value(value.aval) for value in carried]
        return self.add(Loop([*both], outputs, body, test, 0, user_line(eqn)))

    def cond(self, eqn: JaxprEqn, inputs: list[Atom]) -> Sequence[Atom]:
        index, *operands = inputs
        reads = [self.value(atom) for atom in operands]
        branches = [self.stage(program, reads) for program in eqn.params["branches"]]
        outputs = [Value(var.aval) for var in eqn.outvars]
        return self.add(Branch([self.local(index), *reads], outputs, branches, user_line(eqn)))

    def value(self, atom: Atom) -> Value:
        """Returns the atom as a value."""
        return atom if isinstance(atom, Value) else self.local(atom)

    def empty(self, aval: Any) -> Value:
        """Returns zeros on every replica."""
        make = lambda: [jnp.zeros(aval.shape, aval.dtype)]  # noqa: E731
        return self.add(Computation([], [Value(aval)], make))[0]


def _message(eqn: JaxprEqn, reason: str) -> str:
    return (
        f"{user_line(eqn)}: the step cannot be split at its collectives, as the staged executor "
        f"requires: {reason}. Rewrite the operation, or run on devices of a single type with "
        "mirror.AllReduce()."
    )
