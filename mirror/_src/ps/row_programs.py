"""Compares traced programs whose leaves have different numbers of rows."""

from collections.abc import Hashable, Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from mirror._src.jaxprs.equations import called, walk
from mirror._src.ps.dependence import is_elementwise, keeps_rows
from mirror._src.ps.optimizer_tree import as_numpy


class RowPrograms:
    """Numbers what programs compute: two results with one number are equal row by row.

    Equal means the same operations on the same arguments and constants, where arrays that differ
    in their number of rows alone count as the same. An operation that might treat rows differently
    is equal only on arrays of the same shape. So equal results may have different numbers, but
    never the other way round.
    """

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}

    def results(self, program: ClosedJaxpr, arguments: Sequence[Hashable]) -> list[int]:
        """Returns the numbers of the results, given what identifies each argument."""
        return self._follow(program, [self._number("argument", each) for each in arguments])

    def _follow(self, program: ClosedJaxpr | Jaxpr, arguments: Sequence[int]) -> list[int]:
        return walk(program, arguments, self._constant, self._equation)

    def _number(self, *key: Hashable) -> int:
        return self._numbers.setdefault(key, len(self._numbers))

    def _constant(self, value: Any) -> int:
        array = as_numpy(value)
        return self._number("constant", str(array.dtype), array.shape, array.tobytes())

    def _equation(self, eqn: JaxprEqn, operands: list[int]) -> list[int]:
        if (inner := called(eqn)) is not None:
            return self._follow(inner, operands)
        name = eqn.primitive.name
        if name == "cond":
            branches = [self._follow(each, operands[1:]) for each in eqn.params["branches"]]
            results = zip(*branches, strict=True)
            return [self._number(name, operands[0], *each) for each in results]
        shapes = [tuple(getattr(atom.aval, "shape", ())) for atom in (*eqn.invars, *eqn.outvars)]
        is_constant = name == "broadcast_in_dim" and shapes[0] == ()
        if is_elementwise(eqn):
            shapes = []
        elif keeps_rows(eqn) or is_constant:
            # Of an array that is used element by element, the user determines the rows.
            shapes = [shape[1:] for shape in shapes]
        described = tuple(
            (key, str(value))
            for key, value in sorted(eqn.params.items())
            if not shapes or key not in ("shape", "new_sizes")  # of the result
        )
        dtypes = tuple(str(getattr(atom.aval, "dtype", atom.aval)) for atom in eqn.outvars)
        key = (name, *operands, *map(tuple, shapes), described, dtypes)
        return [self._number(*key, position) for position in range(len(eqn.outvars))]
