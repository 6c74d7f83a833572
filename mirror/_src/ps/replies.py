"""Messages that workers receive and answer."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax

from mirror._src.base.types import PyTree
from mirror._src.ps.placement import Placement


class Export(NamedTuple):
    """An object that a worker fetches once: a function, or the definition of a model.

    Attributes:
        key: Number of the object; never used twice.
        reference: List of a reference to its pickle. In a list, the reference itself travels. None
            if the worker has it.
    """

    key: int
    reference: list[Any] | None


class ArgumentOfStep(NamedTuple):
    """Stands for the model, the optimizer or the next batch among the arguments of a step."""

    kind: str  # "model", "optimizer" or "next"
    iterator: Any = None


def is_place(node: Any) -> bool:
    """Whether a node among the arguments of a step stands for something else."""
    return isinstance(node, ArgumentOfStep)


def filled(tree: PyTree, value_for: Callable[[ArgumentOfStep], Any]) -> PyTree:
    """Replaces each `ArgumentOfStep` among the arguments of a step."""
    return jax.tree.map(
        lambda node: value_for(node) if is_place(node) else node, tree, is_leaf=is_place
    )


def without_places(tree: PyTree) -> PyTree:
    """Returns the arguments of a step without the places of the others."""
    return filled(tree, lambda _: None)


class StepWork(NamedTuple):
    """A training step, for all of its parts.

    Attributes:
        fn: Export of the function.
        model: Export of its `ModelShare`.
        ordinal: Number of the update: random keys are folded with it.
        weight_of: Export of a function that returns the weight of a part of a `Trainer`'s batch,
            given its result. None: the batch is not split.
        batch_of: Export of a function that returns what the functions of `sparse` receive, given
            the other positional arguments than model and optimizer; None means all arguments.
    """

    fn: Export
    model: Export
    ordinal: int
    weight_of: Export | None
    batch_of: Export | None = None


class ModelShare(NamedTuple):
    """Definition of a model, where its leaves are, and for each table the function of its ids."""

    definition: Any
    placement: Placement
    id_functions: Mapping[str, Callable[..., Any]] = {}


class Result(NamedTuple):
    """Result of a part.

    Attributes:
        value: What the function returned, in NumPy.
    """

    value: Any


class PerReplicaResult(NamedTuple):
    """A result that differs between the replicas of a worker."""

    values: tuple[Any, ...]


class ServerLost(NamedTuple):
    """A server ended, has no values, or has values of another incarnation."""

    server: int | None


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


class NotSetUp(NamedTuple):
    """The worker has been restarted and does not know its servers yet."""


class NotExported(NamedTuple):
    """The worker lacks an export whose reference was not sent along."""


class NotExportedError(Exception):
    """An export is missing, and has no reference."""


class ServerGoneError(Exception):
    """A server cannot be reached, or refuses because it has no values of this incarnation."""

    def __init__(self, server: int | None) -> None:
        super().__init__(f"parameter server {server} is lost")
        self.server = server


class Servers(Protocol):
    """The servers, as a worker reaches them."""

    def call_all(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Calls a method of each server with its arguments, concurrently.

        Raises:
            ServerGoneError: If a server cannot be reached.
        """
        ...
