"""The warning at the first run of a step whose new state differs from one device's."""

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from flax import nnx

from mirror._src.base.errors import expected
from mirror._src.base.naming import is_our_module, warn_user
from mirror._src.engine.analysis import Analysis
from mirror._src.engine.call import Call
from mirror._src.engine.runner import Runner
from mirror._src.engine.variable import Variable
from mirror._src.inspection.equality import DIFFERENT, explained, inputs_of, outputs_of
from mirror._src.jaxprs.relate_alone import guess
from mirror._src.jaxprs.relations import SAME, Relation

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
    to differ is traced again, with the whole batch, so that each warning is proved.

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
            return
        outputs = outputs_of(call, analysis, single(), n, has_own_samples=True)
    except Exception:  # a step that one device cannot trace, and any other, runs
        return
    wrong = [k for k in state if outputs[k].relation.is_different]
    if not wrong:
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
