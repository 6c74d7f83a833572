"""`Strategy.init`: creates state on the devices by one compiled program."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mirror._src.base.naming import name_of
from mirror._src.base.source_lines import line_of
from mirror._src.devices.launch import is_needed, launch, wait_for
from mirror._src.devices.launches import Described
from mirror._src.devices.replicas import Kind, ReplicaDevices
from mirror._src.engine.nnx.structure import OBJECTS


class _Parts(NamedTuple):
    """A tree without its arrays: `joined` puts others in their place."""

    leaves: list[Any]
    treedef: Any
    graphdef: Any
    state: Any

    def joined(self, arrays: Sequence[Any]) -> Any:
        """Returns the tree, with new nnx objects, of these arrays."""
        rest = iter(arrays)
        objects = iter(nnx.merge(self.graphdef, jax.tree.map(lambda _: next(rest), self.state)))
        leaves = (next(rest) if leaf is _ARRAY else leaf for leaf in self.leaves)
        return self.treedef.unflatten(next(objects) if x is _OBJECT else x for x in leaves)


_ARRAY, _OBJECT = object(), object()


def _split(tree: Any) -> tuple[_Parts, list[Any]]:
    """Returns a tree without its arrays, and the arrays, first the ones in nnx objects."""
    leaves, treedef = jax.tree.flatten(tree, is_leaf=lambda x: isinstance(x, OBJECTS))
    graphdef, state = nnx.split([leaf for leaf in leaves if isinstance(leaf, OBJECTS)])
    arrays = jax.tree.leaves(state)
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, OBJECTS):
            leaves[i] = _OBJECT
        elif isinstance(leaf, jax.Array | np.ndarray):
            arrays.append(leaf)
            leaves[i] = _ARRAY
    return _Parts(leaves, treedef, graphdef, jax.tree.map(lambda _: 0, state)), arrays


def create(
    replicas: ReplicaDevices,
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Any:
    """Implements `Strategy.init`."""
    given, arrays = _split((tuple(args), dict(kwargs)))
    made: list[_Parts] = []

    def build(*arrays: Any) -> list[Any]:
        args, kwargs = given.joined(arrays)
        parts, results = _split(fn(*args, **kwargs))
        advanced = _split((args, kwargs))[1]  # random streams among the arguments
        made[:] = [parts]
        token = jnp.zeros((), jnp.int32)  # an output that is never donated
        return [*results, *advanced[: len(arrays)], token]

    placed = list(map(replicas.store, arrays))
    types = jax.eval_shape(build, *placed)
    kinds = [Kind(axis=replicas.stored_axis(t)) for t in types]
    program = jax.jit(build, out_shardings=list(map(replicas.sharding, kinds)))
    described = Described(name_of(fn), line_of(fn), replicas.devices, range(len(replicas)))
    outputs: list[Any] = []
    bounded = replicas.on_host and is_needed()
    launch(program, placed, outputs, described, bounded=bounded, compiles=True)
    wait_for(outputs)
    count = len(outputs) - len(arrays) - 1
    before = [x for x in jax.tree.leaves((args, kwargs), is_leaf=_is_object) if _is_object(x)]
    if before:
        new = given.joined(outputs[count:-1])
        after = [x for x in jax.tree.leaves(new, is_leaf=_is_object) if _is_object(x)]
        for old, advanced in zip(before, after, strict=True):
            nnx.update(old, nnx.state(advanced))
    return made[0].joined(outputs[:count])


def _is_object(value: Any) -> bool:
    return isinstance(value, OBJECTS)
