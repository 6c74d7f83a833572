"""From a function on flat leaves to a jaxpr with a named replica axis."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr

from mirror._types import REPLICA_AXIS


def abstract(value: Any) -> jax.ShapeDtypeStruct:
    """Shape, dtype and weak type of an array or number; no sharding.

    Raises:
        TypeError: JAX has no array type for the value.
    """
    aval = jax.typeof(value)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=getattr(aval, "weak_type", False))


def trace(
    fn: Callable[..., Any], leaves: Sequence[jax.ShapeDtypeStruct], num_replicas: int
) -> ClosedJaxpr:
    """Traces `fn` once, for one replica, on leaves of these shapes: the replica program."""
    return jax.make_jaxpr(fn, axis_env=[(REPLICA_AXIS, num_replicas)])(*leaves)


_numbers = itertools.count()
_trace_number = jax.make_user_context(default_value=None)


def afresh(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which finds nothing that JAX remembers of other traces.

    A function of the user's under `jax.jit` is traced once for its shapes, and again only in
    another context. What it asks of this trace alone, the other replicas' lengths or what stands
    for a variable, would be answered by an earlier one. So each trace is a context of its own.
    """

    def inside(*leaves: Any) -> Any:
        with _trace_number(next(_numbers)):
            return fn(*leaves)

    return inside


def trace_inside(fn: Callable[..., Any], leaves: Sequence[Any]) -> ClosedJaxpr:
    """Traces `fn` on the tracers of a program under way; it has no axis of its own."""
    return jax.make_jaxpr(fn)(*leaves)
