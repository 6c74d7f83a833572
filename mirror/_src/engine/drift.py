"""Finds state that a step receives mirrored and returns per-replica.

`plan` checks the state of nnx objects, which is written back into them. All other state is an
argument and a result of the step. This module pairs an argument with the results that have the same
structure, shapes and dtypes.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax

from mirror._src.base.errors import ReplicaDivergenceError
from mirror._src.base.naming import leaf_names
from mirror._src.engine.arguments import ObjectPlaceholder
from mirror._src.engine.call import Call
from mirror._src.engine.plan import cause, divergence_message
from mirror._src.engine.step import Step
from mirror._src.jaxprs.marks import Mark

_IF_INTENDED = (
    "\nIf the replicas are intended to differ, pass a PerReplica in the first call, for example "
    "from strategy.distribute_values_from_function. To return a result that is not state, such as "
    "gradients, return jax.tree.leaves(grads)."
)


class Drift(NamedTuple):
    """A mirrored argument that a step returns per-replica.

    Attributes:
        causes: The reason for each leaf of the argument that comes back per-replica, by name.
        is_certain: Whether the result can only be the new state, because the argument is donated,
            or is an object that holds state, such as a `TrainState` or an Equinox module. Any other
            result may be something else with the same structure, such as gradients.
        is_bare: Whether the argument is a single array, whose shape a result may have by chance.
        results: Positions, among the results that are arrays, of the per-replica ones.
    """

    causes: dict[str, str]
    is_certain: bool
    is_bare: bool
    results: list[int]


_Pairs: TypeAlias = list[tuple[int, int, Mark]]


class _Subtree(NamedTuple):
    """A subtree of the arguments or of the result that may be state.

    Attributes:
        treedef: Its structure.
        start: Position of its first leaf.
        at_top: Whether it is an argument, or the result or one of its children.
        is_donated: Whether it belongs to a donated argument.
        is_object: Whether it is an object of a class of its own, rather than a container.
    """

    treedef: Any
    start: int
    at_top: bool
    is_donated: bool = False
    is_object: bool = False


def find_drifts(call: Call, step: Step, avals: Sequence[Any], marks: Sequence[Mark]) -> list[Drift]:
    """Finds arguments that come back per-replica.

    Args:
        call: The call.
        step: Its traced step.
        avals: Shapes and dtypes of the results.
        marks: Marks of the results.
    """
    if not any(mark.per_replica for mark in marks):
        return []
    inputs = _inputs(call, step)
    positions = _array_positions(step)
    outputs = dict(zip(positions, zip(avals, marks, strict=True), strict=True))
    numbers = {position: number for number, position in enumerate(positions)}
    by_treedef: dict[Any, list[tuple[_Subtree, list[_Pairs]]]] = {}
    for argument, matches in _matches(call, step, inputs, outputs):
        by_treedef.setdefault(argument.treedef, []).append((argument, matches))
    names = leaf_names(call.fn, call.tree)
    origins = call.input_names
    drifts = []
    for treedef, arguments in by_treedef.items():
        is_bare = treedef.node_data() is None
        for argument, matches in arguments:
            differing = [[pair for pair in pairs if pair[2].per_replica] for pairs in matches]
            # If as many mirrored results as arguments have this structure, these are the new state,
            # and the per-replica results are something else. If fewer, it may be either.
            num_mirrored = sum(not pairs for pairs in differing)
            if not any(differing) or num_mirrored >= len(arguments):
                continue
            first = next(pairs for pairs in differing if pairs)
            causes = {names[i]: cause(mark, origins) for i, _, mark in first}
            results = [numbers[k] for pairs in differing for _, k, _ in pairs]
            is_certain = argument.is_donated or (argument.is_object and not num_mirrored)
            drifts.append(Drift(causes, is_certain, is_bare, results))
    return drifts


def find_returned(call: Call, step: Step, avals: Sequence[Any]) -> set[int]:
    """Finds arguments that are state: a result has the same structure, shapes and dtypes.

    Args:
        call: The call.
        step: Its traced step.
        avals: Shapes and dtypes of the results.

    Returns:
        Positions among the leaves of the call's arguments.
    """
    inputs, mark = _inputs(call, step, numbers=True), Mark()
    outputs = {i: (aval, mark) for i, aval in zip(_array_positions(step), avals, strict=True)}
    return {
        i
        for _, matches in _matches(call, step, inputs, outputs)
        for pairs in matches
        for i, *_ in pairs
    }


def carried_state(
    call: Call, step: Step, avals: Sequence[Any], per_replica: Sequence[bool], *, donated: bool
) -> list[tuple[int, int]]:
    """Finds arguments that are state: they are returned, and are donated or objects with state.

    Args:
        call: The call.
        step: Its traced step.
        avals: Shapes and dtypes of the results.
        per_replica: For each result, whether it is per-replica.
        donated: Whether to treat all arguments as donated, as in a report, which cannot know.

    Returns:
        For each leaf of such arguments, its position among the inputs of the program, and the
        position of its new value among the results.
    """
    inputs = _inputs(call, step)
    positions = _array_positions(step)
    numbers = {position: number for number, position in enumerate(positions)}
    outputs = {
        position: (aval, Mark("own" if differs else None))
        for position, aval, differs in zip(positions, avals, per_replica, strict=True)
    }
    input_of = {i: step.num_state + number for number, i in enumerate(call.layout.dynamic)}
    carried: dict[int, int] = {}
    for argument, matches in _matches(call, step, inputs, outputs):
        is_bare = argument.treedef.node_data() is None
        is_state = argument.is_donated or argument.is_object or donated
        if not is_state or (is_bare and not argument.at_top):
            continue
        for pairs in matches:
            if any(mark.per_replica for _, _, mark in pairs):
                continue
            new = {input_of[i]: numbers[k] for i, k, _ in pairs}
            if carried.keys().isdisjoint(new) and set(carried.values()).isdisjoint(new.values()):
                carried |= new
                break
    return list(carried.items())


def require_none_certain(name: str, drifts: Sequence[Drift]) -> None:
    """Rejects a step if any of the drifts is certain.

    Raises:
        ReplicaDivergenceError: If there is one.
    """
    require_none(name, [drift for drift in drifts if drift.is_certain])


def require_none(name: str, drifts: Sequence[Drift]) -> None:
    """Rejects a step if there are any drifts.

    Raises:
        ReplicaDivergenceError: If there is one.
    """
    if drifts:
        raise ReplicaDivergenceError(drift_message(name, causes_of(drifts)))


def causes_of(drifts: Sequence[Drift]) -> dict[str, str]:
    """Returns the reason for each leaf that would differ, by the name of the leaf."""
    return {leaf: why for drift in drifts for leaf, why in drift.causes.items()}


def drift_message(name: str, causes: Mapping[str, str]) -> str:
    """Returns the error message for a step that returns state per-replica."""
    lines = [f"{leaf}: {why}" for leaf, why in causes.items()]
    return divergence_message(name, lines) + _IF_INTENDED


def _array_positions(step: Step) -> list[int]:
    """Returns the positions of the leaves of the result that are arrays."""
    return [i for i in range(step.out_tree.num_leaves) if i not in step.static_results]


def _matches(
    call: Call, step: Step, inputs: Mapping[int, Any], outputs: Mapping[int, Any]
) -> Iterator[tuple[_Subtree, list[_Pairs]]]:
    """Yields each part of the arguments that may be state, with the results that match it."""
    results = list(_result_subtrees(step.out_tree, 0, depth=0))
    for argument in _arguments(call):
        is_bare = argument.treedef.node_data() is None
        candidates = [
            _pairs(argument, result, inputs, outputs)
            for result in results
            if result.treedef == argument.treedef and (result.at_top or not is_bare)
        ]
        yield argument, [pairs for pairs in candidates if pairs is not None]


def _inputs(call: Call, step: Step, *, numbers: bool = False) -> dict[int, Any]:
    """Returns the shapes and dtypes of mirrored arrays among the arguments, by position of leaf.

    Args:
        call: The call.
        step: Its traced step.
        numbers: Whether to include Python numbers.
    """
    layout = call.layout
    avals = {}
    for number, i in enumerate(layout.dynamic):
        is_included = numbers or not isinstance(call.leaves[i], int | float | complex)
        if is_included and number not in layout.per_replica:
            avals[i] = step.avals[step.num_state + number]
    return avals


def _pairs(
    argument: _Subtree, result: _Subtree, inputs: Mapping[int, Any], outputs: Mapping[int, Any]
) -> _Pairs | None:
    """Pairs the mirrored leaves of an argument with the leaves of a result and their marks.

    Returns `None` if shapes or dtypes differ, or if no leaf is a mirrored array.
    """
    pairs = []
    for k in range(argument.treedef.num_leaves):
        i, j = argument.start + k, result.start + k
        aval, (new, mark) = inputs.get(i), outputs.get(j, (None, None))
        if aval is None or new is None:
            continue
        if (aval.shape, aval.dtype) != (new.shape, new.dtype):
            return None
        pairs.append((i, j, mark))
    return pairs or None


def _arguments(call: Call) -> Iterator[_Subtree]:
    """Yields the parts of the arguments that may be state."""
    args, kwargs = call.layout.treedef.children()
    start = 0
    for number, argument in enumerate((*args.children(), *kwargs.children())):
        yield from _argument_subtrees(argument, start, number in call.donate_argnums)
        start += argument.num_leaves


def _argument_subtrees(
    treedef: Any, start: int, donated: bool, depth: int = 0
) -> Iterator[_Subtree]:
    """Yields an argument, the children of a container, and the objects at any depth."""
    is_object = _is_object(treedef)
    if treedef.num_leaves and (depth < 2 or is_object):
        yield _Subtree(treedef, start, depth == 0, donated, is_object)
    if is_object or treedef.node_data() is None:
        return
    for child in treedef.children():
        if child.node_data() is not None:
            yield from _argument_subtrees(child, start, donated, depth + 1)
        start += child.num_leaves


def _result_subtrees(treedef: Any, start: int, depth: int) -> Iterator[_Subtree]:
    """Yields the result and all its subtrees."""
    if not treedef.num_leaves:
        return
    yield _Subtree(treedef, start, at_top=depth < 2)
    if treedef.node_data() is None:
        return
    for child in treedef.children():
        yield from _result_subtrees(child, start, depth + 1)
        start += child.num_leaves


def _is_object(treedef: Any) -> bool:
    """Whether the root is an object of a class of its own, not a container of any library."""
    data = treedef.node_data()
    if data is None or data[0] is None:
        return False
    return not issubclass(
        data[0], tuple | list | Mapping | type(None) | ObjectPlaceholder | jax.tree_util.Partial
    )
