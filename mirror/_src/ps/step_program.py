"""`StepProgram`: a training step on a worker, from the buffers of the servers to theirs."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, final

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mirror._src.base.naming import name_of
from mirror._src.base.source_lines import on_behalf_of, users_function
from mirror._src.base.types import PyTree
from mirror._src.engine.replica_context import Part
from mirror._src.engine.scopes import current_frame
from mirror._src.ps.buffers import BufferLayout
from mirror._src.ps.joins_of_step import joins_of_step, require_joins, require_own_sums
from mirror._src.ps.messages import Buffers, Pulled
from mirror._src.ps.objects import on_device, require_unchanged
from mirror._src.ps.parts import first_row, has_rows, num_rows, on_replicas
from mirror._src.ps.placement import rows
from mirror._src.ps.replies import ArgumentOfStep, ModelShare, filled, is_place, without_places
from mirror._src.ps.stand_in import GradientKeeper
from mirror._src.ps.table_rows import ServerIds, TableRows
from mirror._src.strategy.mirrored import MirroredStrategy
from mirror._src.training.checkpoints.host_copies import KeyData
from mirror._src.training.checkpoints.snapshot import value_of


class Portion(NamedTuple):
    """Which part of a global batch a worker computes.

    Attributes:
        part: Index of the part.
        num_parts: Number of the parts whose results are joined.
        num_rows: Number of rows of the global batch; None if the workers fetch their parts.
        is_weighted: Whether the step says itself how its parts are joined. Then they have the same
            number of rows.
        num_separate: Number of the parts of such a step.
    """

    part: int = 0
    num_parts: int = 1
    num_rows: int | None = None
    is_weighted: bool = False
    num_separate: int = 1

    @property
    def has_position(self) -> bool:
        """Whether there may be other parts of the batch."""
        return self.num_parts > 1 or self.is_weighted


class Batch(NamedTuple):
    """The arguments of a part of a step.

    Attributes:
        portion: Which part it is.
        is_fetched: Whether the worker has fetched it from its own dataset.
        treedef: Structure of the positional and keyword arguments.
        places: For each leaf, what stands for model or optimizer; None for all others.
        leaves: The leaves, except model and optimizer. Rows are on the devices of the replicas.
        rows: Number of rows.
        ids: For each server, the rows of tables that this part touches.
        num_ids: For each table, how many rows the step is compiled for.
    """

    portion: Portion
    is_fetched: bool
    treedef: Any
    places: tuple[ArgumentOfStep | None, ...]
    leaves: list[Any]
    rows: int
    ids: ServerIds
    num_ids: tuple[int, ...]


class Done(NamedTuple):
    """Results of a part of a step.

    Attributes:
        value: What the user's function returned.
        joins: For each leaf of the value, how it is joined with the other parts.
        gradients: The gradients for each server.
        changes: Changes of the moving variables for each server.
        table_rows: Ids and gradients of the rows of tables for each server.
        rows: Number of rows of the batch.
    """

    value: PyTree
    joins: tuple[str, ...]
    gradients: list[Buffers]
    changes: list[Buffers]
    table_rows: list[dict[str, Any]]
    rows: int


@final
class StepProgram:
    """A training step of the user for one model.

    Args:
        fn: The user's function.
        share: The model, and where its leaves are.
        strategy: The strategy over the devices of the worker.
    """

    def __init__(
        self, fn: Callable[..., Any], share: ModelShare, strategy: MirroredStrategy
    ) -> None:
        self._fn, self._strategy = fn, strategy
        definition, self._placement, functions = share
        self._tables = TableRows(functions, self._placement)
        self._definition = definition
        self.num_servers = len(self._placement.servers)
        with strategy.scope():
            self._model = definition.build(functions)
            self._optimizer = GradientKeeper(
                self._model, definition.wrt, definition.leaves, self._tables.names
            )
        servers = self._placement.servers
        self._trained = [
            BufferLayout(s for s in held if s.kind == "trained" and s.leaf not in functions)
            for held in servers
        ]
        self._moving = [BufferLayout(s for s in held if s.kind == "moving") for held in servers]
        self._paths = {place.name: place.path for place in definition.places}
        self._keys = {k: v for k, v in definition.local.items() if isinstance(v, KeyData)}
        self._is_count = _is_count(self._model, definition)
        self._compiled: set[Any] = set()
        self._steps: dict[Any, Callable[..., Any]] = {}
        self._joins: dict[Any, tuple[str, ...]] = {}

    def batch(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        portion: Portion,
        batch_of: Callable[..., tuple[Any, ...]] | None = None,
    ) -> Batch:
        """Returns the arguments with the next elements of iterators, split across the replicas.

        Args:
            args: Positional arguments.
            kwargs: Keyword arguments.
            portion: Which part of the global batch they are.
            batch_of: See `StepWork`.
        """
        found = jax.tree.leaves((args, kwargs), is_leaf=is_place)
        is_fetched = any(is_place(leaf) and leaf.kind == "next" for leaf in found)

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
        if batch_of is not None:
            others, other_kwargs = [*batch_of(*others)], {}
        ids = self._tables.ids(others, other_kwargs)
        num_ids = tuple(len(each) for each in self._tables.padded_ids(ids).values())
        found, treedef = jax.tree.flatten((args, kwargs), is_leaf=is_place)
        places = tuple(leaf if is_place(leaf) else None for leaf in found)
        leaves = [leaf for leaf in found if not is_place(leaf)]
        placed = on_replicas(leaves, self._strategy._replicas)
        return Batch(portion, is_fetched, treedef, places, placed, size, ids, num_ids)

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

    def run(self, batch: Batch, pulled: Sequence[Pulled], ordinal: int) -> Done:
        """Runs the step with the values of the servers.

        Args:
            batch: Arguments of this part.
            pulled: What each server returned.
            ordinal: Number of the update.

        Raises:
            ValueError: If the step does not call `optimizer.update` once, changes variables that
                servers do not hold, computes gradients for rows of tables that were not pulled, or
                computes what cannot be joined with the other parts.
        """
        moving = self._placement.join(
            [m.unpack_np(p.moving) for m, p in zip(self._moving, pulled, strict=True)]
        )
        table_rows = self._tables.joined([p.rows for p in pulled])
        (value, packed, outside), joins = self._run(
            batch, [p.trained for p in pulled], table_rows, moving, ordinal
        )
        self._tables.require_inside({name: np.asarray(x) for name, x in outside.items()})
        pushed = functools.cache(lambda name: np.asarray(self._optimizer.pushed(name)))
        gradients = [
            layout.add_alone([*map(np.asarray, shared)], pushed)
            for layout, shared in zip(self._trained, packed, strict=True)
        ]
        rows_of_tables = self._tables.pushed(batch.ids, {n: pushed(n) for n in self._tables.names})
        new = self._read("moving") if moving else {}
        changes = self._placement.split({name: new[name] - moving[name] for name in moving})
        packed_changes = [m.pack_np(c) for m, c in zip(self._moving, changes, strict=True)]
        return Done(value, joins, gradients, packed_changes, rows_of_tables, batch.rows)

    def _run(
        self,
        batch: Batch,
        trained: list[Buffers],
        table_rows: dict[str, np.ndarray],
        moving: Any,
        ordinal: int,
    ) -> tuple[Any, tuple[str, ...]]:
        portion = batch.portion
        fixed = self._set_local(ordinal, portion.part)
        self._set({**moving})
        before = int(self._optimizer.step[...])
        ids = self._tables.padded_ids(batch.ids)
        self._optimizer.touch(ids)
        # Nothing changes what was received while the step runs, so it is not copied.
        position = _position(batch, self._strategy.num_replicas_in_sync)
        received = (trained, self._tables.padded_rows(ids, table_rows), position)
        held = self._strategy._runner.borrow(received)
        arguments = (self._model, self._optimizer, held, batch.leaves)
        is_joined = portion.num_parts > 1 or portion.num_separate > 1
        joins = self._joins_for(batch, arguments) if is_joined else ()
        result = self._strategy.run(self._step_for(batch), arguments)
        self._compiled.add(_shapes(batch))
        require_unchanged(fixed, self._read_local(fixed))
        _require_one_update(int(self._optimizer.step[...]) - before, name_of(self._fn))
        return result, joins

    def _joins_for(self, batch: Batch, arguments: tuple[Any, ...]) -> tuple[str, ...]:
        """Returns how the results of a part are joined with the other parts."""
        key = _step_key(batch)
        if key not in self._joins:
            step = self._make_step(batch, is_examined=True)
            call, traced = self._strategy._runner.traced(step, arguments, {})
            num_replicas = self._strategy.num_replicas_in_sync
            found = joins_of_step(call, traced, num_replicas, is_fetched=batch.is_fetched)
            portion = batch.portion
            if portion.is_weighted:
                require_own_sums(name_of(users_function(self._fn)), found, portion.num_separate)
                self._joins[key] = ()
            else:
                self._joins[key] = require_joins(name_of(self._fn), found, portion.num_parts)
        return self._joins[key]

    def _step_for(self, batch: Batch) -> Callable[..., Any]:
        """Returns the step for arguments of this structure."""
        key = batch.treedef, batch.places, batch.portion.num_parts, batch.portion.has_position
        if key not in self._steps:
            self._steps[key] = self._make_step(batch)
        return self._steps[key]

    def _make_step(self, batch: Batch, *, is_examined: bool = False) -> Callable[..., Any]:
        """Returns a step of this structure.

        Args:
            batch: Arguments of this structure.
            is_examined: Whether the step is traced alone. It then returns results, gradients and
                moving variables.
        """
        fn, placement, layouts, paths = self._fn, self._placement, self._trained, self._paths
        tables, (treedef, places) = self._tables, (batch.treedef, batch.places)
        num_parts, has_position = batch.portion.num_parts, batch.portion.has_position
        num_separate = batch.portion.num_separate if is_examined else 1
        moving = [p for p in self._definition.places if p.kind == "moving"]

        def step(
            model: nnx.Module, optimizer: GradientKeeper, received: Any, leaves: list[Any]
        ) -> Any:
            buffers, table_rows, position = received
            held = [layout.unpack(b) for layout, b in zip(layouts, buffers, strict=True)]
            flat = []
            for name, slices in placement.holders.items():
                found = [held[server][name] for server, _ in slices if name in held[server]]
                if found:
                    whole = found[0] if len(found) == 1 else jnp.concatenate(found)
                    flat.append((paths[name], whole))
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
            if has_position:
                frame = current_frame()
                assert frame is not None
                assert frame.replica is not None
                frame.replica.part = Part(num_parts, *position)._replace(num_separate=num_separate)
            value = fn(*args, **kwargs)
            if is_examined:
                after = dict(nnx.to_flat_state(nnx.state(model)))
                changes = {p.name: value_of(after[p.path]) for p in moving}
                gradients = {name: optimizer.pushed(name) for name in optimizer.gradients}
                return value, gradients, changes
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
        """Sets random keys of this part, and all else that servers do not hold to its first value.

        Returns:
            What the step must not change.
        """
        local = dict(self._definition.local)
        for name, key in self._keys.items():
            local[name] = _folded(on_device(key), ordinal, part)
        changing = {k: v for k, v in local.items() if k in self._keys or k in self._is_count}
        self._set(changing)
        return {k: v for k, v in local.items() if k not in changing}

    def _read(self, kind: str) -> dict[str, np.ndarray]:
        held = dict(nnx.to_flat_state(nnx.state(self._model)))
        return {
            place.name: np.asarray(value_of(held[place.path]))
            for place in self._definition.places
            if place.kind == kind
        }

    def _read_local(self, names: dict[str, Any]) -> dict[str, Any]:
        if not names:
            return {}
        held = dict(nnx.to_flat_state(nnx.state(self._model)))
        return {name: np.asarray(value_of(held[self._paths[name]])) for name in names}


def _is_count(model: nnx.Module, definition: Any) -> set[str]:
    """Returns the names of the counts of random numbers, which every step changes."""
    held = dict(nnx.to_flat_state(nnx.state(model)))
    return {p.name for p in definition.places if isinstance(held[p.path], nnx.RngCount)}


def _folded(key: Any, ordinal: int, part: int) -> Any:
    fold = jax.random.fold_in
    for _ in range(key.ndim):
        fold = jax.vmap(fold, (0, None))
    return fold(fold(key, ordinal), part)


def _zeros(layout: BufferLayout) -> dict[str, np.ndarray]:
    return {s.leaf: np.zeros(s.shape, np.dtype(s.dtype)) for s in layout.slices}


def _position(batch: Batch, num_devices: int) -> tuple[Any, ...]:
    """Returns index and first row of a part, and the factor by which the batch is larger."""
    part, num_parts, num_rows, is_weighted, _ = batch.portion
    if not batch.portion.has_position:
        return ()
    if is_weighted:
        return np.int32(part), np.int32(part * batch.rows)
    if num_rows is None:
        return (np.int32(part),)
    start = first_row(part, num_parts, num_rows, num_devices)
    scale = np.asarray(num_rows / batch.rows, jnp.result_type(float))
    return np.int32(part), np.int32(start), scale


def _step_key(batch: Batch) -> Any:
    return (batch.portion.num_parts, batch.is_fetched, *_shapes(batch))


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
