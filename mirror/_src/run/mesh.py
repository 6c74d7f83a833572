"""Meshes and mapped axes of JAX: a step runs outside all of them, and brings none of its own."""

import contextlib
from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr
from jax.sharding import NamedSharding

from mirror._src.devices.op_log import log_is_here, unlogged
from mirror._src.program.axis import axis_name
from mirror._src.program.jaxprs import equations
from mirror._src.utils.errors import describe
from mirror._src.utils.naming import name_of
from mirror._src.utils.types import REPLICA_AXIS

# JAX 0.10 does not declare its options as attributes, 0.12 does; `values[...]` takes 7 us.
_config: Any = jax.config


class outside_traces:
    """Context manager in which no mesh and no default device are set, and nothing is logged.

    They are part of what jit keys its cache with: the program is the same in and out of a scope.
    No generator, which would take as long as the rest of it.

    Raises:
        RuntimeError: Inside `jax.jit`, `grad` or `vmap`, on entering.
    """

    def __init__(self, fn: Callable[..., Any]) -> None:
        self._fn = fn
        self._stack: contextlib.ExitStack | None = None
        self._before: jax.sharding.Mesh | None = None

    def __enter__(self) -> None:
        if _config.jax_default_device is not None or log_is_here():
            self._stack = contextlib.ExitStack()
            self._stack.enter_context(jax.default_device(None))
            self._stack.enter_context(unlogged())
        try:
            if not jax.sharding.get_abstract_mesh().empty:
                self._before = jax.sharding.get_mesh()
            # It is set already: an interrupt may come before it is entered.
            self._context = jax.set_mesh(None)
            self._context.__enter__()
        except ValueError as error:
            self._close()
            raise RuntimeError(
                f"{name_of(self._fn)} is run inside jax.jit, where arrays are tracers. Call "
                "strategy.run outside; it compiles by itself."
            ) from error
        except BaseException:
            jax.set_mesh(self._before)
            self._close()
            raise

    def __exit__(self, kind: type[BaseException] | None, *details: Any) -> None:
        try:
            self._context.__exit__(kind, *details)
        finally:
            self._close()

    def _close(self) -> None:
        if self._stack is not None:
            self._stack.close()


def require_bound_axis(fn: Callable[..., Any], error: NameError) -> None:
    """Rejects a step that uses the name of another axis than the replicas'.

    Raises:
        ValueError: If that is what JAX says.
    """
    _, found, name = str(error).partition("unbound axis name: ")
    if found:
        name = name.split(".")[0].strip()
        known = "mirror.REPLICA_AXIS" if axis_name() == REPLICA_AXIS else repr(axis_name())
        raise ValueError(
            f"{name_of(fn)} uses the axis name {name!r}, but the replica axis of this strategy is "
            f"{axis_name()!r}. Use {known} in the step, or name the axis: "
            f"mirror.MirroredStrategy(axis_name={name!r})."
        ) from error


def require_no_mapping(fn: Callable[..., Any], program: ClosedJaxpr) -> None:
    """Rejects a step that maps over devices.

    Raises:
        ValueError: If it contains a `jax.pmap` or a `jax.shard_map`.
    """
    for eqn in equations(program.jaxpr):
        if eqn.primitive.name in ("shard_map", "xla_pmap"):
            raise ValueError(
                f"{name_of(fn)} contains jax.pmap, nnx.pmap or jax.shard_map, but a strategy maps "
                "the step over its devices. Remove @jax.pmap from the function; its "
                "axis_name='batch' becomes mirror.MirroredStrategy(axis_name='batch')."
            )


def require_not_stacked(name: str, leaf: Any) -> None:
    """Rejects an array with one row on each device, as `jax.pmap` takes and returns it.

    Raises:
        ValueError: If it is one.
    """
    sharding = getattr(leaf, "sharding", None)
    if not isinstance(sharding, NamedSharding) or not sharding.spec:
        return
    size = sharding.mesh.size
    if sharding.mesh.axis_names == (axis_name(),):  # a `PerReplica`'s own array, passed on purpose
        return
    if size > 1 and sharding.spec[0] in sharding.mesh.axis_names and leaf.shape[:1] == (size,):
        raise ValueError(
            f"{name} is {describe(leaf)} with one row on each of {size} devices, as jax.pmap and "
            "flax.jax_utils.replicate stack it. Pass state without that axis "
            "(flax.jax_utils.unreplicate(state)), and batches from strategy.distribute_dataset; "
            "for values that differ between replicas use mirror.PerReplica.from_stacked(x)."
        )
