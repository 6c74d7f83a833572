"""The parts of a real program, and its training with and without `mirror`."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

import mirror

PyTree = Any
State = tuple[Any, ...]


def alone(tree: PyTree) -> PyTree:
    """Returns the tree: the mean over the replicas on one device, and a forgotten one on many."""
    return tree


def replica_mean(tree: PyTree) -> PyTree:
    """Returns the mean over the replicas."""
    return mirror.all_reduce("mean", tree)


def initial_key() -> jax.Array:
    """Returns the key that parameters are initialized with; its generator compiles fastest."""
    return jax.random.key(0, impl="unsafe_rbg")


def is_per_replica(leaf: Any) -> bool:
    """Whether a leaf is one value per replica."""
    return isinstance(leaf, mirror.PerReplica)


def arrays_of(state: State) -> PyTree:
    """Returns the arrays of a state that is a pytree, by path; static leaves are left out."""
    leaves = jax.tree_util.tree_flatten_with_path(state, is_leaf=is_per_replica)[0]
    kinds = (jax.Array, np.ndarray, mirror.PerReplica)
    return {jax.tree_util.keystr(path): x for path, x in leaves if isinstance(x, kinds)}


@dataclass(frozen=True)
class Program:
    """A training that is written for one replica, and the same training on one device.

    Attributes:
        make: Creates the state: the arguments of the step that come before the batch.
        batches: Creates the global batches.
        step: The step for one replica. Returns the new state and, last, the metrics; the metrics
            alone if `in_place`.
        broken_step: The same step with an all-reduce forgotten.
        drifting: Regular expression for the part of the state that `broken_step` lets drift apart.
        plain: Trains on one device, with whole batches and without `mirror`. Returns the state and
            the metrics of each step. Its argument is the number of replicas whose randomness it
            follows.
        axis_name: Name of the replica axis.
        in_place: Whether the state consists of NNX objects, which the step changes.
        donate_argnums: Arguments whose buffers the step donates.
        split: Positions in the state of what is split over the replicas, as a batch is.
        draws_per_replica: Whether the randomness depends on the number of replicas.
        arrays: Selects what is compared of a state.
    """

    make: Callable[[], State]
    batches: Callable[[], list[PyTree]]
    step: Callable[..., Any]
    broken_step: Callable[..., Any]
    drifting: str
    plain: Callable[[int], tuple[State, list[PyTree]]]
    axis_name: str = mirror.REPLICA_AXIS
    in_place: bool = False
    donate_argnums: tuple[int, ...] = ()
    split: tuple[int, ...] = ()
    draws_per_replica: bool = False
    arrays: Callable[[State], PyTree] = arrays_of

    def train(
        self, strategy: mirror.Strategy, step: Callable[..., Any], num_steps: int | None = None
    ) -> tuple[State, list[PyTree]]:
        """Trains over the replicas of `strategy`, for `num_steps` or with all the batches."""
        state = tuple(
            next(iter(strategy.distribute_dataset([part]))) if place in self.split else part
            for place, part in enumerate(self.make())
        )

        def advance(*arguments: Any) -> Any:
            return strategy.run(step, arguments, donate_argnums=self.donate_argnums)

        batches = strategy.distribute_dataset(self.batches()[:num_steps])
        return train(state, advance, batches, in_place=self.in_place)


def train(
    state: State, step: Callable[..., Any], batches: Iterable[PyTree], *, in_place: bool = False
) -> tuple[State, list[PyTree]]:
    """Calls the step on every batch. Returns the last state and the metrics of each step."""
    metrics = []
    for batch in batches:
        result = step(*state, batch)
        if in_place:
            metrics.append(result)
        else:
            *parts, last = result
            state = tuple(parts)
            metrics.append(last)
    return state, metrics


def as_numpy(leaf: Any) -> np.ndarray:
    """Returns the values of an array, of a PRNG key's data, of replicas' parts joined."""
    if is_per_replica(leaf):
        values = np.asarray(leaf)
        return values.reshape(-1, *values.shape[2:])
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return np.asarray(leaf)


def assert_close(got: PyTree, wanted: PyTree, rtol: float = 1e-5) -> None:
    """Fails where a leaf is off by more than `rtol` of its largest magnitude."""
    wrong = []
    gots = jax.tree_util.tree_flatten_with_path(got, is_per_replica)[0]
    for (path, a), b in zip(gots, jax.tree.leaves(wanted), strict=True):
        a, b = as_numpy(a), as_numpy(b)
        assert (a.shape, a.dtype) == (b.shape, b.dtype), jax.tree_util.keystr(path)
        if a.size:
            a, b = a.astype(np.float64), b.astype(np.float64)
            largest = np.abs(b).max()
            error = np.abs(a - b).max() / (largest if largest > 0 else 1)
            if not error <= rtol:
                wrong.append(f"{jax.tree_util.keystr(path)} is off by {error:.1e}")
    assert not wrong, "\n".join(wrong)
