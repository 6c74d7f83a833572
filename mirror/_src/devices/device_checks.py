"""Checks of the devices before they train: of their all-reduce, and of the bits that they compute.

On some machines the all-reduce across GPUs fails, stalls or returns wrong sums, for example because
the driver advertises peer-to-peer transfers that the mainboard does not perform. The test reduces
known values and compares the sum. A stall inside XLA cannot be stopped, so the test runs in a
daemon thread. The thread also shields it from the caller's mesh, default device and transfer guard,
which are per-thread.

A fixed number of replicas computes the same bits only on devices that do. One small program
computes the same values on each device of the process, by the operations of which models consist.
The digest of the results is also compared between processes.
"""

import functools
import hashlib
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mirror._src.base.naming import warn_user
from mirror._src.base.types import Array
from mirror._src.devices.backend import logical_name, names, type_of
from mirror._src.devices.replicas import ReplicaDevices

# 32 bytes and 4 MiB: NCCL uses a different protocol for each, and only one of them may be broken.
_SIZES = 8, 2**20
# 32 MiB on accelerators: XLA of JAX 0.12 reduces up to 4 MiB, and for 2 GPUs up to 16 MiB, by its
# own kernel instead of NCCL. Two operands of 4 MiB do not help: XLA joins them (JAX 0.10.2).
_LARGE = 2**23
_PERIOD = 4093  # a prime, so that a block stored at the wrong offset changes the sums
_POLL_SECS = 0.001

_Work: TypeAlias = Callable[[threading.Event], Any]

_lock = threading.Lock()
_faults: dict[tuple[jax.Device, ...], str | None] = {}


def all_reduce_fault(devices: tuple[jax.Device, ...], deadline_secs: float = 60.0) -> str | None:
    """Returns what is wrong with the all-reduce across the devices, or None if it works.

    Each tuple of devices is tested once per process; later calls return the first result,
    whatever their deadline. An interrupt is raised immediately and stores no result.

    Args:
        devices: Distinct devices of one type.
        deadline_secs: Time limit, including compilation and connecting the devices.
    """
    with _lock:  # one test at a time: two tests on the same devices could wait for each other
        if devices not in _faults:
            _faults[devices] = _find_fault(devices, deadline_secs)
        return _faults[devices]


def unresponsive_devices(
    devices: tuple[jax.Device, ...], deadline_secs: float = 10.0
) -> tuple[jax.Device, ...]:
    """Returns the devices on which a small single-device computation fails or does not finish.

    A stalled all-reduce may occupy its devices until the process ends.

    Args:
        devices: Distinct devices; all are tested at the same time.
        deadline_secs: Time limit for all devices together.
    """
    results = run_in_threads(
        [functools.partial(_compute, device) for device in devices], deadline_secs
    )
    return tuple(
        device
        for device, result in zip(devices, results, strict=True)
        if result is None or result.exception() is not None
    )


def _find_fault(devices: tuple[jax.Device, ...], deadline_secs: float) -> str | None:
    (result,) = run_in_threads([functools.partial(_sums, devices)], deadline_secs)
    if result is None:
        return f"did not finish within {deadline_secs:g} s"
    error = result.exception()
    if error is not None:
        return str(error) or type(error).__name__
    for copies in result.result():
        expected = known_rows(len(devices), copies[0].size).sum(axis=0)
        for device, copy in zip(devices, copies, strict=True):
            fault = wrong_sum(device, copy, expected)
            if fault is not None:
                return fault
    return None


def wrong_sum(device: jax.Device, copy: np.ndarray, expected: np.ndarray) -> str | None:
    """Returns which element of the sum on a device is wrong; None if all are right."""
    wrong = np.flatnonzero(copy != expected)
    if not wrong.size:
        return None
    first = wrong[0]
    return (
        f"device {logical_name(device)} received {copy[first]} instead of the sum "
        f"{expected[first]} (element {first} of {copy.size})"
    )


def known_rows(count: int, size: int) -> np.ndarray:
    """Returns each device's operand: integers, whose float32 sum is exact in any order."""
    first = np.arange(size, dtype=np.float32) % _PERIOD
    return first + np.arange(1, count + 1, dtype=np.float32)[:, None]


def _sums(devices: tuple[jax.Device, ...], canceled: threading.Event) -> list[list[np.ndarray]]:
    """Returns, for each size, the sum as stored on each device. Runs one launch at a time."""
    replicas = ReplicaDevices(devices)
    sums = []
    on_accelerators = type_of(devices[0]) != "CPU"
    for size in (*_SIZES, _LARGE) if on_accelerators else _SIZES:
        add = _compiled(replicas, size)
        if canceled.is_set():  # an abandoned test must not collide with the caller's launches
            break
        total = add(replicas.stack(known_rows(len(devices), size)))
        copies = {shard.device: shard.data for shard in total.addressable_shards}
        sums.append([_fetch(copies[device], canceled) for device in devices])
    return sums


def _compiled(replicas: ReplicaDevices, size: int) -> jax.stages.Compiled:
    """Compiles a sum over the sharded axis with a mirrored result, which XLA does by all-reduce."""
    rows = jax.ShapeDtypeStruct((len(replicas), size), jnp.float32, sharding=replicas.stacked)
    add = jax.jit(functools.partial(jnp.sum, axis=0), out_shardings=replicas.mirrored)
    return add.lower(rows).compile()


def p2p_settings() -> list[str]:
    """Returns the environment variables that turn direct transfers between GPUs off."""
    settings = ["NCCL_P2P_DISABLE=1"]
    # From JAX 0.12 on, XLA also reads the memory of other GPUs without NCCL. Before, XLA ends the
    # process because of the unknown flag.
    if jax.__version_info__ >= (0, 12):
        settings.append("XLA_FLAGS=--xla_gpu_experimental_use_collective_kernels=")
    return settings


def _compute(device: jax.Device, canceled: threading.Event) -> None:
    operand = ReplicaDevices((device,)).mirror(np.ones(8, np.float32))
    _fetch(jax.jit(jnp.negative)(operand), canceled)


def _fetch(array: Array, canceled: threading.Event) -> np.ndarray:
    """Copies the array to the host as soon as it is ready.

    Polls instead of blocking, so that the thread ends when the test is canceled: a thread that XLA
    wakes during interpreter shutdown aborts the process (SIGABRT; Python 3.11, 3.12). `is_ready` is
    not declared by `jax.Array` (JAX 0.10.2 to 0.12.0.1); without it the thread blocks.
    """
    is_ready = getattr(array, "is_ready", lambda: True)
    while not is_ready():
        if canceled.wait(_POLL_SECS):
            raise TimeoutError("the test was canceled")
    return np.asarray(array)  # host sync


def run_in_threads(works: Iterable[_Work], deadline_secs: float) -> list["Future[Any] | None"]:
    """Runs each function in its own thread; returns None for those that miss the deadline.

    Args:
        works: Functions of an event, which is set once their results are no longer needed.
        deadline_secs: Time limit for all of them together.
    """
    canceled = threading.Event()
    results: list[Future[Any]] = []
    try:
        for work in works:
            results.append(Future())
            arguments = (work, canceled, results[-1])
            threading.Thread(
                target=_run, args=arguments, name="collective_check", daemon=True
            ).start()
        done = wait(results, timeout=deadline_secs).done
    finally:
        canceled.set()
    return [result if result in done else None for result in results]


def _run(work: _Work, canceled: threading.Event, result: "Future[Any]") -> None:
    """Runs the function with the defaults of options that `jax.config` sets for all threads."""
    try:
        with jax.transfer_guard("allow"), jax.disable_jit(False), jax.debug_nans(False):
            result.set_result(work(canceled))
    except Exception as error:
        result.set_exception(error)


_AXIS = "devices"
# Otherwise each process searches for the fastest kernels, and gradients are added by atomics.
OPTIONS_ON_GPUS = {"xla_gpu_deterministic_ops": True}


def computed(x: Array) -> Array:
    """Returns sums of products and elementary functions of a square array."""
    half = x.astype(jnp.bfloat16)
    y = jnp.tanh(x @ x) + jnp.exp(-jnp.abs((half @ half).astype(x.dtype)))
    return jnp.sum(y * jax.lax.rsqrt(1 + x**2), 0)


@functools.cache
def digest_of(devices: tuple[jax.Device, ...]) -> str:
    """Returns the digest of what the first device computes; warns if another one differs."""
    mesh = Mesh(np.asarray(devices), (_AXIS,))
    rows = PartitionSpec(_AXIS)
    of_device = lambda x: computed(x[0])[None]  # noqa: E731
    fn = jax.shard_map(of_device, mesh=mesh, in_specs=rows, out_specs=rows)
    x = np.random.RandomState(0).randn(1, 128, 128).astype(np.float32)
    shape, sharding = (len(devices), *x.shape[1:]), NamedSharding(mesh, rows)
    # In a job of several processes, `jit` rejects a NumPy array.
    everyone = jax.make_array_from_callback(shape, sharding, lambda _: x)
    options = OPTIONS_ON_GPUS if type_of(devices[0]) == "GPU" else None
    first, *others = np.asarray(jax.jit(fn, compiler_options=options)(everyone))
    wrong = [
        d for d, row in zip(devices[1:], others, strict=True) if row.tobytes() != first.tobytes()
    ]
    if wrong:
        warn_user(
            f"{names(wrong)} computes other bits than {names(devices[:1])}, so that replicas= does "
            "not give the same bits on any number of devices. Use devices of one model; if they "
            "are, test their memory."
        )
    return hashlib.sha256(first.tobytes()).hexdigest()[:8]
