"""Compares traced programs whose leaves have different numbers of rows."""

from collections.abc import Collection, Hashable, Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from mirror._src.jaxprs.equations import Scan, While, called, walk
from mirror._src.jaxprs.primitives import ADDITION, ELEMENTWISE, REDUCTION
from mirror._src.ps.optimizer_tree import as_numpy

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
