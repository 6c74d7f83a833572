"""A synchronous step in parts: the same numbers as on all replicas, or an error."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import mirror
from mirror._src.jaxprs.trace import trace
from mirror._src.ps.joins import Join, find_joins
from mirror._src.ps.parts import bounds, joined
from mirror._src.ps.replies import Raised
from tests.ps.digits import arrays, batches, create, largest_difference, on_replicas
from tests.ps.one_worker import Training
from tests.support.messages import raises
from tests.support.tables import mostly_nightly

LOCAL = mirror.OneDeviceStrategy("/cpu:0")
TX = optax.sgd(0.1)
SIZE = 12


def losses(model, batch):
    return optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]), batch["y"])


def step_of(reduce, loss_of=lambda model, batch, context: losses(model, batch).mean()):
    """Returns a step whose gradient and result are what `reduce(context, grads, loss, ...)` is."""

    def step(model, optimizer, batch):
        context = mirror.get_replica_context()
        loss, grads = nnx.value_and_grad(lambda m: loss_of(m, batch, context))(model)
        grads, result = reduce(context, grads, loss, batch, nnx.state(model, nnx.Param))
        optimizer.update(model, grads)
        return result

    return step


def total(model, batch, context):
    return losses(model, batch).sum() / SIZE


def scaled(model, batch, context):
    return losses(model, batch).mean() / context.num_replicas_in_sync


def mean(context, grads, loss, batch, params):
    return context.all_reduce("mean", (grads, loss))


def in_bfloat16(context, grads, loss, batch, params):
    half = jax.tree.map(lambda g: g.astype(jnp.bfloat16), grads)
    half = context.all_reduce("sum", half)
    return jax.tree.map(lambda g: g.astype(jnp.float32), half), loss


def with_results(results):
    """Returns a `reduce` of the mean gradient, and other results."""

    def reduce(context, grads, loss, batch, params):
        return context.all_reduce("mean", grads), results(context, loss, batch, params)

    return reduce


def linear(x):
    padded = jnp.concatenate([x[None], jnp.zeros(3)])
    return jnp.where(jnp.arange(4) < 2, 2 * x - 1, padded @ jnp.eye(4))


def stopped(context, loss, batch, params):
    return jax.lax.stop_gradient(context.all_reduce("mean", loss))


def accumulated(context, grads, loss, batch, params):
    """Sums in a loop, as gradients of micro batches are."""
    loss = jax.lax.scan(lambda carry, _: (carry + loss / 3, None), 0.0, length=3)[0]
    return mean(context, grads, loss, batch, params)


def after_a_loop(context, grads, loss, batch, params):
    grads, loss = mean(context, grads, loss, batch, params)
    return grads, jax.lax.scan(lambda carry, _: (carry + loss / 3, loss), 0.0, length=3)


def after_a_while(context, grads, loss, batch, params):
    grads, loss = mean(context, grads, loss, batch, params)
    body = lambda carry: (carry[0] + 1, carry[1] + 2 * loss)  # noqa: E731
    return grads, jax.lax.while_loop(lambda carry: carry[0] < 3, body, (0, loss))[1]


SAME_NUMBERS = {
    "mean": step_of(mean),
    "sum of losses over the size of the batch": step_of(
        lambda context, grads, loss, *_: context.all_reduce("sum", (grads, loss)), total
    ),
    "sum of losses over the number of replicas": step_of(
        lambda context, grads, loss, *_: context.all_reduce("sum", (grads, loss)), scaled
    ),
    "sum over the number of replicas": step_of(
        lambda context, *trees: jax.tree.map(
            lambda x: context.all_reduce("sum", x) / context.num_replicas_in_sync, trees[:2]
        )
    ),
    "sum and a penalty": step_of(
        lambda context, grads, loss, batch, params: (
            jax.tree.map(lambda g, p: g + 0.1 * p, context.all_reduce("sum", grads), params),
            context.all_reduce("sum", loss) + 0.1,
        ),
        total,
    ),
    "gradient of a result stopped": step_of(with_results(stopped)),
    "sum in half precision": step_of(in_bfloat16, total),
    "numbers of rows": step_of(
        with_results(
            lambda context, loss, batch, params: {
                "static": context.all_reduce("sum", len(batch["x"])),
                "float": context.all_reduce("sum", float(len(batch["x"]))),
                "int": context.all_reduce("sum", (batch["y"] >= 0).sum()),
                "bool": context.all_reduce("sum", batch["y"][0] >= 0),
                "replicas": context.all_reduce("sum", 1.0),
                "half": context.all_reduce("sum", (batch["y"] > 3).sum()) / 2,
                "share": context.all_reduce("sum", (batch["y"] > 3).sum()) / SIZE,
            }
        )
    ),
    "extremes": step_of(
        with_results(
            lambda context, loss, batch, params: (
                context.all_reduce("max", batch["x"].max()),
                context.all_reduce("min", batch["y"].min()),
                context.all_reduce("min", batch["y"].min() < 1),
                context.all_reduce("max", batch["x"].max(0))[3:5].reshape(2, 1),
            )
        )
    ),
    "values of replicas": step_of(
        with_results(
            lambda context, loss, batch, params: (
                context.replica_id_in_sync_group,
                jax.random.normal(context.fold_in(jax.random.key(0)), (2,)),
                batch["y"],
                loss,
            )
        )
    ),
    "values that do not differ": step_of(
        with_results(
            lambda context, loss, batch, params: (
                context.num_replicas_in_sync,
                jnp.sqrt(sum((p**2).sum() for p in jax.tree.leaves(params))),
                jnp.arange(3),
                True,
            )
        )
    ),
    "linear functions": step_of(
        with_results(lambda context, loss, batch, params: linear(context.all_reduce("mean", loss)))
    ),
    "loop before": step_of(accumulated),
    "loop after": step_of(after_a_loop),
    "while after": step_of(after_a_while),
    "branch": step_of(
        with_results(
            lambda context, loss, batch, params: jax.lax.cond(
                jax.tree.leaves(params)[0].sum() > -1e9,
                lambda x: 2 * x,
                lambda x: x,
                context.all_reduce("mean", loss),
            )
        )
    ),
    "clipped on each replica": step_of(
        lambda context, grads, loss, *_: context.all_reduce(
            "mean", (optax.projections.projection_l2_ball(grads, 0.1), loss)
        )
    ),
}


def in_parts(step, num_parts, num_devices, data, **kwargs):
    """Returns model, optimizer and results of a step that is run in parts, or None and errors."""
    model, optimizer = create(LOCAL, TX, **kwargs)
    training = Training(model, optimizer, num_devices, step)
    results = []
    for batch in data:
        rows = [
            jax.tree.map(lambda x, i=i: np.array_split(x, num_parts)[i], batch)
            for i in range(num_parts)
        ]
        replies = [training.part(own, i, num_parts, num_rows=SIZE) for i, own in enumerate(rows)]
        if any(isinstance(reply, Raised) for reply in replies):
            return None, [getattr(reply, "text", None) for reply in replies]
        results.append(joined(replies))
        training.end_step(num_parts)
    training.collect()
    return arrays(model, optimizer), results


def psum(x):
    return jax.lax.psum(x, mirror.REPLICA_AXIS)


# For a value of two replicas that each part has its own of.
JOINS = {
    "sum": (psum, Join.SUM),
    "sum over the number of replicas": (lambda x: psum(x) / 2, Join.MEAN),
    "sum over another number": (lambda x: psum(x) / 3, Join.SUM),
    "sum in a call over the number": (lambda x: jax.jit(psum)(x) / 2, Join.MEAN),
    "sum of a sum": (lambda x: psum(psum(x)), Join.NONE),
    "sum and a constant": (lambda x: psum(x) + 1, Join.NONE),
    "mean in a while": (
        lambda x: jax.lax.fori_loop(0, jnp.int32(3), lambda _, a: 2 * a, psum(x) / 2),
        Join.MEAN,
    ),
    "square in a while": (
        lambda x: jax.lax.fori_loop(0, jnp.int32(3), lambda _, a: a * a, psum(x) / 2),
        Join.NONE,
    ),
    "rounds of each replica": (
        lambda x: jax.lax.while_loop(lambda a: a < x.sum(), lambda a: a + 1, 0.0),
        Join.OWN,
    ),
    "rounds of a sum": (
        lambda x: jax.lax.while_loop(lambda a: a < psum(x).sum(), lambda a: a + 1, 0.0),
        Join.NONE,
    ),
}


def test_joins_of_small_programs(subtests):
    for name, (fn, join) in JOINS.items():
        with subtests.test(msg=name):
            program = trace(lambda x: [fn(x)], [jax.ShapeDtypeStruct((4,), jnp.float32)], 2)
            assert find_joins(program, [Join.OWN], 2) == [join]


@pytest.mark.parametrize("names", mostly_nightly(SAME_NUMBERS, "extremes"))
def test_parts_have_the_numbers_of_all_replicas(names, subtests):
    for name in names:
        with subtests.test(msg=name):
            num_parts, num_devices = 2, 2
            data = batches([SIZE, SIZE])
            after, results = in_parts(SAME_NUMBERS[name], num_parts, num_devices, data)
            objects, expected = on_replicas(num_parts * num_devices, TX, data, SAME_NUMBERS[name])
            expected_after = arrays(*objects)
            assert after is not None, results
            tolerance = 2e-2 if "half" in name else 1e-5
            assert largest_difference(after, expected_after) < tolerance
            assert jax.tree.structure(results) == jax.tree.structure(expected)
            for mine, other in zip(
                jax.tree.leaves(results), jax.tree.leaves(expected), strict=True
            ):
                assert np.asarray(mine).dtype == np.asarray(other).dtype
                np.testing.assert_allclose(mine, other, rtol=tolerance)


@pytest.mark.slow
def test_statistics_of_batches_are_averaged_over_the_parts():
    data = batches([SIZE, SIZE])
    after, results = in_parts(step_of(mean), 3, 1, data, has_noise="norm")
    objects, _ = on_replicas(3, TX, data, step_of(mean), has_noise="norm")
    expected = arrays(*objects)
    assert after is not None, results
    assert largest_difference(after, expected) < 1e-5


@pytest.mark.slow
def test_random_keys_differ_between_the_parts():
    def drawn(context, loss, batch, params):
        return loss

    step = step_of(with_results(drawn))
    same = jax.tree.map(lambda x: np.concatenate([x[:4]] * 3), batches([SIZE])[0])
    _, (result,) = in_parts(step, 3, 1, [same], has_noise="dropout")
    assert len(set(map(float, result.values))) == 3


def draw(context, loss, batch, params):
    def noise(key):
        return jax.random.normal(key, ())

    keys = mirror.example_keys(jax.random.key(0), batch)
    return jax.vmap(noise)(keys), noise(context.fold_in(jax.random.key(1)))


def values_of(results):
    """Returns the rows and the numbers of each replica of all parts."""
    rows, numbers = zip(*results, strict=True)
    rows = [row for each in rows for value in each.values for row in np.ravel(value)]
    return rows, [number for each in numbers for number in each.values]


@pytest.mark.slow
def test_samples_are_those_of_the_rows_and_replicas_of_the_whole_batch(subtests):
    for size, joins in itertools.product([8, 9], ["in parts", "of a trainer"]):
        with subtests.test(size=size, joins=joins):
            step = step_of(with_results(draw))
            (batch,) = batches([size])
            num_parts = 3
            if joins == "of a trainer":  # whose parts have the same number of rows
                size = size - size % num_parts
                batch = jax.tree.map(lambda x: x[:size], batch)
            model, optimizer = create(LOCAL, TX)
            training = Training(model, optimizer, 1, step)
            options = {"num_rows": size} if joins == "in parts" else {"weight_of": lambda _: 1.0}
            cuts = bounds(size, num_parts, 1, "step")
            replies = [
                training.part(
                    jax.tree.map(lambda x, a=a, b=b: x[a:b], batch), i, num_parts, **options
                )
                for i, (a, b) in enumerate(cuts)
            ]
            rows, numbers = values_of([reply.value for reply in replies])
            _, ((expected_rows, _),) = on_replicas(1, TX, [batch], step)
            assert rows == np.ravel(expected_rows).tolist()
            expected = [jax.random.fold_in(jax.random.key(1), i) for i in range(num_parts)]
            assert numbers == [float(jax.random.normal(key, ())) for key in expected]


def test_samples_on_several_devices_of_a_trainer_are_those_of_all_replicas():
    step, (batch,) = step_of(with_results(draw)), batches([SIZE])
    model, optimizer = create(LOCAL, TX)
    training = Training(model, optimizer, 2, step)
    halves = [jax.tree.map(lambda x, i=i: x[i * 6 : (i + 1) * 6], batch) for i in range(2)]
    replies = [training.part(half, i, 2, weight_of=lambda _: 1.0) for i, half in enumerate(halves)]
    rows, numbers = values_of([reply.value for reply in replies])
    _, (expected,) = on_replicas(4, TX, [batch], step)
    expected_rows, expected_numbers = values_of([expected])
    assert rows == expected_rows
    assert numbers == expected_numbers


def step_of_statistics(change):
    def step(model, optimizer, batch):
        value = SAME_NUMBERS["mean"](model, optimizer, batch)
        mean = model.norm.mean
        mean.set_value(change(mean[...], mirror.get_replica_context()))
        return value

    return step


@pytest.mark.slow
def test_a_sum_in_a_variable_is_over_all_parts():
    step = step_of_statistics(lambda mean, context: context.all_reduce("sum", mean / SIZE))
    after, results = in_parts(step, 3, 1, batches([SIZE]), has_noise="norm")
    objects, _ = on_replicas(3, TX, batches([SIZE]), step, has_noise="norm")
    expected = arrays(*objects)
    assert after is not None, results
    assert largest_difference(after, expected) < 1e-5


def test_variables_that_parts_cannot_compute_are_named(subtests):
    for op in ["max", "mean"]:
        with subtests.test(op=op):
            step = step_of_statistics(lambda mean, context: jnp.abs(context.all_reduce(op, mean)))
            _, replies = in_parts(step, 3, 1, batches([SIZE]), has_noise="norm")
            with raises(ValueError, names=("step", "norm.mean"), values="variable"):
                raise ValueError(replies[0])


def ratio(context, grads, loss, batch, params):
    count = context.all_reduce("sum", (batch["y"] > 3).sum())
    grads = context.all_reduce("sum", grads)
    return jax.tree.map(lambda g: g / count, grads), loss


def clipped(context, grads, loss, batch, params):
    grads, loss = context.all_reduce("mean", (grads, loss))
    return optax.projections.projection_l2_ball(grads, 0.1), loss


def result(value):
    return step_of(
        with_results(lambda context, loss, batch, params: {"value": value(context, loss, batch)})
    )


def centered(model, batch, context):
    values = losses(model, batch)
    return ((values - context.all_reduce("mean", values.mean())) ** 2).mean()


NOT_JOINED = {
    "ratio of sums": (step_of(ratio), "gradient", "layers.0.bias"),
    "clipped mean": (step_of(clipped), "gradient", "layers.0.bias"),
    "reduced in the loss": (step_of(mean, centered), "returns", "result"),
    "sum without the context": (
        step_of(
            lambda context, grads, loss, *_: (
                jax.tree.map(lambda g: jax.lax.psum(g, "replica"), grads),
                loss,
            )
        ),
        "gradient",
        "layers.0.bias",
    ),
    "square root": (
        result(lambda context, loss, batch: jnp.sqrt(context.all_reduce("mean", loss))),
        "returns",
        "result['value']",
    ),
    "gathered": (
        result(lambda context, loss, batch: context.all_gather(batch["y"])),
        "returns",
        "result['value']",
    ),
    "product": (
        result(lambda context, loss, batch: context.all_reduce("mean", loss) ** 2),
        "returns",
        "result['value']",
    ),
    "comparison": (
        result(lambda context, loss, batch: context.all_reduce("mean", loss) > 1),
        "returns",
        "result['value']",
    ),
    "sum of an integer and a constant": (
        result(lambda context, loss, batch: context.all_reduce("sum", batch["y"].sum()) + 1),
        "returns",
        "result['value']",
    ),
    "loop": (
        result(
            lambda context, loss, batch: jax.lax.fori_loop(
                0, 3, lambda _, x: x * x, context.all_reduce("mean", loss)
            )
        ),
        "returns",
        "result['value']",
    ),
    "branch": (
        result(
            lambda context, loss, batch: jax.lax.cond(
                context.all_reduce("mean", loss) > 1, lambda: 1.0, lambda: 2.0
            )
        ),
        "returns",
        "result['value']",
    ),
    "sum as a bool": (
        result(
            lambda context, loss, batch: jax.lax.convert_element_type(
                context.all_reduce("sum", batch["y"].sum()), bool
            )
        ),
        "returns",
        "result['value']",
    ),
    "maximum of means": (
        result(lambda context, loss, batch: jnp.maximum(context.all_reduce("mean", loss), 1.0)),
        "returns",
        "result['value']",
    ),
}


@pytest.mark.parametrize(
    "names", mostly_nightly(NOT_JOINED, "ratio of sums", "sum without the context")
)
def test_what_parts_cannot_compute_is_named(names, subtests):
    for name in names:
        with subtests.test(msg=name):
            step, kind, leaf = NOT_JOINED[name]
            after, replies = in_parts(step, 3, 1, batches([SIZE]))
            assert after is None
            with raises(ValueError, names=("step", leaf), values=(3, kind)):
                raise ValueError(replies[0])
            after, _ = in_parts(step, 1, 1, batches([SIZE]))  # a batch in one part is not joined
            assert after is not None


def test_sum_over_batches_that_workers_fetch_is_an_error():
    model, optimizer = create(LOCAL, TX)
    step = SAME_NUMBERS["sum of losses over the size of the batch"]
    training = Training(model, optimizer, 1, step)
    reply = training.part(batches([4])[0], 0, 3, num_rows=None)
    assert isinstance(reply, Raised)
    with raises(ValueError, names="all_reduce", values="'mean'"):
        raise ValueError(reply.text.replace('"', "'"))
