"""`equals_one_device`: proves that a step computes what one device computes on the whole batch.

At the first run of a step whose new state differs from one device's, it is a warning.
"""

import functools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.extend.core import ClosedJaxpr

from mirror._src.base.errors import counted, describe, expected, first_line, listing
from mirror._src.base.naming import is_our_module, warn_user
from mirror._src.base.public_names import set_module
from mirror._src.base.terminal import Table, wrap
from mirror._src.engine.analysis import Analysis, average_and_merge
from mirror._src.engine.arguments import Call
from mirror._src.engine.plan import Merge, Plan
from mirror._src.engine.replica_function import ReplicaFunction, TracedStep
from mirror._src.engine.runner import Runner
from mirror._src.engine.variable import Variable
from mirror._src.inspection.counterexamples import Program, agreeing
from mirror._src.jaxprs.additive import Dependence
from mirror._src.jaxprs.relate import guess, relate
from mirror._src.jaxprs.relations import (
    SAME,
    UNIFORM,
    ZERO,
    Cause,
    Kind,
    Relation,
    Why,
    other,
    rows,
)

_UNKNOWN = "unknown"
DIFFERENT = "different"
UNSURE = "unsure"
"""In place of a warning, if it is not known whether a new state differs."""


class EqualityRow(NamedTuple):
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
        columns = ("value", "on one replica", "verdict", "reason")
        return f"<b>{self.heading}</b>" + Table(columns, self.rows)._repr_html_()


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
        outputs = outputs_of(call, analysis, _twin(call, analysis, single(), n), n)
    except Exception as error:  # of the user's step, for which the whole batch is too long
        why = f"One device cannot run the step with the whole batch: {first_line(error)}"
        return EqualityReport(name, n, (EqualityRow("the step", "", _UNKNOWN, why),))
    rows, count = [_row(each, n) for each in outputs], len(analysis.plan.changed)
    return EqualityReport(name, n, (*rows[count:], *rows[:count]))


class _Twin(NamedTuple):
    """The step of one device.

    Attributes:
        inputs: How the inputs relate.
        types: The types of its inputs.
        traced: Its trace.
        finish: As `Analysis.finish`.
        has_own_samples: As for `relate`.
    """

    inputs: list[Relation]
    types: tuple[jax.ShapeDtypeStruct, ...]
    traced: TracedStep
    finish: ClosedJaxpr
    has_own_samples: bool


def _twin(
    call: Call, analysis: Analysis, single: Runner, n: int, *, has_own_samples: bool = False
) -> _Twin:
    """Returns the step that a runner of one device would run."""
    step = analysis.traced.function
    inputs, types = inputs_of(call, step, n, has_own_samples=has_own_samples)
    alone = single.traced_as(call, types)
    return _Twin(inputs, types, alone, average_and_merge(alone, analysis.plan), has_own_samples)


def outputs_of(call: Call, analysis: Analysis, twin: _Twin, n: int) -> list[Output]:
    """Returns the variables that a step changes, and its results, related to one device.

    Args:
        call: A call of the step.
        analysis: Its analysis.
        twin: The step of one device.
        n: Number of replicas.
    """
    traced, plan = analysis.traced, analysis.plan
    step, inputs, finish_alone = traced.function, twin.inputs, twin.finish
    finish = analysis.finish
    assert finish is not None

    def related(inputs: Sequence[Relation]) -> list[Relation]:
        to_one = functools.partial(relate, num_replicas=n, has_own_samples=twin.has_own_samples)
        found = to_one(traced.jaxpr, twin.traced.jaxpr, inputs)
        return to_one(finish, finish_alone, [*inputs, *found])

    relations = related(inputs) if n > 1 else [SAME] * len(finish.jaxpr.outvars)
    sums = _sums(plan)
    if sums and n > 1:  # a metric that is a sum depends on its former value in no other way
        from_zero = related([ZERO if i in sums else x for i, x in enumerate(inputs)])
        for k, i in enumerate(plan.changed):
            relations[k] = from_zero[k] if i in sums else relations[k]
    merged = {i for metric in plan.merged for i in metric.positions.values() if not _is_sum(metric)}
    for k, i in enumerate(plan.changed):
        if i in merged and not relations[k].is_equal:  # such as of variances, which is exact
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
    """Returns the relations of the inputs of a step, and their types on one device.

    Where samples of the replicas count as equal, the mask of a trainer's step is all True: a
    trainer rejects padding that changes a result.
    """
    relations, types = list[Relation](), list[jax.ShapeDtypeStruct]()
    num_state = len(call.state)
    is_ours = is_our_module(getattr(call.fn, "__module__", None))
    for i, (aval, differs, name) in enumerate(
        zip(step.avals, step.per_replica, call.input_names, strict=True)
    ):
        is_key = jnp.issubdtype(aval.dtype, jax.dtypes.prng_key)
        if not differs or (is_key and has_own_samples and (i < num_state or not aval.shape)):
            relations.append(SAME)
        elif i < num_state or not aval.shape:
            relations.append(other(Why.SAMPLES if is_key else Why.UNKNOWN, "input", name))
        else:
            is_mask = has_own_samples and is_ours and name == "mask"
            relations.append(rows(0)._replace(pieces=UNIFORM if is_mask else None))
            shape = (n * aval.shape[0], *aval.shape[1:])
            aval = jax.ShapeDtypeStruct(shape, aval.dtype, weak_type=aval.weak_type)
        types.append(aval)
    return relations, tuple(types)


def _row(output: Output, n: int) -> EqualityRow:
    relation, value = output.relation, describe(output.aval)
    is_equal = relation.is_equal
    if output.is_own and n > 1:
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
        off = f"It is {times:g} times its value on one device"
        if cause is None:
            return f"{off}: it depends on the number of rows."
        if cause.op not in ("psum", "mul", "div"):
            return f"{off} after the {_place(cause)}."
        op = "mean" if times > 1 else "sum"
        fix = f'Use mirror.all_reduce("{op}", x)'
        if cause.op != "psum":
            fix = "Divide by the number of rows of all replicas: mirror.all_reduce('sum', len(x))"
        return f"{off} after the {_place(cause)}. {fix}."
    if cause is None:
        return "It is not known how it relates to one device. strategy.verify compares numbers."
    words = _SCALED.get(cause.op) if cause.why is Why.SCALE else None
    return (words or _WORDS.get(cause.why, _UNKNOWN_OPERATION)).format(place=_place(cause), n=n)


def _place(cause: Cause) -> str:
    if cause.line == "an unknown line":  # of mirror's own mean
        return cause.op
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
_UNKNOWN_OPERATION = (
    "The {place} is not understood. strategy.verify compares the numbers of replicas and one "
    "device."
)
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
}


_F = TypeVar("_F", bound=Callable[..., Any])
_ROOT = re.compile(r"^[^.\[]*(\[\d+\])*")  # of a name such as `result[0]['w']`
_DECORATE = "decorate it: @mirror.per_replica_on_purpose"
_MARK = "_mirror_per_replica_on_purpose"


def warn_of(step: Callable[..., Any], *, is_on_purpose: bool) -> None:
    """Sets whether a step of mirror, such as a trainer's, is meant to differ."""
    setattr(step, _MARK, is_on_purpose)


def per_replica_on_purpose(step: _F) -> _F:
    """Marks a step that is meant to differ from one device with the whole batch.

    The first run of such a step is a warning, unless it is marked. Nothing else changes.

    Args:
        step: The step, which gets an attribute.

    Returns:
        The step.

    Raises:
        TypeError: If `step` is not callable, or takes no attribute, such as a bound method.

    >>> @mirror.per_replica_on_purpose
    ... def step(w, batch):
    ...     return w + mirror.all_reduce("sum", batch.mean(0))
    """
    fix = "Decorate the function: @mirror.per_replica_on_purpose."
    if not callable(step):
        raise TypeError(expected("step", step, "a function", fix))
    try:
        setattr(step, _MARK, True)
    except AttributeError as error:
        raise TypeError(expected("step", step, "a function that takes attributes", fix)) from error
    return step


def warn_if_different(
    single: Callable[[], Runner], call: Call, analysis: Analysis, warned: set[str]
) -> None:
    """Warns if one device with the whole batch would compute another new state.

    Random numbers count as equal, since replicas are meant to draw their own. A step that seems
    to differ is traced again, with the whole batch, so that each warning is proved. Random
    arguments must not refute it.

    Args:
        single: Returns a runner of one device.
        call: A call of the step.
        analysis: Its analysis.
        warned: Kinds of the warnings about the step that were issued.
    """
    step = analysis.traced.function
    n = step.group.num_replicas_in_sync
    if n == 1 or analysis.finish is None or DIFFERENT in warned or _is_meant(call.fn):
        return
    state = _state(call, analysis)
    try:
        guessed = _guessed(call, analysis, n) if state else []
        if not any(guessed[k].is_different for k in state):
            warned |= {UNSURE} if not all(guessed[k].is_equal for k in state) else set()
            return
        twin = _twin(call, analysis, single(), n, has_own_samples=True)
        outputs = outputs_of(call, analysis, twin, n)
    except Exception:  # a step that one device cannot trace, and any other, runs
        return
    wrong = [k for k in state if outputs[k].relation.is_different]
    if wrong:
        refuted = _agreeing(analysis, twin, wrong)
        wrong = [k for k in wrong if k not in refuted]
    if not wrong:
        warned.add(UNSURE)
        return
    warned.add(DIFFERENT)
    is_ours = is_our_module(getattr(call.fn, "__module__", None))
    fix = "pass mirror.Trainer(..., require_equal=False)" if is_ours else _DECORATE
    first, more = outputs[wrong[0]], f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
    warn_user(
        f"{step.name} differs from one device with the whole batch, in {first.name}{more}. "
        f"{explained(first.relation, n)}{_hint(call, analysis, wrong)} If it is meant to differ, "
        f"{fix}."
    )


def _agreeing(analysis: Analysis, twin: _Twin, outputs: Sequence[int]) -> set[int]:
    """Returns the outputs that numbers show to agree with one device, such as x of log(exp(x))."""
    assert analysis.finish is not None
    many, one = Program(analysis.traced, analysis.finish), Program(twin.traced, twin.finish)
    masks = {i for i, x in enumerate(twin.inputs) if x.pieces == UNIFORM}
    return agreeing(many, one, twin.types, masks, outputs)


def _is_meant(fn: Any) -> bool:
    while isinstance(fn, functools.partial) and not hasattr(fn, _MARK):
        fn = fn.func
    is_ours = is_our_module(getattr(fn, "__module__", None))
    return bool(getattr(fn, _MARK, is_ours))


def _hint(call: Call, analysis: Analysis, outputs: Sequence[int]) -> str:
    changed, slots = analysis.plan.changed, call.slots
    inputs = [changed[k] for k in outputs if k < len(changed)]
    if any(i < len(slots) and issubclass(slots[i][0].kind, nnx.BatchStat) for i in inputs):
        return " Batch normalization takes axis_name=mirror.REPLICA_AXIS."
    return ""


def _state(call: Call, analysis: Analysis) -> list[int]:
    """Returns the positions of new state among the outputs of `Analysis.finish`.

    They are nnx variables, and results that have the type and the place of a mirrored argument: in
    `result[0]['w']` and `params['w']`, or in `result` and `w`. A `mirror.Variable` has its own
    aggregation.
    """
    step, plan = analysis.traced.function, analysis.plan
    metrics = {i for metric in plan.merged for i in metric.positions.values()}
    own = {i for i, (slot, _) in enumerate(call.slots) if issubclass(slot.kind, Variable)}
    left_out = metrics | own
    is_state = [i not in left_out and not step.per_replica[i] for i in plan.changed]
    arguments = {
        (_ROOT.sub("", name), aval.shape, aval.dtype)
        for name, aval, differs in zip(call.input_names, step.avals, step.per_replica, strict=True)
        if aval.shape and not differs
    }
    avals = analysis.traced.avals
    for name, aval, differs in zip(step.out_names, avals, plan.per_replica_results, strict=False):
        place = _ROOT.sub("", name), aval.shape, aval.dtype
        is_state.append(not differs and place in arguments)
    return [k for k, each in enumerate(is_state) if each]


def _guessed(call: Call, analysis: Analysis, n: int) -> Sequence[Relation]:
    """Returns the likely relations of the outputs of `Analysis.finish` to one device's."""
    step, finish = analysis.traced.function, analysis.finish
    assert finish is not None
    inputs, types = inputs_of(call, step, n, has_own_samples=True)
    pairs = zip(types, step.avals, strict=True)
    counts = {aval.shape[0] for whole, aval in pairs if whole.shape != aval.shape}
    if not counts or min(counts) <= 1:  # any axis of one entry could be the axis of the rows
        return [SAME] * len(finish.jaxpr.outvars)
    found = guess(analysis.traced.jaxpr, inputs, n, counts)
    return guess(finish, [*inputs, *found], n, counts)
