"""The arguments of a call: told apart, named, and put together again inside a replica.

A step's arguments are nnx objects, which go by reference; `PerReplica` leaves, of which each
replica gets its own; arrays and numbers, which are mirrored; and anything else, which is static.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np

from mirror._src.devices.unstacked import UnstackedArrays
from mirror._src.run.nnx.structure import is_object
from mirror._src.utils.errors import describe
from mirror._src.utils.naming import argument_names, keys, leaf_names, name_of
from mirror._src.utils.types import PyTree
from mirror._src.values.per_replica import PerReplica, is_per_replica
from mirror._src.variables.variable import Variable

ARRAY_LIKE = (jax.Array, np.ndarray, np.generic, int, float, complex)
"""What is an array, or becomes one."""
_DYNAMIC_TYPES = (*ARRAY_LIKE, UnstackedArrays)


def kind(leaf_type: type) -> type:
    """`jax.Array` for all types whose values go as arrays; a static value's type otherwise."""
    dynamic = issubclass(leaf_type, _DYNAMIC_TYPES) and leaf_type is not bool
    return jax.Array if dynamic else leaf_type


def kinds(treedef: Any, leaf_types: Sequence[type]) -> tuple[type, ...]:
    """Returns the kind of each leaf; a Python number in an Equinox module is static."""
    fixed = fixed_numbers(treedef)
    return tuple([t if i in fixed and is_number(t) else kind(t) for i, t in enumerate(leaf_types)])


@jax.tree_util.register_pytree_node_class
@dataclass(frozen=True)
class ObjectPlaceholder:
    """Stands in the arguments where the nnx object of this number was; a pytree without leaves."""

    number: int

    def tree_flatten(self) -> tuple[tuple[()], int]:
        """No children; the number is structure."""
        return (), self.number

    @classmethod
    def tree_unflatten(cls, number: int, _: object) -> "ObjectPlaceholder":
        """The same again."""
        return cls(number)


def require_static(fn: Callable[..., Any], tree: Any, layout: "Layout", leaves: list) -> None:
    """Refuses a static argument that cannot be compared with that of the next call.

    Raises:
        TypeError: one is not hashable; the message names it.
    """
    for i in layout.static:
        try:
            hash(leaves[i])
        except TypeError as error:
            raise TypeError(
                f"{leaf_names(fn, tree)[i]} is {describe(leaves[i])}, neither an array nor "
                "hashable. Pass arrays, numbers, or hashables such as strings and functions."
            ) from error


class Layout:
    """How the leaves of a call's arguments are to be treated: one for each structure and types.

    Attributes:
        treedef: structure of the arguments as they are inside a replica, without `PerReplica`.
        dynamic: positions of the leaves that are arrays or numbers.
        per_replica: positions, among the dynamic ones, of the leaves that replicas differ in.
        static: positions of all other leaves.
        nested: whether nnx objects stand inside other containers.
    """

    def __init__(self, treedef: Any, leaf_kinds: Sequence[type]) -> None:
        arguments = treedef.unflatten(range(len(leaf_kinds)))
        self.treedef: Any
        marked, self.treedef = jax.tree.flatten(arguments, is_leaf=is_per_replica)
        stacked: set[Any] = {leaf.stacked for leaf in marked if isinstance(leaf, PerReplica)}
        self.dynamic = [i for i, k in enumerate(leaf_kinds) if k is jax.Array]
        self.static = [i for i, k in enumerate(leaf_kinds) if k is not jax.Array]
        self.per_replica = [self.dynamic.index(i) for i in sorted(stacked) if i in self.dynamic]
        self.nested = any(map(is_object, jax.tree.leaves(arguments, is_leaf=is_object)))
        self.all_dynamic = not self.static
        self._has_numbers = any(is_number(leaf_kinds[i]) for i in self.static)

    def dynamic_leaves(self, leaves: list[Any]) -> list[Any]:
        """The arrays and numbers among the leaves."""
        return leaves if self.all_dynamic else [leaves[i] for i in self.dynamic]

    def key(self, leaves: list[Any]) -> tuple[Any, ...]:
        """What of the leaves' values a program depends on: statics, and the replicas' shapes."""
        statics: tuple[Any, ...] = tuple([leaves[i] for i in self.static])
        if self._has_numbers:  # 0.0 == -0.0, and NaN is not NaN
            statics = tuple([repr(s) if is_number(type(s)) else s for s in statics])
        dynamic = self.dynamic_leaves(leaves)
        return statics, tuple([dynamic[i].shape for i in self.per_replica])

    def statics(self, leaves: list[Any]) -> tuple[Any, ...]:
        """The leaves that are neither arrays nor numbers that become arrays."""
        return tuple([leaves[i] for i in self.static])

    def rebuild(
        self, dynamic: Sequence[Any], statics: Sequence[Any], objects: Sequence[Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of one replica, from its own leaves."""
        leaves: list[Any] = [None] * (len(self.dynamic) + len(self.static))
        for i, leaf in zip(self.dynamic, dynamic, strict=True):
            leaves[i] = leaf
        for i, leaf in zip(self.static, statics, strict=True):
            leaves[i] = leaf
        return jax.tree.map(
            lambda node: objects[node.number] if isinstance(node, ObjectPlaceholder) else node,
            self.treedef.unflatten(leaves),
            is_leaf=lambda node: isinstance(node, ObjectPlaceholder),
        )


def is_number(leaf_type: type) -> bool:
    """Whether it is the type of a Python number, flags left out."""
    return issubclass(leaf_type, int | float | complex) and not issubclass(
        leaf_type, bool | np.generic
    )


def a_ref(what: str) -> str:
    """Words a `jax.Ref` that comes from outside the step."""
    return (
        f"{what} is a jax.Ref, a place that all replicas would write to. Pass its value, ref[...], "
        "and return the new one. A Ref that the step makes itself works."
    )


def fixed_numbers(treedef: Any) -> set[int]:
    """The positions of leaves inside Equinox modules, whose Python numbers stay numbers.

    In a module a number is a setting, such as a stride or a rate; an array would be trained.
    """
    equinox = sys.modules.get("equinox")
    if equinox is None:
        return set()
    found: set[int] = set()
    start = 0
    waiting = [treedef]
    while waiting:
        node = waiting.pop()
        data = node.node_data()
        if data is None or (data[0] is not None and issubclass(data[0], equinox.Module)):
            if data is not None:
                found.update(range(start, start + node.num_leaves))
            start += node.num_leaves
        else:
            waiting += reversed(node.children())
    return found


_is_object_type: dict[type, bool] = {}


def _hoists(value: object) -> bool:
    kind = type(value)
    known = _is_object_type.get(kind)
    if known is None:
        known = _is_object_type[kind] = is_object(value)
    return known


class Arguments(NamedTuple):
    """A call's arguments with the nnx objects taken out."""

    objects: list[Any]
    tree: tuple[tuple[Any, ...], dict[str, Any]]


def hoist(args: Sequence[Any], kwargs: dict[str, Any]) -> Arguments:
    """Takes out the nnx objects that are arguments themselves; the common case, and quick."""
    objects: list[Any] = []

    def take(value: Any) -> Any:
        if not _hoists(value):
            return value
        objects.append(value)
        return ObjectPlaceholder(len(objects) - 1)

    rest = tuple([take(value) for value in args])
    return Arguments(objects, (rest, {k: take(v) for k, v in kwargs.items()} if kwargs else kwargs))


def hoist_nested(args: Sequence[Any], kwargs: dict[str, Any]) -> Arguments:
    """Takes out the nnx objects wherever they stand in the arguments."""
    objects: list[Any] = []

    def take(value: Any) -> Any:
        if not is_object(value):
            return value
        objects.append(value)
        return ObjectPlaceholder(len(objects) - 1)

    is_leaf = lambda value: is_object(value) or is_per_replica(value)  # noqa: E731
    return Arguments(objects, jax.tree.map(take, (tuple(args), dict(kwargs)), is_leaf=is_leaf))


def object_names(
    fn: Callable[..., Any], tree: PyTree, objects: Sequence[Any], captured: Sequence[Variable] = ()
) -> list[str]:
    """The user's name for each nnx object; those that are no arguments come last."""
    args, kwargs = tree
    names = argument_names(fn, len(args))
    found = [f"object {i}" for i in range(len(objects) - len(captured))]
    found += [variable.get_metadata("name") or "a captured variable" for variable in captured]
    is_leaf = lambda node: isinstance(node, ObjectPlaceholder)  # noqa: E731
    for path, node in jax.tree_util.tree_flatten_with_path((args, kwargs), is_leaf=is_leaf)[0]:
        if isinstance(node, ObjectPlaceholder):
            head = names[path[1].idx] if path[0].idx == 0 else path[1].key
            found[node.number] = head + keys(path[2:])
    return found


def require_call(fn: Any, args: Any, kwargs: Any) -> None:
    """Refuses a step that is no function, and arguments that are no tuple and no dict.

    Raises:
        TypeError: they are something else.
    """
    if not callable(fn):
        raise TypeError(
            f"fn={describe(fn)} is no function. Pass the step: strategy.run(step, args)."
        )
    if not isinstance(args, tuple | list):
        raise TypeError(
            f"args={describe(args)} is no tuple. Pass the step's arguments as one: "
            "strategy.run(step, (model, batch))."
        )
    if not isinstance(kwargs, dict):
        raise TypeError(f"kwargs={describe(kwargs)} is no dict. Pass the keyword arguments as one.")


def canonical_argnums(donate_argnums: Any) -> tuple[int, ...]:
    """The positions as a tuple.

    Raises:
        TypeError: no int and no sequence of them.
    """
    if isinstance(donate_argnums, list | range):
        return tuple(donate_argnums)
    raise TypeError(
        f"donate_argnums={describe(donate_argnums)} is no position. Pass an int or a tuple of "
        "ints: strategy.run(step, (state, batch), donate_argnums=0)."
    )


def require_no_tracers(fn: Callable[..., Any], tree: Any) -> None:
    """Refuses arguments that are being traced: `run` compiles by itself.

    Raises:
        RuntimeError: one is.
    """
    for i, leaf in enumerate(jax.tree.leaves(tree)):
        if isinstance(leaf, jax.core.Tracer):
            raise RuntimeError(
                f"{name_of(fn)} is run inside jax.jit, grad or vmap: {leaf_names(fn, tree)[i]} is "
                "a tracer. Call strategy.run outside; it compiles by itself."
            )
