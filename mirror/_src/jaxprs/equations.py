"""Walks over jaxprs and the programs inside their operations, and the user's lines of these."""

import abc
import contextlib
import itertools
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from mirror._src.base.tracebacks import is_users, place
from mirror._src.jaxprs.primitives import CALL, PASSING, SIMPLE, Kind, of_kind

NO_LINE = "an unknown line"


def _frames(eqn: JaxprEqn) -> list[traceback.FrameSummary]:
    """Returns the calls in which an operation was traced, outermost first."""
    frames = eqn.source_info.traceback
    return [] if frames is None else traceback.extract_tb(frames.as_python_traceback())


def user_line(eqn: JaxprEqn) -> str:
    """Returns the line of the user's code that an operation comes from: `train.py:42 in step`."""
    for frame in reversed(_frames(eqn)):
        if is_users(frame.filename):
            return f"{place(frame.filename, frame.lineno)} in {frame.name}"
    return NO_LINE


def line_within(eqn: JaxprEqn, around: Sequence[JaxprEqn]) -> str:
    """Returns the user's line of an operation or, if it has none, of the innermost call around it.

    JAX traces its own functions once and records only the first caller.
    """
    for outer in reversed(around):
        if user_line(eqn) != NO_LINE:
            break
        eqn = outer
    return user_line(eqn)


def is_within_file(eqn: JaxprEqn, suffixes: tuple[str, ...]) -> bool:
    """Whether an operation was called, directly or not, in a file whose path ends like this."""
    files = (frame.filename.replace("\\", "/") for frame in _frames(eqn))
    return any(file.endswith(suffixes) for file in files)


T = TypeVar("T")
_listed: WeakKeyDictionary[Jaxpr, Sequence[JaxprEqn]] = WeakKeyDictionary()
_PLAIN = {int, str, bool, float, type(None)}  # types of parameters that hold no program
_EVALUATED = of_kind(Kind.CALL | Kind.CONTROL)
_CONTROL = {"scan": "scan", "while": "while_loop", "cond": "cond"}


def inner_programs(params: Iterable[Any]) -> list[ClosedJaxpr | Jaxpr]:
    """Returns the programs among the parameters of an operation."""
    found: list[ClosedJaxpr | Jaxpr] = []
    for param in params:
        if isinstance(param, ClosedJaxpr | Jaxpr):
            found.append(param)
        elif isinstance(param, tuple | list) and not _PLAIN.issuperset(map(type, param)):
            found += inner_programs(param)
    return found


def jaxpr_of(program: ClosedJaxpr | Jaxpr) -> Jaxpr:
    """Returns the program without its constants."""
    return program.jaxpr if isinstance(program, ClosedJaxpr) else program


def equations(jaxpr: Jaxpr) -> Sequence[JaxprEqn]:
    """Returns all operations, including operations of inner programs; lists a program once."""
    listed = _listed.get(jaxpr)
    if listed is None:
        nested = [(e,) if e.primitive.name in SIMPLE else with_inner(e) for e in jaxpr.eqns]
        listed = _listed[jaxpr] = tuple(itertools.chain.from_iterable(nested))
    return listed


def with_inner(eqn: JaxprEqn) -> Sequence[JaxprEqn]:
    """Returns an operation, then the operations inside it."""
    programs = inner_programs(eqn.params.values())
    return [eqn, *itertools.chain.from_iterable(map(equations, map(jaxpr_of, programs)))]


def walk(
    program: ClosedJaxpr | Jaxpr,
    arguments: Sequence[Any],
    constant: Callable[[Any], Any],
    equation: Callable[[JaxprEqn, list[Any]], Sequence[Any]],
) -> list[Any]:
    """Interprets a program, operation by operation, and returns the results for its outputs.

    Args:
        program: The program.
        arguments: The interpretation of its inputs.
        constant: Returns the interpretation of a constant of the program.
        equation: Returns the interpretation of the outputs of an operation, given its inputs'.
    """
    jaxpr = jaxpr_of(program)
    consts = program.consts if isinstance(program, ClosedJaxpr) else ()
    values: dict[Any, Any] = dict(zip(jaxpr.constvars, map(constant, consts), strict=True))
    values.update(zip(jaxpr.invars, arguments, strict=True))

    for eqn in jaxpr.eqns:
        operands = [constant(a.val) if isinstance(a, Literal) else values[a] for a in eqn.invars]
        values.update(zip(eqn.outvars, equation(eqn, operands), strict=True))
    return [constant(a.val) if isinstance(a, Literal) else values[a] for a in jaxpr.outvars]


def called(eqn: JaxprEqn) -> ClosedJaxpr | Jaxpr | None:
    """Returns the program that an operation only calls; `None` if it does anything else."""
    if eqn.primitive.name not in CALL:
        return None
    inner = inner_programs(eqn.params.values())
    if len(inner) != 1:
        return None
    jaxpr = jaxpr_of(inner[0])
    fits = len(jaxpr.invars) == len(eqn.invars) and len(jaxpr.outvars) == len(eqn.outvars)
    return inner[0] if fits else None


class Scan:
    """The parts of a `scan`, whose parameters have different names in different versions of JAX.

    `num_consts` and `num_carry` are `ft_in` and `ft_out` in JAX 0.12. They are counted by rank,
    which works in all versions: a scanned or stacked array has one more axis outside than inside.
    """

    def __init__(self, eqn: JaxprEqn) -> None:
        self.body: ClosedJaxpr = eqn.params["jaxpr"]
        self.num_carry = _count_equal_ranks(eqn.outvars, self.body.jaxpr.outvars)
        equal = _count_equal_ranks(eqn.invars, self.body.jaxpr.invars)
        self.num_consts = equal - self.num_carry
        self.length: int = eqn.params["length"]
        self.reverse: bool = eqn.params["reverse"]
        self.unroll: int = eqn.params["unroll"]

    @property
    def counters(self) -> list[int]:
        """Positions of the parts of the carry to which each round adds 1, as `fori_loop` does."""
        jaxpr = self.body.jaxpr
        carry = jaxpr.invars[self.num_consts : self.num_consts + self.num_carry]
        added = [
            (eqn.invars[0], eqn.outvars[0])
            for eqn in jaxpr.eqns
            if eqn.primitive.name == "add"
            and isinstance(eqn.invars[1], Literal)
            and np.array_equal(eqn.invars[1].val, 1)
        ]
        pairs = enumerate(zip(carry, jaxpr.outvars, strict=False))
        return [i for i, (x, y) in pairs if any(a is x and b is y for a, b in added)]

    def split(self, values: Sequence[Any]) -> tuple[list[Any], list[Any], list[Any]]:
        """Splits values into constants, carry and scanned arrays."""
        start, end = self.num_consts, self.num_consts + self.num_carry
        return list(values[:start]), list(values[start:end]), list(values[end:])


class While:
    """The parts of a `while`."""

    def __init__(self, eqn: JaxprEqn) -> None:
        self.test: ClosedJaxpr = eqn.params["cond_jaxpr"]
        self.body: ClosedJaxpr = eqn.params["body_jaxpr"]
        self.counts = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]

    def split(self, values: Sequence[Any]) -> tuple[list[Any], list[Any], list[Any]]:
        """Splits values into constants of the test, constants of the body, and carry."""
        start, end = self.counts[0], sum(self.counts)
        return list(values[:start]), list(values[start:end]), list(values[end:])


def solve_of(eqn: JaxprEqn, values: Sequence[Any]) -> tuple[ClosedJaxpr, list[Any]]:
    """Returns the program of a `custom_linear_solve`, and its arguments among the operands.

    Its other programs are for derivatives.
    """
    lengths = eqn.params["const_lengths"]
    start = lengths.matvec + lengths.vecmat
    consts, rest = values[start : start + lengths.solve], values[sum(lengths) :]
    return eqn.params["jaxprs"].solve, [*consts, *rest]


@dataclass(eq=False)
class Interpreter(abc.ABC, Generic[T]):
    """Base class of passes that find facts about each value of a program.

    It evaluates calls, branches and loops, which it repeats until the facts about the carry stay
    the same. The facts must not alternate: the facts about one of several values hold for each.

    Attributes:
        within: The operations whose inner program is evaluated, outermost first.
        passing: Names of operations whose results have the facts of the operands.
    """

    within: list[JaxprEqn] = field(default_factory=list, init=False)
    passing = PASSING

    @abc.abstractmethod
    def constant(self, value: Any) -> T:
        """Returns the facts about a constant."""

    @abc.abstractmethod
    def leaf(self, eqn: JaxprEqn, operands: list[T]) -> Sequence[T]:
        """Returns the facts about the results of an operation that is not evaluated here."""

    @abc.abstractmethod
    def chosen(self, predicate: T, cases: Sequence[T]) -> T:
        """Returns the facts about a value that is one of several, as the predicate says."""

    def slice_of(self, array: T) -> T:
        """Returns the facts about a slice of an array that `scan` reads or stacks; or the array."""
        return array

    def state(self) -> Any:
        """Returns a copy of the facts that no value has, such as of what a `Ref` holds."""
        return None

    def resume_from(self, states: Sequence[Any]) -> None:
        """Continues after one of several branches, whose ends were in these states."""

    def under(self, _predicate: T, _eqn: JaxprEqn) -> contextlib.AbstractContextManager[None]:
        """Context manager for operations that run only if the predicate of an operation says so."""
        return contextlib.nullcontext()

    def call(self, program: ClosedJaxpr | Jaxpr, inputs: Sequence[T]) -> list[T]:
        """Returns the facts about the outputs of a program."""
        return walk(program, inputs, self.constant, self.equation)

    def equation(self, eqn: JaxprEqn, operands: list[T]) -> Sequence[T]:
        """Returns the facts about the results of an operation."""
        name = eqn.primitive.name
        if name in self.passing and len(operands) == len(eqn.outvars):
            return operands
        if name not in _EVALUATED:
            return self.leaf(eqn, operands)
        self.within.append(eqn)
        try:
            if name in _CONTROL:
                return getattr(self, _CONTROL[name])(eqn, operands)
            if name == "custom_linear_solve":
                return self.call(*solve_of(eqn, operands))
            if (inner := called(eqn)) is not None:
                return self.call(inner, operands)
        finally:
            self.within.pop()
        return self.leaf(eqn, operands)

    def scan(self, eqn: JaxprEqn, operands: list[T]) -> list[T]:
        """Returns the facts about the results of a `scan`."""
        scan, always = Scan(eqn), self.constant(True)
        consts, carry, scanned = scan.split(operands)
        slices = list(map(self.slice_of, scanned))
        while True:
            before = self.state()
            outputs = self.call(scan.body, [*consts, *carry, *slices])
            joined = [self.chosen(always, pair) for pair in zip(carry, outputs, strict=False)]
            if joined == carry and before == self.state():
                return [*carry, *map(self.slice_of, outputs[scan.num_carry :])]
            carry = joined

    def while_loop(self, eqn: JaxprEqn, operands: list[T]) -> list[T]:
        """Returns the facts about the results of a `while`."""
        loop = While(eqn)
        test_consts, consts, carry = loop.split(operands)
        while True:
            before = self.state()
            (predicate,) = self.call(loop.test, [*test_consts, *carry])
            with self.under(predicate, eqn):
                # Whether the test runs again depends on its previous result.
                self.call(loop.test, [*test_consts, *carry])
                outputs = self.call(loop.body, [*consts, *carry])
            joined = [self.chosen(predicate, pair) for pair in zip(carry, outputs, strict=True)]
            if joined == carry and before == self.state():
                return carry
            carry = joined

    def cond(self, eqn: JaxprEqn, operands: list[T]) -> list[T]:
        """Returns the facts about the results of a `cond`."""
        predicate, *rest = operands
        before, branches, states = self.state(), [], []
        with self.under(predicate, eqn):
            for branch in eqn.params["branches"]:
                self.resume_from([before])
                branches.append(self.call(branch, rest))
                states.append(self.state())
        self.resume_from(states)
        return [self.chosen(predicate, cases) for cases in zip(*branches, strict=True)]


class StraightInterpreter(Interpreter[T]):
    """Base class of passes that evaluate calls only: loops and branches are leaves."""

    def chosen(self, _predicate: T, cases: Sequence[T]) -> T:
        """Is not called: it joins the facts of loops and branches."""
        raise AssertionError(cases)

    def scan(self, eqn: JaxprEqn, operands: list[T]) -> list[T]:
        """Returns the facts about the results, as for any other operation."""
        return list(self.leaf(eqn, operands))

    while_loop = cond = scan


def _count_equal_ranks(outer: Sequence[Any], inner: Sequence[Any]) -> int:
    return sum(len(o.aval.shape) == len(i.aval.shape) for o, i in zip(outer, inner, strict=True))


def arrays_in(program: ClosedJaxpr | Jaxpr) -> Iterator[jax.Array]:
    """Yields the arrays that are constants of a program, at any depth."""
    if isinstance(program, ClosedJaxpr):
        yield from (const for const in program.consts if isinstance(const, jax.Array))
    jaxpr = jaxpr_of(program)
    simple = [eqn.invars for eqn in jaxpr.eqns if eqn.primitive.name in SIMPLE]
    yield from _literal_arrays(itertools.chain(jaxpr.outvars, *simple))
    for eqn in jaxpr.eqns:
        if eqn.primitive.name not in SIMPLE:
            yield from arrays_of(eqn)


def arrays_of(eqn: JaxprEqn) -> Iterator[jax.Array]:
    """Yields the constant arrays among the operands and in the inner programs of an operation."""
    yield from _literal_arrays(eqn.invars)
    for inner in inner_programs(eqn.params.values()):
        yield from arrays_in(inner)


def _literal_arrays(atoms: Iterable[Any]) -> list[jax.Array]:
    literals = [atom.val for atom in atoms if isinstance(atom, Literal)]
    return [value for value in literals if isinstance(value, jax.Array)]


def is_ref(atom: Any) -> bool:
    """Whether a value is mutable: a `Ref` or a mutable hijax type."""
    return hasattr(atom.aval, "inner_aval") or getattr(atom.aval, "has_qdd", False)
