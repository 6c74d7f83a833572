"""Queries on equations that name the replica axis, or differ between replicas otherwise."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from mirror._src.base.types import Array
from mirror._src.jaxprs.equations import (
    Interpreter,
    equations,
    is_ref,
    jaxpr_of,
    user_line,
    with_inner,
)
from mirror._src.jaxprs.primitives import ALL_REDUCE, PASSING, PRIMITIVES, SILENT, STATEFUL, op_of

ALL_REDUCES = frozenset(name for name, p in PRIMITIVES.items() if p.collective == ALL_REDUCE)
MIRRORING = frozenset(name for name, p in PRIMITIVES.items() if p.is_mirrored)

_AXIS_EFFECT = "NamedAxisEffect"
_LOCAL: dict[str, Callable[..., Array]] = {
    "sum": jax.lax.reduce_sum,
    "max": jax.lax.reduce_max,
    "min": jax.lax.reduce_min,
}


def reduce_locally(primitive: str, value: Array, axes: tuple[int, ...]) -> Array:
    """Reduces axes of one array as the all-reduce `primitive` reduces the replica axis.

    A maximum or minimum is NaN if any value is, and 0.0 instead of -0.0. In arrays from about a
    thousand elements, XLA:CPU omits NaN (JAX 0.10.2 and 0.12.0.1).
    """
    result = _LOCAL[op_of(primitive)](value, axes)
    if primitive == "psum" or not jnp.issubdtype(value.dtype, jnp.inexact):
        return result
    return with_nan(result, jnp.isnan(value).any(axes))


def with_nan(value: Array, is_nan: Array) -> Array:
    """Returns NaN where it says so, and 0.0 instead of -0.0 elsewhere."""
    return jnp.where(is_nan, jnp.asarray(jnp.nan, value.dtype), positive_zero(value))


def positive_zero(value: Array) -> Array:
    return jnp.where(value == 0, jnp.zeros((), value.dtype), value)


def kind_of(primitive: str) -> str:
    """Returns the name of a collective in reports and messages, such as `all-reduce`."""
    return (PRIMITIVES[primitive].collective if primitive in PRIMITIVES else "") or primitive


def result_of(eqn: JaxprEqn) -> str:
    """Returns a description of the result of a collective, such as `all-reduced (sum)`."""
    kind, op = kind_of(eqn.primitive.name), op_of(eqn.primitive.name)
    participle = kind.replace("reduce", "reduced").replace("gather", "gathered")
    return f"{participle} ({op})" if op else participle


def axes_of(eqn: JaxprEqn) -> tuple[Any, ...]:
    """Returns the axes of an operation: names, and positions of axes of its operands."""
    axes = eqn.params.get("axes", eqn.params.get("axis_name", ()))
    return axes if isinstance(axes, tuple) else (axes,)


def names_axis(eqn: JaxprEqn) -> bool:
    """Whether an operation refers to the replica axis.

    It is the only axis with a name: `jax.vmap` resolves its own names while it traces, and steps
    that contain `jax.pmap` or `jax.shard_map` are rejected.
    """
    axes = eqn.params.get("axes", eqn.params.get("axis_name"))
    return type(axes) is str or (isinstance(axes, tuple) and str in map(type, axes))


def name_of(eqn: JaxprEqn) -> str:
    """Returns the name of an operation; under `jax.vmap`, an all-reduce may be a reduction."""
    name = eqn.primitive.name
    is_local = name in ALL_REDUCES and not names_axis(eqn)
    return f"reduce_{op_of(name)}" if is_local else name


def is_collective(eqn: JaxprEqn) -> bool:
    """Whether replicas communicate in an operation."""
    return names_axis(eqn) and eqn.primitive.name not in SILENT


def spans_whole_axis(eqn: JaxprEqn) -> bool:
    """Whether an operation is a collective of all replicas, not one within groups."""
    return is_collective(eqn) and eqn.params.get("axis_index_groups") is None


def has_effects(effects: Iterable[object]) -> bool:
    """Whether there are effects other than naming an axis."""
    return any(type(effect).__name__ != _AXIS_EFFECT for effect in effects)


def is_replica_source(eqn: JaxprEqn) -> bool:
    """Whether the results differ between replicas whatever the operands are."""
    if names_axis(eqn) and eqn.primitive.name not in PASSING:
        return True
    return is_stateful(eqn) and bool(eqn.outvars)


def contains_replica_source(jaxpr: Jaxpr) -> bool:
    """Whether a program contains a replica source."""
    return any(map(is_replica_source, equations(jaxpr)))


def is_stateful(eqn: JaxprEqn) -> bool:
    """Whether an operation reads or changes anything on the host or the device."""
    return eqn.primitive.name in STATEFUL or bool(eqn.params.get("has_side_effect", False))


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


_MOST = 2


def chain_lengths(program: ClosedJaxpr | Jaxpr) -> list[int]:
    """Returns for each output how many all-reduces it depends on in a chain, at most two.

    Any other collective counts as two, and so does a value of a `Ref`.
    """
    return _Pass().call(program, [0] * len(jaxpr_of(program).invars))


class _Pass(Interpreter[int]):
    """Data-flow pass over one program."""

    def constant(self, _: Any) -> int:
        return 0

    def leaf(self, eqn: JaxprEqn, operands: list[int]) -> Sequence[int]:
        added = 1
        if eqn.primitive.name not in ALL_REDUCES or not spans_whole_axis(eqn):
            is_mutable = any(map(is_ref, (*eqn.invars, *eqn.outvars)))
            added = _MOST if is_mutable or any(map(is_collective, with_inner(eqn))) else 0
        return [min(_MOST, max(operands, default=0) + added)] * len(eqn.outvars)

    def chosen(self, predicate: int, cases: Sequence[int]) -> int:
        return max(predicate, *cases)
