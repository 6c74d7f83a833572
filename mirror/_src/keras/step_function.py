"""The functions that `fit`, `evaluate` and `predict` call for each step, on several devices."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mirror._src.devices import eager_work
from mirror._src.devices.launch import is_needed, launch
from mirror._src.devices.launches import Described
from mirror._src.keras.batches import BatchPlacer
from mirror._src.keras.owners import Owner
from mirror._src.utils.types import PyTree


class StepFunction:
    """Runs the function that Keras made for a step on the devices of a strategy.

    The state is mirrored and the batch is split, and XLA adds the collectives to the step that
    Keras compiled. The step sees the whole batch, so losses, metrics, batch statistics and dropout
    are the same as on one device.

    Args:
        made: The function that Keras made: it takes the state and an iterator of batches, and
            returns logs or outputs, and the new state.
        owner: The strategy.
        model: The Keras model.
        kind: `"train"`, `"test"` or `"predict"`.
    """

    def __init__(self, made: Callable[..., Any], owner: Owner, model: Any, kind: str) -> None:
        self.made = made
        self.owner = owner
        replicas = owner.replicas
        self._batches = BatchPlacer(replicas, kind)
        self._steps = int(model.steps_per_execution)
        self._joins_outputs = kind == "predict"
        self._is_compiled = bool(model.jit_compile) and not model.run_eagerly
        self._is_bounded = replicas.on_host and is_needed()
        self._has_run = False
        self._mirrored_shardings: dict[int, jax.sharding.Sharding] = {}
        self._described = Described(
            f"{model.name}.{kind}_step", "", replicas.devices, range(len(replicas))
        )

    def __call__(self, state: PyTree, iterator: Iterator[PyTree]) -> tuple[PyTree, PyTree]:
        """Runs the next step, or as many as `steps_per_execution` says."""
        results, state = self._step(state, self._batches.take(iterator))
        all_results = [results]
        while len(all_results) < self._steps:
            try:
                batch = self._batches.take(iterator)
            except StopIteration:
                break
            results, state = self._step(state, batch)
            all_results.append(results)
        self._batches.take_ahead(iterator)
        if self._joins_outputs and len(all_results) > 1:
            results = jax.tree.map(lambda *parts: jnp.concatenate(parts), *all_results)
        return results, state

    def _step(self, state: PyTree, batch: PyTree) -> tuple[PyTree, PyTree]:
        state = self._on_devices(state)
        if not self._is_compiled:
            if self._is_bounded:
                eager_work.bound_eager_work()
            return self.made(state, iter((batch,)))
        outputs: list[Any] = []
        launch(
            self._run,
            (state, batch),
            outputs,
            self._described,
            bounded=self._is_bounded,
            compiles=not self._has_run,
        )
        self._has_run = True
        results, state, token = outputs
        if token is None and self._is_bounded:
            jax.block_until_ready(state)
        return results, state

    def _run(self, state: PyTree, batch: PyTree) -> tuple[PyTree, PyTree, Any]:
        """Launches the step; the last result is ready when it has finished, and never donated."""
        results, state = self.made(state, iter((batch,)))
        arrays = (leaf for leaf in jax.tree.leaves(results) if isinstance(leaf, jax.Array))
        return results, state, next(arrays, None)

    def _on_devices(self, state: PyTree) -> PyTree:
        """Returns the state mirrored. A step usually gets back the arrays of the last step.

        Their shardings are the same objects in every step, so that they are compared only once.
        """
        try:
            shardings = {id(s): s for s in [leaf.sharding for leaf in jax.tree.leaves(state)]}
        except AttributeError:  # not an array of JAX
            shardings = {}
        if shardings and shardings.keys() <= self._mirrored_shardings.keys():
            return state
        state = jax.tree.map(self._mirrored, state)
        leaves = [leaf for leaf in jax.tree.leaves(state) if isinstance(leaf, jax.Array)]
        self._mirrored_shardings = {id(leaf.sharding): leaf.sharding for leaf in leaves}
        return state

    def _mirrored(self, leaf: Any) -> Any:
        """Callbacks assign to variables, and XLA may choose to shard what the step returns."""
        replicas = self.owner.replicas
        if not isinstance(leaf, jax.Array) or jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return replicas.mirror(leaf)
        # Through the host, which takes one transfer instead of a transfer and a launch.
        return leaf if replicas.is_mirrored(leaf) else replicas.mirror(np.asarray(leaf))
