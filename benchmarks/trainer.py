"""Compares an epoch of `Trainer.fit` with loops by hand: over `strategy.run`, and over `jax.jit`.

All read the same global batches from host memory, and have the losses of all steps on the host at
the end of the epoch. All but the loop over `jax.jit` pad the batches. Times are per step.
"""

from collections import deque
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import mirror
from benchmarks import plan
from benchmarks.by_hand import (
    MOST_IN_FLIGHT,
    create_objects,
    initial_state,
    plain_step,
    sharded_jit,
    unreduced,
)
from benchmarks.jax_contender import JaxContender, Placement
from benchmarks.models import Batch, Model, PyTree, params_of
from benchmarks.through_mirror import strategy_over

STEPS = 32
_MOST_RUNNING = 8


def loss_fn(module: Any, batch: Batch) -> jax.Array:
    """Returns the per-example losses."""
    logits = module(batch["image"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])


def hand_step(module: nnx.Module, opt: nnx.Optimizer, batch: Batch, mask: jax.Array) -> Any:
    """Takes a replica's step that is exact for padded batches."""

    def total(module: nnx.Module) -> jax.Array:
        return jnp.sum(loss_fn(module, batch), where=mask)

    loss, grads = nnx.value_and_grad(total)(module)
    context = mirror.get_replica_context()
    assert context is not None
    grads, loss, count = context.all_reduce("sum", (grads, loss, mask.sum()))
    opt.update(module, jax.tree.map(lambda grad: grad / count, grads))
    return loss, count


class Epochs(JaxContender):
    """Base class of contenders whose launches are whole epochs."""

    def __init__(
        self, name: str, model: Model, strategy: mirror.Strategy, steps: int = STEPS
    ) -> None:
        self.name = name
        self._strategy = strategy
        self._data = [model.batch()] * steps
        with strategy.scope():
            self._module, self._opt = create_objects(model)

    def arrays(self) -> PyTree:
        """Returns the state; `launch` has already read the losses."""
        return jax.tree.leaves(nnx.state((self._module, self._opt)))

    def params(self) -> PyTree:
        """Returns the parameters, as a plain pytree."""
        return params_of(self._module)


class ByHand(Epochs):
    """Contender with a hand-written loop over `strategy.run`."""

    def launch(self) -> None:
        """Runs one epoch."""
        pending: deque[Any] = deque()
        total = 0.0
        data = self._strategy.distribute_dataset(self._data, remainder="pad")
        for batch, mask in data:
            arguments = (self._module, self._opt, batch, mask)
            pending.append(self._strategy.run(hand_step, arguments))
            if len(pending) > _MOST_RUNNING:
                total += sum(float(np.asarray(x)) for x in pending.popleft())
        for sums in pending:
            total += sum(float(np.asarray(x)) for x in sums)
        assert np.isfinite(total)


class ByTrainer(Epochs):
    """Contender with `Trainer.fit`."""

    def __init__(
        self,
        name: str,
        model: Model,
        strategy: mirror.Strategy,
        steps_per_execution: int = 1,
        steps: int = STEPS,
    ) -> None:
        super().__init__(name, model, strategy, steps)
        self._trainer = mirror.Trainer(
            self._module,
            self._opt,
            loss_fn,
            strategy=strategy,
            steps_per_execution=steps_per_execution,
        )

    def launch(self) -> None:
        """Runs one epoch."""
        self._trainer.fit(self._data, progress=False)


class InJax(JaxContender):
    """Contender with a hand-written loop over `jax.jit` with shardings, on plain pytrees."""

    name = plan.JIT_LOOP

    def __init__(self, model: Model, num_devices: int, steps: int = STEPS) -> None:
        self._place = Placement(num_devices)
        self._data = [model.batch()] * steps
        self._step = sharded_jit(plain_step(model, unreduced), self._place)
        self._state = jax.device_put(initial_state(model), self._place.replicated)
        self._most_running = _MOST_RUNNING if num_devices == 1 else MOST_IN_FLIGHT

    def launch(self) -> None:
        """Runs one epoch."""
        pending: deque[Any] = deque()
        total = 0.0
        for batch in self._data:
            if len(pending) >= self._most_running:
                total += float(pending.popleft())
            placed = jax.device_put(batch, self._place.sharded)
            self._state, loss = self._step(self._state, placed)
            pending.append(loss)
        assert np.isfinite(total + sum(map(float, pending)))

    def arrays(self) -> PyTree:
        """Returns the state; `launch` has already read the losses."""
        return self._state

    def params(self) -> PyTree:
        """Returns the parameters, as a plain pytree."""
        return self._state["params"]


def trainer_contenders(model: Model, num_devices: int) -> list[JaxContender]:
    """Returns `fit`, `fit` with 16 steps per launch, and the hand-written loops."""
    strategy = strategy_over(num_devices)
    return [
        ByTrainer(plan.FIT, model, strategy),
        ByTrainer(plan.FIT_16, model, strategy, 16),
        ByHand(plan.LOOP, model, strategy),
        InJax(model, num_devices),
    ]
