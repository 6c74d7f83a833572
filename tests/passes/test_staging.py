"""Programs split at their collectives: which stages they get, and what a stage keeps."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from mirror import REPLICA_AXIS
from mirror._src.jaxprs.trace import trace
from mirror._src.passes.program import Settings, values_of
from mirror._src.passes.staged import Collective, Loop
from mirror._src.passes.staging import stage_program
from tests.support.tables import rows

N = 2


def psum(x):
    return jax.lax.psum(x, REPLICA_AXIS)


def pmean(x):
    return jax.lax.pmean(x, REPLICA_AXIS)


def cut_of(fn, *shapes, mirrored=(), pack_bytes=0):
    """Returns the stages of a function of float32 arrays; `mirrored` are the mirrored positions."""
    avals = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    settings = Settings(N, pack_bytes, [i not in mirrored for i in range(len(shapes))])
    program = trace(fn, avals, N)
    return stage_program([program], settings, [False] * len(program.jaxpr.outvars))


def kinds_of(cut_program):
    """Returns the values reduced after each stage."""
    return [
        [
            communication.primitive
            if isinstance(communication, Collective)
            else type(communication).__name__
            for communication in stage.communications
        ]
        for stage in cut_program.stages
    ]


def kept_bytes(stage):
    """Returns the values that each stage keeps for later stages."""
    return sum(value.num_bytes for value in dict.fromkeys(values_of(stage.outputs)))


CUTS = {
    "nothing": (lambda x, y: x * 2, [[]]),
    "itself": (lambda x, y: x, [[]]),
    "one": (lambda x, y: psum(x) + y, [["psum"], []]),
    "side by side": (lambda x, y: psum(x) + psum(y * 2), [["psum", "psum"], []]),
    "one after the other": (lambda x, y: psum(psum(x) * y), [["psum"], ["psum"], []]),
    "late and early": (lambda x, y: psum(psum(x) * x) + psum(y), [["psum", "psum"], ["psum"], []]),
    "of kinds": (lambda x, y: psum(x) + jax.lax.pmax(y, REPLICA_AXIS), [["psum", "pmax"], []]),
    "unread": (lambda x, y: [psum(x), x * y][1], [[]]),
    "in calls": (jax.jit(lambda x, y: jax.checkpoint(psum)(x) + y), [["psum"], []]),
    "in vmap": (lambda x, y: jax.vmap(psum)(x), [["psum"], []]),
    "in a loop": (lambda x, y: jax.lax.fori_loop(0, 2, lambda i, c: psum(c), x), [["Loop"], []]),
    "in no trips": (lambda x, y: jax.lax.fori_loop(0, 0, lambda i, c: psum(c), x), [[]]),
    "local loop": (
        lambda x, y: psum(jax.lax.fori_loop(0, 2, lambda i, c: c * 2, x)),
        [["psum"], []],
    ),
    "by number": (lambda x, y: x + jax.lax.axis_index(REPLICA_AXIS), [[]]),
}


@rows("fn, wanted", CUTS)
def test_program_is_split_at_its_collectives(fn, wanted):
    assert kinds_of(cut_of(fn, (3,), (3,))) == wanted


def test_small_leaves_of_one_dtype_share_a_buffer():
    def step(a, b, c, large):
        first = psum((a, b, large, c.astype(jnp.int32)))
        return first, jax.lax.pmax(c, REPLICA_AXIS), psum(a * first[0])

    found = cut_of(step, (3,), (2, 2), (5,), (99,), pack_bytes=40)
    collectives = [list(stage.communications) for stage in found.stages]
    sizes = sorted(
        (e.primitive, str(e.operand.aval.dtype), e.operand.aval.shape) for e in collectives[0]
    )
    assert sizes == [
        ("pmax", "float32", (5,)),
        ("psum", "float32", (7,)),
        ("psum", "float32", (99,)),
        ("psum", "int32", (5,)),
    ]
    (packed,) = (e for e in collectives[0] if e.operand.aval.shape == (7,))
    assert packed.description.startswith("all-reduce at test_staging.py:")
    assert packed.description.endswith(" in psum and 1 more")
    assert [len(stage) for stage in collectives] == [4, 1, 0]


def test_operations_without_gradients_are_delayed_until_donation():
    """The decay of a moment is computed where the gradient is, not kept as a copy of the state."""
    big = (64, 64)

    def step(weights, moment, x):
        grads = pmean(jax.grad(lambda w: jnp.sum((x @ w) ** 2))(weights))
        scale = jnp.sqrt(jnp.asarray(0.9)) * 0.5
        moment = moment * 0.9 + grads * 0.1
        return weights - scale * moment, moment

    first, _ = cut_of(step, big, big, (2, 64), mirrored=(0, 1)).stages
    (communication,) = first.communications
    assert kept_bytes(first) == communication.operand.num_bytes  # the gradient, and nothing else
    assert [value.aval.shape for value in first.inputs].count(big) == 1


def test_operations_that_shrink_their_inputs_are_not_delayed():
    """A loss is kept, not the activations that it is the mean of."""

    def step(weights, x):
        def loss(weights):
            hidden = x @ weights
            return jnp.mean(hidden**2)

        value, grads = jax.value_and_grad(loss)(weights)
        return pmean(grads), 3 * value + jnp.sum(psum(weights))

    first, last = cut_of(step, (8, 8), (512, 8), mirrored=(0,)).stages
    assert kept_bytes(first) == 2 * 8 * 8 * 4 + 4
    assert (512, 8) not in [value.aval.shape for value in last.inputs]


def test_stages_pass_few_values():
    """For an MLP with Adam, stages pass the gradients, the loss, and results from the host."""
    tx, shapes = optax.adam(1e-3), [(12, 32), (32,), (32, 5), (5,)]
    params = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    moments, structure = jax.tree.flatten(jax.eval_shape(tx.init, params))

    def step(x, count, *leaves):
        params, first, second = (list(leaves[i : i + 4]) for i in (0, 4, 8))
        state = jax.tree.unflatten(structure, [count.astype(jnp.int32), *first, *second])

        def loss_of(params):
            hidden = jax.nn.relu(x @ params[0] + params[1])
            return jnp.mean((hidden @ params[2] + params[3]) ** 2)

        loss, grads = jax.value_and_grad(loss_of)(params)
        grads, loss = pmean((grads, loss))
        updates, state = tx.update(grads, state, params)
        return jax.tree.leaves((optax.apply_updates(params, updates), state, loss))

    assert len(moments) == 9
    state = 3 * shapes
    found = cut_of(step, (6, 12), (), *state, mirrored=range(1, 14), pack_bytes=1 << 20)
    assert kinds_of(found) == [["psum"], []]  # gradients and loss in one buffer
    first, last = found.stages
    assert kept_bytes(first) == 4 * sum(map(np.prod, shapes)) + 4
    computed_first = {value for step in first.computations for value in step.outputs}
    assert not computed_first.intersection(last.inputs)


def test_loop_is_one_step_of_its_stage():
    found = cut_of(lambda x: jax.lax.fori_loop(0, 2, lambda i, c: c + psum(c), x), (3,))
    (loop,) = found.stages[0].communications
    assert isinstance(loop, Loop)
    assert (loop.trips, loop.test) == (2, None)
    assert kinds_of(loop.body) == [["psum"], []]
    assert "test_staging.py:" in loop.line
