"""The functions that `fit`, `evaluate` and `predict` call for each step, and their batches."""

import contextlib
import itertools
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from mirror._src.base.keras_library import GLOBAL_BATCHES, has_array, state_variables, sync_state
from mirror._src.base.naming import keys, warn_user
from mirror._src.base.types import PyTree
from mirror._src.data.arrays import ArrayDataset
from mirror._src.data.batches import array_of, nearest_multiples
from mirror._src.data.prefetch import PrefetchIterator
from mirror._src.data.source import DistributedDatasetBase
from mirror._src.devices import eager_work
from mirror._src.devices.backend import devices_of_type, type_of
from mirror._src.devices.launch import is_needed, launch
from mirror._src.devices.launches import Described
from mirror._src.devices.replicas import ReplicaDevices
from mirror._src.engine.per_replica import brief, is_per_replica
from mirror._src.keras.owners import Owner
from mirror._src.passes.lower import compiler_options, lowered, rules_for

_last_step: ContextVar[list[Any] | None] = ContextVar("_last_step", default=None)
"""The last step of the innermost open loop: its step function, the state that it takes and donates,
and its results and the new state, when it has been launched. Empty before the first."""


class BatchPlacer:
    """Takes batches from the iterators of Keras and splits them over devices.

    A batch that does not divide is given whole to every device: the result is the same.

    On accelerators, the next batch is loaded and transferred while the devices compute, as Keras
    does on one. On CPU devices, that would only take cores from them.

    Args:
        replicas: The devices.
        kind: `"train"`, `"test"` or `"predict"`.
    """

    def __init__(self, replicas: ReplicaDevices, kind: str) -> None:
        self._replicas = replicas
        self._kind = kind
        self._may_warn = True
        self._whole: weakref.WeakSet[Any] = weakref.WeakSet()
        self._is_ahead = type_of(replicas.distinct[0]) != "CPU"
        # Batches on the devices, each with the error in its place.
        self._next: weakref.WeakKeyDictionary[Any, tuple[PyTree, BaseException | None]]
        self._next = weakref.WeakKeyDictionary()

    def take(self, iterator: Iterator[PyTree]) -> PyTree:
        """Returns the iterator's next batch on the devices.

        Raises:
            StopIteration: At the end.
            TypeError: If it is not a global batch of numbers.
        """
        is_ahead = self._is_ahead and _is_key(iterator)
        ahead = self._next.pop(iterator, None) if is_ahead else None
        batch, error = ahead or self._loaded(iterator)
        if error is not None:
            raise error
        return batch

    def take_ahead(self, iterator: Iterator[PyTree]) -> None:
        """Loads the batch that the next `take` returns, on accelerators."""
        if self._is_ahead and _is_key(iterator):
            self._next[iterator] = self._loaded(iterator)

    def _loaded(self, iterator: Iterator[PyTree]) -> tuple[PyTree, BaseException | None]:
        try:
            return self._placed(iterator), None
        except StopIteration:
            # A new one: its traceback would refer to the iterator, which could never be released.
            return None, StopIteration()
        except Exception as error:
            return None, error

    def _placed(self, iterator: Iterator[PyTree]) -> PyTree:
        # Keras transfers each batch to the default device, from where it would have to be split.
        # With the host as the default device, each accelerator receives its part directly.
        host = devices_of_type("CPU")[:1] if self._is_ahead else ()
        with jax.default_device(host[0]) if host else contextlib.nullcontext():
            batch = next(iterator)
        treedef: Any
        leaves, treedef = jax.tree.flatten(batch, is_leaf=is_per_replica)
        if not all(map(_is_ready, leaves)):
            items = jax.tree_util.tree_flatten_with_path(batch, is_leaf=is_per_replica)[0]
            named = {"batch" + keys(path): leaf for path, leaf in items}
            for name, leaf in named.items():
                require_global(name, leaf, "fit")
            leaves = list(itertools.starmap(array_of, named.items()))
        if len(self._replicas.on_mesh) > 1:
            self._warn_about_size(iterator, leaves)
        return treedef.unflatten(self._replicas.split(leaves))

    def _warn_about_size(self, iterator: Iterator[PyTree], leaves: list[Any]) -> None:
        """Warns once if no batch divides; a single batch, or the last one, may have any size.

        Calls such as `train_on_batch` have an iterator for each batch.
        """
        n = len(self._replicas.on_mesh)
        size = next((leaf.shape[0] for leaf in leaves if leaf.ndim), 0)
        self._may_warn &= size % n > 0
        reader: Any = self if self._kind == "train" else iterator
        if not (self._may_warn and _is_key(reader)):
            return
        if reader in self._whole:
            self._may_warn = False
            warn_user(
                f"{size} examples cannot be split evenly across {n} devices, so each device "
                "computes whole batches. The results are the same, but more devices do not make "
                f"it faster. Use a batch size of {nearest_multiples(size, n)}.",
                "keras",
            )
        self._whole.add(reader)


def _is_key(iterator: Any) -> bool:
    """Whether a weak dictionary can have this key: a list's iterator cannot be one.

    A batch that waits, or a note of one, must not outlive its iterator.
    """
    kind = type(iterator)
    return kind.__weakrefoffset__ != 0 and kind.__hash__ is not None


def _is_ready(leaf: Any) -> bool:
    """Whether a leaf is an array that JAX accepts, which most are: the others take longer."""
    if type(leaf) is np.ndarray:
        return leaf.dtype.kind in "fiub" and leaf.dtype.isnative
    return isinstance(leaf, jax.Array) and not leaf.is_deleted()


def require_global(name: str, leaf: Any, method: str) -> None:
    """Rejects values of replicas and datasets of mirror, which Keras would read as arrays."""
    if is_per_replica(leaf):
        raise TypeError(f"`{name}` must be a global batch, got {brief(leaf)}. {GLOBAL_BATCHES}")
    if isinstance(leaf, DistributedDatasetBase | PrefetchIterator):
        raise TypeError(f"`{name}` must be global batches, got {leaf}. {GLOBAL_BATCHES}")
    if isinstance(leaf, ArrayDataset):
        raise TypeError(
            f"`{name}` must be arrays or a dataset that Keras reads, got {leaf}. Pass its arrays: "
            f"model.{method}(x, y, batch_size={leaf.batch_size}). mirror.data is for "
            "mirror.Trainer and strategy.distribute_dataset."
        )


@contextlib.contextmanager
def keras_loop() -> Iterator[None]:
    """Context manager around a method of `keras.Model` that calls step functions, such as `fit`.

    Keras takes the arrays out of the variables before the first step, and writes arrays back when
    the loop ends. If an interrupt arrives within a step, it writes back arrays that the step has
    donated, or none. The variables then get the state of the last step from here.
    """
    last: list[Any] = []
    token = _last_step.set(last)
    try:
        yield
    except BaseException:
        if last:
            function, state, outputs = last
            function.restore(outputs[1] if outputs else state)
        raise
    finally:
        _last_step.reset(token)


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


def assign(variables: Iterable[Any], values: Iterable[Any]) -> None:
    """Assigns each value to its Keras variable."""
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)


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
        self._model = model
        self._kind = kind
        self._steps = int(model.steps_per_execution)
        self._is_compiled = bool(model.jit_compile) and not model.run_eagerly
        rules = rules_for(replicas) if self._is_compiled else {}
        # What Keras has compiled becomes a part of the program that the pass `lower` rewrites.
        self._lowered = lowered(self._made_step, rules)
        options = dict(compiler_options(replicas))
        self.compiled = jax.jit(self._with_token, donate_argnums=0, compiler_options=options)
        self._is_bounded = replicas.on_host and is_needed()
        self._launched: set[Hashable] = set()
        self._mirroring: set[Hashable] = set()
        self._described = Described(
            f"{model.name}.{kind}_step", "", replicas.devices, range(len(replicas))
        )

    def __call__(self, state: PyTree, iterator: Iterator[PyTree]) -> tuple[PyTree, PyTree]:
        """Runs the next step, or as many as `steps_per_execution` says."""
        self._begin(state, [])
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
        if self._kind == "predict" and len(all_results) > 1:
            results = jax.tree.map(lambda *parts: jnp.concatenate(parts), *all_results)
        return results, state

    def restore(self, state: PyTree) -> None:
        """Writes a state to the variables, if some of them have lost their arrays.

        To all of them: a step does not donate what it only writes, which would be of another step.
        """
        sync_state(self._model)
        groups = state_variables(self._model, self._kind)
        is_compiled_again = [*map(len, groups)] != [*map(len, state)]  # by a callback
        if not is_compiled_again and not all(map(has_array, itertools.chain(*groups))):
            assign(itertools.chain(*groups), itertools.chain(*state))

    def _begin(self, state: PyTree, outputs: list[Any]) -> None:
        last = _last_step.get()
        if last is not None:
            last[:] = self, state, outputs

    def _step(self, state: PyTree, batch: PyTree) -> tuple[PyTree, PyTree]:
        follows = type(state) is _MirroredState and state.owner is self
        if type(state) is _MirroredState:
            state = tuple([part.arrays for part in state])
        if not follows:
            state = self._all_mirrored(state)
        outputs: list[Any] = []
        self._begin(state, outputs)
        if not self._is_compiled:
            if self._is_bounded:
                eager_work.bound_eager_work()
            return self._made_step(state, batch)
        leaves, treedef = jax.tree.flatten(batch)
        # Types of batches identify the programs that JAX compiles: the state keeps its types.
        program = (treedef, *[(leaf.shape, leaf.dtype) for leaf in leaves])
        launch(
            self.compiled,
            (state, batch),
            outputs,
            self._described,
            bounded=self._is_bounded,
            compiles=program not in self._launched,
        )
        self._launched.add(program)
        results, state, _ = outputs
        return results, self._returned(state, program, follows=follows)

    def _made_step(self, state: PyTree, batch: PyTree) -> Any:
        return self.made(state, iter((batch,)))

    def _with_token(self, state: PyTree, batch: PyTree) -> tuple[PyTree, PyTree, jax.Array]:
        """Traces the step; the last result is ready when it has finished, and never donated."""
        results, state = self._lowered(state, batch)
        return results, state, jnp.zeros(())

    def _returned(self, state: PyTree, program: Hashable, *, follows: bool) -> PyTree:
        """Marks the state that a step returned as mirrored, unless XLA has chosen to shard it.

        XLA chooses when it compiles a program, so only the first launch of a program is examined
        that takes a state that a step had returned.

        Args:
            state: The state.
            program: The type of the batch of the step.
            follows: Whether the step took a state that a step had returned.
        """
        if _last_step.get() is None:  # called by a user, who expects lists
            return state
        if not follows or program not in self._mirroring:
            if not all(map(self.owner.replicas.is_mirrored, jax.tree.leaves(state))):
                return state
            if follows:
                self._mirroring.add(program)
        marked = _MirroredState(map(_Arrays, state))
        marked.owner = self
        return marked

    def _all_mirrored(self, state: PyTree) -> PyTree:
        """Returns the state mirrored, and each array once, because the step donates it.

        Callbacks assign to variables, and XLA may choose to shard what the step returns. Keras
        assigns one array to two variables, such as the averages of `use_ema` at the end of `fit`.
        Host devices would wait forever for the one that rejects to donate it twice.
        """
        treedef: Any
        leaves, treedef = jax.tree.flatten(state)
        replicas, seen = self.owner.replicas, set[int]()
        for i, leaf in enumerate(leaves):
            is_array = isinstance(leaf, jax.Array)
            if is_array and leaf.is_deleted():
                self._reject_deleted(i)
            if not is_array or jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
                leaves[i] = replicas.mirror(leaf)
            elif id(leaf) in seen or not replicas.is_mirrored(leaf):
                # Through the host, which takes one transfer instead of a transfer and a launch.
                leaves[i] = replicas.mirror(np.asarray(leaf))
            seen.add(id(leaf))
        return treedef.unflatten(leaves)

    def _reject_deleted(self, index: int) -> NoReturn:
        """Raises an error: host devices would wait forever for the one that rejects the array."""
        groups = state_variables(self._model, self._kind)
        path = [*itertools.chain(*groups)][index].path
        raise ValueError(
            f"The variable {path!r} of the Keras model {self._model.name!r} holds a deleted array. "
            "Its buffer was donated to a step of another model that shares it. Assign values "
            "again, and to share them a copy: variable.assign(numpy.array(other.value))."
        )
