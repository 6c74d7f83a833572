"""Sets of primitives that the proof treats alike."""

from jax.extend.core import Jaxpr, JaxprEqn

from mirror._src.program.collective_eqns import names_axis
from mirror._src.program.jaxprs import equations

_IMPURE = frozenset({"io_callback", "rng_uniform"})
PURE = frozenset({"pure_callback"})
SAMPLERS = frozenset({"random_bits", "random_gamma", "rng_bit_generator"})
REF_READS = frozenset({"get"})
PASSING = frozenset({"optimization_barrier", "device_put", "ensure_mirrored", "name"})
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


def is_replica_source(eqn: JaxprEqn) -> bool:
    """Whether the results differ between replicas whatever the operands are."""
    is_impure = eqn.primitive.name in _IMPURE or eqn.params.get("has_side_effect", False)
    return names_axis(eqn) or is_impure


def contains_replica_source(jaxpr: Jaxpr) -> bool:
    """Whether a program contains a replica source."""
    return any(map(is_replica_source, equations(jaxpr)))
