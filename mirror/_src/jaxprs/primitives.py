"""Sets of primitives that the proof treats alike."""

import math
from typing import Any

import jax.numpy as jnp
from jax.extend.core import Jaxpr, JaxprEqn

from mirror._src.jaxprs.collective_eqns import names_axis
from mirror._src.jaxprs.equations import equations

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
_SCATTERS = frozenset({"scatter", "scatter-add", "scatter-sub", "scatter-mul"})
_OTHER_RACES = frozenset({"select_and_scatter_add", "conv_general_dilated"})


def is_racing(eqn: JaxprEqn) -> bool:
    """Whether XLA's fastest program on GPUs depends on the order in which threads finish.

    It adds floats at repeated indices, and in gradients of max-pooling and of convolutions, by
    atomic operations; of several writes to one element, any may be the last.
    """
    name = eqn.primitive.name
    if name not in _SCATTERS and name not in _OTHER_RACES:
        return False
    aval: Any = eqn.outvars[0].aval
    if name != "scatter" and not jnp.issubdtype(aval.dtype, jnp.inexact):
        return False
    if name in _OTHER_RACES:
        return True
    indices: Any = eqn.invars[1].aval
    return math.prod(indices.shape[:-1]) > 1 and not eqn.params["unique_indices"]


def is_replica_source(eqn: JaxprEqn) -> bool:
    """Whether the results differ between replicas whatever the operands are."""
    is_impure = eqn.primitive.name in _IMPURE or eqn.params.get("has_side_effect", False)
    return names_axis(eqn) or is_impure


def contains_replica_source(jaxpr: Jaxpr) -> bool:
    """Whether a program contains a replica source."""
    return any(map(is_replica_source, equations(jaxpr)))
