"""The exchanges of a replica program: which operations they are, and in words."""

from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn

from mirror._errors import bytes_in_words
from mirror.program.axis import axis_name
from mirror.program.inner import equations

_WORDS = {
    "psum": "all-reduce",
    "pmax": "all-reduce",
    "pmin": "all-reduce",
    "all_gather": "all-gather",
}


def in_word(primitive: str) -> str:
    """What an exchange is called: `all-reduce`."""
    return _WORDS.get(primitive, primitive)


_OPS = {"psum": "sum", "pmax": "max", "pmin": "min"}


def op_of(primitive: str) -> str:
    """What a reduction does: `sum`, also for a mean, which is divided afterwards; else nothing."""
    return _OPS.get(primitive, "")


def past(eqn: JaxprEqn) -> str:
    """What an exchange has done to its result: `all-reduced (sum)`."""
    op = op_of(eqn.primitive.name)
    word = in_word(eqn.primitive.name).replace("reduce", "reduced").replace("gather", "gathered")
    return f"{word} ({op})" if op else word


def in_words(jaxpr: Jaxpr) -> list[tuple[str, str]]:
    """What travels in a program, for each kind how much: `"all-reduce", "3 arrays, 1.5 KiB"`.

    What stands in a loop counts once, and packed leaves are one array.
    """
    found: dict[str, list[Any]] = {}
    for eqn in filter(is_exchange, equations(jaxpr)):
        kind = in_word(eqn.primitive.name)
        found.setdefault(kind, []).extend(atom.aval for atom in eqn.invars)
    return [(kind, _amount(avals)) for kind, avals in found.items()]


def _amount(avals: list[Any]) -> str:
    num_bytes = sum(aval.size * aval.dtype.itemsize for aval in avals)
    return f"{len(avals)} {'array' if len(avals) == 1 else 'arrays'}, {bytes_in_words(num_bytes)}"


def axes_of(eqn: JaxprEqn) -> tuple[Any, ...]:
    """The axes that an operation goes over: names, and numbers of axes of its operands."""
    axes = eqn.params.get("axes", eqn.params.get("axis_name", ()))
    return axes if isinstance(axes, tuple) else (axes,)


def names_axis(eqn: JaxprEqn) -> bool:
    """Whether an operation has to do with the replica axis."""
    return axis_name() in axes_of(eqn)


def is_exchange(eqn: JaxprEqn) -> bool:
    """Whether replicas talk in it."""
    return names_axis(eqn) and eqn.primitive.name != "axis_index"


def contains_exchange(jaxpr: Jaxpr) -> bool:
    """Whether replicas talk in a program."""
    return any(map(is_exchange, equations(jaxpr)))
