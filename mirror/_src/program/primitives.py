"""What is known of single primitives: which give all replicas the same, which draw numbers."""

from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn

from mirror._src.program.collective_eqns import names_axis
from mirror._src.program.jaxprs import equations

MIRRORING = frozenset({"psum", "pmax", "pmin", "all_gather"})
_IMPURE = frozenset({"io_callback", "rng_uniform"})
PURE = frozenset({"pure_callback"})
DRAWS = frozenset({"random_bits", "random_gamma", "rng_bit_generator"})
REF_READS = frozenset({"get"})
PASSING = frozenset({"optimization_barrier", "device_put", "ensure_mirrored"})
SHAPING = frozenset(
    (
        *("convert_element_type", "bitcast_convert_type", "broadcast_in_dim", "reshape"),
        *("squeeze", "transpose", "slice", "concatenate", "copy", "reduce_precision"),
    )
)
ELEMENTWISE = frozenset(
    (
        *("add", "sub", "mul", "div", "rem", "pow", "max", "min", "select_n", "neg", "abs", "sign"),
        *("and", "or", "xor", "not", "lt", "le", "gt", "ge", "eq", "ne", "clamp", "floor"),
        *("shift_right_logical", "shift_left", "erf_inv", "log", "log1p", "exp", "sqrt", "cos"),
        *("sin", "tanh", "integer_pow", "square", "is_finite", "round", "ceil"),
    )
)


def is_ref(atom: Any) -> bool:
    """Whether the value can be written to: a `Ref`, or a mutable hijax type."""
    return hasattr(atom.aval, "inner_aval") or getattr(atom.aval, "has_qdd", False)


def is_replica_source(eqn: JaxprEqn) -> bool:
    """Whether its results differ between replicas whatever it reads."""
    impure = eqn.primitive.name in _IMPURE or eqn.params.get("has_side_effect", False)
    return names_axis(eqn) or impure


def contains_replica_source(jaxpr: Jaxpr) -> bool:
    """Whether an operation in a program is a replica source."""
    return any(map(is_replica_source, equations(jaxpr)))
