"""`Check`: one finding, and how findings are shown."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

State: TypeAlias = Literal["ok", "warning", "problem"]
STATES: tuple[State, ...] = get_args(State)


@dataclass(frozen=True)
class Check:
    """One finding.

    Attributes:
        name: what was looked at.
        state: `"ok"`, `"warning"` (it works, with a drawback) or `"problem"`.
        found: what there is, in a line.
        meaning: what follows from it; empty where nothing does.
        fix: the line that mends it; empty where nothing needs mending.
    """

    name: str
    state: State
    found: str
    meaning: str = ""
    fix: str = ""

    def __str__(self) -> str:
        lines = [f"{self.state:<7}  {self.name}: {self.found}"]
        lines += [f"{'':9}{text}" for text in (self.meaning, self.fix) if text]
        return "\n".join(lines)


def worst(checks: Iterable[Check]) -> State:
    """The worst state of all."""
    return max((check.state for check in checks), key=STATES.index, default="ok")


def summary(checks: Sequence[Check]) -> str:
    """How many problems and warnings there are."""
    counts = {s: sum(check.state == s for check in checks) for s in ("problem", "warning")}
    parts = [f"{n} {state}{'s' * (n > 1)}" for state, n in counts.items() if n]
    return f"{', '.join(parts) or 'all is well'} ({len(checks)} checks)"
