"""Simulates replicas in NumPy: they are coroutines that stop at collectives."""

from collections.abc import Generator, Sequence
from typing import Any, NamedTuple

import numpy as np

from tests.fuzz.program import NUM_REPLICAS, Block, Kind, Program, Statement, has_effects, needed


class Hang(NamedTuple):
    """Replicas that would wait for each other: where each of them stands."""

    stops: tuple[str, ...]


class _Stop(NamedTuple):
    """A collective at which a replica stands, with what it brings."""

    statement: Statement
    operands: tuple[np.ndarray, ...]

    def __str__(self) -> str:
        return f"{self.statement.op} of v{self.statement.outs[0]}"


class _Cell:
    """A `Ref`."""

    def __init__(self, value: np.ndarray) -> None:
        self.value = value


Values = dict[int, Any]  # `None` for what nothing depends on
Run = Generator[_Stop, tuple[np.ndarray, ...], list[Any]]


def simulate(program: Program, inputs: Sequence[Sequence[np.ndarray]]) -> list[list[Any]] | Hang:
    """Each replica's outputs, or where they hang.

    Args:
        program: what they run.
        inputs: for each replica, its inputs.
    """
    read = needed(program)
    replicas = [
        _Replica(index, program, read).block(program.block, {}, given)
        for index, given in enumerate(inputs)
    ]
    answers: list[Any] = [None] * len(replicas)
    outputs: list[list[Any]] = [[] for _ in replicas]
    while True:
        stops: list[_Stop | None] = []
        for index, replica in enumerate(replicas):
            try:
                stops.append(replica.send(answers[index]))
            except StopIteration as end:
                outputs[index] = end.value
                stops.append(None)
        met = [stop for stop in stops if stop is not None]
        if not met:
            return outputs
        if len({stop.statement.outs for stop in met}) > 1 or len(met) < len(stops):
            return Hang(tuple("the end" if stop is None else str(stop) for stop in stops))
        answers = _meet(met[0].statement, [stop.operands for stop in met])


def _meet(
    statement: Statement, operands: list[tuple[np.ndarray, ...]]
) -> list[tuple[np.ndarray, ...]]:
    """Returns each replica's result of a collective, given the operands of all replicas."""
    rule = _COLLECTIVES[statement.op]
    columns = [
        list(column) if any(each is None for each in column) else rule(statement.params, column)
        for column in zip(*operands, strict=True)
    ]
    return [tuple(column[i] for column in columns) for i in range(len(operands))]


def _to_all(value: np.ndarray) -> list[np.ndarray]:
    return [value] * NUM_REPLICAS


def _groups(groups: Any, values: Sequence[np.ndarray]) -> list[np.ndarray]:
    sums = {i: sum(values[j] for j in group) for group in groups for i in group}
    return [sums[i] for i in range(NUM_REPLICAS)]


def _group_gather(groups: Any, values: Sequence[np.ndarray]) -> list[np.ndarray]:
    stacks = {i: np.stack([values[j] for j in group]) for group in groups for i in group}
    return [stacks[i] for i in range(NUM_REPLICAS)]


def _permute(pairs: Any, values: Sequence[np.ndarray]) -> list[np.ndarray]:
    source = {to: start for start, to in pairs}
    zeros = np.zeros_like(values[0])
    return [values[source[i]] if i in source else zeros for i in range(NUM_REPLICAS)]


def _scatter(is_tiled: bool, values: Sequence[np.ndarray]) -> list[np.ndarray]:
    total = np.asarray(sum(values))
    parts = np.split(total, NUM_REPLICAS)
    return parts if is_tiled else [part[0] for part in parts]


def _gather(is_tiled: bool, values: Sequence[np.ndarray]) -> list[np.ndarray]:
    return _to_all(np.concatenate(values) if is_tiled else np.stack(values))


def _reduce(op: str, values: Sequence[np.ndarray]) -> list[np.ndarray]:
    return _to_all({"sum": np.sum, "max": np.max, "min": np.min}[op](np.stack(values), 0))


_COLLECTIVES: dict[str, Any] = {
    "psum": lambda _, values: _reduce("sum", values),
    "pmax": lambda _, values: _reduce("max", values),
    "pmin": lambda _, values: _reduce("min", values),
    "pmean": lambda _, values: _reduce("sum", values),
    "psum_groups": lambda params, values: _groups(params[0], values),
    "all_gather": lambda params, values: _gather(params[0], values),
    "gather_groups": lambda params, values: _group_gather(params[0], values),
    "psum_scatter": lambda params, values: _scatter(params[0], values),
    "ppermute": lambda params, values: _permute(params[0], values),
    "all_to_all": lambda _, values: [
        np.stack([value[i] for value in values]) for i in range(NUM_REPLICAS)
    ],
    "context_reduce": lambda params, values: _reduce(params[0], values),
    "context_gather": lambda _, values: _gather(True, values),
}

_LOCAL: dict[str, Any] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "max": np.maximum,
    "min": np.minimum,
    "less": lambda a, b: a < b,
    "equal": lambda a, b: a == b,
    "select": lambda c, a, b: np.where(c > 0, a, b),
    "neg": lambda a: -a,
    "abs": np.abs,
    "wrap": lambda a: np.fmod(a, 13),
    "copy": lambda a: a,
    "plus": lambda a, number: a + number,
    "times": lambda a, number: a * number,
    "sum": lambda a: a.sum(),
    "sum_first": lambda a: a.sum(0),
    "max_first": lambda a: a.max(0),
    "argmax": lambda a: a.argmax(0),
    "cumsum": lambda a: np.cumsum(a, 0),
    "cummax": lambda a: np.maximum.accumulate(a, 0),
    "sort": lambda a: np.sort(a, 0),
    "argsort": lambda a: np.argsort(a, 0, kind="stable"),
    "reverse": lambda a: a[::-1],
    "transpose": np.transpose,
    "slice": lambda a, start, stop: a[start:stop],
    "at": lambda a, i: a[abs(int(i)) % len(a)],
    "take": lambda a, i: a[np.abs(i) % len(a)],
    "cast": lambda a: a,
    "resize": np.resize,
    "iota": lambda size: np.arange(size),
    "barrier": lambda *values: values if len(values) > 1 else values[0],
    "callback": lambda a: 2 * a - 1,
}


def _put(array: np.ndarray, i: Any, value: Any) -> np.ndarray:
    changed = array.copy()
    changed[abs(int(i)) % len(array)] = value
    return changed


_LOCAL["put"] = _put


def _row(array: np.ndarray | None, i: int) -> np.ndarray | None:
    return None if array is None else array[i]


def _stacked(rows: Sequence[Any]) -> np.ndarray | None:
    return None if any(row is None for row in rows) else np.stack(rows)


class _Replica:
    """One replica under way."""

    def __init__(self, index: int, program: Program, needed: set[int]) -> None:
        self.index = index
        self.needed = needed

    def block(self, block: Block, around: Values, given: Sequence[Any]) -> Run:
        env = {**around, **dict(zip(block.inputs, given, strict=True))}
        for statement in block.body:
            if not self.needed.intersection(statement.outs) and not has_effects(statement):
                env.update(dict.fromkeys(statement.outs))
                continue
            found = yield from self.statement(statement, env)
            for out, kind, value in zip(statement.outs, statement.kinds, found, strict=True):
                is_array = value is not None and kind.dtype != "ref"
                env[out] = self.checked(kind, value, statement) if is_array else value
        return [env[number] for number in block.outputs]

    def checked(self, kind: Kind, value: Any, statement: Statement) -> np.ndarray:
        array = np.asarray(value).astype(kind.dtype)
        if array.shape != kind.shape or (array.size and np.abs(array).max() >= 2**24):
            raise AssertionError(f"the program is badly made: {statement} gave {array!r}")
        return array

    def statement(self, statement: Statement, env: Values) -> Run:
        op, params = statement.op, statement.params
        args = [env[number] for number in statement.args]
        if op in _COLLECTIVES:
            return list((yield _Stop(statement, tuple(args))))
        if op in _LOCAL:
            found = _LOCAL[op](*args, *params)
            return list(found) if len(statement.outs) > 1 else [found]
        return (yield from getattr(self, op)(statement, env, *args))

    def const(self, statement: Statement, env: Values) -> Run:
        yield from ()
        return [np.asarray(statement.params[0])]

    def axis_index(self, statement: Statement, env: Values) -> Run:
        yield from ()
        return [np.asarray(self.index)]

    replica_id = axis_index

    def look(self, statement: Statement, env: Values, *args: Any) -> Run:
        yield from ()
        return []

    def ref(self, statement: Statement, env: Values, value: np.ndarray) -> Run:
        yield from ()
        return [_Cell(value)]

    def get(self, statement: Statement, env: Values, ref: _Cell) -> Run:
        yield from ()
        return [ref.value]

    def set(self, statement: Statement, env: Values, ref: _Cell, value: np.ndarray) -> Run:
        yield from ()
        ref.value = value
        return []

    def bump(self, statement: Statement, env: Values, ref: _Cell, value: np.ndarray) -> Run:
        yield from ()
        ref.value = np.fmod(ref.value + value, 13).astype(value.dtype)
        return []

    def scan(self, statement: Statement, env: Values, *args: Any) -> Run:
        num_carry, length, is_reversed = statement.params
        (body,) = statement.blocks
        carry, xs = list(args[:num_carry]), args[num_carry:]
        count = range(length)
        ys: dict[int, list[Any]] = {}
        for i in reversed(count) if is_reversed else count:
            found = yield from self.block(body, env, [*carry, *(_row(x, i) for x in xs)])
            carry, ys[i] = found[:num_carry], found[num_carry:]
        return [*carry, *map(_stacked, zip(*(ys[i] for i in count), strict=True))]

    def map(self, statement: Statement, env: Values, x: np.ndarray) -> Run:
        found = []
        for i in range(statement.kinds[0].shape[0]):
            found.append((yield from self.block(statement.blocks[0], env, [_row(x, i)]))[0])
        return [_stacked(found)]

    vmap = map

    def fori(self, statement: Statement, env: Values, *args: Any) -> Run:
        return (yield from self.rounds(statement, env, statement.params[0], args))

    def fori_to(self, statement: Statement, env: Values, limit: Any, *args: Any) -> Run:
        return (yield from self.rounds(statement, env, abs(int(limit)) % 4, args))

    def rounds(self, statement: Statement, env: Values, trips: int, args: Any) -> Run:
        carry = list(args)
        for i in range(trips):
            carry = yield from self.block(statement.blocks[0], env, [np.int32(i), *carry])
        return carry

    def while_loop(self, statement: Statement, env: Values, *args: Any) -> Run:
        test, body = statement.blocks
        carry, i = list(args), 0
        cells = [cell for cell in env.values() if isinstance(cell, _Cell)]
        while True:
            before = [cell.value for cell in cells]
            (limit,) = yield from self.block(test, env, [np.int32(i), *carry])
            if i >= abs(int(limit)) % 4:
                for cell, value in zip(cells, before, strict=True):
                    cell.value = value  # JAX loses what the last test has written
                return carry
            carry = yield from self.block(body, env, [np.int32(i), *carry])
            i += 1

    def cond(self, statement: Statement, env: Values, predicate: Any) -> Run:
        return (yield from self.block(statement.blocks[int(not predicate > 0)], env, []))

    def switch(self, statement: Statement, env: Values, index: Any) -> Run:
        chosen = abs(int(index)) % len(statement.blocks)
        return (yield from self.block(statement.blocks[chosen], env, []))

    def jit(self, statement: Statement, env: Values, *args: Any) -> Run:
        return (yield from self.block(statement.blocks[0], env, args))

    checkpoint = custom_jvp = custom_vjp = jit
