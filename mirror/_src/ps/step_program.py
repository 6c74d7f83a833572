"""`StepProgram`: a training step on a worker, from the buffers of the servers to theirs."""

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn, final

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from mirror._src.base.errors import describe
from mirror._src.base.naming import name_of
from mirror._src.base.tracebacks import on_behalf_of, users_function
from mirror._src.base.types import Array, PyTree
from mirror._src.engine.replica_context import Part, current_replica
from mirror._src.jaxprs.collective_eqns import chain_lengths
from mirror._src.ps.messages import BufferLayout, Buffers, Pulled
from mirror._src.ps.objects import ModelDefinition, bits, device_array, require_unchanged
from mirror._src.ps.placement import Leaf, rows
from mirror._src.ps.sparse import ServerIds, TableRows, take
from mirror._src.ps.step_data import (
    ArgumentOfStep,
    filled,
    has_rows,
    is_place,
    num_rows,
    on_replicas,
    without_places,
)
from mirror._src.strategy.mirrored import MirroredStrategy
from mirror._src.training.checkpoints.files import KeyData, on_host
from mirror._src.training.checkpoints.snapshot import value_of


class PushedGradient(nnx.Variable[Any]):
    """The gradient of a leaf that the last step computed."""


class TouchedIds(nnx.Variable[Any]):
    """The padded ids of a table's rows that a step touches."""


class OutsideRows(nnx.Variable[Any]):
    """Number of nonzero rows of a table's gradient that were not touched, and the first of them."""


class GradientKeeper(nnx.Optimizer[Any]):
    """Optimizer of a training step on a worker: `update` keeps the gradients for the servers.

    The servers update the model, so the model of the worker does not change. The gradients are
    variables, so that `strategy.run` proves that all replicas have the same ones, and names the
    gradient that they do not have in common.

    Args:
        model: The model.
        wrt: The filter of the user's optimizer.
        leaves: The leaves of the model on the servers.
        tables: Names of the leaves whose gradients are kept for touched rows alone.
    """

    def __init__(
        self,
        model: nnx.Module,
        wrt: Any,
        leaves: tuple[Leaf, ...],
        tables: Collection[str] = (),
    ) -> None:
        super().__init__(model, optax.identity(), wrt=wrt)
        trained = {leaf.name: leaf for leaf in leaves if leaf.kind == "trained"}
        self.gradients = nnx.Dict(
            {
                name: PushedGradient(
                    jnp.zeros((0, *leaf.shape[1:]) if name in tables else leaf.shape, leaf.dtype),
                    whole_shape=leaf.shape,
                )
                for name, leaf in trained.items()
            }
        )
        self.ids = nnx.Dict({name: TouchedIds(jnp.zeros(0, jnp.int32)) for name in tables})
        self.outside = nnx.Dict({name: OutsideRows(jnp.zeros(2, jnp.int32)) for name in tables})

    def touch(self, ids: Mapping[str, np.ndarray]) -> None:
        """Sets the rows of tables whose gradients the next step keeps; outside of `jax.jit`."""
        for name, each in ids.items():
            if self.ids[name].shape != each.shape:
                gradient = self.gradients[name]
                rows = (len(each), *gradient.shape[1:])
                gradient.set_value(jnp.zeros(rows, gradient.dtype))
            self.ids[name].set_value(jnp.asarray(each))

    def update(self, model: nnx.Module, grads: Any, /, **kwargs: Any) -> None:
        """Keeps the gradients.

        Raises:
            ValueError: If the gradients do not match the trained variables.
            TypeError: If there are further arguments, or a gradient has another dtype.
        """
        del model
        if kwargs:
            raise TypeError(
                f"optimizer.update() got {', '.join(map(repr, kwargs))}, but parameter servers "
                "receive gradients only. Omit these arguments."
            )
        flat = nnx.to_flat_state(nnx.state(grads, self.wrt))
        given = {".".join(map(str, path)): value_of(leaf) for path, leaf in flat}
        kept = self.gradients
        if set(given) != set(kept):
            differing = sorted(set(given) ^ set(kept))
            raise ValueError(
                f"optimizer.update() must receive a gradient for each of the {len(kept)} variables "
                f"that wrt={describe(self.wrt)} selects, got {len(given)}; they differ in "
                f"{differing[0]}. Pass what nnx.grad(loss, argnums=nnx.DiffState(0, wrt)) returns."
            )
        for name, value in given.items():
            like = jax.ShapeDtypeStruct(kept[name].get_metadata()["whole_shape"], kept[name].dtype)
            if (value.shape, value.dtype) != (like.shape, like.dtype):
                raise TypeError(
                    f"The gradient of {name} must be {describe(like)}, as the variable is, got "
                    f"{describe(value)}. Convert it before optimizer.update()."
                )
            if name in self.ids:
                ids = self.ids[name][...]
                self.outside[name][...] = _outside(value, ids)
                value = take(value, ids)
            kept[name][...] = value
        self.step[...] += 1

    def pushed(self, name: str) -> Array:
        """Returns the gradient of a leaf; of a table, the touched rows."""
        return self.gradients[name].get_value()

    def __reduce__(self) -> NoReturn:
        raise TypeError("The optimizer of a scheduled step stays on its worker.")


def _outside(gradient: Array, ids: Array) -> Array:
    is_nonzero = (gradient != 0).reshape(len(gradient), -1).any(axis=1)  # NaN too
    is_outside = is_nonzero.at[ids].set(False, mode="drop")
    return jnp.stack([is_outside.sum(), is_outside.argmax()]).astype(jnp.int32)


class Portion(NamedTuple):
    """Which part of a batch a step of a `Trainer` computes. All parts have the same length.

    Attributes:
        part: Index of the part.
        num_parts: Number of the parts.
    """

    part: int
    num_parts: int


class Batch(NamedTuple):
    """The arguments of a part of a step.

    Attributes:
        portion: Which part it is; None for a step that the user has scheduled.
        treedef: Structure of the positional and keyword arguments.
        places: For each leaf, what stands for model or optimizer; None for all others.
        leaves: The leaves, except model and optimizer. Rows are on the devices of the replicas.
        rows: Number of rows.
        ids: For each server, the rows of tables that this part touches.
        num_ids: For each table, how many rows the step is compiled for.
    """

    portion: Portion | None
    treedef: Any
    places: tuple[ArgumentOfStep | None, ...]
    leaves: list[Any]
    rows: int
    ids: ServerIds
    num_ids: tuple[int, ...]


@final
class StepProgram:
    """A training step of the user for one model.

    Args:
        fn: The user's function.
        definition: The model, and where its leaves are.
        strategy: The strategy over the devices of the worker.
    """

    def __init__(
        self, fn: Callable[..., Any], definition: ModelDefinition, strategy: MirroredStrategy
    ) -> None:
        self._fn, self._strategy = fn, strategy
        self._placement, functions = definition.placement, definition.id_functions
        self._tables = TableRows(functions, self._placement)
        self.has_tables = bool(functions)
        self._definition = definition
        self.num_servers = len(self._placement.servers)
        with strategy.scope():
            self._model = definition.build()
            leaves = tuple(self._placement.leaves.values())
            self._optimizer = GradientKeeper(
                self._model, definition.wrt, leaves, self._tables.names
            )
        servers = self._placement.servers
        self._trained = [
            BufferLayout(s for s in held if s.kind == "trained" and s.leaf not in functions)
            for held in servers
        ]
        self._moving = [BufferLayout(s for s in held if s.kind == "moving") for held in servers]
        self._paths = definition.paths
        held = dict(nnx.to_flat_state(nnx.state(self._model)))
        self._random = {
            name: value
            for name, value in definition.local.items()
            if isinstance(held[self._paths[name]], nnx.RngState)
        }
        self._compiled: set[Any] = set()
        self._steps: dict[Any, Callable[..., Any]] = {}
        self._separate: set[Any] = set()  # shapes for which the parts are computed separately

    def batch(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        portion: Portion | None,
    ) -> Batch:
        """Returns the arguments with the next elements of iterators, split across the replicas.

        Args:
            args: Positional arguments.
            kwargs: Keyword arguments.
            portion: Which part of a batch of a `Trainer` they are, of which the functions of
                `sparse` receive the batch, but not its mask.
        """

        def with_next(place: ArgumentOfStep) -> Any:
            if place.kind == "next":
                # Copies: a loader may fill the same arrays again in a thread of its own.
                return jax.tree.map(np.array, next(place.iterator))
            return place

        args, kwargs = filled((args, kwargs), with_next)
        data = without_places((args, kwargs))
        size = num_rows(self._fn, *data) or 1
        num_replicas = self._strategy.num_replicas_in_sync
        if size % num_replicas and any(map(has_rows, jax.tree.leaves(data))):
            raise ValueError(
                f"The batch of a worker must be divisible by its {num_replicas} devices, got {size}"
                " rows. Use a multiple, or devices_per_worker=1."
            )
        others = [d for a, d in zip(args, data[0], strict=True) if not _is_object(a)]
        other_kwargs = {k: d for k, d in data[1].items() if not _is_object(kwargs[k])}
        if portion is not None:
            others = others[:1]
        ids = self._tables.ids(others, other_kwargs)
        num_ids = tuple(len(each) for each in self._tables.padded_ids(ids).values())
        found, treedef = jax.tree.flatten((args, kwargs), is_leaf=is_place)
        places = tuple(leaf if is_place(leaf) else None for leaf in found)
        leaves = [leaf for leaf in found if not is_place(leaf)]
        placed = on_replicas(leaves, self._strategy._replicas)
        return Batch(portion, treedef, places, placed, size, ids, num_ids)

    def must_compile(self, batch: Batch) -> bool:
        """Whether the step has not run with arguments of this structure and these shapes."""
        return _shapes(batch) not in self._compiled

    def compile(self, batch: Batch) -> None:
        """Runs the step once with values that do not matter."""
        zeros = [
            tuple(np.zeros_like(b) for b in layout.pack_np(_zeros(layout)))
            for layout in self._trained
        ]
        self._run(batch, zeros, {}, {}, 0)

    def run(
        self, batch: Batch, pulled: Sequence[Pulled], ordinal: int
    ) -> tuple[PyTree, list[Buffers], list[Buffers], list[dict[str, Any]]]:
        """Runs the step with the values of the servers.

        Args:
            batch: Arguments of this part.
            pulled: What each server returned.
            ordinal: Number of the update.

        Returns:
            What the user's function returned; and for each server, the gradients, the changes of
            the moving variables, and ids and gradients of the rows of tables.

        Raises:
            ValueError: If the step does not call `optimizer.update` once, changes variables that
                servers do not hold, computes gradients for rows of tables that were not pulled, or
                reduces over the replicas of one part alone.
        """
        moving = self._placement.join(
            [m.unpack(p.moving) for m, p in zip(self._moving, pulled, strict=True)]
        )
        table_rows = self._placement.join([p.rows for p in pulled])
        value, packed, outside = self._run(
            batch, [p.trained for p in pulled], table_rows, moving, ordinal
        )
        self._tables.require_inside({name: np.asarray(x) for name, x in outside.items()})
        pushed = functools.cache(lambda name: np.asarray(self._optimizer.pushed(name)))
        gradients = [
            layout.add_alone([*map(np.asarray, shared)], pushed)
            for layout, shared in zip(self._trained, packed, strict=True)
        ]
        rows_of_tables = self._tables.pushed(batch.ids, {n: pushed(n) for n in self._tables.names})
        new = self._read(moving)
        changes = self._placement.split({name: new[name] - moving[name] for name in moving})
        packed_changes = [m.pack_np(c) for m, c in zip(self._moving, changes, strict=True)]
        return value, gradients, packed_changes, rows_of_tables

    def _run(
        self,
        batch: Batch,
        trained: list[Buffers],
        table_rows: dict[str, np.ndarray],
        moving: Any,
        ordinal: int,
    ) -> Any:
        portion = batch.portion
        fixed = self._set_local(ordinal, portion.part if portion else 0)
        self._set({**moving})
        before = int(self._optimizer.step[...])
        ids = self._tables.padded_ids(batch.ids)
        self._optimizer.touch(ids)
        # Nothing changes what was received while the step runs, so it is not copied.
        first = () if portion is None else (portion.part, portion.part * batch.rows)
        position = tuple(map(np.int32, first))
        received = (trained, self._tables.padded_rows(ids, table_rows), position)
        held = self._strategy._runner.borrow(received)
        arguments = (self._model, self._optimizer, held, batch.leaves)
        self._require_separate(batch, arguments)
        result = self._strategy.run(self._step_for(batch), arguments)
        self._compiled.add(_shapes(batch))
        require_unchanged(fixed, self._read(fixed))
        _require_one_update(int(self._optimizer.step[...]) - before, name_of(self._fn))
        return result

    def _require_separate(self, batch: Batch, arguments: tuple[Any, ...]) -> None:
        """Requires that a step of a `Trainer` sums what its parts compute separately.

        The only collective is then the sum of the trainer, after the loss function.

        Raises:
            ValueError: If a sum depends on another collective.
        """
        num_parts = batch.portion.num_parts if batch.portion else 1
        if num_parts == 1 or _shapes(batch) in self._separate:
            return
        step = self._make_step(batch, num_parts)
        _, traced = self._strategy._runner.traced(step, arguments, {})
        num_results = traced.function.out_tree.num_leaves - len(traced.function.static_results)
        if max(chain_lengths(traced.jaxpr)[:num_results], default=0) > 1:  # states follow
            raise ValueError(
                f"{name_of(users_function(self._fn))} reduces or gathers over the replicas, for "
                "example with mirror.all_reduce or nnx.BatchNorm(axis_name=...). The workers "
                f"compute the {num_parts} parts of a batch separately: this would be over the part "
                "of one worker alone. Compute the loss of each example from this example; or "
                "create the strategy with staleness=None, with which a worker computes a whole "
                "batch; or train with mirror.MirroredStrategy."
            )
        self._separate.add(_shapes(batch))

    def _step_for(self, batch: Batch) -> Callable[..., Any]:
        """Returns the step for arguments of this structure."""
        key = batch.treedef, batch.places, batch.portion is None
        if key not in self._steps:
            self._steps[key] = self._make_step(batch)
        return self._steps[key]

    def _make_step(self, batch: Batch, num_parts: int | None = None) -> Callable[..., Any]:
        """Returns a step of this structure.

        Args:
            batch: Arguments of this structure.
            num_parts: Number of parts of the batch. Then the step is traced alone, and returns its
                result only.
        """
        fn, placement, layouts, paths = self._fn, self._placement, self._trained, self._paths
        tables, (treedef, places) = self._tables, (batch.treedef, batch.places)

        def step(
            model: nnx.Module, optimizer: GradientKeeper, received: Any, leaves: list[Any]
        ) -> Any:
            buffers, table_rows, position = received
            held = [layout.unpack(b) for layout, b in zip(layouts, buffers, strict=True)]
            whole = placement.join(held, jnp.concatenate)
            flat = [(paths[name], value) for name, value in whole.items()]
            for name, rows_of_table in table_rows.items():
                ids = optimizer.ids[name][...]
                flat.append((paths[name], tables.filled(name, ids, rows_of_table)))
            before = dict(nnx.to_flat_state(nnx.state(model)))
            kept = [(path, value_of(before[path])) for path, _ in flat]
            nnx.update(model, nnx.from_flat_state(flat))
            objects, rest = {"model": model, "optimizer": optimizer}, iter(leaves)
            args, kwargs = treedef.unflatten(
                [next(rest) if place is None else objects[place.kind] for place in places]
            )
            if position:
                replica = current_replica()
                assert replica is not None
                part_id, first_row = position
                replica.part = Part(part_id, first_row, num_parts or 1)
            value = fn(*args, **kwargs)
            if num_parts is not None:
                return value
            # The step does not return unchanged variables, so that XLA does not copy them.
            nnx.update(model, nnx.from_flat_state(kept))
            packed = [
                layout.pack_shared(
                    {s.leaf: rows(optimizer.pushed(s.leaf), s) for s in layout.slices}
                )
                for layout in layouts
            ]
            return value, packed, {name: optimizer.outside[name][...] for name in table_rows}

        on_behalf_of(step, fn)
        step.__name__ = name_of(fn)
        return step

    def _set(self, values: dict[str, Any]) -> None:
        flat = [(self._paths[name], jnp.asarray(value)) for name, value in values.items()]
        if flat:
            nnx.update(self._model, nnx.from_flat_state(flat))

    def _set_local(self, ordinal: int, part: int) -> dict[str, Any]:
        """Sets the state of each nnx.Rngs: keys of this part, and the first counts.

        Returns:
            What the step must not change.
        """
        self._set(
            {
                name: _folded(device_array(x), ordinal, part) if isinstance(x, KeyData) else x
                for name, x in self._random.items()
            }
        )
        local = self._definition.local
        return {name: bits(value) for name, value in local.items() if name not in self._random}

    def _read(self, names: Collection[str]) -> dict[str, np.ndarray]:
        if not names:
            return {}
        held = dict(nnx.to_flat_state(nnx.state(self._model)))
        return {name: bits(on_host(value_of(held[self._paths[name]]))) for name in names}


def _folded(key: Any, ordinal: int, part: int) -> Any:
    fold = jax.random.fold_in
    for _ in range(key.ndim):
        fold = jax.vmap(fold, (0, None))
    return fold(fold(key, ordinal), part)


def _zeros(layout: BufferLayout) -> dict[str, np.ndarray]:
    return {s.leaf: np.zeros(s.shape, np.dtype(s.dtype)) for s in layout.slices}


def _shapes(batch: Batch) -> Any:
    return (
        *(batch.treedef, batch.places, batch.num_ids),
        *((np.shape(x), getattr(x, "dtype", type(x))) for x in jax.tree.leaves(batch.leaves)),
    )


def _is_object(argument: Any) -> bool:
    """Whether an argument of the step consists of the model or the optimizer alone."""
    leaves = jax.tree.leaves(argument, is_leaf=is_place)
    return bool(leaves) and all(map(is_place, leaves))


def _require_one_update(count: int, name: str) -> None:
    if count != 1:
        times = "did not call it" if count == 0 else f"called it {count} times"
        raise ValueError(
            f"A training step must call optimizer.update(model, grads) once, but {name} {times}. "
            "A step is one update of the parameter servers: schedule one step per update, and "
            "functions that do not train without the optimizer."
        )
