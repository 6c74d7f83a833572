"""The state of one parameter server, and its update. It never waits, and knows no processes."""

import bisect
import collections
import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import optax

from mirror._src.base.errors import describe
from mirror._src.base.types import Array, PyTree
from mirror._src.ps.messages import (
    BufferLayout,
    Buffers,
    Definition,
    Pulled,
    Push,
    Rejected,
    ServerSnapshot,
)
from mirror._src.ps.objects import (
    as_jax,
    as_numpy,
    by_path,
    flatten,
    init_structs,
    nest,
    owner,
    path_text,
    row_owner,
)
from mirror._src.ps.placement import Slice
from mirror._src.ps.sparse import padded, put, summed, take, take_jit


class Numbers:
    """A set of integers, stored as ranges: numbers that are applied nearly in order need one range.

    Args:
        ranges: Ranges `start, stop` that ascend and do not touch.
    """

    def __init__(self, ranges: Iterable[tuple[int, int]] = ()) -> None:
        self._bounds = [*itertools.chain.from_iterable(ranges)]

    @property
    def ranges(self) -> tuple[tuple[int, int], ...]:
        """The ranges `start, stop`, ascending."""
        return tuple(zip(self._bounds[::2], self._bounds[1::2], strict=True))

    def __contains__(self, number: int) -> bool:
        return bisect.bisect_right(self._bounds, number) % 2 == 1

    def add(self, number: int) -> bool:
        """Adds a number; returns whether it is new."""
        if number in self:
            return False
        for bound in (number, number + 1):  # one that exists joins two ranges
            position = bisect.bisect_left(self._bounds, bound)
            if self._bounds[position : position + 1] == [bound]:
                del self._bounds[position]
            else:
                self._bounds.insert(position, bound)
        return True


Update = Callable[..., tuple[tuple[Array, ...], dict[str, Array], PyTree]]


def update_function(
    definition: Definition, layout: BufferLayout, tables: Mapping[str, Slice]
) -> Update:
    """Returns the compiled update of the values and the optimizer's state of a server.

    The function takes and returns `values` (buffers), `tables` (by leaf) and `state`. It also takes
    `gradients` (buffers), `ids` (for each table, numbers of its rows here, padded with its number
    of rows), `row_gradients` and `staleness`.

    Of a table and of the optimizer's state for it, the rows `ids` alone are read and written. The
    optimizer sees them as if they were the whole leaf.

    The memory of tables and state is donated. The buffers of values are not, because they are
    handed out as views: it stays at twice the values while an update runs, and no pull copies.
    """
    tx, trained = optax.with_extra_args_support(definition.tx), definition.trained
    paths, _ = init_structs(tx, trained)
    owners = [row_owner(path, struct.shape, tables) for path, struct in paths]

    def with_rows(state: PyTree, change: Callable[[Array, str, int], Any]) -> PyTree:
        """Returns the state with its rows of tables changed; `change` gets their table too."""
        leaves, treedef = jax.tree.flatten(state)
        changed = [
            leaf if name is None else change(leaf, name, position)
            for position, (leaf, name) in enumerate(zip(leaves, owners, strict=True))
        ]
        return jax.tree.unflatten(treedef, changed)

    def update(
        values: tuple[Array, ...],
        tables: dict[str, Array],
        state: PyTree,
        gradients: tuple[Array, ...],
        ids: dict[str, Array],
        row_gradients: dict[str, Array],
        staleness: Array,
    ) -> tuple[tuple[Array, ...], dict[str, Array], PyTree]:
        touched = {name: take(table, ids[name]) for name, table in tables.items()}
        params = nest({**layout.unpack(values), **touched})
        updates, new_state = tx.update(
            nest({**layout.unpack(gradients), **row_gradients}),
            with_rows(state, lambda leaf, name, _: take(leaf, ids[name])),
            params,
            staleness=staleness,
        )
        new = flatten(optax.apply_updates(params, updates), [*trained])
        old_leaves = jax.tree.leaves(state)
        return (
            layout.pack(new),
            {name: put(table, ids[name], new[name]) for name, table in tables.items()},
            with_rows(new_state, lambda leaf, name, at: put(old_leaves[at], ids[name], leaf)),
        )

    return jax.jit(update, donate_argnums=(1, 2))


class Store:
    """Values and optimizer state of one server, which are on the CPU.

    The version is the number of updates applied. In synchronous mode, the gradients that parts of a
    step push are kept until the step is committed, and until then every pull returns the same
    values. In asynchronous mode, a push is applied at once. Either is applied once, however often
    it arrives.
    """

    def __init__(self) -> None:
        self._definition: Definition | None = None
        self._incarnation = -1
        self._version = 0
        self._counts: collections.Counter[str] = collections.Counter()
        self._staleness: collections.Counter[int] = collections.Counter()

    def load(
        self,
        definition: Definition,
        snapshot: ServerSnapshot,
        incarnation: int,
        held: ServerSnapshot | None = None,
    ) -> None:
        """Replaces everything by a snapshot.

        Args:
            definition: What this server holds.
            snapshot: Its contents, which are copied.
            incarnation: How often the servers have returned to a snapshot.
            held: The one of `held_tables`; None: they get their first rows.

        Raises:
            ValueError: If values or state of the snapshot do not have the definition's shapes.
        """
        tables = {part.leaf: part for part in definition.slices if part.leaf in definition.tables}
        dense = [part for part in definition.slices if part.leaf not in definition.tables]
        values = {**snapshot.values, **({} if held is None else held.values)}
        for part in definition.slices:
            if held is None and part.leaf in definition.first_rows:
                rows = definition.first_rows[part.leaf](part.start, part.stop)
                values[part.leaf] = np.asarray(rows, np.dtype(part.dtype))
            _require_values(part.leaf, values.get(part.leaf), part)
        trained = BufferLayout(part for part in dense if part.kind == "trained")
        moving = BufferLayout(part for part in dense if part.kind == "moving")
        with jax.default_device("cpu"):
            if self._definition is not definition:
                self._update: Update | None = None
                if definition.trained:
                    self._update = update_function(definition, trained, tables)
            state = None if held is None else held.state
            self._state = _initial_state(definition, values, snapshot.state, state)
            self._values = tuple(jax.numpy.array(buffer) for buffer in trained.pack_np(values))
            self._tables = {name: jax.numpy.array(values[name]) for name in tables}
        self._moving = moving.pack_np(
            {part.leaf: np.array(values[part.leaf]) for part in moving.slices}
        )
        self._definition, self._incarnation = definition, incarnation
        self._trained_layout, self._moving_layout, self._table_slices = trained, moving, tables
        self._version = snapshot.version
        self._applied = Numbers(snapshot.applied)
        self._kept: dict[tuple[int, int], Push] = {}  # by task and part
        self._results: tuple[int, dict[int, Any]] | None = None  # of the last commit

    def pull(
        self,
        incarnation: int,
        step: int | None,
        commit: tuple[int, int, int] | None,
        ids: Mapping[str, np.ndarray],
    ) -> Pulled | Rejected:
        """Returns the values.

        Args:
            incarnation: As in `load`.
            step: In synchronous mode, the version wanted; `None` means any.
            commit: Step, task and number of its parts: committed first, if they have not been.
            ids: For each table, rows of this server, as `split_ids` returns them.
        """
        if (rejected := self._rejection(incarnation)) is not None:
            return rejected
        if commit is not None:
            self._commit(*commit)
        if step is not None and step < self._version:
            return Rejected("late", self._results)
        if step is not None and step > self._version:
            raise RuntimeError(
                f"Step {step} cannot be pulled: this server is at version {self._version}, and the "
                "pull commits no step in between."
            )
        rows = {name: self._rows(name, wanted) for name, wanted in ids.items()}
        trained = tuple(np.asarray(buffer) for buffer in self._values)
        self._counts["pulls"] += 1
        self._counts["bytes_out"] += _num_bytes(trained, self._moving, rows.values())
        return Pulled(self._version, trained, self._moving, rows)

    def push(self, push: Push) -> int | Rejected:
        """Takes the gradients of one part of a step, and returns the version.

        In synchronous mode they are kept until the commit. What arrives again is ignored.

        Raises:
            ValueError: If the buffers do not have this server's shapes.
        """
        if (rejected := self._rejection(push.incarnation)) is not None:
            return rejected
        assert self._definition is not None
        is_sync = self._definition.is_sync
        if is_sync and push.based_on < self._version:
            return Rejected("late")
        if push.based_on > self._version:
            raise RuntimeError(
                f"A gradient for version {push.based_on} was pushed, but this server is at version "
                f"{self._version}."
            )
        if (push.task, push.part) in self._kept if is_sync else push.task in self._applied:
            self._counts["repeated"] += 1
            return self._version
        push = self._checked(push)
        self._counts["pushes"] += 1
        if is_sync:
            self._kept[push.task, push.part] = push
            return self._version
        staleness = self._version - push.based_on
        self._apply([push], staleness)
        self._applied.add(push.task)
        return self._version

    def commit(self, incarnation: int, step: int, task: int, num_parts: int) -> int | Rejected:
        """Applies the mean gradient of the parts of a step, and returns the version.

        A step that was committed before is left alone.
        """
        if (rejected := self._rejection(incarnation)) is not None:
            return rejected
        self._commit(step, task, num_parts)
        return self._version

    def snapshot(self) -> ServerSnapshot | Rejected:
        """Returns a copy of all that `load` needs, except `held_tables`."""
        return Rejected("not loaded") if self._definition is None else self._copy(False)

    def held_tables(self) -> ServerSnapshot | None:
        """Returns a copy of the tables that the main program does not hold; None without any."""
        has_any = self._definition is not None and self._definition.first_rows
        return self._copy(True) if has_any else None

    def _copy(self, is_held: bool) -> ServerSnapshot:
        """Returns a copy of the tables that the main program does not hold, or of all else."""
        assert self._definition is not None
        held = self._definition.first_rows
        values: dict[str, Any] = {
            **self._trained_layout.unpack([*map(np.asarray, self._values)]),
            **self._moving_layout.unpack(self._moving),
            **self._tables,
        }
        leaves = jax.tree_util.tree_leaves_with_path(self._state)
        return ServerSnapshot(
            {name: _view(value) for name, value in values.items() if (name in held) == is_held},
            {
                path_text(path): _view(leaf)
                for path, leaf in leaves
                if (owner(path, held) is not None) == is_held
            },
            *(self._version, self._applied.ranges),
        )

    def rows(self, table: str, ids: np.ndarray) -> np.ndarray | Rejected:
        """Returns rows of a table."""
        return Rejected("not loaded") if self._definition is None else self._rows(table, ids)

    def statistics(self) -> dict[str, Any]:
        """Returns counts since the process started.

        Returns:
            `version`, `pulls`, `pushes`, `repeated`,
            `staleness` (how many gradients were that many updates old), `bytes_in`, `bytes_out`.
        """
        names = ("pulls", "pushes", "repeated", "bytes_in", "bytes_out")
        return {
            "version": self._version,
            **{name: self._counts[name] for name in names},
            "staleness": dict(sorted(self._staleness.items())),
        }

    def _rejection(self, incarnation: int) -> Rejected | None:
        if self._definition is None:
            return Rejected("not loaded")
        return Rejected("other incarnation") if incarnation != self._incarnation else None

    def _rows(self, table: str, ids: np.ndarray) -> np.ndarray:
        part = self._table_slices[table]
        here = ids - np.int32(part.start)
        with jax.default_device("cpu"):
            found = take_jit(self._tables[table], padded(here, part.shape[0]))
        return np.array(np.asarray(found)[: len(here)])

    def _checked(self, push: Push) -> Push:
        """Returns a push whose ids are numbered as the rows of the tables here."""
        for what, buffers, like in (
            ("gradients", push.gradients, self._values),
            ("changes", push.changes, self._moving),
        ):
            if list(map(_type_of, buffers)) != list(map(_type_of, like)):
                got, wanted = (tuple(map(describe, each)) for each in (buffers, like))
                raise ValueError(f"`{what}` must be {wanted}, got {got}.")
        rows = {
            name: (ids - np.int32(self._table_slices[name].start), gradients)
            for name, (ids, gradients) in push.rows.items()
        }
        self._counts["bytes_in"] += _num_bytes(push.gradients, push.changes, *push.rows.values())
        return push._replace(rows=rows)

    def _commit(self, step: int, task: int, num_parts: int) -> None:
        if step < self._version:
            return
        # Gradients of another task belong to a step that failed and was never committed.
        kept = {part: push for (owner, part), push in self._kept.items() if owner == task}
        if step > self._version or set(kept) != set(range(num_parts)):
            what = f"is at version {self._version}" if step > self._version else "has only parts "
            what += "" if step > self._version else f"{sorted(kept)} of {num_parts}"
            raise RuntimeError(f"Step {step} cannot be committed: this server {what}.")
        # In the order of the parts, not of arrival: then the sum is the same in every run.
        self._apply([kept[part] for part in range(num_parts)], 0)
        self._kept, self._results = {}, (task, {part: kept[part].result for part in kept})

    def _apply(self, pushes: Sequence[Push], staleness: int) -> None:
        """Applies the weighted mean of gradients as one update."""
        weights = np.array([push.weight for push in pushes], np.float64)
        # A part of weight 0, which has padding alone, may hold NaN; and so may the mean of none.
        shares = weights / weights.sum() if weights.any() else weights
        ids, row_gradients = {}, {}
        for name, part in self._table_slices.items():
            sent = [
                (push.rows[name], share)
                for push, share in zip(pushes, shares, strict=True)
                if name in push.rows and share
            ]
            scaled = [(places, _scaled(rows, share)) for (places, rows), share in sent]
            unique, total = summed(scaled, part.shape[1:], np.dtype(part.dtype))
            ids[name] = padded(unique, part.shape[0])
            row_gradients[name] = np.zeros((len(ids[name]), *part.shape[1:]), total.dtype)
            row_gradients[name][: len(unique)] = total
        if self._update is not None:
            with jax.default_device("cpu"):
                results = self._update(
                    self._values,
                    self._tables,
                    self._state,
                    _weighted_sum([push.gradients for push in pushes], shares),
                    ids,
                    row_gradients,
                    np.int32(staleness),
                )
                self._values, self._tables, self._state = jax.block_until_ready(results)
        equal = np.full(len(pushes), 1 / len(pushes))
        changes = _weighted_sum([push.changes for push in pushes], equal)
        # New arrays: the old ones may have been handed out.
        self._moving = tuple(
            old + change for old, change in zip(self._moving, changes, strict=True)
        )
        self._version += 1
        self._staleness[staleness] += 1


def _initial_state(
    definition: Definition, values: Mapping[str, np.ndarray], state: Any, held: Any
) -> PyTree:
    """Returns the optimizer's state of a snapshot as arrays of JAX; initializes what it lacks."""
    if not definition.trained:
        return None
    structs, treedef = init_structs(definition.tx, definition.trained)
    found = {**(state or {}), **(held or {})}
    lacking = [path for path, _ in structs if path_text(path) not in found]
    required = [path for path in lacking if owner(path, definition.first_rows) is None]
    if state is not None and required:
        raise ValueError(
            "The snapshot lacks the optimizer's state"
            f"{jax.tree_util.keystr(required[0])}. Was it saved with another optimizer?"
        )
    if lacking:
        # Copies, because a state may be the values, or one array twice, and it is donated.
        arrays = {name: jax.numpy.array(values[name]) for name in definition.trained}
        found = {**by_path(definition.tx.init(nest(arrays))), **found}
    leaves = []
    for path, struct in structs:
        restored = as_jax(found[path_text(path)], struct)
        if restored.shape != struct.shape:
            raise ValueError(
                f"The optimizer's state{jax.tree_util.keystr(path)} must be {describe(struct)}, "
                f"got {describe(restored)}."
            )
        leaves.append(restored)
    return treedef.unflatten(leaves)


def _view(array: Any) -> np.ndarray:
    """Returns an array in NumPy, and mostly no copy: an update does not overwrite what is viewed.

    XLA:CPU copies donated memory of which others hold views (JAX 0.10.2, 0.12.0.1), and an array of
    JAX holds its own result of `np.asarray`.
    """
    is_plain = isinstance(array.dtype, np.dtype) and array.dtype.kind in "biufc"
    has_view = is_plain and isinstance(array, jax.Array)
    return np.from_dlpack(array) if has_view else as_numpy(array)


def _require_values(name: str, value: Any, part: Any) -> None:
    wanted = jax.ShapeDtypeStruct(part.shape, np.dtype(part.dtype))
    if value is None:
        raise ValueError(f"The snapshot lacks {name!r}, {describe(wanted)}.")
    if np.shape(value) != part.shape or value.dtype != wanted.dtype:
        raise ValueError(f"{name!r} must be {describe(wanted)}, got {describe(value)}.")


def _weighted_sum(parts: Sequence[Buffers], shares: np.ndarray) -> Buffers:
    """Returns the sum of each part's buffers times its share; no copies of a part that is alone."""
    scaled = [
        [_scaled(buffer, share) for buffer in part]
        for part, share in zip(parts, shares, strict=True)
        if share
    ]
    if not scaled:
        return tuple(np.zeros_like(buffer) for buffer in parts[0])
    return tuple(functools.reduce(np.add, buffers) for buffers in zip(*scaled, strict=True))


def _scaled(array: np.ndarray, share: float) -> np.ndarray:
    """Returns the array times a share; the array itself if the share is 1."""
    return array if share == 1 else array * array.dtype.type(share)


def _type_of(array: Any) -> tuple[Any, Any]:
    return array.shape, array.dtype


def _num_bytes(*groups: Any) -> int:
    return sum(array.nbytes for group in groups for array in group)
