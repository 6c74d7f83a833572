"""Isolates steps from the meshes and mapped axes of JAX, and rejects steps with their own."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr
from jax.sharding import NamedSharding

from mirror._src.base.errors import describe
from mirror._src.base.naming import name_of
from mirror._src.base.types import REPLICA_AXIS
from mirror._src.devices.op_log import is_log_installed, unlogged
from mirror._src.engine.arguments import inside_jit_message
from mirror._src.jaxprs.equations import equations
from mirror._src.jaxprs.primitives import MAPPING

# `Any`, because JAX 0.10 does not declare its options as attributes. `values[...]` takes 7 us.
_OF_MAPPINGS = (  # of errors of jax.pmap and jax.shard_map
    "shard_map applied to the function",
    "cannot select an axis to squeeze out which has size not equal to one",
    "pmap got inconsistent sizes",
    "pmap was requested to map its argument",
    "compiling computation that requires",
)
_config: Any = jax.config


def outside_traces(fn: Callable[..., Any]) -> contextlib.AbstractContextManager[Any]:
    """Context manager that unsets the mesh and the default device, and pauses placement logging.

    `jax.jit` includes them in its cache key, so a program would be compiled again inside a scope.
    They are unset only if they are set, because that takes as long as all other checks of a call.

    Raises:
        RuntimeError: Inside `jax.jit`, `grad` or `vmap`; here, or on entering.
    """
    is_set = _config.jax_default_device is not None or is_log_installed()
    if is_set or not jax.sharding.get_abstract_mesh().empty:
        return _unset(fn)
    try:
        return jax.set_mesh(None)  # raises in a trace
    except ValueError:
        raise RuntimeError(inside_jit_message(name_of(fn))) from None


@contextlib.contextmanager
def _unset(fn: Callable[..., Any]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        stack.enter_context(jax.default_device(None))
        stack.enter_context(unlogged())
        before = jax.sharding.get_mesh() if not jax.sharding.get_abstract_mesh().empty else None
        try:
            # Sets the mesh already, before `__enter__`: an interrupt may arrive in between.
            stack.enter_context(jax.set_mesh(None))
        except ValueError:
            raise RuntimeError(inside_jit_message(name_of(fn))) from None
        except BaseException:
            jax.set_mesh(before)
            raise
        yield


def unbound_axis_message(fn: Callable[..., Any], error: NameError, axis_name: str) -> str | None:
    """Returns the message for a step that uses an axis name other than the replica axis."""
    _, separator, name = str(error).partition("unbound axis name: ")
    if not separator:
        return None
    name = name.split(".")[0].strip()
    known = "mirror.REPLICA_AXIS" if axis_name == REPLICA_AXIS else repr(axis_name)
    return (
        f"{name_of(fn)} uses the axis name {name!r}, but the replica axis of this strategy is "
        f"{axis_name!r}. Use {known} in the step, or name the axis: "
        f"mirror.MirroredStrategy(axis_name={name!r})."
    )


def require_no_mapping(fn: Callable[..., Any], program: ClosedJaxpr) -> None:
    """Rejects a step that maps over devices.

    Raises:
        ValueError: If it contains `jax.pmap` or `jax.shard_map`.
    """
    for eqn in equations(program.jaxpr):
        if eqn.primitive.name in MAPPING:
            raise ValueError(_mapping_message(fn))


def _mapping_message(fn: Callable[..., Any]) -> str:
    return (
        f"{name_of(fn)} contains jax.pmap, nnx.pmap or jax.shard_map, but the strategy "
        "already maps the step over its devices. Remove @jax.pmap from the function, and "
        "pass its axis_name='batch' as mirror.MirroredStrategy(axis_name='batch')."
    )


def failed_mapping_message(fn: Callable[..., Any], error: ValueError) -> str | None:
    """Returns the message for a step that is still wrapped in a mapping, whose rows do not fit."""
    return _mapping_message(fn) if any(text in str(error) for text in _OF_MAPPINGS) else None


def require_not_stacked(name: Callable[[], str], leaf: Any, axis_name: str) -> None:
    """Rejects an array with one row per device, as `jax.pmap` receives and returns it.

    Raises:
        ValueError: If `leaf` is such an array.
    """
    sharding = getattr(leaf, "sharding", None)
    if not isinstance(sharding, NamedSharding) or not sharding.spec:
        return
    size = sharding.mesh.size
    if sharding.mesh.axis_names == (axis_name,):  # the stacked array of a `PerReplica`
        return
    if size > 1 and sharding.spec[0] in sharding.mesh.axis_names and leaf.shape[:1] == (size,):
        raise ValueError(
            f"{name()} is {describe(leaf)} with one row on each of {size} devices, as jax.pmap and "
            "flax.jax_utils.replicate stack it. Pass state without that axis "
            "(flax.jax_utils.unreplicate(state)), and batches from strategy.distribute_dataset. "
            "For values that differ between replicas, use mirror.PerReplica.from_stacked(x)."
        )
