"""Values of the rows that are padding: constants, as far as they are known.

`None` is an unknown finite number. A value of a loop is a tuple, of which only equality is known.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn

from mirror._src.jaxprs.primitives import CASTING, PASSING, op_of

Value: TypeAlias = float | tuple[str, int, int] | None

# As good as infinite: `where(mask, x, -1e9)` hides padding, also divided by a temperature.
_HUGE = 1e8
_LARGEST_ARRAY = 2**16
POSITIVE: Value = ("positive", 0, 0)
"""A positive number without rows, such as a learned temperature."""
SOME_NAN: Value = ("NaN", 0, 0)
"""Numbers of which some are NaN."""

_SAME = {"add_any": "add", "lt_to": "lt", "le_to": "le", "eq_to": "eq"}
_KEEPING = PASSING | CASTING | {"real"}
_COMMUTING = frozenset(("add", "mul", "and", "or"))
_NEUTRAL = {"add": (0,), "sub": (0,), "mul": (1,), "div": (1,), "and": (1,), "or": (0,)}
_ABSORBING = {"mul": (0,), "div": (0,), "and": (0,), "or": (1,)}
_DECIDED = frozenset(("add", "sub", "lt", "le", "gt", "ge", "eq", "ne"))  # by a huge number
_KEEP_SIGN = frozenset(("add", "mul", "div", "max", "min", "clamp"))
_OF_NUMPY = """
abs acos acosh asin asinh atan atan2 atanh cbrt ceil cos cosh exp exp2 expm1 floor log log1p log2
pow sign sin sinh sqrt square tan tanh
"""
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{name: getattr(np, name) for name in _OF_NUMPY.split()},
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "rem": np.fmod,
    "max": np.maximum,
    "min": np.minimum,
    "neg": np.negative,
    "round": np.rint,
    "is_finite": np.isfinite,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "eq": np.equal,
    "ne": np.not_equal,
    "clamp": lambda low, x, high: np.minimum(np.maximum(x, low), high),
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "logistic": lambda x: 1 / (1 + np.exp(-x)),
    "erf": math.erf,
    "erfc": math.erfc,
}
_LOGICAL: dict[str, Callable[..., Any]] = {
    "and": np.minimum,
    "or": np.maximum,
    "not": lambda x: 1 - x,
    "xor": np.not_equal,
}


def constant_of(value: Any) -> Value:
    """Returns the number that all entries of a constant are."""
    if getattr(value, "size", 1) > _LARGEST_ARRAY:
        return None
    try:
        array = np.asarray(value)
        if np.imag(array).any():
            return None
        first, *_ = entries = np.real(array).ravel().astype(np.float64)
    except (TypeError, ValueError):  # a PRNG key, an empty array
        return None
    return _number(first) if (entries == first).all() or np.isnan(entries).all() else None


def elementwise(eqn: JaxprEqn, values: Sequence[Value]) -> Value:
    """Returns the result of an elementwise operation."""
    name = eqn.primitive.name
    name = _SAME.get(name, name)
    if name == "select_n":
        which, cases = values[0], values[1:]
        if isinstance(which, float):
            return cases[int(which)]
        return cases[0] if all(case == cases[0] for case in cases) else None
    if name in _KEEPING:
        return _cast(values[0], eqn)
    if all(isinstance(value, float) for value in values):
        return _evaluated(name, eqn, values)
    if any(map(is_nan, values)):
        is_number = jnp.issubdtype(dtype_of(eqn.outvars[0]), jnp.inexact)
        is_known = name in _FUNCTIONS and name != "pow"  # NaN ** 0 is 1
        return SOME_NAN if is_number and (is_known or name == "integer_pow") else None
    if name in ("exp", "exp2", "logistic") or (
        name in _KEEP_SIGN and all(map(_is_positive, values))
    ):
        return POSITIVE
    is_bitwise = name in _LOGICAL and dtype_of(eqn.outvars[0]) != np.dtype(bool)
    if len(values) != 2 or is_bitwise:
        return None
    x, y = values
    if x in _ABSORBING.get(name, ()) or (name != "div" and y in _ABSORBING.get(name, ())):
        return x if x in _ABSORBING[name] else y
    if name in _COMMUTING and x in _NEUTRAL.get(name, ()):
        return y
    if y in _NEUTRAL.get(name, ()):
        return x
    if name in ("mul", "div") and _is_huge(x) and y == POSITIVE:
        return x
    if name == "mul" and _is_huge(y) and x == POSITIVE:
        return y
    if name in _DECIDED and (_is_huge(x) or _is_huge(y)):
        known = [value if isinstance(value, float) else 0.0 for value in values]
        return _evaluated(name, eqn, known)
    if name in ("max", "min"):
        sign = 1 if name == "max" else -1
        for value, other in ((x, y), (y, x)):
            if _is_huge(value):
                return value if sign * float(value) > 0 else other  # type: ignore[arg-type]
    return None


def reduction(eqn: JaxprEqn, value: Value, count: int) -> Value:
    """Returns the result of a reduction of `count` equal entries."""
    name = eqn.primitive.name
    if not isinstance(value, float):
        is_kept = value == SOME_NAN and name in ("reduce_sum", "reduce_max", "reduce_min")
        return value if is_kept else None
    if name == "reduce_sum":
        return _cast(_number(value * count), eqn)
    if name == "reduce_prod":
        return _number(math.prod([value] * count)) if value in (0, 1) else None
    return value if name in ("reduce_max", "reduce_min", "reduce_and", "reduce_or") else None


def product(values: Sequence[Value]) -> Value:
    """Returns the product of numbers, any of which may be unknown, if it is 0 or NaN."""
    if any(map(is_nan, values)):
        return SOME_NAN
    if 0 not in values:
        return None
    return math.nan if any(isinstance(x, float) and math.isinf(x) for x in values) else 0.0


def is_nan(value: Value) -> bool:
    """Whether some numbers are NaN."""
    return value == SOME_NAN or (isinstance(value, float) and math.isnan(value))


def is_neutral(name: str, value: Value, dtype: Any) -> bool:
    """Whether an operation gives the same for a set of entries and for the set with a value."""
    if not isinstance(value, float):
        return False
    match op_of(name, dtype):
        case "sum" | "xor":
            return value == 0
        case "prod":
            return value == 1
        case "max" | "argmax":
            return value <= max(-_HUGE, limits(dtype)[0])
        case "min" | "argmin":
            return value >= min(_HUGE, limits(dtype)[1])
    return False


def _evaluated(name: str, eqn: JaxprEqn, values: Sequence[Any]) -> Value:
    is_bool = np.dtype(bool) == dtype_of(eqn.outvars[0])
    table = {**_FUNCTIONS, **_LOGICAL} if is_bool else _FUNCTIONS
    function = table.get(name)
    if name == "round" and eqn.params["rounding_method"] == jax.lax.RoundingMethod.AWAY_FROM_ZERO:
        function = _round_away
    if name == "integer_pow":
        values, function = [*values, float(eqn.params["y"])], np.power
    if function is None:
        return None
    with np.errstate(all="ignore"):
        return _cast(_number(function(*map(np.float64, values))), eqn)


def _round_away(value: Any) -> Any:
    """Rounds a number to the nearest integer, and one half away from zero."""
    return np.copysign(np.trunc(np.abs(value)) + (np.abs(value) % 1 >= 0.5), value)


def _cast(value: Value, eqn: JaxprEqn) -> Value:
    """Returns the number in the dtype of the result of an operation."""
    dtype = dtype_of(eqn.outvars[0])
    if not isinstance(value, float):
        return value
    if jnp.issubdtype(dtype, jnp.integer) and not limits(dtype)[0] <= value <= limits(dtype)[1]:
        return None
    with np.errstate(all="ignore"):
        return _number(np.real(np.asarray(value).astype(dtype)).astype(np.float64))


def dtype_of(atom: Any) -> Any:
    return atom.aval.dtype


def limits(dtype: Any) -> tuple[float, float]:
    """Returns the smallest and the largest number of a dtype."""
    if np.dtype(bool) == dtype:
        return 0, 1
    info: Any = jnp.iinfo(dtype) if jnp.issubdtype(dtype, jnp.integer) else jnp.finfo(dtype)
    return float(info.min), float(info.max)


def _is_huge(value: Value) -> bool:
    return isinstance(value, float) and abs(value) >= _HUGE


def _is_positive(value: Value) -> bool:
    return value == POSITIVE or (isinstance(value, float) and value > 0)


def _number(value: Any) -> float:
    value = float(value)
    return math.nan if math.isnan(value) else value  # one object, which equals itself in tuples
