"""`Variable`: what a `tf.Variable` is in TensorFlow, as an `nnx.Variable`."""

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, Literal, TypeAlias, cast, get_args

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.errors import TraceContextError
from jax.extend.core import set_current_trace, take_current_trace

from mirror._errors import ReplicaDivergenceError, describe
from mirror._types import Array, ArrayLike, PyTree
from mirror.context import ReplicaContext, current_frame
from mirror.cross_device_ops import ReductionToOneDevice
from mirror.devices.backend import names
from mirror.devices.replicas import ReplicaDevices, place_like
from mirror.parts import Parts
from mirror.values import PerReplica, held_by, is_per_replica, per_replica

Synchronization: TypeAlias = Literal["auto", "on_write", "on_read"]
Aggregation: TypeAlias = Literal["none", "sum", "mean", "only_first_replica"]

_ON_HOST = ReductionToOneDevice()
_MISSING: Any = object()
_slot: Any = vars(nnx.Variable).get("_raw_value")


def _held(variable: nnx.Variable[Any]) -> Any:
    """What the variable itself holds, also where another stands for it."""
    return variable.get_raw_value() if _slot is None else _slot.__get__(variable)


class Variable(nnx.Variable[Any]):
    """A value that a step changes: in a module, or read and assigned from outside its arguments.

    It is read as every `nnx.Variable`, `v[...]`; operators work on it. Inside a step it need not be
    passed: a step finds it while it is traced. `assign` and its kin write it, aggregated:

    - Inside a step each replica brings a value, and `aggregation` says what becomes of them:
      `"sum"`, `"mean"`, or `"only_first_replica"`, replica 0's; a number counts once for each
      replica. With `"none"` the value must be the same on all replicas already.
    - Outside, the value is written once, to all copies, whatever the aggregation.

    With `synchronization="on_read"` each replica has a value of its own, which steps read and write
    without an exchange; read outside, they are aggregated. It is for counts and metrics.

    Args:
        value: an array or number, or a function without arguments that makes it, called once.
        name: what messages call it.
        trainable: a mark for filters, `wrt=lambda path, v: getattr(v, "trainable", False)`; `None`
            is True, unless it is `"on_read"`.
        dtype: of the value; `None`: its own.
        synchronization: `"on_read"`, or `"on_write"`, which `"auto"` is.
        aggregation: see above. An integer sum that is assigned from outside to an `"on_read"`
            variable stays exact: the remainder goes to replica 0.
        metadata: more, as `nnx.Variable` takes it.

    Raises:
        ValueError: no value; an unknown synchronization or aggregation; a mean of what is no float,
            a sum of booleans.
        TypeError: an argument that only `tf.Variable` has.
        RuntimeError: created inside a step.

    >>> strategy = mirror.MirroredStrategy(["/cpu:0", "/cpu:1"])
    >>> with strategy.scope():
    ...     total = Variable(0.0, name="total", aggregation="sum")
    >>> def step(x):
    ...     total.assign_add(x)
    >>> strategy.run(step, (mirror.PerReplica([1.0, 2.0]),))
    >>> float(total), float(total.assign(10.0).assign_sub(1.0))
    (3.0, 9.0)
    >>> total.set_value(jnp.float32(5.0))
    >>> float(total.get_value())
    5.0
    """

    in_use: ClassVar[bool] = False
    """Whether there may be one in this process: traces that met none need no care."""

    def __init__(
        self,
        value: ArrayLike | Callable[[], ArrayLike],
        *,
        name: str | None = None,
        trainable: bool | None = None,
        dtype: Any = None,
        synchronization: Synchronization = "auto",
        aggregation: Aggregation = "none",
        **metadata: Any,
    ) -> None:
        Variable.in_use = True
        _refuse_tensorflows(metadata)
        frame = current_frame()
        if frame is not None and frame.replica is not None:
            raise RuntimeError(
                f"Variable {name or ''!r} was created inside a step that {frame.strategy} runs, "
                "which would make it anew each time. Create it before, and read and assign it in "
                "the step."
            )
        synchronization = _one_of(synchronization, Synchronization, "synchronization", name)
        aggregation = _one_of(aggregation or "none", Aggregation, "aggregation", name)
        array = _initial(value, dtype, name)
        _require_meaning(array, aggregation, name)
        on_read = synchronization == "on_read"
        held: Any = array
        if on_read and frame is not None:
            held = _spread([array] * frame.strategy.num_replicas_in_sync, frame.strategy._replicas)
        super().__init__(
            held,
            name=name,
            trainable=not on_read if trainable is None else bool(trainable),
            synchronization="on_read" if on_read else "on_write",
            aggregation=aggregation,
            **metadata,
        )

    def assign(self, value: ArrayLike) -> "Variable":
        """Sets the value.

        Args:
            value: of the variable's shape and dtype; Python numbers are converted.

        Returns:
            The variable.

        Raises:
            ValueError: another shape or dtype; an `"on_read"` variable without an aggregation,
                outside a step.
            TypeError: no array and no number, or a fraction for an integer variable.
            ReplicaDivergenceError: a `PerReplica`, outside a step; from `run`, a per-replica value
                where the aggregation is `"none"`.
        """
        return self._update(value, _replaced)

    def assign_add(self, value: ArrayLike) -> "Variable":
        """Adds to the value; see `assign`. Outside a step it is not for `"on_read"` sums."""
        return self._update(value, lambda old, new: old + new, "assign_add")

    def assign_sub(self, value: ArrayLike) -> "Variable":
        """Subtracts from the value; see `assign_add`."""
        return self._update(value, lambda old, new: old - new, "assign_sub")

    def _update(
        self, value: Any, change: Callable[[Any, Any], Any], method: str = "assign"
    ) -> "Variable":
        new = self._converted(value)
        context = _replica()
        if context is not None:
            target = _target(self)
            if not self.is_on_read:
                new = self._converted(self._aggregated(context, new))
            self._write(target.set_raw_value, change(target.get_raw_value(), new))
        elif self.is_on_read:
            self._update_copies(new, change, method)
        else:
            old = self.get_raw_value()
            self._write(self.set_raw_value, place_like(change(old, place_like(new, old)), old))
        return self

    def _write(self, method: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """Writes, unless what is written would be lost when an inner transformation ends."""
        try:
            method(*args, **kwargs)
        except TraceContextError as error:
            raise RuntimeError(
                f"{self.described} was assigned inside jax.jit, grad, vmap, scan or cond, where "
                "the value would be lost. Return the value from there, and assign it outside."
            ) from error

    def _aggregated(self, context: ReplicaContext, value: Array) -> Array:
        match self.aggregation:
            case "sum" | "mean":
                return context.all_reduce(self.aggregation, value)
            case "only_first_replica":
                mine = value.astype(jnp.int32) if value.dtype == jnp.bool_ else value
                first = context.replica_id_in_sync_group == 0
                found = context.all_reduce("sum", jnp.where(first, mine, jnp.zeros_like(mine)))
                return found.astype(value.dtype)
        return value

    def _update_copies(self, new: Array, change: Callable[[Any, Any], Any], method: str) -> None:
        """Writes an `"on_read"` variable outside a step, so that reading gives what was meant."""
        held = self.get_raw_value()
        if not is_per_replica(held):
            self._write(self.set_raw_value, change(held, new))
            return
        if self.aggregation == "none":
            raise ValueError(
                f"{method} of {self.described}, which is 'on_read' without an aggregation, outside "
                "a step: which replica's value is meant? Create it with aggregation='sum', 'mean' "
                "or 'only_first_replica'."
            )
        if self.aggregation == "sum" and method != "assign":
            raise ValueError(
                f"{method} of {self.described}, which is 'on_read' with aggregation='sum', outside "
                "a step: it would count once for each replica. Assign the sum: "
                "v.assign(v[...] + x)."
            )
        rows = [np.asarray(row) for row in held.values]
        count, value = len(rows), np.asarray(new)
        if self.aggregation == "sum":
            changed = _shares(value, count)
        else:
            changed = [np.asarray(change(row, value)).astype(row.dtype) for row in rows]
        self.set_raw_value(per_replica(_rows_like(changed, held)))

    @property
    def is_on_read(self) -> bool:
        """Whether each replica has a value of its own."""
        return self.get_metadata("synchronization") == "on_read"

    @property
    def described(self) -> str:
        """What messages call it."""
        return f"variable {self.get_metadata('name') or 'without a name'!r}"

    def _converted(self, value: Any) -> Any:
        """The value in the variable's shape and dtype.

        Raises:
            ValueError, TypeError, ReplicaDivergenceError: it cannot be; see `assign`.
        """
        if isinstance(value, nnx.Variable):
            value = value.get_value()
        if is_per_replica(value):
            raise ReplicaDivergenceError(
                f"{value!r} was assigned to {self.described}, which is the same on all replicas. "
                "Reduce it first, strategy.reduce('mean', x), or assign inside the step."
            )
        shape, dtype = self._row_shape, self.dtype
        kinds = (jax.Array, np.ndarray, np.generic, bool, int, float, complex, list, tuple)
        if not isinstance(value, kinds):
            raise TypeError(f"{describe(value)} was assigned to {self.described}: it is no array.")
        exact = isinstance(value, jax.Array | np.ndarray | np.generic)
        array = jnp.asarray(value)
        weak = getattr(array, "weak_type", False) or not exact
        if weak and not jnp.can_cast(array.dtype, dtype, "same_kind"):
            raise TypeError(
                f"{describe(value)} was assigned to {self.described} of {dtype}, which cannot hold "
                f"it. Convert it: jnp.asarray(x).astype({str(dtype)!r})."
            )
        if not weak and array.dtype != dtype:
            raise ValueError(
                f"{describe(array)} was assigned to {self.described} of {dtype}. Convert it: "
                f"x.astype({str(dtype)!r})."
            )
        if array.shape != shape:
            raise ValueError(
                f"{describe(array)} was assigned to {self.described} of shape {shape}. Pass an "
                "array of that shape."
            )
        return array.astype(dtype)

    @property
    def _row_shape(self) -> tuple[int, ...]:
        return _shape_of(self.get_raw_value())

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the value."""
        return self._row_shape

    @property
    def dtype(self) -> Any:
        """The dtype of the value."""
        return _dtype_of(self.get_raw_value())

    # JAX and flax take a variable apart by this name (flax 0.12.8 to 0.12.12). In a step they must
    # find what stands for it there: `jnp.sum(v)` would read the value of this moment for ever.
    _raw_value: Any = property(
        lambda self: _held(_target(self)), lambda self, value: _slot.__set__(self, value)
    )

    def get_value(self, *, index: Any = _MISSING) -> Any:
        """The value: inside a step this replica's; outside the aggregated one, if it is on_read."""
        target = _target(self)
        if target is not self:
            return target.get_value(index=index)
        held = self.get_raw_value()
        if not is_per_replica(held):
            return super().get_value() if index is _MISSING else super().get_value(index=index)
        match self.aggregation:
            case "none":
                raise ValueError(
                    f"{self.described} is 'on_read' without an aggregation: outside a step its "
                    "values have no one value. Look at strategy.local_results(v), or create it "
                    "with aggregation='sum', 'mean' or 'only_first_replica'."
                )
            case "only_first_replica":
                value = jnp.asarray(np.asarray(held.values[0]))
            case op:
                value = _ON_HOST.reduce(op, held)
        return value if index is _MISSING or index is ... else value[index]

    def set_value(self, value: Any, *, index: Any = _MISSING) -> None:
        """Writes without aggregating: inside a step this replica's value; see `assign`."""
        target = _target(self)
        if target is not self:
            target.set_value(value, index=index)
        elif _replica() is None and (is_per_replica(value) or is_per_replica(self.get_raw_value())):
            whole = index is _MISSING or index is ...
            self.assign(value if whole else self.get_value().at[index].set(value))
        else:
            where = {} if index is _MISSING else {"index": index}
            self._write(super().set_value, value, **where)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # of the variable itself: `copy.deepcopy` asks for some
            raise AttributeError(name)
        metadata = object.__getattribute__(self, "_var_metadata")
        return metadata[name] if name in metadata else getattr(self.get_value(), name)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.get_value(), dtype=dtype, copy=copy)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Variable":
        twin = self.copy(copy.deepcopy(self.get_raw_value(), memo))
        memo[id(self)] = twin
        return cast(Variable, twin)

    def __nnx_repr__(self) -> Iterator[Any]:
        return nnx.Variable.__nnx_repr__(self._shown)

    def __treescope_repr__(self, path: Any, subtree_renderer: Any) -> Any:
        return nnx.Variable.__treescope_repr__(self._shown, path, subtree_renderer)

    @property
    def _shown(self) -> nnx.Variable[Any]:
        """What is shown of it: each replica's value, where those have no one value."""
        held = self.get_raw_value()
        if is_per_replica(held) and not (self.aggregation != "none" and _are_arrays(held)):
            return nnx.Variable.from_metadata(held, self.get_metadata())
        return self

    def __bool__(self) -> bool:
        return bool(self.get_value())

    def __ne__(self, other: Any) -> Any:
        return self.get_value() != other

    def __lt__(self, other: Any) -> Any:
        return self.get_value() < other

    def __le__(self, other: Any) -> Any:
        return self.get_value() <= other

    def __gt__(self, other: Any) -> Any:
        return self.get_value() > other

    def __ge__(self, other: Any) -> Any:
        return self.get_value() >= other


def _are_arrays(value: PerReplica) -> bool:
    """Whether it holds arrays: flax fills trees that it shows with something else."""
    return isinstance(held_by(value), jax.Array | np.ndarray | Parts)


def _shape_of(held: Any) -> tuple[int, ...]:
    return held.shapes[0] if is_per_replica(held) else jnp.shape(held)


def _dtype_of(held: Any) -> Any:
    return held.dtype if hasattr(held, "dtype") else jnp.result_type(held)


def _replaced(_: Any, new: Any) -> Any:
    return new


class Captures:
    """The variables that a step reads or writes without being passed them.

    Args:
        known: those that are known already, each with what stands for it in this trace.
        own: the variables of this trace, which stand for themselves.
    """

    def __init__(self, known: Sequence[tuple[Variable, Variable]], own: Sequence[Any]) -> None:
        self._stand_ins = {id(variable): clone for variable, clone in known}
        self._own = set(map(id, own))
        with take_current_trace() as trace:
            self._trace = trace
        self.found: list[Variable] = []

    def stand_in(self, variable: Variable) -> Variable:
        """What stands for a variable in the trace under way."""
        held = _held(variable)
        traced = isinstance(held, jax.core.Tracer)
        if traced or id(variable) in self._own or getattr(variable, "_can_update", False):
            return variable  # it was made in the step, as `jax.tree.map(f, v)` does
        known = self._stand_ins.get(id(variable))
        if known is None:  # met for the first time: the step will be traced again, with it
            self.found.append(variable)
            with set_current_trace(self._trace):  # the step's: it may be met in an inner one first
                value = jnp.zeros(_shape_of(held), _dtype_of(held))
                known = cast(Variable, variable.copy(value))
            self._stand_ins[id(variable)] = known
            self._own.add(id(known))
        return known


def _replica() -> ReplicaContext | None:
    frame = current_frame()
    return None if frame is None else frame.replica


def _target(variable: Variable) -> Variable:
    """What stands for a variable where the caller is."""
    context = _replica()
    captures = None if context is None else context.captures
    return variable if captures is None else captures.stand_in(variable)


def is_own(holder: object) -> bool:
    """Whether it is a variable of which each replica has a value of its own."""
    return isinstance(holder, Variable) and holder.is_on_read


def collapse(objects: Sequence[Any]) -> None:
    """Gives the variables of which each replica has a value one value, as it is read outside."""
    for _, node in nnx.iter_graph(tuple(objects)):
        if is_own(node):
            held = node.get_raw_value()
            none = node.aggregation == "none" and is_per_replica(held)
            node.set_raw_value(jnp.asarray(np.asarray(held.values[0]) if none else node[...]))


def unwrapped(tree: PyTree) -> PyTree:
    """The tree with what its variables hold in their place: a `PerReplica`, if they are on_read."""
    return jax.tree.map(
        lambda leaf: leaf.get_raw_value() if isinstance(leaf, nnx.Variable) else leaf,
        tree,
        is_leaf=lambda leaf: isinstance(leaf, nnx.Variable) or is_per_replica(leaf),
    )


def spread_over(variable: Variable, replicas: ReplicaDevices) -> Any:
    """What holds an `"on_read"` variable's values on these replicas.

    One that has had one value only until now reads the same afterwards.

    Raises:
        ValueError: it has values for another number of replicas.
    """
    held = variable.get_raw_value()
    if not is_per_replica(held):
        array = np.asarray(held)
        shared = variable.aggregation == "sum"
        rows = _shares(array, len(replicas)) if shared else [array] * len(replicas)
        return held_by(_spread(rows, replicas))
    if held.num_replicas != len(replicas):
        raise ValueError(
            f"{variable.described} has values for {held.num_replicas} replicas and was given to a "
            f"strategy of {len(replicas)}, {names(replicas.devices)}. Create it in that strategy's "
            "scope."
        )
    stacked = held_by(held)
    there = isinstance(stacked, jax.Array) and stacked.sharding == replicas.stacked
    if there or (isinstance(stacked, Parts) and replicas.are_mixed):
        return stacked
    return replicas.stack(np.stack([np.asarray(row) for row in held.values]))


def _shares(value: np.ndarray, count: int) -> list[np.ndarray]:
    """So many arrays that add up to one, exactly if they are integers."""
    if not jnp.issubdtype(value.dtype, jnp.integer):
        return [(value / count).astype(value.dtype)] * count
    share = np.asarray(value // count, value.dtype)
    return [np.asarray(value - share * (count - 1), value.dtype), *[share] * (count - 1)]


def _spread(rows: Sequence[Any], replicas: ReplicaDevices) -> PerReplica:
    return per_replica(replicas.stack(np.stack([np.asarray(row) for row in rows])))


def _rows_like(rows: Sequence[np.ndarray], like: PerReplica) -> Any:
    held = held_by(like)
    if isinstance(held, Parts):
        return Parts([place_like(r, part) for r, part in zip(rows, held.arrays, strict=True)])
    return place_like(np.stack(rows), held)


def _initial(value: Any, dtype: Any, name: str | None) -> Array:
    if callable(value) and not isinstance(value, jax.Array | np.ndarray | nnx.Variable):
        value = value()
    if isinstance(value, nnx.Variable):
        value = value.get_value()
    if value is None or is_per_replica(value) or isinstance(value, str):
        raise ValueError(
            f"Variable {name or ''!r} starts with {describe(value)}. Pass an array or a number, "
            "the same for all replicas."
        )
    array = jnp.asarray(value, dtype)
    # A weak type would go with the first assignment, and the step be compiled anew.
    return array.astype(array.dtype) if getattr(array, "weak_type", False) else array


_TENSORFLOWS = {
    *("shape", "validate_shape", "caching_device", "variable_def", "import_scope", "constraint"),
    "experimental_enable_variable_lifting",
}


def _refuse_tensorflows(metadata: dict[str, Any]) -> None:
    for name in metadata:
        if name in _TENSORFLOWS:
            raise TypeError(
                f"Variable({name}=...) is TensorFlow's and has no counterpart here. Leave it out; "
                "a variable keeps the shape and the dtype that it is created with."
            )


def _one_of(value: Any, choices: Any, what: str, name: str | None) -> Any:
    found = value.lower() if isinstance(value, str) else value
    if found not in get_args(choices):
        known = ", ".join(map(repr, get_args(choices)))
        raise ValueError(f"{what}={value!r} of variable {name or ''!r} is none of {known}.")
    return found


def _require_meaning(array: Array, aggregation: Aggregation, name: str | None) -> None:
    mean_of_exact = aggregation == "mean" and not jnp.issubdtype(array.dtype, jnp.inexact)
    if mean_of_exact or (aggregation == "sum" and array.dtype == jnp.bool_):
        raise ValueError(
            f"aggregation={aggregation!r} of variable {name or ''!r} of {array.dtype}: the result "
            "has another dtype. Pass dtype='float32' for a mean, 'int32' for a count."
        )
