"""Traces a function of flat leaves to a jaxpr with a named replica axis."""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr

from mirror._src.devices.transfer import NoMesh
from mirror._src.program.axis import axis_name
from mirror._src.utils.types import Array


def abstract(value: Any) -> jax.ShapeDtypeStruct:
    """Returns shape, dtype and weak type of an array or number; no sharding.

    Raises:
        TypeError: If JAX has no array type for the value.
    """
    return struct_of(jax.typeof(value))


def struct_of(aval: Any) -> jax.ShapeDtypeStruct:
    """Returns shape, dtype and weak type of a type of JAX's."""
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=getattr(aval, "weak_type", False))


def abstract_row(stacked: Any) -> jax.ShapeDtypeStruct:
    """Returns shape, dtype and weak type of one replica's part of a stacked array."""
    aval = abstract(stacked)
    return jax.ShapeDtypeStruct(aval.shape[1:], aval.dtype, weak_type=aval.weak_type)


def trace(
    fn: Callable[..., Any], leaves: Sequence[jax.ShapeDtypeStruct], num_replicas: int
) -> ClosedJaxpr:
    """Traces `fn` once, for one replica, on leaves of these shapes: the replica program.

    No mesh is set meanwhile. The types in a jaxpr name the mesh of its trace, and an operation
    whose types name one mesh cannot be evaluated on another (JAX 0.10 to 0.12); types that name
    none fit every executor.
    """
    with NoMesh():
        return jax.make_jaxpr(fn, axis_env=[(axis_name(), num_replicas)])(*leaves)


_context = jax.jit(lambda: ())


def context_token() -> object:
    """Returns an object that stands for the context in which JAX would trace here and now.

    It is the trace of an empty function, which JAX keeps under what it keeps every trace under:
    `jax_enable_x64`, the matmul precision and the other options that a trace depends on. Two calls
    return the same object exactly if JAX would find the trace of the first call in the second.
    """
    return _context.trace().jaxpr


_numbers = itertools.count()
_trace_number = jax.make_user_context(default_value=None)


def uncached(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function, which does not see traces that JAX keeps of functions under `jax.jit`.

    A user's function under `jax.jit` is traced once for its shapes, and again only in another
    context. What it asks of this trace alone, the other replicas' lengths or what stands for a
    variable, would be answered by an earlier one. So each trace is a context of its own.
    """

    @functools.wraps(fn)
    def inside(*leaves: Any) -> Any:
        with _trace_number(next(_numbers)):
            return fn(*leaves)

    return inside


def trace_inside(fn: Callable[..., Any], leaves: Sequence[Array]) -> ClosedJaxpr:
    """Traces `fn` on the tracers of a program under way; it has no axis of its own."""
    return jax.make_jaxpr(fn)(*leaves)
