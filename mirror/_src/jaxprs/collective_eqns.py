"""The collectives of a replica program: a table of JAX's primitives, and queries on equations."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.extend.core import Jaxpr, JaxprEqn

from mirror._src.base.errors import bytes_in_words, counted
from mirror._src.base.types import Array
from mirror._src.jaxprs.atoms import num_bytes
from mirror._src.jaxprs.equations import equations
from mirror._src.jaxprs.user_lines import user_line

ALL_REDUCE = "all-reduce"


class CollectivePrimitive(NamedTuple):
    """Properties of one of JAX's collective primitives.

    Attributes:
        kind: The name of the collective in reports and messages.
        op: The reduction, `"sum"`, `"max"` or `"min"`. Empty if it only moves data.
        is_mirrored: Whether the proof relies on all replicas getting the same result if the
            collective spans the whole axis.
        runs_on_host: Whether the staged executor implements it.
    """

    kind: str
    op: str = ""
    is_mirrored: bool = False
    runs_on_host: bool = True


COLLECTIVES = {
    "psum": CollectivePrimitive(ALL_REDUCE, "sum", is_mirrored=True),
    "pmax": CollectivePrimitive(ALL_REDUCE, "max", is_mirrored=True),
    "pmin": CollectivePrimitive(ALL_REDUCE, "min", is_mirrored=True),
    "all_gather": CollectivePrimitive("all-gather", is_mirrored=True),
    "reduce_scatter": CollectivePrimitive("reduce-scatter", "sum"),
    "all_to_all": CollectivePrimitive("all-to-all"),
    "ragged_all_to_all": CollectivePrimitive("ragged all-to-all", runs_on_host=False),
    "ppermute": CollectivePrimitive("ppermute"),
    "pbroadcast": CollectivePrimitive("pbroadcast"),
}
ALL_REDUCES = frozenset(name for name, c in COLLECTIVES.items() if c.kind == ALL_REDUCE)
MIRRORING = frozenset(name for name, c in COLLECTIVES.items() if c.is_mirrored)

_LOCAL: dict[str, Callable[..., Array]] = {
    "sum": jax.lax.reduce_sum,
    "max": jax.lax.reduce_max,
    "min": jax.lax.reduce_min,
}


def reduce_locally(primitive: str, value: Array, axes: tuple[int, ...]) -> Array:
    """Reduces axes of one array as the all-reduce `primitive` reduces the replica axis."""
    return _LOCAL[COLLECTIVES[primitive].op](value, axes)


def kind_of(primitive: str) -> str:
    """Returns the name of a collective in reports and messages, such as `all-reduce`."""
    return COLLECTIVES[primitive].kind if primitive in COLLECTIVES else primitive


def op_of(primitive: str) -> str:
    """Returns the reduction of a collective, or an empty string.

    It is `sum` for a mean too, which JAX divides after the all-reduce.
    """
    return COLLECTIVES[primitive].op if primitive in COLLECTIVES else ""


def result_of(eqn: JaxprEqn) -> str:
    """Returns a description of the result of a collective, such as `all-reduced (sum)`."""
    kind, op = kind_of(eqn.primitive.name), op_of(eqn.primitive.name)
    participle = kind.replace("reduce", "reduced").replace("gather", "gathered")
    return f"{participle} ({op})" if op else participle


def summarize_collectives(jaxpr: Jaxpr) -> list[tuple[str, str]]:
    """Returns what each kind of collective sends: `("all-reduce", "3 arrays, 1.5 KiB")`.

    A collective in a loop counts once. Leaves that are packed into one buffer count as one array.
    """
    operands: dict[str, list[Any]] = {}
    for eqn in filter(is_collective, equations(jaxpr)):
        kind = kind_of(eqn.primitive.name)
        operands.setdefault(kind, []).extend(atom.aval for atom in eqn.invars)
    return [
        (kind, f"{counted(len(avals), 'array')}, {bytes_in_words(sum(map(num_bytes, avals)))}")
        for kind, avals in operands.items()
    ]


def axes_of(eqn: JaxprEqn) -> tuple[Any, ...]:
    """Returns the axes of an operation: names, and positions of axes of its operands."""
    axes = eqn.params.get("axes", eqn.params.get("axis_name", ()))
    return axes if isinstance(axes, tuple) else (axes,)


def names_axis(eqn: JaxprEqn) -> bool:
    """Whether an operation refers to the replica axis.

    It is the only axis with a name: `jax.vmap` resolves its own names while it traces, and steps
    that contain `jax.pmap` or `jax.shard_map` are rejected.
    """
    return any(isinstance(axis, str) for axis in axes_of(eqn))


def is_collective(eqn: JaxprEqn) -> bool:
    """Whether replicas communicate in an operation."""
    return names_axis(eqn) and eqn.primitive.name != "axis_index"


def spans_whole_axis(eqn: JaxprEqn) -> bool:
    """Whether an operation is a collective of all replicas, not one within groups."""
    return is_collective(eqn) and eqn.params.get("axis_index_groups") is None


def contains_collective(jaxpr: Jaxpr) -> bool:
    """Whether replicas communicate in a program."""
    return any(map(is_collective, equations(jaxpr)))


def require_supported_dtype(eqn: JaxprEqn) -> None:
    """Rejects a collective of a dtype that XLA does not send, or sends incorrectly.

    XLA gathers 2-bit integers incorrectly without an error, rejects their reductions, and has no
    maximum or minimum of complex numbers (JAX 0.10 and 0.12).

    Raises:
        TypeError: If an operand has such a dtype.
    """
    name = eqn.primitive.name
    for atom in eqn.invars:
        dtype = str(getattr(atom.aval, "dtype", None))
        if dtype in ("int2", "uint2"):
            fix = "Convert it first: x.astype('int8')."
        elif name in ("pmax", "pmin") and dtype.startswith("complex"):
            fix = "Reduce abs(x), or its real and imaginary parts."
        elif dtype == "float8_e8m0fnu" and op_of(name):
            fix = "Convert it first: x.astype('float32')."
        elif dtype == "bool" and name == "reduce_scatter":
            fix = "Convert it first: x.astype('int32')."
        else:
            continue
        raise TypeError(
            f"The operand of the {kind_of(name)} at {user_line(eqn)} is {dtype}, which XLA cannot "
            f"reduce or send between replicas. {fix}"
        )
