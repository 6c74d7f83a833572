"""The axes that operations move: one table for the analyses that follow rows."""

from jax.extend.core import JaxprEqn

MOVES = frozenset({"rev", "split", "squeeze", "tile", "transpose", "unstack"})


def axis_after(eqn: JaxprEqn, axis: int) -> int | None:
    """Returns where an axis is after an operation; `None` if it is mixed or removed.

    Args:
        eqn: An operation of `MOVES`, a `broadcast_in_dim`, a reduction, or an all-reduce, which may
            reduce axes of its operand, too.
        axis: The axis of its operand.
    """
    params, name = eqn.params, eqn.primitive.name
    if name == "broadcast_in_dim":
        return int(params["broadcast_dimensions"][axis])
    if name == "transpose":
        return list(params["permutation"]).index(axis)
    if name == "tile":
        return axis if params["reps"][axis] == 1 else None
    axes = next(params[each] for each in ("axes", "dimensions", "axis") if each in params)
    axes = axes if isinstance(axes, tuple) else (axes,)
    if axis in axes:
        return None
    is_kept = name in ("rev", "split")
    return axis if is_kept else axis - sum(isinstance(each, int) and each < axis for each in axes)
