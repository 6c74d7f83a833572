"""`ClusterCoordinator`: schedules functions on the workers of a parameter server."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import jax
from flax import nnx

from mirror._src.base.errors import expected, require_callable, require_secs
from mirror._src.base.naming import name_of
from mirror._src.base.public_names import set_module
from mirror._src.base.tracebacks import api_boundary
from mirror._src.base.types import PyTree
from mirror._src.engine.arguments import require_call
from mirror._src.ps.handles import PerWorkerDataset, PerWorkerIterator, RemoteValue
from mirror._src.ps.step_data import (
    ArgumentOfStep,
    num_rows,
    on_host,
    require_no_remote_values,
    without_places,
)
from mirror._src.ps.strategy import ParameterServerStrategy


@set_module("mirror.ps")
@final
class ClusterCoordinator:
    """Schedules functions on the workers of a `ParameterServerStrategy`.

    A strategy has one coordinator: a second call returns the same one.

    Args:
        strategy: The strategy.

    Raises:
        TypeError: If `strategy` is not a `ParameterServerStrategy`.

    >>> coordinator = mirror.ps.ClusterCoordinator(strategy)
    >>> for batch in batches:
    ...     loss = coordinator.schedule(train_step, (model, optimizer, batch))
    >>> coordinator.join()
    >>> loss.fetch()
    """

    def __new__(cls, strategy: ParameterServerStrategy) -> "ClusterCoordinator":
        if not isinstance(strategy, ParameterServerStrategy):
            fix = "Pass mirror.ps.ParameterServerStrategy(ps=1, workers=2)."
            raise TypeError(
                expected("strategy", strategy, "a mirror.ps.ParameterServerStrategy", fix)
            )
        if strategy._coordinator is None:
            strategy._coordinator = super().__new__(cls)
        coordinator: ClusterCoordinator = strategy._coordinator
        return coordinator

    def __init__(self, strategy: ParameterServerStrategy) -> None:
        self._strategy, self._served = strategy, strategy._training

    @property
    def strategy(self) -> ParameterServerStrategy:
        """The strategy."""
        return self._strategy

    @api_boundary
    def schedule(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> RemoteValue:
        """Schedules a function on a worker, and returns before it runs.

        A function that receives a model and its `nnx.Optimizer` is a training step, written as for
        `MirroredStrategy.run`. One worker computes it with the whole batch, and its gradients make
        one update as soon as they arrive. All arrays with rows among its other arguments are the
        batch, which is split across the devices of the worker. For synchronous updates, use
        `mirror.Trainer`.

        Each nnx.Rngs of the model is folded with the number of the update, so a step that is
        repeated after the loss of a worker draws the same numbers. A step must not change other
        random keys of the model.

        Args:
            fn: The function. It is pickled when it is first scheduled, so what it captures must
                not change.
            args: Positional arguments.
            kwargs: Keyword arguments.

        Returns:
            The value that the function will have.

        Raises:
            TypeError: If the function or an argument cannot be pickled, or is a `RemoteValue`, or
                if an argument of a training step is a random key.
            ValueError: If arrays of the batch differ in their number of rows; or for a training
                step if the strategy has `staleness=0`.
            Exception: What an earlier scheduled function raised, once nothing runs any more.
                Functions that had not been started then are canceled; afterwards, the coordinator
                is usable again.
        """
        kwargs = dict(kwargs or {}) if isinstance(kwargs, Mapping | None) else kwargs
        require_call(fn, args, kwargs, "coordinator.schedule")
        args = tuple(args)
        self._served.thread.raise_error()
        require_no_remote_values((args, kwargs), name_of(fn))
        objects = _objects_in((args, kwargs))
        if not objects:
            return self._served.schedule_function(fn, args, kwargs)
        model, optimizer = _model_and_optimizer(objects, name_of(fn))
        if self._strategy.is_sync:
            raise ValueError(
                f"{name_of(fn)} is a training step, which `schedule` runs asynchronously, but the "
                "strategy has staleness=0. Create it with staleness=None, or with a bound such as "
                "staleness=2; or train synchronously with mirror.Trainer."
            )
        tree = _with_places((args, kwargs), model, optimizer)
        num_rows(fn, *without_places(tree))  # checks them
        return self._served.schedule_step(fn, model, optimizer, [on_host(tree)])

    @api_boundary
    def join(self, timeout: float | None = None) -> None:
        """Waits until all scheduled functions have ended.

        Afterwards, model and optimizer of the scheduled steps have the values of the servers.

        Args:
            timeout: Seconds to wait for the functions. Defaults to forever.

        Raises:
            TimeoutError: If the functions have not ended by then. They continue.
            Exception: What a scheduled function raised.
        """
        if timeout is not None:
            timeout = require_secs("timeout", timeout)
        self._served.join(timeout)

    @api_boundary
    def done(self) -> bool:
        """Whether all scheduled functions have ended.

        Raises:
            Exception: What a scheduled function raised. Waits until nothing runs any more before.
        """
        self._served.thread.raise_error()
        return self._served.thread.driver.is_idle

    @api_boundary
    def fetch(self, tree: PyTree) -> PyTree:
        """Returns a tree with the results of its `RemoteValue`s, for which it waits."""
        is_remote = lambda leaf: isinstance(leaf, RemoteValue)  # noqa: E731
        return jax.tree.map(lambda x: x.fetch() if is_remote(x) else x, tree, is_leaf=is_remote)

    @api_boundary
    def create_per_worker_dataset(self, dataset_fn: Callable[[], Any]) -> PerWorkerDataset:
        """Returns a dataset that every worker creates for itself with `dataset_fn`.

        Pass `iter(dataset)` to scheduled functions. In a training step, it stands for the next
        batch of the worker. A worker that was lost and returns begins its dataset again.

        Args:
            dataset_fn: Returns an iterable; it runs on every worker.

        Raises:
            TypeError: If `dataset_fn` is not callable, or cannot be pickled.
        """
        fix = "Pass a function that returns the dataset."
        require_callable("dataset_fn", dataset_fn, fix)
        return PerWorkerDataset(
            self._served.engine.next_key, self._served.engine.export(dataset_fn)
        )


def _objects_in(tree: PyTree) -> list[Any]:
    """Returns the distinct nnx objects among the leaves of arguments."""
    leaves = jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, nnx.Pytree))
    objects = {id(leaf): leaf for leaf in leaves if isinstance(leaf, nnx.Pytree)}
    return list(objects.values())


def _model_and_optimizer(
    objects: Sequence[Any], fn_name: str
) -> tuple[nnx.Module, nnx.Optimizer[Any]]:
    optimizers = [obj for obj in objects if isinstance(obj, nnx.Optimizer)]
    models = [obj for obj in objects if isinstance(obj, nnx.Module)]
    others = [obj for obj in objects if obj not in optimizers and obj not in models]
    if len(optimizers) != 1 or len(models) != 1 or others:
        names = ", ".join(type(obj).__name__ for obj in objects)
        raise TypeError(
            f"{fn_name} must receive one model and its nnx.Optimizer, or no nnx objects, got "
            f"{names}. The values of a model are on the parameter servers while it is trained. To "
            "evaluate it, call coordinator.join(), then run it in the main program."
        )
    return models[0], optimizers[0]


def _with_places(tree: PyTree, model: Any, optimizer: Any) -> PyTree:
    """Replaces model, optimizer and iterators among arguments by what stands for them."""

    def replace(node: Any) -> Any:
        if node is model:
            return ArgumentOfStep("model")
        if node is optimizer:
            return ArgumentOfStep("optimizer")
        return ArgumentOfStep("next", node) if isinstance(node, PerWorkerIterator) else node

    return jax.tree.map(replace, tree, is_leaf=lambda node: isinstance(node, nnx.Pytree))
