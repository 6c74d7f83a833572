"""Classifies, names and reassembles the arguments of a step; `Call` contains them for one call.

Arguments of a step are nnx objects, which are passed by reference; `PerReplica` leaves, which give
each replica its own value; arrays and numbers, which are mirrored; and other leaves, which are
static.
"""

import functools
import operator
import sys
from collections import namedtuple
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from mirror._src.base.errors import counted, describe, expected, nearest_name
from mirror._src.base.keras_library import STATELESS_CALL, has_variables
from mirror._src.base.naming import argument_names, keys, leaf_names, name_of, parameter_names
from mirror._src.base.types import ARRAY_LIKE, PyTree, StepFunction
from mirror._src.base.unknown_names import advice
from mirror._src.devices.transfer import UnstackedArrays
from mirror._src.engine.nnx.record import Record
from mirror._src.engine.nnx.structure import OBJECTS, Structure, VariableSlot, is_object
from mirror._src.engine.per_replica import PerReplica, is_per_replica
from mirror._src.engine.variable import Variable

_DYNAMIC_TYPES = (*ARRAY_LIKE, UnstackedArrays)


def kind(leaf_type: type) -> type:
    """Returns `jax.Array` for a type whose values become arrays, and any other type unchanged."""
    dynamic = issubclass(leaf_type, _DYNAMIC_TYPES) and leaf_type is not bool
    return jax.Array if dynamic else leaf_type


def kinds(treedef: Any, leaf_types: Sequence[type]) -> tuple[type, ...]:
    """Returns the kind of each leaf; a Python number in an Equinox module is static."""
    fixed = equinox_positions(treedef)
    return tuple([t if i in fixed and is_number(t) else kind(t) for i, t in enumerate(leaf_types)])


class ObjectPlaceholder(namedtuple("_WithoutLeaves", ())):
    """Replaces an nnx object in the arguments. A pytree without leaves, which JAX flattens in C++.

    Attributes:
        number: Number of the object. Each number has a type, which is static data of the tree.
    """

    __slots__ = ()
    number: int


def require_static(fn: Callable[..., Any], tree: Any, layout: "Layout", leaves: list) -> None:
    """Rejects static arguments that are not hashable, because programs are looked up by them.

    Raises:
        TypeError: If a static argument is not hashable.
    """
    for i in layout.static:
        try:
            hash(leaves[i])
        except Exception:  # a memoryview raises a ValueError
            raise TypeError(
                f"{leaf_names(fn, tree)[i]} is {describe(leaves[i])}, which is neither an array "
                "nor hashable. Arguments of a step must be arrays, numbers, or hashable values "
                "such as strings and functions. Pass the numbers that the step needs, or a dict of "
                "them: vars(options)."
            ) from None


def require_no_constants(fn: Callable[..., Any], tree: Any, layout: "Layout", leaves: list) -> None:
    """Rejects static arguments whose numbers would be constants of the program.

    Raises:
        TypeError: If an argument is a Keras object that has variables, or an array of another
            library.
    """
    for i in layout.static:
        kind = type(leaves[i])
        if has_variables(leaves[i]):
            raise TypeError(
                f"{leaf_names(fn, tree)[i]} is a Keras {kind.__name__}, which "
                f"strategy.run does not update. {STATELESS_CALL}"
            )
        if hasattr(kind, "__array__"):
            raise TypeError(
                f"{leaf_names(fn, tree)[i]} is a {kind.__module__}.{kind.__qualname__}, whose "
                "numbers would be constants of the compiled step. Pass an array of NumPy or JAX: "
                "numpy.asarray(x)."
            )


class Layout:
    """Classification of the leaves of a call's arguments, for one structure and set of types.

    Attributes:
        treedef: Structure of the arguments as a replica receives them, without `PerReplica`.
        dynamic: Positions of the leaves that are arrays or numbers.
        per_replica: Positions, among the dynamic leaves, of the `PerReplica` leaves.
        mirrored: Positions, among the dynamic leaves, of the other leaves.
        static: Positions of all other leaves.
        rows: Positions of the `PerReplica` leaves among all leaves.
        nested: Whether containers among the arguments hold nnx objects.
        all_dynamic: Whether all leaves are arrays or numbers.
    """

    def __init__(self, treedef: Any, leaf_kinds: Sequence[type]) -> None:
        try:
            arguments = treedef.unflatten(range(len(leaf_kinds)))
        except Exception as error:
            raise TypeError(
                "The arguments of a step must be containers that can be rebuilt with other leaves, "
                f"as JAX does, got one that raises {error!r}. Pass its arrays in a tuple or dict."
            ) from error
        self.treedef: Any
        marked, self.treedef = jax.tree.flatten(arguments, is_leaf=is_per_replica)
        stacked: set[Any] = {leaf.stacked for leaf in marked if isinstance(leaf, PerReplica)}
        self.dynamic = [i for i, k in enumerate(leaf_kinds) if k is jax.Array]
        self.static = [i for i, k in enumerate(leaf_kinds) if k is not jax.Array]
        self.per_replica = [self.dynamic.index(i) for i in sorted(stacked) if i in self.dynamic]
        self.mirrored = sorted({*range(len(self.dynamic))} - {*self.per_replica})
        self.nested = any(map(is_object, jax.tree.leaves(arguments, is_leaf=is_object)))
        self.all_dynamic = not self.static
        self.rows = [self.dynamic[i] for i in self.per_replica]
        self._has_numbers = any(is_number(leaf_kinds[i]) for i in self.static)

    def dynamic_leaves(self, leaves: list[Any]) -> list[Any]:
        """Returns the leaves that are arrays or numbers."""
        return leaves if self.all_dynamic else list(map(leaves.__getitem__, self.dynamic))

    def static_key(self, leaves: list[Any]) -> tuple[Any, ...]:
        """Returns the static leaves as part of a key."""
        if not self._has_numbers:
            return tuple(map(leaves.__getitem__, self.static))
        # As text, because 0.0 == -0.0 and NaN != NaN.
        return tuple([repr(s) if is_number(type(s)) else s for s in self.statics(leaves)])

    def statics(self, leaves: list[Any]) -> tuple[Any, ...]:
        """Returns the static leaves."""
        return tuple([leaves[i] for i in self.static])

    def rebuild(
        self, dynamic: Sequence[Any], statics: Sequence[Any], objects: Sequence[Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns the positional and keyword arguments that a replica calls the step with.

        Args:
            dynamic: The replica's arrays, without a leading replica axis.
            statics: The static leaves.
            objects: The nnx objects, by placeholder number.
        """
        places = zip([*self.dynamic, *self.static], [*dynamic, *statics], strict=True)
        leaves = [leaf for _, leaf in sorted(places, key=operator.itemgetter(0))]
        return jax.tree.map(
            lambda node: objects[node.number] if isinstance(node, ObjectPlaceholder) else node,
            self.treedef.unflatten(leaves),
            is_leaf=lambda node: isinstance(node, ObjectPlaceholder),
        )


def is_number(leaf_type: type) -> bool:
    """Whether this is a type of Python numbers other than `bool`."""
    numbers = issubclass(leaf_type, int | float | complex)
    return numbers and not issubclass(leaf_type, bool | np.generic)


def ref_message(name: str) -> str:
    """Returns the error message for a `jax.Ref` created outside the step."""
    return (
        f"{name} is a jax.Ref, which all replicas would write to. Pass its value, ref[...], and "
        "return the new value. A Ref created inside the step is allowed."
    )


def equinox_positions(treedef: Any) -> set[int]:
    """Returns the positions of leaves inside Equinox modules, whose Python numbers are static.

    A number in a module is a setting, such as a stride or a rate. As an array, it would be trained.
    """
    equinox = sys.modules.get("equinox")
    if equinox is None:
        return set()
    positions: set[int] = set()
    start = 0
    pending = [treedef]
    while pending:
        node = pending.pop()
        data = node.node_data()
        if data is None or (data[0] is not None and issubclass(data[0], equinox.Module)):
            if data is not None:
                positions.update(range(start, start + node.num_leaves))
            start += node.num_leaves
        else:
            pending += reversed(node.children())
    return positions


_are_objects: Callable[[type], bool] = functools.cache(lambda kind: issubclass(kind, OBJECTS))
"""Whether values of a type are nnx objects."""


class Arguments(NamedTuple):
    """The arguments of a call, separated from the nnx objects among them.

    Attributes:
        objects: The nnx objects.
        tree: Positional and keyword arguments, with placeholders for the nnx objects.
    """

    objects: list[Any]
    tree: tuple[tuple[Any, ...], dict[str, Any]]


def hoist(args: Sequence[Any], kwargs: dict[str, Any]) -> Arguments:
    """Separates the nnx objects that are arguments themselves: the common case, and fast."""
    objects: list[Any] = []
    rest, named = list(args), kwargs
    for i, value in enumerate(args) if True in map(_are_objects, map(type, args)) else ():
        if _are_objects(type(value)):
            rest[i] = _placeholder(len(objects))
            objects.append(value)
    for name, value in kwargs.items() if kwargs else ():
        if _are_objects(type(value)):
            named = {**named, name: _placeholder(len(objects))}
            objects.append(value)
    return Arguments(objects, (tuple(rest), named))


@functools.cache
def _placeholder(number: int) -> ObjectPlaceholder:
    namespace = {"__slots__": (), "number": number}
    return type(f"Object{number}", (ObjectPlaceholder,), namespace)()


def hoist_from_builtins(args: Sequence[Any], kwargs: dict[str, Any]) -> Arguments:
    """Separates the nnx objects in dicts, lists and tuples: as fast, without `jax.tree.map`."""
    objects: list[Any] = []
    rest = _without_objects(tuple(args), objects)
    return Arguments(objects, (rest, _without_objects(kwargs, objects) if kwargs else kwargs))


def _without_objects(tree: Any, objects: list[Any]) -> Any:
    """Moves the objects in nested dicts, lists and tuples to a list, in the order of pytrees."""
    changed: dict[Any, Any] = {}
    for key in range(len(tree)) if type(tree) is not dict else _sorted_keys(tree):
        value = tree[key]
        if type(value) in (dict, list, tuple):
            taken = _without_objects(value, objects)
        elif _are_objects(type(value)):
            taken = _placeholder(len(objects))
            objects.append(value)
        else:
            continue
        if taken is not value:
            changed[key] = taken
    if not changed:
        return tree
    if type(tree) is dict:
        return {**tree, **changed}
    return type(tree)(map(changed.get, range(len(tree)), tree))


def _sorted_keys(tree: dict[Any, Any]) -> Sequence[Any]:
    """Returns the keys of a dict, in the order of pytrees."""
    if len(tree) < 2:
        return list(tree)
    try:
        return sorted(tree)
    except TypeError:  # of different types: JAX raises its error when it flattens the arguments
        return list(tree)


def hoist_nested(args: Sequence[Any], kwargs: dict[str, Any]) -> Arguments:
    """Separates all nnx objects, including those inside containers of any kind."""
    objects: list[Any] = []

    def take(value: Any) -> Any:
        if not is_object(value):
            return value
        objects.append(value)
        return _placeholder(len(objects) - 1)

    is_leaf = lambda value: is_object(value) or is_per_replica(value)  # noqa: E731
    return Arguments(objects, jax.tree.map(take, (tuple(args), dict(kwargs)), is_leaf=is_leaf))


HOISTS = (hoist, hoist_from_builtins, hoist_nested)


def object_names(
    fn: Callable[..., Any], tree: PyTree, objects: Sequence[Any], captured: Sequence[Variable] = ()
) -> list[str]:
    """Returns the user's name for each nnx object. Captured variables come last."""
    args, kwargs = tree
    arg_names = argument_names(fn, len(args))
    names = [f"object {i}" for i in range(len(objects) - len(captured))]
    names += [variable.get_metadata("name") or "a captured variable" for variable in captured]
    is_leaf = lambda node: isinstance(node, ObjectPlaceholder)  # noqa: E731
    for path, node in jax.tree_util.tree_flatten_with_path((args, kwargs), is_leaf=is_leaf)[0]:
        if isinstance(node, ObjectPlaceholder):
            head = arg_names[path[1].idx] if path[0].idx == 0 else path[1].key
            names[node.number] = head + keys(path[2:])
    return names


def require_call(
    fn: Any,
    args: Any,
    kwargs: Any,
    call: str,
    others: Sequence[Any] = (),
    unknown: Mapping[str, Any] | None = None,
) -> None:
    """Checks the types of the arguments of `run`, `verify`, `inspect`, `explain` and `schedule`.

    Args:
        fn: The step.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        call: The method, such as `strategy.run`.
        others: Further positional arguments.
        unknown: Further keyword arguments.

    Raises:
        TypeError: If `fn` is not callable, `args` not a tuple or list, or `kwargs` not a dict, or
            if there are further arguments.
    """
    if not callable(fn):
        if callable(args):
            raise TypeError(
                f"The arguments of {call} are swapped: the step must come first, got "
                f"{describe(fn)} and then {name_of(args)}. Write {call}({name_of(args)}, args)."
            )
        fix = f"Pass the step function, without calling it: {call}(step, args)."
        raise TypeError(expected("fn", fn, "callable", fix))
    if isinstance(args, tuple | list) and list(map(_is_options, others)) == [True]:
        raise TypeError(_unknown_keywords(call, fn, args, {"options": None}))
    if not isinstance(args, tuple | list) or others:
        passed = [args, *([kwargs] if others or not isinstance(kwargs, dict) or kwargs else [])]
        raise TypeError(_not_in_a_tuple(call, fn, [*passed, *others]))
    if unknown:
        raise TypeError(_unknown_keywords(call, fn, args, unknown))
    if not isinstance(kwargs, dict):
        fix = f"Pass the step's keyword arguments: {call}({name_of(fn)}, args, {{'train': True}})."
        raise TypeError(expected("kwargs", kwargs, "a dict", fix))


def _is_options(value: Any) -> bool:
    """Whether this is the fourth argument of `run` in `tf.distribute`."""
    return value is None or type(value).__name__ == "RunOptions"


def _not_in_a_tuple(call: str, fn: Callable[..., Any], passed: Sequence[Any]) -> str:
    """Returns the message for arguments of a step that are not in a tuple."""
    step, names = name_of(fn), argument_names(fn, len(passed))
    written = ", ".join(name if name.isidentifier() else "x" for name in names)
    fix = f"{call}({step}, ({written}{',' if len(passed) == 1 else ''}))"
    (first, *more) = passed
    if not more and isinstance(first, dict) and set(first) <= set(parameter_names(fn)):
        fix = f"{fix}; keyword arguments come third: {call}({step}, (), {{...}})"
    got = ", ".join(map(describe, passed))
    return f"`args` must be a tuple, got {got}. Pass all arguments of the step as one tuple: {fix}."


def _unknown_keywords(
    call: str, fn: Callable[..., Any], args: Sequence[Any], unknown: Mapping[str, Any]
) -> str:
    """Returns the message for keyword arguments that a method does not have."""
    step, names = name_of(fn), ", ".join(map(repr, unknown))
    parameters = parameter_names(fn)
    text = f"{call} does not have an argument {names}."
    if "options" in unknown:
        return f"{text} {advice()['mirror', 'RunOptions']} Omit it: {call}({step}, args)."
    (first, *_) = unknown
    nearest = nearest_name(first, ["fn", "args", "kwargs", "donate_argnums"])
    if nearest is not None and first not in parameters:
        return f"{text} Did you mean {nearest}=?"
    given = [n if n.isidentifier() else "x" for n in argument_names(fn, len(args))]
    written = ", ".join([*given, *unknown])
    comma = "," if len(given) + len(unknown) == 1 else ""
    return (
        f"{text} Pass all arguments of the step as one tuple, {call}({step}, ({written}{comma})), "
        f"or its keyword arguments as a dict: {call}({step}, args, {{{first!r}: {first}}})."
    )


def canonical_argnums(donate_argnums: Any) -> tuple[int, ...]:
    """Returns the positions of donated arguments as a tuple.

    Raises:
        TypeError: If `donate_argnums` is not a sequence.
    """
    if isinstance(donate_argnums, list | range):
        return tuple(donate_argnums)
    fix = "For example: strategy.run(step, (state, batch), donate_argnums=0)."
    raise TypeError(expected("donate_argnums", donate_argnums, "an int or a sequence of ints", fix))


def require_no_tracers(fn: Callable[..., Any], tree: Any) -> None:
    """Rejects arguments that are tracers.

    Raises:
        RuntimeError: If a leaf is a tracer.
    """
    for i, leaf in enumerate(jax.tree.leaves(tree)):
        if isinstance(leaf, jax.core.Tracer):
            raise RuntimeError(inside_jit_message(name_of(fn), leaf_names(fn, tree)[i]))


def inside_jit_message(step: str, tracer: str | None = None) -> str:
    """Returns the error message for a call of `run` inside a JAX transformation."""
    what = "" if tracer is None else f": {tracer} is a tracer"
    return (
        f"strategy.run({step}) was called inside jax.jit, grad or vmap{what}. Call it from regular "
        "Python code: strategy.run compiles the step itself. Call jax.grad in the step."
    )


_get_shape = operator.attrgetter("shape")


class Call(NamedTuple):
    """One call of `run`, with its arguments classified.

    Attributes:
        fn: The step function.
        tree: Positional and keyword arguments, with placeholders for the nnx objects.
        layout: Classification of the leaves.
        leaves: Leaves of the arguments, static ones included.
        objects: The nnx objects, captured variables last.
        record: Record of the objects; `None` without objects.
        state: Leaves of the objects.
        donate_argnums: Positions of donated arguments.
        captured: Variables that the step uses without receiving them as arguments.
    """

    fn: StepFunction
    tree: tuple[tuple[Any, ...], dict[str, Any]]
    layout: Layout
    leaves: list[Any]
    objects: list[Any]
    record: Record | None
    state: list[Any]
    donate_argnums: tuple[int, ...]
    captured: Sequence[Variable]

    @property
    def structure(self) -> Structure | None:
        """The structure of the nnx objects; `None` without objects."""
        return self.record.structure if self.record is not None else None

    @property
    def is_own(self) -> list[bool]:
        """For each input of the program, whether it is per-replica."""
        own, structure = set(self.layout.per_replica), self.structure
        held = structure.is_own if structure is not None else []
        return [*held, *(i in own for i in range(len(self.layout.dynamic)))]

    @property
    def key(self) -> tuple[Any, ...]:
        """The key of this call's program in the cache of its function."""
        layout, leaves, record = self.layout, self.leaves, self.record
        return (
            layout,
            layout.static_key(leaves) if layout.static else (),
            tuple(map(_get_shape, map(leaves.__getitem__, layout.rows))) if layout.rows else (),
            record.structure if record is not None else None,
            self.donate_argnums,
        )

    @property
    def object_names(self) -> list[str]:
        """The user's names for the nnx objects."""
        return object_names(self.fn, self.tree, self.objects, self.captured)

    @property
    def leaf_names(self) -> list[str]:
        """The user's names for the leaves that are arrays or numbers."""
        names = leaf_names(self.fn, self.tree)
        return [names[i] for i in self.layout.dynamic]

    @property
    def slots(self) -> list[tuple[VariableSlot, str]]:
        """The slot of each leaf of the nnx objects, with the user's name for it."""
        structure = self.structure
        if structure is None:
            return []
        return list(zip(structure.leaf_slots, structure.names(self.object_names), strict=True))

    @property
    def input_names(self) -> list[str]:
        """The user's names for all inputs of the program: leaves of objects, then other leaves."""
        return [*[name for _, name in self.slots], *self.leaf_names]

    def donated(self) -> list[int]:
        """Returns the positions of the leaves that the user donates.

        Raises:
            ValueError: If `donate_argnums` contains anything but indices of arguments.
        """
        num_args = len(self.tree[0])
        for argnum in self.donate_argnums:
            if not (isinstance(argnum, int) and 0 <= argnum < num_args):
                valid = {0: "", 1: " (valid index: 0)"}.get(
                    num_args, f" (valid indices: 0 to {num_args - 1})"
                )
                raise ValueError(
                    f"donate_argnums={self.donate_argnums} is out of range: {name_of(self.fn)} was "
                    f"called with {counted(num_args, 'positional argument')}{valid}."
                )
        paths = jax.tree_util.tree_flatten_with_path(self.tree)[0]
        donated = [
            i for i, (p, _) in enumerate(paths) if p[0].idx == 0 and p[1].idx in self.donate_argnums
        ]
        return [self.layout.dynamic.index(i) for i in donated if i in self.layout.dynamic]
