"""The parts of a step that the processes read, as they tell each other about them."""

import json
from collections.abc import Sequence
from typing import Any, NamedTuple


class Form(NamedTuple):
    """The properties of a part that must be equal in all processes.

    Attributes:
        settings: Options of the dataset.
        structure: Structure of the tree.
        leaves: Name, dtype on the devices and shape of an example, of each leaf.
    """

    settings: str
    structure: str
    leaves: tuple[tuple[str, str, tuple[int, ...]], ...]

    @property
    def lines(self) -> dict[str, str]:
        """The properties by name, for messages."""
        shapes = {
            name: f"{dtype}[{','.join(map(str, shape))}] per example"
            for name, dtype, shape in self.leaves
        }
        return {"options": self.settings, "structure": self.structure, **shapes}

    @classmethod
    def from_text(cls, text: str) -> "Form":
        """Returns the form of its JSON."""
        settings, structure, leaves = json.loads(text)
        return cls(settings, structure, tuple((n, d, tuple(shape)) for n, d, shape in leaves))


class Part(NamedTuple):
    """The part of a step that one process has read.

    Attributes:
        size: Number of examples; None if its data have ended.
        form: Digest of the form.
        checksum: Of the values, in the first step.
        error: Why the process cannot read.
        state: State of its data after the part, or None.
    """

    size: int | None
    form: str = ""
    checksum: int = 0
    error: str = ""
    state: dict[str, Any] | None = None


class Step(NamedTuple):
    """The parts of a step that all processes have read.

    Attributes:
        number: Number of the step in its pass, from 0.
        total: Number of examples.
        largest: Number of examples of the process that has most.
        smallest: Number of examples of the process that has fewest; 0 if its data have ended.
        has_ended: Whether the data of some process have ended.
        sizes: Number of examples of each process, for messages.
        form: Digest of the form.
        is_same: Whether all processes have read the same values.
        states: State of the data of each process, which only the chief knows of others; None if a
            process has none.
    """

    number: int
    total: int
    largest: int
    smallest: int
    has_ended: bool
    sizes: str
    form: str
    is_same: bool
    states: Sequence[dict[str, Any] | None] | None
