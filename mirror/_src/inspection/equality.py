"""`equals_one_device`: proves that a step computes what one device computes on the whole batch."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from mirror._src.base.errors import counted, describe, first_line, listing
from mirror._src.base.modules import set_module
from mirror._src.base.tables import Table
from mirror._src.base.terminal import wrap
from mirror._src.engine.analysis import Analysis, average_and_merge
from mirror._src.engine.call import Call
from mirror._src.engine.plan import Merge, Plan
from mirror._src.engine.replica_function import ReplicaFunction
from mirror._src.engine.runner import Runner
from mirror._src.jaxprs.additive import Dependence
from mirror._src.jaxprs.relate import relate
from mirror._src.jaxprs.relations import SAME, ZERO, Cause, Kind, Relation, Why, other, rows

_UNKNOWN = "unknown"
DIFFERENT = "different"


@dataclass(frozen=True)
class EqualityRow:
    """Result or changed variable of a step, compared with one device.

    Attributes:
        name: The user's name: `result['loss']`, `model.first.kernel`.
        value: Dtype and shape on one replica.
        verdict: `"equal"`, `"different"`, `"unknown"`, or `"per-replica"` for a value of which one
            device has no counterpart.
        why: The operation that decides, and what to change. Empty if the verdict is `"equal"`.
    """

    name: str
    value: str
    verdict: str
    why: str = ""


@set_module("mirror")
@dataclass(frozen=True)
class EqualityReport:
    """Whether a step computes what one device computes on the whole batch; print it.

    The values are compared without running the step, up to rounding and overflow.

    Attributes:
        step: Name of the step.
        num_replicas: Number of replicas of the strategy.
        rows: Results first, then changed variables.

    >>> strategy = mirror.MirroredStrategy(["/cpu:0", "/cpu:1"])
    >>> batch = mirror.PerReplica([[1.0, 2.0], [3.0, 4.0]])
    >>> def step(batch):
    ...     return mirror.all_reduce("mean", batch.mean())
    >>> strategy.inspect(step, (batch,)).equals_one_device.verdict
    'equal'
    """

    step: str
    num_replicas: int
    rows: tuple[EqualityRow, ...]

    @property
    def verdict(self) -> str:
        """`"equal"`, `"different"` if any value is, or `"unknown"`."""
        found = {row.verdict for row in self.rows}
        return next((each for each in (DIFFERENT, _UNKNOWN) if each in found), "equal")

    @property
    def reasons(self) -> tuple[str, ...]:
        """Reasons for the verdict, each once: an operation, its line, and what to change."""
        why = (row.why for row in self.rows if row.verdict == self.verdict != "equal")
        return tuple(dict.fromkeys(why))

    @property
    def heading(self) -> str:
        """Summary in one line."""
        words = {
            "equal": "proved to equal",
            DIFFERENT: "differ from",
            _UNKNOWN: "are not proved to equal",
        }[self.verdict]
        replicas = counted(self.num_replicas, "replica")
        return f"{self.step}: {replicas} {words} one device with the whole batch"

    def __repr__(self) -> str:
        if self.verdict == "equal":
            return wrap(self.heading)
        names = (f"{row.name}: {row.verdict}" for row in self.rows if row.verdict != "equal")
        return wrap("\n".join([self.heading, listing(names), *self.reasons]))

    def _repr_html_(self) -> str:
        table = [(row.name, row.value, row.verdict, row.why) for row in self.rows]
        columns = ("value", "on one replica", "verdict", "reason")
        return f"<b>{self.heading}</b>" + Table(columns, table)._repr_html_()


class Output(NamedTuple):
    """An output of a step.

    Attributes:
        name: The user's name.
        aval: Its type on one replica.
        whole: Its type on one device.
        relation: How the two relate.
        is_own: Whether each replica keeps its own.
    """

    name: str
    aval: Any
    whole: Any
    relation: Relation
    is_own: bool


def compare(call: Call, analysis: Analysis, single: Callable[[], Runner]) -> EqualityReport:
    """Implements `ProgramReport.equals_one_device`.

    Args:
        call: A call of a step.
        analysis: Its analysis.
        single: Returns a runner of one device.
    """
    step = analysis.traced.function
    n, name = step.group.num_replicas_in_sync, step.name
    if analysis.finish is None:
        why = f"run rejects the step: {analysis.problems[0].splitlines()[0]}"
        return EqualityReport(name, n, (EqualityRow("the step", "", _UNKNOWN, why),))
    try:
        outputs = outputs_of(call, analysis, single(), n)
    except Exception as error:  # of the user's step, for which the whole batch is too long
        why = f"One device cannot run the step with the whole batch: {first_line(error)}"
        return EqualityReport(name, n, (EqualityRow("the step", "", _UNKNOWN, why),))
    rows, count = [_row(each, n) for each in outputs], len(analysis.plan.changed)
    return EqualityReport(name, n, (*rows[count:], *rows[:count]))


def outputs_of(
    call: Call, analysis: Analysis, single: Runner, n: int, *, has_own_samples: bool = False
) -> list[Output]:
    """Returns the variables that a step changes, and its results, related to one device.

    Args:
        call: A call of the step.
        analysis: Its analysis.
        single: A runner of one device.
        n: Number of replicas.
        has_own_samples: As for `relate`.
    """
    traced, plan = analysis.traced, analysis.plan
    step = traced.function
    inputs, types = inputs_of(call, step, n, has_own_samples=has_own_samples)
    alone = single.traced_as(call, types, step.group.cross_device_ops)
    finish, finish_alone = analysis.finish, average_and_merge(alone, plan)
    assert finish is not None

    def related(inputs: Sequence[Relation]) -> list[Relation]:
        to_one = functools.partial(relate, num_replicas=n, has_own_samples=has_own_samples)
        found = to_one(traced.jaxpr, alone.jaxpr, inputs)
        return to_one(finish, finish_alone, [*inputs, *found])

    relations = related(inputs) if n > 1 else [SAME] * len(finish.jaxpr.outvars)
    sums = _sums(plan)
    if sums and n > 1:  # a metric that is a sum depends on its former value in no other way
        from_zero = related([ZERO if i in sums else x for i, x in enumerate(inputs)])
        for k, i in enumerate(plan.changed):
            relations[k] = from_zero[k] if i in sums else relations[k]
    merged = {i for metric in plan.merged for i in metric.positions.values() if not _is_sum(metric)}
    for k, i in enumerate(plan.changed):
        if i in merged and relations[k].is_different:  # such as of variances, which is exact
            relations[k] = other(Why.UNKNOWN, "merge", f"of {call.input_names[i]}")
    names = [*(call.input_names[i] for i in plan.changed), *step.out_names]
    is_own = [step.per_replica[i] for i in plan.changed] + list(plan.per_replica_results)
    avals = [var.aval for var in finish.jaxpr.outvars]
    whole = [var.aval for var in finish_alone.jaxpr.outvars]
    return list(map(Output, names, avals, whole, relations, is_own))


def _is_sum(metric: Merge) -> bool:
    """Whether all states of a metric are proved to be sums."""
    return Dependence.OTHER not in metric.dependences.values()


def _sums(plan: Plan) -> set[int]:
    """Returns the positions of the states of metrics that are proved to be sums."""
    return {
        i
        for metric in plan.merged
        for name, i in metric.positions.items()
        if metric.dependences[name] is not Dependence.OTHER
    }


def inputs_of(
    call: Call, step: ReplicaFunction, n: int, *, has_own_samples: bool = False
) -> tuple[list[Relation], tuple[jax.ShapeDtypeStruct, ...]]:
    """Returns the relations of the inputs of a step, and their types on one device."""
    relations, types = list[Relation](), list[jax.ShapeDtypeStruct]()
    num_state = len(call.state)
    for i, (aval, differs, name) in enumerate(
        zip(step.avals, step.per_replica, call.input_names, strict=True)
    ):
        is_key = jnp.issubdtype(aval.dtype, jax.dtypes.prng_key)
        if not differs or (is_key and has_own_samples and (i < num_state or not aval.shape)):
            relations.append(SAME)
        elif i < num_state or not aval.shape:
            relations.append(other(Why.SAMPLES if is_key else Why.UNKNOWN, "input", name))
        else:
            relations.append(rows(0))
            shape = (n * aval.shape[0], *aval.shape[1:])
            aval = jax.ShapeDtypeStruct(shape, aval.dtype, weak_type=aval.weak_type)
        types.append(aval)
    return relations, tuple(types)


def _row(output: Output, n: int) -> EqualityRow:
    relation, value = output.relation, describe(output.aval)
    is_equal = relation.is_equal
    if output.is_own:
        shape = output.aval.shape
        if not shape or output.whole.shape != (n * shape[0], *shape[1:]):
            why = "one device has no counterpart"
            return EqualityRow(output.name, value, "per-replica", why)
        is_equal = relation in (rows(0), relation._replace(kind=Kind.ZERO))
    if is_equal:
        return EqualityRow(output.name, value, "equal")
    is_scaled = output.is_own and relation.kind is Kind.ROWS  # and all replicas together have it
    verdict = DIFFERENT if relation.is_different or is_scaled else _UNKNOWN
    return EqualityRow(output.name, value, verdict, explained(relation, n))


def explained(relation: Relation, n: int) -> str:
    """Returns what makes a value different or unknown, and the line that repairs it."""
    cause = relation.cause
    if relation.kind in (Kind.SAME, Kind.ROWS):
        times = float(relation.scale)
        if cause is None:
            return (
                f"It is {times:g} times its value on one device: it depends on the number of rows."
            )
        if cause.op not in ("psum", "mul", "div"):
            return f"It is {times:g} times its value on one device after the {_place(cause)}."
        if cause.op != "psum":
            fix = "Divide by the number of rows of all replicas: mirror.all_reduce('sum', len(x))"
        else:
            fix = (
                'Use mirror.all_reduce("mean", x)'
                if times > 1
                else 'Use mirror.all_reduce("sum", x)'
            )
        return f"It is {times:g} times its value on one device after the {_place(cause)}. {fix}."
    if cause is None:
        return (
            "It is not known how the value relates to one device. strategy.verify compares numbers."
        )
    words = _SCALED.get(cause.op) if cause.why is Why.SCALE else None
    return (words or _WORDS[cause.why]).format(place=_place(cause), n=n)


def _place(cause: Cause) -> str:
    is_name = cause.op in ("input", "merge")
    return f"{cause.op} {cause.line}" if is_name else f"{cause.op} at {cause.line}"


_ROWS = (
    "The {place} combines or selects rows of this replica, where one device has all rows. Gather "
    "them first: mirror.all_gather(x)."
)
_DIVIDED = (
    "The {place} multiplies or divides by another number than on one device. Use means and "
    'mirror.all_reduce("mean", x), or divide a sum by the rows of all replicas: '
    'mirror.all_reduce("sum", len(x)).'
)
_SCALED = {
    "psum": (
        "The {place} adds up means over the rows of each replica, or a value that all replicas "
        'have, so that it is {n} times as large. Use mirror.all_reduce("mean", x).'
    ),
    "mul": _DIVIDED,
    "div": _DIVIDED,
}
_WORDS = {
    Why.SAMPLES: (
        "The random numbers of the {place} depend on the number of replicas. Use "
        "mirror.example_keys(key, batch)."
    ),
    Why.SCALE: (
        "The {place} combines a sum over this replica's rows with a value that all replicas have "
        "or that is divided already, so that it counts {n} times. Combine them after the "
        'all-reduce, or use means and mirror.all_reduce("mean", x).'
    ),
    Why.PART: (
        "The {place} uses a sum or mean over this replica's rows as if it were over all rows. "
        'All-reduce it first: mirror.all_reduce("mean", x).'
    ),
    Why.PAIRS: _ROWS,
    Why.ROWS: _ROWS,
    Why.EXTREME: (
        "The {place} reduces the largest or smallest values of the replicas. Use "
        'mirror.all_reduce("max", x) or "min".'
    ),
    Why.UNKNOWN: (
        "The {place} is not understood. strategy.verify compares the numbers of replicas and one "
        "device."
    ),
}
