"""Messages between the processes of a job, through JAX's coordination service.

No collective is used, so that processes which run different programs can say so.

The only module that uses `jax._src.distributed`: JAX has no public key-value store (0.10.2 to
0.12.0.1), and Orbax uses the same one. `tests/cluster/test_start.py` fails if it is gone.
"""

import contextlib
import ctypes
import time
from collections.abc import Mapping
from typing import Any

import jax
from jax._src import distributed

_POLL_SECS = 0.5  # Python handles Ctrl-C only between two requests
_THREAD_POLL_SECS = 60.0  # and only in the main thread
_abandoned: list[Any] = []

stop: Exception | None = None
"""An error of the job, which `get` raises instead of waiting for other processes."""


def is_initialized() -> bool:
    """Whether this process belongs to a job of several processes, or of a declared one."""
    return bool(jax.distributed.is_initialized())


def process_index() -> int:
    """Returns the index of this process, from 0; 0 without a job. Does not start the backend.

    >>> process_index()
    0
    """
    return int(distributed.global_state.process_id or 0) if is_initialized() else 0


def process_count() -> int:
    """Returns the number of processes of the job; 1 without a job. Does not start the backend.

    >>> process_count()
    1
    """
    return int(distributed.global_state.num_processes or 1) if is_initialized() else 1


def is_chief() -> bool:
    """Whether this is process 0, which writes files and logs.

    >>> is_chief()
    True
    """
    return process_index() == 0


def set_default(key: str, text: str) -> None:
    """Stores a text under a key, unless another process has been faster."""
    with contextlib.suppress(jax.errors.JaxRuntimeError):
        _client().key_value_set(f"mirror/{key}", text)


def set(key: str, text: str) -> None:
    """Stores a text under a key, in place of the former one.

    Raises:
        RuntimeError: If the coordinator cannot be reached.
    """
    try:
        _client().key_value_set(f"mirror/{key}", text, allow_overwrite=True)
    except jax.errors.JaxRuntimeError as error:
        raise _lost(error) from error


def get_all(directory: str) -> dict[str, str]:
    """Returns the texts under all keys of a directory, without waiting for any; keys are relative.

    Raises:
        RuntimeError: If the coordinator cannot be reached.
    """
    try:
        pairs = _client().key_value_dir_get(f"mirror/{directory}/")
    except jax.errors.JaxRuntimeError as error:
        raise _lost(error) from error
    return {key.removeprefix(f"mirror/{directory}/"): text for key, text in pairs}


def get(key: str, deadline: float, *, stops: bool = True) -> str | None:
    """Returns the text under a key, and waits for it until `time.monotonic()` is `deadline`.

    Args:
        key: The key.
        deadline: When to stop waiting, as of `time.monotonic`.
        stops: Whether to raise `stop` instead of waiting, once it is set.

    Returns:
        The text, or None if no process has posted it by then.

    Raises:
        RuntimeError: If the coordinator cannot be reached.
        Exception: `stop`, if it is set.
    """
    while True:
        left = deadline - time.monotonic()
        text = _request(key, min(left, _POLL_SECS))
        if text is not None or left <= _POLL_SECS:
            return text
        if stops:
            require_not_stopped()


def require_not_stopped(cause: Exception | None = None) -> None:
    """Raises `stop`, a new object each time, if it is set.

    Args:
        cause: The error of this process that it replaces, unless it says the same.
    """
    if stop is not None and (cause is None or cause.args != stop.args):
        raise type(stop)(*stop.args) from cause


def wait(key: str) -> str:
    """Returns the text under a key, and waits for it without limit.

    Only for threads, where Ctrl-C is not handled. Nothing but a post ends the wait.

    Raises:
        RuntimeError: If the coordinator cannot be reached.
    """
    while True:
        text = _request(key, _THREAD_POLL_SECS)
        if text is not None:
            return text


def get_many(
    directory: str,
    count: int,
    deadline: float,
    known: Mapping[int, str],
    *,
    stops: bool = True,
) -> dict[int, str]:
    """Returns the texts under the keys 0 to `count - 1` of a directory, and waits for them.

    It reads all at once, then waits for the middle one of those that are missing: if they come in
    order, each wait halves their number.

    Args:
        directory: Name of the directory.
        count: Number of keys.
        deadline: When to stop waiting, as of `time.monotonic`.
        known: The texts that need not be read.
        stops: As in `get`.

    Returns:
        The texts that have been posted by then, by number.

    Raises:
        RuntimeError: If the coordinator cannot be reached.
    """
    texts = dict(known)
    while missing := [i for i in range(count) if i not in texts]:
        if len(missing) > 1:
            texts |= _numbered(get_all(directory))
            missing = [i for i in missing if i not in texts]
            if not missing:
                break
        middle = missing[len(missing) // 2]
        text = get(f"{directory}/{middle}", deadline, stops=stops)
        if text is None:  # others may have arrived meanwhile
            return texts | _numbered(get_all(directory))
        texts[middle] = text
    return texts


def _numbered(texts: Mapping[str, str]) -> dict[int, str]:
    return {int(key): text for key, text in texts.items() if key.isdecimal()}


def _request(key: str, secs: float) -> str | None:
    """Returns the text under a key, or None if no process has posted it after some seconds."""
    try:
        millis = max(int(secs * 1000), 1)
        return str(_client().blocking_key_value_get(f"mirror/{key}", millis))
    except jax.errors.JaxRuntimeError as error:
        if "DEADLINE_EXCEEDED" not in str(error):
            raise _lost(error) from error
        return None


def delete(key: str) -> None:
    """Deletes a key, or all keys below it; the store would grow for as long as the job runs."""
    with contextlib.suppress(jax.errors.JaxRuntimeError):
        _client().key_value_delete(f"mirror/{key}")


def _lost(error: Exception) -> RuntimeError:
    return RuntimeError(
        f"Process {process_index()} lost the coordinator, process 0: {error}. Read the output of "
        "process 0, which has ended, and start all processes again."
    )


def abandon() -> None:
    """Lets this process end without the others: JAX does not wait for them in its barrier.

    The connection stays open until the process has ended, because closing it waits as well.
    """
    _abandoned.extend([distributed.global_state.client, distributed.global_state.service])
    for each in _abandoned:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(each))  # never destroyed
    distributed.global_state.client = distributed.global_state.service = None


def _client() -> Any:
    client = distributed.global_state.client
    assert client is not None  # callers have checked that there is a job
    return client
