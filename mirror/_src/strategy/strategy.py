"""`Strategy`: what every strategy does, whatever devices it has."""

import abc
import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, NoReturn, Self, final

import jax

from mirror._src.checks import verify as checks
from mirror._src.checks.copies import check_mirrored
from mirror._src.collectives.cross_device_ops import CrossDeviceOps
from mirror._src.collectives.reduce_op import ReduceOp
from mirror._src.context.scopes import current_frame, require_cross_replica
from mirror._src.data.distribute import (
    DistributedDataset,
    InputContext,
    PerReplicaDataset,
    Remainder,
)
from mirror._src.devices import backend
from mirror._src.devices.replicas import ReplicaDevices
from mirror._src.devices.transfer import copies_of, move
from mirror._src.explain.baselines import Runners
from mirror._src.explain.placement_table import device_table
from mirror._src.explain.program import ProgramReport, describe_program
from mirror._src.explain.report import Explanation
from mirror._src.explain.timing import explain, require_steps
from mirror._src.run.arguments import canonical_argnums, require_call
from mirror._src.run.runner import Runner
from mirror._src.strategy.reductions import (
    canonical_axes,
    gathering,
    reduction,
    require_equal_shapes,
    require_values,
)
from mirror._src.strategy.scope import Scope
from mirror._src.utils.errors import counted, describe
from mirror._src.utils.modules import set_module
from mirror._src.utils.tables import Table
from mirror._src.utils.types import Array, PyTree, StepFunction
from mirror._src.values.per_replica import PerReplica, is_per_replica, on_replicas
from mirror._src.variables.on_read import unwrapped


@set_module("mirror")
class ValueContext(NamedTuple):
    """For which replica a value is made; see `Strategy.distribute_values_from_function`.

    Attributes:
        replica_id_in_sync_group: the replica's number, 0 to n - 1.
        num_replicas_in_sync: how many there are.

    >>> strategy = mirror.MirroredStrategy(["/cpu:0", "/cpu:1"])
    >>> strategy.distribute_values_from_function(lambda context: context.replica_id_in_sync_group)
    PerReplica(0, 1)
    """

    replica_id_in_sync_group: int
    num_replicas_in_sync: int


@set_module("mirror")
class Strategy(abc.ABC):
    """Runs a step once per replica, on its devices, and keeps their state the same.

    Abstract: `MirroredStrategy` and `OneDeviceStrategy` say which devices there are.

    >>> strategy = mirror.MirroredStrategy(["/cpu:0", "/cpu:1"])
    >>> isinstance(strategy, Strategy), strategy.num_replicas_in_sync
    (True, 2)
    """

    @abc.abstractmethod
    def __init__(
        self,
        replicas: ReplicaDevices,
        cross_device_ops: CrossDeviceOps,
        *,
        shard_update: bool = False,
    ) -> None:
        if not isinstance(cross_device_ops, CrossDeviceOps):
            raise TypeError(
                f"cross_device_ops={describe(cross_device_ops)} is no CrossDeviceOps. Pass "
                "mirror.AllReduce(), or leave it out."
            )
        self._replicas = replicas
        self._cross_device_ops = cross_device_ops
        self._shard_update = shard_update
        self._runner = Runner(self, replicas, cross_device_ops, shard_update=shard_update)
        self._lone: Strategy | None = None
        self._with_one_on_each: Strategy | None = None

    @property
    @final
    def num_replicas_in_sync(self) -> int:
        """How many replicas run each step."""
        return len(self._replicas)

    @property
    @final
    def devices(self) -> tuple[jax.Device, ...]:
        """The devices of the replicas, in replica order."""
        return self._replicas.devices

    @property
    @final
    def cross_device_ops(self) -> CrossDeviceOps:
        """Who carries the collectives out."""
        return self._cross_device_ops

    @property
    @final
    def shard_update(self) -> bool:
        """Whether weight updates are sharded where they can be: see `MirroredStrategy`."""
        return self._runner.holds_slices

    @final
    def scope(self) -> Scope[Self]:
        """A context in which every array that is created is mirrored.

        What is created elsewhere works too: `run` mirrors it when it first meets it. The scope can
        be entered again, also while it is open.

        Raises:
            RuntimeError: on entering, inside a replica or another strategy's scope.

        >>> strategy = mirror.MirroredStrategy(["/cpu:0", "/cpu:1"])
        >>> with strategy.scope():
        ...     w = jnp.ones(3)
        >>> len(w.devices())
        2
        """
        return Scope(self)

    @final
    def run(
        self,
        fn: StepFunction,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        *,
        donate_argnums: int | Sequence[int] = (),
    ) -> PyTree:
        """Runs `fn` once per replica, all at once, each on its own device.

        The first call with a function, a structure and shapes traces `fn`, proves which results
        are the same on every replica, and compiles; later calls only run. Results come back before
        they are computed, as everywhere in JAX.

        Args:
            fn: one replica's step. `mirror.get_replica_context()` works inside, and so do
                `jax.lax.psum(x, mirror.REPLICA_AXIS)` and its kin.
            args: its arguments. nnx objects (modules, optimizers, variables) go by reference: their
                new state is mirrored back into them and the old buffers are given up. Of a
                `PerReplica` leaf each replica gets its own array, without the leading axis. Other
                arrays, NumPy arrays and numbers are mirrored. Booleans, strings, functions and
                other hashables are static: a new value is a new program.
            kwargs: its keyword arguments, treated alike.
            donate_argnums: which positional arguments' buffers are given up; the arrays that were
                passed must not be used again. An interrupt before the result is assigned loses
                them; the state of nnx objects survives it.

        Returns:
            What `fn` returns, each leaf a plain mirrored array where it is proved to be the same on
            every replica, else a `PerReplica`.

        Raises:
            ReplicaDivergenceError: a variable would differ between the replicas afterwards, or
                replicas would wait for each other under a condition that they may decide
                differently. Every model is left as it was.
            RuntimeError: called inside a replica, inside another strategy's scope, or under a JAX
                transformation.
            TypeError: `args` is no tuple or list, or `fn` returned something else than arrays.
            ValueError: a deleted array, a `PerReplica` of another number of replicas, a changed
                model structure, an nnx object that `fn` reads without its being an argument.

        >>> strategy = mirror.MirroredStrategy(["/cpu:0", "/cpu:1"])
        >>> def step(w, x):
        ...     return w * x, mirror.get_replica_context().all_reduce("sum", x)
        >>> strategy.run(step, (10.0, mirror.PerReplica([1.0, 2.0])))
        (PerReplica(10., 20.), Array(3., dtype=float32))
        """
        if current_frame() is not None:
            require_cross_replica(self, "run", "Call the function itself; it is in a replica.")
        kwargs = {} if kwargs is None else kwargs
        require_call(fn, args, kwargs)
        donated = (donate_argnums,) if isinstance(donate_argnums, int) else donate_argnums
        if type(donated) is not tuple:
            donated = canonical_argnums(donated)
        return self._runner.run(fn, args, kwargs, donated)

    @final
    def reduce(
        self,
        op: ReduceOp | str,
        value: PyTree,
        axis: int | Sequence[int] | None = None,
        where: PerReplica | Array | None = None,
    ) -> PyTree:
        """Reduces every leaf over the replicas.

        Args:
            op: `"sum"`, `"mean"`, `"min"`, `"max"`, or a `ReduceOp`.
            value: `PerReplica` leaves; a mirrored leaf counts once per replica.
            axis: also reduce over these axes of each replica's value, e.g. its batch axis 0. A mean
                is then that of all elements: of rows `[[1., 2.], [3., 8.]]` it is 3.5.
            where: a boolean mask; what is False does not count. Its shape on each replica is that
                of the value, or the value's leading axes.

        Returns:
            The same tree of mirrored arrays. The mean of integers or booleans is float32, the sum
            of booleans is int32; a mean of nothing is NaN.

        Raises:
            ValueError: an unknown `op`, an axis that is not there, a mask that does not fit, a
                value without leaves.
            TypeError: a leaf that is no array or number, `op`, `axis` or `where` of a wrong type.
            RuntimeError: called inside a replica or another strategy's scope.

        >>> strategy = mirror.MirroredStrategy(["/cpu:0", "/cpu:1"])
        >>> strategy.reduce("mean", mirror.PerReplica([1.0, 2.0]))
        Array(1.5, dtype=float32)
        >>> strategy.reduce("mean", mirror.PerReplica([[1.0, 2.0], [3.0, 8.0]]), axis=0)
        Array(3.5, dtype=float32)
        """
        require_cross_replica(self, "reduce", "Use mirror.get_replica_context().all_reduce there.")
        value = unwrapped(value)
        step = reduction(ReduceOp.canonicalize(op), canonical_axes(axis), where is not None)
        require_values("reduce", value)
        if axis is None:
            require_equal_shapes(value)
        return self._runner.run(step, (value,) if where is None else (value, where), {})

    @final
    def gather(self, value: PyTree, axis: int = 0) -> PyTree:
        """Joins every leaf's per-replica values along `axis`, in replica order.

        Args:
            value: `PerReplica` leaves; a mirrored leaf is joined n times.
            axis: the axis of each replica's value to join along.

        Returns:
            The same tree of mirrored arrays.

        Raises:
            ValueError: there is no such axis, or there are no leaves.
            RuntimeError: called inside a replica or another strategy's scope.

        >>> strategy = mirror.MirroredStrategy(["/cpu:0", "/cpu:1"])
        >>> strategy.gather(mirror.PerReplica([[1, 2], [3]]))
        Array([1, 2, 3], dtype=int32)
        """
        require_cross_replica(self, "gather", "Use mirror.get_replica_context().all_gather there.")
        value = unwrapped(value)
        axes = canonical_axes(axis)
        if axes is None or len(axes) != 1:
            raise TypeError(f"axis={axis!r} is not one axis. Pass an int.")
        require_values("gather", value)
        return self._runner.run(gathering(axes[0]), (value,), {})

    @final
    def local_results(self, value: PyTree) -> tuple[PyTree, ...]:
        """One tree for each replica: a `PerReplica`'s values, a mirrored array's copies.

        >>> strategy = mirror.MirroredStrategy(["/cpu:0", "/cpu:1"])
        >>> [int(value) for value in strategy.local_results(mirror.PerReplica([1, 2]))]
        [1, 2]
        """
        treedef: Any
        leaves, treedef = jax.tree.flatten(unwrapped(value), is_leaf=is_per_replica)
        columns = [self._local(leaf) for leaf in leaves]
        return tuple(
            treedef.unflatten([column[i] for column in columns])
            for i in range(self.num_replicas_in_sync)
        )

    @final
    def distribute_dataset(
        self, dataset: Iterable[PyTree], *, remainder: Remainder = "error", prefetch: int = 2
    ) -> DistributedDataset:
        """Cuts the global batches of a dataset up for the replicas, in order.

        Args:
            dataset: any iterable of batches: pytrees of arrays with one leading batch axis.
            remainder: what happens to a batch that does not divide by the number of replicas.
                `"error"` says its size and the ones that do; `"drop"` leaves it out, unless it is
                the first; `"pad"` yields `(batch, mask)`, every batch padded to the first one's
                size rounded up, with a mask of shape `(B/n,)` on each replica, True for examples.
            prefetch: how many batches to have ready on the devices while a step runs; a thread
                reads the dataset ahead of the loop. 0: none, and no thread.

        Returns:
            An iterable of batches whose leaves are `PerReplica`, rows on their devices.

        Raises:
            ValueError: an unknown `remainder`, a negative `prefetch`; while iterating, a batch that
                does not divide, whose leaves differ in leading size, or that holds scalars.
            TypeError: no iterable of batches; while iterating, a leaf that is no array.

        >>> strategy = mirror.MirroredStrategy(["/cpu:0", "/cpu:1"])
        >>> (batch,) = strategy.distribute_dataset([{"x": np.arange(4)}])
        >>> batch["x"]
        PerReplica([0, 1], [2, 3])
        """
        require_cross_replica(self, "distribute_dataset", "Pass the step its batch.")
        return DistributedDataset(dataset, self._replicas, remainder, prefetch)

    @final
    def distribute_datasets_from_function(
        self, fn: Callable[[InputContext], Iterable[PyTree]], *, prefetch: int = 2
    ) -> PerReplicaDataset:
        """A dataset whose batches are the replicas' own: each takes the next one, unsplit.

        Args:
            fn: called once, with an `InputContext`; returns an iterable of batches for one replica,
                of which a step takes n. They may differ in length.
            prefetch: as for `distribute_dataset`.

        Returns:
            An iterable of batches whose leaves are `PerReplica`. A warning says so where the last
            batches are too few for a step.

        Raises:
            TypeError: `fn` returned no iterable.
            ValueError: a negative `prefetch`; while iterating, batches that differ in structure.

        >>> strategy = mirror.MirroredStrategy(["/cpu:0", "/cpu:1"])
        >>> batches = [np.zeros(1), np.ones(2)]
        >>> list(strategy.distribute_datasets_from_function(lambda context: batches))
        [PerReplica([0.], [1., 1.])]
        """
        method = "distribute_datasets_from_function"
        require_cross_replica(self, method, "Pass the step its batch.")
        source = fn(InputContext(1, 0, self.num_replicas_in_sync))
        return PerReplicaDataset(source, self._replicas, prefetch)

    @final
    def distribute_values_from_function(self, fn: Callable[[ValueContext], PyTree]) -> PyTree:
        """Values made for each replica by itself, each on its device.

        Args:
            fn: called once for each replica, in order, with a `ValueContext` that tells which.

        Returns:
            The tree that `fn` returns, each leaf a `PerReplica`.

        Raises:
            ValueError: the replicas' trees, dtypes or numbers of dimensions differ.
            TypeError: a leaf that is no array and no number.
            RuntimeError: called inside a replica or another strategy's scope.

        >>> strategy = mirror.MirroredStrategy(["/cpu:0", "/cpu:1"])
        >>> strategy.distribute_values_from_function(lambda c: c.replica_id_in_sync_group)
        PerReplica(0, 1)
        """
        method = "distribute_values_from_function"
        require_cross_replica(self, method, "Make the value in the step.")
        n = self.num_replicas_in_sync
        trees = [fn(ValueContext(i, n)) for i in range(n)]
        treedef: Any
        treedef = jax.tree.structure(trees[0])
        for i, tree in enumerate(trees):
            if jax.tree.structure(tree) != treedef:
                raise ValueError(
                    f"{method}: replica {i} got {jax.tree.structure(tree)}, replica 0 {treedef}. "
                    "Return the same structure for each replica."
                )
        columns = zip(*map(jax.tree.leaves, trees), strict=True)
        return treedef.unflatten(
            [on_replicas(PerReplica(list(c)), self._replicas) for c in columns]
        )

    @final
    def check_mirrored(self, tree: PyTree) -> None:
        """Checks that all replicas hold bitwise the same copy of every array in the tree.

        Each device makes a fingerprint of its own copy, and the fingerprints are compared: it costs
        about one pass over the arrays and one small collective.

        Args:
            tree: arrays, nnx objects, in any nest. Host values have one copy and always pass.

        Raises:
            ReplicaDivergenceError: copies differ; the message names the leaves.
            ValueError: an array does not lie on this strategy's devices.
            TypeError: a leaf is a `PerReplica`.
            RuntimeError: called inside a replica or another strategy's scope.

        >>> strategy = mirror.MirroredStrategy(["/cpu:0", "/cpu:1"])
        >>> with strategy.scope():
        ...     w = jnp.ones(3)
        >>> strategy.check_mirrored({"w": w})
        """
        require_cross_replica(self, "check_mirrored", "Check after the step.")
        if self._with_one_on_each is None:
            self._with_one_on_each = self._one_on_each()
        check_mirrored(self._with_one_on_each._runner, tree)

    @final
    def verify(
        self,
        fn: StepFunction,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        *,
        rtol: float = 1e-5,
    ) -> checks.VerifyReport:
        """Runs a step on all replicas and once on one device with the whole batch, and compares.

        Nothing is changed: both runs work on copies of the models. The batch of the one device is
        the replicas' batches put together. A per-replica result is compared where it has one row
        for each example; where it has not, one device has no counterpart of it.

        Args:
            fn: the step, as for `run`.
            args: its arguments, as for `run`; each `PerReplica` leaf with a batch axis.
            kwargs: its keyword arguments.
            rtol: the largest relative difference to allow, over each leaf's largest magnitude.

        Returns:
            A report with a row for each result and each variable that changed; `print` it.

        Raises:
            ReplicaMismatchError: leaves differ by more; the message names them.
            RuntimeError: called inside a replica or another strategy's scope.
            ValueError: a `PerReplica` leaf has no batch axis.

        >>> strategy = mirror.MirroredStrategy(["/cpu:0", "/cpu:1"])
        >>> def step(batch):
        ...     return mirror.get_replica_context().all_reduce("mean", batch.mean())
        >>> strategy.verify(step, (mirror.PerReplica([[1.0, 2.0], [3.0, 4.0]]),)).largest
        0.0
        """
        require_cross_replica(self, "verify", "Verify the step from outside.")
        kwargs = {} if kwargs is None else kwargs
        require_call(fn, args, kwargs)
        if self._lone is None:
            self._lone = self._alone()
        return checks.verify(self._runner, self._lone._runner, fn, args, kwargs, rtol)

    @final
    def inspect(
        self,
        fn: StepFunction,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> ProgramReport:
        """Says in words what the proof finds in a step; traces it and runs nothing.

        For each result and each variable, the report says whether it is mirrored and why: the
        collective that made it so, or the argument that differs between replicas. It lists the
        collectives in order. A step that `run` would reject is reported, not rejected.

        Args:
            fn: the step, as for `run`.
            args: its arguments, as for `run`; models are not changed.
            kwargs: its keyword arguments.

        Returns:
            A report; `print` it.

        Raises:
            RuntimeError: called inside a replica or another strategy's scope.
            TypeError: `args` is no tuple or list, or `fn` is no function.
            ValueError: arguments that `run` refuses too.

        >>> strategy = mirror.MirroredStrategy(["/cpu:0", "/cpu:1"])
        >>> def step(x):
        ...     return x, mirror.get_replica_context().all_reduce("sum", x)
        >>> report = strategy.inspect(step, (mirror.PerReplica([1.0, 2.0]),))
        >>> [(row.name, row.state) for row in report.results]
        [('result[0]', 'per-replica'), ('result[1]', 'mirrored')]
        """
        require_cross_replica(self, "program", "Ask for it from outside.")
        kwargs = {} if kwargs is None else kwargs
        require_call(fn, args, kwargs)
        return describe_program(self._runner, fn, args, kwargs)

    @final
    def explain(
        self,
        fn: StepFunction,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        data: Iterable[PyTree] | None = None,
        steps: int = 20,
    ) -> Explanation:
        """Measures where the time of a step and the memory go, and says what to change.

        It runs the step some hundred times, on copies of the models: nothing is changed. The parts
        add up to the time of a step in a loop; `mirror._src.explain.timing` says what each means.

        Args:
            fn: the step, as for `run`.
            args: its arguments, as for `run`; without the batch, if there are `data`.
            kwargs: its keyword arguments.
            data: what the batches come from, as `distribute_dataset` makes it: each is the last
                positional argument of a step. It is read again from its start when it ends. `None`:
                the step gets the same arguments each time, and waits for no data.
            steps: how many to measure; several times so many run.

        Returns:
            An explanation with a verdict; `print` it.

        Raises:
            ReplicaDivergenceError: as from `run`.
            RuntimeError: called inside a replica or another strategy's scope.
            TypeError: `steps` is no int; as from `run`.
            ValueError: `steps` is below 1, the data end and cannot be read again; as from `run`.

        >>> strategy = mirror.MirroredStrategy(["/cpu:0", "/cpu:1"])
        >>> def step(x):
        ...     return mirror.get_replica_context().all_reduce("sum", x)
        >>> explanation = strategy.explain(step, (mirror.PerReplica([1.0, 2.0]),), steps=2)
        >>> explanation.num_collectives, sorted(explanation.shares)
        (1, ['communication', 'compute', 'dispatch', 'input', 'transfer'])
        """
        require_cross_replica(self, "explain", "Explain the step from outside.")
        kwargs = {} if kwargs is None else kwargs
        require_call(fn, args, kwargs)
        require_steps(steps)
        if self._lone is None:
            self._lone = self._alone()
        ops, sharded = self._cross_device_ops, self._shard_update
        scratch = Runner(self, self._replicas, ops, shard_update=sharded)
        runners = Runners(self._runner, scratch, self._lone._runner)
        return explain(runners, fn, args, kwargs, data, steps)

    @abc.abstractmethod
    def _alone(self) -> "Strategy":
        """One replica on the first device, to hold the many against."""

    @abc.abstractmethod
    def _one_on_each(self) -> "Strategy":
        """One replica on each of the devices: there are as many copies of a mirrored array."""

    def _all_reduce(self, op: ReduceOp, leaves: Sequence[Any]) -> list[Array]:
        """Carries out a collective inside a replica."""
        return self._cross_device_ops.all_reduce(op, leaves)

    def _local(self, leaf: Any) -> Sequence[Any]:
        n = self.num_replicas_in_sync
        if is_per_replica(leaf):
            if leaf.num_replicas != n:
                raise ValueError(f"{leaf!r} is of {leaf.num_replicas} replicas, not of {n}.")
            return leaf.values
        if isinstance(leaf, jax.Array) and self._replicas.is_sharded(leaf):
            leaf = self._replicas.mirror(leaf)
        if isinstance(leaf, jax.Array) and self._replicas.is_mirrored(leaf):
            copies = copies_of(leaf)
            return [copies[d] if d in copies else move(leaf, d) for d in self.devices]
        return [leaf] * n

    def __copy__(self) -> NoReturn:
        raise RuntimeError(
            "copy.copy(strategy) would be two strategies in one. Pass the strategy itself on, or "
            "make another, with the same devices: copy.deepcopy(strategy)."
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        twin = memo[id(self)] = object.__new__(type(self))
        ops = copy.deepcopy(self._cross_device_ops, memo)
        Strategy.__init__(twin, self._replicas, ops, shard_update=self._shard_update)
        return twin

    def __str__(self) -> str:
        return f"{type(self).__name__}{backend.names(self.devices)}"

    def __repr__(self) -> str:
        count = counted(self.num_replicas_in_sync, "replica")
        return f"{type(self).__name__}, {count} in sync\n{self._table}"

    def _repr_html_(self) -> str:
        return f"<b>{type(self).__name__}</b>{self._table._repr_html_()}"

    @property
    def _table(self) -> Table:
        return device_table(self.devices)
