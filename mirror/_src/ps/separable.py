"""Whether an optimizer does the same on several servers as on whole leaves.

Each server runs the optimizer on its own slices. That is the same optimizer if the program traced
for these slices is the program for whole leaves, restricted to their rows: see `RowPrograms`. It
differs if an update depends on another leaf or row, such as by a norm, or on the number of leaves,
such as random noise, or on a shape. The optimizer is never run.

Of a sparse table, a server hands the optimizer the touched rows alone. That is compared in the same
way, with two rows. A row without a gradient is not updated, even if the optimizer would change it
by momentum or weight decay.
"""

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import optax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from mirror._src.jaxprs.equations import Scan, While, called, walk
from mirror._src.jaxprs.primitives import ADDITION, ELEMENTWISE, REDUCTION
from mirror._src.jaxprs.trace import trace
from mirror._src.ps.objects import (
    Path,
    as_numpy,
    flatten,
    init_structs,
    nest,
    owner,
    row_owner,
    structs,
)
from mirror._src.ps.placement import Leaf, PartitionerLike, Placement, place

_ZERO_AT_ZERO = ADDITION | frozenset(
    ["abs", "conj", "convert_element_type", "copy", "imag", "neg", "real", "sign", "sqrt", "square"]
)


class RowPrograms:
    """Numbers what programs compute: two results with one number are equal row by row.

    Equal means the same operations on the same arguments and constants, where arrays that differ
    in their number of rows alone count as the same. An operation that might treat rows differently
    is equal only on arrays of the same shape. So equal results may have different numbers, but
    never the other way round.

    Args:
        zeros: What identifies the arguments whose other rows, which shorter arrays lack, are 0.
    """

    def __init__(self, zeros: Collection[Hashable] = ()) -> None:
        self._numbers: dict[Hashable, int] = {}
        self._zeros = {self._number("argument", each) for each in zeros}

    def results(self, program: ClosedJaxpr, arguments: Sequence[Hashable]) -> list[int]:
        """Returns the numbers of the results, given what identifies each argument."""
        return self._follow(program, [self._number("argument", each) for each in arguments])

    def _follow(self, program: ClosedJaxpr | Jaxpr, arguments: Sequence[int]) -> list[int]:
        return walk(program, arguments, self._constant, self._equation)

    def _number(self, *key: Hashable) -> int:
        return self._numbers.setdefault(key, len(self._numbers))

    def _constant(self, value: Any) -> int:
        array = as_numpy(value)
        number = self._number("constant", str(array.dtype), array.shape, array.tobytes())
        if not array.any():
            self._zeros.add(number)
        return number

    def _body(self, program: ClosedJaxpr) -> tuple[int, ...]:
        """Returns what a loop body computes from its arguments, whatever they are."""
        return tuple(self.results(program, range(len(program.jaxpr.invars))))

    def _equation(self, eqn: JaxprEqn, operands: list[int]) -> list[int]:
        if (inner := called(eqn)) is not None:
            return self._follow(inner, operands)
        name = eqn.primitive.name
        if name == "cond":
            branches = [self._follow(each, operands[1:]) for each in eqn.params["branches"]]
            results = zip(*branches, strict=True)
            return [self._number(name, operands[0], *each) for each in results]
        if name in ("scan", "while"):
            key = (name, *operands, *self._loop(eqn))
        else:
            key = (name, *operands, *self._described(eqn, operands))
        numbers = [self._number(*key, position) for position in range(len(eqn.outvars))]
        if self._is_zero_at_zero(eqn, operands):
            self._zeros.update(numbers)
        return numbers

    def _loop(self, eqn: JaxprEqn) -> tuple[Hashable, ...]:
        if eqn.primitive.name == "while":
            loop = While(eqn)
            counts = map(len, loop.split(eqn.invars))
            return *counts, self._body(loop.test), self._body(loop.body)
        scan = Scan(eqn)  # arrays that it reads row by row have an equal number of rows
        return scan.num_consts, scan.num_carry, scan.length, scan.reverse, self._body(scan.body)

    def _described(self, eqn: JaxprEqn, operands: list[int]) -> tuple[Hashable, ...]:
        """Returns all about an operation but its operands."""
        name = eqn.primitive.name
        shapes = [_shape(atom) for atom in (*eqn.invars, *eqn.outvars)]
        is_constant = name == "broadcast_in_dim" and shapes[0] == ()
        # Rows that are 0 do not change a sum over all rows.
        is_sum = name == "reduce_sum" and operands[0] in self._zeros
        if _is_elementwise(eqn):
            shapes = []
        elif _keeps_rows(eqn) or is_constant or is_sum:
            # Of an array that is used element by element, the user determines the rows.
            shapes = [shape[1:] for shape in shapes]
        params = tuple(
            (key, str(value))
            for key, value in sorted(eqn.params.items())
            if not shapes or key not in ("shape", "new_sizes")  # of the result
        )
        dtypes = tuple(str(getattr(atom.aval, "dtype", atom.aval)) for atom in eqn.outvars)
        return *shapes, params, dtypes

    def _is_zero_at_zero(self, eqn: JaxprEqn, operands: list[int]) -> bool:
        """Whether the result is 0 in the rows in which arguments are."""
        name, are_zero = eqn.primitive.name, [each in self._zeros for each in operands]
        if name == "mul":
            return any(are_zero)
        if name in ("broadcast_in_dim", "reduce_sum"):
            return are_zero[0] and (_keeps_rows(eqn) or _shape(eqn.invars[0]) == ())
        is_power = name == "integer_pow" and eqn.params["y"] > 0
        return (name in _ZERO_AT_ZERO or is_power) and all(are_zero)


def _is_elementwise(eqn: JaxprEqn) -> bool:
    """Whether an element of the result is made of the same element of each operand."""
    shapes = {shape for atom in eqn.invars if (shape := _shape(atom))}
    return eqn.primitive.name in ELEMENTWISE and shapes <= {_shape(eqn.outvars[0])}


def _keeps_rows(eqn: JaxprEqn) -> bool:
    """Whether row `r` of the result is made of row `r` of the operand."""
    name = eqn.primitive.name
    if not eqn.invars or not (source := _shape(eqn.invars[0])):
        return False
    result, params = _shape(eqn.outvars[0]), eqn.params
    if not result or result[0] != source[0]:
        return False
    if name == "broadcast_in_dim":
        return params["broadcast_dimensions"][0] == 0
    if name == "reshape":
        return params.get("dimensions") is None
    if name == "squeeze":
        return 0 not in params["dimensions"]
    if name == "transpose":
        return params["permutation"][0] == 0
    return name in REDUCTION and 0 not in params["axes"]


def _shape(atom: Any) -> tuple[int, ...]:
    return tuple(getattr(atom.aval, "shape", ()))


_WAYS_OUT = (
    "Use one server, ps=1; or leave this out of `tx` and do it in the step, on each worker, for "
    "example clip the gradients before optimizer.update."
)
_WITHOUT_TABLES = "Leave it out of `sparse`, or use optax.adagrad or optax.sgd for it."


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
        _require_sparse(tx, trained, tables)
    if len(placement.servers) == 1 or not trained:
        return frozenset()
    servers = [{p.leaf: p for p in slices if p.leaf in trained} for slices in placement.servers]
    different = _different(tx, trained, [own for own in servers if own])
    cut = frozenset(name for name in different & trained.keys() if placement.is_cut(name))
    if different and not cut:
        names = sorted(different & trained.keys()) or sorted(different)
        raise ValueError(
            f"`tx` computes {names[0]!r} on its parameter server differently than with all "
            "variables together: from other variables too, as optax.clip_by_global_norm does, or "
            f"from their number or shapes, as optax.add_noise does. {_WAYS_OUT}"
        )
    return cut


def _require_sparse(
    tx: optax.GradientTransformation, trained: Mapping[str, Any], tables: Collection[str]
) -> None:
    """Rejects an optimizer that needs more than the touched rows of a table.

    Raises:
        ValueError: If the update of a row depends on other rows, or comes in a later step, which
            might not touch it. The message names the tables.
    """
    # optax does not export the class of the latter's state.
    accumulating = (optax.MultiStepsState, type(jax.eval_shape(optax.apply_every().init, {})))
    state = jax.eval_shape(tx.init, nest(trained))
    nodes = jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, accumulating))
    if any(isinstance(node, accumulating) for node in nodes):
        raise ValueError(
            f"`tx` accumulates gradients over several steps, but updates of the table"
            f"{_list(tables)} reach only the rows that a step touches. {_WITHOUT_TABLES}"
        )
    touched = {
        name: jax.ShapeDtypeStruct((2, *leaf.shape[1:]), leaf.dtype)
        for name, leaf in trained.items()
        if name in tables
    }
    if different := _different(tx, trained, [{**trained, **touched}], tables):
        names = _list(different & {*tables} or tables)
        raise ValueError(
            f"`tx` computes the update of a row of the table{names} from its other rows too, which "
            f"a sparse update does not read. {_WITHOUT_TABLES}"
        )


def _different(
    tx: optax.GradientTransformation,
    trained: Mapping[str, Any],
    parts: Iterable[Mapping[str, Any]],
    zeros: Collection[str] = (),
) -> set[str]:
    """Returns what an optimizer computes differently for parts of leaves than for the leaves.

    Args:
        tx: The optimizer.
        trained: Shape and dtype of each leaf, whole.
        parts: Shapes and dtypes of leaves with other numbers of rows.
        zeros: Leaves whose gradients are 0 in the rows that a part lacks.

    Returns:
        Names of leaves, and paths of states that belong to no leaf.
    """
    programs = RowPrograms([("gradient", name) for name in zeros])

    def results(leaves: Mapping[str, Any]) -> dict[Any, tuple[Any, ...]]:
        program, state = _traced(tx, leaves)
        paths = [path for path, _ in state]
        arguments = [*(("gradient", n) for n in leaves), *(("value", n) for n in leaves), *paths]
        numbers = iter(programs.results(program, arguments))
        updates = {name: (next(numbers),) for name in leaves}
        after = {path: next(numbers) for path in paths}
        return updates | {
            path: (after[path], next(numbers), _shape_of_rows(path, struct.shape, leaves))
            for path, struct in state
        }

    whole = results(trained)
    found: set[str] = set()
    for part in parts:
        for key, result in results(part).items():
            if whole.get(key) != result:
                name = key if isinstance(key, str) else owner(key, trained)
                found.add(name or "the state " + jax.tree_util.keystr(key))
    return found


def _shape_of_rows(path: Path, shape: tuple[int, ...], leaves: Mapping[str, Any]) -> Any:
    """Returns the shape of a state, without its number of rows if these are the leaf's."""
    return shape if row_owner(path, shape, leaves) is None else ("rows", *shape[1:])


def _traced(
    tx: optax.GradientTransformation, leaves: Mapping[str, Any]
) -> tuple[ClosedJaxpr, list[tuple[Path, Any]]]:
    """Returns a program of gradients, parameters and state, and paths and types of the state.

    Its results are the updates, the new state and the first state.
    """
    tx = optax.with_extra_args_support(tx)
    names, n = list(leaves), len(leaves)
    state, treedef = init_structs(tx, leaves)

    def update(*flat: Any) -> list[Any]:
        gradients, values = (dict(zip(names, flat[i : i + n], strict=True)) for i in (0, n))
        old, params = treedef.unflatten(flat[2 * n :]), nest(values)
        updates, new = tx.update(nest(gradients), old, params, staleness=np.int32(0))
        states = [*jax.tree.leaves(new), *jax.tree.leaves(tx.init(params))]
        return [*flatten(updates, names).values(), *states]

    wholes = structs(leaves).values()
    try:
        program = trace(update, [*wholes, *wholes, *(struct for _, struct in state)], 1)
    except TypeError as error:
        raise ValueError(
            "`tx` cannot compute updates from gradients and parameters alone: "
            f"{type(error).__name__}: {error} Parameter servers pass it nothing else."
        ) from error
    return program, state


def _list(tables: Collection[str]) -> str:
    return f"{'s' if len(tables) > 1 else ''} {', '.join(map(repr, sorted(tables)))}"
