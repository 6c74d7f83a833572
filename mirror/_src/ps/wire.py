"""Messages of an update as bytes and plain tuples, in which they travel.

Ray pickles arguments and results with cloudpickle, which runs Python code for each object of a
class of ours and for each reference. That took as long as the message itself.
"""

import pickle
from collections.abc import Collection, Mapping
from typing import Any

from mirror._src.ps.actions import Assignment
from mirror._src.ps.messages import Pulled, Push
from mirror._src.ps.replies import Export, Result, StepWork

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
