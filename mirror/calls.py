"""The arguments of a call: told apart, named, and put together again inside a replica.

A step's arguments are nnx objects, which go by reference; `PerReplica` leaves, of which each
replica gets its own; arrays and numbers, which are mirrored; and anything else, which is static.
"""

import contextlib
import functools
import gc
import inspect
import itertools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import CellType, CodeType, ModuleType
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx
from jax.extend.core import ClosedJaxpr
from jax.sharding import NamedSharding

from mirror._errors import describe
from mirror._types import REPLICA_AXIS, PyTree
from mirror.devices.log import log_is_here, unlogged
from mirror.objects import is_object
from mirror.parts import Parts
from mirror.program.axis import axis_name
from mirror.program.inner import equations
from mirror.values import PerReplica, is_per_replica
from mirror.variables import Variable

ARRAY_LIKE = (jax.Array, np.ndarray, np.generic, int, float, complex)
"""What is an array, or becomes one."""
_DYNAMIC_TYPES = (*ARRAY_LIKE, Parts)


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
class Hoisted:
    """Stands in the arguments where the nnx object of this number was; a pytree without leaves."""

    number: int

    def tree_flatten(self) -> tuple[tuple[()], int]:
        """No children; the number is structure."""
        return (), self.number

    @classmethod
    def tree_unflatten(cls, number: int, _: object) -> "Hoisted":
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
            lambda node: objects[node.number] if isinstance(node, Hoisted) else node,
            self.treedef.unflatten(leaves),
            is_leaf=lambda node: isinstance(node, Hoisted),
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
        return Hoisted(len(objects) - 1)

    rest = tuple([take(value) for value in args])
    return Arguments(objects, (rest, {k: take(v) for k, v in kwargs.items()} if kwargs else kwargs))


def hoist_nested(args: Sequence[Any], kwargs: dict[str, Any]) -> Arguments:
    """Takes out the nnx objects wherever they stand in the arguments."""
    objects: list[Any] = []

    def take(value: Any) -> Any:
        if not is_object(value):
            return value
        objects.append(value)
        return Hoisted(len(objects) - 1)

    is_leaf = lambda value: is_object(value) or is_per_replica(value)  # noqa: E731
    return Arguments(objects, jax.tree.map(take, (tuple(args), dict(kwargs)), is_leaf=is_leaf))


def name_of(fn: Callable[..., Any]) -> str:
    """The function's own name."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    return getattr(fn, "__name__", type(fn).__name__)


def argument_names(fn: Callable[..., Any], count: int) -> list[str]:
    """What the user calls the positional arguments: the names of the parameters, else `args[i]`."""
    names: list[str] = []
    try:
        for parameter in inspect.signature(fn).parameters.values():
            if parameter.kind is parameter.VAR_POSITIONAL:
                break
            if parameter.kind is not parameter.KEYWORD_ONLY:
                names.append(parameter.name)
    except (TypeError, ValueError):
        pass
    return [names[i] if i < len(names) else f"args[{i}]" for i in range(count)]


def leaf_names(fn: Callable[..., Any], tree: tuple[tuple[Any, ...], dict[str, Any]]) -> list[str]:
    """The user's name for each leaf: `batch['image']`, `state.params['w']`."""
    args, kwargs = tree
    names = argument_names(fn, len(args))
    found = []
    for path, _ in jax.tree_util.tree_flatten_with_path((args, kwargs))[0]:
        head = names[path[1].idx] if path[0].idx == 0 else path[1].key
        found.append(head + keys(path[2:]))
    return found


def keys(path: Sequence[Any]) -> str:
    """A path as code, without the step from a `PerReplica` to its array."""
    text = jax.tree_util.keystr(tuple(path))
    return text.removesuffix(".stacked")


def object_names(
    fn: Callable[..., Any], tree: PyTree, objects: Sequence[Any], captured: Sequence[Variable] = ()
) -> list[str]:
    """The user's name for each nnx object; those that are no arguments come last."""
    args, kwargs = tree
    names = argument_names(fn, len(args))
    found = [f"object {i}" for i in range(len(objects) - len(captured))]
    found += [variable.get_metadata("name") or "a captured variable" for variable in captured]
    is_leaf = lambda node: isinstance(node, Hoisted)  # noqa: E731
    for path, node in jax.tree_util.tree_flatten_with_path((args, kwargs), is_leaf=is_leaf)[0]:
        if isinstance(node, Hoisted):
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


def code_of(fn: Callable[..., Any]) -> CodeType | None:
    """The code that the function runs, under its partial arguments."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    return getattr(fn, "__code__", None)


def depth_of_user() -> int:
    """How far up the stack the caller of `mirror` is, as `warnings.warn` counts from its caller."""
    frame, depth = sys._getframe(1), 1
    while frame.f_back is not None and is_our_module(frame.f_globals.get("__package__")):
        frame, depth = frame.f_back, depth + 1
    return depth


def is_our_module(name: str | None) -> bool:
    """Whether a module or package of that name is ours; a script's `__main__` may have none."""
    return name is not None and (name == "mirror" or name.startswith("mirror."))


def require_nothing_bound(fn: Callable[..., Any]) -> None:
    """Refuses a step that has an nnx object bound to it or in its closure.

    Raises:
        ValueError: it has; the message names it.
    """
    while isinstance(fn, functools.partial):
        bound = [*((f"args[{i}]", v) for i, v in enumerate(fn.args)), *fn.keywords.items()]
        for name, value in bound:
            if _is_frozen(value):
                raise ValueError(_frozen(fn, f"the nnx object {name!r}"))
        fn = fn.func
    if is_object(fn) or is_object(getattr(fn, "__self__", None)):
        raise ValueError(_frozen(fn, f"the nnx object {name_of(fn)!r} that it belongs to"))
    inside = getattr(inspect.unwrap(fn), "__closure__", None) or ()
    names = inspect.unwrap(fn).__code__.co_freevars if inside else ()
    for name, cell in zip(names, inside, strict=True):
        if _is_frozen(_contents(cell)):
            raise ValueError(_frozen(fn, f"the nnx object {name!r}"))


def variables_around(fn: Callable[..., Any]) -> list[int]:
    """Identities of the variables that the names in a function mean; see `named_variables`."""
    return list(map(id, named_variables(fn)))


def named_variables(fn: Callable[..., Any]) -> list[Variable]:
    """The variables that the names in a function mean: its closure's, globals', its object's."""
    found: list[Any] = []
    while isinstance(fn, functools.partial):
        found += [*fn.args, *fn.keywords.values()]
        fn = fn.func
    found.append(getattr(fn, "__self__", None))
    code, inner = code_of(fn), inspect.unwrap(fn)
    found += map(_contents, getattr(inner, "__closure__", None) or ())
    known = getattr(inner, "__globals__", {})
    found += [known.get(name) for name in (code.co_names if code else ())]
    held = [vars(value).values() for value in found if _holds_variables(value)]
    every = [*found, *itertools.chain.from_iterable(held)]
    return [value for value in every if isinstance(value, Variable)]


def _holds_variables(value: object) -> bool:
    """Whether it is an object whose attributes a step may read variables from."""
    plain = not isinstance(value, type | ModuleType | Variable) and not callable(value)
    return plain and hasattr(value, "__dict__")


def _is_frozen(value: object) -> bool:
    """Whether it would be frozen into a program; a `mirror.Variable` is found while tracing."""
    return is_object(value) and not isinstance(value, Variable)


def _contents(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # still empty
        return None


def require_nothing_captured(fn: Callable[..., Any], constants: Sequence[Any]) -> None:
    """Refuses a step that has read nnx variables which are not among its arguments.

    What a traced step reads from outside is a constant of its program; one that a variable holds
    would be the variable's value of this moment for ever.

    Raises:
        ValueError: it has.
    """
    arrays = [constant for constant in constants if isinstance(constant, jax.Array)]
    holders = gc.get_referrers(*arrays) if arrays else []
    held = [v for v in holders if isinstance(v, nnx.Variable)]
    if not held:
        return
    code, known = code_of(fn), getattr(fn, "__globals__", {})
    named = [n for n in (code.co_names if code else ()) if is_object(known.get(n))]
    if named:
        raise ValueError(_frozen(fn, f"the nnx object {named[0]!r}"))
    shapes = ", ".join(f"{type(v).__name__} {describe(v.get_raw_value())}" for v in held[:3])
    raise ValueError(_frozen(fn, f"the nnx variables ({shapes})"))


def _frozen(fn: Callable[..., Any], what: str) -> str:
    return (
        f"{name_of(fn)} reads {what} from outside its arguments: its values would be frozen into "
        f"the compiled step. Pass the model: strategy.run({name_of(fn)}, (model, ...))."
    )
