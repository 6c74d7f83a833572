"""The steps of a `Trainer`, each one replica's: a reader of one of them has read the training.

Each replica adds up over its own examples; the sums are added up over the replicas, the only
collective; and only then they are divided, by how many examples there were in all, or by the sum of
their weights where the loss is `Weighted`. So a step computes what one device computes on the
whole batch, whatever the batch size and the number of replicas.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import mirror._src.training.objective as objectives
from mirror._src.strategy.mirrored import get_replica_context
from mirror._src.training.objective import LOSS, Objective, Sums
from mirror._src.utils.types import Array, PyTree

Gradients = tuple[PyTree, Sums]


def training_step(
    objective: Objective, wrt: Any, accumulate_steps: int
) -> Callable[[nnx.Module, nnx.Optimizer, PyTree, Array], Sums]:
    """One update, with one batch."""
    gradients = _gradients(objective, wrt)
    if accumulate_steps > 1:
        gradients = _accumulated(gradients, accumulate_steps)

    def train_step(model: nnx.Module, optimizer: nnx.Optimizer, batch: PyTree, mask: Array) -> Sums:
        context = get_replica_context()
        assert context is not None, "a step runs in a replica"
        # Sums over all rows could overflow a half-precision gradient where means do not: each
        # replica divides by how many rows there are, padding included, and what that leaves is 1
        # where no row was padding. The weights of all rows are not known yet: see `_unscaled`.
        num_rows = mask.size * context.num_replicas_in_sync
        means, own = gradients(model, batch, mask, num_rows)
        total, sums = context.all_reduce("sum", (_unscaled(means, own), own))
        grads = jax.tree.map(
            lambda x, like: x.astype(like.dtype), _divided(total, sums, num_rows), means
        )
        optimizer.update(model, grads)
        return sums

    return train_step


def repeated(
    train_step: Callable[..., Sums],
) -> Callable[..., Sums]:
    """Several updates in one launch: of batches `(k, B, ...)`, `num_batches` from `first` on.

    These are numbers that the program is given, so that a shorter group needs none of its own.
    """

    def train_steps(
        model: nnx.Module,
        optimizer: nnx.Optimizer,
        batches: PyTree,
        masks: Array,
        first: Any,
        num_batches: Any,
    ) -> Sums:
        graphdef, keys, state = _split((model, optimizer))

        def update(i: Any, state: PyTree) -> tuple[PyTree, Sums]:
            objects = nnx.merge(graphdef, keys, state, copy=True)
            batch, mask = jax.tree.map(lambda x: x[i], (batches, masks))
            sums = train_step(*objects, batch, mask)
            return _split(objects)[2], sums

        def body(i: Any, carry: tuple[PyTree, Sums]) -> tuple[PyTree, Sums]:
            state, total = carry
            state, sums = update(i, state)
            return state, objectives.add(total, sums)

        none = _zeros(jax.eval_shape(update, 0, state)[1])
        state, total = jax.lax.fori_loop(first, first + num_batches, body, (state, none))
        nnx.update((model, optimizer), state)
        return total

    return train_steps


def evaluation_step(objective: Objective) -> Callable[[nnx.Module, PyTree, Array], Sums]:
    """The sums of a batch, by the model in evaluation mode; changes nothing."""

    def evaluate_step(model: nnx.Module, batch: PyTree, mask: Array) -> Sums:
        context = get_replica_context()
        assert context is not None, "a step runs in a replica"
        _, sums = objective(_for_evaluation(model), batch, mask)
        return context.all_reduce("sum", sums)

    return evaluate_step


def prediction_step(
    fn: Callable[[Any, PyTree], PyTree],
) -> Callable[[nnx.Module, PyTree], PyTree]:
    """What `fn` makes of each example; changes nothing."""

    def predict_step(model: nnx.Module, batch: PyTree) -> PyTree:
        return fn(_for_evaluation(model), batch)

    return predict_step


def _gradients(objective: Objective, wrt: Any) -> Callable[..., Gradients]:
    def loss(model: nnx.Module, batch: PyTree, mask: Array, num_rows: int) -> tuple[Array, Sums]:
        losses, sums = objective(model, batch, mask)
        scale = num_rows if LOSS not in sums.weights else _scale(sums)
        return losses.sum(dtype=sums.totals[LOSS].dtype) / scale, sums

    return nnx.grad(loss, argnums=nnx.DiffState(0, wrt), has_aux=True)


def _scale(sums: Sums) -> Array:
    """Returns the divisor of sums of a `Weighted` loss: their weight, or 1 where that is 0."""
    weight = sums.weights[LOSS]
    return jnp.where(weight == 0, 1, weight)


def _unscaled(grads: PyTree, sums: Sums) -> PyTree:
    """Makes gradients that can be added up, of sums and in float32, where the loss is `Weighted`.

    The total weight of all replicas is known only after the collective, so each replica has divided
    by its own weight, which differs from the others'.
    """
    if LOSS not in sums.weights:
        return grads
    scale = _scale(sums)
    return jax.tree.map(lambda x: x.astype(_at_least_float32(x.dtype)) * scale, grads)


def _divided(grads: PyTree, sums: Sums, num_rows: int) -> PyTree:
    """Divides summed gradients, which makes gradients of the mean; 0 where the weight is 0."""
    if LOSS not in sums.weights:
        rest = num_rows / sums.count
        return jax.tree.map(lambda x: x * rest, grads)
    scale, is_empty = _scale(sums), sums.weights[LOSS] == 0
    return jax.tree.map(lambda x: jnp.where(is_empty, 0, x / scale), grads)


def _accumulated(gradients: Callable[..., Gradients], num_pieces: int) -> Callable[..., Gradients]:
    """The same gradients, of one piece of the batch after the other: less memory at a time."""

    def accumulated(model: nnx.Module, batch: PyTree, mask: Array, num_rows: int) -> Gradients:
        def cut(x: Array) -> Array:
            return x.reshape(num_pieces, x.shape[0] // num_pieces, *x.shape[1:])

        pieces = jax.tree.map(cut, (batch, mask))
        graphdef, keys, state = _split(model)

        def one(state: PyTree, piece: PyTree) -> tuple[PyTree, Gradients]:
            model = nnx.merge(graphdef, keys, state, copy=True)
            found = gradients(model, *piece, num_rows)
            return _split(model)[2], found

        def body(carry: tuple[PyTree, Gradients], piece: PyTree) -> tuple[Any, None]:
            state, total = carry
            state, (means, sums) = one(state, piece)
            return (state, objectives.add(total, (_unscaled(means, sums), sums))), None

        first = jax.tree.map(lambda x: x[0], pieces)
        shapes = jax.eval_shape(one, state, first)[1]
        none = jax.tree.map(lambda s: jnp.zeros(s.shape, _at_least_float32(s.dtype)), shapes)
        (state, (total, sums)), _ = jax.lax.scan(body, (state, none), pieces)
        nnx.update(model, state)
        if LOSS in sums.weights:
            scale = _scale(sums)
            total = jax.tree.map(lambda x: x / scale, total)
        return jax.tree.map(lambda x, s: x.astype(s.dtype), (total, sums), shapes)

    return accumulated


def _for_evaluation(model: nnx.Module) -> nnx.Module:
    """A copy without dropout and with running statistics: `model.eval()`, of a copy."""
    copy = nnx.merge(*nnx.split(model), copy=True)
    copy.eval()
    return copy


def _split(objects: Any) -> tuple[Any, Any, Any]:
    """Structure, random keys and the rest: a replica's keys stay, only their counts move on."""
    split: Any = nnx.split(objects, nnx.RngKey, ...)
    return split


def _zeros(shapes: PyTree) -> PyTree:
    return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)


def _at_least_float32(dtype: Any) -> Any:
    return jnp.promote_types(dtype, jnp.float32) if jnp.issubdtype(dtype, jnp.floating) else dtype
