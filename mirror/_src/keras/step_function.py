"""The functions that `fit`, `evaluate` and `predict` call for each step, on several devices."""

import contextlib
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mirror._src.base.types import PyTree
from mirror._src.devices import eager_work
from mirror._src.devices.launch import is_needed, launch
from mirror._src.devices.launches import Described
from mirror._src.keras.batches import BatchPlacer
from mirror._src.keras.owners import Owner
from mirror._src.passes.lower.table import lowered, rules_for


class _Loops(threading.local):
    num_open = 0


_loops = _Loops()


@contextlib.contextmanager
def keras_loop() -> Iterator[None]:
    """Context manager around a method of `keras.Model` that calls step functions, such as `fit`."""
    _loops.num_open += 1
    try:
        yield
    finally:
        _loops.num_open -= 1


class _Arrays(Sequence[jax.Array]):
    """A part of the state that a step returned, in place of a list.

    Keras assigns the parts to an attribute of the model after each step, and there looks at each
    element of a list: this took a quarter of a step of 20 thin layers. It reads them as sequences.
    Only Keras' own loops get them: other callers may add lists, or pass them to functions of JAX.
    """

    def __init__(self, arrays: list[jax.Array]) -> None:
        self.arrays = arrays

    def __len__(self) -> int:
        return len(self.arrays)

    def __getitem__(self, index: Any) -> Any:
        return self.arrays[index]


class _MirroredState(tuple[_Arrays, ...]):
    """The state that a step function returned, mirrored.

    Keras passes it to the next step, unless a callback or a new epoch has read the variables. It
    needs no check then, which would take a twentieth of a step of thin layers.
    """

    owner: "StepFunction"


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
        rules = rules_for(replicas) if self._is_compiled else {}
        # What Keras has compiled becomes a part of the program that the pass `lower` rewrites.
        step = lowered(self._made_step, rules)
        self.compiled = jax.jit(step, donate_argnums=0) if rules else step
        self._is_bounded = replicas.on_host and is_needed()
        self._launched: set[Hashable] = set()
        self._mirroring: set[Hashable] = set()
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
        follows = False
        if type(state) is _MirroredState:
            follows = state.owner is self
            state = tuple([part.arrays for part in state])
        if not follows:
            state = jax.tree.map(self._mirrored, state)
        if not self._is_compiled:
            if self._is_bounded:
                eager_work.bound_eager_work()
            return self._made_step(state, batch)
        leaves, treedef = jax.tree.flatten(batch)
        # Types of batches identify the programs that JAX compiles: the state keeps its types.
        program = (treedef, *[(leaf.shape, leaf.dtype) for leaf in leaves])
        outputs: list[Any] = []
        launch(
            self._run,
            (state, batch),
            outputs,
            self._described,
            bounded=self._is_bounded,
            compiles=program not in self._launched,
        )
        self._launched.add(program)
        results, state, token = outputs
        if token is None and self._is_bounded:
            jax.block_until_ready(state)
        return results, self._returned(state, program, follows=follows)

    def _made_step(self, state: PyTree, batch: PyTree) -> Any:
        return self.made(state, iter((batch,)))

    def _run(self, state: PyTree, batch: PyTree) -> tuple[PyTree, PyTree, Any]:
        """Launches the step; the last result is ready when it has finished, and never donated."""
        results, state = self.compiled(state, batch)
        arrays = (leaf for leaf in jax.tree.leaves(results) if isinstance(leaf, jax.Array))
        return results, state, next(arrays, None)

    def _returned(self, state: PyTree, program: Hashable, *, follows: bool) -> PyTree:
        """Marks the state that a step returned as mirrored, unless XLA has chosen to shard it.

        XLA chooses when it compiles a program, so only the first launch of a program is examined
        that takes a state that a step had returned.

        Args:
            state: The state.
            program: The type of the batch of the step.
            follows: Whether the step took a state that a step had returned.
        """
        if not _loops.num_open:  # called by a user, who expects lists
            return state
        if not follows or program not in self._mirroring:
            if not all(map(self.owner.replicas.is_mirrored, jax.tree.leaves(state))):
                return state
            if follows:
                self._mirroring.add(program)
        marked = _MirroredState(map(_Arrays, state))
        marked.owner = self
        return marked

    def _mirrored(self, leaf: Any) -> Any:
        """Callbacks assign to variables, and XLA may choose to shard what the step returns."""
        replicas = self.owner.replicas
        if not isinstance(leaf, jax.Array) or jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return replicas.mirror(leaf)
        # Through the host, which takes one transfer instead of a transfer and a launch.
        return leaf if replicas.is_mirrored(leaf) else replicas.mirror(np.asarray(leaf))
