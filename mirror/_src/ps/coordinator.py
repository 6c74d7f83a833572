"""`ClusterCoordinator`: schedules functions on the workers of a parameter server."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, final

import jax
from flax import nnx

from mirror._src.base.errors import expected, require_secs
from mirror._src.base.modules import set_module
from mirror._src.base.naming import name_of
from mirror._src.base.tracebacks import api_boundary
from mirror._src.base.types import PyTree
from mirror._src.ps.conductor import Conductor
from mirror._src.ps.datasets import PerWorkerDataset, PerWorkerIterator
from mirror._src.ps.engine import RayEngine
from mirror._src.ps.messages import ArgumentOfStep, Result, StepWork, without_places
from mirror._src.ps.pickling import pickled_function, require_no_remote_values
from mirror._src.ps.processes import Task
from mirror._src.ps.remote_value import RemoteValue
from mirror._src.ps.step_data import as_users, num_rows, on_host
from mirror._src.ps.training import ServedTraining
from mirror._src.strategy.strategy import Strategy
from mirror._src.training.runners import RemoteStrategy


class ServedStrategy(Protocol):
    """The attributes of `ParameterServerStrategy` that scheduling uses."""

    _coordinator: Any
    _conductor: Conductor
    _engine: RayEngine
    _training: ServedTraining

    @property
    def local(self) -> Strategy:
        """The strategy of the main program."""
        ...

    @property
    def num_workers(self) -> int:
        """Number of workers."""
        ...

    @property
    def is_sync(self) -> bool:
        """Whether each update has the gradients of all workers."""
        ...

    @property
    def num_parts(self) -> int:
        """Number of parts into which the batch of a step is split."""
        ...

    @property
    def num_replicas_in_sync(self) -> int:
        """Number of replicas that compute an update."""
        ...


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

    def __new__(cls, strategy: ServedStrategy) -> "ClusterCoordinator":
        # `ParameterServerStrategy` itself imports this module.
        if not isinstance(strategy, RemoteStrategy):
            fix = "Pass mirror.ps.ParameterServerStrategy(ps=1, workers=2)."
            raise TypeError(
                expected("strategy", strategy, "a mirror.ps.ParameterServerStrategy", fix)
            )
        if strategy._coordinator is None:
            strategy._coordinator = super().__new__(cls)
        coordinator: ClusterCoordinator = strategy._coordinator
        return coordinator

    def __init__(self, strategy: ServedStrategy) -> None:
        self._strategy = strategy

    @property
    def strategy(self) -> ServedStrategy:
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

        A random key of the model is folded with the number of the update, so a step that is
        repeated after the loss of a worker draws the same numbers.

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
        if not callable(fn):
            fix = "Pass the function itself: coordinator.schedule(fn, args)."
            raise TypeError(expected("fn", fn, "callable", fix))
        args, kwargs = _require_arguments(args, kwargs)
        self._conductor.raise_error()
        require_no_remote_values((args, kwargs), name_of(fn))
        objects = _objects_in((args, kwargs))
        if not objects:
            return self._schedule_function(fn, args, kwargs)
        model, optimizer = _model_and_optimizer(objects, name_of(fn))
        if self._strategy.is_sync:
            raise ValueError(
                f"{name_of(fn)} is a training step, which `schedule` runs asynchronously, but the "
                "strategy has staleness=0. Create it with staleness=None, or with a bound such as "
                "staleness=2; or train synchronously with mirror.Trainer."
            )
        tree = _with_places((args, kwargs), model, optimizer)
        num_rows(fn, *without_places(tree))  # checks them
        return self._schedule_step(fn, model, optimizer, [tree])

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
        training = self._strategy._training
        try:
            self._conductor.join(timeout)
        except TimeoutError:
            raise
        except Exception:
            if not self._conductor.has_lost_values:
                training.collect()
            else:
                training.forget()
            raise
        training.collect()

    @api_boundary
    def done(self) -> bool:
        """Whether all scheduled functions have ended.

        Raises:
            Exception: What a scheduled function raised. Waits until nothing runs any more before.
        """
        self._conductor.raise_error()
        return self._conductor.is_idle

    @api_boundary
    def fetch(self, tree: PyTree) -> PyTree:
        """Returns a tree with the results of its `RemoteValue`s, for which it waits."""
        return jax.tree.map(
            lambda leaf: leaf.fetch() if isinstance(leaf, RemoteValue) else leaf,
            tree,
            is_leaf=lambda leaf: isinstance(leaf, RemoteValue),
        )

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
        if not callable(dataset_fn):
            fix = "Pass a function that returns the dataset."
            raise TypeError(expected("dataset_fn", dataset_fn, "callable", fix))
        engine = self._strategy._engine
        export = engine.export(dataset_fn, pickled_function(engine, dataset_fn))
        return PerWorkerDataset(engine.next_key, export)

    @property
    def _conductor(self) -> Any:
        return self._strategy._conductor

    def _schedule_function(
        self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> RemoteValue:
        engine = self._strategy._engine
        export = engine.export(fn, pickled_function(engine, fn))
        arguments = pickled_function(engine, (args, kwargs), f"the arguments of {name_of(fn)}")
        value = RemoteValue()
        task = Task("run_function", [(export, arguments)], _single, value)
        self._conductor.submit(task, is_step=False)
        return value

    def _schedule_step(
        self,
        fn: Callable[..., Any],
        model: nnx.Module,
        optimizer: nnx.Optimizer[Any],
        parts: Sequence[PyTree],
        *,
        weight_of: Callable[[Any], float] | None = None,
        batch_of: Callable[..., tuple[Any, ...]] | None = None,
        join: Callable[[Sequence[Result]], Any] | None = None,
    ) -> RemoteValue:
        """Schedules a training step.

        Args:
            fn: The step.
            model: The model.
            optimizer: The optimizer.
            parts: For each part of the batch, positional and keyword arguments, in which an
                `ArgumentOfStep` stands for model and optimizer.
            weight_of: As in `StepWork`.
            batch_of: As in `StepWork`.
            join: Returns the result, given the results of the parts. Defaults to the only one.
        """
        engine = self._strategy._engine
        pickled = [
            pickled_function(engine, on_host(part), f"the arguments of {name_of(fn)}")
            for part in parts
        ]
        function = engine.export(fn, pickled_function(engine, fn))
        weight, batch = (f if f is None else engine.export(f) for f in (weight_of, batch_of))
        share, ordinal = self._strategy._training.prepare(model, optimizer)
        work = StepWork(function, share, ordinal, weight, batch)
        value = RemoteValue()
        task = Task("run_part", [(work, each) for each in pickled], join or _single, value)
        self._conductor.submit(task, is_step=True)
        return value


def _single(results: Sequence[Result]) -> Any:
    return as_users(results[0].value)


def _require_arguments(args: Any, kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if not isinstance(args, tuple | list):
        fix = "Pass a tuple, also for one argument: args=(x,)."
        raise TypeError(expected("args", args, "a tuple or a list", fix))
    if not isinstance(kwargs, Mapping | None):
        fix = "For example kwargs={'x': 1}."
        raise TypeError(expected("kwargs", kwargs, "a dict or None", fix))
    return tuple(args), dict(kwargs or {})


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
