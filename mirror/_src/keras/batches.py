"""The batches of `fit`, `evaluate` and `predict`, split over the devices of a strategy."""

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from mirror._src.base.keras_library import GLOBAL_BATCHES
from mirror._src.base.naming import keys, warn_user
from mirror._src.base.types import PyTree
from mirror._src.data.batches import array_of
from mirror._src.data.remainder import nearest_multiples
from mirror._src.devices.backend import devices_of_type, type_of
from mirror._src.devices.replicas import ReplicaDevices
from mirror._src.engine.per_replica import is_per_replica


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
        self._num_whole = 0
        self._last: Callable[[], Any] = lambda: None
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
        ahead = self._next.pop(iterator, None) if self._reads_ahead(iterator) else None
        batch, error = ahead or (self._placed(iterator), None)
        if error is not None:
            raise error
        return batch

    def take_ahead(self, iterator: Iterator[PyTree]) -> None:
        """Loads the batch that the next `take` returns, on accelerators."""
        if not self._reads_ahead(iterator):
            return
        try:
            self._next[iterator] = self._placed(iterator), None
        except StopIteration:
            # A new one: its traceback would refer to the iterator, which could never be released.
            self._next[iterator] = None, StopIteration()
        except Exception as error:  # raised in its turn
            self._next[iterator] = None, error

    def _reads_ahead(self, iterator: Iterator[PyTree]) -> bool:
        """Whether the next batch of this iterator is loaded while the devices compute.

        A batch that waits must not outlive its iterator, which is therefore the key in a weak
        dictionary. Some iterators cannot be such keys, for example the iterators of lists.
        """
        kind = type(iterator)
        return self._is_ahead and kind.__weakrefoffset__ != 0 and kind.__hash__ is not None

    def _placed(self, iterator: Iterator[PyTree]) -> PyTree:
        with self._on_host():
            batch = next(iterator)
        treedef: Any
        leaves, treedef = jax.tree.flatten(batch, is_leaf=is_per_replica)
        if not all(map(_is_ready, leaves)):
            items = jax.tree_util.tree_flatten_with_path(batch, is_leaf=is_per_replica)[0]
            leaves = [_array("batch" + keys(path), leaf) for path, leaf in items]
        if len(self._replicas.on_mesh) > 1:
            self._warn_about_size(iterator, leaves)
        return treedef.unflatten(self._replicas.split(leaves))

    def _on_host(self) -> contextlib.AbstractContextManager[Any]:
        """Keras transfers each batch to the default device, from where it would have to be split.

        With the host as the default device, each accelerator receives its part directly.
        """
        host = devices_of_type("CPU")[:1] if self._is_ahead else ()
        return jax.default_device(host[0]) if host else contextlib.nullcontext()

    def _warn_about_size(self, iterator: Iterator[PyTree], leaves: list[Any]) -> None:
        """Warns once if no batch divides; a single batch, or the last one, may have any size.

        Calls such as `train_on_batch` have an iterator for each batch.
        """
        n = len(self._replicas.on_mesh)
        size = next((leaf.shape[0] for leaf in leaves if leaf.ndim), 0)
        self._may_warn &= size % n > 0
        if not self._may_warn:
            return
        is_same = self._last() is iterator or self._kind == "train"
        self._num_whole = self._num_whole + 1 if is_same else 1
        with contextlib.suppress(TypeError):  # some iterators cannot be referenced weakly
            self._last = weakref.ref(iterator)
        if self._num_whole > 1:
            self._may_warn = False
            warn_user(
                f"{size} examples cannot be split evenly across {n} devices, so each device "
                "computes whole batches. The results are the same, but more devices do not make "
                f"it faster. Use a batch size of {nearest_multiples(size, n)}.",
                "keras",
            )


def _is_ready(leaf: Any) -> bool:
    """Whether a leaf is an array that JAX accepts, which most are: the others take longer."""
    if type(leaf) is np.ndarray:
        return leaf.dtype.kind in "fiub" and leaf.dtype.isnative
    return isinstance(leaf, jax.Array) and not leaf.is_deleted()


def _array(name: str, leaf: Any) -> Any:
    if is_per_replica(leaf):
        raise TypeError(f"{name} is a PerReplica. {GLOBAL_BATCHES}")
    return array_of(name, leaf)
