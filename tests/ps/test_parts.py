"""The parts of a batch of a `Trainer`: samples, random keys and statistics of the whole batch."""

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import mirror
from mirror._src.ps.step_data import as_users
from tests.ps.digits import arrays, batches, create, largest_difference, on_replicas, train_step
from tests.ps.one_worker import Training

LOCAL = mirror.OneDeviceStrategy("/cpu:0")
TX = optax.sgd(0.1)
SIZE = 12


def losses(model, batch):
    return optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]), batch["y"])


def step_of(result_of):
    """Returns a step that returns `result_of(loss, batch)`."""

    def step(model, optimizer, batch):
        loss, grads = nnx.value_and_grad(lambda model: losses(model, batch).mean())(model)
        optimizer.update(model, mirror.all_reduce("mean", grads))
        return result_of(loss, batch)

    return step


def part_of(batch, part, num_parts):
    return jax.tree.map(lambda x: np.split(x, num_parts)[part], batch)


def in_parts(step, num_parts, num_devices, batch, **kwargs):
    """Returns model and optimizer after a step that is run in parts, and their results."""
    model, optimizer = create(LOCAL, TX, **kwargs)
    training = Training(model, optimizer, num_devices, step)
    parts = range(num_parts)
    replies = [training.part(part_of(batch, i, num_parts), i, num_parts) for i in parts]
    training.end_step(num_parts)
    training.collect()
    return arrays(model, optimizer), [as_users(reply.value) for reply in replies]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.* differs from one device")
def test_statistics_of_batches_are_averaged_over_the_parts():
    (batch,) = batches([SIZE])
    after, _ = in_parts(train_step, 3, 1, batch, has_noise="norm")
    objects, _ = on_replicas(3, TX, [batch], has_noise="norm")
    assert largest_difference(after, arrays(*objects)) < 1e-5


@pytest.mark.slow
def test_random_keys_differ_between_the_parts():
    same = jax.tree.map(lambda x: np.concatenate([x[:4]] * 3), batches([SIZE])[0])
    _, results = in_parts(step_of(lambda loss, _: loss), 3, 1, same, has_noise="dropout")
    assert len({float(*result.values) for result in results}) == 3


def noise(key):
    return jax.random.normal(key, ())


def draw(loss, batch):
    keys = mirror.example_keys(jax.random.key(0), batch)
    folded = mirror.get_replica_context().fold_in(jax.random.key(1))
    return jax.vmap(noise)(keys), noise(folded)


def values_of(results):
    """Returns the rows and the numbers of each replica of all parts."""
    rows, numbers = zip(*results, strict=True)
    values = [row for each in rows for row in getattr(each, "values", [each])]
    numbers = [number for each in numbers for number in getattr(each, "values", [each])]
    return np.concatenate(values).tolist(), list(map(float, numbers))


@pytest.mark.parametrize("num_devices", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_samples_are_those_of_the_rows_and_replicas_of_the_whole_batch(num_devices):
    (batch,) = batches([SIZE])
    _, results = in_parts(step_of(draw), 2, num_devices, batch)
    _, expected = on_replicas(2 * num_devices, TX, [batch], step_of(draw))
    assert values_of(results) == values_of(expected)
