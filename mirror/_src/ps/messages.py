"""Messages between the main program, workers and servers, and the buffers of values in them.

Arrays are in NumPy. Messages of an update travel as bytes and plain tuples: Ray pickles arguments
and results with cloudpickle, which runs Python code for each object of a class of ours and for each
reference. That took as long as the message itself.
"""

import functools
import math
import pickle
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol

import jax
import numpy as np
import optax

from mirror._src.base.types import Array
from mirror._src.ps.placement import Slice, rows

_MOST_PACKED_BYTES = 64 << 10


class BufferLayout:
    """Packs slices into flat buffers: small slices of one dtype together, each large one alone.

    One buffer instead of a hundred small arrays is one transfer from a device instead of a hundred.
    Large slices are not packed, because the copy would cost more.

    Args:
        slices: The slices. Their order determines the buffers.
    """

    def __init__(self, slices: Iterable[Slice]) -> None:
        self.slices = tuple(slices)
        packed: dict[str, list[Slice]] = {}
        alone = []
        for part in self.slices:
            if part.nbytes <= _MOST_PACKED_BYTES:
                packed.setdefault(part.dtype, []).append(part)
            else:
                alone.append([part])
        self._groups = [*packed.values(), *alone]

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(part.nbytes for part in self.slices)

    def pack_np(self, values: Mapping[str, np.ndarray]) -> tuple[np.ndarray, ...]:
        """Returns flat buffers with the slices' values; of a slice alone, a view if possible."""
        return tuple(
            values[group[0].leaf].reshape(-1)
            if len(group) == 1
            else np.concatenate([values[part.leaf].reshape(-1) for part in group])
            for group in self._groups
        )

    def unpack(self, buffers: Sequence[Any]) -> dict[str, Any]:
        """Returns the slices' values by leaf: views of buffers in NumPy; also inside `jax.jit`."""
        values = {}
        for buffer, group in zip(buffers, self._groups, strict=True):
            start = 0
            for part in group:
                size = math.prod(part.shape)
                values[part.leaf] = buffer[start : start + size].reshape(part.shape)
                start += size
        return values

    def pack(self, values: Mapping[str, Array]) -> tuple[Array, ...]:
        """Does what `pack_np` does with arrays of JAX, inside `jax.jit`."""

        def flat(part: Slice) -> Array:
            return jax.lax.reshape(values[part.leaf], (math.prod(part.shape),))

        # jax.numpy would convert 64-bit arrays to 32 bits where JAX's x64 mode is disabled.
        return tuple(jax.lax.concatenate([*map(flat, group)], 0) for group in self._groups)

    def pack_shared(self, values: Mapping[str, Array]) -> tuple[Array, ...]:
        """Returns the buffers that hold several slices, inside `jax.jit`; see `add_alone`."""
        return self._shared.pack(values)

    def add_alone(
        self, shared: Sequence[np.ndarray], whole: Callable[[str], np.ndarray]
    ) -> tuple[np.ndarray, ...]:
        """Returns all buffers, given the result of `pack_shared`.

        A slice alone in its buffer is a view of the leaf, so that no program has to copy it.

        Args:
            shared: What `pack_shared` returned.
            whole: Returns all rows of a leaf.
        """
        packed = iter(shared)
        return tuple(
            next(packed) if len(group) > 1 else rows(whole(group[0].leaf), group[0]).reshape(-1)
            for group in self._groups
        )

    @functools.cached_property
    def _shared(self) -> "BufferLayout":
        """The layout of the slices that share a buffer."""
        return BufferLayout(part for group in self._groups if len(group) > 1 for part in group)


Buffers = tuple[np.ndarray, ...]


class Definition(NamedTuple):
    """The part of the model that a server holds.

    Attributes:
        slices: Its slices, trained and moving.
        tx: The optimizer. It sees nested dicts of this server's trained slices, and the argument
            `staleness` if it takes extra arguments.
        is_sync: Whether pushes wait for the commit of their step.
        tables: Leaves whose touched rows alone are pulled and pushed.
        first_rows: For each `ServerTable`, which the main program does not hold, the function that
            returns its first rows.
    """

    slices: tuple[Slice, ...]
    tx: optax.GradientTransformation
    is_sync: bool
    tables: frozenset[str] = frozenset()
    first_rows: Mapping[str, Callable[[int, int], Any]] = {}

    @property
    def trained(self) -> dict[str, Slice]:
        """The trained slices by leaf."""
        return {part.leaf: part for part in self.slices if part.kind == "trained"}


class ServerSnapshot(NamedTuple):
    """State of a server. Two of them, of all else and of its tables, continue it bit for bit.

    Attributes:
        values: Each slice's values.
        state: The optimizer's state by path; `None` initializes it.
        version: Number of updates applied.
        applied: Ranges of the numbers of asynchronous tasks that were applied.
    """

    values: Mapping[str, np.ndarray]
    state: Mapping[tuple[str, ...], np.ndarray] | None = None
    version: int = 0
    applied: tuple[tuple[int, int], ...] = ()


class Rejected(NamedTuple):
    """The answer to a pull, push or commit that a server cannot apply.

    Attributes:
        reason: `not loaded`: the server has restarted; `other incarnation`: the servers have
            returned to a snapshot since, or this one has not yet; `late`: the step was committed
            without this part, or has been committed.
        results: Of `late`: the task that was committed last, and the result of each of its parts.
    """

    reason: Literal["not loaded", "other incarnation", "late"]
    results: tuple[int, dict[int, Any]] | None = None


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
        result: The result of the part: its worker may be lost after the commit.
    """

    incarnation: int
    task: int
    part: int
    based_on: int
    weight: float
    gradients: Buffers
    changes: Buffers = ()
    rows: Mapping[str, tuple[np.ndarray, Any]] = {}
    result: Any = None


class Committed(NamedTuple):
    """A finished synchronous step: what a server applies, once, at version `step`.

    Attributes:
        step: The version of all servers until this commit; afterwards it is `step + 1`.
        task: The number of the task whose gradients are applied. All other gradients are dropped.
        num_parts: The number of its parts.
    """

    step: int
    task: int
    num_parts: int


class Assignment(NamedTuple):
    """One part of a task on one worker.

    Attributes:
        task: The number of the task.
        part: The index of the part.
        num_parts: The number of parts of the task.
        incarnation: How often the servers have gone back to a snapshot.
        commit: The last commit of this incarnation, for servers that have not received it yet.
            None for asynchronous steps.
        step: The version of the servers that a synchronous step needs, otherwise None.
    """

    task: int
    part: int
    num_parts: int
    incarnation: int
    commit: Committed | None
    step: int | None


class Export(NamedTuple):
    """An object that a worker fetches once: a function, or the definition of a model.

    Attributes:
        key: Number of the object; never used twice.
        reference: List of a reference to its pickle. In a list, the reference itself travels. None
            if the worker has it.
    """

    key: int
    reference: list[Any] | None


class StepWork(NamedTuple):
    """A training step, for all of its parts.

    Attributes:
        fn: Export of the function.
        model: Export of its `ModelDefinition`.
        ordinal: Number of the update: random keys are folded with it.
        weight_of: Export of a function that returns the weight of a part of a `Trainer`'s batch,
            given its result. None: a step of the user, whose batch is not split.
    """

    fn: Export
    model: Export
    ordinal: int
    weight_of: Export | None


class Result(NamedTuple):
    """Result of a part.

    Attributes:
        value: What the function returned, in NumPy.
        is_committed: Whether the worker has told the servers to commit the step.
    """

    value: Any
    is_committed: bool = False


class Raised(NamedTuple):
    """The error that the user's function raised.

    Attributes:
        pickled: Pickle of its type, arguments and attributes, or None if they cannot be pickled.
        text: Type and message.
        traceback: Its traceback on the worker.
    """

    pickled: Any
    text: str
    traceback: str


class NotExportedError(Exception):
    """A worker lacks an export whose reference was not sent along."""


class LostError(Exception):
    """A server or worker has ended, or a server has no values, or has them of another incarnation.

    Args:
        index: Index of the server or worker, if known.
        reason: Why, in words.
        is_forever: Whether it will not be restarted.
    """

    def __init__(self, index: int | None, reason: str = "", *, is_forever: bool = False) -> None:
        super().__init__(reason)
        self.index, self.is_forever = index, is_forever


class Servers(Protocol):
    """The servers, as a worker reaches them."""

    def call_all(
        self, method: str, arguments: Sequence[tuple[Any, ...]]
    ) -> Callable[[], list[Any]]:
        """Calls a method of each server with its arguments, concurrently.

        Returns:
            A function that waits for the replies. It raises `LostError` if a server cannot be
            reached.
        """
        ...


def require_accepted(server: int, reply: Any) -> Any:
    """Returns the reply of a server.

    Raises:
        LostError: If the server has no values, or values of another incarnation.
    """
    if isinstance(reply, Rejected) and reply.reason != "late":
        raise LostError(server if reply.reason == "not loaded" else None, reply.reason)
    return reply


_KINDS: dict[str, Any] = {kind.__name__: kind for kind in (Pulled, Push, Result)}


def plain(message: Any) -> Any:
    """Returns a message as a plain tuple, which begins with its kind; others as they are."""
    name = type(message).__name__
    return (name, *message) if _KINDS.get(name) is type(message) else message


def typed(message: Any) -> Any:
    """Returns the message of which `plain` made a tuple; others as they are."""
    return _KINDS[message[0]](*message[1:]) if type(message) is tuple else message


def request(
    assignment: Assignment, work: Export | StepWork, known: Collection[int]
) -> tuple[bytes, dict[int, Any]]:
    """Returns what describes an assignment, and references to what the worker does not know yet.

    Args:
        assignment: The assignment.
        work: The function, or the step.
        known: Keys of the exports that the worker has.
    """
    parts: list[Any] = [work] if isinstance(work, Export) else list(work)
    exports = [part for part in parts if isinstance(part, Export)]
    references = {e.key: e.reference for e in exports if e.key not in known}
    return pickle.dumps((assignment, _with_references(work, {}))), references


def received(header: bytes, references: Mapping[int, Any]) -> tuple[Assignment, Export | StepWork]:
    """Returns assignment and work, given the result of `request`."""
    assignment, work = pickle.loads(header)
    return assignment, _with_references(work, references)


def _with_references(work: Export | StepWork, references: Mapping[int, Any]) -> Export | StepWork:
    def filled(part: Any) -> Any:
        is_export = isinstance(part, Export)
        return part._replace(reference=references.get(part.key)) if is_export else part

    filled_work: Export | StepWork = filled(work)
    return filled_work if isinstance(filled_work, Export) else StepWork(*map(filled, filled_work))
