"""Whether devices can add up among themselves, asked before they train together.

On some machines the all-reduce among GPUs fails, stalls or gives wrong sums, most often because the
driver promises transfers from one GPU's memory to another's that the mainboard does not carry out.
A known sum tells. What stalls in XLA cannot be stopped, so it runs in a daemon thread, which also
keeps the caller's contexts out of it: mesh, default device and transfer guard are each thread's.
"""

import functools
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from mirror._src.devices.backend import logical_name
from mirror._src.devices.replicas import ReplicaDevices
from mirror._src.utils.types import Array

_SIZES = 8, 2**20  # 32 bytes and 4 MiB: NCCL sends them in different ways, and one alone may break
_PERIOD = 4093  # a prime, so that a block which lands in another's place is seen
_POLL_SECS = 0.001

_Work: TypeAlias = Callable[[threading.Event], Any]

_lock = threading.Lock()
_faults: dict[tuple[jax.Device, ...], str | None] = {}


def all_reduce_fault(devices: tuple[jax.Device, ...], deadline_secs: float = 60.0) -> str | None:
    """What is wrong with the all-reduce among these devices; `None`: it works.

    Tested once in a process: the first answer about the same devices is kept, whatever its
    deadline was. An interrupt comes out at once, and leaves no answer.

    Args:
        devices: of one kind, each once.
        deadline_secs: how long it may take, compiling it and connecting the devices included.
    """
    with _lock:  # one test at a time: two among the same devices could wait for each other
        if devices not in _faults:
            _faults[devices] = _find_fault(devices, deadline_secs)
        return _faults[devices]


def stuck(devices: tuple[jax.Device, ...], deadline_secs: float = 10.0) -> tuple[jax.Device, ...]:
    """Those on which a small computation without the others fails or does not finish.

    An all-reduce that stalls may occupy its devices for good: then only a new process helps.

    Args:
        devices: each once. They are asked all at the same time.
        deadline_secs: how long they may take.
    """
    answers = _answers([functools.partial(_compute, device) for device in devices], deadline_secs)
    return tuple(
        device
        for device, answer in zip(devices, answers, strict=True)
        if answer is None or answer.exception() is not None
    )


def _find_fault(devices: tuple[jax.Device, ...], deadline_secs: float) -> str | None:
    (answer,) = _answers([functools.partial(_sums, devices)], deadline_secs)
    if answer is None:
        return f"did not finish within {deadline_secs:g} s"
    error = answer.exception()
    if error is not None:
        return str(error) or type(error).__name__
    for copies in answer.result():
        right = _rows(len(devices), copies[0].size).sum(axis=0)
        for device, copy in zip(devices, copies, strict=True):
            wrong = np.flatnonzero(copy != right)
            if wrong.size > 0:
                first = wrong[0]
                return (
                    f"device {logical_name(device)} got {copy[first]} where the sum is "
                    f"{right[first]} (element {first} of {copy.size})"
                )
    return None


def _rows(count: int, size: int) -> np.ndarray:
    """What each device adds. Whole numbers: in float32 their sum is exact, in whatever order."""
    first = np.arange(size, dtype=np.float32) % _PERIOD
    return first + np.arange(1, count + 1, dtype=np.float32)[:, None]


def _sums(devices: tuple[jax.Device, ...], over: threading.Event) -> list[list[np.ndarray]]:
    """For each size, the sum as each of the devices has it. One launch at a time."""
    replicas = ReplicaDevices(devices)
    found = []
    for size in _SIZES:
        add = _compiled(replicas, size)
        if over.is_set():  # what nobody waits for must not meet the caller's own launches
            break
        total = add(replicas.stack(_rows(len(devices), size)))
        copies = {shard.device: shard.data for shard in total.addressable_shards}
        found.append([_fetch(copies[device], over) for device in devices])
    return found


def _compiled(replicas: ReplicaDevices, size: int) -> jax.stages.Compiled:
    """A sum over an axis that lies on all the devices, wanted on all of them: an all-reduce."""
    rows = jax.ShapeDtypeStruct((len(replicas), size), jnp.float32, sharding=replicas.stacked)
    add = jax.jit(functools.partial(jnp.sum, axis=0), out_shardings=replicas.mirrored)
    return add.lower(rows).compile()


def _compute(device: jax.Device, over: threading.Event) -> None:
    one = ReplicaDevices((device,)).mirror(np.ones(8, np.float32))
    _fetch(jax.jit(jnp.negative)(one), over)


def _fetch(array: Array, over: threading.Event) -> np.ndarray:
    """The array on the host, as soon as it is there.

    It is polled for, so that the thread ends with the wait for it: one that XLA wakes while the
    interpreter is taken down ends the process with SIGABRT (Python 3.11, 3.12). `is_ready` is not
    declared by `jax.Array` (JAX 0.10.2 to 0.12.0.1); without it the thread blocks.
    """
    is_ready = getattr(array, "is_ready", lambda: True)
    while not is_ready():
        if over.wait(_POLL_SECS):
            raise TimeoutError("nobody waits for it any more")
    return np.asarray(array)  # host sync


def _answers(works: Iterable[_Work], deadline_secs: float) -> list["Future[Any] | None"]:
    """What becomes of each, in a thread of its own; `None` where it is not done at the deadline.

    Args:
        works: called with an event that is set when nobody waits for them any more.
        deadline_secs: for all of them together.
    """
    over = threading.Event()
    answers: list[Future[Any]] = []
    try:
        for work in works:
            answers.append(Future())
            arguments = (work, over, answers[-1])
            threading.Thread(target=_run, args=arguments, name="selftest", daemon=True).start()
        done = wait(answers, timeout=deadline_secs).done
    finally:
        over.set()
    return [answer if answer in done else None for answer in answers]


def _run(work: _Work, over: threading.Event, answer: "Future[Any]") -> None:
    """Runs the work undisturbed by what `jax.config` says for all threads."""
    try:
        with jax.transfer_guard("allow"), jax.disable_jit(False), jax.debug_nans(False):
            answer.set_result(work(over))
    except Exception as error:
        answer.set_exception(error)
