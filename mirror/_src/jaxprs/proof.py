"""The proof: which values of a replica program are the same on every replica.

A data-flow pass over the jaxpr. The caller states which inputs are per-replica. The results of
`axis_index`, and of collectives that give each replica a different part, are per-replica; the
results of `psum`, `pmax`, `pmin` and `all_gather` over the whole replica axis are mirrored. Any
other result is per-replica if one of its operands is. Loops are iterated to a fixpoint. The results
of an unknown primitive with inner programs are per-replica if an operand, or anything inside, is.
"""

import contextlib
import math
import operator
from collections.abc import Iterator, Sequence, Set
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from mirror._src.base.errors import ReplicaDivergenceError, listing
from mirror._src.base.types import REPLICA_AXIS
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
from mirror._src.jaxprs.equations import (
    Interpreter,
    inner_programs,
    is_ref,
    jaxpr_of,
    line_within,
    user_line,
)
from mirror._src.jaxprs.marks import MIRRORED, Mark, chosen, computed, either, ensured_p
from mirror._src.jaxprs.origins import LostUpdate
from mirror._src.jaxprs.primitives import (
    ADDITION,
    CALLBACK,
    ELEMENTWISE,
    JOINING,
    RACING,
    REF_READ,
    SAMPLER,
    SCATTER,
    SHAPING,
    SIMPLE,
    dtype_of,
    shape_of,
)
from mirror._src.jaxprs.trace import trace

_facts_of = operator.itemgetter(0, *range(2, len(MIRRORED)))  # all but the source
_FACTS = {_facts_of(MIRRORED)}
_KEEPS_SAMPLES = ELEMENTWISE | SHAPING | JOINING


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
    axis_name: str = REPLICA_AXIS,
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
        axis_name: Name of the replica axis.

    Raises:
        TypeError: If XLA does not support the dtype of a collective.
        ReplicaDivergenceError: If a collective is inside a `cond`, `switch` or `while` that
            replicas may take differently, so that some would wait forever, or if `ensure_mirrored`
            is called on per-replica values.
    """
    inputs = [Mark(i if differs else None) for i, differs in enumerate(per_replica)]
    pairs = zip(jaxpr.in_avals, per_replica, strict=True)
    counts = {aval.shape[0] for aval, differs in pairs if differs and aval.shape and aval.shape[0]}
    reports = problems is not None
    walk = Proof(num_replicas, axis_name, names, row_counts=counts, reports=reports)
    marks = walk.call(jaxpr, inputs)
    if problems is not None:
        problems += walk.problems
    if notes is not None:
        notes.shared_samples += walk.shared_samples
        notes.shared_noise += walk.shared_noise
        differs = any(per_replica) or walk.meets_replica
        notes.idle_collectives += [] if differs else walk.idle
        notes.races += dict.fromkeys(walk.races.values())
    return marks


@dataclass(eq=False)
class Proof(Interpreter[Mark]):
    """Data-flow pass over one program.

    Attributes:
        row_counts: Sizes of the first axes of the per-replica inputs.
        control: Description of the enclosing control flow that replicas may take differently.
        stored: The mark of what each `Ref` holds, by the `id` of the variable that created it,
            which is the source of the marks of the `Ref` itself.
        expanded: The programs of hijax primitives, by the `id` of the operation.
        races: The line of each racing operation, by the operations around it and itself.
        meets_replica: Whether the program contains a replica source.
    """

    num_replicas: int
    axis_name: str = REPLICA_AXIS
    names: Sequence[str] = ()
    _: KW_ONLY
    row_counts: Set[int] = frozenset()
    reports: bool = False
    problems: dict[str, None] = field(default_factory=dict, init=False)
    control: str | None = field(default=None, init=False)
    stored: dict[int, Mark] = field(default_factory=dict, init=False)
    expanded: dict[int, ClosedJaxpr] = field(default_factory=dict, init=False)
    shared_samples: dict[str, None] = field(default_factory=dict, init=False)
    shared_noise: dict[str, None] = field(default_factory=dict, init=False)
    idle: dict[str, None] = field(default_factory=dict, init=False)
    races: dict[tuple[int, ...], str] = field(default_factory=dict, init=False)
    meets_replica: bool = field(default=False, init=False)

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

    def call(self, program: ClosedJaxpr | Jaxpr, inputs: Sequence[Mark]) -> list[Mark]:
        pairs = zip(jaxpr_of(program).invars, inputs, strict=True)
        named = [mark if mark.source is not None else self.named(var, mark) for var, mark in pairs]
        return super().call(program, named)

    def constant(self, value: Any) -> Mark:
        if not isinstance(value, jax.Ref):
            return MIRRORED
        return self.stored.setdefault(id(value), Mark(source=value))

    def equation(self, eqn: JaxprEqn, operands: list[Mark]) -> list[Mark]:
        if eqn.primitive.name in SIMPLE:  # the usual case, and fast
            plain = _FACTS.issuperset(map(_facts_of, operands))
            joined = MIRRORED if plain else self.computed(eqn, operands)
            return list(map(joined.of, eqn.outvars))
        marks = list(map(self.held, operands)) if self.stored else operands
        if self.control is not None and is_collective(eqn):
            self.reject(_hang_message(eqn, self.control))
        self.require_ensured(eqn, marks)
        self.note_race(eqn, marks)
        # A variable of an inner program has a different value in every call.
        known = {id(mark.source) for mark in operands if mark.source is not None}
        outputs = []
        for var, mark in zip(eqn.outvars, super().equation(eqn, marks), strict=True):
            is_known = id(mark.source) in known
            outputs.append(mark if is_known else self.named(var, self.held(mark)))
        return outputs

    def leaf(self, eqn: JaxprEqn, operands: list[Mark]) -> Sequence[Mark]:
        name = eqn.primitive.name
        if name == "call_hi_primitive":
            if id(eqn) not in self.expanded:
                self.expanded[id(eqn)] = _expanded(eqn, self.num_replicas, self.axis_name)
            return self.call(self.expanded[id(eqn)], operands)
        inner = list(map(jaxpr_of, inner_programs(eqn.params.values())))
        joined = self.opaque(eqn, operands, inner) if inner else self.computed(eqn, operands)
        if name not in REF_READ:
            self.write(eqn, operands, joined)
        return [joined] * len(eqn.outvars)

    def chosen(self, predicate: Mark, cases: Sequence[Mark]) -> Mark:
        return chosen(cases, predicate)

    def slice_of(self, array: Mark) -> Mark:
        # A slice is not a copy of its array, but one of a `Ref` writes to it.
        return array if id(array.source) in self.stored else array.of(None)

    def state(self) -> dict[int, Mark]:
        return dict(self.stored)

    def resume_from(self, states: Sequence[dict[int, Mark]]) -> None:
        keys = dict.fromkeys(key for state in states for key in state)
        self.stored = {key: either(s[key] for s in states if key in s) for key in keys}

    @contextlib.contextmanager
    def under(self, predicate: Mark, eqn: JaxprEqn) -> Iterator[None]:
        saved = self.control
        if predicate.per_replica and saved is None:
            self.control = (
                f"the {eqn.primitive.name} at {user_line(eqn)}, whose predicate depends on "
                f"{self.describe_origin(predicate)} and may differ between replicas"
            )
        yield
        self.control = saved

    def named(self, var: Any, mark: Mark) -> Mark:
        """Returns the mark of a variable that is its own source."""
        mark = mark.of(var)
        if is_ref(var):
            self.stored[id(var)] = mark
        return mark

    def held(self, mark: Mark) -> Mark:
        """Returns the mark of a value or, for a `Ref`, of what it holds now."""
        return self.stored.get(id(mark.source), mark)

    def note_race(self, eqn: JaxprEqn, marks: list[Mark]) -> None:
        """Records a race; a later round of a loop may find that its operands differ anyway."""
        if is_racing(eqn):
            key = *map(id, self.within), id(eqn)
            if any(mark.per_replica for mark in marks):
                self.races.pop(key, None)
            else:
                self.races[key] = line_within(eqn, self.within)

    def computed(self, eqn: JaxprEqn, marks: list[Mark]) -> Mark:
        """Returns the mark of the results of an operation without inner programs."""
        joined, is_simple = computed(marks), eqn.primitive.name in SIMPLE
        if not is_simple and is_collective(eqn):
            require_supported_dtype(eqn)
            if not joined.per_replica:
                self.idle[line_within(eqn, self.within)] = None
            if _is_mirrored(eqn, joined, self.num_replicas):
                return self.mark_collective(eqn)
        joined = self.note(eqn, marks, joined)
        if self.is_summed(eqn, marks):
            joined = joined._replace(is_summed=True)
        if not is_simple and is_replica_source(eqn):
            self.meets_replica = True
            if not joined.per_replica:
                joined = Mark(f"{eqn.primitive.name} at {user_line(eqn)}")
        return joined

    def note(self, eqn: JaxprEqn, marks: list[Mark], joined: Mark) -> Mark:
        """Adds the samples and callbacks that a value was computed from to its mark."""
        name = eqn.primitive.name
        if name in SAMPLER and not joined.per_replica:
            line = line_within(eqn, self.within)
            self.shared_samples[line] = None
            return joined._replace(samples=frozenset({line}))
        if name in CALLBACK and not is_stateful(eqn) and not joined.per_replica:
            line = f"{name} at {line_within(eqn, self.within)}"
            return joined._replace(assumed=joined.assumed | {line})
        if name not in _KEEPS_SAMPLES:
            return joined
        samples = frozenset[str]().union(*[m.samples for m in marks if m.origin is None])
        if not samples:
            return joined
        if not joined.per_replica:
            return joined._replace(samples=frozenset() if _repeats_rows(eqn) else samples)
        shape, pairs = shape_of(eqn.outvars[0]), zip(marks, eqn.invars, strict=True)
        # Otherwise, all rows share the numbers, also on one device.
        per_row = any(mark.samples and shape_of(atom)[:1] == shape[:1] for mark, atom in pairs)
        # The gradient of masked weights is masked too. Noise that is added to it is added up later.
        is_mask = name not in ADDITION and all(x.is_summed for x in marks if x.per_replica)
        if name in ELEMENTWISE and shape and per_row and not is_mask:
            self.shared_noise.update(dict.fromkeys(sorted(samples)))
        return joined

    def is_summed(self, eqn: JaxprEqn, marks: list[Mark]) -> bool:
        """Whether the per-replica results of an operation do not have rows."""
        own = [mark for mark in marks if mark.origin is not None]
        if all(map(operator.attrgetter("is_summed"), own)):
            return bool(own)
        first: Any = eqn.invars[0].aval
        size = first.shape[0] if getattr(first, "shape", ()) else 0
        if not any(size and size % count == 0 for count in self.row_counts):
            return False
        name, params = eqn.primitive.name, eqn.params
        if name == "reduce_sum":
            return 0 in params["axes"]
        if name == "dot_general":
            (left, right), _ = params["dimension_numbers"]
            return (0, 0) in zip(left, right, strict=True) and len(own) == len(marks)
        is_gradient = name == "conv_general_dilated" and len(own) == len(marks)
        return is_gradient and params["dimension_numbers"].lhs_spec[1] == 0

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

    def write(self, eqn: JaxprEqn, marks: Sequence[Mark], value: Mark) -> None:
        """Records that a value may have been written to the `Ref`s among the operands."""
        for atom, mark in zip(eqn.invars, marks, strict=True):
            if is_ref(atom):
                assert mark.source is not None  # JAX rejects a `Ref` that is one of several
                written = mark.join(value).join(Mark(self.control))
                self.stored[id(mark.source)] = written.of(mark.source)

    def opaque(self, eqn: JaxprEqn, marks: list[Mark], inner: list[Jaxpr]) -> Mark:
        """Returns the mark of an operation whose use of its inner programs is unknown."""
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
        return worst


def is_racing(eqn: JaxprEqn) -> bool:
    """Whether XLA's fastest program on GPUs depends on the order in which threads finish.

    It adds floats at repeated indices, and in gradients of max-pooling and of convolutions, by
    atomic operations; of several writes to one element, any may be the last.
    """
    name = eqn.primitive.name
    if name not in RACING:
        return False
    if name != "scatter" and not jnp.issubdtype(dtype_of(eqn.outvars[0]), jnp.inexact):
        return False
    if name not in SCATTER:
        return True
    return math.prod(shape_of(eqn.invars[1])[:-1]) > 1 and not eqn.params["unique_indices"]


def _repeats_rows(eqn: JaxprEqn) -> bool:
    """Whether an operation repeats an array along the first axis, so that all rows are the same.

    One device has the same numbers if all rows share them, as in mixup.
    """
    if eqn.primitive.name != "broadcast_in_dim":
        return False
    axes, shape = eqn.params["broadcast_dimensions"], eqn.params["shape"]
    size = shape_of(eqn.invars[0])[0] if axes[:1] == (0,) else 1
    return bool(shape) and shape[0] != size


def _is_mirrored(eqn: JaxprEqn, operands: Mark, num_replicas: int) -> bool:
    """Whether a collective leaves the same value on all replicas."""
    if not spans_whole_axis(eqn):
        return False
    if eqn.primitive.name == "ppermute" and not operands.per_replica:
        return len({target for _, target in eqn.params["perm"]}) == num_replicas
    return eqn.primitive.name in MIRRORING


def _expanded(eqn: JaxprEqn, num_replicas: int, axis_name: str) -> ClosedJaxpr:
    """Returns the program of a hijax primitive, which is not among its parameters (JAX 0.12)."""
    primitive = eqn.params["_prim"]

    def expand(*leaves: Any) -> list[Any]:
        return jax.tree.leaves(primitive.expand(*primitive.in_tree.unflatten(leaves)))

    avals: list[Any] = [atom.aval for atom in eqn.invars]
    return trace(expand, avals, num_replicas, axis_name)


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
