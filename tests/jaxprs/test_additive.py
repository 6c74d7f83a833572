"""Additivity: outputs proved to be an input plus an independent value are so when run."""

import collections
import inspect
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback

from mirror._src.jaxprs.additive import Dependence, dependence
from tests.support.tables import rows

INDEPENDENT, ADDED, OTHER = Dependence
HOST = np.ones(3, np.float32)

# Each program takes `b`, the tracked input, and `x`, both float32[3], and `p`, a boolean; its only
# result depends on `b` as the table says.
LAWS = {}


def laws(how, **programs):
    assert not LAWS.keys() & programs.keys()
    LAWS.update({name: (program, how) for name, program in programs.items()})


def repeated(body, start, length=3):
    return lax.scan(lambda c, _: (body(c), None), start, length=length)[0]


def counted(body, start, end):
    """A `while` whose condition is computed from `end` alone."""
    advance = lambda c: (c[0] + 1, body(c[1]))  # noqa: E731
    return lax.while_loop(lambda c: c[0] < end, advance, (0.0, start))[1]


def stored(value, *more):
    """The value, or what was added to it, read from where a program has stored it."""
    ref = jax.new_ref(value)
    for each in more:
        ref[...] += each
    return ref[...]


def stored_under(predicate, value):
    ref = jax.new_ref(jnp.zeros(3))

    def write():
        ref[...] = value

    lax.cond(predicate, write, lambda: None)
    return ref[...]


def stored_by_the_test(end, x):
    ref = jax.new_ref(x)

    def test(c):
        ref[...] += x
        return c < end

    lax.while_loop(test, lambda c: c + 1, 0.0)
    return ref[...]


def read_before_written(b, x):
    """A loop whose second iteration reads what the first has written."""
    ref = jax.new_ref(x)

    def body(c, _):
        c = c + ref[...]
        ref[...] = b
        return c, None

    return lax.scan(body, x, length=2)[0]


def host_reads(x):
    return io_callback(lambda: HOST, jax.ShapeDtypeStruct((3,), np.float32)) + x


def written_and_read_on_the_host(b, x):
    io_callback(lambda value: None, None, b)
    return host_reads(x)


def solved(b):
    return lax.custom_linear_solve(lambda a: 2 * a, b, lambda _, a: a / 2)


@jax.custom_jvp
def custom_added(b, x):
    return b + x


@jax.custom_vjp
def custom_added_too(b, x):
    return b + x


custom_added.defjvp(lambda primals, tangents: (custom_added(*primals), sum(tangents)))
custom_added_too.defvjp(lambda b, x: (b + x, None), lambda _, g: (g, g))

laws(
    INDEPENDENT,
    other_input=lambda b, x, p: x * 2,
    constant=lambda b, x, p: jnp.zeros(3) + HOST,
    literal=lambda b, x, p: 3.0,
    shape_only=lambda b, x, p: jnp.zeros_like(b) + b.size,
    overwritten=lambda b, x, p: b.at[...].set(x),
    overwritten_in_loop=lambda b, x, p: repeated(lambda c: c + 1, b.at[...].set(x)),
    loop_beside_it=lambda b, x, p: lax.fori_loop(0, 3, lambda i, c: (c[0] + x, c[1] * 2), (b, x))[
        1
    ],
    stacked_beside_it=lambda b, x, p: lax.scan(lambda c, a: (c + b, a * 2), b, x)[1],
    unused_in_jit=lambda b, x, p: jax.jit(lambda a, c: c * 2)(b, x),
    unused_in_cond=lambda b, x, p: lax.cond(p, lambda a, c: c, lambda a, c: -c, b, x),
    stored_without_it=lambda b, x, p: stored(x, x) + 0 * stored(x),
    barrier_beside_it=lambda b, x, p: lax.optimization_barrier((b, x))[1],
    host_without_it=lambda b, x, p: host_reads(x),
)
laws(
    ADDED,
    unchanged=lambda b, x, p: b,
    plus=lambda b, x, p: b + x,
    plus_from_the_right=lambda b, x, p: x + b,
    plus_often=lambda b, x, p: 1.0 + (b + x) + x.sum() + HOST,
    minus=lambda b, x, p: b - x,
    plus_scalar=lambda b, x, p: b + 3,
    same_dtype=lambda b, x, p: lax.convert_element_type(b, jnp.float32) + x,
    copied=lambda b, x, p: lax.optimization_barrier((jnp.copy(b), x))[0] + x,
    same_shape=lambda b, x, p: jnp.broadcast_to(jnp.reshape(b, (3,)), (3,)) + x,
    reshaped_and_back=lambda b, x, p: jnp.squeeze(jnp.reshape(b, (1, 3, 1)) + 1, (0, 2)),
    in_jit=lambda b, x, p: jax.jit(lambda a, c: jax.jit(jnp.add)(a, c) + 1)(b, x),
    in_remat=lambda b, x, p: jax.checkpoint(lambda a: a + jnp.sin(x))(b),
    in_custom_jvp=lambda b, x, p: custom_added(b, x),
    in_custom_vjp=lambda b, x, p: custom_added_too(b, x),
    chosen=lambda b, x, p: jnp.where(p, b + x, b),
    chosen_elementwise=lambda b, x, p: jnp.where(x > 0, b + x, b - 1),
    in_cond=lambda b, x, p: lax.cond(p, lambda a: a + x, lambda a: a, b),
    in_switch=lambda b, x, p: lax.switch(
        x[0].astype(int), [jnp.add, lambda a, c: a, jnp.subtract], b, x
    ),
    in_scan=lambda b, x, p: repeated(lambda c: c + x, b),
    in_scan_over_batches=lambda b, x, p: lax.scan(lambda c, a: (c + a, a), b, x)[0],
    in_fori_loop=lambda b, x, p: lax.fori_loop(0, 3, lambda i, c: c + i * x, b),
    in_while=lambda b, x, p: counted(lambda c: c + x, b, x[0]),
    in_nested_loops=lambda b, x, p: repeated(
        lambda c: lax.cond(p, lambda a: counted(lambda e: e + x, a, 2.0), lambda a: a, c), b
    ),
    constant_of_loop=lambda b, x, p: repeated(lambda c: b + x, b),
    scattered=lambda b, x, p: b.at[x.astype(int)].add(x),
    overwritten_with_it=lambda b, x, p: x.at[...].set(b + x),
    after_debug_print=lambda b, x, p: (jax.debug.callback(lambda _: None, b), b + x)[1],
    beside_a_ref=lambda b, x, p: b + stored(x, x),
)
laws(
    OTHER,
    twice=lambda b, x, p: b + b,
    scaled=lambda b, x, p: b * 0.5 + x,
    scaled_increment=lambda b, x, p: b + x * b,
    negated=lambda b, x, p: x - b,
    added_and_subtracted=lambda b, x, p: b + (x - b),
    rounded=lambda b, x, p: b.astype(jnp.bfloat16).astype(jnp.float32) + x,
    other_dtype=lambda b, x, p: b.astype(jnp.int32),
    other_shape=lambda b, x, p: jnp.reshape(b, (1, 3)) + x,
    broadcast=lambda b, x, p: jnp.broadcast_to(b, (2, 3)),
    reversed_order=lambda b, x, p: b[::-1] + x,
    sliced=lambda b, x, p: b[:1] + x,
    overwritten_in_part=lambda b, x, p: b.at[0].set(x[0]),
    overwritten_at_indices=lambda b, x, p: b.at[x.astype(int)].set(x),
    overwritten_at_the_start=lambda b, x, p: lax.scatter(
        b, jnp.zeros(0, int), x[:2], lax.ScatterDimensionNumbers((0,), (), ())
    ),
    overwritten_if_in_bounds=lambda b, x, p: lax.scatter(
        b, x[:1].astype(int), x, lax.ScatterDimensionNumbers((0,), (), (0,))
    ),
    overwritten_where_it_says=lambda b, x, p: x.at[b.astype(int)].set(x),
    overwritten_with_twice_it=lambda b, x, p: x.at[...].set(b * 2),
    overwritten_often=lambda b, x, p: lax.scatter(
        b, jnp.zeros((3, 0), int), x, lax.ScatterDimensionNumbers((), (0,), ())
    ),
    scattered_where_it_says=lambda b, x, p: b.at[b.astype(int)].add(x),
    maximum=lambda b, x, p: jnp.maximum(b, x),
    chosen_by_it=lambda b, x, p: jnp.where(b > 0, b + x, b),
    chosen_or_reset=lambda b, x, p: jnp.where(p, 0, b) + x,
    branch_resets=lambda b, x, p: lax.cond(p, lambda a: x, lambda a: a + x, b),
    branch_taken_by_it=lambda b, x, p: lax.cond(b[0] > 0, lambda a: a + x, lambda a: a, b),
    constants_chosen_by_it=lambda b, x, p: lax.cond(b[0] > 0, lambda: x, lambda: -x),
    loop_scales=lambda b, x, p: repeated(lambda c: c * 2, b),
    loop_resets=lambda b, x, p: repeated(lambda c: x, b),
    loop_adds_it=lambda b, x, p: repeated(lambda c: c + b, x),
    loop_swaps=lambda b, x, p: repeated(lambda c: (c[1], c[0]), (b, x))[0],
    loop_mixes=lambda b, x, p: repeated(lambda c: (c[0] + c[1], c[1] + c[0]), (b, x))[0],
    loop_scales_what_it_added=lambda b, x, p: lax.fori_loop(
        0, 4, lambda i, c: (c[0] + c[1], c[2], c[0]), (b, x, x)
    )[0],
    while_scales_what_it_added=lambda b, x, p: counted(
        lambda c: (c[0] + c[1], c[2], c[0]), (b, x, x), x[0]
    )[0],
    stacked=lambda b, x, p: lax.scan(lambda c, a: (c, a + x[0]), x, b)[1],
    stacked_carry=lambda b, x, p: lax.scan(lambda c, a: (c + a, c), b.sum(), x)[1],
    while_it_says=lambda b, x, p: counted(lambda c: c + x, b, b[0]),
    counted_while_it_says=lambda b, x, p: counted(lambda c: c + x, x, b[0]),
    stored_and_read=lambda b, x, p: stored(b, x),
    added_to_stored=lambda b, x, p: stored(x, b),
    stored_if_it_says=lambda b, x, p: stored_under(b[0] > 0, x),
    stored_while_it_says=lambda b, x, p: stored_by_the_test(b[0], x),
    stored_in_a_loop=lambda b, x, p: read_before_written(b, x),
    handed_to_the_host=lambda b, x, p: written_and_read_on_the_host(b, x),
    unknown_operation=lambda b, x, p: solved(b),
    computed_on_the_host=lambda b, x, p: jax.pure_callback(
        lambda a: a, jax.ShapeDtypeStruct((3,), np.float32), b
    ),
)

SHAPES = [*[jax.ShapeDtypeStruct((3,), np.float32)] * 2, jax.ShapeDtypeStruct((), bool)]


@rows("program, expected", LAWS)
def test_additivity_finds_dependence(program, expected):
    closed = jax.make_jaxpr(program)(*SHAPES)
    assert dependence(closed, [0], [0]) == [expected], inspect.getsource(program)


def test_additivity_pairs_outputs_with_inputs():
    def program(a, b, c):
        return c + a, b * 2, a - b * c, b

    closed = jax.make_jaxpr(program)(1.0, 1.0, 1.0)
    pairs = {
        (0, 0): ADDED,
        (1, 0): INDEPENDENT,
        (2, 0): ADDED,
        (0, 2): ADDED,
        (1, 1): OTHER,
        (1, 2): OTHER,
        (1, 3): ADDED,
        (0, 3): INDEPENDENT,
    }
    inputs, outputs = zip(*pairs, strict=True)
    assert dependence(closed, inputs, outputs) == list(pairs.values())


CONVERSIONS = {
    "wider": ("float16", "float32", ADDED),
    "of 8 bits": ("float8_e4m3fn", "float32", ADDED),
    "narrower": ("float32", "float16", OTHER),
    "of equal size": ("bfloat16", "float16", OTHER),
    "of integers": ("int16", "int32", OTHER),
    "to a float": ("int8", "float32", OTHER),
}


@rows("dtype, other, expected", CONVERSIONS)
def test_additivity_through_a_conversion_to_another_dtype_and_back(dtype, other, expected):
    program = lambda b, x: (b.astype(other) + x).astype(dtype)  # noqa: E731
    closed = jax.make_jaxpr(program)(jnp.zeros(3, dtype), jnp.zeros(3, other))
    assert dependence(closed, [0], [0]) == [expected]


@rows("dtype", ["int8", "uint32", "float16", "bfloat16", "complex64"])
def test_additivity_accepts_every_numeric_dtype(dtype):
    closed = jax.make_jaxpr(lambda b, x: b + x)(jnp.zeros((), dtype), jnp.zeros((), dtype))
    assert dependence(closed, [0], [0]) == [ADDED]


@rows("value", [np.zeros(2, bool), jax.eval_shape(lambda: jax.random.key(0))])
def test_additivity_rejects_non_numeric_values(value):
    closed = jax.make_jaxpr(lambda b: (b, 0))(value)
    assert dependence(closed, [0, 0], [0, 1]) == [OTHER, INDEPENDENT]


# Random programs of integers: sums are exact, so that what was proved can be compared.

_POINTS, _INPUTS = 24, 4


def scanned(body, start, xs):
    """The carry of a scan, and the sum of its stacked outputs."""
    xs = jnp.broadcast_to(xs, (3, 2))
    carry, stacked = lax.scan(lambda v, x: (body(*v, x)[:2], v[0] + x), start, xs)
    return [*carry, stacked.sum(0)]


def repeated_while(body, start, end):
    advance = lambda v: (v[0] + 1, body(*v[1]))  # noqa: E731
    return lax.while_loop(lambda v: v[0] < end, advance, (0, start))[1]


def grow(rng, values, steps, depth=0):
    """The values, and results of as many random operations on them and on earlier results."""
    values = list(values)

    def pick():
        recent = values[-4:] if rng.random() < 0.5 else values
        return rng.choice(recent)

    def inner(size):
        """A random program with `size` inputs and `size` results."""
        seed = rng.random()

        def program(*arguments):
            return grow(random.Random(seed), arguments, 3, depth + 1)[-size:]

        return program

    for _ in range(steps):
        a, b, c = pick(), pick(), pick()
        kinds = ["add"] * 6 + ["sub"] * 2 + ["mul", "max", "where", "where", "reshape", "scatter"]
        kind = rng.choice(kinds + ["jit", "cond", "scan", "while", "switch", "ref"] * (depth < 2))
        if kind == "add":
            values.append(a + b)
        elif kind == "sub":
            values.append(a - b)
        elif kind == "mul":
            values.append(a * rng.choice([b, 1, 2, -1]))
        elif kind == "max":
            values.append(jnp.maximum(a, b))
        elif kind == "where":
            values.append(jnp.where(c > 0, a, rng.choice([b, a + b, a])))
        elif kind == "reshape":
            values.append(jnp.squeeze(jnp.reshape(a, (1, 2)) + b, 0))
        elif kind == "scatter":
            values.append(rng.choice([a.at[c % 2].add(b), a.at[...].set(b), a.at[0].set(b[0])]))
        elif kind == "jit":
            values += jax.jit(inner(2))(a, b)
        elif kind == "cond":
            values += lax.cond(c[0] > 0, inner(2), inner(2), a, b)
        elif kind == "switch":
            values += lax.switch(c[1] % 2, [inner(2), lambda *v: list(v), inner(2)], a, b)
        elif kind == "scan":
            values += scanned(inner(3), [a, b], rng.choice([jnp.arange(6).reshape(3, 2), c]))
        elif kind == "while":
            values += repeated_while(inner(2), [a, b], rng.choice([3, c[0] % 3]))
        else:
            values.append(stored(a, b) if depth == 0 else a + b)
    return values


@pytest.mark.parametrize(
    "seeds", [range(5), pytest.param(range(5, 30), marks=pytest.mark.nightly)], ids=str
)
def test_random_programs_behave_as_proved(seeds):
    seen = collections.Counter()
    for seed in seeds:

        def program(*inputs, seed=seed):
            return grow(random.Random(seed), inputs, 10)[len(inputs) :]

        draw = np.random.default_rng(seed)
        points = [draw.integers(-4, 5, (_POINTS, 2), np.int32) for _ in range(_INPUTS)]
        run = jax.jit(lambda arguments, program=program: lax.map(lambda a: program(*a), arguments))
        at_points = run(points)
        closed = jax.make_jaxpr(program)(*[point[0] for point in points])
        outputs = range(len(at_points))
        for i in range(_INPUTS):
            by = draw.integers(-4, 5, (_POINTS, 2), np.int32)
            moved = run([*points[:i], points[i] + by, *points[i + 1 :]])
            found = dependence(closed, [i] * len(outputs), outputs)
            for output, how in zip(outputs, found, strict=True):
                seen[how] += 1
                difference = np.asarray(moved[output]) - np.asarray(at_points[output])
                if how is not OTHER:
                    expected = by if how is ADDED else np.zeros_like(by)
                    np.testing.assert_array_equal(difference, expected, f"{seed} {i} {output}")
    assert all(seen[how] >= 5 for how in Dependence), seen
