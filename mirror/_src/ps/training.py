"""`ServedTraining`: the objects that servers train now; `ServedSteps`: of a `mirror.Trainer`."""

import functools
import logging
import math
from collections.abc import Callable, Sequence
from typing import Any, final

import jax
import numpy as np
from flax import nnx

from mirror._src.base.naming import name_of
from mirror._src.base.types import PyTree
from mirror._src.data.padded import PaddedBatch
from mirror._src.engine.per_replica import PerReplica
from mirror._src.inspection.measurement import copy_of
from mirror._src.inspection.verify import (
    CAUSES,
    Outcome,
    VerifyReport,
    checked,
    differences,
    nudge_variables,
    rows_of,
    variables_of,
)
from mirror._src.ps.driver import Task
from mirror._src.ps.driver_thread import DriverThread
from mirror._src.ps.engine import RayEngine
from mirror._src.ps.handles import CancelledError, RemoteValue
from mirror._src.ps.messages import (
    Definition,
    Export,
    LostError,
    Result,
    ServerSnapshot,
    StepWork,
)
from mirror._src.ps.objects import (
    ModelDefinition,
    TrainingObjects,
    as_numpy,
    bits,
    join_optimizer_state,
    split_optimizer_state,
)
from mirror._src.ps.placement import PartitionerLike, Placement
from mirror._src.ps.separable import place_separably
from mirror._src.ps.sparse import KeptRows, ServerRows, SparseTables, split_ids
from mirror._src.ps.step_data import ArgumentOfStep, as_users, pickled
from mirror._src.training.objective import Sums
from mirror._src.training.runners import RemoteStrategy, Training, divisor_of, host_batch

_MOST_ROWS = 1024  # of a table that the main program only traces
_logger = logging.getLogger("mirror")


@final
class ServedTraining:
    """The model and optimizer that the parameter servers train now.

    The objects of the main program are authoritative while no step is scheduled. The first step
    afterwards loads them onto the servers if they have changed; `collect` writes the values of the
    servers back into them.

    Args:
        thread: Runs functions and steps.
        engine: Exports the model.
        is_sync: Whether steps are synchronous.
        partitioner: Of the strategy.
        tables: The variables of which workers pull and push the touched rows alone.

    Attributes:
        num_parts: Into how many parts the batch of a step of a `Trainer` is split.
        placement: Where the variables are, once there are some.
    """

    def __init__(
        self,
        thread: DriverThread,
        engine: RayEngine,
        *,
        is_sync: bool,
        partitioner: PartitionerLike | None,
        tables: SparseTables,
    ) -> None:
        self.thread, self.engine, self.is_sync = thread, engine, is_sync
        self.num_parts = engine.num_workers if is_sync else 1
        self._partitioner, self._tables = partitioner, tables
        self._objects: TrainingObjects | None = None
        self._known: list[Any] = []
        self._num_steps = 0  # since the objects were last up to date
        self._first = 0
        self.placement: Placement | None = None
        self._export: Export | None = None
        self._definition: ModelDefinition | None = None

    def schedule_function(
        self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> RemoteValue:
        """Schedules a function that does not train."""
        what = f"the arguments of {name_of(fn)}"
        arguments = (self.engine.export(fn), pickled(self.engine.dumps, (args, kwargs), what))
        return self._submit(Task("run_function", [arguments], _single, is_step=False))

    def schedule_step(
        self,
        fn: Callable[..., Any],
        model: nnx.Module,
        optimizer: nnx.Optimizer[Any],
        parts: Sequence[PyTree],
        *,
        weight_of: Callable[[Any], float] | None = None,
        join: Callable[[Sequence[Result]], Any] | None = None,
    ) -> RemoteValue:
        """Schedules a training step.

        Args:
            fn: The step.
            model: The model.
            optimizer: The optimizer.
            parts: For each part of the batch, positional and keyword arguments, in which an
                `ArgumentOfStep` stands for model and optimizer.
            weight_of: As in `StepWork`.
            join: Returns the result, given the results of the parts. Defaults to the only one.
        """
        what = f"the arguments of {name_of(fn)}"
        data = [pickled(self.engine.dumps, part, what) for part in parts]
        function = self.engine.export(fn)
        weight = None if weight_of is None else self.engine.export(weight_of)
        work = StepWork(function, *self._prepare(model, optimizer), weight)
        arguments = [(work, each) for each in data]
        return self._submit(Task("run_part", arguments, join or _single, is_step=True))

    def _submit(self, task: Task) -> RemoteValue:
        self.thread.call(self.thread.driver.submit, task)
        return task.value

    def join(self, timeout: float | None = None) -> None:
        """Waits until all has ended, and writes the values of the servers into the objects.

        Raises:
            TimeoutError: If the functions have not ended by then. They continue.
            Exception: What one of them raised.
        """
        try:
            self.thread.join(timeout)
        except TimeoutError:
            raise
        except Exception:
            if self.thread.driver.has_lost_values:
                self._forget()
            else:
                self._collect()
            raise
        self._collect()

    def _prepare(self, model: nnx.Module, optimizer: nnx.Optimizer[Any]) -> tuple[Export, int]:
        """Loads the objects onto the servers if they do not have them.

        Returns:
            The export of the model, and the number of the next update.

        Raises:
            RuntimeError: If steps with another model have not been joined.
        """
        old = self._objects
        is_same = old is not None and old.model is model and old.optimizer is optimizer
        if self._num_steps:
            if not is_same:
                raise RuntimeError(
                    "The parameter servers train another model, whose steps have not been joined. "
                    "Call coordinator.join() before scheduling steps of this model."
                )
        elif not is_same or not self._is_up_to_date():
            self._load(TrainingObjects(model, optimizer))
        assert self._export is not None
        self._num_steps += 1
        return self._export, self._first + self._num_steps - 1

    def _collect(self) -> None:
        """Writes values and optimizer state of the servers into the objects."""
        objects = self._objects
        if not self._num_steps or objects is None:
            return
        assert self.placement is not None
        try:
            self.thread.call(self.thread.driver.take_snapshot)
            snapshots = self.thread.driver.kept
            if not _have_same_bits(objects.arrays(), self._known):
                _logger.warning(
                    "The model or optimizer was changed in the main program while steps were "
                    "scheduled. The values of the parameter servers replace the change. Call "
                    "coordinator.join() before changing them."
                )
            version = snapshots[0][1].version
            values = self.placement.join([snapshot.values for _, snapshot, _ in snapshots])
            state = join_optimizer_state(
                objects.state_structs,
                objects.trained,
                self.placement,
                [snapshot.state or {} for _, snapshot, _ in snapshots],
            )
            objects.write(values, state, version)
        except Exception:
            self._forget()  # the strategy remains usable
            raise
        self._first, self._num_steps = version, 0
        self._known = objects.arrays()
        kept = KeptRows(
            self, self._where(objects, self.placement), [held for *_, held in snapshots]
        )
        for rows in objects.tables.values():
            rows.kept[:] = [kept]

    @property
    def is_collected(self) -> bool:
        """Whether the objects have the values of all steps that have ended."""
        return self._objects is not None and not self._num_steps

    def _forget(self) -> None:
        """Drops what the servers have: the next step loads the objects again."""
        self._objects, self._num_steps = None, 0

    def _is_up_to_date(self) -> bool:
        objects = self._objects
        assert objects is not None
        return objects.has_same_structure() and _have_same_bits(objects.arrays(), self._known)

    def _load(self, objects: TrainingObjects) -> None:
        tx = objects.optimizer.tx
        self._tables.require_in(objects.leaves, objects.tables)
        placement = place_separably(
            *(tx, objects.leaves, self.engine.num_servers, self._partitioner),
            tables=self._tables.functions,
        )
        values = placement.split(objects.read())
        states = split_optimizer_state(
            objects.state_structs, objects.trained, placement, objects.read_optimizer()
        )
        kept = self._kept_rows(objects, placement)
        what = "`first_rows` of a mirror.ps.ServerTable, or `tx`,"
        definitions = [
            Definition(slices, tx, self.is_sync, placement.tables, objects.first_rows)
            for slices in placement.servers
        ]
        snapshots = [
            (pickled(self.engine.dumps, each, what), ServerSnapshot(own, state, objects.step), held)
            for each, own, state, held in zip(definitions, values, states, kept, strict=True)
        ]
        self.thread.call(self.thread.driver.load, snapshots)
        self.placement, self._objects, self._known = placement, objects, objects.arrays()
        new = objects.definition(placement, self._tables.functions)
        if self._definition is None or not _is_same(new, self._definition):  # workers compile each
            for name, function in new.id_functions.items():
                pickled(self.engine.dumps, function, f"sparse[{name!r}]")
            self._definition = new
        self._export = self.engine.export(self._definition, "the model")
        self._first, self._num_steps = objects.step, 0

    def _kept_rows(self, objects: TrainingObjects, placement: Placement) -> list[Any]:
        """Returns for each server the rows of tables that it has kept, or None for first rows.

        Raises:
            RuntimeError: If the rows would have to move between servers.
        """
        kept = [rows.kept for rows in objects.tables.values()]
        if not any(kept):
            return [None] * len(placement.servers)
        where = self._where(objects, placement)
        if any(not each or each[0][:2] != (self, where) or each != kept[0] for each in kept):
            raise RuntimeError(
                f"The rows of {', '.join(objects.tables)} are on other parameter servers since they"
                " were trained with other variables or another strategy. Read them with"
                " strategy.read_rows, and create a mirror.ps.ServerTable with these first rows."
            )
        return kept[0][0].references

    def _where(self, objects: TrainingObjects, placement: Placement) -> Any:
        return {name: placement.holders[name] for name in objects.tables}

    def read_rows(self, table: str, ids: Any) -> np.ndarray:
        """See `ParameterServerStrategy.read_rows`."""
        self.join()
        if self.placement is None or table not in self.placement.tables:
            there = [] if self.placement is None else sorted(self.placement.tables)
            raise ValueError(
                f"{table!r} is not a table on the parameter servers, whose tables are {there}. "
                "The tables of `sparse` are there after the first training step."
            )
        flat = np.asarray(ids).reshape(-1)
        split = split_ids(self.placement, {table: flat})
        while True:
            servers = [server for server, _ in self.placement.holders[table]]
            try:
                parts = [self.engine.ask_server(i, "rows", table, split[i][table]) for i in servers]
                break
            except LostError:
                self.thread.call(self.thread.driver.take_snapshot)  # recovers servers, or raises
        unique = np.concatenate([split[server][table] for server in servers])
        rows: np.ndarray = np.concatenate(parts)[np.searchsorted(unique, flat)]
        return rows.reshape(*np.shape(ids), *rows.shape[1:])


def has_tables(model: nnx.Module) -> bool:
    """Whether a model has a `ServerTable`."""
    return any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(nnx.state(model)))


def with_rows(model: nnx.Module) -> nnx.Module:
    """Returns a copy of a model whose tables have a few random rows."""
    copied, rng = nnx.clone(model), np.random.default_rng(0)
    for _, node in nnx.iter_graph(copied):
        if isinstance(node, nnx.Variable) and isinstance(held := node.get_value(), ServerRows):
            shape = (min(held.shape[0], _MOST_ROWS), *held.shape[1:])
            node.set_value(rng.normal(size=shape).astype(held.dtype))
    return copied


def _is_same(x: ModelDefinition, y: ModelDefinition) -> bool:
    """Whether workers can use the same program for both."""
    is_same = (x.graphdef, x.paths, x.placement) == (y.graphdef, y.paths, y.placement)
    is_same = is_same and x.wrt is y.wrt
    return is_same and all(np.array_equal(bits(x.local[k]), bits(y.local[k])) for k in x.local)


def _have_same_bits(a: Sequence[Any], b: Sequence[Any]) -> bool:
    """Whether no value has changed; the check of a step may copy arrays to other devices."""
    return len(a) == len(b) and all(map(_has_same_bits, a, b))


def _has_same_bits(new: Any, old: Any) -> bool:
    if new is old:
        return True
    if isinstance(old, jax.ShapeDtypeStruct) or isinstance(new, jax.ShapeDtypeStruct):
        return False
    if old.is_deleted() or (new.shape, new.dtype) != (old.shape, old.dtype):
        return False
    return as_numpy(new).tobytes() == as_numpy(old).tobytes()


def _single(results: Sequence[Result]) -> Any:
    return as_users(results[0].value)


_NAMES = ("model", "optimizer")
_OBJECTS = tuple(map(ArgumentOfStep, _NAMES))


@final
class ServedSteps:
    """The steps of a trainer whose model is on parameter servers.

    Args:
        strategy: The strategy.
        served: Schedules the steps.
        training: The step, the model and the optimizer of the trainer.
    """

    def __init__(
        self, strategy: RemoteStrategy, served: ServedTraining, training: Training
    ) -> None:
        self._local, self._served, self._training = strategy.local, served, training
        self._model, self._optimizer = training.objects["model"], training.objects["optimizer"]
        self.multiple = training.accumulate_steps * strategy.num_replicas_in_sync
        self.most_running = 2 * served.engine.num_workers + 2
        self._has_tables = has_tables(self._model)
        self.checked_model = with_rows(self._model) if self._has_tables else self._model
        self.on_host = self.may_fail_later = True
        self.has_lost_values = self._runs = False
        self._treedef: Any = None  # of what the step returns

    def run(self, batch: PaddedBatch) -> Sums:
        """See `StepRunner.run`."""
        if not self._has_tables:
            self._training.trace_once(batch)
        return self._schedule(*host_batch(batch))

    def _schedule(self, batch: PyTree, mask: Any) -> Sums:
        # Padding is at the end. The gradient of a part without examples would be a division by 0.
        rows = mask.size // self._served.num_parts
        num_parts = max(1, math.ceil(np.count_nonzero(mask) / rows))
        value = self._served.schedule_step(
            self._training.step,
            self._model,
            self._optimizer,
            [
                ((*_OBJECTS, *_rows((batch, mask), start, start + rows)), {})
                for start in range(0, num_parts * rows, rows)
            ],
            weight_of=divisor_of,
            join=add_sums,
        )
        self._runs, self.has_lost_values = True, False

        @functools.cache
        def numbers() -> list[Any]:
            try:
                leaves, self._treedef = jax.tree.flatten(value.fetch())
            except CancelledError:
                self._served.join()  # raises the error because of which it was canceled
                raise
            return leaves

        if self._treedef is None:
            numbers()
        every = range(self._treedef.num_leaves)
        return self._treedef.unflatten([_Number(numbers, i) for i in every])

    def synchronize(self) -> None:
        """See `StepRunner.synchronize`."""
        if not self._runs:  # also after the strategy was closed
            return
        try:
            self._served.join()
        except (KeyboardInterrupt, SystemExit):  # steps still run
            raise
        except BaseException:
            self._end()
            raise
        self._end()

    def _end(self) -> None:
        self._runs = False
        self.has_lost_values = not self._served.is_collected

    def lowered_text(self, batch: PaddedBatch | None) -> str:
        """See `StepRunner.lowered_text`."""
        raise NotImplementedError(
            "ParameterServerStrategy compiles steps on the workers, whose programs cannot be "
            "returned. Use the same step with mirror.MirroredStrategy."
        )

    def verify(self, batch: PaddedBatch, rtol: float) -> VerifyReport:
        """See `StepRunner.verify`."""
        if self._has_tables:
            raise ValueError(
                "verify trains the model in this program too, which has no rows of a "
                "mirror.ps.ServerTable. Verify a smaller model, whose table is an nnx.Param."
            )
        self.synchronize()
        self._training.trace_once(batch)
        batch, mask = host_batch(batch)
        objects = (self._model, self._optimizer)
        saved = copy_of(objects)
        before = variables_of(objects, _NAMES)
        try:
            sums = self._schedule(batch, mask)
            self.synchronize()
            after = variables_of(objects, _NAMES)
        finally:
            for mine, old in zip(objects, saved, strict=True):
                nnx.update(mine, nnx.state(old))
        row = functools.partial(jax.tree.map, lambda x: PerReplica([x]))

        def run_one(signs: np.random.Generator | None) -> Outcome:
            single = copy_of(objects)
            if signs is not None:
                nudge_variables(single, signs)
            results = self._local.run(self._training.step, (*single, row(batch), row(mask)))
            return results, variables_of(single, _NAMES)

        outcome: Outcome = sums, after
        rows = rows_of(rtol, functools.partial(differences, before), outcome, run_one)
        return checked(VerifyReport(self.multiple, rtol, rows), CAUSES)


def add_sums(parts: Sequence[Result]) -> Sums:
    """Returns the sums of a step, given the results of its parts."""

    def add(*values: np.ndarray) -> np.ndarray:
        return np.sum(values, axis=0, dtype=np.asarray(values[0]).dtype)

    total: Sums = jax.tree.map(add, *(part.value for part in parts))
    return total


def _rows(tree: PyTree, start: int, stop: int) -> PyTree:
    return jax.tree.map(lambda x: x[start:stop], tree)


@final
class _Number:
    """One number of the sums of a step, which is fetched when NumPy needs it."""

    def __init__(self, numbers: Callable[[], list[Any]], index: int) -> None:
        self._numbers, self._index = numbers, index

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self._numbers()[self._index], dtype)
