"""Selects the executor for a strategy, and how `shard="auto"` stores the state."""

import copy
import logging
import math
from collections.abc import Callable

import jax

from mirror._src.base.errors import bytes_in_words
from mirror._src.base.naming import warn_user
from mirror._src.base.types import Shard
from mirror._src.devices import backend
from mirror._src.devices.described import memory_of
from mirror._src.devices.device_checks import all_reduce_fault, p2p_settings, unresponsive_devices
from mirror._src.devices.memory import host_memory
from mirror._src.devices.replicas import ReplicaDevices
from mirror._src.engine.all_reduce import AllReduce, ReductionToOneDevice
from mirror._src.engine.cross_device_ops import CrossDeviceOps
from mirror._src.engine.executor import Executor, MeshExecutor
from mirror._src.engine.program import StepProgram
from mirror._src.engine.staged import StagedExecutor
from mirror._src.passes.collective_rules import uses_gloo

_logger = logging.getLogger("mirror")
SLICE_BYTES = 2**16  # to gather a smaller array would cost more than it saves
_TEST_SECS = 30.0  # XLA itself ends the process if NCCL has not started after about 40 s


def choose(
    replicas: ReplicaDevices, ops: CrossDeviceOps, kept_bytes: int | None = None
) -> Executor:
    """Returns the executor for the steps of a strategy.

    Args:
        replicas: Devices of the replicas.
        ops: Implements the collectives.
        kept_bytes: Bytes of gathered weights that steps keep, as for the passes' `Settings`.

    Raises:
        ValueError: If `ops` is `AllReduce` and the devices are of several types.
        NotImplementedError: If the devices belong to several processes, and the collectives cannot
            be XLA's.
    """
    if replicas.spans_processes:
        _require_xla(replicas, ops)
    if replicas.are_mixed and isinstance(ops, AllReduce):
        raise ValueError(
            f"AllReduce cannot connect {backend.names(replicas.devices)}, which are devices of "
            "several types. Omit cross_device_ops, or pass mirror.ReductionToOneDevice()."
        )
    if replicas.are_mixed or not ops._is_compiled():
        staged = StagedExecutor(replicas, ops)
        is_mixed = replicas.are_mixed
        reason = "the devices are of several types" if is_mixed else f"cross_device_ops is {ops!r}"
        _logger.info("Using %s: %s", staged.name, reason)
        home = backend.logical_name(ops.device)
        _logger.info("Reduce to %s then broadcast to %s", home, backend.names(replicas.devices))
        return staged
    spans = replicas.spans_processes
    # With a fixed number of replicas, any number of devices runs the same program.
    pack_bytes = ops._packed_bytes(
        on_host=replicas.on_cpus if replicas.in_turn else replicas.on_host,
        spans_processes=spans and not replicas.in_turn,
    )
    executor = MeshExecutor(
        replicas,
        kept_bytes=kept_bytes,
        pack_bytes=pack_bytes if len(replicas) > 1 else 0,
        reduction=None if isinstance(ops, AllReduce) else ops._reduce_in_step,
    )
    why = {
        "jit": "single replica",
        "pmap": "one replica per device, devices of one type",
        "shard_map": "several processes" if spans else "state in slices",
        "vmap": "several replicas per device",
        "in turn": "a fixed number of replicas",
    }
    level = logging.DEBUG if executor.name in ("jit", "pmap") else logging.INFO
    _logger.log(level, "Using %s: %s", executor.name, why[executor.name])
    return executor


def slice_bytes(replicas: ReplicaDevices, ops: CrossDeviceOps, shard: Shard) -> float | None:
    """Returns the size from which mirrored state is stored in slices; see `ReplicaDevices`.

    If nothing can be, a warning says why; with one device or `"auto"`, a log entry does.
    """
    if shard == "none":
        return None
    reason = _reason_not_to_shard(replicas, ops)
    if reason:
        text = f"shard={shard!r} has no effect: {reason}"
        if shard == "auto" or len(set(replicas.devices)) == 1:
            _logger.info(text)
        else:
            text += ". Each device stores the whole state. Omit `shard`."
            warn_user(text)
        return None
    return math.inf if shard == "optimizer" else SLICE_BYTES


def _require_xla(replicas: ReplicaDevices, ops: CrossDeviceOps) -> None:
    """Rejects collectives other than XLA's for devices of several processes.

    Raises:
        NotImplementedError: If the devices are of several types, or `ops` reduces on the host.
    """
    if not replicas.are_mixed and ops._is_compiled():
        return
    found = f"cross_device_ops={ops!r} reduces on the host of one process"
    if replicas.are_mixed:
        found = f"{backend.names(replicas.devices)} are devices of several types"
    raise NotImplementedError(
        f"{found}, but the replicas are in several processes, which only XLA's collectives "
        "connect. Omit cross_device_ops, or override its reduce_stacked, and use devices of one "
        "type."
    )


def _reason_not_to_shard(replicas: ReplicaDevices, ops: CrossDeviceOps) -> str:
    """Returns why state cannot be stored in slices; empty if it can."""
    if replicas.in_turn:
        return "the number of replicas is fixed"
    if replicas.spans_processes:
        return "the replicas are in several processes"  # gloo, as below
    if replicas.are_mixed:
        return "the devices are of several types"
    if not isinstance(ops, AllReduce):
        return f"cross_device_ops is {ops!r}, not mirror.AllReduce"
    if replicas.replicas_per_device > 1:
        return "several replicas per device"
    if len(replicas) > 1 and uses_gloo(replicas):
        # jax#40830
        return "the reduce-scatter of gloo, which JAX uses in a job, returns wrong values"
    return "single replica" if len(replicas) == 1 else ""


def default_ops(devices: tuple[jax.Device, ...]) -> CrossDeviceOps:
    """Returns the default cross-device ops for these devices. Tests the all-reduce of accelerators.

    Raises:
        RuntimeError: If accelerators stop responding during the test.
    """
    distinct = tuple(dict.fromkeys(devices))
    kinds = {backend.type_of(device) for device in distinct}
    if len(kinds) > 1:
        return ReductionToOneDevice()
    # Across processes there is nothing to fall back to, and JAX itself reports a failure.
    spans_processes = len({device.process_index for device in distinct}) > 1
    if kinds == {"CPU"} or len(distinct) == 1 or spans_processes:
        return AllReduce()
    fault = all_reduce_fault(distinct, _TEST_SECS)
    if fault is None:
        return AllReduce()
    settings = " and ".join(p2p_settings())
    fix = f"If direct GPU transfers fail, set {settings} before starting Python."
    lost = unresponsive_devices(distinct)
    if lost:
        raise RuntimeError(
            f"The all-reduce across {backend.names(distinct)} failed its startup test: {fault}. "
            f"{backend.names(lost)} stopped responding. {fix} Otherwise omit these devices."
        )
    warn_user(
        f"The all-reduce across {backend.names(distinct)} failed its startup test: {fault}. "
        f"Falling back to reduction on the host, which is slower. {fix}"
    )
    return ReductionToOneDevice()


def reduce_device(ops: object) -> jax.Device | None:
    """Returns the device on which `ops` reduces; `None` if it reduces across devices."""
    if not isinstance(ops, CrossDeviceOps) or isinstance(ops, AllReduce):
        return None
    return ops.device


_USED = 0.9  # of the memory; the rest is for batches that are loaded ahead, and for gaps


def fitting(
    make: Callable[[Executor], StepProgram], replicas: ReplicaDevices, ops: CrossDeviceOps
) -> tuple[Executor, StepProgram, str]:
    """Returns an executor that stores the state so that it fits, its program, and the reason.

    Args:
        make: Returns the program of the step, compiled by an executor.
        replicas: Devices of the replicas.
        ops: Implements the collectives.
    """

    def made(slice_bytes: float | None, kept: int | None = None) -> tuple[Executor, StepProgram]:
        sliced = copy.copy(replicas)
        sliced.slice_bytes = slice_bytes
        executor = choose(sliced, ops, kept)
        return executor, make(executor)

    limit, because, of = _limit(replicas), "", ""
    if limit is None:
        return *made(None), "none, because the memory of the devices is unknown"
    ways = {"none": None, "optimizer": math.inf, "model": SLICE_BYTES}
    for way, slice_bytes in ways.items():
        executor, program = made(slice_bytes)
        count = program.compiled.peak_bytes
        if count is None:
            return executor, program, "none, because XLA does not say how much memory it needs"
        if count <= limit:
            why = f"{way}{because}; it needs {bytes_in_words(count)}"
            kept = _most_kept(program, limit - count) if way == "model" else None
            if kept is not None:
                larger, keeping = made(slice_bytes, kept)
                more = keeping.compiled.peak_bytes
                if more is not None and more <= limit:
                    why += f", and keeps {bytes_in_words(kept)} of gathered weights"
                    return larger, keeping, why
            return executor, program, why
        of = f"{bytes_in_words(count)} of {bytes_in_words(limit)}"
        because = f", because {way} needs {of} on each device"
    return executor, program, f"model, although it needs {of} on each device"


def _most_kept(program: StepProgram, room: int) -> int | None:
    """Returns how many bytes of gathered weights may fit, too. Each needs as much memory once."""
    gathers = (each for each in program.final.everywhere() if each.kind == "gather")
    sizes = {each.inputs[0]: each.outputs[0].num_bytes for each in gathers}.values()
    least = max(sizes, default=0)
    kept = min(least + room, sum(sizes))
    return kept if kept > least else None


def usable_bytes(device: jax.Device) -> int | None:
    """Returns the bytes of a device that programs may use; `None` if it does not report them."""
    memory = memory_of(device) or (device.memory_stats() or {}).get("bytes_limit")
    return None if memory is None else int(_USED * memory)


def _limit(replicas: ReplicaDevices) -> int | None:
    """Returns the bytes that a program may use on each device; `None` if they are unknown."""
    if replicas.on_cpus:  # host devices share the memory
        memory = host_memory()
        return None if memory is None else int(_USED * (memory // len(replicas.distinct)))
    limits = list(map(usable_bytes, replicas.distinct))
    return None if None in limits else min(filter(None, limits))
