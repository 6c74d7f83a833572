"""Random steps, and whether what is proved about each of their values is true in numbers.

`python -m tests.fuzz.equality FIRST COUNT` checks steps of these seeds.
"""

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mirror._src.base.types import REPLICA_AXIS
from mirror._src.jaxprs.relate import relate
from mirror._src.jaxprs.relations import SAME, Kind, Relation, Why, rows
from mirror._src.jaxprs.trace import trace

NUM_REPLICAS, ROWS, FEATURES = 3, 4, 3
_RTOL = 1e-9

Shape = tuple[Any, ...]  # "B" stands for the number of rows
MATRIX, VECTOR, BATCH, COLUMN, SCALAR = (3, 3), (3,), ("B", 3), ("B",), ()


class Instruction(NamedTuple):
    """One operation: its operands by number, and a number that varies it."""

    op: str
    args: tuple[int, ...]
    choice: int


class Op(NamedTuple):
    """An operation: the shapes of its operands, of its result, and what it computes."""

    takes: tuple[Shape, ...]
    gives: Shape
    run: Callable[..., Any]


def _rows(x: Any) -> int:
    return int(x.shape[0])


def _key(choice: int) -> Any:
    return jax.random.key(choice)


def _index() -> Any:
    return jax.lax.axis_index(REPLICA_AXIS)


def _example_keys(x: Any, choice: int) -> Any:
    positions = jnp.arange(_rows(x)) + _index() * _rows(x)
    return jax.vmap(jax.random.fold_in, (None, 0))(_key(choice), positions)


def _labels(x: Any) -> Any:
    return (jnp.abs(x) * 7).astype(jnp.int32) % FEATURES


def _rowsum(carry: Any, x: Any) -> Any:
    return carry + jnp.tanh(x), x * 2


def _among_rows(x: Any, axes: Any) -> Any:
    def of_row(row: Any) -> Any:
        most = jax.lax.pmax(jax.lax.stop_gradient(row), axes)
        return (row - jax.lax.pmean(row, axes)) * jnp.sin(most)

    return jax.vmap(of_row, axis_name="row")(x)


_UNARY: dict[str, Callable[[Any], Any]] = {
    "tanh": jnp.tanh,
    "exp": lambda x: jnp.exp(jnp.tanh(x)),
    "square": jnp.square,
    "abs": jnp.abs,
    "neg": jnp.negative,
    "root": lambda x: jnp.sqrt(jnp.abs(x) + 0.1),
    "inverse": lambda x: 1 / (1 + x**2),
    "double": lambda x: 2 * x,
    "shift": lambda x: x + 0.5,
    "relu": jax.nn.relu,
    "round": lambda x: jnp.floor(3 * x),
    "count": lambda x: (x > 0).astype(jnp.int32).astype(x.dtype),
    "clip": lambda x: jnp.clip(x, -0.5, 0.5),
    "stop": jax.lax.stop_gradient,
    "sum over replicas": lambda x: jax.lax.psum(x, REPLICA_AXIS),
    "mean over replicas": lambda x: jax.lax.pmean(x, REPLICA_AXIS),
    "max over replicas": lambda x: jax.lax.pmax(jax.lax.stop_gradient(x), REPLICA_AXIS),
    "over replicas": lambda x: x / jax.lax.axis_size(REPLICA_AXIS),
    "repeat": lambda x: jax.lax.fori_loop(0, 3, lambda i, c: c * 0.5 + jnp.tanh(x), x),
    "scan": lambda x: jax.lax.scan(lambda c, _: (c * 0.7 + x, None), x, None, length=2)[0],
    "while": lambda x: jax.lax.while_loop(
        lambda c: jnp.sum(c) > 1.0, lambda c: c * 0.5, jax.lax.stop_gradient(x)
    ),
    "remat": jax.checkpoint(lambda x: jnp.sin(x) * x),
    "jit": jax.jit(lambda x: jnp.cos(x) + x),
}


def _spectrum(x: Any, axis: int) -> Any:
    return jnp.fft.fft(x, axis=axis).real


def _regular(w: Any) -> Any:
    return w @ jnp.swapaxes(w, -1, -2) + 2 * jnp.eye(w.shape[-1])


def _solved(systems: Any, x: Any) -> Any:
    each = _regular(systems[:, :, None] * systems[:, None])
    return jnp.linalg.solve(each, x[..., None])[..., 0]


_BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "add": jnp.add,
    "sub": jnp.subtract,
    "mul": jnp.multiply,
    "ratio": lambda x, y: x / (jnp.abs(y) + 0.3),
    "max": jnp.maximum,
    "where": lambda x, y: jnp.where(x > y, x, 2 * y),
    "quotient": lambda x, y: x / jnp.where(y == 0, 1.0, y),
}
_TO_SCALAR: dict[str, Callable[[Any], Any]] = {
    "sum": jnp.sum,
    "mean": jnp.mean,
    "largest": jnp.max,
    "smallest": jnp.min,
    "variance": jnp.var,
    "norm": lambda x: jnp.sqrt(jnp.sum(x * x) + 0.1),
    "logsumexp": jax.nn.logsumexp,
}
_OF_BATCH: dict[str, Op] = {
    "mean of rows": Op((BATCH,), VECTOR, lambda x: x.mean(0)),
    "sum of rows": Op((BATCH,), VECTOR, lambda x: x.sum(0)),
    "max of rows": Op((BATCH,), VECTOR, lambda x: x.max(0)),
    "sum of features": Op((BATCH,), COLUMN, lambda x: x.sum(-1)),
    "max of features": Op((BATCH,), COLUMN, lambda x: x.max(-1)),
    "by rows": Op((VECTOR, BATCH), VECTOR, lambda v, x: v / _rows(x)),
    "scalar by rows": Op((SCALAR, BATCH), SCALAR, lambda v, x: v / _rows(x)),
    "by rows less one": Op((SCALAR, BATCH), SCALAR, lambda v, x: v / (_rows(x) - 1)),
    "times rows": Op((SCALAR, BATCH), SCALAR, lambda v, x: v * _rows(x)),
    "by all rows": Op(
        (VECTOR, BATCH), VECTOR, lambda v, x: v / jax.lax.psum(_rows(x), REPLICA_AXIS)
    ),
    "rows as an array": Op((BATCH,), SCALAR, lambda x: jnp.ones(_rows(x), x.dtype).sum()),
    "first": Op((BATCH,), VECTOR, lambda x: x[0]),
    "last": Op((BATCH,), VECTOR, lambda x: x[-1]),
    "two": Op((BATCH,), VECTOR, lambda x: x[:2].sum(0)),
    "reversed": Op((BATCH,), BATCH, lambda x: x[::-1]),
    "sorted": Op((BATCH,), BATCH, lambda x: jnp.sort(x, 0)),
    "sorted features": Op((BATCH,), BATCH, lambda x: jnp.sort(x, 1)),
    "running": Op((BATCH,), BATCH, lambda x: jnp.cumsum(x, 0)),
    "running features": Op((BATCH,), BATCH, lambda x: jnp.cumsum(x, 1)),
    "rolled": Op((BATCH,), BATCH, lambda x: jnp.roll(x, 1, 0)),
    "best row": Op((BATCH,), VECTOR, lambda x: jnp.argmax(x, 0).astype(x.dtype)),
    "best feature": Op((BATCH,), COLUMN, lambda x: jnp.argmax(x, 1).astype(x.dtype)),
    "spectrum": Op((BATCH,), BATCH, lambda x: _spectrum(x, 0)),
    "spectrum of features": Op((BATCH,), BATCH, lambda x: _spectrum(x, 1)),
    "systems": Op((BATCH, MATRIX), BATCH, lambda x, w: jnp.linalg.solve(_regular(w), x.T).T),
    "a system of each row": Op((BATCH, BATCH), BATCH, lambda x, y: _solved(y, x)),
    "layer": Op((BATCH, MATRIX), BATCH, jnp.matmul),
    "products": Op((BATCH, BATCH), MATRIX, lambda x, y: x.T @ y),
    "similarity": Op((BATCH, BATCH), COLUMN, lambda x, y: (x @ y.T).sum(1)),
    "pairs": Op((COLUMN, COLUMN), COLUMN, lambda x, y: (x[:, None] - y[None]).max(1)),
    "outer": Op((COLUMN, VECTOR), BATCH, lambda x, y: x[:, None] * y[None]),
    "weighted": Op((COLUMN, BATCH), BATCH, lambda w, x: w[:, None] * x),
    "embedding": Op((COLUMN, MATRIX), BATCH, lambda y, w: w[_labels(y)]),
    "histogram": Op(
        (COLUMN, BATCH), MATRIX, lambda y, x: jnp.zeros(MATRIX, x.dtype).at[_labels(y)].add(x)
    ),
    "added": Op((COLUMN, BATCH, MATRIX), MATRIX, lambda y, x, w: w.at[_labels(y)].add(x)),
    "written": Op((COLUMN, BATCH, MATRIX), MATRIX, lambda y, x, w: w.at[_labels(y)].set(x)),
    "picked": Op((COLUMN, BATCH), COLUMN, lambda y, x: x[jnp.arange(_rows(x)), _labels(y)]),
    "picked along": Op(
        (COLUMN, BATCH),
        COLUMN,
        lambda y, x: jnp.take_along_axis(x, _labels(y)[:, None], 1)[:, 0],
    ),
    "any row": Op((COLUMN, BATCH), BATCH, lambda y, x: x[_labels(y)]),
    "softmax": Op((BATCH,), BATCH, lambda x: jax.nn.softmax(x, -1)),
    "softmax of rows": Op((BATCH,), BATCH, lambda x: jax.nn.softmax(x, 0)),
    "mixed": Op((BATCH,), BATCH, lambda x: x.reshape(3, -1).T),
    "flat and back": Op((BATCH,), BATCH, lambda x: jnp.tanh(x.reshape(-1)).reshape(-1, 3)),
    "pieces summed": Op((BATCH,), VECTOR, lambda x: jnp.tanh(x.reshape(2, -1, 3)).sum(1).sum(0)),
    "pieces and back": Op((BATCH,), BATCH, lambda x: jnp.sin(x.reshape(2, -1, 3)).reshape(-1, 3)),
    "over pieces": Op(
        (BATCH, MATRIX),
        VECTOR,
        lambda x, w: jax.lax.scan(
            lambda c, p: (c + jnp.tanh(p @ w + w[0]).sum(0), None), w[0] * 0, x.reshape(2, -1, 3)
        )[0],
    ),
    "each piece": Op(
        (BATCH, MATRIX),
        BATCH,
        lambda x, w: jax.lax.map(lambda p: jnp.tanh(p @ w) * 2, x.reshape(2, -1, 3)).reshape(-1, 3),
    ),
    "pieces by rounds": Op(
        (BATCH, VECTOR),
        VECTOR,
        lambda x, v: jax.lax.scan(
            lambda c, each: (c + each[0].sum(0) * each[1], None), v, (x.reshape(2, -1, 3), v[:2])
        )[0],
    ),
    "normalized pieces": Op(
        (BATCH, VECTOR),
        VECTOR,
        lambda x, v: jax.lax.scan(
            lambda c, p: (c + jnp.tanh(p.sum(0)), None), v, x.reshape(2, -1, 3)
        )[0],
    ),
    "decaying pieces": Op(
        (BATCH, VECTOR),
        VECTOR,
        lambda x, v: jax.lax.scan(lambda c, p: (c * 0.5 + p.sum(0), None), v, x.reshape(2, -1, 3))[
            0
        ],
    ),
    "summed rows": Op(
        (BATCH, VECTOR), VECTOR, lambda x, v: jax.lax.scan(_rowsum, v * 0, jnp.sin(x))[0]
    ),
    "counted rows": Op(
        (BATCH, VECTOR),
        VECTOR,
        lambda x, v: jax.lax.scan(lambda c, r: (c + v + r, c.sum()), v * 0, x)[0],
    ),
    "flat halves": Op((BATCH,), VECTOR, lambda x: x.reshape(2, -1, 3).sum(1).max(0)),
    "features first": Op((BATCH,), BATCH, lambda x: (x.T * 2 + 1).T),
    "stacked": Op((BATCH, BATCH), BATCH, lambda x, y: jnp.stack([x, y]).max(0)),
    "joined": Op((BATCH, BATCH), COLUMN, lambda x, y: jnp.concatenate([x, y], 1).max(1)),
    "joined rows": Op((BATCH, BATCH), VECTOR, lambda x, y: jnp.concatenate([x, y]).max(0)),
    "padded": Op((BATCH,), COLUMN, lambda x: jnp.pad(x, ((0, 0), (1, 0))).min(1)),
    "each row": Op((BATCH, MATRIX), BATCH, lambda x, w: jax.lax.map(lambda r: jnp.tanh(r @ w), x)),
    "every row": Op((BATCH, MATRIX), BATCH, lambda x, w: jax.vmap(lambda r: jnp.sin(r) @ w)(x)),
    "row of own rows": Op((BATCH,), BATCH, lambda x: _among_rows(x, "row")),
    "row of all rows": Op((BATCH,), BATCH, lambda x: _among_rows(x, ("row", REPLICA_AXIS))),
    "over rows": Op((BATCH, VECTOR), VECTOR, lambda x, v: jax.lax.scan(_rowsum, v, x)[0]),
    "decay by rows": Op(
        (BATCH, VECTOR),
        VECTOR,
        lambda x, v: jax.lax.scan(lambda c, _: (0.5 * c, None), v, x)[0],
    ),
    "all rows": Op(
        (BATCH,),
        VECTOR,
        lambda x: jax.lax.all_gather(x, REPLICA_AXIS, axis=0, tiled=True).max(0),
    ),
    "positions": Op((BATCH,), COLUMN, lambda x: jnp.arange(_rows(x)).astype(x.dtype)),
    "true positions": Op(
        (BATCH,), COLUMN, lambda x: (jnp.arange(_rows(x)) + _index() * _rows(x)).astype(x.dtype)
    ),
    "replica": Op((BATCH,), SCALAR, lambda x: _index().astype(x.dtype)),
    "centered": Op((BATCH,), BATCH, lambda x: x - jax.lax.pmean(x.mean(0), REPLICA_AXIS)),
    "normalized": Op((BATCH,), BATCH, lambda x: (x - x.mean(0)) / jnp.sqrt(x.var(0) + 0.1)),
    "branch": Op(
        (SCALAR, BATCH), BATCH, lambda p, x: jax.lax.cond(p > 0, jnp.sin, lambda x: x * 2, x)
    ),
    "branch of vectors": Op(
        (SCALAR, VECTOR), VECTOR, lambda p, x: jax.lax.cond(p > 0, lambda x: x + 1, lambda x: -x, x)
    ),
    "weighted mean": Op(
        (COLUMN, COLUMN), SCALAR, lambda x, w: (x * w).sum() / (jnp.abs(w).sum() + 0.1)
    ),
    "matrix": Op((MATRIX, BATCH), MATRIX, lambda w, x: w + x.T @ jnp.tanh(x @ w) / _rows(x)),
    "matrix vector": Op((MATRIX, VECTOR), VECTOR, jnp.matmul),
    "trace": Op((MATRIX,), SCALAR, jnp.trace),
    "element": Op((VECTOR,), SCALAR, lambda v: v[1]),
}
_RANDOM: dict[str, Callable[[Any, int], Any]] = {
    "noise": lambda x, c: x + jax.random.normal(_key(c), x.shape, x.dtype),
    "own noise": lambda x, c: (
        x + jax.random.normal(jax.random.fold_in(_key(c), _index()), x.shape, x.dtype)
    ),
    "noise of rows": lambda x, c: (
        x * jax.vmap(lambda k: jax.random.uniform(k, (3,), x.dtype))(_example_keys(x, c))
    ),
    "noise of features": lambda x, c: x + jax.random.normal(_key(c), x.shape[1:], x.dtype),
}

Program = tuple[Instruction, ...]
_INPUTS: tuple[Shape, ...] = (MATRIX, BATCH, COLUMN, BATCH)


def generate(seed: int) -> Program:
    """Returns a random step; of a third of them, the gradient of its last scalar is taken."""
    rng = np.random.default_rng(seed)
    shapes = list(_INPUTS)
    found: list[Instruction] = []
    while len(found) < 14:
        made = _drawn(rng, shapes)
        if made is not None:
            instruction, shape = made
            found.append(instruction)
            shapes.append(shape)
    return tuple(found)


def _drawn(rng: np.random.Generator, shapes: list[Shape]) -> tuple[Instruction, Shape] | None:
    def pick(*wanted: Shape) -> int | None:
        places = [i for i, shape in enumerate(shapes) if shape in wanted]
        if not places:
            return None
        late = places[-4:] if rng.random() < 0.7 else places
        return late[rng.integers(len(late))]

    family, choice = rng.choice(5, p=[0.27, 0.2, 0.13, 0.36, 0.04]), int(rng.integers(100))
    name = str(rng.choice(list((_UNARY, _BINARY, _TO_SCALAR, _OF_BATCH, _RANDOM)[family])))
    args: list[int | None]
    if family == 0:
        args = [pick(BATCH, COLUMN, VECTOR, SCALAR, MATRIX)]
        shape = shapes[args[0]] if args[0] is not None else SCALAR
    elif family == 1:
        first = pick(BATCH, COLUMN, VECTOR, SCALAR, MATRIX)
        assert first is not None
        shape = shapes[first]
        smaller = {BATCH: (BATCH, VECTOR, SCALAR), COLUMN: (COLUMN, SCALAR)}
        args = [first, pick(*smaller.get(shape, (shape, SCALAR)))]
    elif family == 2:
        args, shape = [pick(BATCH, COLUMN, VECTOR)], SCALAR
    elif family == 3:
        op = _OF_BATCH[name]
        args, shape = [pick(each) for each in op.takes], op.gives
    else:
        args, shape = [pick(BATCH)], BATCH
    known = tuple(arg for arg in args if arg is not None)
    return (Instruction(name, known, choice), shape) if len(known) == len(args) else None


def function(program: Program, *, of_gradient: bool) -> Callable[..., list[Any]]:
    """Returns the step, whose results are all its values, or gradients of its scalars."""

    def values(*inputs: Any) -> list[Any]:
        known = list(inputs)
        for op, args, choice in program:
            operands = [known[i] for i in args]
            if op in _RANDOM:
                known.append(_RANDOM[op](operands[0], choice))
            elif op in _OF_BATCH:
                known.append(_OF_BATCH[op].run(*operands))
            else:
                run = _UNARY.get(op) or _TO_SCALAR.get(op) or _BINARY[op]
                known.append(run(*operands))
        return known[len(inputs) :]

    def gradients(*inputs: Any) -> list[Any]:
        def loss(weights: Any) -> Any:
            every = values(weights, *inputs[1:])
            scalars = [x for x in every if not x.shape]
            return scalars[-1] if scalars else every[-1].mean()

        value, grad = jax.value_and_grad(loss)(inputs[0])
        summed = jax.lax.psum(grad, REPLICA_AXIS)
        return [value, grad, summed, jax.lax.pmean(grad, REPLICA_AXIS), jnp.sqrt(summed**2 + 1)]

    return gradients if of_gradient else values


def inputs(seed: int) -> list[np.ndarray]:
    """Returns the inputs of one device: weights, then arrays with a row per example."""
    rng = np.random.default_rng(seed)
    sizes = {"B": NUM_REPLICAS * ROWS}
    return [rng.normal(size=[sizes.get(d, d) for d in shape]) for shape in _INPUTS]


def related(step: Callable[..., list[Any]]) -> list[Relation]:
    """Returns what is proved about each result."""
    whole = inputs(0)
    types = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in whole]
    own = [types[0], *(jax.ShapeDtypeStruct((ROWS, *x.shape[1:]), x.dtype) for x in whole[1:])]
    programs = trace(step, own, NUM_REPLICAS), trace(step, types, 1)
    return relate(*programs, [SAME, rows(0), rows(0), rows(0)], NUM_REPLICAS)


def evaluated(step: Callable[..., list[Any]], seed: int) -> tuple[list[Any], list[Any]]:
    """Returns the results of each replica, stacked, and those of one device."""
    whole = inputs(seed)
    stacked = [x.reshape(NUM_REPLICAS, ROWS, *x.shape[1:]) for x in whole[1:]]
    axes = (None, 0, 0, 0)
    many = jax.vmap(step, axes, axis_name=REPLICA_AXIS, axis_size=NUM_REPLICAS)
    one = jax.vmap(step, axes, axis_name=REPLICA_AXIS, axis_size=1)
    results = many(jnp.asarray(whole[0]), *stacked)
    single = one(jnp.asarray(whole[0]), *(x[None] for x in whole[1:]))
    return list(map(np.asarray, results)), [np.asarray(x)[0] for x in single]


def holds(relation: Relation, values: np.ndarray, whole: np.ndarray) -> bool:
    """Whether a relation is true of the replicas' values and the value of one device."""
    scaled = float(relation.scale) * whole
    if relation.is_in_pieces:
        assert relation.pieces is not None
        return _are_pieces(relation, values, scaled)
    match relation.kind:
        case Kind.OTHER | Kind.TOTAL:
            return True
        case Kind.ZERO:
            return not values.any() and not whole.any()
        case Kind.SAME:
            return all(_is_close(value, scaled) for value in values)
        case Kind.PART:
            return _is_close(values.sum(0), scaled)
        case Kind.MOST:
            return _is_close(values.max(0), scaled)
        case Kind.LEAST:
            return _is_close(values.min(0), scaled)
        case Kind.ROWS:
            return _is_close(np.concatenate(values, relation.axis), scaled)
        case Kind.INDEX:
            steps = [value + i * float(relation.scale) for i, value in enumerate(values)]
            return _is_close(np.concatenate(steps, relation.axis), whole)
        case Kind.NUMBER:
            steps = [i * float(relation.scale) for i in range(len(values))]
            return _is_close(values, np.array(steps)) and not whole.any()
        case Kind.ADDED:
            return _is_close(values.sum((0, relation.axis + 1)), scaled.sum(relation.axis))
        case Kind.SPREAD:
            first = np.take(values.sum(0), 0, relation.axis)
            return _is_close(first, np.take(scaled, 0, relation.axis))


def _are_pieces(relation: Relation, values: np.ndarray, scaled: np.ndarray) -> bool:
    """Whether a relation of pieces is true of the replicas' values and a multiple of the other."""
    if relation.kind is Kind.PART:
        return _is_close(values.sum((0, relation.pieces + 1)), scaled.sum(relation.pieces))
    assert relation.kind is Kind.ROWS
    axes = relation.pieces, relation.axis

    def flat(x: np.ndarray) -> np.ndarray:
        x = np.moveaxis(x, axes, (0, 1))
        return x.reshape(-1, *x.shape[2:])

    return _is_close(np.concatenate(list(map(flat, values))), flat(scaled))


def _is_close(a: np.ndarray, b: np.ndarray) -> bool:
    if a.shape != b.shape:
        return False
    finite = np.isfinite(a) & np.isfinite(b)
    scale = max(1.0, float(np.abs(b[finite]).max(initial=0.0)))
    is_equal = (a == b) | (np.isnan(a) & np.isnan(b))
    with np.errstate(invalid="ignore"):
        return bool((is_equal | (np.abs(a - b) <= _RTOL * scale)).all())


def check(seed: int, tally: Counter[str], num_inputs: int = 2) -> None:
    """Fails if anything that is proved about the step of a seed is false."""
    program = generate(seed)
    step = function(program, of_gradient=seed % 3 == 0)
    with jax.enable_x64(True):
        relations = related(step)
        every = [evaluated(step, seed) for seed in range(num_inputs)]
    for i, relation in enumerate(relations):
        for values, whole in every:
            if not holds(relation, values[i], whole[i]):
                lines = "\n".join(f"{k + len(_INPUTS)}: {each}" for k, each in enumerate(program))
                raise AssertionError(
                    f"seed {seed}: result {i} is {relation}, but replicas have\n{values[i]}\nand "
                    f"one device\n{whole[i]}\n{lines}"
                )
        tally[_name(relation)] += 1
        is_equal = all(holds(SAME, values[i], whole[i]) for values, whole in every)
        if relation.kind is Kind.OTHER and is_equal:
            tally[f"{_name(relation)}, and equal"] += 1


def _name(relation: Relation) -> str:
    why = relation.cause.why if relation.cause is not None else Why.UNKNOWN
    return relation.kind.value if relation.kind is not Kind.OTHER else why.name


def main(arguments: Sequence[str]) -> None:
    """Checks steps of consecutive seeds, and prints what was proved."""
    first, count = map(int, arguments)
    tally: Counter[str] = Counter()
    for seed in range(first, first + count):
        check(seed, tally)
    print(dict(tally.most_common()))


if __name__ == "__main__":
    main(sys.argv[1:])
