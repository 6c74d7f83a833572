"""The exchanges of a replica program: which operations they are, and in words."""

from collections.abc import Iterable, Iterator
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from mirror._errors import bytes_in_words
from mirror._types import REPLICA_AXIS

_WORDS = {
    "psum": "all-reduce",
    "pmax": "all-reduce",
    "pmin": "all-reduce",
    "all_gather": "all-gather",
}


def in_words(jaxpr: Jaxpr) -> list[tuple[str, str]]:
    """What travels in a program, for each kind how much: `"all-reduce", "3 arrays, 1.5 KiB"`.

    What stands in a loop counts once, and packed leaves are one array.
    """
    found: dict[str, list[Any]] = {}
    for eqn in filter(is_exchange, equations(jaxpr)):
        kind = _WORDS.get(eqn.primitive.name, eqn.primitive.name)
        found.setdefault(kind, []).extend(atom.aval for atom in eqn.invars)
    return [(kind, _amount(avals)) for kind, avals in found.items()]


def _amount(avals: list[Any]) -> str:
    num_bytes = sum(aval.size * aval.dtype.itemsize for aval in avals)
    return f"{len(avals)} {'array' if len(avals) == 1 else 'arrays'}, {bytes_in_words(num_bytes)}"


def inner_programs(params: Iterable[Any]) -> Iterator[Jaxpr]:
    """The programs among the parameters of an equation."""
    for param in params:
        if isinstance(param, ClosedJaxpr):
            yield param.jaxpr
        elif isinstance(param, Jaxpr):
            yield param
        elif isinstance(param, tuple | list):
            yield from inner_programs(param)


def _axes(eqn: JaxprEqn) -> tuple[Any, ...]:
    axes = eqn.params.get("axes", eqn.params.get("axis_name", ()))
    return axes if isinstance(axes, tuple) else (axes,)


def names_axis(eqn: JaxprEqn) -> bool:
    """Whether an operation has to do with the replica axis."""
    return REPLICA_AXIS in _axes(eqn)


def is_exchange(eqn: JaxprEqn) -> bool:
    """Whether replicas talk in it."""
    return names_axis(eqn) and eqn.primitive.name != "axis_index"


def equations(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    """All operations, those of inner programs too."""
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in inner_programs(eqn.params.values()):
            yield from equations(inner)


def contains_exchange(jaxpr: Jaxpr) -> bool:
    """Whether replicas talk in a program."""
    return any(map(is_exchange, equations(jaxpr)))
