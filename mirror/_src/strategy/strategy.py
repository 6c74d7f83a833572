"""`Strategy`: the base class of all strategies."""

import abc
import copy
import functools
import math
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import (
    TYPE_CHECKING,
    Any,
    Literal,
    NamedTuple,
    Never,
    NoReturn,
    Required,
    Self,
    TypedDict,
    TypeVar,
    Unpack,
    final,
    overload,
)

import jax

from mirror._src.base.errors import counted, expected, require_callable, require_int
from mirror._src.base.keras_library import is_model
from mirror._src.base.naming import is_our_module, keys
from mirror._src.base.public_names import set_module
from mirror._src.base.supported import warn_about_jax
from mirror._src.base.tracebacks import api_boundary, hide_internal_frames
from mirror._src.base.types import REPLICA_AXIS, A, Array, K, PyTree, Shard, StepFunction, Unknown
from mirror._src.base.unknown_names import unknown_attribute
from mirror._src.cluster.store import process_count, process_index
from mirror._src.data.distribute import (
    DistributedDataset,
    InputContext,
    PerReplicaDataset,
    Remainder,
)
from mirror._src.data.foreign import copied
from mirror._src.data.input import InputMode
from mirror._src.devices import backend
from mirror._src.devices.replicas import ReplicaDevices
from mirror._src.devices.resolve import DeviceLike, canonicalize_device
from mirror._src.devices.transfer import copies_of, move, require_fits
from mirror._src.engine.all_reduce import AllReduce, ReductionToOneDevice
from mirror._src.engine.arguments import canonical_argnums, require_call
from mirror._src.engine.cross_device_ops import CrossDeviceOps
from mirror._src.engine.in_step import stack
from mirror._src.engine.per_replica import PerReplica, is_per_replica, on_local_replicas
from mirror._src.engine.reduce_op import ReduceOp, Reduction, require_axis, require_op
from mirror._src.engine.replica_context import current_replica, require_cross_replica
from mirror._src.engine.runner import Runner
from mirror._src.engine.variable import unwrapped
from mirror._src.inspection import verify as checks
from mirror._src.inspection.equality import warn_if_different
from mirror._src.inspection.explanation import Explanation, Runners, explain
from mirror._src.inspection.placement_table import device_table
from mirror._src.inspection.program_report import ProgramReport, describe_program
from mirror._src.inspection.verify import check_mirrored
from mirror._src.keras.verify import verify_model
from mirror._src.strategy.reductions import (
    canonical_axes,
    create,
    gathered_arguments,
    gathering,
    reduced_arguments,
    reduction,
    require_exact,
    require_values,
)
from mirror._src.strategy.scope import Scope

_MOST_NAMES = 8
"""Number of devices that `str(strategy)` names."""
strategies: "weakref.WeakSet[Strategy]" = weakref.WeakSet()
"""The strategies of this process, for a warning about a `Trainer` that uses none of them."""

T = TypeVar("T")


@set_module("mirror")
class ValueContext(NamedTuple):
    """Argument of the function passed to `Strategy.distribute_values_from_function`.

    Attributes:
        replica_id_in_sync_group: Replica to create a value for, from 0 to n - 1.
        num_replicas_in_sync: Number of replicas.

    >>> strategy = mirror.MirroredStrategy(["/cpu:0", "/cpu:1"])
    >>> strategy.distribute_values_from_function(lambda context: context.replica_id_in_sync_group)
    PerReplica(0, 1)
    """

    replica_id_in_sync_group: int
    num_replicas_in_sync: int


class _Even(TypedDict, total=False):
    """Options of `Strategy.distribute_dataset` with which a batch has no mask."""

    input: InputMode
    remainder: Literal["error", "drop"]
    prefetch: int


class _Padded(TypedDict, total=False):
    """Options of `Strategy.distribute_dataset` with which each batch has a mask."""

    input: InputMode
    remainder: Required[Literal["pad"]]
    prefetch: int


@set_module("mirror")
class Strategy(abc.ABC):
    """Abstract base class of all strategies.

    A strategy runs a step once per replica, and keeps the state of the replicas identical.

    >>> strategy = mirror.MirroredStrategy(["/cpu:0", "/cpu:1"])
    >>> isinstance(strategy, Strategy), strategy.num_replicas_in_sync
    (True, 2)
    """

    @abc.abstractmethod
    def __init__(
        self, replicas: ReplicaDevices, cross_device_ops: CrossDeviceOps, *, shard: Shard = "none"
    ) -> None:
        if not isinstance(cross_device_ops, CrossDeviceOps):
            fix = "Pass mirror.AllReduce(), or omit it."
            raise TypeError(
                expected("cross_device_ops", cross_device_ops, "a CrossDeviceOps instance", fix)
            )
        warn_about_jax()
        self._replicas = replicas
        self._cross_device_ops = cross_device_ops
        self._shard: Shard = shard
        chooses = shard == "auto" and replicas.slice_bytes is not None
        self._runner = Runner(self, replicas, cross_device_ops, chooses=chooses)
        strategies.add(self)
        self._runner.on_new_step = functools.partial(warn_if_different, self._single_runner)

    @property
    @final
    def num_replicas_in_sync(self) -> int:
        """Number of replicas that run every step."""
        return len(self._replicas)

    @property
    @final
    def devices(self) -> tuple[jax.Device, ...]:
        """Devices of the replicas, in replica order."""
        return self._replicas.devices

    @property
    @final
    def local_devices(self) -> tuple[jax.Device, ...]:
        """Devices of this process's replicas, in replica order.

        >>> strategy = mirror.MirroredStrategy(["/cpu:0", "/cpu:1"])
        >>> strategy.local_devices == strategy.devices
        True
        """
        return tuple(self.devices[i] for i in self.local_replica_ids)

    @property
    @final
    def local_replica_ids(self) -> tuple[int, ...]:
        """This process's replicas; all of them, unless there are several processes.

        >>> mirror.MirroredStrategy(["/cpu:0", "/cpu:1"]).local_replica_ids
        (0, 1)
        """
        return self._replicas.local_ids

    @property
    @final
    def _spans_processes(self) -> bool:
        """Whether some replicas are in other processes."""
        return self._replicas.spans_processes

    @property
    @final
    def is_chief(self) -> bool:
        """Whether this is the process that writes files and logs: process 0 of the replicas' ones.

        >>> mirror.MirroredStrategy().is_chief
        True
        """
        return self.local_replica_ids[0] == 0

    @property
    @final
    def cross_device_ops(self) -> CrossDeviceOps:
        """Implementation of the collectives."""
        return self._cross_device_ops

    @property
    @final
    def shard(self) -> Shard:
        """State that is stored in slices: `"none"`, `"optimizer"` or `"model"`.

        With `MirroredStrategy(shard="auto")`, `"model"` until the first step that changes state.
        """
        slice_bytes = self._replicas.slice_bytes
        if slice_bytes is None:
            return "none"
        return "optimizer" if math.isinf(slice_bytes) else "model"

    @final
    def scope(self) -> Scope[Self]:
        """Returns a context manager in which newly created arrays are mirrored.

        Arrays created elsewhere also work: the first `run` that receives them mirrors them. The
        scope is reentrant and reusable.

        Raises:
            RuntimeError: If entered inside a replica or another strategy's scope.

        >>> strategy = mirror.MirroredStrategy(["/cpu:0", "/cpu:1"])
        >>> with strategy.scope():
        ...     w = jnp.ones(3)
        >>> len(w.devices())
        2
        """
        return Scope(self, self._replicas)

    @final
    @api_boundary
    def init(self, fn: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Returns what `fn` returns, with arrays that are mirrored, or in slices with `shard=`.

        `fn` is compiled, so that no device ever holds the whole of an array that is stored in
        slices: a model that is larger than a device can be created. The mesh is set as in
        `scope()`. Random numbers are the same as in a call of `jax.jit(fn)`.

        Args:
            fn: Creates parameters, models, optimizers or optimizer states, such as `model.init`.
            *args: Its arguments. Arrays, and the random streams of nnx objects, may have any
                values; other values are constants of the compiled program.
            **kwargs: Its keyword arguments.

        Raises:
            RuntimeError: If called inside a replica or another strategy's scope.

        >>> strategy = mirror.MirroredStrategy(2, shard="model")
        >>> w = strategy.init(jax.random.normal, jax.random.key(0), (512, 512))
        >>> w.addressable_shards[0].data.shape
        (256, 512)
        """
        require_cross_replica(self, "init", "Call it outside the step.")
        require_callable("fn", fn, "For example strategy.init(model.init, key, x).")
        with self.scope():
            return create(self._replicas, fn, args, kwargs)

    @final
    def run(
        self,
        fn: StepFunction,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        *others: Never,
        donate_argnums: int | Sequence[int] = (),
        **unknown: Never,
    ) -> PyTree:
        """Runs `fn` on all replicas at the same time, each on its own device.

        The first call with a function, a pytree structure and shapes traces `fn`, proves which
        results are the same on every replica, and compiles the step; later calls only run it. Like
        other JAX computations, `run` is asynchronous: it returns before the results are computed.

        Args:
            fn: Step of one replica. It may call `mirror.get_replica_context()`, and collectives
                such as `jax.lax.psum(x, mirror.REPLICA_AXIS)`.
            args: Arguments of the step. nnx objects (modules, optimizers, variables) are passed by
                reference: the new state is written back to them, mirrored, and the old buffers are
                donated. From a `PerReplica` leaf, each replica receives its own array, without the
                leading axis. Other arrays, NumPy arrays and numbers are mirrored. Booleans,
                strings, functions and other hashable values are static: a new value compiles a new
                program.
            kwargs: Keyword arguments of the step, treated like `args`.
            *others: Rejected, with the correct call: the step's arguments are one tuple.
            donate_argnums: Indices of positional arguments whose buffers are donated; do not use
                the arrays afterwards. An interrupt before the result is assigned loses them; the
                state of nnx objects survives it.
            **unknown: Rejected: the step's keyword arguments are one dict.

        Returns:
            The result of `fn`. A leaf that is proved to be the same on every replica is a mirrored
            `jax.Array`; any other leaf is a `PerReplica`.

        Raises:
            ReplicaDivergenceError: If a variable, or the new value of a donated argument, would
                differ between replicas after the step, or if a collective depends on a condition
                that may differ between replicas. All models keep their state.
            RuntimeError: If called inside a replica, inside another strategy's scope, or inside a
                JAX transformation.
            TypeError: If `args` is not a tuple or list, if the arguments do not match the
                parameters of `fn`, or if `fn` returns anything but arrays.
            ValueError: If an array has been deleted, if a `PerReplica` has the wrong number of
                replicas or values of different shapes, if the structure of a model changes, or if
                `fn` captures an nnx object.

        >>> strategy = mirror.MirroredStrategy(["/cpu:0", "/cpu:1"])
        >>> def step(w, x):
        ...     return w * x, mirror.all_reduce("sum", x)
        >>> strategy.run(step, (10.0, mirror.PerReplica([1.0, 2.0])))
        (PerReplica(10., 20.), Array(3., dtype=float32))
        """
        try:  # not `@api_boundary`: the decorator would add a call to every step
            if stack.frames:
                require_cross_replica(self, "run", "Call the function directly.")
            kwargs = {} if kwargs is None else kwargs
            is_usual = type(args) is tuple and type(kwargs) is dict and not others and not unknown
            if not is_usual or not callable(fn):
                require_call(fn, args, kwargs, "strategy.run", others, unknown)
            donated = (donate_argnums,) if isinstance(donate_argnums, int) else donate_argnums
            if type(donated) is not tuple:
                donated = canonical_argnums(donated)
            return self._runner.run(fn, args, kwargs, donated)
        except Exception as error:
            hide_internal_frames(error)
            raise

    @final
    @api_boundary
    def reduce(
        self,
        op: Reduction,
        value: PyTree,
        axis: int | Sequence[int] | None = None,
        where: PerReplica | Array | None = None,
    ) -> PyTree:
        """Reduces every leaf over the replicas.

        Args:
            op: `"sum"`, `"mean"`, `"min"`, `"max"`, or a `ReduceOp`.
            value: Pytree of `PerReplica` values, whose shapes may differ along `axis`. A mirrored
                leaf counts once per replica.
            axis: Axes of each replica's value to reduce over as well, such as the batch axis 0. A
                mean is then the mean over all elements: 3.5 for replicas with `[1., 2.]` and
                `[3., 8.]`.
            where: Boolean mask of elements to include. Its shape on each replica is the shape of
                the value, or the leading axes of that shape.

        Returns:
            A pytree of mirrored arrays with the same structure. The mean of integers or booleans is
            float32, and the sum of booleans and small integers is int32 or uint32. A mean over no
            elements is NaN.

        Raises:
            ValueError: If `op` is unknown, an axis is out of range, the shapes of a value differ
                along another axis, the shape of `where` does not match, or `value` has no leaves.
            TypeError: If a leaf is neither an array nor a number, or `op`, `axis` or `where` has
                the wrong type.
            RuntimeError: If called inside a replica or another strategy's scope.
            OverflowError: If a sum of integers does not fit its dtype.

        >>> strategy = mirror.MirroredStrategy(["/cpu:0", "/cpu:1"])
        >>> strategy.reduce("mean", mirror.PerReplica([1.0, 2.0]))
        Array(1.5, dtype=float32)
        >>> strategy.reduce("mean", mirror.PerReplica([[1.0, 2.0], [3.0, 8.0]]), axis=0)
        Array(3.5, dtype=float32)
        """
        require_cross_replica(self, "reduce", "Use mirror.all_reduce.")
        value = unwrapped(value)
        reduce_op = require_op("strategy.reduce", op, value)
        # The user's own operations may round.
        is_checked = reduce_op is ReduceOp.SUM and is_our_module(
            type(self._cross_device_ops).__module__
        )
        axes = canonical_axes(axis)
        require_values("reduce", value)
        arguments = reduced_arguments(value, where, axes)
        result, estimates = self._runner.run(reduction(reduce_op, axes, is_checked), arguments, {})
        require_exact(value, result, estimates)
        return result

    @final
    @api_boundary
    def gather(self, value: PyTree, axis: int = 0) -> PyTree:
        """Concatenates the per-replica values of every leaf along `axis`, in replica order.

        Args:
            value: Pytree of `PerReplica` values, whose lengths along `axis` may differ. A mirrored
                leaf is repeated n times.
            axis: Axis of each replica's value to concatenate along.

        Returns:
            A pytree of mirrored arrays with the same structure.

        Raises:
            ValueError: If the axis is out of range, the shapes of a value differ along another
                axis, or `value` has no leaves.
            TypeError: If a leaf is neither an array nor a number, or `axis` is not an int.
            RuntimeError: If called inside a replica or another strategy's scope.

        >>> strategy = mirror.MirroredStrategy(["/cpu:0", "/cpu:1"])
        >>> strategy.gather(mirror.PerReplica([[1, 2], [3]]))
        Array([1, 2, 3], dtype=int32)
        """
        require_cross_replica(self, "gather", "Use mirror.all_gather.")
        value = unwrapped(value)
        require_axis("strategy.gather", value, axis)
        axes = canonical_axes(axis)
        if axes is None or len(axes) != 1:
            fix = "Pass the axis to concatenate along: strategy.gather(x, axis=0)."
            raise TypeError(expected("axis", axis, "a single int", fix))
        require_values("gather", value)
        return self._runner.run(gathering(axes[0]), gathered_arguments(value, axes[0]), {})

    @final
    @api_boundary
    def local_results(self, value: PyTree) -> tuple[PyTree, ...]:
        """Returns one tree per replica: the values of `PerReplica` leaves, copies of mirrored ones.

        With several processes, one tree per replica of this process; see `local_replica_ids`.

        >>> strategy = mirror.MirroredStrategy(["/cpu:0", "/cpu:1"])
        >>> [int(value) for value in strategy.local_results(mirror.PerReplica([1, 2]))]
        [1, 2]
        """
        if current_replica() is not None:
            require_cross_replica(self, "local_results", "The value is this replica's.")
        leaves, treedef = jax.tree.flatten(unwrapped(value), is_leaf=is_per_replica)
        columns = [self._local_values(leaf) for leaf in leaves]
        return tuple(
            jax.tree.unflatten(treedef, [column[i] for column in columns])
            for i in range(len(self.local_replica_ids))
        )

    # Type checkers see dicts of `PerReplica`, and all other batches as Any: with an overload for
    # arrays, pyright takes the batches of an untyped loader for arrays if it is in a union.
    @overload
    def distribute_dataset(
        self, dataset: Iterable[Unknown], **options: Unpack[_Even]
    ) -> DistributedDataset[Any]: ...

    @overload
    def distribute_dataset(
        self, dataset: Iterable[dict[K, A]], **options: Unpack[_Even]
    ) -> DistributedDataset[dict[K, PerReplica]]: ...

    @overload
    def distribute_dataset(
        self, dataset: Iterable[PyTree], **options: Unpack[_Even]
    ) -> DistributedDataset[Any]: ...

    @overload
    def distribute_dataset(
        self, dataset: Iterable[Unknown], **options: Unpack[_Padded]
    ) -> DistributedDataset[tuple[Any, PerReplica]]: ...

    @overload
    def distribute_dataset(
        self, dataset: Iterable[dict[K, A]], **options: Unpack[_Padded]
    ) -> DistributedDataset[tuple[dict[K, PerReplica], PerReplica]]: ...

    @overload
    def distribute_dataset(
        self, dataset: Iterable[PyTree], **options: Unpack[_Padded]
    ) -> DistributedDataset[tuple[Any, PerReplica]]: ...

    @final
    @api_boundary
    def distribute_dataset(
        self,
        dataset: Iterable[PyTree],
        *,
        input: InputMode = "global",
        remainder: Remainder = "error",
        prefetch: int = 2,
    ) -> DistributedDataset[PyTree]:
        """Splits the global batches of a dataset across the replicas, in order.

        Args:
            dataset: Iterable of global batches. A batch is a pytree of arrays whose first axis is
                the batch axis.
            input: What each process of a job reads. `"global"`: the same global batches as all
                others, of which it places the rows of its own replicas. `"local"`: its own part of
                each global batch, which is split across its own replicas. The processes agree on
                the sizes before each step, so every process must iterate. In one process, both are
                the same.
            remainder: How to handle a batch whose size is not a multiple of the number of replicas.
                `"error"` raises. `"drop"` skips the batch, unless it is the first one. `"pad"`
                yields `(batch, mask)` with every batch padded to one size, the size of the first
                batch rounded up, doubled when a later batch is larger; `mask` has shape `(B / n,)`
                on each replica and is True for real examples. With local input in several
                processes, `"error"` and `"drop"` need parts of equal size, and `"drop"` ends the
                pass with the first process that has no more batches. With `"pad"`, parts may differ
                in size, and processes in their number of batches.
            prefetch: Number of batches that a background thread loads onto the devices ahead of the
                loop. 0 disables prefetching.

        Returns:
            An iterable of batches whose leaves are `PerReplica` values.

        Raises:
            ValueError: If `input` or `remainder` is unknown, `prefetch` is negative, or the
                `shard` of `dataset` does not fit `input`. During iteration, if a batch cannot be
                split evenly, if its leaves differ in leading size, or if a leaf is a scalar. With
                local input, in all processes if the structures, dtypes or example shapes differ.
            TypeError: If `dataset` is not an iterable of batches. During iteration, if a leaf is
                not an array.
            RuntimeError: If called inside a replica or another strategy's scope. During iteration
                with local input, if another process fails, ends its loop earlier, or does not read
                within `agreement_secs` of `mirror.distributed.initialize`.

        >>> strategy = mirror.MirroredStrategy(["/cpu:0", "/cpu:1"])
        >>> (batch,) = strategy.distribute_dataset([{"x": np.arange(4)}])
        >>> batch["x"]
        PerReplica([0, 1], [2, 3])
        """
        require_cross_replica(self, "distribute_dataset", "Pass batches to the step.")
        return DistributedDataset(dataset, self._replicas, remainder, prefetch, input)

    @final
    @api_boundary
    def distribute_datasets_from_function(
        self, fn: Callable[[InputContext], Iterable[PyTree]], *, prefetch: int = 2
    ) -> PerReplicaDataset[PyTree]:
        """Distributes per-replica batches: every replica takes the next batch, without splitting.

        Args:
            fn: Function that is called once per process, with an `InputContext`, and returns an
                iterable of per-replica batches. Each step takes one for each replica of the
                process. In one process, they may differ in length.
            prefetch: Number of steps to load ahead; see `distribute_dataset`.

        Returns:
            An iterable of batches whose leaves are `PerReplica` values. If the last batches are too
            few for a step, they are dropped with a warning, in all processes.

        Raises:
            TypeError: If `fn` does not return an iterable.
            ValueError: If `prefetch` is negative. During iteration, if batches differ in structure,
                or in shape between processes.
            RuntimeError: If called inside a replica or another strategy's scope. During iteration,
                if another process fails; see `input="local"` of `distribute_dataset`.
            NotImplementedError: During iteration in several processes, if the batches of a process
                differ in length.

        >>> strategy = mirror.MirroredStrategy(["/cpu:0", "/cpu:1"])
        >>> batches = [np.zeros(1), np.ones(2)]
        >>> list(strategy.distribute_datasets_from_function(lambda context: batches))
        [PerReplica([0.], [1., 1.])]
        """
        method = "distribute_datasets_from_function"
        require_cross_replica(self, method, "Pass batches to the step.")
        require_callable("fn", fn, "Pass a function of an InputContext that returns the dataset.")
        processes = (process_count(), process_index()) if self._spans_processes else (1, 0)
        source = fn(InputContext(*processes, self.num_replicas_in_sync))
        return PerReplicaDataset(source, self._replicas, prefetch)

    @final
    @api_boundary
    def distribute_values_from_function(self, fn: Callable[[ValueContext], PyTree]) -> PyTree:
        """Creates one value per replica, on the device of the replica.

        Args:
            fn: Function that is called once per replica of this process, in order, with a
                `ValueContext`. It returns the replica's value, a pytree of arrays.

        Returns:
            A pytree with the same structure, whose leaves are `PerReplica` values.

        Raises:
            ValueError: If the replicas' values differ in structure, dtype or number of dimensions.
            TypeError: If a leaf is neither an array nor a number.
            RuntimeError: If called inside a replica or another strategy's scope.

        >>> strategy = mirror.MirroredStrategy(["/cpu:0", "/cpu:1"])
        >>> strategy.distribute_values_from_function(lambda c: c.replica_id_in_sync_group)
        PerReplica(0, 1)
        """
        method = "distribute_values_from_function"
        require_cross_replica(self, method, "Create the value in the step.")
        require_callable("fn", fn, "Pass a function of a ValueContext: lambda context: value.")
        n, ids = self.num_replicas_in_sync, self.local_replica_ids
        trees = [copied(fn(ValueContext(i, n))) for i in ids]  # `fn` may refill one buffer
        first: Any = jax.tree.structure(trees[0])
        for i, tree in zip(ids, trees, strict=True):
            if jax.tree.structure(tree) != first:
                raise ValueError(
                    f"`fn` returned {jax.tree.structure(tree)} for replica {i}, but {first} for "
                    f"replica {ids[0]}. Return the same structure for every replica."
                )
            for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
                require_fits(f"fn(replica {i}){keys(path)}", leaf)
        return jax.tree.map(lambda *values: on_local_replicas(list(values), self._replicas), *trees)

    @final
    @api_boundary
    def check_mirrored(self, tree: PyTree) -> None:
        """Checks that the replicas' copies of every array are bitwise identical.

        Every device computes a fingerprint of its copy, and the fingerprints are compared. The cost
        is about one pass over the arrays and one small collective.

        Args:
            tree: Pytree of arrays and nnx objects. Host values have a single copy and always pass.

        Raises:
            ReplicaDivergenceError: If copies differ; the message names the leaves.
            ValueError: If an array is not mirrored on this strategy's devices.
            TypeError: If a leaf is a `PerReplica`.
            RuntimeError: If called inside a replica or another strategy's scope.

        >>> strategy = mirror.MirroredStrategy(["/cpu:0", "/cpu:1"])
        >>> with strategy.scope():
        ...     w = jnp.ones(3)
        >>> strategy.check_mirrored({"w": w})
        """
        require_cross_replica(self, "check_mirrored", "Call it after the step.")
        check_mirrored(self._runner_per_device, tree)

    @final
    @api_boundary
    def verify(
        self,
        fn: StepFunction,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        *,
        rtol: float | None = None,
    ) -> checks.VerifyReport:
        """Compares a step on all replicas with the same step on one device with the whole batch.

        Both run on copies of the models, so that nothing changes. The batch of the single device is
        the concatenation of the replicas' batches. A per-replica result is compared if it has one
        row per example; otherwise, one device computes no counterpart. GPUs multiply in
        float32, not in TF32, unless JAX's configuration has a precision.

        With a fixed number of replicas, `MirroredStrategy(replicas=)`, one device also runs all
        replicas in turn, and must compute the same bits.

        Args:
            fn: Step, as for `run`. Or a Keras model that was created in this scope, compiled and
                built: what is compared is its training step.
            args: Arguments, as for `run`. Every `PerReplica` leaf must have a batch axis. Of a
                Keras model, a global batch: `(x, y)` or `(x, y, sample_weight)`.
            kwargs: Keyword arguments.
            rtol: Largest allowed difference, relative to the largest magnitude of each leaf.
                Defaults to 1e-5. For a Keras model whose layers compute in half precision, defaults
                to four times the spacing of its numbers at 1: 0.03 for bfloat16, 0.004 for float16.
                A leaf that rounding decides may differ by more, such as a gradient of zero: by ten
                times what changing each number of the state by its spacing changes on one device.

        Returns:
            A report with one row per result and per changed variable; `print` it.

        Raises:
            VerifyError: If leaves differ by more than that, or in bits with a fixed number of
                replicas; the message names them.
            ReplicaDivergenceError: As for `run`.
            RuntimeError: If called inside a replica or another strategy's scope.
            ValueError: If a `PerReplica` leaf has no batch axis. If a Keras model is not compiled
                or built, or its class overrides `make_train_function`.

        >>> strategy = mirror.MirroredStrategy(["/cpu:0", "/cpu:1"])
        >>> def step(batch):
        ...     return mirror.all_reduce("mean", batch.mean())
        >>> strategy.verify(step, (mirror.PerReplica([[1.0, 2.0], [3.0, 4.0]]),)).largest
        0.0
        """
        require_cross_replica(self, "verify", "Call it outside the step.")
        kwargs = {} if kwargs is None else kwargs
        require_call(fn, args, kwargs, "strategy.verify")
        single = self._single_runner()
        with checks.exact_products(single.replicas):
            if is_model(fn):
                return verify_model(fn, self.scope(), single.replicas, args, kwargs, rtol)
            rtol = checks.rtol_of() if rtol is None else rtol
            in_turn = self._runner_in_turn
            return checks.verify(self._runner, single, fn, args, kwargs, rtol, in_turn=in_turn)

    @final
    @api_boundary
    def inspect(
        self, fn: StepFunction, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> ProgramReport:
        """Reports which values of a step are proved to be mirrored; traces it without running it.

        For every result and variable, the report states whether it is mirrored, and why: the
        collective that mirrors it, or the argument that differs between replicas. It lists all
        collectives in order. A step that `run` would reject is reported instead of rejected.

        Args:
            fn: Step, as for `run`.
            args: Arguments, as for `run`. Models are not changed.
            kwargs: Keyword arguments.

        Returns:
            A report; `print` it.

        Raises:
            RuntimeError: If called inside a replica or another strategy's scope.
            TypeError: If `args` is not a tuple or list, or `fn` is not callable.
            ValueError: If `run` rejects the arguments.

        >>> strategy = mirror.MirroredStrategy(["/cpu:0", "/cpu:1"])
        >>> def step(x):
        ...     return x, mirror.all_reduce("sum", x)
        >>> report = strategy.inspect(step, (mirror.PerReplica([1.0, 2.0]),))
        >>> [(row.name, row.state) for row in report.results]
        [('result[0]', 'per-replica'), ('result[1]', 'mirrored')]
        """
        require_cross_replica(self, "inspect", "Call it outside the step.")
        kwargs = {} if kwargs is None else kwargs
        require_call(fn, args, kwargs, "strategy.inspect")
        return describe_program(self._runner, self._single_runner, fn, args, kwargs)

    @final
    @api_boundary
    def explain(
        self,
        fn: StepFunction,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        data: Iterable[PyTree] | None = None,
        steps: int = 20,
    ) -> Explanation:
        """Measures the time and memory of a step, and recommends what to change.

        The time of a step in a loop is split into input, transfer, dispatch, compute and
        communication, which add up to it; `mirror.Explanation` describes each part. The step runs
        about a hundred times, on copies of the models, so that nothing changes.

        Args:
            fn: Step, as for `run`.
            args: Arguments, as for `run`, but without the batch if `data` is given.
            kwargs: Keyword arguments.
            data: Iterable of batches, as returned by `distribute_dataset`. Each batch is passed as
                the last positional argument. When the data ends, it is read again. If `None`, every
                step receives the same arguments and does not wait for data.
            steps: Number of steps to measure. The step runs several times as often.

        Returns:
            An explanation with a verdict; `print` it. In several processes, every process must call
            `explain`, and gets the times that it has measured itself.

        Raises:
            ReplicaDivergenceError: As for `run`.
            ProgramMismatchError: In several processes, if `steps` differs, or as for `run`.
            RuntimeError: If called inside a replica or another strategy's scope.
            TypeError: If `steps` is not an int, or as for `run`.
            ValueError: If `steps` is below 1, if the data ends and cannot be read again, or as for
                `run`.

        >>> strategy = mirror.MirroredStrategy(["/cpu:0", "/cpu:1"])
        >>> def step(x):
        ...     return mirror.all_reduce("sum", x)
        >>> explanation = strategy.explain(step, (mirror.PerReplica([1.0, 2.0]),), steps=2)
        >>> explanation.num_collectives, sorted(explanation.shares)
        (1, ['communication', 'compute', 'dispatch', 'input', 'transfer'])
        """
        require_cross_replica(self, "explain", "Call it outside the step.")
        kwargs = {} if kwargs is None else kwargs
        require_call(fn, args, kwargs, "strategy.explain")
        require_int("steps", steps)
        replicas = copy.copy(self._replicas)
        scratch = Runner(self, replicas, self._cross_device_ops)
        runners = Runners(self._runner, scratch, self._single_runner())
        return explain(runners, fn, args, kwargs, data, steps)

    @functools.cached_property
    def _single_replica(self) -> "OneDeviceStrategy":
        single = OneDeviceStrategy(self.local_devices[0], axis_name=self._replicas.axis_name)
        single._cross_device_ops = self._cross_device_ops  # on which a step may depend
        return single

    def _single_runner(self) -> Runner:
        """The runner of one replica on the first device, for comparison."""
        return self._single_replica._runner

    @functools.cached_property
    def _runner_per_device(self) -> Runner:
        """The runner of one replica per device, as a device has one copy of an array."""
        replicas, ops = self._replicas, self._cross_device_ops
        # Other implementations may not be exact, so that they could hide a difference.
        is_exact = isinstance(ops, AllReduce | ReductionToOneDevice)
        if is_exact and replicas.replicas_per_device == 1:
            return self._runner
        if not is_exact:
            ops = AllReduce() if replicas.spans_processes else ReductionToOneDevice()
        once = ReplicaDevices(replicas.distinct, replicas.on_mesh[0], replicas.axis_name)
        twin = object.__new__(type(self))
        Strategy.__init__(twin, once, ops)
        return twin._runner

    @functools.cached_property
    def _runner_in_turn(self) -> Runner | None:
        """The runner of a fixed number of replicas on one device; None if there is no other."""
        if not self._replicas.in_turn or self._spans_processes or len(self._replicas.distinct) == 1:
            return None
        devices, axis_name = self.devices[:1] * len(self.devices), self._replicas.axis_name
        one = ReplicaDevices(devices, axis_name=axis_name, in_turn=True)
        return Runner(self, one, self._cross_device_ops)

    def _local_values(self, leaf: Any) -> Sequence[Any]:
        n = self.num_replicas_in_sync
        if is_per_replica(leaf):
            if leaf.num_replicas != n:
                raise ValueError(
                    f"{leaf!r} has {counted(leaf.num_replicas, 'value')}, but the strategy has "
                    f"{counted(n, 'replica')}. Pass a value of this strategy."
                )
            return leaf.values
        if isinstance(leaf, jax.Array) and self._replicas.is_sharded(leaf):
            leaf = self._replicas.mirror(leaf)
        if isinstance(leaf, jax.Array) and self._replicas.is_mirrored(leaf):
            copies = copies_of(leaf)
            return [copies[d] if d in copies else move(leaf, d) for d in self.local_devices]
        return [leaf] * len(self.local_replica_ids)

    if not TYPE_CHECKING:  # A type checker would accept any attribute.

        def __getattr__(self, name):
            raise unknown_attribute("strategy", self, name)

        def __enter__(self):
            raise TypeError(
                f"{type(self).__name__} is not a context manager. Enter its scope: "
                "with strategy.scope():"
            )

        def __exit__(self, *details):
            pass

    def __copy__(self) -> NoReturn:
        raise RuntimeError(
            "copy.copy(strategy): a strategy cannot be shallow-copied. Share the strategy itself, "
            "or create a second one on the same devices: copy.deepcopy(strategy)."
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        twin = memo[id(self)] = object.__new__(type(self))
        ops = copy.deepcopy(self._cross_device_ops, memo)
        replicas = copy.copy(self._replicas)
        Strategy.__init__(twin, replicas, ops, shard=self._shard)
        return twin

    def __str__(self) -> str:
        names = list(map(backend.logical_name, self.devices))
        if len(names) > _MOST_NAMES:
            names[3:-1] = ["..."]
            names.append(f"{len(self.devices)} replicas")
        return f"{type(self).__name__}({', '.join(names)})"

    def __repr__(self) -> str:
        count = counted(self.num_replicas_in_sync, "replica")
        return f"{type(self).__name__}, {count} in sync\n{device_table(self.devices)}"

    def _repr_html_(self) -> str:
        return f"<b>{type(self).__name__}</b>{device_table(self.devices)._repr_html_()}"


@set_module("mirror")
@final
class OneDeviceStrategy(Strategy):
    """Strategy with one replica on one device; values have the same types as with n replicas.

    Args:
        device: A `jax.Device`, or a name such as `"/gpu:0"`.
        axis_name: Name of the replica axis inside steps; see `MirroredStrategy`.

    Raises:
        ValueError: If `device` is not a device name, or `axis_name` is empty.
        InvalidDeviceError: If the machine does not have the device.

    >>> OneDeviceStrategy("/cpu:1").devices
    (CpuDevice(id=1),)
    """

    def __init__(self, device: DeviceLike, *, axis_name: str = REPLICA_AXIS) -> None:
        require_axis_name(axis_name)
        replicas = ReplicaDevices((canonicalize_device(device),), axis_name=axis_name)
        super().__init__(replicas, AllReduce())


def require_axis_name(name: object) -> None:
    """Rejects an `axis_name` that is not a non-empty string."""
    if not isinstance(name, str):
        fix = "Pass the name that collectives in the step use, e.g. axis_name='batch'."
        raise TypeError(expected("axis_name", name, "a string", fix))
    if not name:
        raise ValueError("`axis_name` must not be empty. Pass a name, e.g. axis_name='batch'.")
