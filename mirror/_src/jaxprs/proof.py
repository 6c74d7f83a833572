"""The proof: which values of a replica program are the same on every replica.

A data-flow pass over the jaxpr. The caller states which inputs are per-replica. The results of
`axis_index`, and of collectives that give each replica a different part, are per-replica; the
results of `psum`, `pmax`, `pmin` and `all_gather` over the whole replica axis are mirrored. Any
other result is per-replica if one of its operands is. Loops are iterated to a fixpoint. The results
of an unknown primitive with inner programs are per-replica if an operand, or anything inside, is.
"""

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from mirror._src.base.errors import ReplicaDivergenceError, listing
from mirror._src.jaxprs.collective_eqns import (
    MIRRORING,
    contains_collective,
    contains_replica_source,
    is_collective,
    is_replica_source,
    is_stateful,
    require_supported_dtype,
    result_of,
    spans_whole_axis,
)
from mirror._src.jaxprs.ensure import ensured_p
from mirror._src.jaxprs.equations import Scan, While, called, inner_programs, is_ref, jaxpr_of
from mirror._src.jaxprs.marks import MIRRORED, Mark, chosen, computed, either, joins
from mirror._src.jaxprs.origins import LostUpdate
from mirror._src.jaxprs.primitives import (
    CALLBACK,
    ELEMENTWISE,
    JOINING,
    PASSING,
    RACING,
    REF_READ,
    SAMPLER,
    SCATTER,
    SHAPING,
)
from mirror._src.jaxprs.trace import trace
from mirror._src.jaxprs.user_lines import line_within, user_line


@dataclass
class Notes:
    """Observations that deserve a warning but not an error.

    Attributes:
        shared_samples: The user's lines that sample the same random numbers on all replicas.
        shared_noise: The lines among them whose numbers are combined elementwise with per-replica
            values, as in dropout, noise and augmentation.
        summed_noise: The lines among these whose numbers are only summed over the replicas.
        idle_collectives: Lines of collectives of mirrored values, in a program in which nothing
            differs between replicas.
        lost_updates: New values of mirrored inputs that reach no output.
        changed_in_place: Paths in the arguments where the step stored another leaf.
        races: Lines of operations on mirrored values whose results may differ between GPUs; see
            `is_racing`.
    """

    shared_samples: list[str] = field(default_factory=list)
    shared_noise: list[str] = field(default_factory=list)
    summed_noise: set[str] = field(default_factory=set)
    idle_collectives: list[str] = field(default_factory=list)
    lost_updates: list[LostUpdate] = field(default_factory=list)
    changed_in_place: frozenset[Any] = frozenset()
    races: list[str] = field(default_factory=list)


def prove(
    jaxpr: ClosedJaxpr,
    per_replica: Sequence[bool],
    num_replicas: int = 1,
    notes: Notes | None = None,
    problems: list[str] | None = None,
    names: Sequence[str] = (),
) -> list[Mark]:
    """Returns the marks of the outputs of a replica program.

    Args:
        jaxpr: The replica program.
        per_replica: For each input, whether replicas may hold different values.
        num_replicas: Size of the replica axis.
        notes: Receives what deserves a warning.
        problems: For a report: receives the messages of errors, which are then not raised. The
            marks also record the collectives that each output was computed from.
        names: The user's names of the inputs, for messages.

    Raises:
        TypeError: If XLA does not support the dtype of a collective.
        ReplicaDivergenceError: If a collective is inside a `cond`, `switch` or `while` that
            replicas may take differently, so that some would wait forever, or if `ensure_mirrored`
            is called on per-replica values.
    """
    inputs = [Mark(i if differs else None) for i, differs in enumerate(per_replica)]
    named = [Mark(m.origin, var) for m, var in zip(inputs, jaxpr.jaxpr.invars, strict=True)]
    walk = _Pass(num_replicas, names, reports=problems is not None)
    marks = walk.walk(jaxpr, named)[0]
    if problems is not None:
        problems += walk.problems
    if notes is not None:
        notes.shared_samples += walk.shared_samples
        notes.shared_noise += walk.shared_noise
        differs = any(per_replica) or walk.meets_replica
        notes.idle_collectives += [] if differs else walk.idle
        notes.races += walk.races
    return marks


class _Pass:
    """Data-flow pass over one program.

    Attributes:
        control: Description of the enclosing control flow that replicas may take differently.
        within: The calls around the current operation.
        meets_replica: Whether the program contains a replica source.
    """

    def __init__(
        self, num_replicas: int, names: Sequence[str] = (), *, reports: bool = False
    ) -> None:
        self.num_replicas = num_replicas
        self.names = names
        self.reports = reports
        self.problems: dict[str, None] = {}
        self.control: str | None = None
        self.within: list[JaxprEqn] = []
        self.shared_samples: dict[str, None] = {}
        self.shared_noise: dict[str, None] = {}
        self.idle: dict[str, None] = {}
        self.races: dict[str, None] = {}
        self.meets_replica = False

    def describe_origin(self, mark: Mark) -> str:
        """Returns a description of what made a value per-replica."""
        if isinstance(mark.origin, int):
            return self.names[mark.origin] if self.names else f"input {mark.origin}"
        return str(mark.origin)

    def reject(self, message: str) -> None:
        """Raises an error or, for a report, records it."""
        if not self.reports:
            raise ReplicaDivergenceError(message)
        self.problems[message] = None

    def walk(
        self, program: ClosedJaxpr | Jaxpr, marks: Sequence[Mark]
    ) -> tuple[list[Mark], list[Mark]]:
        """Returns the marks of the outputs, and of the inputs after writes to `Ref`s."""
        jaxpr = jaxpr_of(program)
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
            # A variable of an inner program has a different value in every call.
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
            self.reject(_hang_message(eqn, self.control))
        self.require_ensured(eqn, marks)
        if is_racing(eqn) and not any(mark.per_replica for mark in marks):
            self.races[line_within(eqn, self.within)] = None
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
            return self.walk(_expanded(eqn, self.num_replicas), marks)
        program = called(eqn)
        if program is not None:
            self.within.append(eqn)
            result = self.walk(program, marks)
            self.within.pop()
            return result
        inner = list(map(jaxpr_of, inner_programs(eqn.params.values())))
        if inner:
            return self.opaque(eqn, marks, inner)
        return self.leaf(eqn, marks)

    def leaf(self, eqn: JaxprEqn, marks: list[Mark]) -> tuple[list[Mark], list[Mark]]:
        """Marks an operation without inner programs."""
        joined = computed(marks)
        if is_collective(eqn):
            require_supported_dtype(eqn)
            if not joined.per_replica:
                self.idle[line_within(eqn, self.within)] = None
        if _is_mirrored(eqn, joined, self.num_replicas):
            return [self.mark_collective(eqn)] * len(eqn.outvars), marks
        joined = self.note(eqn, marks, joined)
        if is_replica_source(eqn):
            self.meets_replica = True
            if not joined.per_replica:
                joined = Mark(f"{eqn.primitive.name} at {user_line(eqn)}")
        if eqn.primitive.name not in REF_READ:
            marks = self.write(eqn, marks, joined)
        return [joined] * len(eqn.outvars), marks

    def note(self, eqn: JaxprEqn, marks: list[Mark], joined: Mark) -> Mark:
        """Adds the samples and callbacks that a value was computed from to its mark."""
        name = eqn.primitive.name
        if name in SAMPLER and not joined.per_replica:
            line = line_within(eqn, self.within)
            self.shared_samples[line] = None
            return replace(joined, samples=frozenset({line}))
        if name in CALLBACK and not is_stateful(eqn) and not joined.per_replica:
            line = f"{name} at {line_within(eqn, self.within)}"
            return replace(joined, assumed=joined.assumed | {line})
        if name not in ELEMENTWISE | SHAPING | JOINING:
            return joined
        samples = frozenset().union(*(mark.samples for mark in marks if not mark.per_replica))
        if not samples:
            return joined
        if not joined.per_replica:
            return replace(joined, samples=samples)
        aval: Any = eqn.outvars[0].aval
        if name in ELEMENTWISE and aval.shape:
            self.shared_noise.update(dict.fromkeys(sorted(samples)))
        return joined

    def require_ensured(self, eqn: JaxprEqn, marks: list[Mark]) -> None:
        """Rejects `ensure_mirrored` of per-replica values."""
        if eqn.primitive is not ensured_p:
            return
        pairs = zip(eqn.params["names"], marks, strict=True)
        differing = [name for name, mark in pairs if mark.per_replica]
        if differing:
            self.reject(
                f"ensure_mirrored at {user_line(eqn)}: replicas may hold different values of\n"
                f"{listing(differing)}\nAll-reduce values derived from per-replica data first:\n"
                '  grads = mirror.all_reduce("mean", grads)'
            )

    def mark_collective(self, eqn: JaxprEqn) -> Mark:
        """Returns the mark of the result of a collective."""
        if not self.reports:
            return MIRRORED
        line = line_within(eqn, self.within)
        return Mark(reduced_by=frozenset({f"{result_of(eqn)} at {line}"}))

    def write(self, eqn: JaxprEqn, marks: Sequence[Mark], value: Mark) -> list[Mark]:
        """Returns the marks of the inputs after the value may have been written to their `Ref`s."""
        value = value.join(Mark(self.control))
        pairs = zip(eqn.invars, marks, strict=True)
        return [mark.join(value) if is_ref(atom) else mark for atom, mark in pairs]

    def linear_solve(self, eqn: JaxprEqn, marks: list[Mark]) -> tuple[list[Mark], list[Mark]]:
        """Marks the results of `solve`; the other programs are for derivatives."""
        lengths, solve = eqn.params["const_lengths"], eqn.params["jaxprs"].solve
        start = lengths.matvec + lengths.vecmat
        consts, rest = marks[start : start + lengths.solve], marks[sum(lengths) :]
        return self.walk(solve, [*consts, *rest])[0], marks

    def opaque(
        self, eqn: JaxprEqn, marks: list[Mark], inner: list[Jaxpr]
    ) -> tuple[list[Mark], list[Mark]]:
        """Marks an operation whose use of its inner programs is unknown."""
        worst = computed(marks)
        if any(map(contains_replica_source, inner)):
            self.meets_replica = True
            if not worst.per_replica:
                worst = Mark(f"{eqn.primitive.name} at {user_line(eqn)}")
        if worst.per_replica and any(map(contains_collective, inner)):
            self.reject(
                f"{user_line(eqn)}: the collective inside `{eqn.primitive.name}` may not run on "
                f"every replica. Move the all-reduce out of `{eqn.primitive.name}`."
            )
        return [worst] * len(eqn.outvars), self.write(eqn, marks, worst)

    def scan(self, eqn: JaxprEqn, marks: list[Mark]) -> tuple[list[Mark], list[Mark]]:
        scan = Scan(eqn)
        num_consts, num_carry = scan.num_consts, scan.num_carry
        marks = list(marks)
        carry = slice(num_consts, num_consts + num_carry)
        races = dict(self.races)
        while True:
            self.races = dict(races)  # a value that is mirrored in the first iteration may differ
            # A slice is not a copy of its array.
            marks[carry.stop :] = [mark.of(None) for mark in marks[carry.stop :]]
            outputs, after = self.walk(scan.body, marks)
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
        races = dict(self.races)
        while True:
            self.races = dict(races)
            (predicate,), test_after = self.walk(test, [*test_consts, *carry])
            with self.under(predicate, eqn):
                if predicate.per_replica:
                    # The number of runs of the test depends on the predicate, and so do its writes.
                    _, test_after = self.walk(test, [*test_consts, *carry])
                outputs, after = self.walk(body, [*consts, *carry])
            joined = [chosen(pair, predicate) for pair in zip(carry, outputs, strict=True)]
            new = (test_after[:num_test], after[:num_body], joined)
            if new == (test_consts, consts, carry):
                return carry, [*test_consts, *consts, *carry]
            test_consts, consts, carry = new

    def cond(self, eqn: JaxprEqn, marks: list[Mark]) -> tuple[list[Mark], list[Mark]]:
        predicate, operands = marks[0], marks[1:]
        with self.under(predicate, eqn):
            walked = [self.walk(branch, operands) for branch in eqn.params["branches"]]
        outputs = [chosen(marks, predicate) for marks in zip(*(o for o, _ in walked), strict=True)]
        after = list(map(either, zip(*(a for _, a in walked), strict=True)))
        return outputs, [predicate, *after]

    @contextlib.contextmanager
    def under(self, predicate: Mark, eqn: JaxprEqn) -> Iterator[None]:
        """Context manager for walking the inner programs of `eqn`, which the predicate controls."""
        saved = self.control
        if predicate.per_replica and saved is None:
            self.control = (
                f"the {eqn.primitive.name} at {user_line(eqn)}, whose predicate depends on "
                f"{self.describe_origin(predicate)} and may differ between replicas"
            )
        yield
        self.control = saved


def is_racing(eqn: JaxprEqn) -> bool:
    """Whether XLA's fastest program on GPUs depends on the order in which threads finish.

    It adds floats at repeated indices, and in gradients of max-pooling and of convolutions, by
    atomic operations; of several writes to one element, any may be the last.
    """
    name = eqn.primitive.name
    if name not in RACING:
        return False
    aval: Any = eqn.outvars[0].aval
    if name != "scatter" and not jnp.issubdtype(aval.dtype, jnp.inexact):
        return False
    if name not in SCATTER:
        return True
    indices: Any = eqn.invars[1].aval
    return math.prod(indices.shape[:-1]) > 1 and not eqn.params["unique_indices"]


def _is_mirrored(eqn: JaxprEqn, operands: Mark, num_replicas: int) -> bool:
    """Whether a collective leaves the same value on all replicas."""
    if not spans_whole_axis(eqn):
        return False
    if eqn.primitive.name == "ppermute" and not operands.per_replica:
        return len({target for _, target in eqn.params["perm"]}) == num_replicas
    return eqn.primitive.name in MIRRORING


def _expanded(eqn: JaxprEqn, num_replicas: int) -> ClosedJaxpr:
    """Returns the program of a hijax primitive, which is not among its parameters (JAX 0.12)."""
    primitive = eqn.params["_prim"]

    def expand(*leaves: Any) -> list[Any]:
        return jax.tree.leaves(primitive.expand(*primitive.in_tree.unflatten(leaves)))

    avals: list[Any] = [atom.aval for atom in eqn.invars]
    return trace(expand, avals, num_replicas)


def _hang_message(eqn: JaxprEqn, control: str) -> str:
    name = eqn.primitive.name
    return (
        f"The {name} at {user_line(eqn)} is inside {control}, so some replicas would wait forever "
        "for the others. Make the predicate identical on all replicas, e.g. "
        f'mirror.all_reduce("max", predicate), or move the {name} out of the branch.'
        + (_LINE_SEARCH if "the while" in control else "")
    )


_LINE_SEARCH = (
    " In a line search, the predicate may be a gradient of an all-reduced loss, which is "
    "per-replica. Differentiate loss(replica_context.shared(params)) instead: its gradient is "
    "all-reduced."
)
