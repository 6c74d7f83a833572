"""`Variable`: an `nnx.Variable` with the interface of `tf.Variable`.

A variable that is `"on_read"` has one value per replica, which are aggregated when it is read.
"""

import contextlib
import copy
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.errors import TraceContextError

from mirror._src.base.errors import ReplicaDivergenceError, counted, describe
from mirror._src.base.public_names import set_module
from mirror._src.base.types import ARRAY_LIKE, Array, ArrayLike, PyTree
from mirror._src.base.unknown_names import advice, unknown_attribute
from mirror._src.devices.backend import names
from mirror._src.devices.replicas import ReplicaDevices
from mirror._src.devices.transfer import UnstackedArrays, place_like, require_fits
from mirror._src.engine.all_reduce import AllReduce, ReductionToOneDevice
from mirror._src.engine.per_replica import (
    held_by,
    is_per_replica,
    local_ids,
    per_replica,
    spans_processes,
)
from mirror._src.engine.reduce_op import ReduceOp, result_dtype, wrapped
from mirror._src.engine.replica_context import ReplicaContext, current_frame, current_replica
from mirror._src.engine.storage import (
    Aggregation,
    Synchronization,
    as_array,
    dtype_of,
    first_value,
    initial_value,
    label,
    one_of,
    read_value,
    rows_like,
    shape_of,
    shares,
    slot,
    store_per_replica,
)

_ON_HOST, _ACROSS_PROCESSES = ReductionToOneDevice(), AllReduce()
_MISSING: Any = object()
_TENSORFLOW_ARGUMENTS = {
    *("shape", "validate_shape", "caching_device", "variable_def", "import_scope", "constraint"),
    "experimental_enable_variable_lifting",
}


def _comparison(compare: Callable[[Any, Any], Any]) -> Any:
    return lambda self, other: compare(self.get_value(), other)


@set_module("mirror")
class Variable(nnx.Variable[Any]):
    """A value that a step can change, in a module or captured by the step.

    It is read like every `nnx.Variable`, with `v[...]` or an operator. A step need not receive it
    as an argument: tracing the step finds the variables that it uses. The assign methods write it:

    - Inside a step, every replica assigns a value, and `aggregation` combines them: `"sum"`,
      `"mean"`, or `"only_first_replica"`, the value of replica 0. A Python number counts once per
      replica. With `"none"`, the value must already be the same on all replicas.
    - Outside a step, the value is written to all copies; the aggregation does not matter.

    With `synchronization="on_read"`, every replica has its own value, which steps read and write
    without a collective. Outside a step, reading returns the aggregated value. Use it for counts
    and metrics.

    Args:
        value: Initial value: an array, a number, or a function without arguments that returns one.
        name: Name of the variable in messages.
        trainable: Metadata for filters such as
            `wrt=lambda path, v: getattr(v, "trainable", False)`. Defaults to True, and to False for
            `"on_read"` variables.
        dtype: Dtype of the variable. Defaults to the dtype of the initial value.
        synchronization: `"on_read"` or `"on_write"`. `"auto"` is `"on_write"`.
        aggregation: How the replicas' values are combined; see above. An integer sum that is
            assigned to an `"on_read"` variable outside a step stays exact: replica 0 stores the
            remainder.
        metadata: Further metadata of the `nnx.Variable`.

    Raises:
        ValueError: If `value` contains an integer of more than 32 bits while JAX has 64-bit types
            disabled, if `synchronization` or `aggregation` is unknown, or for a mean of integers or
            booleans, or a sum of booleans or small integers.
        TypeError: If `value` is neither an array nor a number, or an argument exists only in
            `tf.Variable`.
        RuntimeError: If the variable is created inside a step.

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
    """Whether this process has created a variable; if not, no step can capture one."""

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
        for argument in filter(_TENSORFLOW_ARGUMENTS.__contains__, metadata):
            raise TypeError(
                f"Variable({argument}=...) exists in TensorFlow only. Omit it; a variable keeps "
                "the shape and dtype that it is created with."
            )
        frame = current_frame()
        if frame is not None and frame.replica is not None:
            raise RuntimeError(
                f"Variable {repr(name) if name else '(unnamed)'} was created inside a step run by "
                f"{frame.strategy}, so every call would create a new one. Create it outside the "
                "step; read and assign it inside."
            )
        synchronization = one_of(synchronization, Synchronization, "synchronization", name)
        aggregation = one_of(aggregation or "none", Aggregation, "aggregation", name)
        array = initial_value(value, dtype, name)
        is_reduced = aggregation in ("mean", "sum")
        if is_reduced and result_dtype(ReduceOp(aggregation), array.dtype) != array.dtype:
            raise ValueError(
                f"aggregation={aggregation!r} does not preserve the dtype of {label(name)}, "
                f"{array.dtype}. Pass dtype='float32' for a mean, or dtype='int32' for a count."
            )
        on_read = synchronization == "on_read"
        stored: Any = array
        if on_read and frame is not None and frame.devices is not None:
            stored = store_per_replica([array] * len(frame.devices), frame.devices)
        super().__init__(
            stored,
            name=name,
            trainable=not on_read if trainable is None else bool(trainable),
            synchronization="on_read" if on_read else "on_write",
            aggregation=aggregation,
            **metadata,
        )

    def assign(self, value: ArrayLike) -> "Variable":
        """Sets the value.

        Args:
            value: Array with the variable's shape and dtype, or a Python number, which is
                converted.

        Returns:
            The variable.

        Raises:
            ValueError: If `value` has another shape or dtype, or an integer that does not fit 32
                bits. Outside a step, if the variable is `"on_read"` without an aggregation.
            TypeError: If `value` is neither an array nor a number, or is a float while the variable
                has an integer dtype.
            ReplicaDivergenceError: If `value` is a `PerReplica` outside a step. From `run`, if
                `value` is per-replica and the aggregation is `"none"`.
            RuntimeError: If called inside `jax.jit`, `grad`, `vmap`, `scan` or `cond`.
        """
        return self._update(value, lambda _, new: new)

    def assign_add(self, value: ArrayLike) -> "Variable":
        """Adds to the value; see `assign`. `"on_read"` sums support it only inside a step."""
        return self._update(value, lambda old, new: old + new, "assign_add")

    def assign_sub(self, value: ArrayLike) -> "Variable":
        """Subtracts from the value; see `assign_add`."""
        return self._update(value, lambda old, new: old - new, "assign_sub")

    def _update(
        self, value: Any, change: Callable[[Any, Any], Any], method: str = "assign"
    ) -> "Variable":
        new = self._converted(value)
        context = current_replica()
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

    def _converted(self, value: Any) -> Any:
        """Returns a value in the shape and dtype of this variable.

        Raises:
            ValueError, TypeError, ReplicaDivergenceError: If it cannot be converted; see
                `assign`.
        """
        if isinstance(value, nnx.Variable):
            value = value.get_value()
        if is_per_replica(value):
            raise ReplicaDivergenceError(
                f"Cannot assign {value!r} to {self.described}, which is the same on all replicas. "
                "Reduce it first, strategy.reduce('mean', x), or assign inside the step."
            )
        shape, dtype = self.shape, self.dtype
        if not isinstance(value, (*ARRAY_LIKE, list, tuple)):
            raise TypeError(
                f"Cannot assign {describe(value)} to {self.described}: expected an array or a "
                "number."
            )
        is_typed = isinstance(value, jax.Array | np.ndarray | np.generic)
        array = as_array(f"The new value of {self.described}", value)
        is_weak = getattr(array, "weak_type", False) or not is_typed
        if is_weak and not jnp.can_cast(array.dtype, dtype, "same_kind"):
            raise TypeError(
                f"Cannot assign {describe(value)} to {self.described}, which has dtype {dtype}. "
                f"Convert it: jnp.asarray(x).astype({str(dtype)!r})."
            )
        if not is_weak and array.dtype != dtype:
            raise ValueError(
                f"Cannot assign {describe(array)} to {self.described}, which has dtype {dtype}. "
                f"Convert it: x.astype({str(dtype)!r})."
            )
        if array.shape != shape:
            raise ValueError(
                f"Cannot assign {describe(array)} to {self.described}, which has shape {shape}. "
                "Pass an array of that shape."
            )
        return array.astype(dtype)

    def _write(self, method: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """Writes a value, unless the end of a nested transformation would discard it."""
        try:
            method(*args, **kwargs)
        except TraceContextError as error:
            raise RuntimeError(
                f"Cannot assign to {self.described} inside jax.jit, grad, vmap, scan or cond: the "
                "value would be lost. Return the value from the inner function and assign it "
                "outside."
            ) from error

    def _aggregated(self, context: ReplicaContext, value: Array) -> Array:
        match self.aggregation:
            case "sum" | "mean":
                return context.all_reduce(self.aggregation, value)
            case "only_first_replica":
                number = value.astype(jnp.int32) if value.dtype == jnp.bool_ else value
                is_first = context.replica_id_in_sync_group == 0
                first = jnp.where(is_first, number, jnp.zeros_like(number))
                total = context.all_reduce("sum", first)
                return total.astype(value.dtype)
        return value

    def _update_copies(self, new: Array, change: Callable[[Any, Any], Any], method: str) -> None:
        """Writes an `"on_read"` variable outside a step, so that reading returns the new value."""
        stored = self.get_raw_value()
        if not is_per_replica(stored):
            self._write(self.set_raw_value, change(stored, new))
            return
        if self.aggregation == "none":
            raise ValueError(
                f"Cannot {method} to {self.described} outside a step: it has "
                "synchronization='on_read' and no aggregation, so the target replica is ambiguous. "
                "Create it with aggregation='sum', 'mean' or 'only_first_replica'."
            )
        if self.aggregation == "sum" and method != "assign":
            raise ValueError(
                f"Cannot {method} to {self.described} outside a step: it has "
                "synchronization='on_read' and aggregation='sum', so the value would count once "
                "per replica. Assign the result instead: v.assign(v[...] + x)."
            )
        rows = [np.asarray(row) for row in stored.values]
        value = np.asarray(new)
        if self.aggregation == "sum":
            every_share = shares(value, stored.num_replicas)
            changed = [every_share[i] for i in local_ids(stored)]
        else:
            changed = [np.asarray(change(row, value)).astype(row.dtype) for row in rows]
        self.set_raw_value(per_replica(rows_like(changed, stored)))

    @property
    def is_on_read(self) -> bool:
        """Whether every replica has its own value."""
        return self.get_metadata("synchronization") == "on_read"

    @property
    def described(self) -> str:
        """Name of the variable in messages."""
        return label(self.get_metadata("name"))

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the value."""
        return shape_of(self.get_raw_value())

    @property
    def dtype(self) -> Any:
        """Dtype of the value."""
        return dtype_of(self.get_raw_value())

    # JAX and flax read a variable through this attribute (flax 0.12.8 to 0.12.12). In a step, they
    # must get the stand-in: otherwise `jnp.sum(v)` would make the current value a constant.
    _raw_value: Any = property(
        lambda self: read_value(_target(self)), lambda self, value: slot.__set__(self, value)
    )

    def get_value(self, *, index: Any = _MISSING) -> Any:
        """Returns the value.

        An `"on_read"` variable has this replica's value in a step, and the aggregated one outside.

        Raises:
            OverflowError: If a sum of integers does not fit their dtype.
            ValueError: If an `"on_read"` variable without an aggregation is read outside a step.
        """
        target = _target(self)
        if target is not self:
            return target.get_value(index=index)
        stored = self.get_raw_value()
        if not is_per_replica(stored):
            return super().get_value() if index is _MISSING else super().get_value(index=index)
        match self.aggregation:
            case "none":
                raise ValueError(
                    f"Cannot read {self.described} outside a step: it has "
                    "synchronization='on_read' and no aggregation, so it has one value per "
                    "replica. Use strategy.local_results(v), or create it with aggregation='sum', "
                    "'mean' or 'only_first_replica'."
                )
            case "only_first_replica":
                value = jnp.asarray(first_value(stored))
            case op:
                ops = _ACROSS_PROCESSES if spans_processes(stored) else _ON_HOST
                value = ops.reduce(op, stored)
                if op == "sum" and jnp.issubdtype(value.dtype, jnp.integer):
                    floats = per_replica(stored.stacked.astype(np.float32))
                    lost = wrapped(value, ops.reduce(op, floats))
                    if lost.size:
                        raise OverflowError(
                            f"The sum of the replicas' values of {self.described} is about "
                            f"{lost[0]:.3g}, which does not fit {value.dtype}. Create it with "
                            "dtype float32, or add strategy.local_results(v) as Python numbers."
                        )
        return value if index is _MISSING or index is ... else value[index]

    def set_value(self, value: Any, *, index: Any = _MISSING) -> None:
        """Sets the value without aggregation; inside a step, sets this replica's value only."""
        target = _target(self)
        if target is not self:
            target.set_value(value, index=index)
        elif current_replica() is None and (
            is_per_replica(value) or is_per_replica(self.get_raw_value())
        ):
            is_whole = index is _MISSING or index is ...
            self.assign(value if is_whole else self.get_value().at[index].set(value))
        else:
            kwargs = {} if index is _MISSING else {"index": index}
            require_fits(f"The new value of {self.described}", value)
            self._write(super().set_value, value, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # `copy.deepcopy` looks up methods of the variable itself
            raise AttributeError(name)
        metadata = object.__getattribute__(self, "_var_metadata")
        if name in metadata:
            return metadata[name]
        try:
            return getattr(self.get_value(), name)
        except AttributeError:
            if ("variable", name) not in advice():
                raise
            raise unknown_attribute("variable", self, name) from None

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.get_value(), dtype=dtype, copy=copy)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Variable":
        twin = self.copy(copy.deepcopy(self.get_raw_value(), memo))
        memo[id(self)] = twin
        return cast(Variable, twin)

    def __nnx_repr__(self) -> Iterator[Any]:
        return nnx.Variable.__nnx_repr__(self._printed)

    def __treescope_repr__(self, path: Any, subtree_renderer: Any) -> Any:
        return nnx.Variable.__treescope_repr__(self._printed, path, subtree_renderer)

    @property
    def _printed(self) -> nnx.Variable[Any]:
        """The variable to print: per-replica values if they cannot be aggregated."""
        stored = self.get_raw_value()
        if not is_per_replica(stored):
            return self
        # Reading values of other processes is a collective, which must not depend on a `print`.
        # flax also prints trees that contain other objects.
        are_arrays = isinstance(held_by(stored), jax.Array | np.ndarray | UnstackedArrays)
        if self.aggregation != "none" and are_arrays and not spans_processes(stored):
            with contextlib.suppress(OverflowError):
                self.get_value()
                return self
        return nnx.Variable.from_metadata(stored, self.get_metadata())

    def __bool__(self) -> bool:
        return bool(self.get_value())

    __ne__ = _comparison(operator.ne)
    __lt__ = _comparison(operator.lt)
    __le__ = _comparison(operator.le)
    __gt__ = _comparison(operator.gt)
    __ge__ = _comparison(operator.ge)


def _target(variable: Variable) -> Variable:
    """Returns the variable that replaces this one in the caller's trace."""
    context = current_replica()
    captures = None if context is None else context.captures
    return variable if captures is None else captures.stand_in(variable)


def is_on_read(holder: object) -> bool:
    """Whether an object is a variable with one value per replica."""
    return isinstance(holder, Variable) and holder.is_on_read


def collapse(objects: Sequence[Any]) -> None:
    """Replaces per-replica values of variables by the single value that is read outside a step."""
    for _, node in nnx.iter_graph(tuple(objects)):
        if is_on_read(node):
            value = node.get_raw_value()
            is_unreadable = node.aggregation == "none" and is_per_replica(value)
            single = np.asarray(value.values[0]) if is_unreadable else node[...]
            node.set_raw_value(jnp.asarray(single))


def unwrapped(tree: PyTree) -> PyTree:
    """Replaces variables by their values: a `PerReplica` for an `"on_read"` variable."""
    return jax.tree.map(
        lambda leaf: leaf.get_raw_value() if isinstance(leaf, nnx.Variable) else leaf,
        tree,
        is_leaf=lambda leaf: isinstance(leaf, nnx.Variable) or is_per_replica(leaf),
    )


def spread_over(variable: Variable, replicas: ReplicaDevices) -> Any:
    """Returns the values of an `"on_read"` variable, laid out on these replicas.

    A variable that has had a single value until now reads the same afterwards.

    Raises:
        ValueError: If the variable has values for another number of replicas.
    """
    value = variable.get_raw_value()
    if not is_per_replica(value):
        array = np.asarray(value)
        is_sum = variable.aggregation == "sum"
        rows = shares(array, len(replicas)) if is_sum else [array] * len(replicas)
        return held_by(store_per_replica(rows, replicas))
    if value.num_replicas != len(replicas):
        raise ValueError(
            f"The strategy has {counted(len(replicas), 'replica')} on {names(replicas.devices)}, "
            f"but {variable.described} has values for {value.num_replicas}. Create the variable "
            "inside the strategy's scope()."
        )
    stacked = held_by(value)
    is_in_place = isinstance(stacked, jax.Array) and stacked.sharding == replicas.stacked
    if is_in_place or (isinstance(stacked, UnstackedArrays) and replicas.are_mixed):
        return stacked
    return replicas.stack(np.stack([np.asarray(row) for row in value.values]))
