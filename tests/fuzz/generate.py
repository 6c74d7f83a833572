"""Random replica programs, by seed.

Numbers stay small integers, so that floats are exact in any order of summation. The generator
guesses which values are per-replica, only so that most programs are ones that `run` accepts: what
it guesses wrongly the laws judge like the rest.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from tests.fuzz.program import NUM_REPLICAS, Block, Kind, Program, Statement, statements

_MOST = 1000  # the largest magnitude of a value that others are computed from
_DTYPES = ("int32", "float32")
_SHAPES: tuple[tuple[int, ...], ...] = ((), (), (2,), (2,), (4,), (4,), (8,), (4, 2), (2, 4))
_MOST_ELEMENTS = 32
# How often a collective stands where replicas may not all come.
_RECKLESSNESS = 0.3
_SCALAR = Kind("int32", ())


@dataclass(frozen=True)
class Profile:
    """The composition of random programs.

    Attributes:
        size: about how many statements a program has at its top.
        weights: how often each sort of statement is drawn.
        depth: how deep blocks nest.
    """

    size: int
    weights: dict[str, float]
    depth: int = 2


_GENERAL = {
    "local": 8.0,
    "collective": 6.0,
    "loop": 2.5,
    "branch": 1.5,
    "call": 2.0,
    "ref": 1.5,
    "write": 2.0,
    "callback": 0.7,
    "written_in_test": 0.5,
    "packed": 0.25,
}
PROFILES = {
    "general": Profile(8, _GENERAL),
    "small": Profile(4, {**_GENERAL, "packed": 1.0, "ref": 0.5}, depth=1),
    "collective": Profile(4, {"local": 2.0, "collective": 8.0}, depth=0),
    "staged": Profile(3, {**_GENERAL, "packed": 2.0, "ref": 0.0, "write": 0.0}, depth=1),
}


def generate(profile: str, seed: int) -> Program:
    """The program of a profile and a seed."""
    return _Generator(PROFILES[profile], random.Random(f"{profile} {seed}")).program()


class _Value(NamedTuple):
    """A value that statements may read; `differs`: replicas may hold different ones."""

    number: int
    kind: Kind
    bound: int
    differs: bool


@dataclass
class _Ref:
    number: int
    kind: Kind
    differs: bool


class _Scope:
    """A block that is being written."""

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.values: list[_Value] = []
        self.refs: list[_Ref] = []
        self.body: list[Statement] = []
        self.communicates = True
        self.controlled = False
        self.in_vmap = False
        self.writes = True

    def inner(self, *, closes: bool = True) -> "_Scope":
        scope = _Scope(self.depth - 1)
        if closes:
            scope.values, scope.refs = list(self.values), list(self.refs)
        scope.communicates, scope.controlled = self.communicates, self.controlled
        scope.in_vmap, scope.writes = self.in_vmap, self.writes and closes
        return scope


_First = Callable[[_Scope], None]


class _Generator:
    def __init__(self, profile: Profile, rng: random.Random) -> None:
        self.profile, self.rng = profile, rng
        self.count = 0

    def program(self) -> Program:
        rng, scope = self.rng, _Scope(self.profile.depth)
        kinds = [Kind(rng.choice(_DTYPES), rng.choice(_SHAPES)) for _ in range(rng.randint(2, 3))]
        kinds.append(Kind(rng.choice(_DTYPES), ()))
        differs = [True, False, *(rng.random() < 0.5 for _ in kinds[2:])]
        inputs = [self.given(scope, *each) for each in zip(kinds, differs, strict=True)]
        self.fill(scope, rng.randint(self.profile.size - 2, self.profile.size + 2))
        for ref in scope.refs:
            self.emit(scope, "get", [ref], ref.kind, bound=_MOST, differs=ref.differs)
        outputs = tuple(dict.fromkeys(value.number for value in scope.values))[-20:]
        block = Block(tuple(inputs), tuple(scope.body), outputs)
        return Program(tuple(kinds), tuple(differs), block)

    # Values

    def fresh(self) -> int:
        self.count += 1
        return self.count - 1

    def given(self, scope: _Scope, kind: Kind, differs: bool, bound: int = _MOST) -> int:
        """Adds an input of a block."""
        value = _Value(self.fresh(), kind, min(bound, _MOST), differs)
        scope.values.append(value)
        return value.number

    def emit(
        self,
        scope: _Scope,
        op: str,
        args: Sequence[_Value | _Ref],
        kind: Kind,
        params: tuple[Any, ...] = (),
        *,
        bound: int | None = None,
        differs: bool | None = None,
    ) -> _Value:
        """Adds a statement with one result, kept small."""
        values = [arg for arg in args if isinstance(arg, _Value)]
        if bound is None:
            bound = max((value.bound for value in values), default=_MOST)
        if differs is None:
            differs = any(value.differs for value in values)
        number = self.fresh()
        numbers = tuple(arg.number for arg in args)
        scope.body.append(Statement(op, numbers, (number,), (kind,), params))
        value = _Value(number, kind, bound, differs)
        if bound > _MOST:
            return self.emit(scope, "wrap", [value], kind, bound=12)
        scope.values.append(value)
        return value

    def results(
        self, scope: _Scope, statement: Statement, differs: Sequence[bool], bound: int = _MOST
    ) -> None:
        """Adds a statement with any number of results."""
        scope.body.append(statement)
        for number, kind, each in zip(statement.outs, statement.kinds, differs, strict=True):
            scope.values.append(_Value(number, kind, bound, each))

    def some(self, scope: _Scope, accept: Callable[[_Value], bool] = lambda _: True) -> _Value:
        """A value, rather a late one."""
        found = [value for value in scope.values if accept(value)]
        if not found:
            kind = Kind(self.rng.choice(_DTYPES), self.rng.choice(_SHAPES))
            return self.const(scope, kind)
        return found[int(len(found) * self.rng.random() ** 0.6)]

    def fixed(self, scope: _Scope, *, same: bool = False, ranks: Sequence[int] = ()) -> _Value:
        """A value of any of these ranks; `same`: rather one that is mirrored."""
        return self.some(
            scope,
            lambda v: not (same and v.differs) and (not ranks or len(v.kind.shape) in ranks),
        )

    def of(self, scope: _Scope, kind: Kind, *, same: bool = False) -> _Value:
        """A value of this kind, created from another kind if necessary."""
        exact = [v for v in scope.values if v.kind == kind and not (same and v.differs)]
        if exact and self.rng.random() < 0.7:
            return self.rng.choice(exact[-6:])
        return self.coerced(scope, self.fixed(scope, same=same), kind)

    def coerced(self, scope: _Scope, value: _Value, kind: Kind) -> _Value:
        if value.kind.shape != kind.shape:
            resized = Kind(value.kind.dtype, kind.shape)
            value = self.emit(scope, "resize", [value], resized, (kind.shape,))
        if value.kind.dtype != kind.dtype:
            value = self.emit(scope, "cast", [value], kind)
        return value

    def const(self, scope: _Scope, kind: Kind) -> _Value:
        def draw(shape: tuple[int, ...]) -> Any:
            if not shape:
                return self.rng.randint(-3, 3)
            return tuple(draw(shape[1:]) for _ in range(shape[0]))

        return self.emit(scope, "const", [], kind, (draw(kind.shape),), bound=3, differs=False)

    # Statements

    def fill(self, scope: _Scope, num: int) -> None:
        for _ in range(num):
            self.one(scope)

    def one(self, scope: _Scope) -> None:
        weights = dict(self.profile.weights)
        if not scope.communicates:
            weights["collective"] = weights["packed"] = 0.0
        if not scope.depth:
            weights.update(loop=0.0, branch=0.0, call=0.0, written_in_test=0.0, packed=0.0)
        if scope.in_vmap:
            weights.update(ref=0.0, callback=0.0, written_in_test=0.0, packed=0.0)
        if not scope.writes or not scope.refs:
            weights["write"] = 0.0
        if not scope.writes:
            weights["written_in_test"] = weights["ref"] = 0.0
        (name,) = self.rng.choices([*weights], [*weights.values()])
        getattr(self, name)(scope)

    def local(self, scope: _Scope) -> None:
        ops = {
            self.binary: 5,
            self.unary: 5,
            self.indexed: 3,
            self.reshaping: 3,
            self.two_outs: 1,
            self.const_or_iota: 1,
        }
        (op,) = self.rng.choices([*ops], [*ops.values()])
        op(scope)

    def binary(self, scope: _Scope) -> None:
        op = self.rng.choice(["add", "sub", "mul", "max", "min", "less", "equal", "select"])
        a = self.some(scope)
        b = self.of(scope, a.kind)
        if op == "select":
            c = self.of(scope, a.kind)
            self.emit(scope, op, [c, a, b], a.kind)
            return
        bound = {"mul": a.bound * b.bound, "less": 1, "equal": 1}.get(op, a.bound + b.bound)
        self.emit(scope, op, [a, b], a.kind, bound=bound)

    def unary(self, scope: _Scope) -> None:
        a = self.some(scope)
        ops = ["neg", "abs", "copy", "plus", "times", "barrier", "wrap"]
        ops += ["cumsum", "cummax", "sort", "reverse"] if a.kind.shape else []
        op = self.rng.choice(ops)
        number = self.rng.randint(-3, 3)
        params = (number,) if op in ("plus", "times") else ()
        bound = {"plus": a.bound + 3, "times": 3 * a.bound, "cumsum": 8 * a.bound}
        self.emit(scope, op, [a], a.kind, params, bound=bound.get(op, a.bound))

    def indexed(self, scope: _Scope) -> None:
        a = self.some(scope, lambda v: bool(v.kind.shape))
        if not a.kind.shape:
            return
        op = self.rng.choice(["at", "take", "put", "slice", "argsort"])
        row = Kind(a.kind.dtype, a.kind.shape[1:])
        if op == "at":
            self.emit(scope, op, [a, self.of(scope, _SCALAR)], row)
        elif op == "take":
            i = self.of(scope, Kind("int32", self.rng.choice([(2,), (4,)])))
            self.emit(scope, op, [a, i], Kind(a.kind.dtype, i.kind.shape + row.shape))
        elif op == "put":
            i, value = self.of(scope, _SCALAR), self.of(scope, row)
            bound = max(a.bound, value.bound)
            self.emit(scope, op, [a, i, value], a.kind, bound=bound)
        elif op == "argsort":
            self.emit(scope, op, [a], Kind("int32", a.kind.shape), bound=8)
        else:
            stop = self.rng.randint(1, a.kind.shape[0])
            start = self.rng.randint(0, stop - 1)
            kind = Kind(a.kind.dtype, (stop - start, *row.shape))
            self.emit(scope, op, [a], kind, (start, stop))

    def reshaping(self, scope: _Scope) -> None:
        a = self.some(scope)
        shape, row = a.kind.shape, Kind(a.kind.dtype, a.kind.shape[1:])
        ops = ["sum", "sum_first", "max_first", "argmax", "transpose", "resize", "cast"]
        op = self.rng.choice(ops)
        if op == "sum":
            self.emit(scope, op, [a], Kind(a.kind.dtype, ()), bound=_MOST_ELEMENTS * a.bound)
        elif op == "resize" or not shape:
            target = self.rng.choice(_SHAPES)
            self.emit(scope, "resize", [a], Kind(a.kind.dtype, target), (target,))
        elif op == "sum_first":
            self.emit(scope, op, [a], row, bound=8 * a.bound)
        elif op == "max_first":
            self.emit(scope, op, [a], row)
        elif op == "argmax":
            self.emit(scope, op, [a], Kind("int32", row.shape), bound=8)
        elif op == "transpose":
            self.emit(scope, op, [a], Kind(a.kind.dtype, shape[::-1]))
        else:
            (other,) = {*_DTYPES} - {a.kind.dtype}
            self.emit(scope, op, [a], Kind(other, shape))

    def two_outs(self, scope: _Scope) -> None:
        """A barrier around two values, which passes each of them on."""
        pair = [self.some(scope), self.some(scope)]
        outs = self.fresh(), self.fresh()
        numbers = tuple(value.number for value in pair)
        statement = Statement("barrier", numbers, outs, tuple(value.kind for value in pair))
        self.results(scope, statement, [value.differs for value in pair])

    def const_or_iota(self, scope: _Scope) -> None:
        if self.rng.random() < 0.5:
            self.const(scope, Kind(self.rng.choice(_DTYPES), self.rng.choice(_SHAPES)))
        else:
            size = self.rng.choice([2, 4])
            kind = Kind(self.rng.choice(_DTYPES), (size,))
            self.emit(scope, "iota", [], kind, (size,), bound=4, differs=False)

    def collective(self, scope: _Scope) -> None:
        ops = ["psum"] * 4 + ["pmax", "pmin", "all_gather", "ppermute", "axis_index"]
        if not scope.in_vmap:
            ops += ["pmean", "psum_groups", "all_gather", "psum_scatter", "ppermute", "all_to_all"]
            ops += ["gather_groups"]
            ops += ["context_reduce"] * 2 + ["context_gather", "replica_id"]
        self.communication(scope, self.rng.choice(ops))

    def communication(self, scope: _Scope, op: str) -> None:
        rng = self.rng
        if op in ("axis_index", "replica_id"):
            self.emit(scope, op, [], _SCALAR, bound=3, differs=True)
        elif op in ("psum", "pmax", "pmin", "context_reduce"):
            self.all_reduce(scope, op)
        elif op == "pmean":
            a = self.of(scope, Kind("float32", self.fixed(scope).kind.shape))
            self.emit(scope, op, [a], a.kind, bound=4 * a.bound, differs=False)
        elif op == "psum_groups":
            a = self.fixed(scope)
            groups = rng.choice([((0, 1), (2, 3)), ((0, 3), (1, 2)), ((0, 1, 2, 3),)])
            params, differs = (groups,), len(groups) > 1
            self.emit(scope, op, [a], a.kind, params, bound=4 * a.bound, differs=differs)
        elif op == "gather_groups":
            a = self.of(scope, Kind(rng.choice(_DTYPES), rng.choice([(), (2,), (4,)])))
            groups = rng.choice([((0, 1), (2, 3)), ((0, 3), (1, 2))])
            self.emit(
                scope, op, [a], Kind(a.kind.dtype, (2, *a.kind.shape)), (groups,), differs=True
            )
        elif op == "ppermute":
            a, order = self.fixed(scope), rng.sample(range(NUM_REPLICAS), NUM_REPLICAS)
            pairs = list(enumerate(order))[: rng.choice([2, 4, 4])]
            self.emit(scope, op, [a], a.kind, (tuple(pairs),), differs=True)
        elif op == "all_gather":
            a = self.of(scope, Kind(rng.choice(_DTYPES), rng.choice([(), (2,), (4,), (4, 2)])))
            is_tiled = bool(a.kind.shape) and not scope.in_vmap and rng.random() < 0.5
            self.emit(scope, op, [a], _gathered(a.kind, is_tiled), (is_tiled,), differs=False)
        elif op == "context_gather":
            a = self.of(scope, Kind(rng.choice(_DTYPES), rng.choice([(2,), (4,), (4, 2)])))
            self.emit(scope, op, [a], _gathered(a.kind, True), differs=False)
        else:
            a = self.of(scope, Kind(rng.choice(_DTYPES), rng.choice([(4,), (8,), (4, 2)])))
            if op == "all_to_all":
                a = self.coerced(scope, a, Kind(a.kind.dtype, (4, *a.kind.shape[1:])))
                self.emit(scope, op, [a], a.kind, differs=True)
                return
            is_tiled = a.kind.shape[0] != NUM_REPLICAS or rng.random() < 0.5
            part = (a.kind.shape[0] // NUM_REPLICAS,) if is_tiled else ()
            kind = Kind(a.kind.dtype, part + a.kind.shape[1:])
            self.emit(scope, op, [a], kind, (is_tiled,), bound=4 * a.bound, differs=True)

    def all_reduce(self, scope: _Scope, op: str) -> None:
        params = (self.rng.choice(["sum", "max", "min"]),) if op == "context_reduce" else ()
        values = [self.fixed(scope) for _ in range(self.rng.choice([1, 1, 2]))]
        if len(values) == 1:
            (a,) = values
            self.emit(scope, op, [a], a.kind, params, bound=4 * a.bound, differs=False)
            return
        small = [self.emit(scope, "wrap", [v], v.kind, bound=12) for v in values]
        outs = self.fresh(), self.fresh()
        numbers = tuple(value.number for value in small)
        kinds = tuple(value.kind for value in small)
        statement = Statement(op, numbers, outs, kinds, params)
        self.results(scope, statement, [False, False], 48)

    def callback(self, scope: _Scope) -> None:
        a = self.some(scope)
        if self.rng.random() < 0.3:
            scope.body.append(Statement("look", (a.number,), (), ()))
        else:
            self.emit(scope, "callback", [a], a.kind, bound=2 * a.bound + 1)

    def ref(self, scope: _Scope) -> None:
        if len(scope.refs) < 3:
            self.new_ref(scope, self.fixed(scope, same=self.rng.random() < 0.6))

    def new_ref(self, scope: _Scope, start: _Value) -> _Ref:
        ref = _Ref(self.fresh(), start.kind, start.differs)
        kind = Kind("ref", start.kind.shape)
        scope.body.append(Statement("ref", (start.number,), (ref.number,), (kind,)))
        scope.refs.append(ref)
        return ref

    def write(self, scope: _Scope) -> None:
        """A read or a write of a `Ref`."""
        ref = self.rng.choice(scope.refs)
        choice = self.rng.random()
        if choice < 0.4:
            self.emit(scope, "get", [ref], ref.kind, bound=_MOST, differs=ref.differs)
            return
        same = not ref.differs and not scope.controlled and self.rng.random() < 0.7
        self.written(scope, ref, self.of(scope, ref.kind, same=same), choice < 0.7)

    def written(self, scope: _Scope, ref: _Ref, value: _Value, adds: bool) -> None:
        ref.differs = ref.differs or value.differs or scope.controlled
        op = "bump" if adds else "set"
        scope.body.append(Statement(op, (ref.number, value.number), (), ()))

    # Loops

    def loop(self, scope: _Scope) -> None:
        name = self.rng.choice(["scan", "scan", "fori", "fori_to", "while_loop", "map"])
        getattr(self, name)(scope)

    def body(
        self,
        scope: _Scope,
        kinds: Sequence[Kind],
        differs: Sequence[bool],
        first: _First | None = None,
    ) -> tuple[int, ...]:
        """Fills a block; its outputs, mirrored where they must be."""
        if first is not None:
            first(scope)
        newest = scope.values[-1]
        self.fill(scope, self.rng.randint(1, 3))
        outputs = []
        for kind, may in zip(kinds, differs, strict=True):
            value = self.of(scope, kind, same=not may)
            if first is not None and not outputs:
                value = self.coerced(scope, newest, kind) if may or not newest.differs else value
            outputs.append(value)
        return tuple(value.number for value in outputs)

    def carried(self, scope: _Scope, *, differs: bool) -> tuple[list[_Value], list[bool]]:
        """The initial carry of a loop, and the kinds it may become."""
        carry = [self.some(scope) for _ in range(self.rng.choice([1, 1, 2]))]
        return carry, [differs or v.differs or self.rng.random() < 0.4 for v in carry]

    def controlled(self, scope: _Scope, *, differs: bool) -> _Scope:
        """An inner scope in which replicas may not all stand."""
        inner = scope.inner()
        if scope.in_vmap:  # rows may not all run it
            inner.communicates = False
        if differs:
            inner.controlled = True
            inner.communicates = scope.communicates and self.rng.random() < _RECKLESSNESS
        return inner

    def looped(
        self,
        scope: _Scope,
        op: str,
        args: list[_Value],
        carry: list[_Value],
        may: list[bool],
        blocks: list[Block],
        params: tuple[Any, ...] = (),
        more: Sequence[Kind] = (),
    ) -> None:
        """Adds a loop."""
        kinds = [*(value.kind for value in carry), *more]
        outs = tuple(self.fresh() for _ in kinds)
        numbers = tuple(value.number for value in args)
        statement = Statement(op, numbers, outs, tuple(kinds), params, tuple(blocks))
        self.results(scope, statement, [*may, *(True for _ in more)])

    def scan(self, scope: _Scope, first: _First | None = None) -> None:
        carry, may = self.carried(scope, differs=False)
        xs = [self.some(scope, lambda v: bool(v.kind.shape))] if self.rng.random() < 0.6 else []
        xs = [x for x in xs if x.kind.shape]
        inner = self.controlled(scope, differs=False)
        inputs = [self.given(inner, v.kind, each) for v, each in zip(carry, may, strict=True)]
        for x in xs:
            kind = Kind(x.kind.dtype, x.kind.shape[1:])
            inputs.append(self.given(inner, kind, x.differs, x.bound))
        length = xs[0].kind.shape[0] if xs else self.rng.randint(1, 2)
        row = self.rng.choice([(), (2,)])
        more = [Kind(self.rng.choice(_DTYPES), row)] if self.rng.random() < 0.5 else []
        kinds = [*(value.kind for value in carry), *more]
        outputs = self.body(inner, kinds, [*may, *(True for _ in more)], first)
        block = Block(tuple(inputs), tuple(inner.body), outputs)
        stacked = [Kind(kind.dtype, (length, *kind.shape)) for kind in more]
        params = (len(carry), length, self.rng.random() < 0.3)
        self.looped(scope, "scan", [*carry, *xs], carry, may, [block], params, stacked)

    def fori(self, scope: _Scope, first: _First | None = None) -> None:
        carry, may = self.carried(scope, differs=False)
        block = self.round(scope.inner(), carry, may, first)
        self.looped(scope, "fori", carry, carry, may, [block], (self.rng.randint(1, 3),))

    def round(
        self, inner: _Scope, carry: list[_Value], may: list[bool], first: _First | None = None
    ) -> Block:
        """The body of a loop that counts."""
        inputs = [self.given(inner, _SCALAR, inner.controlled, 3)]
        inputs += [self.given(inner, v.kind, each) for v, each in zip(carry, may, strict=True)]
        outputs = self.body(inner, [value.kind for value in carry], may, first)
        return Block(tuple(inputs), tuple(inner.body), outputs)

    def fori_to(self, scope: _Scope, first: _First | None = None) -> None:
        differs = first is None and self.rng.random() < 0.4
        limit = self.of(scope, _SCALAR, same=not differs)
        carry, may = self.carried(scope, differs=differs)
        block = self.round(self.controlled(scope, differs=differs), carry, may, first)
        self.looped(scope, "fori_to", [limit, *carry], carry, may, [block])

    def while_loop(
        self,
        scope: _Scope,
        first: _First | None = None,
        test_first: _First | None = None,
        differs: bool | None = None,
    ) -> None:
        if differs is None:
            differs = first is None and self.rng.random() < 0.4
        carry, may = self.carried(scope, differs=differs)
        test = self.controlled(scope, differs=differs)
        inputs = [self.given(test, _SCALAR, differs, 3)]
        inputs += [self.given(test, v.kind, each) for v, each in zip(carry, may, strict=True)]
        if test_first is not None:
            test_first(test)
        self.fill(test, self.rng.randint(0, 2))
        limit = self.of(test, _SCALAR, same=not differs)
        tested = Block(tuple(inputs), tuple(test.body), (limit.number,))
        inner = self.controlled(scope, differs=differs)
        # JAX has no loop that writes to one `Ref` in its test and in its body, and what the body
        # writes does not reach the test (JAX 0.10.2).
        used = _uses(tested)
        inner.refs = [ref for ref in inner.refs if ref.number not in used]
        block = self.round(inner, carry, may, first)
        self.looped(scope, "while_loop", carry, carry, may, [tested, block])

    def map(self, scope: _Scope) -> None:
        self.mapped(scope, "map")

    def mapped(self, scope: _Scope, op: str) -> None:
        x = self.some(scope, lambda v: bool(v.kind.shape))
        if not x.kind.shape:
            return
        inner = scope.inner()
        inner.in_vmap = inner.in_vmap or op == "vmap"
        if op == "vmap":
            inner.refs, inner.writes = [], False
        kind = Kind(x.kind.dtype, x.kind.shape[1:])
        inputs = (self.given(inner, kind, x.differs, x.bound),)
        row = Kind(self.rng.choice(_DTYPES), self.rng.choice([(), (2,)]))
        outputs = self.body(inner, [row], [True])
        block = Block(inputs, tuple(inner.body), outputs)
        more = [Kind(row.dtype, (x.kind.shape[0], *row.shape))]
        self.looped(scope, op, [x], [], [], [block], more=more)

    # Branches and calls

    def branch(self, scope: _Scope, first: _First | None = None) -> None:
        differs = first is None and self.rng.random() < 0.45
        op = self.rng.choice(["cond", "cond", "switch"])
        predicate = self.of(scope, Kind(self.rng.choice(_DTYPES), ()), same=not differs)
        self.branches(scope, op, [predicate], (), differs=differs, first=first)

    def branches(
        self,
        scope: _Scope,
        op: str,
        args: list[_Value],
        params: tuple[Any, ...],
        *,
        differs: bool,
        first: _First | None = None,
    ) -> None:
        models = [self.fixed(scope) for _ in range(self.rng.choice([1, 2]))]
        is_one = self.rng.random() < 0.15
        blocks, may = [], [differs] * len(models)
        for _ in range(3 if op == "switch" else 2):
            inner = self.controlled(scope, differs=differs)
            wanted = [True] * len(models)
            outputs = self.body(inner, [value.kind for value in models], wanted, first)
            first = None
            if is_one:
                outputs = tuple(value.number for value in models)
            known = {value.number: value.differs for value in inner.values}
            may = [a or known[out] for a, out in zip(may, outputs, strict=True)]
            blocks.append(Block((), tuple(inner.body), outputs))
        numbers = tuple(value.number for value in args)
        outs = tuple(self.fresh() for _ in models)
        kinds = tuple(value.kind for value in models)
        self.results(scope, Statement(op, numbers, outs, kinds, params, tuple(blocks)), may)

    def call(self, scope: _Scope) -> None:
        op = self.rng.choice(["jit", "jit", "checkpoint", "custom_jvp", "custom_vjp", "vmap"])
        if op == "vmap":
            self.mapped(scope, op)
            return
        args = [self.some(scope) for _ in range(self.rng.choice([1, 2]))]
        inner = scope.inner(closes=op in ("jit", "checkpoint"))
        if op == "checkpoint":
            inner.refs, inner.writes = [], False
        inputs = tuple(self.given(inner, v.kind, v.differs, v.bound) for v in args)
        kinds = [value.kind for value in args]  # as its rules for derivatives have them too
        outputs = self.body(inner, kinds, [True] * len(kinds))
        known = {value.number: value.differs for value in inner.values}
        differs = [known[out] for out in outputs]
        block = Block(inputs, tuple(inner.body), outputs)
        numbers, outs = tuple(value.number for value in args), tuple(self.fresh() for _ in kinds)
        self.results(scope, Statement(op, numbers, outs, tuple(kinds), (), (block,)), differs)

    # What went wrong before

    def written_in_test(self, scope: _Scope) -> None:
        """A `Ref` that the test of a loop writes to, each time that it is asked."""
        ref = self.new_ref(scope, self.fixed(scope, same=True))

        def test_first(test: _Scope) -> None:
            self.written(test, ref, self.const(test, ref.kind), True)

        self.while_loop(scope, test_first=test_first, differs=self.rng.random() < 0.7)
        self.emit(scope, "get", [ref], ref.kind, bound=_MOST, differs=ref.differs)

    def packed(self, scope: _Scope) -> None:
        """Two small all-reduces, whose results a loop or branch with a collective reads."""
        kind = Kind(self.rng.choice(_DTYPES), self.rng.choice([(), (2,), (4,)]))
        pair = []
        for _ in range(2):
            small = self.emit(scope, "wrap", [self.of(scope, kind)], kind, bound=12)
            pair.append(self.emit(scope, "psum", [small], kind, bound=48, differs=False))

        def first(inner: _Scope) -> None:
            mine = self.emit(inner, "add", [self.of(inner, kind), pair[0]], kind, bound=2 * _MOST)
            total = self.emit(inner, "psum", [mine], kind, bound=4 * _MOST, differs=False)
            self.emit(inner, "add", [total, pair[1]], kind, bound=2 * _MOST)

        around = self.rng.choice([self.scan, self.fori, self.while_loop, self.branch])
        around(scope, first)


def _gathered(kind: Kind, is_tiled: bool) -> Kind:
    if is_tiled:
        return Kind(kind.dtype, (NUM_REPLICAS * kind.shape[0], *kind.shape[1:]))
    return Kind(kind.dtype, (NUM_REPLICAS, *kind.shape))


def _uses(block: Block) -> set[int]:
    """The `Ref`s that a block reads or writes to."""
    return {each.args[0] for each in statements(block) if each.op in ("get", "set", "bump")}
