"""The pass `staging`: splits a program at its collectives.

The host runs it on devices that XLA cannot connect, and a device with several replicas all of them,
stage by stage.

It follows the other passes: calls that contain collectives are inlined, and small collectives are
packed. A loop or branch that contains collectives becomes one step whose own program is staged in
turn. The level of a value is the number of rounds of communication that it depends on. The
computations of one level form a stage. The collectives of one level run together.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn

from mirror._src.base.types import Array, keys_like, needs_64_bits
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
    inner_programs,
    is_ref,
    jaxpr_of,
    solve_of,
    user_line,
    with_inner,
)
from mirror._src.jaxprs.primitives import PRIMITIVES, dtype_of
from mirror._src.jaxprs.trace import struct_of, trace
from mirror._src.passes.evaluate import Evaluation, Lowering, Rule, Rules, round_of
from mirror._src.passes.pack import join, split
from mirror._src.passes.passes import rewritten
from mirror._src.passes.program import (
    OWN,
    Atom,
    Constant,
    Layout,
    Operation,
    Program,
    Settings,
    Value,
    walk_operations,
)
from mirror._src.passes.staged import (
    Branch,
    Collective,
    Communication,
    Computation,
    Loop,
    StagedJaxpr,
    drop_unused,
    schedule_stages,
)


def stage_program(
    programs: Sequence[ClosedJaxpr],
    settings: Settings,
    mirrored_outputs: Sequence[bool],
    rules: Rules | None = None,
    *,
    has_arrays: bool = False,
) -> StagedJaxpr:
    """Splits a replica program into stages at its collectives.

    Args:
        programs: The replica program, and the programs to run after it. Each gets the inputs of the
            first program and the outputs of the previous one.
        settings: Settings of the passes.
        mirrored_outputs: For each output, whether to return it as a mirrored array.
        rules: Replacements of operations, as for `Lowering`.
        has_arrays: Whether the program around has constant arrays.

    Raises:
        NotImplementedError: If an operation that contains a collective cannot be inlined, or if a
            collective cannot run on the host.
    """
    settings = settings._replace(in_rounds=True)
    first, *others = programs
    pairs = zip(first.jaxpr.invars, settings.per_replica, strict=True)
    inputs = [Value(var.aval, Layout(is_own)) for var, is_own in pairs]
    has_arrays = has_arrays or any(True for each in programs for _ in arrays_in(each))
    builder = _Builder(settings, rules or {}, has_arrays)
    arguments: list[Atom] = [*inputs]
    if not contains_collective(first.jaxpr):
        arguments += builder.add_whole(first, inputs)
        programs = others
    outputs = arguments[len(inputs) :]
    if programs:
        outputs = builder.add_program(rewritten(programs, settings), arguments)
    stages = schedule_stages(drop_unused(builder.steps, outputs), outputs)
    constants = list(builder.constants.values())
    return StagedJaxpr(inputs, builder.replica_id, constants, stages, list(mirrored_outputs))


class _Builder:
    """Builder of the list of steps of a program."""

    def __init__(self, settings: Settings, rules: Rules, has_arrays: bool) -> None:
        self.settings = settings
        self.rules = rules
        self.has_arrays = has_arrays
        self.steps: list[Computation | Communication] = []
        self.constants: dict[int, tuple[Value, Array]] = {}
        self.replica_id = Value(jax.core.ShapedArray((), jnp.int32))

    def add_program(self, program: Program, arguments: Sequence[Atom]) -> list[Atom]:
        """Adds the operations of a flat program."""
        return walk_operations(program, arguments, self.constant, self.operation)

    def add_whole(self, program: ClosedJaxpr, arguments: Sequence[Atom]) -> list[Value]:
        """Adds a program without collectives as a single step, so that it may use a `Ref`."""
        avals = [var.aval for var in program.jaxpr.outvars]
        arrays = {id(array): self.constant(array) for array in arrays_in(program)}

        def run(lowering: Lowering, arguments: Sequence[Any]) -> list[Any]:
            return lowering.call(program, arguments)

        return self.add_evaluation(run, list(program.jaxpr.eqns), avals, arguments, arrays)

    def operation(self, operation: Operation, inputs: list[Atom]) -> Sequence[Atom]:
        match operation.kind:
            case "equation":
                return self.equation(operation.eqn, inputs)
            case "barrier":  # XLA compiles the recomputation in another stage
                return inputs
            case "pack":
                return self.pack(operation, inputs)
        raise AssertionError(operation.kind)  # such as slices, which lanes do not hold

    def pack(self, operation: Operation, inputs: list[Atom]) -> list[Value]:
        """Adds the steps that join the operands, reduce them together and split the result."""
        eqns = [each.eqn for each in operation.packed]
        avals = [value.aval for value in operation.outputs]
        for eqn, aval in zip(eqns, avals, strict=True):
            _require_on_host(eqn, aval.dtype)
        aval = jax.core.ShapedArray((sum(aval.size for aval in avals),), avals[0].dtype)
        flat, reduced = Value(aval), Value(aval, Layout())
        joined = lambda *xs: [join(list(map(jnp.asarray, xs)))]  # noqa: E731
        self.add(Computation(inputs, [flat], joined, moves=True))
        lines = list(map(user_line, eqns))
        self.add(Collective([flat], [reduced], eqns[0].primitive.name, eqns[0].params, lines))
        results = list(map(Value, avals))
        parts = functools.partial(split, like=avals, on_cpus=self.settings.on_cpus)
        return self.add(Computation([reduced], results, parts))

    def constant(self, value: Any) -> Atom:
        """Returns a value for an array, which is an input of stages, or a constant for a number."""
        if not isinstance(value, jax.Array):
            return Constant(value)
        if id(value) not in self.constants:
            self.constants[id(value)] = Value(value.aval, Layout()), value
        return self.constants[id(value)][0]

    def equation(self, eqn: JaxprEqn, inputs: list[Atom]) -> Sequence[Atom]:
        name = eqn.primitive.name
        if is_collective(eqn):
            pairs = zip(inputs, eqn.outvars, strict=True)
            return [self.collective(eqn, atom, var.aval) for atom, var in pairs]
        if name == "axis_index" and names_axis(eqn):
            return [self.replica_id]
        if not any(map(contains_collective, map(jaxpr_of, inner_programs(eqn.params.values())))):
            return self.computation(eqn, inputs)
        if name == "custom_linear_solve":
            program, operands = solve_of(eqn, inputs)
            return self.add_program(rewritten([program], self.settings), operands)
        rule = {"scan": self.scan, "while": self.while_loop, "cond": self.cond}.get(name)
        if rule is None:
            raise NotImplementedError(_message(eqn, f"`{name}` contains a collective"))
        for atom in (*eqn.invars, *eqn.outvars):  # the loop is traced again
            _require_on_host(eqn, dtype_of(atom))
        return rule(eqn, inputs)

    def computation(self, eqn: JaxprEqn, inputs: list[Atom]) -> list[Value]:
        for atom in (*eqn.invars, *eqn.outvars):
            if is_ref(atom):
                name = eqn.primitive.name
                raise NotImplementedError(_message(eqn, f"`{name}` uses a mutable `Ref`"))
        arrays = {id(array): self.constant(array) for array in arrays_of(eqn)}

        def run(lowering: Lowering, arguments: Sequence[Any]) -> list[Any]:
            return lowering.apply(eqn, list(arguments))

        results = [var.aval for var in eqn.outvars]
        return self.add_evaluation(run, [eqn], results, inputs, arrays, eqn)

    def add_evaluation(
        self,
        evaluate: Callable[[Lowering, Sequence[Any]], list[Any]],
        eqns: Sequence[JaxprEqn],
        avals: Sequence[Any],
        inputs: Sequence[Atom],
        arrays: dict[int, Atom],
        eqn: JaxprEqn | None = None,
    ) -> list[Value]:
        """Adds a computation that evaluates operations on the mesh of a lane.

        Args:
            evaluate: Evaluates the operations.
            eqns: The operations.
            avals: Types of the results.
            inputs: The operands.
            arrays: Values of the constant arrays, by their `id`.
            eqn: The operation, if it is a single one with these operands.
        """
        needs_id = any(names_axis(inner) for eqn in eqns for inner in with_inner(eqn))
        more = [*arrays.values(), *([self.replica_id] if needs_id else [])]
        num = len(inputs)

        def run(*arguments: Any) -> list[Any]:
            def replica_id(eqn: JaxprEqn) -> Rule | None:
                return (lambda *_: [arguments[-1]]) if names_axis(eqn) else None

            replacements = dict(zip(arrays, arguments[num:], strict=False))
            rules = {**self.rules, "axis_index": replica_id}
            lowering = Lowering(replacements, rules, opens=self.has_arrays)
            return evaluate(lowering, arguments[:num])

        outputs = [Value(aval) for aval in avals]
        effects = [effect for eqn in eqns for effect in eqn.effects]
        is_ordered = any("Ordered" in type(effect).__name__ for effect in effects)
        moves = eqn is not None and eqn.primitive.name in ("transpose", "reshape")
        return self.add(
            Computation([*inputs, *more], outputs, run, bool(effects), is_ordered, eqn, moves)
        )

    def add(self, step: Computation | Communication) -> list[Value]:
        self.steps.append(step)
        return step.outputs

    def local(self, atom: Atom) -> Value:
        """Returns the value as a per-replica output of a stage."""
        copy = lambda x: [jnp.asarray(x)]  # noqa: E731
        return self.add(Computation([atom], [Value(atom.aval)], copy, moves=True))[0]

    def collective(self, eqn: JaxprEqn, operand: Atom, aval: Any) -> Value:
        name = eqn.primitive.name
        if name not in PRIMITIVES or not PRIMITIVES[name].runs_on_host:
            raise NotImplementedError(_message(eqn, f"`{name}` is not implemented on the host"))
        others = tuple(axis for axis in axes_of(eqn) if not isinstance(axis, str))
        if others and (name not in ALL_REDUCES or not all(isinstance(a, int) for a in others)):
            raise NotImplementedError(_message(eqn, f"`{name}` also reduces the axes {others}"))
        value = self.local(operand)
        dtype = value.aval.dtype
        _require_on_host(eqn, dtype)
        if jnp.issubdtype(dtype, jax.dtypes.prng_key):
            return self.collective_of_keys(eqn, value, aval)
        if others:
            shape = tuple(s for i, s in enumerate(value.aval.shape) if i not in others)
            run = lambda x: [reduce_locally(name, x, others)]  # noqa: E731
            reduced = Value(jax.core.ShapedArray(shape, dtype))
            (value,) = self.add(Computation([value], [reduced], run))
        return self.add_collective(eqn, value, aval)

    def add_collective(self, eqn: JaxprEqn, operand: Value, aval: Any) -> Value:
        result = Value(aval, _layout(eqn))
        lines = [user_line(eqn)]
        return self.add(Collective([operand], [result], eqn.primitive.name, eqn.params, lines))[0]

    def collective_of_keys(self, eqn: JaxprEqn, keys: Value, aval: Any) -> Value:
        """Adds a collective of PRNG keys, which are sent as their key data."""

        def data_of(keys: Array) -> list[Array]:
            return [jax.random.key_data(keys)]

        def data_like(aval: Any) -> Any:
            return jax.eval_shape(data_of, struct_of(aval))[0]

        wrap = lambda bits: [keys_like(bits, aval)]  # noqa: E731
        (bits,) = self.add(Computation([keys], [Value(data_like(keys.aval))], data_of))
        result = self.add_collective(eqn, bits, data_like(aval))
        return self.add(Computation([result], [Value(aval)], wrap))[0]

    def stage(self, program: ClosedJaxpr, inputs: Sequence[Atom]) -> StagedJaxpr:
        """Stages an inner program, whose results are per-replica."""
        settings = self.settings._replace(per_replica=[atom.layout.is_own for atom in inputs])
        results = [False] * len(program.jaxpr.outvars)
        return stage_program([program], settings, results, self.rules, has_arrays=self.has_arrays)

    def trace(self, fn: Callable[..., Any], avals: Sequence[Any]) -> ClosedJaxpr:
        """Traces a part of the program."""
        return trace(fn, avals, self.settings.num_replicas, self.settings.axis_name)

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
        body = self.stage(self.trace(iteration, avals), [*reads, *carried])
        outputs = [Value(value.aval) for value in carried]
        loop = Loop([*reads, *carried], outputs, body, None, scan.length, user_line(eqn))
        return self.add(loop)[1:]

    def while_loop(self, eqn: JaxprEqn, inputs: list[Atom]) -> Sequence[Atom]:
        loop = While(eqn)
        test_consts, consts, carry = loop.split(inputs)
        both = [*map(self.value, (*test_consts, *consts)), *map(self.local, carry)]
        avals = [struct_of(value.aval) for value in both]

        def run_test(*values: Any) -> list[Any]:
            test_consts, consts, carry = loop.split(values)
            return [round_of(loop, Evaluation().call, test_consts, consts)[0](carry)]

        def run_body(*values: Any) -> list[Any]:
            test_consts, consts, carry = loop.split(values)
            return round_of(loop, Evaluation().call, test_consts, consts)[1](carry)

        test = self.stage(self.trace(run_test, avals), both)
        body = self.stage(self.trace(run_body, avals), both)
        outputs = [Value(atom.aval) for atom in carry]
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


def _layout(collective: JaxprEqn) -> Layout:
    """Returns how the result of a collective is stored."""
    name = collective.primitive.name
    return Layout() if spans_whole_axis(collective) and name in MIRRORING else OWN


def _require_on_host(eqn: JaxprEqn, dtype: Any) -> None:
    """Rejects a collective of a dtype that NumPy has and JAX does not, as it is configured."""
    if needs_64_bits(dtype):
        reason = f"the operand of `{eqn.primitive.name}` is {dtype}, but jax_enable_x64 is off"
        raise NotImplementedError(_message(eqn, reason))


def _message(eqn: JaxprEqn, reason: str) -> str:
    return (
        f"{user_line(eqn)}: the step cannot be split at its collectives, as the staged executor, "
        f"replicas= and replicas_per_device= require: {reason}. Rewrite the operation, or run it "
        "with mirror.AllReduce(), on devices of a single type, without replicas= and "
        "replicas_per_device=."
    )
