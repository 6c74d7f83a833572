"""Whether an optimizer does the same on several servers as on whole leaves.

Each server runs the optimizer on its own slices. That is the same optimizer only if the update of a
row depends on no leaf of another server, and on no row of another slice. Two checks:

- Data flow through the traced `tx.update` finds all dependences between leaves, and between the
  rows of a leaf, such as a norm. It does not depend on values, but knows nothing of constants.
- What does not come from a gradient, such as random noise whose key is split by the number of
  leaves, or a constant computed from a shape, makes the program of a server another one. Unless the
  programs are equal but for the number of rows, a trial on small leaves compares their results.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
import optax
from jax.extend.core import ClosedJaxpr

from mirror._src.jaxprs.trace import trace
from mirror._src.ps.dependence import Depends, follow
from mirror._src.ps.optimizer_tree import (
    Path,
    flatten,
    init_structs,
    nest,
    owner,
    row_owner,
)
from mirror._src.ps.placement import Leaf, PartitionerLike, Placement, place
from mirror._src.ps.row_programs import RowPrograms
from mirror._src.ps.sparse_optimizer import require_sparse
from mirror._src.ps.trial import (
    differ,
    random_gradients,
    random_values,
    reduced,
    run_trial,
    structs,
)

_WAYS_OUT = (
    "Use one server, ps=1; or leave this out of `tx` and do it in the step, on each worker, for "
    "example clip the gradients before optimizer.update."
)


def place_separably(
    tx: optax.GradientTransformation,
    leaves: Iterable[Leaf],
    num_ps: int,
    partitioner: PartitionerLike | None,
    *,
    tables: Collection[str] = (),
) -> Placement:
    """Places leaves such that each server can run the optimizer on its own slices.

    It is as `place`, but leaves whose rows the optimizer couples stay whole.

    Raises:
        ValueError: If the optimizer couples leaves on different servers; see `require_separable`.
    """
    leaves = list(leaves)
    trained = structs({leaf.name: leaf for leaf in leaves if leaf.kind == "trained"})
    whole: frozenset[str] = frozenset()
    while True:
        placement = place(leaves, num_ps, partitioner, whole=whole, tables=tables)
        coupled = require_separable(tx, trained, placement, tables)
        if not coupled:
            return placement
        whole |= coupled


def require_separable(
    tx: optax.GradientTransformation,
    trained: Mapping[str, Any],
    placement: Placement,
    tables: Collection[str] = (),
) -> frozenset[str]:
    """Returns the cut leaves that must stay whole, because the optimizer couples their rows.

    The other leaves are placed differently with these whole, so it must be asked again then.

    Args:
        tx: The optimizer.
        trained: Shape and dtype of each trained leaf, whole.
        placement: Where the rows of the leaves are.
        tables: Leaves whose touched rows alone are updated.

    Raises:
        ValueError: If it couples leaves on different servers, or cannot be run on the leaves of one
            server, or on touched rows alone. The message names the leaves.
    """
    trained = structs(trained)
    if tables:
        require_sparse(tx, trained, tables)
    if len(placement.servers) == 1 or not trained:
        return frozenset()
    coupled = _of_other_state(tx, trained, placement)
    coupled = coupled or _coupled_by_data_flow(tx, trained, placement)
    if coupled or _is_same_program(tx, trained, placement):
        return coupled
    return _different_in_trial(tx, trained, placement)


def _of_other_state(
    tx: optax.GradientTransformation, trained: Mapping[str, Any], placement: Placement
) -> frozenset[str]:
    """Returns the cut leaves whose slices' state is not a slice of the leaf's state."""
    whole = dict(init_structs(tx, trained)[0])
    found = set()
    for own in _own_slices(trained, placement):
        for path, struct in init_structs(tx, own)[0]:
            name = owner(path, trained)
            wanted = whole[path].shape if path in whole else None
            if wanted and name is not None and row_owner(path, wanted, trained):
                wanted = (own[name].shape[0], *wanted[1:])
            if struct.shape == wanted:
                continue
            if name is None or not placement.is_cut(name):
                raise ValueError(
                    f"`tx` keeps another state, {jax.tree_util.keystr(path)}, for the variables of "
                    f"one parameter server than for all of them. {_WAYS_OUT}"
                )
            found.add(name)
    return frozenset(found)


def _coupled_by_data_flow(
    tx: optax.GradientTransformation, trained: Mapping[str, Any], placement: Placement
) -> frozenset[str]:
    names = list(trained)
    homes = {n: {server for server, _ in placement.holders[n]} for n in names}
    found = set()
    for name, depends in _dependences(tx, trained):
        others = [names[i] for i in _bits(depends.rows | depends.mixed)]
        on_servers = {server for other in others for server in homes[other]}
        for other in others:
            # A leaf without a name is a state that all servers share, such as a count.
            there = on_servers if name is None else homes[name]
            if other != name and len(homes[other] | there) > 1:
                first = name or next((o for o in others if homes[o] != homes[other]), other)
                if first != other:
                    raise ValueError(_coupled(first, other, homes))
                found.add(other)
        if name is not None and depends.mixed & 1 << names.index(name):
            found.add(name)
    return frozenset(name for name in found if placement.is_cut(name))


def _coupled(name: str, other: str, homes: Mapping[str, set[int]]) -> str:
    where, there = (
        "server" + "s" * (len(s) > 1) + " " + ", ".join(map(str, sorted(s)))
        for s in (homes[name], homes[other])
    )
    return (
        f"`tx` computes the update of {name!r} (parameter {where}) from {other!r} (parameter "
        f"{there}) too, as optax.clip_by_global_norm does, but each parameter server updates its "
        f"own variables alone. {_WAYS_OUT}"
    )


def _dependences(
    tx: optax.GradientTransformation, trained: Mapping[str, Any]
) -> Iterator[tuple[str | None, Depends]]:
    """Yields what the update of each leaf, and each leaf of the state, depends on.

    The state carries dependences from one step to the next, until they do not grow any more.
    """
    names, n = list(trained), len(trained)
    program, state = _traced(tx, trained)
    own = [
        Depends(rows=1 << i) if leaf.shape else Depends(mixed=1 << i)
        for i, leaf in enumerate(trained.values())
    ]
    carried = [Depends()] * len(state)
    while True:
        results = follow(program, [*own, *own, *carried])
        grown = [a | b for a, b in zip(carried, results[n:], strict=True)]
        if grown == carried:
            break
        carried = grown
    yield from zip(names, results, strict=False)
    for path, depends in zip(state, carried, strict=True):
        yield owner(path, trained), depends


def _traced(
    tx: optax.GradientTransformation, leaves: Mapping[str, Any]
) -> tuple[ClosedJaxpr, list[Path]]:
    """Returns a program of gradients, parameters and state, and the paths of the state.

    Its results are the updates and the new state.
    """
    tx = optax.with_extra_args_support(tx)
    flat_structs = structs(leaves)
    names, n = list(leaves), len(leaves)
    state, treedef = init_structs(tx, leaves)

    def update(*flat: Any) -> list[Any]:
        gradients, params = (dict(zip(names, flat[i : i + n], strict=True)) for i in (0, n))
        old = treedef.unflatten(flat[2 * n :])
        updates, new = tx.update(nest(gradients), old, nest(params), staleness=np.int32(0))
        return [*flatten(updates, names).values(), *jax.tree.leaves(new)]

    wholes = flat_structs.values()
    try:
        program = trace(update, [*wholes, *wholes, *(struct for _, struct in state)], 1)
    except TypeError as error:
        raise ValueError(
            "`tx` cannot compute updates from gradients and parameters alone: "
            f"{type(error).__name__}: {error} Parameter servers pass it nothing else."
        ) from error
    return program, [path for path, _ in state]


def _bits(bits: int) -> Iterator[int]:
    while bits:
        lowest = bits & -bits
        yield lowest.bit_length() - 1
        bits ^= lowest


def _own_slices(trained: Mapping[str, Any], placement: Placement) -> list[dict[str, Any]]:
    """Returns the trained slices of each server that has any."""
    servers = [{p.leaf: p for p in slices if p.leaf in trained} for slices in placement.servers]
    return [own for own in servers if own]


def _is_same_program(
    tx: optax.GradientTransformation, trained: Mapping[str, Any], placement: Placement
) -> bool:
    """Whether each server's program is the whole one, restricted to its slices.

    That takes a trace per server, where a trial takes a compilation.
    """
    programs = RowPrograms()

    def results(leaves: Mapping[str, Any]) -> dict[Any, int]:
        program, state = _traced(tx, leaves)
        arguments = [*(("gradient", n) for n in leaves), *(("value", n) for n in leaves), *state]
        return dict(zip([*leaves, *state], programs.results(program, arguments), strict=True))

    whole = results(trained)
    return all(results(own).items() <= whole.items() for own in _own_slices(trained, placement))


def _different_in_trial(
    tx: optax.GradientTransformation, trained: Mapping[str, Any], placement: Placement
) -> frozenset[str]:
    small = reduced(trained, placement)
    values, gradients = random_values(small.leaves, 0), random_gradients(small.leaves)
    expected = run_trial(tx, values, gradients)
    own_values = small.split(values)
    own_gradients = [small.split(each) for each in gradients]
    found = set()
    for server, own in enumerate(own_values):
        if not own:
            continue
        # Each server's part of the whole trial is compared with a trial of its part.
        steps = run_trial(tx, own, [each[server] for each in own_gradients])
        for (updates, state), (all_updates, all_state) in zip(steps, expected, strict=True):
            for name, update in small.split(all_updates)[server].items():
                if differ(updates[name], update):
                    found.add(name)
            for path, leaf in state.items():
                wanted = all_state[path]
                leaf_name = row_owner(path, wanted.shape, small.leaves)
                if leaf_name is not None:
                    wanted = small.split({leaf_name: wanted})[server][leaf_name]
                if differ(leaf, wanted):
                    found.add(owner(path, small.leaves) or min(own))
    for name in sorted(found):
        if not placement.is_cut(name):
            raise ValueError(
                f"`tx` computes another update of {name!r} on a parameter server than with all "
                "variables together, for example because it adds noise that depends on how many "
                f"there are. {_WAYS_OUT}"
            )
    return frozenset(found)
