"""`mirror estimate-memory`: estimates the bytes per device of a step without executing it."""

import argparse
import contextlib
import linecache
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from flax import nnx

from mirror._src.base import interrupts
from mirror._src.base.errors import counted, describe
from mirror._src.base.terminal import Report, Table
from mirror._src.base.tracebacks import is_users, place
from mirror._src.base.types import StepFunction
from mirror._src.data.source import DistributedDatasetBase
from mirror._src.devices import backend
from mirror._src.devices.described import GpuCompilerError, described_gpus
from mirror._src.devices.transfer import UnstackedArrays
from mirror._src.engine.all_reduce import AllReduce
from mirror._src.engine.arguments import hoist_nested
from mirror._src.engine.closures import STORED, reachable
from mirror._src.engine.per_replica import per_replica
from mirror._src.engine.program import ArrayEscapedError, StandIn
from mirror._src.engine.variable import Variable
from mirror._src.inspection.measurement import with_objects
from mirror._src.inspection.memory import MemoryReport, memory_report, memory_table
from mirror._src.jaxprs.trace import struct_of
from mirror._src.strategy.mirrored import MirroredStrategy
from mirror._src.strategy.strategy import Strategy
from mirror._src.tools.common import (
    HOST_COUNTS,
    force_host_devices,
    print_report,
    report_step_failure,
    require_few_replicas,
    too_few_devices,
)
from mirror._src.tools.options import USAGE_ERROR, OptionError, report_error
from mirror._src.tools.workload import MakeWorkload, WorkloadError, workload_of

# Raised by JAX if a value is read while tracing: as a number, a flag, an index or a NumPy array.
_VALUE_READ_ERRORS = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)

_NUMPY = os.path.dirname(np.__file__) + os.sep
_GPU_COUNTS = (1, 8)


def without_arrays(
    text: str, make: MakeWorkload, strategy: Strategy
) -> tuple[StepFunction, tuple[Any, ...]]:
    """Makes a workload inside a trace, where an array is only a shape and a dtype.

    Args:
        text: The user's name for the workload, for messages.
        make: Makes the workload of a strategy.
        strategy: The argument of `make`.

    Returns:
        The step, and its arguments with the batch, with a `StandIn` for each array.

    Raises:
        WorkloadError: If `make` reads the value of an array, allocates more memory than the machine
            has, returns per-replica values of different shapes, or returns a step that uses
            variables which are not among its arguments.
    """
    made: list[Any] = []

    def in_trace() -> list[Any]:
        """Makes the workload; returns its tracers, which are useless outside."""
        workload = make(strategy)
        objects, tree = hoist_nested(workload.args, {})
        graphdef, state = nnx.split(tuple(objects))
        leaves, treedef = jax.tree.flatten((tree, state))
        for leaf in leaves:
            if isinstance(leaf, UnstackedArrays):
                raise WorkloadError(
                    f"The arguments contain {describe(leaf)}, whose values do not form one "
                    "array. Pass values of equal shape, on devices of one type."
                )
        made.extend((workload, graphdef, leaves, treedef))
        return [leaf for leaf in leaves if isinstance(leaf, jax.core.Tracer)]

    with strategy.scope(), _explained(text):
        structs = iter(jax.eval_shape(in_trace))
    (step, _, data), graphdef, leaves, treedef = made
    _require_no_captured_variables(text, step)
    tree, state = treedef.unflatten(
        _stand_in(next(structs)) if isinstance(leaf, jax.core.Tracer) else leaf for leaf in leaves
    )
    args, _ = with_objects(tree, list(nnx.merge(graphdef, state)))
    if data is not None:
        assert isinstance(data, DistributedDatasetBase), "a workload's data are distributed"
        args = (*args, jax.tree.map(lambda s: per_replica(_stand_in(s)), data.element_spec))
    return step, args


def _stand_in(struct: Any) -> StandIn:
    """Returns a host array of the same shape whose elements share one element of memory."""
    is_key = jax.dtypes.issubdtype(struct.dtype, jax.dtypes.extended)
    dtype = np.dtype(np.uint8) if is_key else struct.dtype
    array = np.broadcast_to(np.zeros((), dtype), struct.shape).view(StandIn)
    array.declared = struct_of(struct)
    return array


@contextlib.contextmanager
def _explained(text: str) -> Iterator[None]:
    """Context manager that explains where a value was read or memory was exhausted."""
    try:
        yield
    except _VALUE_READ_ERRORS as error:
        raise WorkloadError(
            f"{text} reads the value of an array at {_line(error)}. In estimate-memory, arrays "
            "have a shape and a dtype but no values. Create values that are read with NumPy."
        ) from error
    except MemoryError as error:
        raise WorkloadError(
            f"{text} ran out of memory at {_line(error)}: {str(error).rstrip('.')}. NumPy "
            "allocates its arrays. Use jax.numpy or jax.random, whose arrays take no memory here, "
            "and np.broadcast_to(np.float32(0), shape) for a batch."
        ) from error


@contextlib.contextmanager
def escapes_explained(text: str) -> Iterator[None]:
    """Context manager that explains which captured array must become an argument."""
    try:
        yield
    except (jax.errors.UnexpectedTracerError, ValueError) as error:
        if isinstance(error, ArrayEscapedError):
            what = str(error)
        elif STORED in str(error):
            what = str(error).partition(" uses ")[2].partition(f", {STORED}")[0]
        elif isinstance(error, ValueError):
            raise
        else:
            what = f"an array at {_line(error)}"
        raise WorkloadError(
            f"The step captures {what}, which {text} created but did not return as an argument. "
            "Return it with the arguments, or create it with NumPy."
        ) from error


def _require_no_captured_variables(text: str, step: StepFunction) -> None:
    """Rejects variables that the step captures by name and that were created in the trace.

    Raises:
        WorkloadError: If the step captures such a variable.
    """
    for _, variable in reachable(step):
        if not isinstance(variable, Variable):
            continue
        if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(variable.get_raw_value())):
            name = variable.get_metadata("name") or "a mirror.Variable"
            raise WorkloadError(
                f"The step captures the variable {name}, which {text} created but did not return "
                "as an argument. Return it with the arguments: (step, (variable, ...))."
            )


def _line(error: BaseException) -> str:
    """Returns the user's line that raised an error."""
    frames = traceback.extract_tb(error.__traceback__)
    for frame in reversed(frames):
        if is_users(frame.filename) and not frame.filename.startswith(_NUMPY):
            code = linecache.getline(frame.filename, frame.lineno or 0).strip()
            where = place(frame.filename, frame.lineno)
            return f"{where}: {code}" if code else where
    return "an unknown line"


@dataclass(frozen=True, repr=False)
class Estimate(Report):
    """Bytes per device of a step that was not executed.

    Attributes:
        step: Name of the step.
        weak: Whether the batch is the same per replica, rather than in total.
        reports: One report per number of devices, in increasing order.
    """

    step: str
    weak: bool
    reports: tuple[MemoryReport, ...]

    @property
    def heading(self) -> str:
        """One line that says what was estimated."""
        batch = "the same batch per replica" if self.weak else "the same global batch"
        return f"{self.step}: estimated bytes per device, {batch}; nothing was executed"

    @property
    def table(self) -> Table:
        """One row per number of devices."""
        return memory_table(self.reports)

    @property
    def notes(self) -> list[str]:
        """Sentences that explain the figures."""
        notes = list(dict.fromkeys(note for report in self.reports for note in report.notes[:2]))
        notes += self.reports[-1].notes[2:]
        notes.append(
            "The peak estimate is the sum of all rows, an upper bound: not all arrays are alive at "
            "the same time."
        )
        return notes

    def _parts(self) -> list[Table | list[str] | str]:
        last = self.reports[-1]
        on = counted(len(last.devices), "device")
        return [self.table, f"on {on}:\n{last.table}", [last.advice], self.notes]

    def to_dict(self) -> dict[str, Any]:
        """Returns the estimate as numbers, text and lists, for JSON."""
        return {
            "step": self.step,
            "scaling": "weak" if self.weak else "strong",
            "jax": jax.__version__,
            "rows": [report.to_dict() for report in self.reports],
            "notes": self.notes,
        }


def estimate(
    text: str, make: MakeWorkload, strategy: Strategy, donate_argnums: Sequence[int] = ()
) -> MemoryReport:
    """Returns the bytes per device of a workload on the devices of a strategy; executes nothing.

    Args:
        text: The user's name for the workload, for messages.
        make: Makes the workload; see `workload_of`.
        strategy: The step is compiled for its devices; no array is placed on them.
        donate_argnums: As in `strategy.run`.

    Raises:
        OptionError: If a donated argument does not exist.
        WorkloadError: If `make` or its step reads the value of an array.
        ReplicaDivergenceError: If `strategy.run` would raise it.
    """
    step, args = without_arrays(text, make, strategy)
    if wrong := [i for i in donate_argnums if i >= len(args)]:
        raise OptionError(
            f"--donate {wrong[0]}: the step of {text} has {counted(len(args), 'argument')}, which "
            "are counted from 0."
        )
    with escapes_explained(text):
        examined = strategy._runner.examined_without_arrays(step, args, tuple(donate_argnums))
    return memory_report(examined, strategy._replicas)


def run(parsed: argparse.Namespace) -> int:
    """Runs the command; returns the exit status."""
    try:
        strategies = _strategies(parsed)
        make = workload_of(parsed.step, parsed.batch_size, parsed.weak)
        reports = []
        for strategy in strategies:
            interrupts.check()
            kind = f"{parsed.gpu} GPU" if parsed.gpu else "device"
            on = counted(len(dict.fromkeys(strategy.devices)), kind)
            print(f"compiling {parsed.step} for {on}", file=sys.stderr, flush=True)
            reports.append(estimate(parsed.step, make, strategy, parsed.donate))
    except (OptionError, WorkloadError, GpuCompilerError) as error:
        return report_error("estimate-memory", str(error), USAGE_ERROR)
    except Exception as error:
        return report_step_failure("estimate-memory", parsed.step, error)
    print_report(Estimate(parsed.step, parsed.weak, tuple(reports)), as_json=parsed.json)
    return 0


def _strategies(parsed: argparse.Namespace) -> list[MirroredStrategy]:
    """Returns a strategy per number of devices.

    Raises:
        OptionError: If there are not enough host devices because their number is fixed, or too
            many replicas.
        GpuCompilerError: If this machine cannot compile for the model `gpu`.
    """
    wanted, gpu = parsed.devices, parsed.gpu
    # The default cross-device ops would run a test of the all-reduce on accelerators.
    options = {"replicas_per_device": parsed.replicas_per_device, "shard": parsed.shard}
    each = _found(wanted) if gpu is None else _described(gpu, wanted)
    require_few_replicas(max(map(len, each)), parsed.replicas_per_device)
    return [MirroredStrategy(devices, AllReduce(), **options) for devices in each]


def _described(gpu: str, wanted: tuple[int, ...] | None) -> list[tuple[jax.Device, ...]]:
    """Returns the devices per number of GPUs of a model, which need not exist.

    Raises:
        GpuCompilerError: If this machine cannot compile for the model.
    """
    if not backend.started():  # JAX would start the real GPUs, or log an error
        jax.config.update("jax_platforms", "cpu")
    return [described_gpus(gpu, count) for count in wanted or _GPU_COUNTS]


def _found(wanted: tuple[int, ...] | None) -> list[tuple[jax.Device, ...]]:
    """Returns the devices per number of devices: accelerators if there are enough, else CPUs.

    Raises:
        OptionError: If there are not enough host devices because their number is fixed.
    """
    fixed_by = force_host_devices(max(wanted or HOST_COUNTS))
    devices = backend.default_devices()
    if wanted is None:
        is_on_host = backend.type_of(devices[0]) == "CPU"
        wanted = HOST_COUNTS if is_on_host else tuple(sorted({1, len(devices)}))
        wanted = tuple(count for count in wanted if count <= len(devices))
    host = backend.devices_of_type("CPU")
    if max(wanted) > max(len(devices), len(host)):
        raise too_few_devices("estimate-memory", ",".join(map(str, wanted)), host, fixed_by)
    return [(devices if count <= len(devices) else host)[:count] for count in wanted]
