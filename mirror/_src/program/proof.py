"""The proof: which values of a replica program are the same on every replica.

A data-flow pass over the jaxpr. Inputs are what they are; `axis_index` and the collectives that
hand each replica its own part are per-replica; `psum`, `pmax`, `pmin` and `all_gather` over the
whole replica axis are mirrored; anything else is per-replica if one of its inputs is. Loops are
iterated to a fixpoint. The outputs of an unknown primitive with inner programs are per-replica if
an input, or anything inside, is.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from mirror._src.program.collective_eqns import (
    contains_collective,
    is_collective,
    past,
    require_sent,
)
from mirror._src.program.ensure import ensured_p
from mirror._src.program.jaxprs import Scan, While, called, inner_programs, jaxpr_of
from mirror._src.program.marks import MIRRORED, Mark, chosen, computed, either, joins
from mirror._src.program.primitives import (
    DRAWS,
    ELEMENTWISE,
    MIRRORING,
    PASSING,
    PURE,
    REF_READS,
    SHAPING,
    contains_replica_source,
    is_ref,
    is_replica_source,
)
from mirror._src.program.trace import trace
from mirror._src.program.user_lines import line_within, user_line
from mirror._src.utils.errors import ReplicaDivergenceError, listing


@dataclass
class Notes:
    """What the proof notices and does not reject.

    Attributes:
        shared_draws: The user's lines that draw the same random numbers on all replicas.
        shared_noise: Those of them whose numbers are combined, element by element, with values
            that replicas may differ in: dropout, noise, augmentation.
        idle_collectives: Lines of collectives over values that are the same on all replicas, in a
            program in which nothing differs between replicas.
    """

    shared_draws: list[str] = field(default_factory=list)
    shared_noise: list[str] = field(default_factory=list)
    idle_collectives: list[str] = field(default_factory=list)


def prove(
    jaxpr: ClosedJaxpr,
    per_replica: Sequence[bool],
    num_replicas: int = 1,
    notes: Notes | None = None,
    problems: list[str] | None = None,
    names: Sequence[str] = (),
) -> list[Mark]:
    """Marks the outputs of a replica program whose inputs are per-replica as told.

    Args:
        jaxpr: the replica program.
        per_replica: for each input, whether replicas may hold different values.
        num_replicas: the size of the replica axis.
        notes: gets what is worth a warning.
        problems: gets what would be refused, for a report, and nothing is; the marks then say which
            collectives are behind them.
        names: the user's names of the inputs, for messages.

    Raises:
        TypeError: a collective of a dtype that XLA does not send.
        ReplicaDivergenceError: a collective is inside a `cond`, `switch` or `while` that replicas
            may take differently: some would wait forever.
    """
    inputs = [Mark(i if differs else None) for i, differs in enumerate(per_replica)]
    named = [Mark(m.origin, var) for m, var in zip(inputs, jaxpr.jaxpr.invars, strict=True)]
    walk = _Pass(num_replicas, names, reports=problems is not None)
    marks = walk.closed(jaxpr, named)[0]
    if problems is not None:
        problems += walk.problems
    if notes is not None:
        notes.shared_draws += walk.shared_draws
        notes.shared_noise += walk.shared_noise
        differs = any(per_replica) or walk.meets_replica
        notes.idle_collectives += [] if differs else walk.idle
    return marks


class _Pass:
    """One walk through a program. `control` says under which per-replica branch it stands."""

    def __init__(
        self, num_replicas: int, names: Sequence[str] = (), *, reports: bool = False
    ) -> None:
        self.num_replicas = num_replicas
        self.names = names
        self.reports = reports
        self.problems: dict[str, None] = {}
        self.control: str | None = None
        self.within: list[JaxprEqn] = []
        self.shared_draws: dict[str, None] = {}
        self.shared_noise: dict[str, None] = {}
        self.idle: dict[str, None] = {}
        self.meets_replica = False

    def cause(self, mark: Mark) -> str:
        """What made a value per-replica, in words."""
        if isinstance(mark.origin, int):
            return self.names[mark.origin] if self.names else f"input {mark.origin}"
        return str(mark.origin)

    def refuse(self, message: str) -> None:
        """Ends the proof, or notes for a report that it would have ended."""
        if not self.reports:
            raise ReplicaDivergenceError(message)
        self.problems[message] = None

    def closed(self, jaxpr: ClosedJaxpr, marks: Sequence[Mark]) -> tuple[list[Mark], list[Mark]]:
        return self.walk(jaxpr.jaxpr, marks)

    def walk(self, jaxpr: Jaxpr, marks: Sequence[Mark]) -> tuple[list[Mark], list[Mark]]:
        """Marks of the outputs, and of the inputs afterwards (a `Ref` may have been written)."""
        env: dict[Any, Mark] = dict.fromkeys(jaxpr.constvars, MIRRORED)
        pairs = zip(jaxpr.invars, marks, strict=True)
        env.update((var, mark.of(mark.source or var)) for var, mark in pairs)

        def read(atom: Any) -> Mark:
            return MIRRORED if isinstance(atom, Literal) else env[atom]

        for eqn in jaxpr.eqns:
            before = [read(atom) for atom in eqn.invars]
            outputs, after = self.equation(eqn, before)
            for atom, mark in zip(eqn.invars, after, strict=True):
                if is_ref(atom):
                    env[atom] = mark
            # A variable of an inner program stands for another value in each of its calls.
            known = {id(mark.source) for mark in before if mark.source is not None}
            for var, mark in zip(eqn.outvars, outputs, strict=True):
                env[var] = mark.of(mark.source if id(mark.source) in known else var)
        after = [
            env[var].of(None) if is_ref(var) else mark
            for var, mark in zip(jaxpr.invars, marks, strict=True)
        ]
        return [read(atom) for atom in jaxpr.outvars], after

    def equation(self, eqn: JaxprEqn, marks: list[Mark]) -> tuple[list[Mark], list[Mark]]:
        name = eqn.primitive.name
        if self.control is not None and is_collective(eqn):
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
        if name in PASSING:
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
        """An ordinary operation, a collective, or a read or write of a `Ref`."""
        joined = computed(marks)
        if is_collective(eqn):
            require_sent(eqn)
            if not joined.per_replica:
                self.idle[line_within(eqn, self.within)] = None
        if _gives_all_the_same(eqn, joined, self.num_replicas):
            return [self.mark_of_collective(eqn)] * len(eqn.outvars), marks
        joined = self.noted(eqn, marks, joined)
        if is_replica_source(eqn):
            self.meets_replica = True
            if not joined.per_replica:
                joined = Mark(f"{eqn.primitive.name} at {user_line(eqn)}")
        if eqn.primitive.name not in REF_READS:
            marks = self.written(eqn, marks, joined)
        return [joined] * len(eqn.outvars), marks

    def noted(self, eqn: JaxprEqn, marks: list[Mark], joined: Mark) -> Mark:
        """The mark of a computed value, with the draws and callbacks that it was made of."""
        name = eqn.primitive.name
        if name in DRAWS and not joined.per_replica:
            line = line_within(eqn, self.within)
            self.shared_draws[line] = None
            return Mark(None, None, joined.behind, joined.assumed, frozenset({line}))
        if name in PURE and not joined.per_replica:
            line = f"{name} at {line_within(eqn, self.within)}"
            return Mark(None, None, joined.behind, joined.assumed | {line})
        if name not in ELEMENTWISE and name not in SHAPING:
            return joined
        drawn = frozenset().union(*(m.drawn for m in marks if m.drawn and not m.per_replica))
        if not drawn:
            return joined
        if not joined.per_replica:
            return Mark(None, None, joined.behind, joined.assumed, drawn)
        if name in ELEMENTWISE and _rank(eqn.outvars[0].aval):
            self.shared_noise.update(dict.fromkeys(sorted(drawn)))
        return joined

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

    def mark_of_collective(self, eqn: JaxprEqn) -> Mark:
        """What is known of the result of a collective."""
        if not self.reports:
            return MIRRORED
        return Mark(behind=frozenset({f"{past(eqn)} at {line_within(eqn, self.within)}"}))

    def written(self, eqn: JaxprEqn, marks: Sequence[Mark], value: Mark) -> list[Mark]:
        """Marks of the inputs after the value, or not, was written to the `Ref`s among them."""
        value = value.join(Mark(self.control))
        pairs = zip(eqn.invars, marks, strict=True)
        return [mark.join(value) if is_ref(atom) else mark for atom, mark in pairs]

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
        worst = computed(marks)
        if any(contains_replica_source(program) for program in inner):
            self.meets_replica = True
            worst = (
                worst if worst.per_replica else Mark(f"{eqn.primitive.name} at {user_line(eqn)}")
            )
        if worst.per_replica and any(map(contains_collective, inner)):
            self.refuse(
                f"{user_line(eqn)}: the collective inside `{eqn.primitive.name}` may not run on "
                f"every replica. Move the all-reduce out of `{eqn.primitive.name}`."
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
            joined = [*after[:num_consts], *joins(marks[carry], outputs[:num_carry])]
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
            with _ControlFlow(self, predicate, eqn):
                if predicate.per_replica:
                    # How often the test runs depends on the predicate: so does what it writes.
                    _, test_after = self.closed(test, [*test_consts, *carry])
                outputs, after = self.closed(body, [*consts, *carry])
            joined = [chosen(pair, predicate) for pair in zip(carry, outputs, strict=True)]
            new = (test_after[:num_test], after[:num_body], joined)
            if new == (test_consts, consts, carry):
                return carry, [*test_consts, *consts, *carry]
            test_consts, consts, carry = new

    def cond(self, eqn: JaxprEqn, marks: list[Mark]) -> tuple[list[Mark], list[Mark]]:
        predicate, operands = marks[0], marks[1:]
        with _ControlFlow(self, predicate, eqn):
            walked = [self.closed(branch, operands) for branch in eqn.params["branches"]]
        outputs = [chosen(each, predicate) for each in zip(*(o for o, _ in walked), strict=True)]
        after = [either(each) for each in zip(*(a for _, a in walked), strict=True)]
        return outputs, [predicate, *after]


class _ControlFlow:
    """While inside, the pass stands under a control that replicas may take differently."""

    def __init__(self, walk: _Pass, predicate: Mark, eqn: JaxprEqn) -> None:
        self.walk, self.saved = walk, walk.control
        if predicate.per_replica and walk.control is None:
            what = f"the `{eqn.primitive.name}` at {user_line(eqn)}"
            self.inside: str | None = f"{what}, whose condition depends on {walk.cause(predicate)}"
        else:
            self.inside = walk.control

    def __enter__(self) -> None:
        self.walk.control = self.inside

    def __exit__(self, *_: object) -> None:
        self.walk.control = self.saved


def _rank(aval: Any) -> int:
    return len(aval.shape)


def _gives_all_the_same(eqn: JaxprEqn, operands: Mark, num_replicas: int) -> bool:
    """Whether it is a collective that leaves the same value on all replicas."""
    if not _spans_whole_axis(eqn):
        return False
    if eqn.primitive.name == "ppermute" and not operands.per_replica:
        return len({target for _, target in eqn.params["perm"]}) == num_replicas
    return eqn.primitive.name in MIRRORING


def _expanded(eqn: JaxprEqn, num_replicas: int) -> ClosedJaxpr:
    """The program of a hijax primitive, whose parameters do not show it (JAX 0.12)."""
    primitive = eqn.params["_prim"]

    def expand(*leaves: Any) -> list[Any]:
        return jax.tree.leaves(primitive.expand(*primitive.in_tree.unflatten(leaves)))

    avals: list[Any] = [atom.aval for atom in eqn.invars]
    return trace(expand, avals, num_replicas)


def _spans_whole_axis(eqn: JaxprEqn) -> bool:
    return is_collective(eqn) and eqn.params.get("axis_index_groups") is None


def _would_hang(eqn: JaxprEqn, control: str) -> str:
    return (
        f"The {eqn.primitive.name} at {user_line(eqn)} stands under {control} and may differ "
        "between replicas: some would wait for the others forever. Make the condition the same on "
        'all replicas, e.g. with replica_context.all_reduce("max", condition), or move the '
        "collective out of the branch." + (_SEARCHES if "`while`" in control else "")
    )


_SEARCHES = (
    " In a line search, where the condition is a gradient of an all-reduced loss: that gradient is "
    "each replica's own. Take it of loss(replica_context.shared(params)), whose gradient is "
    "all-reduced."
)
