"""`Variable`: what a `tf.Variable` is in TensorFlow, as an `nnx.Variable`."""

import copy
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, cast

import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.errors import TraceContextError

from mirror._src.collectives.one_device import ReductionToOneDevice
from mirror._src.context.replica_context import ReplicaContext
from mirror._src.context.scopes import current_frame
from mirror._src.devices.transfer import place_like
from mirror._src.utils.modules import set_module
from mirror._src.utils.types import Array, ArrayLike
from mirror._src.values.per_replica import is_per_replica, per_replica
from mirror._src.variables.conversion import (
    Aggregation,
    Synchronization,
    convert,
    initial_value,
    one_of,
    refuse_tensorflows,
    require_meaning,
)
from mirror._src.variables.raw_value import read_value, slot
from mirror._src.variables.storage import are_arrays, dtype_of, rows_like, shape_of, shares, spread

_ON_HOST = ReductionToOneDevice()
_MISSING: Any = object()


@set_module("mirror")
class Variable(nnx.Variable[Any]):
    """A value that a step changes: in a module, or read and assigned from outside its arguments.

    It is read as every `nnx.Variable`, `v[...]`; operators work on it. Inside a step it need not be
    passed: a step finds it while it is traced. `assign` and its kin write it, aggregated:

    - Inside a step each replica brings a value, and `aggregation` says what becomes of them:
      `"sum"`, `"mean"`, or `"only_first_replica"`, replica 0's; a number counts once for each
      replica. With `"none"` the value must be the same on all replicas already.
    - Outside, the value is written once, to all copies, whatever the aggregation.

    With `synchronization="on_read"` each replica has a value of its own, which steps read and write
    without a collective; read outside, they are aggregated. It is for counts and metrics.

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
        refuse_tensorflows(metadata)
        frame = current_frame()
        if frame is not None and frame.replica is not None:
            raise RuntimeError(
                f"Variable {name or ''!r} was created inside a step that {frame.strategy} runs, "
                "which would make it anew each time. Create it before, and read and assign it in "
                "the step."
            )
        synchronization = one_of(synchronization, Synchronization, "synchronization", name)
        aggregation = one_of(aggregation or "none", Aggregation, "aggregation", name)
        array = initial_value(value, dtype, name)
        require_meaning(array, aggregation, name)
        on_read = synchronization == "on_read"
        held: Any = array
        if on_read and frame is not None:
            held = spread([array] * frame.strategy.num_replicas_in_sync, frame.strategy._replicas)
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
        new = convert(self, value)
        context = _replica()
        if context is not None:
            target = _target(self)
            if not self.is_on_read:
                new = convert(self, self._aggregated(context, new))
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
            changed = shares(value, count)
        else:
            changed = [np.asarray(change(row, value)).astype(row.dtype) for row in rows]
        self.set_raw_value(per_replica(rows_like(changed, held)))

    @property
    def is_on_read(self) -> bool:
        """Whether each replica has a value of its own."""
        return self.get_metadata("synchronization") == "on_read"

    @property
    def described(self) -> str:
        """What messages call it."""
        return f"variable {self.get_metadata('name') or 'without a name'!r}"

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the value."""
        return shape_of(self.get_raw_value())

    @property
    def dtype(self) -> Any:
        """The dtype of the value."""
        return dtype_of(self.get_raw_value())

    # JAX and flax take a variable apart by this name (flax 0.12.8 to 0.12.12). In a step they must
    # find what stands for it there: `jnp.sum(v)` would read the value of this moment for ever.
    _raw_value: Any = property(
        lambda self: read_value(_target(self)), lambda self, value: slot.__set__(self, value)
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
        if is_per_replica(held) and not (self.aggregation != "none" and are_arrays(held)):
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


def _replaced(_: Any, new: Any) -> Any:
    return new


def _replica() -> ReplicaContext | None:
    frame = current_frame()
    return None if frame is None else frame.replica


def _target(variable: Variable) -> Variable:
    """What stands for a variable where the caller is."""
    context = _replica()
    captures = None if context is None else context.captures
    return variable if captures is None else captures.stand_in(variable)
