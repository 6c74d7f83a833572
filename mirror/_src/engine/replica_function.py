"""`ReplicaFunction`: the user's function as a function of flat leaves; and its trace."""

from collections.abc import Callable, MutableMapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.extend.core import ClosedJaxpr

from mirror._src.base.errors import describe
from mirror._src.base.foreign_arrays import to_array
from mirror._src.base.naming import keys, name_of
from mirror._src.base.types import ARRAY_LIKE, Array, StepFunction, is_float0, is_numeric, long_fix
from mirror._src.devices.transfer import UnstackedArrays, require_fits
from mirror._src.engine.arguments import (
    Call,
    equinox_positions,
    is_number,
    ref_message,
    require_no_constants,
)
from mirror._src.engine.closures import (
    Attributes,
    Captures,
    attributes_of,
    keeps_keras,
    require_nothing_bound,
    require_nothing_captured,
    unwritten,
)
from mirror._src.engine.failed_trace import explain_failed_trace
from mirror._src.engine.mesh import require_no_mapping
from mirror._src.engine.nnx.structure import ReplicaCopies, is_object
from mirror._src.engine.replica_context import ReplicaGroup, replica
from mirror._src.engine.variable import Variable
from mirror._src.jaxprs.equations import arrays_in
from mirror._src.jaxprs.marks import Mark
from mirror._src.jaxprs.trace import abstract, abstract_row, context_token, trace, uncached

Types = tuple[jax.ShapeDtypeStruct, ...]


class ReplicaFunction:
    """The user's function as a function of flat leaves, for one replica.

    Holds everything that a program needs from a call except the values of its arrays.

    Args:
        group: The strategy.
        axis_name: Name of the replica axis.
        call: A call of the function.
        avals: Shapes and dtypes of the leaves of the nnx objects, then of the other leaves.

    Attributes:
        new_captures: Captured variables that the trace found.
        per_replica: For each leaf, whether it is per-replica.
        attribute_changes: Static attributes of objects that the trace set: path, name and value.
        keys: Positions, among the leaves of the objects, of the PRNG keys.
        out_tree: Structure of the result.
        out_names: The user's names for the results that are arrays.
        static_results: The other results, by position of the leaf.
        changed_in_place: Paths in the arguments where the step stored another leaf.
        attributes: The attributes of static arguments after the trace; see `attributes_of`.
    """

    def __init__(
        self, group: ReplicaGroup, axis_name: str, call: Call, avals: Sequence[jax.ShapeDtypeStruct]
    ) -> None:
        self._fn: StepFunction | None = call.fn
        self.name = name_of(call.fn)
        self.group = group
        self.axis_name = axis_name
        self.avals = avals
        self.structure = call.structure
        self.object_names = call.object_names
        self.num_state = len(call.state)
        self.num_objects = len(call.objects)
        self.layout = call.layout
        self._captured = list(call.captured)
        self.new_captures: list[Variable] = []
        self.per_replica = call.is_own
        self.statics = call.layout.statics(call.leaves)
        self.attribute_changes: list[tuple[Any, str, Any]] = []
        self.keys: list[int] = []
        self.out_tree: Any = None
        self.out_names: list[str] = []
        self.static_results: dict[int, Any] = {}
        self.changed_in_place: frozenset[Any] = frozenset()
        self.attributes: Attributes = {}

    @property
    def flat(self) -> Callable[..., list[Array]]:
        """The function to trace, which has the name of the user's function.

        Its outputs are the results, the objects' leaves after the step, and the per-replica PRNG
        keys that the replica received.
        """

        def flat(*leaves: Any) -> list[Array]:
            return self._run(leaves)

        flat.__name__ = flat.__qualname__ = self.name
        flat.__wrapped__ = self._fn  # type: ignore[attr-defined]
        return uncached(flat) if Variable.in_use else flat

    def _run(self, leaves: Sequence[Any]) -> list[Array]:
        state, rest = leaves[: self.num_state], leaves[self.num_state :]
        copies = None
        if self.structure is not None:
            copies = ReplicaCopies(self.structure, state, self.axis_name)
        objects = copies.objects if copies is not None else ()
        captures = self._captures(objects)
        self.new_captures = captures.discovered
        with replica(self.group, self.axis_name, captures):
            args, kwargs = self.layout.rebuild(rest, self.statics, objects)
            assert self._fn is not None, "the step has been traced"
            before = _leaves_of(args, kwargs).items()
            results = self._results(self._fn(*args, **kwargs))
            self.changed_in_place = frozenset(dict(_leaves_of(args, kwargs).items() - before))
            if copies is None:
                return results
            after = copies.collect(self.name, self.object_names)
            self.attribute_changes = copies.attribute_changes()
        self.keys = list(copies.keys)
        return [*results, *after, *(folded for _, folded in copies.keys.values())]

    CALLER = _run.__code__  # In a traceback, the frames after this one belong to the step.

    def release(self) -> None:
        """Drops the function, which is not needed after the trace and may be a user's last one."""
        self._fn = None

    def is_donated(self, i: int) -> bool:
        """Whether leaf `i` of the objects is donated; leaves of captured variables are not."""
        assert self.structure is not None
        return self.structure.leaf_slots[i].path[0] < self.num_objects - len(self._captured)

    def _captures(self, objects: Sequence[Any]) -> Captures:
        stand_ins = objects[len(objects) - len(self._captured) :]
        graph = nnx.iter_graph(objects) if Variable.in_use else ()
        own = [node for _, node in graph if isinstance(node, Variable)]
        return Captures(list(zip(self._captured, stand_ins, strict=True)), own)

    def _results(self, out: Any) -> list[Array]:
        paths, self.out_tree = jax.tree_util.tree_flatten_with_path(out, is_leaf=is_object)
        in_equinox = equinox_positions(self.out_tree)
        results, self.out_names, self.static_results = [], [], {}
        for i, (path, leaf) in enumerate(paths):
            name = "result" + keys(path)
            if is_object(leaf):
                fix = "Return arrays"
                if isinstance(leaf, nnx.Variable):  # of gradients, or of nnx.state(model)
                    fix += ", from an nnx.State by nnx.to_pure_dict(state)"
                raise TypeError(
                    f"{self.name} returned the nnx object {type(leaf).__name__} as {name}. {fix}; "
                    "objects that are arguments are updated in place."
                )
            if self._is_static(leaf, i in in_equinox):
                self.static_results[i] = leaf
                continue
            _require_array(self.name, name, leaf)
            require_fits(f"{name} of {self.name}", leaf)
            self.out_names.append(name)
            results.append(jnp.asarray(to_array(name, leaf)))
        return results

    def _is_static(self, leaf: Any, in_equinox: bool) -> bool:
        """Whether a leaf of the result is not an array and is returned as it is."""
        if isinstance(leaf, bool):
            return True
        if isinstance(leaf, ARRAY_LIKE):
            return in_equinox and is_number(type(leaf))
        return any(leaf is s or (type(leaf) is type(s) and leaf == s) for s in self.statics)


def _leaves_of(args: Any, kwargs: Any) -> dict[Any, int]:
    """Returns the identity of each leaf in the containers among the arguments, by its path."""
    try:
        leaves, _ = jax.tree_util.tree_flatten_with_path((args, kwargs), is_leaf=is_object)
    except Exception:  # the user's own containers, which the step may have changed
        return {}
    return {path: id(leaf) for path, leaf in leaves}


def _require_array(step_name: str, name: str, leaf: Any) -> None:
    if is_float0(leaf):
        raise TypeError(
            f"{step_name} returned {describe(leaf)} as {name}: JAX's gradient of an integer, which "
            "has no values. Take gradients with respect to floats only."
        )
    if not isinstance(leaf, ARRAY_LIKE):
        raise TypeError(
            f"{step_name} returned {describe(leaf)} as {name}. A step may return arrays, numbers, "
            f"None and its own static arguments, in any nesting of containers."
            f"{' Return a list instead of a set.' * isinstance(leaf, set | frozenset)}"
        )
    if isinstance(leaf, np.ndarray | np.generic) and not is_numeric(leaf.dtype):
        raise TypeError(
            f"{step_name} returned {describe(np.asarray(leaf))} as {name}, a dtype that JAX does "
            f"not support. {long_fix(leaf, 'Return numbers.')}"
        )


def types_of(call: Call, leaves: Sequence[Any]) -> Types:
    """Returns the types of the state and of the other leaves on one replica, once placed."""
    inputs = zip([*call.state, *leaves], call.is_own, strict=True)
    return tuple([_row(leaf) if is_own else abstract(leaf) for leaf, is_own in inputs])


def _row(stacked: Any) -> jax.ShapeDtypeStruct:
    """Returns one replica's shape, dtype and weak type, which are the same on all replicas."""
    if isinstance(stacked, UnstackedArrays):
        return jax.ShapeDtypeStruct(stacked.shapes[0], stacked.dtype)
    return abstract_row(stacked)


class VariablesFound(Exception):
    """Raised if a trace finds captured variables; the step must be traced again with them."""

    def __init__(self, variables: Sequence[Variable]) -> None:
        super().__init__(f"{len(variables)} variables")
        self.variables = variables


class TracedStep(NamedTuple):
    """A step and its replica program; not yet proved.

    Attributes:
        function: The step for one replica.
        jaxpr: Its trace. See `ReplicaFunction.flat` for the outputs.
        context: The trace context; see `context_token`.
    """

    function: ReplicaFunction
    jaxpr: ClosedJaxpr
    context: object

    @property
    def avals(self) -> Sequence[Any]:
        """Shapes and dtypes of the outputs."""
        return [var.aval for var in self.jaxpr.jaxpr.outvars]

    @property
    def given(self) -> Sequence[object]:
        """The variables of the jaxpr that hold the objects' leaves before the step."""
        return self.jaxpr.jaxpr.invars[: self.function.num_state]

    def split(
        self, marks: Sequence[Mark]
    ) -> tuple[Sequence[Mark], Sequence[Mark], dict[int, Mark]]:
        """Splits the marks of the outputs: results, leaves of the objects, and keys.

        The marks of the keys are returned by position among the leaves of the objects.
        """
        start = len(self.function.out_names)
        end = start + self.function.num_state
        keys = zip(self.function.keys, marks[end:], strict=True)
        return marks[:start], marks[start:end], dict(keys)


def trace_step(
    group: ReplicaGroup,
    axis_name: str,
    call: Call,
    types: Types,
    known: MutableMapping[Any, TracedStep],
) -> TracedStep:
    """Returns the trace of a call for the types of its inputs, made once.

    Args:
        group: The strategy.
        axis_name: Name of the replica axis.
        call: The call.
        types: Types of its inputs.
        known: The traces of earlier calls of the function; a new one is added.

    Raises:
        VariablesFound: If the step uses variables that are not known yet.
    """
    context = context_token()
    key = (call.key[:-1], types, context)  # a trace does not depend on what is donated
    if (traced := known.get(key)) is not None:
        return traced
    require_no_constants(call.fn, call.tree, call.layout, call.leaves)
    require_nothing_bound(call.fn)
    function = ReplicaFunction(group, axis_name, call, types)
    before = attributes_of(call.layout.static, call.leaves)
    try:
        with keeps_keras(call.fn):
            jaxpr = trace(function.flat, types, group.num_replicas_in_sync, axis_name)
    except Exception as error:
        explain_failed_trace(call, ReplicaFunction.CALLER, error, axis_name)
        raise
    require_no_mapping(call.fn, jaxpr)
    if any(hasattr(var.aval, "inner_aval") for var in jaxpr.jaxpr.constvars):
        raise TypeError(ref_message(f"A value that {name_of(call.fn)} captures"))
    if function.new_captures:
        raise VariablesFound(function.new_captures)
    function.release()
    function.attributes = unwritten(before, attributes_of(before, call.leaves))
    require_nothing_captured(call, list(arrays_in(jaxpr)))
    traced = known[key] = TracedStep(function, jaxpr, context)
    return traced
