"""`ServedTraining`: the model and optimizer that the parameter servers train now."""

import logging
from collections.abc import Callable, Sequence
from typing import Any, final

import jax
import numpy as np
from flax import nnx

from mirror._src.ps.conductor import Conductor
from mirror._src.ps.engine import RayEngine
from mirror._src.ps.messages import Definition, Export, ModelShare, ServerSnapshot
from mirror._src.ps.objects import ModelDefinition, TrainingObjects, on_host
from mirror._src.ps.optimizer_tree import join_optimizer_state, split_optimizer_state
from mirror._src.ps.pickling import pickled_function
from mirror._src.ps.placement import Placement
from mirror._src.ps.sparse import SparseTables
from mirror._src.training.checkpoints.files import KeyData

_logger = logging.getLogger("mirror")


@final
class ServedTraining:
    """The model and optimizer that the parameter servers train now.

    The objects of the main program are authoritative while no step is scheduled. The first step
    afterwards loads them onto the servers if they have changed; `collect` writes the values of the
    servers back into them.

    Args:
        conductor: Runs steps.
        engine: Exports the model.
        is_sync: Whether steps are synchronous.
        make_placement: Returns where the leaves of a model lie.
        tables: The variables of which workers pull and push the touched rows alone.
    """

    def __init__(
        self,
        conductor: Conductor,
        engine: RayEngine,
        *,
        is_sync: bool,
        make_placement: Callable[[TrainingObjects], Placement],
        tables: SparseTables,
    ) -> None:
        self._conductor, self._engine, self._is_sync = conductor, engine, is_sync
        self._make_placement, self._tables = make_placement, tables
        self._objects: TrainingObjects | None = None
        self._known: list[Any] = []
        self._num_steps = 0  # since the objects were last up to date
        self._first = 0
        self.placement: Placement | None = None
        self._export: Export | None = None
        self._share: ModelShare | None = None

    def prepare(self, model: nnx.Module, optimizer: nnx.Optimizer[Any]) -> tuple[Export, int]:
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

    def collect(self) -> None:
        """Writes values and optimizer state of the servers into the objects."""
        if not self._num_steps or self._objects is None:
            return
        try:
            self._collect(self._objects)
        except Exception:
            self.forget()  # the strategy remains usable
            raise

    def _collect(self, objects: TrainingObjects) -> None:
        assert self.placement is not None
        snapshots = self._conductor.take_snapshot()
        if not _have_same_bits(objects.arrays(), self._known):
            _logger.warning(
                "The model or optimizer was changed in the main program while steps were "
                "scheduled. The values of the parameter servers replace the change. Call "
                "coordinator.join() before changing them."
            )
        values = self.placement.join([snapshot.values for snapshot in snapshots])
        state = join_optimizer_state(
            objects.optimizer.tx,
            objects.trained,
            self.placement,
            [snapshot.state for snapshot in snapshots],
        )
        objects.write(values, state, snapshots[0].version)
        self._first = snapshots[0].version
        self._num_steps = 0
        self._known = objects.arrays()

    @property
    def is_collected(self) -> bool:
        """Whether the objects have the values of all steps that have ended."""
        return self._objects is not None and not self._num_steps

    def forget(self) -> None:
        """Drops what the servers have: the next step loads the objects again."""
        self._objects, self._num_steps = None, 0

    def _is_up_to_date(self) -> bool:
        objects = self._objects
        assert objects is not None
        return objects.has_same_structure() and _have_same_bits(objects.arrays(), self._known)

    def _load(self, objects: TrainingObjects) -> None:
        placement = self._make_placement(objects)
        tx = objects.optimizer.tx
        values = placement.split(objects.read())
        states = split_optimizer_state(tx, objects.trained, placement, objects.read_optimizer())
        snapshots = [ServerSnapshot(own, state) for own, state in zip(values, states, strict=True)]
        self._conductor.load(self._definitions(placement, tx), snapshots, objects.step)
        self.placement, self._objects, self._known = placement, objects, objects.arrays()
        share = ModelShare(objects.definition(), placement, self._tables.functions)
        if self._share is None or not _is_same(share, self._share):  # workers compile each
            for name, function in share.id_functions.items():
                pickled_function(self._engine, function, f"sparse[{name!r}]")
            self._share = share
        self._export = self._engine.export(self._share)
        self._first, self._num_steps = objects.step, 0

    def _definitions(self, placement: Placement, tx: Any) -> list[Any]:
        return [
            self._engine.dumps(Definition(slices, tx, self._is_sync, placement.tables))
            for slices in placement.servers
        ]


def _is_same(a: ModelShare, b: ModelShare) -> bool:
    """Whether workers can use the same program for both."""
    x, y = a.definition, b.definition
    is_same = (x.graphdef, x.places, x.leaves) == (y.graphdef, y.places, y.leaves)
    return is_same and x.wrt is y.wrt and a.placement == b.placement and _are_equal(x, y)


def _are_equal(x: ModelDefinition, y: ModelDefinition) -> bool:
    pairs = zip(jax.tree.leaves(_data(x)), jax.tree.leaves(_data(y)), strict=True)
    return all(np.array_equal(a, b) for a, b in pairs)


def _data(definition: ModelDefinition) -> dict[str, Any]:
    """Returns the local arrays, with the data of random keys."""
    return {name: getattr(value, "data", value) for name, value in definition.local.items()}


def _have_same_bits(a: Sequence[Any], b: Sequence[Any]) -> bool:
    """Whether no value has changed; the check of a step may copy arrays to other devices."""
    return len(a) == len(b) and all(map(_has_same_bits, a, b))


def _has_same_bits(new: Any, old: Any) -> bool:
    if new is old:
        return True
    if old.is_deleted() or (new.shape, new.dtype) != (old.shape, old.dtype):
        return False
    return _bits(new) == _bits(old)


def _bits(array: Any) -> bytes:
    host = on_host(array)
    data: np.ndarray = host.data if isinstance(host, KeyData) else host
    return data.tobytes()
