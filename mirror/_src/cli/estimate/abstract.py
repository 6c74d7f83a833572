"""A workload whose arrays have shapes and no memory: the function that makes it is traced."""

import contextlib
import linecache
import os
import traceback
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx

from mirror._src.checks.trial import with_objects
from mirror._src.cli.bench.workload import MakeWorkload, Workload, WorkloadError
from mirror._src.data.source import DistributedDatasetBase, shape_on_devices
from mirror._src.devices.unstacked import UnstackedArrays
from mirror._src.program.trace import abstract, struct_of
from mirror._src.run.arguments import hoist_nested
from mirror._src.run.closures import named_variables
from mirror._src.run.examined import ArrayEscapedError
from mirror._src.strategy.strategy import Strategy
from mirror._src.utils.errors import describe
from mirror._src.utils.source_lines import is_users, place
from mirror._src.utils.types import StepFunction
from mirror._src.values.per_replica import per_replica

# JAX: a value was read while tracing, as a number, a flag, an index or a NumPy array.
_READS_A_VALUE = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)

_NUMPY = os.path.dirname(np.__file__) + os.sep


class AbstractWorkload(NamedTuple):
    """A step with arguments that take no memory.

    Attributes:
        step: The step.
        args: Its arguments, the batch included; host arrays that take no memory stand in for
            arrays.
        types: By the `id` of a stand-in, the type of its array.
        allocated_bytes: Bytes of the arrays on devices that were allocated nevertheless.
    """

    step: StepFunction
    args: tuple[Any, ...]
    types: dict[int, jax.ShapeDtypeStruct]
    allocated_bytes: int


def without_arrays(text: str, make: MakeWorkload, strategy: Strategy) -> AbstractWorkload:
    """Makes a workload in a trace, where an array is a shape and a dtype.

    Args:
        text: The user's name for the workload, for messages.
        make: Makes it.
        strategy: What `make` is passed.

    Raises:
        WorkloadError: If `make` reads the value of an array, allocates more memory than the machine
            has, returns replicas' values of different shapes, or returns a step that uses
            variables which are not among its arguments.
    """
    before = set(map(id, jax.live_arrays()))
    made = _Made()
    with strategy.scope(), _explained(text):
        structs = jax.eval_shape(lambda: made.take(make(strategy)))
    _require_no_captured_variables(text, made.workload.step)
    types: dict[int, jax.ShapeDtypeStruct] = {}
    args = made.arguments(structs, types)
    data = made.workload.data
    if data is not None:
        assert isinstance(data, DistributedDatasetBase), "a workload's data are distributed"
        args = (*args, jax.tree.map(lambda s: per_replica(_stand_in(s, types)), data.element_spec))
    allocated = sum(a.nbytes for a in jax.live_arrays() if id(a) not in before)
    return AbstractWorkload(made.workload.step, args, types, allocated)


class _Made:
    """What was made in the trace: its arrays are tracers, which mean nothing outside."""

    workload: Workload

    def take(self, workload: Workload) -> list[Any]:
        """Takes a workload apart; returns its tracers."""
        self.workload = workload
        objects, tree = hoist_nested(workload.args, {})
        self._leaves, self._treedef = jax.tree.flatten(tree)
        for leaf in self._leaves:
            if isinstance(leaf, UnstackedArrays):
                raise WorkloadError(
                    f"The arguments contain {describe(leaf)}, a value per replica of different "
                    "shapes. Such a step runs in stages and has no single program. Estimate it "
                    "with equal batches."
                )
        self._graphdef: Any
        self._graphdef, state = nnx.split(tuple(objects))
        held, self._state_def = jax.tree.flatten(state)
        self._num_args = len(self._leaves)
        self._leaves += held
        return [leaf for leaf in self._leaves if isinstance(leaf, jax.core.Tracer)]

    def arguments(self, structs: list[Any], types: dict[int, Any]) -> tuple[Any, ...]:
        """Puts the workload's arguments together again, with stand-ins for the arrays."""
        rest = iter(structs)
        leaves = [
            _stand_in(next(rest), types)
            if isinstance(leaf, jax.core.Tracer)
            else _known(leaf, types)
            for leaf in self._leaves
        ]
        state = jax.tree.unflatten(self._state_def, leaves[self._num_args :])
        objects = nnx.merge(self._graphdef, state)
        tree = jax.tree.unflatten(self._treedef, leaves[: self._num_args])
        args, _ = with_objects(tree, list(objects))
        return args


def _stand_in(struct: Any, types: dict[int, Any]) -> np.ndarray:
    """Returns a host array of that shape whose elements are one element in memory."""
    is_key = jax.dtypes.issubdtype(struct.dtype, jax.dtypes.extended)
    dtype = np.dtype(np.uint8) if is_key else struct.dtype
    made = np.broadcast_to(np.zeros((), dtype), struct.shape)
    types[id(made)] = struct_of(struct)
    return made


def _known(leaf: Any, types: dict[int, Any]) -> Any:
    """Returns a leaf that is no tracer; notes the type that it will have on the devices."""
    if isinstance(leaf, np.ndarray | np.generic):
        types[id(leaf)] = shape_on_devices(leaf.shape, leaf.dtype)
    elif isinstance(leaf, jax.Array):
        types[id(leaf)] = abstract(leaf)
    return leaf


@contextlib.contextmanager
def _explained(text: str) -> Iterator[None]:
    """Says in our words that a value was read, or memory allocated, and where."""
    try:
        yield
    except _READS_A_VALUE as error:
        raise WorkloadError(
            f"{text} reads the value of an array at {_line(error)}. In estimate-memory arrays have "
            "a shape and a dtype, and no values. Create what it reads with NumPy."
        ) from error
    except MemoryError as error:
        raise WorkloadError(
            f"{text} ran out of memory at {_line(error)}: {str(error).rstrip('.')}. NumPy "
            "allocates what it creates. Use jax.numpy or jax.random, whose arrays take no memory "
            "here, and np.broadcast_to(np.float32(0), shape) for a batch."
        ) from error


@contextlib.contextmanager
def escapes_explained(text: str) -> Iterator[None]:
    """Says in our words that a step uses an array of `make` that is not an argument."""
    try:
        yield
    except (jax.errors.UnexpectedTracerError, ArrayEscapedError) as error:
        known = isinstance(error, ArrayEscapedError)
        what = str(error) if known else f"an array at {_line(error)}"
        raise WorkloadError(
            f"The step uses {what} that {text} created and did not return as an argument of the "
            "step. Return it among the arguments, or create it with NumPy."
        ) from error


def _require_no_captured_variables(text: str, step: StepFunction) -> None:
    """Rejects variables that the step uses by name, and that were made in the trace.

    Raises:
        WorkloadError: If there is one.
    """
    for variable in named_variables(step):
        if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(variable.get_raw_value())):
            name = variable.get_metadata("name") or "a mirror.Variable"
            raise WorkloadError(
                f"The step uses the variable {name} that {text} created and did not return as an "
                "argument of the step. Return it among the arguments: (step, (variable, ...))."
            )


def _line(error: BaseException) -> str:
    """The user's line that an error came from."""
    frames = traceback.extract_tb(error.__traceback__)
    for frame in reversed(frames):
        if is_users(frame.filename) and not frame.filename.startswith(_NUMPY):
            code = linecache.getline(frame.filename, frame.lineno or 0).strip()
            where = place(frame.filename, frame.lineno)
            return f"{where}: {code}" if code else where
    return "an unknown line"
