"""`Check`: the result of one check."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from mirror._src.base.errors import counted
from mirror._src.base.terminal import paint, wrap

State: TypeAlias = Literal["ok", "warning", "problem"]
STATES: tuple[State, ...] = get_args(State)
COLORS: dict[State, str] = {"ok": "green", "warning": "yellow", "problem": "red"}


@dataclass(frozen=True)
class Check:
    """Result of one check.

    Attributes:
        name: What was checked.
        state: `"ok"`, `"warning"` (usable, with a drawback) or `"problem"`.
        found: What was found, in one line.
        meaning: What follows from it. May be empty.
        fix: How to fix it. Empty if there is nothing to fix.
    """

    name: str
    state: State
    found: str
    meaning: str = ""
    fix: str = ""

    @property
    def colored(self) -> str:
        """The text of the check, with a colored state in terminals."""
        return paint(self.state, COLORS[self.state]) + str(self).removeprefix(self.state)

    def __str__(self) -> str:
        lines = [f"{self.state:<7}  {self.name}: {self.found}"]
        lines += [f"{'':9}{text}" for text in (self.meaning, self.fix) if text]
        return wrap("\n".join(lines), indent=" " * 9)


def worst(checks: Iterable[Check]) -> State:
    """Returns the worst state."""
    return max((check.state for check in checks), key=STATES.index, default="ok")


def summary(checks: Sequence[Check]) -> str:
    """Returns a line with the number of problems and warnings."""
    counts = {s: sum(check.state == s for check in checks) for s in ("problem", "warning")}
    parts = [counted(n, state) for state, n in counts.items() if n]
    return f"{', '.join(parts) or 'no problems'} ({counted(len(checks), 'check')})"
