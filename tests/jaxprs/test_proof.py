"""The marks that the proof gives small steps hold when they run, on any number of replicas."""

import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import mirror
from tests.jaxprs.proofs import FLOATS, gradient, marks_of
from tests.support.messages import raises
from tests.support.strategies import cpu_strategy
from tests.support.tables import rows

AXIS = mirror.REPLICA_AXIS
CONSTANT = jnp.arange(8.0)
HOST_CONSTANT = np.arange(8.0, dtype=np.float32)

# Each step takes an `x` that is per-replica and an `m` that is mirrored, both float32[8], and
# stands with the marks of its results: "P" per-replica, "M" mirrored.
LAWS = {}


def law(marks):
    def register(step):
        LAWS[step.__name__] = (step, marks)
        return step

    return register


def laws(marks, **steps):
    LAWS.update({name: (step, marks) for name, step in steps.items()})


def index():
    return lax.axis_index(AXIS)


def groups():
    return [[i] for i in range(lax.axis_size(AXIS))]


def ring():
    n = lax.axis_size(AXIS)
    return [(i, (i + 1) % n) for i in range(n)]


def total(x):
    return lax.psum(x, AXIS)


laws(
    "M",
    identity=lambda x, m: m,
    closure_over_array=lambda x, m: m + CONSTANT + HOST_CONSTANT,
    constant_only=lambda x, m: CONSTANT * 2,
    literal=lambda x, m: 3,
    axis_size=lambda x, m: m * lax.axis_size(AXIS),
    psum=lambda x, m: total(x),
    psum_of_constant=lambda x, m: lax.psum(2.0, AXIS) + lax.psum(1, AXIS),
    psum_tree=lambda x, m: lax.psum({"a": x, "b": x * 2}, AXIS)["b"],
    pmean=lambda x, m: lax.pmean(x, AXIS),
    pmax=lambda x, m: lax.pmax(x, AXIS),
    pmin=lambda x, m: lax.pmin(x, AXIS),
    all_gather=lambda x, m: lax.all_gather(x, AXIS, tiled=True).mean(),
    psum_over_two_axes=lambda x, m: jax.vmap(
        lambda a: lax.psum(a, (AXIS, "inner")), axis_name="inner"
    )(x),
    psum_under_vmap=lambda x, m: jax.vmap(lambda a: total(a) * 2)(x),
    psum_in_jit=lambda x, m: jax.jit(lambda a: jax.jit(total)(a) + 1)(x),
    psum_in_checkpoint=lambda x, m: gradient(jax.checkpoint(lambda a: jnp.sin(a) * total(x)), m),
    psum_in_mirrored_switch=lambda x, m: lax.switch(m[0].astype(int), [total, jnp.sin], m),
    psum_in_mirrored_cond=lambda x, m: lax.cond(m[0] > 0, total, lambda a: total(a) + 1, x),
    psum_in_fori=lambda x, m: lax.fori_loop(0, 3, lambda i, c: total(x) + c, m),
    psum_in_while_test=lambda x, m: lax.while_loop(
        lambda c: lax.pmax(c.sum() + x[0], AXIS) < 50, lambda c: c + 10, m
    ),
    grad_of_sum=lambda x, m: lax.pmean(jax.grad(lambda w: (w * x).sum())(m), AXIS),
    scan_of_jit=lambda x, m: lax.scan(lambda c, s: (jax.jit(jnp.sin)(c) + s, c), m, m)[0],
    random_bits=lambda x, m: jax.random.normal(jax.random.key(0), (4,)),
    random_split=lambda x, m: jax.random.uniform(jax.random.split(jax.random.key(0))[1], (4,)),
    bit_generator=lambda x, m: lax.rng_bit_generator(jnp.zeros(4, jnp.uint32), (3,))[1],
    pure_callback=lambda x, m: jax.pure_callback(lambda a: np.asarray(a) + 1, FLOATS, m),
    platform=lambda x, m: lax.platform_dependent(m, cpu=jnp.sin, default=jnp.cos),
    sort=lambda x, m: lax.sort(m),
    searchsorted=lambda x, m: jnp.searchsorted(m, m) + jnp.nonzero(m, size=8)[0],
    linear_solve=lambda x, m: jnp.linalg.solve(jnp.eye(8) * 2, m),
    conjugate_gradients_over_all_data=lambda x, m: jax.scipy.sparse.linalg.cg(
        lambda v: lax.pmean(x * x * v, AXIS) + v, m, maxiter=2
    )[0],
    composite=lambda x, m: lax.composite(total, name="mirror.total")(x),
    ensured=lambda x, m: mirror.ensure_mirrored({"a": m, "n": 1.0})["a"],
    ref_mirrored_in_mirrored_cond=lambda x, m: ref_under_cond(m[0] > 0),
)
laws(
    "P",
    input=lambda x, m: x,
    arithmetic=lambda x, m: x * 0 + m,
    axis_index=lambda x, m: index(),
    psum_scatter=lambda x, m: lax.psum_scatter(m, AXIS, tiled=True),
    all_to_all=lambda x, m: lax.all_to_all(m, AXIS, 0, 0, tiled=True),
    ppermute=lambda x, m: lax.ppermute(x, AXIS, ring()),
    groups_psum=lambda x, m: lax.psum(x, AXIS, axis_index_groups=groups()),
    groups_pmax=lambda x, m: lax.pmax(x, AXIS, axis_index_groups=groups()),
    groups_all_gather=lambda x, m: lax.all_gather(x, AXIS, axis_index_groups=groups()),
    psum_over_inner_axis=lambda x, m: jax.vmap(lambda a: lax.psum(a, "inner"), axis_name="inner")(
        x
    ),
    index_under_vmap=lambda x, m: jax.vmap(lambda a: a * index())(m),
    index_in_jit=lambda x, m: jax.jit(lambda a: a * index())(m),
    index_in_map=lambda x, m: lax.map(lambda a: a * index(), m),
    index_in_checkpoint=lambda x, m: jax.checkpoint(lambda a: jnp.sin(a) * index())(m),
    closure_over_input=lambda x, m: jax.jit(lambda a: a + x)(m),
    gather_own=lambda x, m: lax.all_gather(x, AXIS)[index()],
    grad_of_gather=lambda x, m: gradient(lambda a: lax.all_gather(a, AXIS) * jnp.sin(x), m),
    cond_of_input=lambda x, m: lax.cond(x[0] > 0, jnp.sin, jnp.cos, m),
    cond_of_constants=lambda x, m: lax.cond(x[0] > 0, lambda: 1.0, lambda: 2.0),
    switch_of_input=lambda x, m: lax.switch(x[0].astype(int), [jnp.sin, jnp.cos], m),
    while_of_input=lambda x, m: lax.while_loop(lambda c: c < x[0] + 3, lambda c: c + 1, 0.0),
    io_callback=lambda x, m: jax.experimental.io_callback(np.asarray, FLOATS, m),
    rng_uniform=lambda x, m: lax.rng_uniform(0.0, 1.0, (3,)),
    random_folded=lambda x, m: jax.random.normal(jax.random.fold_in(jax.random.key(0), index())),
    reduce_that_projects=lambda x, m: lax.reduce(x, np.float32(0), lambda a, b: b, (0,)),
    linear_solve_that_differs=lambda x, m: lax.custom_linear_solve(
        lambda v: v * 2, m, lambda _, b: b / 2 + index(), symmetric=True
    ),
    root_that_differs=lambda x, m: lax.custom_root(
        lambda y: y - m, m, lambda f, y: y + index(), lambda g, y: y
    ),
    ref_mirrored_in_own_cond=lambda x, m: ref_under_cond(x[0] > 0),
    ref_indexed=lambda x, m: ref_after(lambda ref: ref.__setitem__(index(), 1.0)),
    ref_added=lambda x, m: ref_after(lambda ref: jax.ref.addupdate(ref, ..., x)),
    ref_in_jit=lambda x, m: ref_after(lambda ref: jax.jit(lambda a: ref.__setitem__(..., a))(x)),
    ref_in_checkpoint=lambda x, m: ref_after(
        lambda ref: jax.checkpoint(lambda a: ref.__setitem__(..., a))(x)
    ),
    ref_as_jit_argument=lambda x, m: ref_after(
        lambda ref: jax.jit(lambda r, a: r.__setitem__(..., a))(ref, x)
    ),
    ref_in_scan=lambda x, m: ref_after(
        lambda ref: lax.scan(lambda c, s: ref.__setitem__(0, s) or (c, None), 0, x)
    ),
    vjp_into_ref=lambda x, m: ref_after(
        lambda ref: jax.vjp(lambda w: (w * x).sum(), m)[1].with_refs(ref)(np.float32(1))
    ),
)


def ref_after(write):
    ref = jax.new_ref(jnp.zeros(8))
    write(ref)
    return ref[...]


def ref_under_cond(condition):
    """The written value is mirrored, but the condition decides whether it is written."""
    return ref_after(
        lambda ref: lax.cond(condition, lambda: ref.__setitem__(..., jnp.ones(8)), lambda: None)
    )


@law("PMP")
def several(x, m):
    return x + m, lax.psum(x, AXIS) * m, index() + m


@law("PPM")
def fixpoint_after_three_rounds(x, m):
    def body(carry, _):
        _, b, c, d = carry
        return (b, c, x, d), None

    a, _, c, d = lax.scan(body, (m, m, m, m), None, length=4)[0]
    return a, c, d


@law("PM")
def shift_register_in_while(x, m):
    def body(carry):
        i, _, b, c = carry
        return i + 1, b, x, c

    _, a, _, c = lax.while_loop(lambda carry: carry[0] < 4, body, (0, m, m, m))
    return a, c


@law("PM")
def stacked_outputs(x, m):
    return lax.scan(lambda c, s: (c + 1, (c * x[0], s)), 0.0, m)[1]


@law("PM")
def collective_then_own_again(x, m):
    return lax.scan(lambda c, _: ((total(c[1]), x), None), (m, m), None, length=2)[0][::-1]


@law("PP")
def while_marks_all_that_changes(x, m):
    return lax.while_loop(lambda c: c[0] < x[0] + 2, lambda c: (c[0] + 1, c[1] * 2), (0.0, m))


@law("MP")
def while_that_leaves_a_value_alone(x, m):
    body = lambda c: (jax.jit(lambda a: a)(c[0]), c[1] + 1)  # noqa: E731
    return lax.while_loop(lambda c: c[1][0] < 30, body, (m, x))


@law("MP")
def cond_that_leaves_a_value_alone(x, m):
    first = lambda m, x: (jax.jit(lambda a, b: (a, b))(m, x)[0], x)  # noqa: E731
    return lax.cond(x[0] > 0, first, lambda m, x: (m, x + 1), m, x)


@law("P")
def cond_between_two_calls_of_one_function(x, m):
    twice = jax.jit(lambda a: a * 2)
    return lax.cond(x[0] > 0, lambda: twice(m), lambda: twice(m + 1))


@law("PM")
def barrier_keeps_values_apart(x, m):
    return lax.optimization_barrier((x, m))


@law("PM")
def device_put_keeps_values_apart(x, m):
    return tuple(jax.device_put([x, m]))


@law("M")
def printing_changes_nothing(x, m):
    jax.debug.callback(lambda _: None, x)
    jax.debug.print("{}", x[0] * 0)
    return m


@law("MM")
def custom_jvp(x, m):
    f = jax.custom_jvp(lambda a: total(x) * a)
    f.defjvp(lambda p, t: (f(*p), total(x) * t[0]))
    return f(m), gradient(f, m)


@law("MP")
def custom_vjp_with_own_rule(x, m):
    f = jax.custom_vjp(lambda a: a * 2)
    f.defvjp(lambda a: (f(a), None), lambda _, g: (g * index(),))
    return f(m), gradient(f, m)


@law("PPM")
def refs_in_a_loop(x, m):
    """Written per-replica in the first round, read in the next."""
    first, second, third = (jax.new_ref(jnp.zeros(8)) for _ in range(3))

    def body(i, _):
        second[...] = first[...]
        first[...] = x
        third[...] += m

    lax.fori_loop(0, 3, body, None)
    return first[...], second[...], third[...]


@law("MP")
def ref_that_another_branch_writes(x, m):
    ref = jax.new_ref(jnp.zeros(8))

    def write():
        ref[...] = x
        return m

    return lax.cond(m[0] < 0, lambda: ref[...], write), ref[...]


@law("P")
def ref_counts_rounds(x, m):
    ref = jax.new_ref(jnp.zeros(()))

    def body(i):
        ref[...] += 1.0
        return i + 1

    lax.while_loop(lambda i: i < x[0] + 1, body, 0.0)
    return ref[...]


def arguments(num_replicas):
    rows = [np.arange(8, dtype=np.float32) + 5 * r for r in range(num_replicas)]
    return mirror.PerReplica(rows), np.arange(1, 9, dtype=np.float32)


def assert_as_marked(out, marks):
    leaves = jax.tree.leaves(out, is_leaf=lambda v: isinstance(v, mirror.PerReplica))
    said = "".join("P" if isinstance(leaf, mirror.PerReplica) else "M" for leaf in leaves)
    assert said == marks
    for leaf in leaves:
        if isinstance(leaf, jax.Array):
            first, *others = [np.asarray(shard.data) for shard in leaf.addressable_shards]
            for other in others:
                np.testing.assert_array_equal(other, first)


@rows("num_replicas", [1, 2, 8])
@rows("step, expected", LAWS)
def test_proof_marks_results(step, expected, num_replicas):
    assert marks_of(step, num_replicas) == expected


@pytest.mark.filterwarnings("ignore:.*pure_callback")
@pytest.mark.filterwarnings("ignore:.*step.*fold_in")
@pytest.mark.parametrize("num_replicas", [2, pytest.param(8, marks=pytest.mark.slow)])
def test_results_marked_mirrored_are_equal_on_all_replicas(num_replicas, subtests):
    def step(x, m):
        return {name: each(x, m) for name, (each, _) in LAWS.items()}

    out = cpu_strategy(num_replicas).run(step, arguments(num_replicas))
    for name in LAWS:
        with subtests.test(msg=name):
            assert_as_marked(out[name], LAWS[name][1])


# Steps that replicas would not finish, and the same with a mirrored condition.
def hangs(condition, x, m):
    return {
        "cond": lambda: lax.cond(condition, total, jnp.sin, x),
        "gather": lambda: lax.cond(condition, lambda: lax.all_gather(x, AXIS)[0], lambda: x),
        "switch": lambda: lax.switch(condition.astype(int), [jnp.sin, total, jnp.cos], x),
        "deep": lambda: lax.cond(condition, jax.jit(jax.checkpoint(total)), jnp.sin, x),
        "loop inside": lambda: lax.cond(
            condition, lambda: lax.fori_loop(0, 2, lambda i, c: total(c), m), lambda: m
        ),
        "inner cond": lambda: lax.cond(
            condition, lambda: lax.cond(m[0] > 0, total, jnp.sin, m), lambda: m
        ),
        "while body": lambda: lax.while_loop(
            lambda c: (c[0] < 2) & condition, lambda c: (c[0] + 1, total(c[1])), (0, m)
        ),
        "while test": lambda: lax.while_loop(
            lambda c: (total(c[1])[0] < 2) & condition, lambda c: (c[0], c[1] + 1), (0, m)
        ),
        "later round": lambda: lax.scan(
            lambda c, _: ((condition, lax.cond(c[0], total, jnp.sin, c[1])), None),
            (False, m),
            None,
            length=2,
        ),
        "root": lambda: lax.cond(
            condition,
            lambda: lax.custom_root(
                lambda y: y - m, m, lambda f, y: total(y), lambda g, y: y / g(jnp.ones(8))
            ),
            lambda: m,
        ),
    }


KINDS = list(hangs(None, None, None))


@rows("num_replicas", [1, 2])
@rows("kind", KINDS)
def test_proof_rejects_collectives_that_would_hang(kind, num_replicas):
    def step(x, m):
        return hangs(x[0] > 0, x, m)[kind]()

    fix = 'all_reduce("max", predicate)'
    with raises(mirror.ReplicaDivergenceError, names="test_proof.py", fix=fix) as error:
        marks_of(step, num_replicas)
    lines, start = inspect.getsourcelines(hangs)
    found = [int(line) for line in re.findall(r"test_proof\.py:(\d+)", str(error.value))]
    assert len(found) == 2, error.value
    here = inspect.getsourcelines(total)[1]
    assert all(start <= line < start + len(lines) or here <= line < here + 2 for line in found)


def test_proof_accepts_collectives_under_a_mirrored_condition(two):
    def step(x, m):
        return {kind: make() for kind, make in hangs(m[0] > 9, x, m).items()}

    assert set(two.run(step, arguments(2))) == set(KINDS)


def test_proof_marks_permutations_of_mirrored_values():
    """A replica that receives nothing gets zeros."""
    to_all, to_some = ((0, 1), (1, 0)), ((0, 1),)
    assert marks_of(lambda x, m: lax.ppermute(m, AXIS, to_all), 2) == "M"
    assert marks_of(lambda x, m: lax.ppermute(m, AXIS, to_some), 2) == "P"


def test_proof_joins_the_marks_of_operations_with_inner_programs():
    def reduced(x, by):
        return lax.reduce(x, np.float32(0), lambda a, b: a + by(b), (0,))

    assert marks_of(lambda x, m: reduced(m, lambda b: 2 * b), 2) == "M"
    assert marks_of(lambda x, m: reduced(x, lambda b: 2 * b), 2) == "P"
    assert marks_of(lambda x, m: reduced(m, lambda b: b * index()), 2) == "P"
    fix = "Move the all-reduce out of `reduce`."
    with raises(mirror.ReplicaDivergenceError, names="test_proof.py", fix=fix):
        marks_of(lambda x, m: reduced(x, total), 2)
