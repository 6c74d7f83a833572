"""State that a step takes and returns: it must come back the same on all replicas.

State that is an nnx object is written back, so that the plan refuses a step after which replicas
would hold different values. Other state is an argument and a result; which result is the new state
is told by its structure.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax

from mirror._src.program.marks import Mark
from mirror._src.run.arguments import ObjectPlaceholder
from mirror._src.run.call import Call
from mirror._src.run.plan import cause, divergence
from mirror._src.run.step import Step
from mirror._src.utils.errors import ReplicaDivergenceError
from mirror._src.utils.naming import leaf_names

_MEANT = (
    "\nIf the replicas are meant to differ, pass a PerReplica from the start, e.g. of "
    "strategy.distribute_values_from_function. For a result that is not state, such as gradients, "
    "return jax.tree.leaves(grads)."
)


class Drift(NamedTuple):
    """An argument that all replicas have in common, and whose counterpart they do not.

    Attributes:
        causes: For each leaf of the argument that comes back per-replica, its name, and why.
        is_certain: Whether the result can only be the new state: the argument is donated, or is an
            object that holds state, such as a `TrainState` or an Equinox module. The result may
            else be something of the same structure, such as gradients.
        is_bare: Whether the argument is a single array, whose shape a result may have by chance.
        results: The results that differ, by their position among those that are arrays.
    """

    causes: dict[str, str]
    is_certain: bool
    is_bare: bool
    results: list[int]


_Pairs: TypeAlias = list[tuple[int, int, Mark]]


class _Unit(NamedTuple):
    """A part of the arguments or of the result that may be state."""

    form: Any
    start: int
    at_top: bool
    is_donated: bool = False
    is_object: bool = False


def find_drifts(call: Call, step: Step, avals: Sequence[Any], marks: Sequence[Mark]) -> list[Drift]:
    """Finds the state that comes back per-replica.

    Args:
        call: The call.
        step: Its trace.
        avals: Shapes and dtypes of the results.
        marks: What the proof says of them.
    """
    if not any(mark.per_replica for mark in marks):
        return []
    inputs = _inputs(call, step)
    places = _places(step)
    outputs = dict(zip(places, zip(avals, marks, strict=True), strict=True))
    numbers = {place: number for number, place in enumerate(places)}
    by_form: dict[Any, list[tuple[_Unit, list[_Pairs]]]] = {}
    for unit, alike in _alike(call, step, inputs, outputs):
        by_form.setdefault(unit.form, []).append((unit, alike))
    names = leaf_names(call.fn, call.tree)
    origins = call.input_names
    drifts = []
    for form, units in by_form.items():
        is_bare = form.node_data() is None
        for unit, pairs in units:
            differing = [[pair for pair in each if pair[2].per_replica] for each in pairs]
            # As many results of that structure are mirrored as there are such arguments: the others
            # are something else. One of several: it may be either.
            mirrored = sum(not each for each in differing)
            if not any(differing) or mirrored >= len(units):
                continue
            first = next(each for each in differing if each)
            causes = {names[i]: cause(mark, origins) for i, _, mark in first}
            places_of = [numbers[k] for each in differing for _, k, _ in each]
            is_certain = unit.is_donated or (unit.is_object and not mirrored)
            drifts.append(Drift(causes, is_certain, is_bare, places_of))
    return drifts


def find_returned(call: Call, step: Step, avals: Sequence[Any]) -> set[int]:
    """Finds the arguments that are state: a result has the same structure, shapes and dtypes.

    Args:
        call: The call.
        step: Its trace.
        avals: Shapes and dtypes of the results.

    Returns:
        Positions among the leaves of the call's arguments.
    """
    inputs, mark = _inputs(call, step, numbers=True), Mark()
    outputs = {i: (aval, mark) for i, aval in zip(_places(step), avals, strict=True)}
    alike = _alike(call, step, inputs, outputs)
    return {i for _, each in alike for pairs in each for i, *_ in pairs}


def carried_state(
    call: Call, step: Step, avals: Sequence[Any], per_replica: Sequence[bool], *, donated: bool
) -> list[tuple[int, int]]:
    """Finds arguments that are state: donated, or objects that hold state, and returned.

    Args:
        call: The call.
        step: Its trace.
        avals: Shapes and dtypes of the results.
        per_replica: For each result, whether replicas may differ in it.
        donated: Whether to take every argument for donated, which a report cannot know.

    Returns:
        Positions of inputs of the program, each with that of its new value among the results.
    """
    inputs = _inputs(call, step)
    places = _places(step)
    numbers = {place: number for number, place in enumerate(places)}
    outputs = {
        place: (aval, Mark("own" if differs else None))
        for place, aval, differs in zip(places, avals, per_replica, strict=True)
    }
    position = {i: step.num_state + number for number, i in enumerate(call.layout.dynamic)}
    found: dict[int, int] = {}
    for unit, alike in _alike(call, step, inputs, outputs):
        is_bare = unit.form.node_data() is None
        if not (unit.is_donated or unit.is_object or donated) or (is_bare and not unit.at_top):
            continue
        for pairs in alike:
            if any(mark.per_replica for _, _, mark in pairs):
                continue
            new = {position[i]: numbers[k] for i, k, _ in pairs}
            if found.keys().isdisjoint(new) and set(found.values()).isdisjoint(new.values()):
                found |= new
                break
    return list(found.items())


def require_none_certain(name: str, drifts: Sequence[Drift]) -> None:
    """Refuses a step whose state would differ between the replicas.

    Raises:
        ReplicaDivergenceError: There is such state; the message names its leaves.
    """
    require_none(name, [drift for drift in drifts if drift.is_certain])


def require_none(name: str, drifts: Sequence[Drift]) -> None:
    """Refuses a step with any of these drifts.

    Raises:
        ReplicaDivergenceError: There is one; the message names the leaves.
    """
    if drifts:
        raise ReplicaDivergenceError(drifting(name, causes_of(drifts)))


def causes_of(drifts: Sequence[Drift]) -> dict[str, str]:
    """The names of all leaves that would differ, and why."""
    return {leaf: why for drift in drifts for leaf, why in drift.causes.items()}


def drifting(name: str, causes: Mapping[str, str]) -> str:
    """Words state that would differ: which and why, and the fix."""
    return divergence(name, (f"{leaf}: {why}" for leaf, why in causes.items())) + _MEANT


def _places(step: Step) -> list[int]:
    """The positions of the leaves of the result that are arrays."""
    return [i for i in range(step.out_tree.num_leaves) if i not in step.static_results]


def _alike(
    call: Call, step: Step, inputs: Mapping[int, Any], outputs: Mapping[int, Any]
) -> Iterator[tuple[_Unit, list[_Pairs]]]:
    """The parts of the arguments that may be state, each with the results of its structure."""
    results = list(_parts(step.out_tree, 0, depth=0))
    for unit in _arguments(call):
        is_bare = unit.form.node_data() is None
        candidates = [r for r in results if r.form == unit.form and (r.at_top or not is_bare)]
        pairs = [_pairs(unit, result, inputs, outputs) for result in candidates]
        yield unit, [each for each in pairs if each is not None]


def _inputs(call: Call, step: Step, *, numbers: bool = False) -> dict[int, Any]:
    """Shapes and dtypes of the leaves of the arguments that are mirrored arrays, or numbers."""
    layout = call.layout
    found = {}
    for number, i in enumerate(layout.dynamic):
        is_array = numbers or not isinstance(call.leaves[i], int | float | complex)
        if is_array and number not in layout.per_replica:
            found[i] = step.avals[step.num_state + number]
    return found


def _pairs(
    unit: _Unit, result: _Unit, inputs: Mapping[int, Any], outputs: Mapping[int, Any]
) -> _Pairs | None:
    """The mirrored leaves of an argument, each with its counterpart in a result and its mark.

    `None`: the result has other shapes, or no leaf is a mirrored array.
    """
    found = []
    for k in range(unit.form.num_leaves):
        aval, (new, mark) = inputs.get(unit.start + k), outputs.get(result.start + k, (None, None))
        if aval is None or new is None:
            continue
        if (aval.shape, aval.dtype) != (new.shape, new.dtype):
            return None
        found.append((unit.start + k, result.start + k, mark))
    return found or None


def _arguments(call: Call) -> Iterator[_Unit]:
    """The parts of the arguments that may be state."""
    args, kwargs = call.layout.treedef.children()
    start = 0
    for number, argument in enumerate((*args.children(), *kwargs.children())):
        yield from _units(argument, start, number in call.donate_argnums)
        start += argument.num_leaves


def _units(form: Any, start: int, donated: bool, depth: int = 0) -> Iterator[_Unit]:
    is_object = _is_object(form)
    if form.num_leaves and (depth < 2 or is_object):
        yield _Unit(form, start, depth == 0, donated, is_object)
    if is_object or form.node_data() is None:
        return
    for child in form.children():
        if child.node_data() is not None:
            yield from _units(child, start, donated, depth + 1)
        start += child.num_leaves


def _parts(form: Any, start: int, depth: int) -> Iterator[_Unit]:
    """The result, and what it consists of, at any depth."""
    if not form.num_leaves:
        return
    yield _Unit(form, start, at_top=depth < 2)
    if form.node_data() is None:
        return
    for child in form.children():
        yield from _parts(child, start, depth + 1)
        start += child.num_leaves


def _is_object(form: Any) -> bool:
    """Whether it is a node of a class of its own: containers are not, whoever registered them."""
    data = form.node_data()
    if data is None or data[0] is None:
        return False
    return not issubclass(
        data[0], tuple | list | Mapping | type(None) | ObjectPlaceholder | jax.tree_util.Partial
    )
