"""The laws, the search for programs that violate one, and their shrinking."""

import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np

import mirror
from tests.fuzz.generate import generate
from tests.fuzz.lowering import lowered
from tests.fuzz.program import (
    NUM_REPLICAS,
    Block,
    Kind,
    Program,
    Statement,
    listing,
    rewritten,
    statements,
)
from tests.fuzz.reference import Hang, simulate
from tests.support.inside import strategy_in_slices

NUM_INPUTS = 6
_SHRINK_SECS = 10.0
Rows = list[list[np.ndarray]]


@dataclass(frozen=True)
class Failure:
    """A law that a program breaks."""

    law: str
    words: str


@dataclass
class Tally:
    """The outcomes of the checked programs."""

    programs: int = 0
    accepted: int = 0
    refused_and_hang: int = 0
    mirrored: int = 0
    per_replica: int = 0
    equal_by_chance: int = 0
    runs: int = 0
    not_implemented: list[str] = field(default_factory=list)

    @property
    def acceptance(self) -> float:
        """Which part of the programs the proof accepts."""
        return self.accepted / max(1, self.programs)


class Broken(AssertionError):
    """A program that breaks a law, in a form that can be checked again."""

    def __init__(self, profile: str, seed: int, failure: Failure, program: Program) -> None:
        super().__init__(
            f"{failure.law}: {failure.words}\n\n"
            f"python -m tests.fuzz {profile} {seed}\n\n{listing(program)}\n\n{program!r}"
        )
        self.failure, self.seed, self.program = failure, seed, program


# Inputs


def inputs_of(program: Program, seed: int) -> Rows:
    """For each replica its inputs, small integers."""
    rng = np.random.default_rng(seed)
    rows: Rows = [[] for _ in range(NUM_REPLICAS)]
    for kind, differs in zip(program.kinds, program.per_replica, strict=True):
        shared = _drawn(rng, kind)
        for row in rows:
            row.append(_drawn(rng, kind) if differs else shared)
    return rows


def _drawn(rng: np.random.Generator, kind: Kind) -> np.ndarray:
    return rng.integers(-4, 5, kind.shape).astype(kind.dtype)


def arguments(program: Program, rows: Rows) -> tuple[Any, ...]:
    """The inputs in the form that `run` accepts."""
    columns = zip(*rows, strict=True)
    return tuple(
        mirror.PerReplica(column) if differs else column[0]
        for column, differs in zip(columns, program.per_replica, strict=True)
    )


# What is asked of mirror


def inspected(strategy: mirror.Strategy, program: Program, rows: Rows) -> tuple[list[bool], Any]:
    """For each result whether the proof says that it is mirrored; and why `run` would refuse."""
    inspect = getattr(strategy, "inspect", None) or strategy.program
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        report = inspect(lowered(program), arguments(program, rows))
    return [row.state == "mirrored" for row in report.results], report.problems


def proof_law(strategy: mirror.Strategy, program: Program, tally: Tally) -> Failure | None:
    """Values marked mirrored are equal, and accepted programs cannot hang."""
    every = [inputs_of(program, seed) for seed in range(NUM_INPUTS)]
    mirrored, problems = inspected(strategy, program, every[0])
    found = [simulate(program, rows) for rows in every]
    tally.programs += 1
    hangs = [outcome for outcome in found if isinstance(outcome, Hang)]
    if problems:
        tally.refused_and_hang += bool(hangs)
        return None
    tally.accepted += 1
    if hangs:
        return Failure("hang", f"accepted, and replicas wait at {hangs[0].stops}")
    equal = [True] * len(mirrored)
    for outcome in found:
        for i, values in enumerate(zip(*outcome, strict=True)):
            equal[i] &= all(_same(values[0], value) for value in values[1:])
            if mirrored[i] and not equal[i]:
                number = program.block.outputs[i]
                return Failure("soundness", f"v{number} is marked mirrored, and is {values}")
    tally.mirrored += sum(mirrored)
    tally.per_replica += len(mirrored) - sum(mirrored)
    tally.equal_by_chance += sum(equal) - sum(mirrored)
    return None


def run_law(
    strategies: dict[str, mirror.Strategy], program: Program, tally: Tally
) -> Failure | None:
    """Every executor computes what the reference does, on every device, marked as was proved."""
    first = next(iter(strategies.values()))
    failure = proof_law(first, program, tally)
    rows = inputs_of(program, 0)
    mirrored, problems = inspected(first, program, rows)
    if failure is not None or problems:
        return failure
    outcome = simulate(program, rows)
    assert not isinstance(outcome, Hang)
    for name, strategy in strategies.items():
        try:
            results = _run(strategy, program, rows)
            failure = _compared(name, program, mirrored, results, outcome)
        except NotImplementedError as error:
            tally.not_implemented.append(f"{name}: {error}")
            continue
        except Exception as error:
            failure = Failure(f"{name} raises", f"{type(error).__name__}: {error}")
        tally.runs += 1
        if failure is not None:
            return failure
    return None


def _run(strategy: mirror.Strategy, program: Program, rows: Rows) -> Any:
    with warnings.catch_warnings():  # each program is a new function that runs once
        warnings.simplefilter("ignore", UserWarning)
        return strategy.run(lowered(program), arguments(program, rows))


def _compared(
    name: str, program: Program, mirrored: list[bool], results: Any, outcome: Rows
) -> Failure | None:
    for i, (number, result) in enumerate(zip(program.block.outputs, results, strict=True)):
        is_mirrored = not isinstance(result, mirror.PerReplica)
        if is_mirrored != mirrored[i]:
            return Failure(f"{name} marks", f"v{number} is not marked as in the proof")
        wanted = [row[i] for row in outcome]
        if is_mirrored:
            copies = [shard.data for shard in result.addressable_shards]
            got = copies if result.is_fully_replicated else [result]  # in slices
            wanted = [wanted[0]] * len(got)
        else:
            got = list(result.values)
        got = [np.asarray(value) for value in got]
        pairs = zip(got, wanted, strict=True)
        if not all(a.dtype == b.dtype and _same(a, b) for a, b in pairs):
            words = f"v{number} is {got}, and should be {wanted}"
            return Failure(f"{name} computes", words)
    return None


def _same(a: Any, b: Any) -> bool:
    return a.shape == b.shape and bool(np.array_equal(a, b))


def cpu_strategies() -> dict[str, mirror.Strategy]:
    """Four replicas under each executor."""
    cpus = jax.devices("cpu")
    ops = mirror.ReductionToOneDevice()
    return {
        "pmap": mirror.MirroredStrategy(cpus[:4]),
        "vmap": mirror.MirroredStrategy(cpus[:1], replicas_per_device=4),
        "pairs": mirror.MirroredStrategy(cpus[:2], replicas_per_device=2),
        "staged": mirror.MirroredStrategy(cpus[:4], cross_device_ops=ops),
        "in turn": mirror.MirroredStrategy(cpus[:2], replicas=4),
        "in slices": strategy_in_slices(cpus[:4]),
    }


# The search

Law = Callable[[Program, Tally], Failure | None]


def search(
    law: Law, profile: str, secs: float, at_least: int, start: int = 0, shrinks: bool = True
) -> Tally:
    """Checks programs until the time is over and enough have been checked.

    Raises:
        Broken: a program breaks the law.
    """
    tally, end = Tally(), time.monotonic() + secs
    seed = start
    while time.monotonic() < end or seed < start + at_least:
        program = generate(profile, seed)
        failure = checked(law, program, tally)
        if failure is not None:
            program = shrunk(law, program, failure.law) if shrinks else program
            raise Broken(profile, seed, failure, program)
        seed += 1
    return tally


def checked(law: Law, program: Program, tally: Tally) -> Failure | None:
    """The law's word on a program; what is raised is a failure too."""
    try:
        return law(program, tally)
    except Exception as error:
        return Failure(f"raises {type(error).__name__}", str(error))


def shrunk(law: Law, program: Program, broken: str, secs: float = _SHRINK_SECS) -> Program:
    """The program without what it breaks the law without, as far as the time goes."""
    end, at, is_new = time.monotonic() + secs, 0, True
    candidates = _smaller(program)
    while time.monotonic() < end:
        if at >= len(candidates):
            if not is_new:
                break
            at, is_new = 0, False
            continue
        failure = checked(law, candidates[at], Tally())
        if failure is not None and failure.law == broken:
            program, is_new = candidates[at], True
            candidates = _smaller(program)
        else:
            at += 1
    return program


def _smaller(program: Program) -> list[Program]:
    """Programs with one output less, one statement less, or a simpler one in its place."""
    block, found = program.block, []
    if len(block.outputs) > 2:
        for number in block.outputs:
            found.append(replace(program, block=replace(block, outputs=(number,))))
    for number in block.outputs if len(block.outputs) > 1 else ():
        kept = tuple(each for each in block.outputs if each != number)
        found.append(replace(program, block=replace(block, outputs=kept)))
    read = {number for each in statements(block) for number in each.args}
    read |= {number for each in _blocks(block) for number in each.outputs}
    every = list(statements(block))
    kinds = {
        number: kind for each in every for number, kind in zip(each.outs, each.kinds, strict=True)
    }
    kinds.update(zip(block.inputs, program.kinds, strict=True))
    for target in sorted(every, key=_size, reverse=True):
        instead = [[]] if not set(target.outs) & read else list(_simpler(target, kinds))
        for new in instead:
            found.append(replace(program, block=rewritten(block, _replacing(target, new))))
    return found


def _size(statement: Statement) -> int:
    return sum(len(list(statements(block))) for block in statement.blocks)


def _simpler(target: Statement, kinds: dict[int, Kind]) -> Iterator[list[Statement]]:
    """Constants in the place of a statement's results, or copies of its operands."""
    if target.op in ("const", "copy", "ref"):
        return
    yield [
        Statement("const", (), (out,), (kind,), (_ones(kind.shape),))
        for out, kind in zip(target.outs, target.kinds, strict=True)
    ]
    for arg in target.args:
        if all(kinds.get(arg) == kind for kind in target.kinds):
            yield [Statement("copy", (arg,), (out,), target.kinds[:1]) for out in target.outs]


def _ones(shape: tuple[int, ...]) -> Any:
    value: Any = 1
    for size in reversed(shape):
        value = (value,) * size
    return value


def _replacing(
    target: Statement, new: list[Statement]
) -> Callable[[Statement], Statement | list[Statement]]:
    return lambda statement: new if statement is target else statement


def _blocks(block: Block) -> Iterator[Block]:
    yield block
    for statement in statements(block):
        yield from statement.blocks
