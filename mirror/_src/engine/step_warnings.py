"""Warnings about valid steps that are probably mistakes: each is issued once per step."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mirror._src.base.errors import describe, listing
from mirror._src.base.naming import (
    argument_names,
    code_of,
    is_our_module,
    keys,
    name_of,
    warn_user,
)
from mirror._src.base.types import StepFunction
from mirror._src.engine.analysis import Analysis
from mirror._src.engine.call import Call
from mirror._src.engine.closures import leaked_names
from mirror._src.engine.donated_state import IF_INTENDED, own_values
from mirror._src.engine.plan import ALL_REDUCE
from mirror._src.engine.stale import is_time_to_look, stale_array
from mirror._src.engine.step import Step
from mirror._src.jaxprs.marks import Mark
from mirror._src.jaxprs.proof import Notes

MAX_NEW_FUNCTIONS = 3


def warn_about_proof(
    warned: set[str], call: Call, notes: Notes, marks: Sequence[Mark], num_replicas: int
) -> None:
    """Warns about the notes of the proof, once per function.

    Args:
        warned: Kinds of the warnings about this step that were issued.
        call: The call that was proved.
        notes: Notes of the proof.
        marks: Marks of the outputs.
        num_replicas: Number of replicas.
    """
    if is_our_module(getattr(call.fn, "__module__", None)) or num_replicas == 1:
        return
    name, texts = name_of(call.fn), {}
    is_data = [np.ndim(leaf) > 0 for leaf in call.layout.dynamic_leaves(call.leaves)]
    if notes.idle_collectives and any(is_data):
        texts["undistributed"] = (
            f"{name} computes the same on all {num_replicas} replicas: the collective at "
            f"{notes.idle_collectives[0]} reduces values that are already equal. Pass batches "
            "from strategy.distribute_dataset(dataset), which splits them across the replicas."
        )
    lines = dict.fromkeys(notes.shared_noise)
    if summed := [line for line in lines if line in notes.summed_noise]:
        texts["summed noise"] = (
            f"{name} adds the same random numbers on all {num_replicas} replicas, sampled at "
            f"{', '.join(summed)}, to values that it then all-reduces. A key per replica would "
            "add other noise on each of them. Add the noise once, as for private "
            'gradients, after mirror.all_reduce("sum", grads).'
        )
    if own := [line for line in lines if line not in notes.summed_noise]:
        texts["noise"] = (
            f"{name} applies the same random numbers on all {num_replicas} replicas, "
            f"sampled at {', '.join(own)}. For noise that differs between replicas, sample "
            "with mirror.get_replica_context().fold_in(key). Add noise for a sum, such as "
            "private gradients, after the all-reduce."
        )
    assumed = sorted({line for mark in marks if not mark.per_replica for line in mark.assumed})
    if assumed:
        texts["pure"] = (
            f"{name} assumes that {', '.join(assumed)} returns the same on all replicas, "
            "because the callback is declared pure. If it is not, the replicas diverge: "
            'all-reduce its result, mirror.all_reduce("mean", y).'
        )
    for kind, text in texts.items():
        if _is_first(warned, kind):
            warn_user(text)


def warn_about_drift(step: Step, call: Call, analysis: Analysis, num_replicas: int) -> None:
    """Warns about values per replica that the step has returned for mirrored arguments."""
    if is_our_module(getattr(call.fn, "__module__", None)) or num_replicas == 1:
        return
    known = step.own_values.setdefault(call.layout.treedef, {})
    causes = [known[i] for i in call.layout.per_replica if i in known]
    results, _, _ = analysis.traced.split(analysis.marks)
    known.update(own_values(call, analysis.traced, results))
    if causes and _is_first(step.warned, "drift"):
        warn_user(
            f"{name_of(call.fn)} receives values that an earlier call has returned, and that "
            f"differ between replicas, so that each replica trains on its own:\n{listing(causes)}"
            f"\n{ALL_REDUCE}{IF_INTENDED}"
        )


def warn_about_lost_updates(warned: set[str], call: Call, notes: Notes) -> None:
    """Warns about new values of arguments that the step computes and does not return."""
    if is_our_module(getattr(call.fn, "__module__", None)) or not notes.lost_updates:
        return
    if not _is_first(warned, "lost"):
        return
    step_name, names = name_of(call.fn), call.input_names
    lost = list(dict.fromkeys(names[update.input] for update in notes.lost_updates))
    more = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
    _, collective, line = notes.lost_updates[0]
    changed = {_path_name(call, path) for path in notes.changed_in_place}
    why = "which does not return it"
    if lost[0] in changed:
        why = "which changed it in place: each replica changed its own copy"
    state = re.split(r"[.\[]", lost[0])[0]
    warn_user(
        f"The new {lost[0]}{more}, computed at {line} from the all-reduce at {collective}, is "
        f"lost: it reaches no result of {step_name}, {why}. Return the new state, and pass it "
        f"to the next call: {state}, loss = strategy.run({step_name}, ({state}, batch))."
    )


def warn_about_leaks(warned: set[str], fn: StepFunction) -> None:
    """Warns about traced values that a step has stored outside itself, once per function."""
    if is_our_module(getattr(fn, "__module__", None)):
        return
    leaked = leaked_names(fn)
    if not leaked or not _is_first(warned, "leaks"):
        return
    name = name_of(fn)
    stored = ", ".join(f"{path} ({describe(value)})" for path, value in leaked[:3])
    container = leaked[0][0].partition("[")[0]
    fix = f"{container}.append(value)" if "[" in leaked[0][0] else f"{container} = value"
    warn_user(
        f"{name} stored traced values outside the step: {stored}. They never receive numbers, "
        "because the step is traced once and runs compiled. Return the value, and store the "
        f"result: value = strategy.run({name}, args); {fix}."
    )


def warn_about_stale_arrays(
    warned: set[str], fn: StepFunction, captured: Mapping[str, Any], runs: int
) -> None:
    """Warns about a captured array that was replaced since the step was compiled.

    Args:
        warned: Kinds of the warnings about this step that were issued.
        fn: The step.
        captured: The program's `captured_arrays`.
        runs: Number of completed runs of the program.
    """
    if not is_time_to_look(runs):
        return
    message = stale_array(fn, captured)
    if message is not None and _is_first(warned, "stale"):
        warn_user(message)


def warn_about_recompilation(warned: set[str], fn: StepFunction) -> None:
    """Warns about a step that is a new function object in every call."""
    code = code_of(fn)
    if code is not None and _is_first(warned, "recompiled"):
        warn_user(
            f"{name_of(fn)} ({code.co_filename}:{code.co_firstlineno}) was recompiled "
            f"{MAX_NEW_FUNCTIONS} times because each call passes a new function object. "
            "Define it once, outside the loop, and pass the changing values as arguments."
        )


def _is_first(warned: set[str], kind: str) -> bool:
    """Whether a step gets this warning for the first time."""
    is_first = kind not in warned
    warned.add(kind)
    return is_first


def _path_name(call: Call, path: Sequence[Any]) -> str:
    """Returns the user's name for a path in the arguments, as `Call.leaf_names` does."""
    names = argument_names(call.fn, len(call.tree[0]))
    return (names[path[1].idx] if path[0].idx == 0 else path[1].key) + keys(path[2:])
