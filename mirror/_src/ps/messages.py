"""Requests to a parameter server and its answers, in NumPy alone, so that all of it travels."""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import numpy as np
import optax

from mirror._src.base.types import PyTree
from mirror._src.ps.placement import Slice

Buffers = tuple[np.ndarray, ...]


class Definition(NamedTuple):
    """The part of the model that a server holds.

    Attributes:
        slices: Its slices, trained and moving.
        tx: The optimizer. It sees nested dicts of this server's trained slices, and the argument
            `staleness` if it takes extra arguments. `None` if no slice is trained.
        is_sync: Whether pushes wait for the commit of their step.
        tables: Leaves whose touched rows alone are pulled and pushed.
    """

    slices: tuple[Slice, ...]
    tx: optax.GradientTransformation | None
    is_sync: bool
    tables: frozenset[str] = frozenset()


class ServerSnapshot(NamedTuple):
    """All that a server knows: loaded into another one, training continues bit for bit.

    Attributes:
        values: Each slice's values.
        state: The optimizer's state; `None` initializes it.
        version: Number of updates applied.
        applied: Ranges of the numbers of asynchronous tasks that were applied.
    """

    values: Mapping[str, np.ndarray]
    state: PyTree = None
    version: int = 0
    applied: tuple[tuple[int, int], ...] = ()


class Rejected(NamedTuple):
    """The answer to a pull, push or commit that a server cannot apply.

    Attributes:
        reason: `not loaded`: the server has restarted; `other incarnation`: the servers have
            returned to a snapshot since, or this one has not yet; `late`: the step was committed
            without this part.
    """

    reason: Literal["not loaded", "other incarnation", "late"]


class Pulled(NamedTuple):
    """The values of a server.

    Attributes:
        version: Number of updates applied.
        trained: Buffers of the trained slices that are not tables; read-only.
        moving: Buffers of the moving slices; read-only.
        rows: For each table, the rows asked for, in the order of the ids.
    """

    version: int
    trained: Buffers
    moving: Buffers
    rows: dict[str, np.ndarray]


class Push(NamedTuple):
    """Gradients that one part of a step sends to a server.

    Attributes:
        incarnation: The incarnation of the pull.
        task: Number of the task.
        part: Number of the part of the batch.
        based_on: Version of the pull. In synchronous mode, it identifies the step.
        weight: Weight of the part in the mean over the parts, such as its number of examples.
        gradients: The part's mean gradients, as buffers of the trained slices.
        changes: New minus pulled values, as buffers of the moving slices.
        rows: For each table, ids (int32, numbered as in the whole table, possibly repeated) and
            the gradients of their rows.
    """

    incarnation: int
    task: int
    part: int
    based_on: int
    weight: float
    gradients: Buffers
    changes: Buffers = ()
    rows: Mapping[str, tuple[np.ndarray, Any]] = {}
