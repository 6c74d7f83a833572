"""`cut` makes a program flat, by opening what has collectives inside, and cuts it into stages."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from mirror._src.program.axis import axis_name
from mirror._src.program.collective_eqns import (
    axes_of,
    contains_collective,
    is_collective,
    names_axis,
)
from mirror._src.program.evaluate import Evaluation, Lowering, Rule, Rules
from mirror._src.program.jaxprs import (
    Scan,
    While,
    arrays_in,
    arrays_of,
    called,
    equations,
    inner_programs,
    jaxpr_of,
    walk,
)
from mirror._src.program.staging.ir import (
    REDUCTIONS,
    Atom,
    Branch,
    Collective,
    Communication,
    Constant,
    Loop,
    Operation,
    StagedJaxpr,
    Value,
)
from mirror._src.program.staging.pack import packed
from mirror._src.program.staging.schedule import in_stages, needed
from mirror._src.program.trace import struct_of, trace
from mirror._src.program.user_lines import user_line
from mirror._src.utils.types import Array
from mirror._src.values.per_replica import is_numeric

_LOCAL = {"psum": jax.lax.reduce_sum, "pmax": jax.lax.reduce_max, "pmin": jax.lax.reduce_min}
_MOVES = ("all_gather", "reduce_scatter", "ppermute", "all_to_all", "pbroadcast")


def cut(
    program: ClosedJaxpr,
    mirrored_inputs: Sequence[bool],
    mirrored_outputs: Sequence[bool],
    num_replicas: int,
    pack_bytes: int,
    finish: ClosedJaxpr | None = None,
    rules: Rules | None = None,
) -> StagedJaxpr:
    """Cuts a replica program at its collectives.

    Args:
        program: the replica program.
        mirrored_inputs: for each input, whether it comes as a mirrored array.
        mirrored_outputs: for each output, whether it is to be left as one.
        num_replicas: the size of the replica axis.
        pack_bytes: reductions of at most this many bytes travel together.
        finish: a program after it, of the same inputs and then its outputs.
        rules: operations that are replaced, as of `Lowering`.

    Raises:
        NotImplementedError: replicas communicate in an operation that cannot be opened.
    """
    inputs = [
        Value(var.aval, mirrored=mirrored)
        for var, mirrored in zip(program.jaxpr.invars, mirrored_inputs, strict=True)
    ]
    flat = _Flat(num_replicas, pack_bytes, rules or {})
    outputs = flat.whole(program, inputs)
    if finish is not None:
        outputs = flat.walk(finish, [*inputs, *outputs])
    steps = needed(flat.steps, outputs)
    steps = packed(steps, pack_bytes)
    stages = in_stages(steps, outputs)
    return StagedJaxpr(
        inputs, flat.replica_id, list(flat.held.values()), stages, list(mirrored_outputs)
    )


class _Flat:
    """The program without calls around its collectives."""

    def __init__(self, num_replicas: int, pack_bytes: int, rules: Rules) -> None:
        self.num_replicas = num_replicas
        self.rules = rules
        self.pack_bytes = pack_bytes
        self.steps: list[Operation | Communication] = []
        self.held: dict[int, tuple[Value, Array]] = {}
        self.replica_id = Value(jax.core.ShapedArray((), jnp.int32))

    def whole(self, program: ClosedJaxpr, arguments: Sequence[Atom]) -> Sequence[Atom]:
        """The program; in one piece if it has no collectives, so that it may use a `Ref`."""
        if contains_collective(program.jaxpr):
            return self.walk(program, arguments)
        avals = [var.aval for var in program.jaxpr.outvars]
        held = {id(array): self.fixed(array) for array in arrays_in(program)}

        def run(lowering: Lowering, arguments: Sequence[Any]) -> list[Any]:
            return lowering.call(program, arguments)

        return self.replayed(run, list(program.jaxpr.eqns), avals, arguments, held)

    def walk(self, program: ClosedJaxpr | Jaxpr, arguments: Sequence[Atom]) -> list[Atom]:
        return walk(program, arguments, self.fixed, self.equation)

    def fixed(self, value: Any) -> Atom:
        """An array is handed to the stages that read it; a number stands in their code."""
        if not isinstance(value, jax.Array):
            return Constant(value)
        if id(value) not in self.held:
            self.held[id(value)] = Value(value.aval, mirrored=True), value
        return self.held[id(value)][0]

    def equation(self, eqn: JaxprEqn, inputs: list[Atom]) -> Sequence[Atom]:
        name = eqn.primitive.name
        if is_collective(eqn):
            return [self.collective(eqn, atom) for atom in inputs]
        if name == "axis_index" and names_axis(eqn):
            return [self.replica_id]
        if not any(map(contains_collective, map(jaxpr_of, inner_programs(eqn.params.values())))):
            return self.operation(eqn, inputs)
        program = called(eqn)
        if program is not None:
            return self.walk(program, inputs)
        rule = {"scan": self.scan, "while": self.while_loop, "cond": self.cond}.get(name)
        if rule is None:
            raise NotImplementedError(_cannot(eqn, f"replicas communicate inside `{name}`"))
        return rule(eqn, inputs)

    def operation(self, eqn: JaxprEqn, inputs: list[Atom]) -> list[Value]:
        for atom in (*eqn.invars, *eqn.outvars):
            if hasattr(atom.aval, "inner_aval"):
                raise NotImplementedError(_cannot(eqn, "it works on a mutable `Ref`"))
        held = {id(array): self.fixed(array) for array in arrays_of(eqn)}

        def run(lowering: Lowering, arguments: Sequence[Any]) -> list[Any]:
            return lowering.apply(eqn, list(arguments))

        return self.replayed(run, [eqn], [var.aval for var in eqn.outvars], inputs, held)

    def replayed(
        self,
        replay: Callable[[Lowering, Sequence[Any]], list[Any]],
        eqns: Sequence[JaxprEqn],
        avals: Sequence[Any],
        inputs: Sequence[Atom],
        held: dict[int, Atom],
    ) -> list[Value]:
        """An operation that evaluates others on the mesh of a lane."""
        within = [inner for eqn in eqns for inner in _with_inner(eqn)]
        asks = any(map(names_axis, within))
        more = [*held.values(), *([self.replica_id] if asks else [])]
        num = len(inputs)

        def run(*arguments: Any) -> list[Any]:
            arrays = dict(zip(held, arguments[num:], strict=False))

            def number(eqn: JaxprEqn) -> Rule | None:
                return (lambda *_: [arguments[-1]]) if names_axis(eqn) else None

            lowering = Lowering(arrays, {**self.rules, "axis_index": number})
            return replay(lowering, arguments[:num])

        outputs = [Value(aval) for aval in avals]
        effects = [effect for eqn in eqns for effect in eqn.effects]
        is_ordered = any("Ordered" in type(effect).__name__ for effect in effects)
        return self.add(Operation([*inputs, *more], outputs, run, bool(effects), is_ordered))

    def add(self, step: Operation | Communication) -> list[Value]:
        self.steps.append(step)
        return step.outputs

    def local(self, atom: Atom) -> Value:
        """The value as rows, which a stage has left."""
        aval = atom.aval if isinstance(atom, Value) else jax.typeof(atom.value)
        return self.add(Operation([atom], [Value(aval)], lambda x: [jnp.asarray(x)]))[0]

    def collective(self, eqn: JaxprEqn, operand: Atom) -> Value:
        kind, params = eqn.primitive.name, eqn.params
        if kind not in REDUCTIONS and kind not in _MOVES:
            raise NotImplementedError(_cannot(eqn, f"`{kind}` has no counterpart on the host"))
        others = tuple(axis for axis in axes_of(eqn) if axis != axis_name())
        if others and (kind not in _LOCAL or not all(isinstance(a, int) for a in others)):
            raise NotImplementedError(_cannot(eqn, f"it goes over other axes as well, {others}"))
        value = self.local(operand)
        dtype = value.aval.dtype
        if is_numeric(dtype) and jax.dtypes.canonicalize_dtype(dtype) != dtype:
            raise NotImplementedError(_cannot(eqn, f"{dtype} travels while JAX's 64 bit are off"))
        if jnp.issubdtype(value.aval.dtype, jax.dtypes.prng_key):
            return self.collective_of_keys(eqn, value)
        if others:
            reduce = _LOCAL[kind]
            shape = tuple(s for i, s in enumerate(value.aval.shape) if i not in others)
            aval = jax.core.ShapedArray(shape, value.aval.dtype)
            run = lambda x: [reduce(x, others)]  # noqa: E731
            value = self.add(Operation([value], [Value(aval)], run))[0]
        result = Value(eqn.outvars[0].aval, mirrored=_goes_to_all(eqn))
        return self.add(Collective(kind, params, [value], [result], [user_line(eqn)]))[0]

    def collective_of_keys(self, eqn: JaxprEqn, keys: Value) -> Value:
        """PRNG keys travel as the numbers they are made of."""
        impl: list[Any] = []

        def data_of(keys: Array) -> list[Array]:
            impl[:] = [jax.random.key_impl(keys)]
            return [jax.random.key_data(keys)]

        def data_like(aval: Any) -> Any:
            return jax.eval_shape(data_of, struct_of(aval))[0]

        bits = self.add(Operation([keys], [Value(data_like(keys.aval))], data_of))[0]
        found = Value(data_like(eqn.outvars[0].aval), mirrored=_goes_to_all(eqn))
        communication = Collective(
            eqn.primitive.name, eqn.params, [bits], [found], [user_line(eqn)]
        )
        wrap = lambda bits: [jax.random.wrap_key_data(bits, impl=impl[0])]  # noqa: E731
        return self.add(Operation(self.add(communication), [Value(eqn.outvars[0].aval)], wrap))[0]

    def cut(self, program: ClosedJaxpr, inputs: Sequence[Atom]) -> StagedJaxpr:
        """An inner program; its results are rows."""
        mirrored = [isinstance(atom, Value) and atom.mirrored for atom in inputs]
        num_outputs = len(program.jaxpr.outvars)
        rows = [False] * num_outputs
        n, limit = self.num_replicas, self.pack_bytes
        return cut(program, mirrored, rows, n, limit, rules=self.rules)

    def scan(self, eqn: JaxprEqn, inputs: list[Atom]) -> Sequence[Atom]:
        scan = Scan(eqn)
        consts, carry, xs = scan.split(inputs)
        stacked: list[Any] = eqn.outvars[scan.num_carry :]
        if any(jnp.issubdtype(var.aval.dtype, jax.dtypes.extended) for var in stacked):
            raise NotImplementedError(_cannot(eqn, "it stacks up PRNG keys; stack their key data"))
        if not scan.length:  # there is no slice to trace an iteration with
            return [*carry, *(self.empty(var.aval) for var in stacked)]
        step = -1 if scan.reverse else 1

        def iteration(*values: Any) -> list[Any]:
            reads, (i, *carried) = values[:num_reads], values[num_reads:]
            ys = carried[scan.num_carry :]
            here = [jax.lax.dynamic_index_in_dim(x, i, 0, keepdims=False) for x in reads[first_x:]]
            outputs = Evaluation().call(
                scan.body, [*reads[:first_x], *carried[: scan.num_carry], *here]
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
        body = self.cut(trace(iteration, avals, self.num_replicas), [*reads, *carried])
        outputs = [Value(value.aval) for value in carried]
        loop = Loop([*reads, *carried], outputs, body, None, scan.length, user_line(eqn))
        return self.add(loop)[1:]

    def while_loop(self, eqn: JaxprEqn, inputs: list[Atom]) -> Sequence[Atom]:
        loop = While(eqn)
        test_consts, consts, carry = loop.split(inputs)
        num_test, num_consts = len(test_consts), len(consts)
        reads = [self.value(atom) for atom in (*test_consts, *consts)]
        carried = [self.local(atom) for atom in carry]

        def goes_on(*values: Any) -> list[Any]:
            operands = [*values[:num_test], *values[num_test + num_consts :]]
            return Evaluation().call(loop.test, operands)

        def once(*values: Any) -> list[Any]:
            return Evaluation().call(loop.body, values[num_test:])

        avals = [struct_of(value.aval) for value in (*reads, *carried)]
        both = [*reads, *carried]
        test, body = [self.cut(trace(fn, avals, self.num_replicas), both) for fn in (goes_on, once)]
        outputs = [Value(value.aval) for value in carried]
        return self.add(Loop([*both], outputs, body, test, 0, user_line(eqn)))

    def cond(self, eqn: JaxprEqn, inputs: list[Atom]) -> Sequence[Atom]:
        index, *operands = inputs
        reads = [self.value(atom) for atom in operands]
        branches = [self.cut(program, reads) for program in eqn.params["branches"]]
        outputs = [Value(var.aval) for var in eqn.outvars]
        return self.add(Branch([self.local(index), *reads], outputs, branches, user_line(eqn)))

    def value(self, atom: Atom) -> Value:
        """The value itself, or a number as one."""
        return atom if isinstance(atom, Value) else self.local(atom)

    def empty(self, aval: Any) -> Value:
        """Zeros, on each replica."""
        make = lambda: [jnp.zeros(aval.shape, aval.dtype)]  # noqa: E731
        return self.add(Operation([], [Value(aval)], make))[0]


def _with_inner(eqn: JaxprEqn) -> Iterator[JaxprEqn]:
    """An operation and those inside."""
    yield eqn
    for inner in inner_programs(eqn.params.values()):
        yield from equations(jaxpr_of(inner))


def _goes_to_all(eqn: JaxprEqn) -> bool:
    """Whether all replicas get the same of a collective."""
    gives_one = eqn.primitive.name in (*REDUCTIONS, "all_gather")
    return gives_one and not eqn.params.get("axis_index_groups")


def _cannot(eqn: JaxprEqn, why: str) -> str:
    return (
        f"{user_line(eqn)}: the step cannot be split at its collectives, as the staged executor "
        f"requires: {why}. Rewrite the operation, or run on devices of a single type with "
        "mirror.AllReduce()."
    )
