"""Random programs over the rows of a batch: padding changes no value that is said to exclude it.

A gradient that is said to be NaN because of padding is NaN, so that no program is rejected without
need. `python -m tests.fuzz.rows FIRST COUNT` checks programs of these seeds.
"""

import random
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mirror._src.jaxprs.row_facts import NO_ROWS, Rows, row
from mirror._src.jaxprs.rows import find_rows
from mirror._src.jaxprs.trace import trace
from tests.fuzz.equality import Instruction, Op, Shape

ROWS, EXAMPLES, FEATURES = 6, 4, 3
MASK = np.arange(ROWS) < EXAMPLES
_RTOL = 1e-4

BATCH, COLUMN, PAIRS, VECTOR, SCALAR = ("B", 3), ("B",), ("B", "B"), (3,), ()
_FLOATS = (BATCH, COLUMN, PAIRS, VECTOR, SCALAR)


# Numbers that a program may use to hide padding, some of which do not.
_HIDING = (0.0, 1.0, -1.0, -1e9, 1e9, -jnp.inf, jnp.inf)
_ELEMENTWISE: dict[str, Callable[[Any], Any]] = {
    "tanh": jnp.tanh,
    "exp": jnp.exp,
    "square": jnp.square,
    "abs": jnp.abs,
    "neg": jnp.negative,
    "log": jnp.log,
    "log1p": lambda x: jnp.log1p(jnp.abs(x)),
    "root": lambda x: jnp.sqrt(jnp.abs(x)),
    "inverse": lambda x: 1 / x,
    "safe inverse": lambda x: 1 / jnp.maximum(x, 1),
    "double": lambda x: 2 * x,
    "halved": lambda x: x / 2,
    "shift": lambda x: x + 0.5,
    "relu": jax.nn.relu,
    "sigmoid": jax.nn.sigmoid,
    "is positive": lambda x: (x > 0).astype(jnp.float32),
    "is finite": lambda x: jnp.isfinite(x).astype(jnp.float32),
    "clip": lambda x: jnp.clip(x, -0.5, 0.5),
    "repaired": jnp.nan_to_num,
    "times zero": lambda x: x * 0,
    "integers": lambda x: jnp.clip(x, -9, 9).astype(jnp.int32).astype(jnp.float32),
}
_PAIRED: dict[str, Callable[[Any, Any], Any]] = {
    "add": jnp.add,
    "sub": jnp.subtract,
    "mul": jnp.multiply,
    "ratio": jnp.divide,
    "max": jnp.maximum,
    "min": jnp.minimum,
    "where": lambda x, y: jnp.where(x > 0, x, y),
}
_REDUCTIONS: dict[str, Callable[..., Any]] = {
    "sum": jnp.sum,
    "mean": jnp.mean,
    "max": jnp.max,
    "min": jnp.min,
    "prod": jnp.prod,
    "any": lambda x, axis: (x > 0).any(axis).astype(jnp.float32),
    "all": lambda x, axis: (x > 0).all(axis).astype(jnp.float32),
    "argmax": lambda x, axis: jnp.argmax(x, axis).astype(jnp.float32),
    "logsumexp": jax.nn.logsumexp,
    "share": lambda x, axis: x.sum(axis) / (x.size if axis is None else x.shape[axis]),
    "norm": lambda x, axis: jnp.sqrt((x**2).sum(axis)),
    "var": jnp.var,
}


def _shaped(x: Any, mask: Any) -> Any:
    return mask.reshape(-1, *[1] * (x.ndim - 1))


def _at(x: Any, y: Any) -> tuple[Any, Any]:
    """Returns positions of rows, and numbers from 0 to 2 that depend on the rows."""
    return jnp.arange(len(x)), jnp.clip(jnp.nan_to_num(y), 0, 2).astype(jnp.int32)


def _turned(x: Any, y: Any) -> tuple[Any, Any]:
    return _at(x, y)[::-1]


def _rows(x: Any, y: Any) -> Any:
    """Returns numbers of rows, some of which are padding."""
    return jnp.clip(4 * jnp.abs(jnp.nan_to_num(y)), 0, len(x) - 1).astype(jnp.int32)


# Gathers and scatters, with positions of rows as one index or the other.
_PICKING: dict[str, tuple[Shape, Shape, Callable[[Any, Any], Any]]] = {
    "picked": (BATCH, COLUMN, lambda x, y: jnp.asarray(x)[_at(x, y)]),
    "picked of pairs": (PAIRS, COLUMN, lambda x, y: jnp.asarray(x)[_at(x, y)]),
    "picked of others": (PAIRS, COLUMN, lambda x, y: jnp.asarray(x)[_turned(x, y)]),
    "diagonal": (
        PAIRS,
        COLUMN,
        lambda x, y: jnp.asarray(x)[jnp.arange(len(x)), jnp.arange(len(x))],
    ),
    "taken": (BATCH, COLUMN, lambda x, y: jnp.take_along_axis(x, _at(x, y)[1][:, None], 1)[:, 0]),
    "other rows": (BATCH, BATCH, lambda x, y: jnp.asarray(x)[_rows(x, y)]),
    "turned": (BATCH, COLUMN, lambda x, y: jnp.asarray(x)[_rows(x, y), jnp.arange(len(x))]),
    "in a row": (COLUMN, COLUMN, lambda x, y: jnp.asarray(x)[jnp.arange(len(x))[None]][0]),
    "set": (BATCH, BATCH, lambda x, y: jnp.asarray(x).at[_at(x, y)].set(0.5)),
    "set to rows": (BATCH, BATCH, lambda x, y: jnp.asarray(x).at[_at(x, y)].set(y)),
    "set in constants": (
        BATCH,
        BATCH,
        lambda x, y: jnp.ones((len(x), FEATURES)).at[_at(x, y)].set(y),
    ),
    "set in constants of others": (
        PAIRS,
        PAIRS,
        lambda x, y: jnp.zeros((len(x), len(x))).at[_turned(x, y)].set(0.5),
    ),
    "added": (PAIRS, PAIRS, lambda x, y: jnp.asarray(x).at[_at(x, y)].add(y)),
    "added to others": (PAIRS, PAIRS, lambda x, y: jnp.asarray(x).at[_turned(x, y)].add(1.0)),
}


_TILED = ("tiled sum", "tiled mean")
_MOVING: dict[str, tuple[Shape, Callable[[Any, Any], Any]]] = {
    "tiled then cut": (BATCH, lambda x, n: jnp.tile(x, (2, 1))[: len(x)]),
    "joined then cut": (COLUMN, lambda x, n: jnp.concatenate([x, 2 * x])[len(x) :]),
    "joined then shifted": (COLUMN, lambda x, n: jnp.concatenate([x, x])[1 : len(x) + 1]),
    "joined in part": (BATCH, lambda x, n: jnp.concatenate([x[:1], x])[: len(x)]),
    "split": (BATCH, lambda x, n: jnp.split(jnp.concatenate([x, jnp.tanh(x)]), 2)[1]),
    "extended then cut": (COLUMN, lambda x, n: jnp.pad(x, (0, 2))[: len(x)]),
    "shifted": (COLUMN, lambda x, n: jnp.pad(x, (1, 0))[:-1]),
    "rolled": (BATCH, lambda x, n: jnp.roll(x, n % 3, 0)),
    "rolled by a number": (
        COLUMN,
        lambda x, n: jnp.roll(x, jnp.nan_to_num(x[0] * 0).astype(jnp.int32) + n % 3),
    ),
    "reversed": (BATCH, lambda x, n: jnp.asarray(x)[::-1]),
}


def _operations() -> dict[str, Op]:
    table: dict[str, Op] = {}
    for shape in _FLOATS:
        for name, one in _ELEMENTWISE.items():
            table[f"{name} {shape}"] = Op((shape,), shape, lambda x, _, __, f=one: f(x))
        for name, two in _PAIRED.items():
            table[f"{name} {shape}"] = Op((shape, shape), shape, lambda x, y, _, __, f=two: f(x, y))
        for name, scalar in _PAIRED.items():
            table[f"{name} {shape} scalar"] = Op(
                (shape, SCALAR), shape, lambda x, y, _, __, f=scalar: f(x, y)
            )
    for shape in (BATCH, COLUMN, PAIRS):
        table[f"masked {shape}"] = Op((shape,), shape, lambda x, m, _: x * _shaped(x, m))
        table[f"hidden {shape}"] = Op(
            (shape,),
            shape,
            lambda x, m, c: jnp.where(_shaped(x, m), x, _HIDING[c % len(_HIDING)]),
        )
        table[f"softmax {shape}"] = Op((shape,), shape, lambda x, _, __: jax.nn.softmax(x, 0))
        table[f"centered {shape}"] = Op(
            (shape,), shape, lambda x, m, _: x - x.mean(0, where=_shaped(x, m))
        )
        table[f"cumulated {shape}"] = Op(
            (shape,), shape, lambda x, _, c: jax.lax.cumsum(x, 0, reverse=c % 2 == 0)
        )
    for name, reduce in _REDUCTIONS.items():
        over_rows = lambda x, _, __, f=reduce: f(x, axis=0)  # noqa: E731
        table[f"{name} of rows"] = Op((BATCH,), VECTOR, over_rows)
        table[f"{name} of column"] = Op((COLUMN,), SCALAR, over_rows)
        table[f"{name} of pairs"] = Op((PAIRS,), COLUMN, over_rows)
        table[f"{name} of vector"] = Op((VECTOR,), SCALAR, over_rows)
        over_last = lambda x, _, __, f=reduce: f(x, axis=-1)  # noqa: E731
        table[f"{name} of features"] = Op((BATCH,), COLUMN, over_last)
        table[f"{name} of others"] = Op((PAIRS,), COLUMN, over_last)
        table[f"{name} of all"] = Op((BATCH,), SCALAR, lambda x, _, __, f=reduce: f(x, axis=None))
    for name, (takes, gives, pick) in _PICKING.items():
        table[name] = Op((takes, COLUMN), gives, lambda x, y, _, __, f=pick: f(x, y))
    for name, (shape, move) in _MOVING.items():
        table[name] = Op((shape,), shape, lambda x, _, c, f=move: f(x, c))
        table[f"mean of {name}"] = Op((shape,), shape[1:], lambda x, _, c, f=move: f(x, c).mean(0))
        table[f"sum of {name}"] = Op((shape,), shape[1:], lambda x, _, c, f=move: f(x, c).sum(0))
    for name in _TILED:
        reduce = jnp.sum if name == "tiled sum" else jnp.mean
        table[name] = Op((BATCH,), VECTOR, lambda x, _, __, f=reduce: f(jnp.tile(x, (2, 1)), 0))
    table.update(
        {
            "mask": Op((), COLUMN, lambda m, _: m.astype(jnp.float32)),
            "count": Op((), SCALAR, lambda m, _: m.sum().astype(jnp.float32)),
            "number": Op((), SCALAR, lambda m, c: jnp.float32(_HIDING[c % len(_HIDING)])),
            "pairs hidden": Op(
                (PAIRS,), PAIRS, lambda x, m, c: jnp.where(m[None], x, _HIDING[c % len(_HIDING)])
            ),
            "similar": Op((BATCH, BATCH), PAIRS, lambda x, y, _, __: x @ y.T),
            "product": Op((PAIRS, BATCH), BATCH, lambda p, x, _, __: p @ x),
            "outer": Op((COLUMN, COLUMN), PAIRS, lambda x, y, _, __: x[:, None] - y[None]),
            "added to rows": Op((BATCH, VECTOR), BATCH, lambda x, v, _, __: x + v),
            "scaled rows": Op((BATCH, COLUMN), BATCH, lambda x, c, _, __: x * c[:, None]),
            "divided rows": Op((BATCH, VECTOR), BATCH, lambda x, v, _, __: x / v),
            "contracted": Op((COLUMN, BATCH), VECTOR, lambda c, x, _, __: c @ x),
            "dot": Op((COLUMN, COLUMN), SCALAR, lambda x, y, _, __: x @ y),
            "first": Op((BATCH,), COLUMN, lambda x, _, c: x[:, c % FEATURES]),
            "transposed": Op((PAIRS,), PAIRS, lambda p, _, __: p.T),
            "of segments": Op(
                (BATCH, COLUMN),
                VECTOR,
                lambda x, y, _, __: jax.ops.segment_sum(
                    x[:, 0], jnp.clip(y, 0, 2).astype(jnp.int32), FEATURES
                ),
            ),
            "scanned": Op(
                (COLUMN,),
                SCALAR,
                lambda x, _, __: jax.lax.scan(lambda c, r: (c + r, None), 0.0, x)[0],
            ),
            "kept in scan": Op(
                (COLUMN,),
                SCALAR,
                lambda x, m, _: jax.lax.scan(
                    lambda c, r: (jnp.where(r[1], c + r[0], c), None), 0.0, (x, m)
                )[0],
            ),
            "normalized": Op(
                (BATCH,), BATCH, lambda x, m, _: x / jnp.linalg.norm(x * _shaped(x, m), axis=0)
            ),
            "top": Op((PAIRS,), COLUMN, lambda p, _, __: jax.lax.top_k(p, 2)[0].sum(-1)),
            "sorted": Op((COLUMN,), COLUMN, lambda x, _, __: jnp.sort(x)),
        }
    )
    return table


OPS = _operations()
# What programs are made of that exclude padding, or divide by what is left.
_FREQUENT = [
    *(f"{name} {shape}" for name in ("masked", "hidden") for shape in (BATCH, COLUMN)),
    *(f"{name} of rows" for name in ("sum", "norm", "max", "logsumexp")),
    *(f"{name} of column" for name in ("sum", "norm", "max", "logsumexp")),
    *(f"{name} of features" for name in ("sum", "norm", "max", "logsumexp")),
    *(f"{name} {COLUMN} scalar" for name in ("ratio", "mul", "add")),
    *(f"{name} {shape}" for name in ("log", "root", "inverse") for shape in (SCALAR, COLUMN)),
    *("divided rows", "normalized", "dot", "contracted", "added to rows"),
]
FIRST_PICKING = 100_000
"""The first seed whose program may pick rows."""
FIRST_MOVING = 10_000_000
"""The first seed whose program may move rows."""
_INPUTS: tuple[Shape, ...] = (BATCH, COLUMN, VECTOR, SCALAR)  # the last two without rows


def generate(seed: int) -> list[Instruction]:
    """Returns the program of a seed."""
    rng = random.Random(seed)
    shapes, program = [*_INPUTS], []
    moving = [name for name in OPS if any(name.endswith(each) for each in (*_MOVING, *_TILED))]
    names = [name for name in OPS if name not in (*_PICKING, *moving)] + _FREQUENT * 6
    names += [*_PICKING] * 7 * (seed >= FIRST_PICKING) + moving * 3 * (seed >= FIRST_MOVING)
    last = rng.randint(4, 12)
    while len(program) < last:
        op = OPS[name := rng.choice(names)]
        found = [[i for i, shape in enumerate(shapes) if shape == taken] for taken in op.takes]
        if not all(found):
            continue
        args = tuple(each[int(len(each) * rng.random() ** 0.5)] for each in found)
        program.append(Instruction(name, args, rng.randrange(100)))
        shapes.append(op.gives)
    return program


def function(program: Sequence[Instruction]) -> Callable[..., list[Any]]:
    """Returns the function of the mask and the inputs that computes every value of a program."""

    def run(mask: Any, *inputs: Any) -> list[Any]:
        values = [*inputs]
        for op, args, choice in program:
            values.append(OPS[op].run(*(values[i] for i in args), mask, choice))
        return values[len(inputs) :]

    return run


def inputs_of(seed: int) -> list[np.ndarray]:
    """Returns the inputs, of which the first ones have a row per example."""
    rng = np.random.default_rng(seed)
    shapes = [tuple(EXAMPLES if n == "B" else n for n in shape) for shape in _INPUTS]
    return [np.asarray(rng.normal(size=shape) * 1.5, np.float32) for shape in shapes]


def padded(inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Returns the inputs with padding, which repeats the last example as a `Trainer` does."""
    return [
        np.concatenate([x, x[-1:].repeat(ROWS - EXAMPLES, 0)]) if "B" in shape else x
        for x, shape in zip(inputs, _INPUTS, strict=True)
    ]


def facts(program: Sequence[Instruction]) -> list[Rows]:
    """Returns what is found about the values of a program."""
    shapes = [tuple(ROWS if n == "B" else n for n in shape) for shape in _INPUTS]
    avals = [jax.ShapeDtypeStruct((ROWS,), bool)]
    avals += [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    rows = [row(ROWS) if "B" in shape else NO_ROWS for shape in _INPUTS]
    return find_rows(trace(function(program), avals, 1), [row(ROWS, is_mask=True), *rows], 1)


def check(seed: int, tally: Counter[str]) -> None:
    """Fails if padding changes a value of which the facts say that it does not."""
    program = generate(seed)
    run, given = function(program), inputs_of(seed)
    with_padding = run(MASK, *padded(given))
    alone = run(np.ones(EXAMPLES, bool), *given)
    for i, (each, found) in enumerate(zip(program, facts(program), strict=True)):
        a, b = (np.asarray(x[i], np.float64) for x in (with_padding, alone))
        a = a[tuple(slice(EXAMPLES) if n == "B" else slice(None) for n in OPS[each.op].gives)]
        is_equal = np.allclose(a, b, rtol=_RTOL, atol=_RTOL, equal_nan=True)
        is_claimed = not found.unknown and not found.padded
        tally[f"{'excluded' if is_claimed else 'padded'}{', equal' * is_equal}"] += 1
        assert is_equal or not is_claimed, f"{b} became {a}{_listing(seed, program, i)}"


def check_gradient(seed: int, tally: Counter[str]) -> None:
    """Fails if a gradient is not NaN that is said to be, with padding or without examples."""
    program = generate(seed)
    losses = [i for i, each in enumerate(program) if OPS[each.op].gives == COLUMN]
    if not losses:
        return
    run, given, i = function(program), inputs_of(seed), losses[-1]

    def gradients(mask: Any, x: Any, column: Any, *parameters: Any) -> Any:
        def loss(parameters: Any) -> Any:
            weights, *rest = parameters
            return jnp.where(mask, run(mask, x @ weights, column, *rest)[i], 0).sum()

        return jax.grad(loss)(parameters)

    parameters = (np.eye(FEATURES, dtype=np.float32) + 0.1, *given[2:])
    avals = [jax.ShapeDtypeStruct(np.shape(x), x.dtype) for x in (MASK, *padded(given)[:2])]
    avals += [jax.ShapeDtypeStruct(np.shape(x), x.dtype) for x in parameters]
    traced = trace(lambda *leaves: list(gradients(*leaves)), avals, 1)
    alone = gradients(np.ones(EXAMPLES, bool), *given[:2], *parameters)
    mask, rest = row(ROWS, is_mask=True), [row(ROWS), row(ROWS), *[NO_ROWS] * len(parameters)]
    for name, values, known in (
        ("padded", MASK, mask),
        ("empty", np.zeros(ROWS, bool), mask._replace(constant=0.0)),
    ):
        found = find_rows(traced, [known, *rest], 1)
        for got, wanted, facts_of in zip(
            gradients(values, *padded(given)[:2], *parameters), alone, found, strict=True
        ):
            is_nan, is_claimed = bool(jnp.isnan(got).any()), facts_of.has_nan
            if jnp.isfinite(wanted).all():
                tally[f"{name}{', claimed' * is_claimed}{', NaN' * is_nan}"] += 1
            assert is_nan or not is_claimed, f"{name}: {got}{_listing(seed, program, i)}"


def _listing(seed: int, program: Sequence[Instruction], last: int) -> str:
    lines = "\n".join(f"{k + len(_INPUTS)}: {x}" for k, x in enumerate(program[: last + 1]))
    return f", seed {seed}\n{lines}"


def main(arguments: Sequence[str]) -> None:
    """Checks programs of consecutive seeds, and prints what was found."""
    first, count = map(int, arguments)
    tally: Counter[str] = Counter()
    for seed in range(first, first + count):
        for law in (check, check_gradient):
            try:
                law(seed, tally)
            except AssertionError as error:
                tally[f"wrong {law.__name__}"] += 1
                print(error, flush=True)
    print(dict(tally.most_common()))


if __name__ == "__main__":
    main(sys.argv[1:])
