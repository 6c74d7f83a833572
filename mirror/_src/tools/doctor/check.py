"""`Check`, the result of one check, and a table of checks that run one after the other."""

import importlib
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeAlias, get_args

from mirror._src.base.errors import counted, first_line
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


class Problem(Exception):
    """Ends the checks, because those that follow would fail too, or wait forever."""

    def __init__(self, *checks: Check) -> None:
        super().__init__(*map(str, checks))
        self.checks = checks


def run_steps(
    steps: Iterable[tuple[str, Callable[[], Check | Iterable[Check]]]], option: str = ""
) -> Iterator[dict[str, Any]]:
    """Runs checks by name; yields a line when one begins, and one with each result.

    With an option of `mirror doctor`, such as `"--ray"`, a check that raises an error is the last.
    """
    fix = f"Report it with the output of mirror doctor {option} --report.".replace("  ", " ")
    for name, step in steps:
        yield {"begins": name}
        try:
            found = step()
            yield from map(asdict, [found] if isinstance(found, Check) else found)
        except Problem as problem:
            yield from map(asdict, problem.checks)
            return
        except Exception as error:
            yield asdict(Check(name, "problem", f"failed: {first_line(error)}", "", fix))
            if option:
                return


def main(module: str, secs: float) -> None:
    """Prints the lines of a module of checks, as a subprocess.

    Args:
        module: `"probes"`, `"distributed"` or `"ray_nodes"`.
        secs: How long to wait for others in each check.
    """
    for line in importlib.import_module(f"mirror._src.tools.doctor.{module}").run(secs):
        print(json.dumps(line), flush=True)
    if module == "distributed":
        # JAX would make the processes wait for each other, also for one that is stuck.
        sys.stdout.flush()
        os._exit(0)


def worst(checks: Iterable[Check]) -> State:
    """Returns the worst state."""
    return max((check.state for check in checks), key=STATES.index, default="ok")


def summary(checks: Sequence[Check]) -> str:
    """Returns a line with the number of problems and warnings."""
    counts = {s: sum(check.state == s for check in checks) for s in ("problem", "warning")}
    parts = [counted(n, state) for state, n in counts.items() if n]
    return f"{', '.join(parts) or 'no problems'} ({counted(len(checks), 'check')})"
