"""The programs inside the operations of a program: what is called, looped over, held."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

_CALLS = frozenset(
    (
        *("jit", "remat2", "remat_opt", "custom_jvp_call", "custom_vjp_call", "custom_vmap_call"),
        *("closed_call", "eval_jaxpr", "composite", "linear_call", "custom_partitioning"),
        *("xla_metadata_call", "compute_on"),
    )
)


def inner_programs(params: Iterable[Any]) -> Iterator[ClosedJaxpr | Jaxpr]:
    """The programs among the parameters of an operation."""
    for param in params:
        if isinstance(param, ClosedJaxpr | Jaxpr):
            yield param
        elif isinstance(param, tuple | list):
            yield from inner_programs(param)


def jaxpr_of(program: ClosedJaxpr | Jaxpr) -> Jaxpr:
    """The program without the values it holds."""
    return program.jaxpr if isinstance(program, ClosedJaxpr) else program


def equations(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    """All operations, those of inner programs too."""
    for eqn, _ in nested_equations(jaxpr):
        yield eqn


def nested_equations(
    jaxpr: Jaxpr, around: tuple[JaxprEqn, ...] = ()
) -> Iterator[tuple[JaxprEqn, tuple[JaxprEqn, ...]]]:
    """All operations, each with those that it stands inside of, the outermost first."""
    for eqn in jaxpr.eqns:
        yield eqn, around
        for inner in inner_programs(eqn.params.values()):
            yield from nested_equations(jaxpr_of(inner), (*around, eqn))


def walk(
    program: ClosedJaxpr | Jaxpr,
    arguments: Sequence[Any],
    held: Callable[[Any], Any],
    equation: Callable[[JaxprEqn, list[Any]], Sequence[Any]],
) -> list[Any]:
    """Goes through a program, operation by operation; what stands for its outputs.

    Args:
        program: the program.
        arguments: what stands for its inputs.
        held: gives what stands for a value that the program holds itself.
        equation: gives what stands for the outputs of an operation, of what does for its inputs.
    """
    jaxpr = jaxpr_of(program)
    consts = program.consts if isinstance(program, ClosedJaxpr) else ()
    values: dict[Any, Any] = dict(zip(jaxpr.constvars, map(held, consts), strict=True))
    values.update(zip(jaxpr.invars, arguments, strict=True))

    def read(atom: Any) -> Any:
        return held(atom.val) if isinstance(atom, Literal) else values[atom]

    for eqn in jaxpr.eqns:
        outputs = equation(eqn, [read(atom) for atom in eqn.invars])
        values.update(zip(eqn.outvars, outputs, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def called(eqn: JaxprEqn) -> ClosedJaxpr | Jaxpr | None:
    """The program that an operation just calls; `None` where it does something else."""
    if eqn.primitive.name not in _CALLS:
        return None
    inner = list(inner_programs(eqn.params.values()))
    if len(inner) != 1:
        return None
    jaxpr = jaxpr_of(inner[0])
    fits = len(jaxpr.invars) == len(eqn.invars) and len(jaxpr.outvars) == len(eqn.outvars)
    return inner[0] if fits else None


class Scan:
    """The parts of a `scan`, whose parameters have other names in each JAX.

    `num_consts` and `num_carry` are `ft_in` and `ft_out` in JAX 0.12; the ranks say the same in
    both: what is scanned over, or stacked up, has one axis more outside than inside.
    """

    def __init__(self, eqn: JaxprEqn) -> None:
        self.body: ClosedJaxpr = eqn.params["jaxpr"]
        self.num_carry = _count_equal_ranks(eqn.outvars, self.body.jaxpr.outvars)
        equal = _count_equal_ranks(eqn.invars, self.body.jaxpr.invars)
        self.num_consts = equal - self.num_carry
        self.length: int = eqn.params["length"]
        self.reverse: bool = eqn.params["reverse"]

    def split(self, values: Sequence[Any]) -> tuple[list[Any], list[Any], list[Any]]:
        """Constants, carry, and what is scanned over."""
        start, end = self.num_consts, self.num_consts + self.num_carry
        return list(values[:start]), list(values[start:end]), list(values[end:])


class While:
    """The parts of a `while`."""

    def __init__(self, eqn: JaxprEqn) -> None:
        self.test: ClosedJaxpr = eqn.params["cond_jaxpr"]
        self.body: ClosedJaxpr = eqn.params["body_jaxpr"]
        self._num = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]

    def split(self, values: Sequence[Any]) -> tuple[list[Any], list[Any], list[Any]]:
        """Constants of the test, constants of the body, and the carry."""
        start, end = self._num[0], sum(self._num)
        return list(values[:start]), list(values[start:end]), list(values[end:])


def _count_equal_ranks(outer: Sequence[Any], inner: Sequence[Any]) -> int:
    return sum(len(o.aval.shape) == len(i.aval.shape) for o, i in zip(outer, inner, strict=True))


def arrays_in(program: ClosedJaxpr | Jaxpr) -> Iterator[jax.Array]:
    """The arrays that a program holds itself, at any depth."""
    if isinstance(program, ClosedJaxpr):
        yield from (const for const in program.consts if isinstance(const, jax.Array))
    jaxpr = jaxpr_of(program)
    for eqn in jaxpr.eqns:
        yield from arrays_of(eqn)
    yield from _held(jaxpr.outvars)


def arrays_of(eqn: JaxprEqn) -> Iterator[jax.Array]:
    """The arrays that an operation holds itself: as operands, or in its inner programs."""
    yield from _held(eqn.invars)
    for inner in inner_programs(eqn.params.values()):
        yield from arrays_in(inner)


def _held(atoms: Iterable[Any]) -> Iterator[jax.Array]:
    literals = (atom.val for atom in atoms if isinstance(atom, Literal))
    return (value for value in literals if isinstance(value, jax.Array))
