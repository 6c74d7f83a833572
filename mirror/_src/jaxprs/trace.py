"""Traces functions of flat leaves to jaxprs with a named replica axis."""

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Var

from mirror._src.base.types import REPLICA_AXIS, Array
from mirror._src.devices.transfer import NoMesh


def abstract(value: Any) -> jax.ShapeDtypeStruct:
    """Returns the shape, dtype and weak type of an array or number, without its sharding.

    Raises:
        TypeError: If JAX has no array type for the value.
    """
    return struct_of(jax.typeof(value))


def struct_of(aval: Any) -> jax.ShapeDtypeStruct:
    """Returns the shape, dtype and weak type of an abstract value."""
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=getattr(aval, "weak_type", False))


def abstract_row(stacked: Any) -> jax.ShapeDtypeStruct:
    """Returns the shape, dtype and weak type of one replica's slice of a stacked array."""
    aval = abstract(stacked)
    return jax.ShapeDtypeStruct(aval.shape[1:], aval.dtype, weak_type=aval.weak_type)


def trace(
    fn: Callable[..., Any],
    leaves: Sequence[jax.ShapeDtypeStruct],
    num_replicas: int,
    axis_name: str = REPLICA_AXIS,
) -> ClosedJaxpr:
    """Traces `fn` once, for one replica, and returns the replica program.

    The trace has no mesh. Types in a jaxpr name the mesh of its trace, and an operation whose types
    name one mesh cannot be evaluated on another (JAX 0.10 to 0.12). Types without a mesh fit every
    executor.
    """
    with NoMesh():
        return jax.make_jaxpr(fn, axis_env=[(axis_name, num_replicas)])(*leaves)


def program_of(inputs: Iterable[Var], outputs: Iterable[Any], eqns: list[JaxprEqn]) -> Jaxpr:
    """Returns a program of operations without effects that were traced in another program."""
    return _empty().replace(invars=[*inputs], outvars=[*outputs], eqns=eqns)


_empty = functools.cache(lambda: jax.make_jaxpr(lambda: ())().jaxpr)


_context = jax.jit(lambda: ())


def context_token() -> object:
    """Returns an object that identifies the context in which JAX would trace now.

    It is the trace of an empty function. JAX caches traces by every option they depend on, such as
    `jax_enable_x64` and the matmul precision. Two calls return the same object exactly if JAX would
    reuse the trace of the first call in the second.
    """
    return _context.trace().jaxpr


_numbers = itertools.count()
_trace_number = jax.make_user_context(default_value=None)


def uncached(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function, wrapped so that it does not reuse cached traces of jitted functions.

    JAX traces a user's function under `jax.jit` once per shape and context. A cached trace would
    contain the answers of an earlier step, such as the lengths of the other replicas' batches or
    the values of variables. Therefore every trace gets its own context.
    """

    @functools.wraps(fn)
    def inside(*leaves: Any) -> Any:
        with _trace_number(next(_numbers)):
            return fn(*leaves)

    return inside


def trace_inside(fn: Callable[..., Any], leaves: Sequence[Array]) -> ClosedJaxpr:
    """Traces `fn` on the tracers of the enclosing trace, without adding a named axis."""
    return jax.make_jaxpr(fn)(*leaves)
