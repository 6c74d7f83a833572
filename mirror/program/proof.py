"""The proof: which values of a replica program are the same on every replica.

A data-flow pass over the jaxpr. Inputs are what they are; `axis_index` and the exchanges that hand
each replica its own part are per-replica; `psum`, `pmax`, `pmin` and `all_gather` over the whole
replica axis are mirrored; anything else is per-replica as soon as one of its inputs is. Loops are
brought to a fixpoint. What the pass does not know (a primitive with inner programs that is none of
the below) it takes for per-replica as soon as an input or anything inside is.
"""

import functools
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from mirror._errors import ReplicaDivergenceError, listing
from mirror._frames import is_users, place
from mirror.program.ensure import ensured_p
from mirror.program.exchanges import contains_exchange, is_exchange, names_axis, past
from mirror.program.inner import Scan, While, called, equations, inner_programs, jaxpr_of
from mirror.program.trace import trace

_MIRRORING = frozenset({"psum", "pmax", "pmin", "all_gather"})
_IMPURE = frozenset({"io_callback", "rng_uniform"})
_DRAWS = frozenset({"random_bits", "random_gamma", "rng_bit_generator"})
_NO_LINE = "an unknown line"
_REF_READS = frozenset({"get"})
_PASSING = frozenset({"optimization_barrier", "device_put", "ensure_mirrored"})


@dataclass(frozen=True)
class Mark:
    """What the proof knows of a value.

    Attributes:
        origin: what made it per-replica, a user's line or an input's index; `None`: it is mirrored.
        source: the variable it is an unchanged copy of.
        behind: the exchanges whose results a mirrored value was computed from, in words; noted
            only where somebody asks.
    """

    origin: int | str | None = None
    source: object = None
    behind: frozenset[str] = frozenset()

    @property
    def per_replica(self) -> bool:
        """Whether replicas may hold different values."""
        return self.origin is not None

    def join(self, other: "Mark") -> "Mark":
        """What is known of a value that may be either."""
        origin = other.origin if self.origin is None else self.origin
        source = self.source if self.source is other.source else None
        return Mark(origin, source, self.behind | other.behind)

    def of(self, source: object) -> "Mark":
        """The same of a value that is a copy of this variable, or of none."""
        return Mark(self.origin, source, self.behind)


_MIRRORED = Mark()


def prove(
    jaxpr: ClosedJaxpr,
    per_replica: Sequence[bool],
    num_replicas: int = 1,
    shared_draws: list[str] | None = None,
    problems: list[str] | None = None,
) -> list[Mark]:
    """Marks the outputs of a replica program whose inputs are per-replica as told.

    Args:
        jaxpr: the replica program.
        per_replica: for each input, whether replicas may hold different values.
        num_replicas: the size of the replica axis.
        shared_draws: gets the user's lines that draw the same random numbers on all replicas.
        problems: gets what would be refused, for a report, and nothing is; the marks then say which
            exchanges are behind them.

    Raises:
        ReplicaDivergenceError: an exchange stands under a `cond`, `switch` or `while` that replicas
            may take differently: it would wait for ever.
    """
    inputs = [Mark(i if differs else None) for i, differs in enumerate(per_replica)]
    named = [Mark(m.origin, var) for m, var in zip(inputs, jaxpr.jaxpr.invars, strict=True)]
    walk = _Pass(num_replicas, reports=problems is not None)
    marks = walk.closed(jaxpr, named)[0]
    if problems is not None:
        problems += walk.problems
    if shared_draws is not None:
        shared_draws += walk.shared_draws
    return marks


class _Pass:
    """One walk through a program. `control` says under which per-replica branch it stands."""

    def __init__(self, num_replicas: int, *, reports: bool = False) -> None:
        self.num_replicas = num_replicas
        self.reports = reports
        self.problems: dict[str, None] = {}
        self.control: str | None = None
        self.within: list[JaxprEqn] = []
        self.shared_draws: dict[str, None] = {}

    def refuse(self, message: str) -> None:
        """Ends the proof, or notes for a report that it would have ended."""
        if not self.reports:
            raise ReplicaDivergenceError(message)
        self.problems[message] = None

    def closed(self, jaxpr: ClosedJaxpr, marks: Sequence[Mark]) -> tuple[list[Mark], list[Mark]]:
        return self.walk(jaxpr.jaxpr, marks)

    def walk(self, jaxpr: Jaxpr, marks: Sequence[Mark]) -> tuple[list[Mark], list[Mark]]:
        """Marks of the outputs, and of the inputs afterwards (a `Ref` may have been written)."""
        env: dict[Any, Mark] = dict.fromkeys(jaxpr.constvars, _MIRRORED)
        pairs = zip(jaxpr.invars, marks, strict=True)
        env.update((var, mark.of(mark.source or var)) for var, mark in pairs)

        def read(atom: Any) -> Mark:
            return _MIRRORED if isinstance(atom, Literal) else env[atom]

        for eqn in jaxpr.eqns:
            before = [read(atom) for atom in eqn.invars]
            outputs, after = self.equation(eqn, before)
            for atom, mark in zip(eqn.invars, after, strict=True):
                if _is_ref(atom):
                    env[atom] = mark
            # A variable of an inner program stands for another value in each of its calls.
            known = {id(mark.source) for mark in before}
            for var, mark in zip(eqn.outvars, outputs, strict=True):
                env[var] = mark.of(mark.source if id(mark.source) in known else var)
        after = [
            env[var].of(None) if _is_ref(var) else mark
            for var, mark in zip(jaxpr.invars, marks, strict=True)
        ]
        return [read(atom) for atom in jaxpr.outvars], after

    def equation(self, eqn: JaxprEqn, marks: list[Mark]) -> tuple[list[Mark], list[Mark]]:
        name = eqn.primitive.name
        if self.control is not None and is_exchange(eqn):
            self.refuse(_would_hang(eqn, self.control))
        self.require_ensured(eqn, marks)
        if name == "scan":
            return self.scan(eqn, marks)
        if name == "while":
            return self.while_loop(eqn, marks)
        if name == "cond":
            return self.cond(eqn, marks)
        if name == "custom_linear_solve":
            return self.linear_solve(eqn, marks)
        if name in _PASSING:
            return list(marks), marks
        if name == "call_hi_primitive":
            return self.closed(_expanded(eqn, self.num_replicas), marks)
        program = called(eqn)
        if program is not None:
            self.within.append(eqn)
            found = self.walk(jaxpr_of(program), marks)
            self.within.pop()
            return found
        inner = list(map(jaxpr_of, inner_programs(eqn.params.values())))
        if inner:
            return self.opaque(eqn, marks, inner)
        return self.plain(eqn, marks)

    def plain(self, eqn: JaxprEqn, marks: list[Mark]) -> tuple[list[Mark], list[Mark]]:
        """An ordinary operation, an exchange, or a read or write of a `Ref`."""
        if eqn.primitive.name in _MIRRORING and _spans_whole_axis(eqn):
            return [self.exchanged(eqn)] * len(eqn.outvars), marks
        joined = _computed(marks)
        if eqn.primitive.name in _DRAWS and not joined.per_replica:
            self.shared_draws[line_within(eqn, self.within)] = None
        if _is_replica_source(eqn) and not joined.per_replica:
            joined = Mark(f"{eqn.primitive.name} at {user_line(eqn)}")
        if eqn.primitive.name not in _REF_READS:
            marks = self.written(eqn, marks, joined)
        return [joined] * len(eqn.outvars), marks

    def require_ensured(self, eqn: JaxprEqn, marks: list[Mark]) -> None:
        """Refuses an `ensure_mirrored` of values that replicas may differ in."""
        if eqn.primitive is not ensured_p:
            return
        pairs = zip(eqn.params["names"], marks, strict=True)
        differing = [name for name, mark in pairs if mark.per_replica]
        if differing:
            self.refuse(
                f"ensure_mirrored at {user_line(eqn)}: replicas may hold different values of\n"
                f"{listing(differing)}\nReduce what is computed from per-replica data first:\n"
                '  grads = mirror.get_replica_context().all_reduce("mean", grads)'
            )

    def exchanged(self, eqn: JaxprEqn) -> Mark:
        """What is known of the result of an exchange."""
        if not self.reports:
            return _MIRRORED
        return Mark(behind=frozenset({f"{past(eqn)} at {line_within(eqn, self.within)}"}))

    def written(self, eqn: JaxprEqn, marks: Sequence[Mark], value: Mark) -> list[Mark]:
        """Marks of the inputs after the value, or not, was written to the `Ref`s among them."""
        value = value.join(Mark(self.control))
        pairs = zip(eqn.invars, marks, strict=True)
        return [mark.join(value) if _is_ref(atom) else mark for atom, mark in pairs]

    def linear_solve(self, eqn: JaxprEqn, marks: list[Mark]) -> tuple[list[Mark], list[Mark]]:
        """`custom_linear_solve` runs its `solve`; the other programs are for its derivatives."""
        lengths, solve = eqn.params["const_lengths"], eqn.params["jaxprs"].solve
        start = lengths.matvec + lengths.vecmat
        consts, rest = marks[start : start + lengths.solve], marks[sum(lengths) :]
        return self.closed(solve, [*consts, *rest])[0], marks

    def opaque(
        self, eqn: JaxprEqn, marks: list[Mark], inner: list[Jaxpr]
    ) -> tuple[list[Mark], list[Mark]]:
        """Inner programs of unknown meaning: everything that comes out is as bad as the worst."""
        worst = _computed(marks)
        if not worst.per_replica and any(_contains_replica_source(program) for program in inner):
            worst = Mark(f"{eqn.primitive.name} at {user_line(eqn)}")
        if worst.per_replica and any(map(contains_exchange, inner)):
            self.refuse(
                f"{user_line(eqn)}: replicas talk inside `{eqn.primitive.name}`, which may run "
                "differently on each of them. Move the all-reduce out of it."
            )
        return [worst] * len(eqn.outvars), self.written(eqn, marks, worst)

    def scan(self, eqn: JaxprEqn, marks: list[Mark]) -> tuple[list[Mark], list[Mark]]:
        scan = Scan(eqn)
        num_consts, num_carry = scan.num_consts, scan.num_carry
        marks = list(marks)
        carry = slice(num_consts, num_consts + num_carry)
        while True:
            # A slice is not its array, so it is a copy of nothing.
            marks[carry.stop :] = [mark.of(None) for mark in marks[carry.stop :]]
            outputs, after = self.closed(scan.body, marks)
            joined = [*after[:num_consts], *_joins(marks[carry], outputs[:num_carry])]
            joined += after[carry.stop :]
            if joined == marks:
                break
            marks = joined
        stacked = [mark.of(None) for mark in outputs[num_carry:]]
        return [*marks[carry], *stacked], [*marks[:num_consts], *marks[num_consts:]]

    def while_loop(self, eqn: JaxprEqn, marks: list[Mark]) -> tuple[list[Mark], list[Mark]]:
        loop = While(eqn)
        test, body = loop.test, loop.body
        test_consts, consts, carry = loop.split(marks)
        num_test, num_body = len(test_consts), len(consts)
        while True:
            (predicate,), test_after = self.closed(test, [*test_consts, *carry])
            with _under(self, predicate, eqn):
                if predicate.per_replica and contains_exchange(test.jaxpr):
                    self.refuse(_would_hang(eqn, self.control or ""))
                outputs, after = self.closed(body, [*consts, *carry])
            joined = [_chosen(pair, predicate) for pair in zip(carry, outputs, strict=True)]
            new = (test_after[:num_test], after[:num_body], joined)
            if new == (test_consts, consts, carry):
                return carry, [*test_consts, *consts, *carry]
            test_consts, consts, carry = new

    def cond(self, eqn: JaxprEqn, marks: list[Mark]) -> tuple[list[Mark], list[Mark]]:
        predicate, operands = marks[0], marks[1:]
        with _under(self, predicate, eqn):
            walked = [self.closed(branch, operands) for branch in eqn.params["branches"]]
        outputs = [_chosen(each, predicate) for each in zip(*(o for o, _ in walked), strict=True)]
        after = [_either(each) for each in zip(*(a for _, a in walked), strict=True)]
        return outputs, [predicate, *after]


class _under:
    """While inside, the pass stands under a control that replicas may take differently."""

    def __init__(self, walk: _Pass, predicate: Mark, eqn: JaxprEqn) -> None:
        self.walk, self.saved = walk, walk.control
        if predicate.per_replica and walk.control is None:
            self.inside: str | None = f"the `{eqn.primitive.name}` at {user_line(eqn)}"
        else:
            self.inside = walk.control

    def __enter__(self) -> None:
        self.walk.control = self.inside

    def __exit__(self, *_: object) -> None:
        self.walk.control = self.saved


def _computed(marks: Sequence[Mark]) -> Mark:
    """What is known of a value computed from values with these marks."""
    origins = [mark.origin for mark in marks if mark.per_replica]
    inputs = [origin for origin in origins if isinstance(origin, int)]  # says most to the user
    behind = [mark.behind for mark in marks if mark.behind]
    origin = next(iter([*inputs, *origins]), None)
    return Mark(origin, None, frozenset().union(*behind) if behind else frozenset())


def _either(marks: Iterable[Mark]) -> Mark:
    """What is known of a value that is one of several."""
    return functools.reduce(Mark.join, marks)


def _chosen(marks: Iterable[Mark], predicate: Mark) -> Mark:
    """What is known of a value that the predicate picks from several, unless all are one."""
    mark = _either(marks)
    return mark if mark.source is not None else mark.join(predicate.of(None))


def _expanded(eqn: JaxprEqn, num_replicas: int) -> ClosedJaxpr:
    """The program of a hijax primitive, whose parameters do not show it (JAX 0.12)."""
    primitive = eqn.params["_prim"]

    def expand(*leaves: Any) -> list[Any]:
        return jax.tree.leaves(primitive.expand(*primitive.in_tree.unflatten(leaves)))

    avals: list[Any] = [atom.aval for atom in eqn.invars]
    return trace(expand, avals, num_replicas)


def _is_ref(atom: Any) -> bool:
    """Whether the value can be written to: a `Ref`, or a mutable hijax type."""
    return hasattr(atom.aval, "inner_aval") or getattr(atom.aval, "has_qdd", False)


def _is_replica_source(eqn: JaxprEqn) -> bool:
    impure = eqn.primitive.name in _IMPURE or eqn.params.get("has_side_effect", False)
    return names_axis(eqn) or impure


def _joins(left: Sequence[Mark], right: Sequence[Mark]) -> list[Mark]:
    return [a.join(b) for a, b in zip(left, right, strict=True)]


def _spans_whole_axis(eqn: JaxprEqn) -> bool:
    return names_axis(eqn) and eqn.params.get("axis_index_groups") is None


def _contains_replica_source(jaxpr: Jaxpr) -> bool:
    return any(map(_is_replica_source, equations(jaxpr)))


def _would_hang(eqn: JaxprEqn, control: str) -> str:
    return (
        f"The {eqn.primitive.name} at {user_line(eqn)} stands under {control}, whose condition may "
        "differ between replicas: some would wait for the others for ever. Make the condition the "
        'same on all replicas, e.g. with replica_context.all_reduce("max", condition), or move '
        "the exchange out of the branch."
    )


def user_line(eqn: JaxprEqn) -> str:
    """Where in the user's own code an operation was written: `train.py:42 in step`."""
    frames = eqn.source_info.traceback
    if frames is None:
        return _NO_LINE
    for frame in reversed(traceback.extract_tb(frames.as_python_traceback())):
        if is_users(frame.filename):
            return f"{place(frame.filename, frame.lineno)} in {frame.name}"
    return _NO_LINE


def line_within(eqn: JaxprEqn, around: Sequence[JaxprEqn]) -> str:
    """The user's line; JAX's own functions are traced once and know only who called first."""
    for outer in reversed(around):
        if user_line(eqn) != _NO_LINE:
            break
        eqn = outer
    return user_line(eqn)
