"""Staging: a replica program cut at its exchanges.

The program is made flat first: calls with exchanges inside are opened, a loop or branch with
exchanges inside becomes one step whose own program is cut in turn. Each value then has a level, the
number of steps in which replicas talk that lie behind it. What is computed at one level is a stage;
the exchanges of one level travel together, small ones of one kind in one buffer.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from mirror._types import Array
from mirror.packing import join, split
from mirror.program.axis import axis_name
from mirror.program.evaluate import Evaluation, Lowering, Rule, Rules
from mirror.program.exchanges import axes_of, contains_exchange, in_word, is_exchange, names_axis
from mirror.program.inner import (
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
from mirror.program.proof import user_line
from mirror.program.trace import struct_of, trace
from mirror.values import is_numeric

REDUCTIONS = {"psum": "sum", "pmax": "max", "pmin": "min"}
_LOCAL = {"psum": jax.lax.reduce_sum, "pmax": jax.lax.reduce_max, "pmin": jax.lax.reduce_min}
_MOVES = ("all_gather", "reduce_scatter", "ppermute", "all_to_all", "pbroadcast")


class Value:
    """One value of the flat program.

    Attributes:
        aval: shape and dtype, on one replica.
        mirrored: whether it lies on the devices as one mirrored array; else as rows.
    """

    __slots__ = ("aval", "mirrored")

    def __init__(self, aval: Any, *, mirrored: bool = False) -> None:
        self.aval = aval
        self.mirrored = mirrored

    @property
    def num_bytes(self) -> int:
        """How large it is on one replica."""
        return self.aval.size * self.aval.dtype.itemsize


class Fixed(NamedTuple):
    """A number that stands in the program itself."""

    value: Any


Atom: TypeAlias = Value | Fixed


@dataclass(eq=False)
class Operation:
    """What a replica computes by itself."""

    inputs: Sequence[Atom]
    outputs: list[Value]
    run: Callable[..., Sequence[Any]]
    has_effects: bool = False
    is_ordered: bool = False


@dataclass(eq=False)
class Exchange:
    """Where replicas talk.

    Attributes:
        kind: the primitive's name.
        params: its parameters.
        inputs: one operand.
        outputs: one result.
        lines: the user's lines; several where small exchanges travel together.
    """

    kind: str
    params: dict[str, Any]
    inputs: list[Atom]
    outputs: list[Value]
    lines: list[str]
    has_effects: bool = False
    is_ordered: bool = False

    @property
    def operand(self) -> Value:
        """What each replica brings."""
        (value,) = values_of(self.inputs)
        return value

    @property
    def in_words(self) -> str:
        """`all-reduce at train.py:12 in step`."""
        more = f" and {len(self.lines) - 1} more" if len(self.lines) > 1 else ""
        return f"{in_word(self.kind)} at {self.lines[0]}{more}"


@dataclass(eq=False)
class Loop:
    """A loop with exchanges inside, which the host runs iteration by iteration.

    Attributes:
        inputs: what all iterations read, then the carry.
        outputs: the carry at the end.
        body: from both to the next carry.
        test: from both to whether to go on; `None` where the number of trips is known.
        trips: that number.
        line: the user's line.
    """

    inputs: list[Atom]
    outputs: list[Value]
    body: "Staged"
    test: "Staged | None"
    trips: int
    line: str
    has_effects: bool = True
    is_ordered: bool = False


@dataclass(eq=False)
class Branch:
    """A choice with exchanges inside; the first input says which."""

    inputs: list[Atom]
    outputs: list[Value]
    branches: "list[Staged]"
    line: str
    has_effects: bool = True
    is_ordered: bool = False


Talk: TypeAlias = Exchange | Loop | Branch


@dataclass(eq=False)
class Stage:
    """What is computed between two rounds of exchanges, and the round that follows.

    Attributes:
        operations: in order.
        inputs: the values it reads.
        outputs: the values it leaves for later.
        talks: what replicas do together when it is done.
        last_read: values that nobody reads after those.
    """

    operations: list[Operation]
    inputs: list[Value] = field(default_factory=list)
    outputs: list[Atom] = field(default_factory=list)
    talks: list[Talk] = field(default_factory=list)
    last_read: list[Value] = field(default_factory=list)


@dataclass(eq=False)
class Staged:
    """A program cut into stages. The last stage leaves all of the program's outputs, in order.

    Attributes:
        inputs: the program's inputs.
        replica_id: stands for the replica's number.
        held: arrays that the program holds, and what stands for each.
        stages: in order.
        mirrored_outputs: for each output, whether it is left as a mirrored array.
    """

    inputs: list[Value]
    replica_id: Value
    held: list[tuple[Value, Array]]
    stages: list[Stage]
    mirrored_outputs: list[bool]


def cut(
    program: ClosedJaxpr,
    mirrored_inputs: Sequence[bool],
    mirrored_outputs: Sequence[bool],
    num_replicas: int,
    pack_bytes: int,
    finish: ClosedJaxpr | None = None,
    rules: Rules | None = None,
) -> Staged:
    """Cuts a replica program at its exchanges.

    Args:
        program: the replica program.
        mirrored_inputs: for each input, whether it comes as a mirrored array.
        mirrored_outputs: for each output, whether it is to be left as one.
        num_replicas: the size of the replica axis.
        pack_bytes: reductions of at most this many bytes travel together.
        finish: a program after it, of the same inputs and then its outputs.
        rules: operations that are replaced, as of `Lowering`.

    Raises:
        NotImplementedError: replicas talk in an operation that cannot be opened.
    """
    inputs = [
        Value(var.aval, mirrored=mirrored)
        for var, mirrored in zip(program.jaxpr.invars, mirrored_inputs, strict=True)
    ]
    flat = _Flat(num_replicas, pack_bytes, rules or {})
    outputs = flat.whole(program, inputs)
    if finish is not None:
        outputs = flat.walk(finish, [*inputs, *outputs])
    steps = _needed(flat.steps, outputs)
    steps = _packed(steps, pack_bytes)
    stages = _in_stages(steps, outputs)
    return Staged(inputs, flat.replica_id, list(flat.held.values()), stages, list(mirrored_outputs))


class _Flat:
    """The program without calls around its exchanges."""

    def __init__(self, num_replicas: int, pack_bytes: int, rules: Rules) -> None:
        self.num_replicas = num_replicas
        self.rules = rules
        self.pack_bytes = pack_bytes
        self.steps: list[Operation | Talk] = []
        self.held: dict[int, tuple[Value, Array]] = {}
        self.replica_id = Value(jax.core.ShapedArray((), jnp.int32))

    def whole(self, program: ClosedJaxpr, arguments: Sequence[Atom]) -> Sequence[Atom]:
        """The program; in one piece if it has no collectives, so that it may use a `Ref`."""
        if contains_exchange(program.jaxpr):
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
            return Fixed(value)
        if id(value) not in self.held:
            self.held[id(value)] = Value(value.aval, mirrored=True), value
        return self.held[id(value)][0]

    def equation(self, eqn: JaxprEqn, inputs: list[Atom]) -> Sequence[Atom]:
        name = eqn.primitive.name
        if is_exchange(eqn):
            return [self.exchange(eqn, atom) for atom in inputs]
        if name == "axis_index" and names_axis(eqn):
            return [self.replica_id]
        if not any(map(contains_exchange, map(jaxpr_of, inner_programs(eqn.params.values())))):
            return self.operation(eqn, inputs)
        program = called(eqn)
        if program is not None:
            return self.walk(program, inputs)
        rule = {"scan": self.scan, "while": self.while_loop, "cond": self.cond}.get(name)
        if rule is None:
            raise NotImplementedError(_cannot(eqn, f"replicas talk inside `{name}`"))
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

    def add(self, step: Operation | Talk) -> list[Value]:
        self.steps.append(step)
        return step.outputs

    def local(self, atom: Atom) -> Value:
        """The value as rows, which a stage has left."""
        aval = atom.aval if isinstance(atom, Value) else jax.typeof(atom.value)
        return self.add(Operation([atom], [Value(aval)], lambda x: [jnp.asarray(x)]))[0]

    def exchange(self, eqn: JaxprEqn, operand: Atom) -> Value:
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
            return self.exchange_of_keys(eqn, value)
        if others:
            reduce = _LOCAL[kind]
            shape = tuple(s for i, s in enumerate(value.aval.shape) if i not in others)
            aval = jax.core.ShapedArray(shape, value.aval.dtype)
            run = lambda x: [reduce(x, others)]  # noqa: E731
            value = self.add(Operation([value], [Value(aval)], run))[0]
        result = Value(eqn.outvars[0].aval, mirrored=_goes_to_all(eqn))
        return self.add(Exchange(kind, params, [value], [result], [user_line(eqn)]))[0]

    def exchange_of_keys(self, eqn: JaxprEqn, keys: Value) -> Value:
        """PRNG keys travel as the numbers they are made of."""
        impl: list[Any] = []

        def data_of(keys: Array) -> list[Array]:
            impl[:] = [jax.random.key_impl(keys)]
            return [jax.random.key_data(keys)]

        def data_like(aval: Any) -> Any:
            return jax.eval_shape(data_of, struct_of(aval))[0]

        bits = self.add(Operation([keys], [Value(data_like(keys.aval))], data_of))[0]
        found = Value(data_like(eqn.outvars[0].aval), mirrored=_goes_to_all(eqn))
        talk = Exchange(eqn.primitive.name, eqn.params, [bits], [found], [user_line(eqn)])
        wrap = lambda bits: [jax.random.wrap_key_data(bits, impl=impl[0])]  # noqa: E731
        return self.add(Operation(self.add(talk), [Value(eqn.outvars[0].aval)], wrap))[0]

    def cut(self, program: ClosedJaxpr, inputs: Sequence[Atom]) -> Staged:
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
        carried = [self.local(Fixed(start)), *map(self.local, carry), *empty]
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
    """Whether all replicas get the same of an exchange."""
    gives_one = eqn.primitive.name in (*REDUCTIONS, "all_gather")
    return gives_one and not eqn.params.get("axis_index_groups")


def values_of(atoms: Iterable[Atom]) -> list[Value]:
    """The atoms that are no numbers."""
    return [atom for atom in atoms if isinstance(atom, Value)]


def _needed(steps: Sequence[Operation | Talk], outputs: Sequence[Atom]) -> list[Operation | Talk]:
    """The steps without those that nobody reads the results of."""
    wanted, kept = set(values_of(outputs)), list[Operation | Talk]()
    for step in reversed(steps):
        if step.has_effects or not wanted.isdisjoint(step.outputs):
            kept.append(step)
            wanted.update(values_of(step.inputs))
    return kept[::-1]


def _levels(steps: Sequence[Operation | Talk]) -> dict[Any, int]:
    """For each step and each value how many rounds of talk lie behind it; inputs have none."""
    levels: dict[Any, int] = {}
    ordered = 0
    for step in steps:
        level = max((levels.get(value, 0) for value in values_of(step.inputs)), default=0)
        if step.is_ordered:
            level = ordered = max(level, ordered)
        levels[step] = level
        levels.update(dict.fromkeys(step.outputs, level + (not isinstance(step, Operation))))
    return levels


def _packed(steps: list[Operation | Talk], limit: int) -> list[Operation | Talk]:
    """Reductions of one level, kind and dtype, if they are small, as one of one flat buffer."""
    levels = _levels(steps)
    packs: dict[Any, list[Exchange]] = {}
    # A loop or branch was cut for what it reads as it is: mirrored. Out of a buffer come rows.
    read_inside = {
        value
        for step in steps
        if isinstance(step, Loop | Branch)
        for value in values_of(step.inputs)
    }
    for step in steps:
        if (
            isinstance(step, Exchange)
            and step.kind in REDUCTIONS
            and step.outputs[0].mirrored
            and step.outputs[0] not in read_inside
        ):
            value = step.operand
            if 0 < value.num_bytes <= limit:
                packs.setdefault((levels[step], step.kind, value.aval.dtype), []).append(step)
    members = {step: pack for pack in packs.values() if len(pack) > 1 for step in pack}
    found: list[Operation | Talk] = []
    for step in steps:
        pack = members.get(step) if isinstance(step, Exchange) else None
        if pack is None:
            found.append(step)
        elif step is pack[-1]:
            found += _pack(pack)
    return _sorted(found)


def _pack(pack: list[Exchange]) -> list[Operation | Talk]:
    operands = [step.operand for step in pack]
    avals = [value.aval for value in operands]
    aval = jax.core.ShapedArray((sum(each.size for each in avals),), avals[0].dtype)
    flat, reduced = Value(aval), Value(aval, mirrored=True)
    lines = [line for step in pack for line in step.lines]
    results = [step.outputs[0] for step in pack]
    for value in results:
        value.mirrored = False
    return [
        Operation(list(operands), [flat], lambda *values: [join(values)]),
        Exchange(pack[0].kind, pack[0].params, [flat], [reduced], lines),
        Operation([reduced], results, lambda value: split(value, avals)),
    ]


def _sorted(steps: list[Operation | Talk]) -> list[Operation | Talk]:
    """In an order in which each step comes after those that make what it reads."""
    maker = {value: step for step in steps for value in step.outputs}
    placed: dict[Operation | Talk, None] = {}
    for root in steps:
        waiting = [root]
        while waiting:
            step = waiting[-1]
            before = [maker[v] for v in values_of(step.inputs) if v in maker]
            missing = [s for s in before if s not in placed]
            if missing:
                waiting += missing
            else:
                placed[waiting.pop()] = None
    return list(placed)


def _in_stages(steps: list[Operation | Talk], outputs: Sequence[Atom]) -> list[Stage]:
    levels = _levels(steps)
    last = max([0, *(levels[value] for step in steps for value in step.outputs)])
    _delay(steps, outputs, levels, last)
    stages = [Stage([]) for _ in range(last + 1)]
    for step in steps:
        stage = stages[levels[step]]
        if isinstance(step, Operation):
            stage.operations.append(step)
        else:
            stage.talks.append(step)
    _connect(stages, outputs)
    return stages


def _delay(
    steps: list[Operation | Talk], outputs: Sequence[Atom], levels: dict[Any, int], last: int
) -> None:
    """Puts off what only a later stage reads, where less has to be kept for it than it makes.

    A momentum's decay needs no gradient; but computed at once it would be a copy of the state.
    """
    latest: dict[Value, int] = dict.fromkeys(values_of(outputs), last)
    possible: dict[Operation, int] = {}
    for step in reversed(steps):
        level = levels[step]
        if isinstance(step, Operation) and not step.has_effects:
            level = possible[step] = min([latest.get(value, last) for value in step.outputs])
        for value in values_of(step.inputs):
            latest[value] = min(latest.get(value, last), level)
    made_at: dict[Value, int] = {}
    for step in steps:
        if isinstance(step, Operation) and step in possible:
            values = values_of(step.inputs)
            soonest = max((made_at.get(v, levels.get(v, 0)) for v in values), default=0)
            over = {v for v in values if made_at.get(v, last) < possible[step]}
            kept = sum(value.num_bytes for value in over)
            later = kept < sum(value.num_bytes for value in step.outputs)
            levels[step] = max(soonest, possible[step] if later else 0)
            made_at.update(dict.fromkeys(step.outputs, levels[step]))
        elif isinstance(step, Operation):
            made_at.update(dict.fromkeys(step.outputs, levels[step]))


def _connect(stages: list[Stage], outputs: Sequence[Atom]) -> None:
    """Finds out what goes from stage to stage."""
    later: set[Value] = set()
    for stage in reversed(stages):
        final = stage is stages[-1]
        made = {value: None for op in stage.operations for value in op.outputs}
        after = set(later)
        talked = {value for talk in stage.talks for value in values_of(talk.inputs)}
        stage.outputs = list(outputs) if final else [v for v in made if v in after | talked]
        read = [v for op in stage.operations for v in values_of(op.inputs)]
        read += values_of(outputs) if final else []
        stage.inputs = list(dict.fromkeys(v for v in read if v not in made))
        held = {*stage.inputs, *talked, *values_of(stage.outputs)}
        stage.last_read = [value for value in held if value not in after]
        later |= set(stage.inputs) | talked


def _cannot(eqn: JaxprEqn, why: str) -> str:
    return (
        f"{user_line(eqn)}: the step cannot be cut at its exchanges: {why}. Write it otherwise, or "
        "use devices that one program spans (mirror.AllReduce() on devices of one type)."
    )
