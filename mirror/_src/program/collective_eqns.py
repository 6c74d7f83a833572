"""The collectives of a replica program: which operations they are, and in words."""

from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn

from mirror._src.program.axis import axis_name
from mirror._src.program.jaxprs import equations
from mirror._src.program.user_lines import user_line
from mirror._src.utils.errors import bytes_in_words

_WORDS = {
    "psum": "all-reduce",
    "pmax": "all-reduce",
    "pmin": "all-reduce",
    "all_gather": "all-gather",
}


def in_word(primitive: str) -> str:
    """What a collective is called: `all-reduce`."""
    return _WORDS.get(primitive, primitive)


_OPS = {"psum": "sum", "pmax": "max", "pmin": "min"}


def op_of(primitive: str) -> str:
    """What a reduction does: `sum`, also for a mean, which is divided afterwards; else nothing."""
    return _OPS.get(primitive, "")


def past(eqn: JaxprEqn) -> str:
    """What a collective has done to its result: `all-reduced (sum)`."""
    op = op_of(eqn.primitive.name)
    word = in_word(eqn.primitive.name).replace("reduce", "reduced").replace("gather", "gathered")
    return f"{word} ({op})" if op else word


def in_words(jaxpr: Jaxpr) -> list[tuple[str, str]]:
    """What travels in a program, for each kind how much: `"all-reduce", "3 arrays, 1.5 KiB"`.

    What stands in a loop counts once, and packed leaves are one array.
    """
    found: dict[str, list[Any]] = {}
    for eqn in filter(is_collective, equations(jaxpr)):
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


def is_collective(eqn: JaxprEqn) -> bool:
    """Whether replicas communicate in it."""
    return names_axis(eqn) and eqn.primitive.name != "axis_index"


def contains_collective(jaxpr: Jaxpr) -> bool:
    """Whether replicas communicate in a program."""
    return any(map(is_collective, equations(jaxpr)))


_SMALLEST = ("int2", "uint2")


def require_sent(eqn: JaxprEqn) -> None:
    """Refuses a collective of a dtype that XLA does not send, or sends wrongly.

    XLA gathers 2-bit integers wrongly without an error, rejects their reductions, and has no
    extremes of complex numbers (JAX 0.10 and 0.12).
    """
    name = eqn.primitive.name
    for atom in eqn.invars:
        dtype = getattr(atom.aval, "dtype", None)
        if str(dtype) in _SMALLEST:
            fix = "Convert it first: x.astype('int8')."
        elif name in ("pmax", "pmin") and str(dtype).startswith("complex"):
            fix = "Reduce abs(x), or its real and imaginary parts."
        elif str(dtype) == "float8_e8m0fnu" and name in ("psum", "pmax", "pmin", "reduce_scatter"):
            fix = "Convert it first: x.astype('float32')."
        elif str(dtype) == "bool" and name == "reduce_scatter":
            fix = "Convert it first: x.astype('int32')."
        else:
            continue
        raise TypeError(
            f"The {in_word(name)} at {user_line(eqn)} is of {dtype}, which XLA cannot reduce or "
            f"send between replicas. {fix}"
        )
