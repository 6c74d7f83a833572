"""`CheckpointStore`: writes checkpoints to a directory in the background, and deletes old ones.

One process at a time writes. Its lock is a POSIX record lock of a file in the directory. The
operating system releases it when the process ends in any way, and a forked process does not inherit
it. It works on NFS; where a file system has no locks, and in object stores, nothing protects the
directory.
"""

import contextlib
import errno
import json
import os
import socket
import stat
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Self, final

from mirror._src.base.errors import closing
from mirror._src.base.interrupts import say
from mirror._src.devices.memory import host_memory
from mirror._src.training.checkpoints import files
from mirror._src.training.checkpoints.directory import (
    LOCK,
    Best,
    absolute,
    best_of,
    checkpoints_in,
    format_list,
    in_order_of_writing,
    next_written,
    path_of,
    remove_leftovers,
    step_of,
)
from mirror._src.training.paths import is_remote, put, shorten

try:
    import fcntl
except ModuleNotFoundError:  # Windows
    fcntl = None  # type: ignore[assignment]

_WITHOUT_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
_SECS_TO_SAY = 0.5


@final
class CheckpointStore:
    """A directory to which one process at a time writes, and others may read.

    Args:
        directory: Path of the directory, which is created if necessary; `~` is expanded. Or a URL
            of an object store.
        keep_last: Number of checkpoints to keep, including the one just written. None keeps all.
        keep_best: Name of a metric, and whether its best value is the `"min"` or the `"max"`. The
            best checkpoint is kept as well.
        asynchronous: Whether to write files in the background, one checkpoint at a time.
        found: By directory, the `written` of the checkpoints that it contained when the training
            began, which may be replaced. The store adds a directory that is missing.

    Raises:
        BlockingIOError: If another process writes to the directory; the message names it.
        OSError: If the directory is not writable.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        keep_last: int | None = None,
        keep_best: Best | None = None,
        asynchronous: bool = True,
        found: dict[Path, set[int]] | None = None,
    ) -> None:
        self.directory = absolute(directory)
        self._keep_last, self._keep_best, self._asynchronous = keep_last, keep_best, asynchronous
        self._writing: _Write | None = None
        self._closed = False
        self._lock = _make_ready(self.directory)
        self._release = weakref.finalize(self, self._lock.release)
        found = {} if found is None else found
        if self.directory not in found:
            headers = map(_header, checkpoints_in(self.directory).values())
            found[self.directory] = {header.get("written", 0) for header in headers if header}
        self._found = found[self.directory]

    def save(
        self,
        step: int,
        arrays: Mapping[str, Any],
        position: Mapping[str, Any],
        metrics: Mapping[str, float] | None = None,
    ) -> None:
        """Copies the arrays to the host, and writes them as the checkpoint for a step.

        Arrays that would take more than a quarter of the host's memory are copied one at a time,
        and written before it returns, also with `asynchronous`.

        An existing checkpoint for the step is replaced; at any moment, one of the two can be
        loaded. If the arrays are the same and `metrics` is None, the existing metrics are kept.

        Args:
            step: The step.
            arrays: Arrays by name: `jax.Array`, of which one replica is read, NumPy arrays, numbers
                and PRNG keys.
            position: A dict of JSON values.
            metrics: Metrics by name, for `keep_best`.

        Raises:
            OSError: If this checkpoint could not be written or, with `asynchronous`, the previous
                one. In the second case this one is not written; the next call tries again.
            RuntimeError: If the store is closed.
            TypeError: If an array is not one, or the position is not JSON.
        """
        if self._closed:
            raise RuntimeError(
                f"save({step}) was called after close(). Open a new CheckpointStore."
            )
        self.wait()
        path = path_of(self.directory, step)
        if not is_remote(path) and path.exists() and step_of(path) is None:
            raise FileExistsError(
                f"{path} already exists and is not a file. Move it away, or save to another "
                "directory."
            )
        metadata = {
            "format": files.FORMAT,
            "position": _as_json("position", position),
            "metrics": dict(metrics or {}),
            "keep_best": self._keep_best,
        }
        files.require_arrays(arrays)
        copies = _may_copy(arrays)
        values = files.host_copies(arrays) if copies else arrays
        self._writing = _Write(step, lambda: self._write(step, path, values, metadata))
        self._writing.start()
        if not copies or not self._asynchronous:
            self.wait()

    def update(self, path: Path, position: Mapping[str, Any]) -> None:
        """Replaces the position in a checkpoint for the same step.

        Raises:
            OSError: If it could not be written.
        """
        position = _as_json("position", position)
        self._writing = _Write(position["step"], lambda: self._update(path, position))
        self._writing.start()
        self.wait()

    def _update(self, path: Path, position: Mapping[str, Any]) -> None:
        with self._lock.mutex:
            self._require_replaceable([path], position)
            header = files.read_metadata(path)
            old = header["position"]
            new = {**position, "bits": old["bits"], "weak": old["weak"]}  # of its arrays
            if new != old:
                files.write_again(path, header | {"position": new})

    def wait(self) -> None:
        """Waits for pending writes; raises `OSError` if they failed.

        Ctrl-C, or another exception of a signal handler, is raised when the write is complete.
        """
        writing = self._writing  # two threads may wait
        if writing is None:
            return
        interrupt, error = writing.complete(), writing.error
        self._writing = None
        failure = error and OSError(
            f"Could not write the checkpoint for step {writing.step} to {self.directory}: "
            f"{shorten(error)}. Existing checkpoints are intact{self._existing()}. Free space, or "
            "save to another directory."
        )
        if interrupt is not None:
            if failure is not None:
                interrupt.add_note(str(failure))
            raise interrupt
        if failure is not None:
            raise failure from error

    def _existing(self) -> str:
        try:
            return f": {format_list(self.steps())}"
        except OSError:  # of a store that cannot be reached
            return ""

    def close(self) -> None:
        """Waits for pending writes, and rejects further calls of `save`."""
        self._closed = True
        try:
            self.wait()
        finally:
            self._release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: Any
    ) -> None:
        closing("closing the CheckpointStore", self.close).__exit__(kind, error, trace)

    def steps(self) -> tuple[int, ...]:
        """Returns the steps of all complete checkpoints, in order."""
        return tuple(checkpoints_in(self.directory))

    def latest(self) -> int | None:
        """Returns the step that was written last, or None."""
        paths = checkpoints_in(self.directory)
        return next(reversed(in_order_of_writing(paths)), None)

    def best(self) -> int | None:
        """Returns the step that `keep_best` keeps, or None if no checkpoint has the metric."""
        if self._keep_best is None:
            return None
        headers = {step: _header(path) for step, path in checkpoints_in(self.directory).items()}
        return best_of({s: header for s, header in headers.items() if header}, self._keep_best)

    def _require_replaceable(self, paths: Iterable[Path], position: Mapping[str, Any]) -> None:
        """Rejects to replace or delete what another training has written since this one began.

        Raises:
            FileExistsError: If one of the files is such a checkpoint.
        """
        for path in paths:
            header = _header(path) or {"position": position}  # damaged, or deleted meanwhile
            is_mine = header["position"].get("training") == position.get("training")
            if not is_mine and header.get("written", 0) not in self._found:
                raise FileExistsError(
                    f"another training has written {path.name} since this one began, which this "
                    "save would replace or delete"
                )

    def _write(
        self,
        step: int,
        path: Path,
        arrays: Mapping[str, Any],
        metadata: dict[str, Any],
    ) -> None:
        metadata["arrays"] = files.entries_of(arrays)
        with self._lock.mutex:
            self._require_replaceable([path], metadata["position"])
            metadata["written"] = next_written(self.directory)
            files.write(path, arrays, metadata | _kept_metrics(path, metadata))
            if self._keep_last is None:
                return
            paths = checkpoints_in(self.directory)
            kept = {step, self.best(), *in_order_of_writing(paths)[-self._keep_last :]}
            others = [paths[other] for other in paths.keys() - kept]
            self._require_replaceable(others, metadata["position"])
            for other in others:
                other.unlink()


@final
class _Write(threading.Thread):
    """Writes one checkpoint in the background. A daemon: a disk may never answer."""

    def __init__(self, step: int, write: Callable[[], None]) -> None:
        super().__init__(name="mirror checkpoint", daemon=True)
        self.step = step
        self.error: BaseException | None = None
        self._write = write
        self._is_done = threading.Event()

    def run(self) -> None:
        try:
            self._write()
        except BaseException as error:
            self.error = error
        finally:
            self._is_done.set()

    def complete(self) -> BaseException | None:
        """Waits for the end; returns the first exception that a signal handler raised meanwhile."""
        interrupt, has_said = None, False
        while self.is_alive():
            try:
                limit = None if interrupt is None or has_said else _SECS_TO_SAY
                if self._is_done.wait(limit):
                    self.join()
                elif not has_said:
                    has_said = True
                    say(
                        f"\nInterrupted: completing the checkpoint for step {self.step}. Press "
                        "Ctrl-\\ to end the process without it."
                    )
            except BaseException as error:
                interrupt = interrupt or error
        return interrupt


@final
class WriterLock:
    """The right of this process to write to a directory, shared by its stores.

    Attributes:
        mutex: Lock of the threads of this process, to hold while files change.
    """

    _held: "dict[tuple[int, Path], WriterLock]" = {}
    _registry = threading.RLock()  # the garbage collector may release a store in `acquire`

    def __init__(self, directory: Path) -> None:
        self.mutex = threading.RLock()
        self._key = os.getpid(), directory
        self._users = 0
        self._descriptor: int | None = None
        if fcntl is not None and not is_remote(directory):
            self._descriptor = _locked(directory / LOCK)

    @classmethod
    def acquire(cls, directory: Path) -> "WriterLock":
        """Returns the lock of a directory, which each caller releases once.

        Raises:
            BlockingIOError: If another process holds it; the message names the process.
            OSError: If the directory is not writable.
        """
        with cls._registry:
            key = os.getpid(), directory  # a forked process must acquire its own
            lock = cls._held.get(key)
            if lock is None:
                lock = cls._held[key] = cls(directory)
            lock._users += 1
            return lock

    def release(self) -> None:
        """Ends the use by one caller; the last one unlocks the directory."""
        with self._registry:
            self._users -= 1
            if self._users or self._held.pop(self._key, None) is None:
                return
            if self._descriptor is not None and self._key[0] == os.getpid():
                with contextlib.suppress(OSError):
                    (self._key[1] / LOCK).unlink()
                os.close(self._descriptor)  # and with it the lock


def _opened(file: Path) -> int:
    """Opens the file; never what a link points to, which would be overwritten.

    Raises:
        FileExistsError: If something else has its name. To read a named pipe would take forever.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        descriptor = os.open(file, flags, 0o666)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.EISDIR, errno.ENXIO):  # a link, a socket
            raise
        raise _not_a_file(file) from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise _not_a_file(file)
    return descriptor


def _not_a_file(file: Path) -> FileExistsError:
    return FileExistsError(f"{file} is not a regular file; delete it")


def _locked(file: Path) -> int | None:
    """Creates and locks a file; returns its descriptor, or None where locks are not supported."""
    while True:
        descriptor = _opened(file)
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not _is_at(file, descriptor):  # deleted by its holder in the meantime
                os.close(descriptor)
                continue
            os.ftruncate(descriptor, 0)
            os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode())
        except OSError as error:
            holder = _text(descriptor)
            os.close(descriptor)
            if error.errno in _WITHOUT_LOCKS:
                return None
            if error.errno in (errno.EACCES, errno.EAGAIN):
                raise BlockingIOError(
                    f"Another process is writing checkpoints to {file.parent}: {holder}. Wait "
                    "until it has ended, or save to another directory."
                ) from None
            raise
        return descriptor


def _is_at(file: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), file.stat())
    except FileNotFoundError:
        return False


def _text(descriptor: int) -> str:
    with contextlib.suppress(OSError):
        return os.read(descriptor, 200).decode(errors="replace") or "it has just begun"
    return "unknown"


def _make_ready(directory: Path) -> WriterLock:
    """Creates and locks the directory, and cleans up after interrupted stores."""
    try:
        if is_remote(directory):
            put(directory / LOCK, b"")
            (directory / LOCK).unlink()
            return WriterLock.acquire(directory)
        directory.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=directory).close()
        lock = WriterLock.acquire(directory)
    except BlockingIOError:
        raise
    except Exception as error:  # stores have others than OSError
        raise OSError(
            f"Could not write checkpoints to {directory}: {shorten(error)}. Pass a directory that "
            "can be created and is writable."
        ) from error
    with lock.mutex:  # files that another store of this process is writing are not leftovers
        remove_leftovers(directory)
    return lock


def _may_copy(arrays: Mapping[str, Any]) -> bool:
    """Whether copies of all arrays take at most a quarter of the host's memory."""
    limit = host_memory()
    num_bytes = sum(getattr(value, "nbytes", 0) for value in arrays.values())
    return limit is None or 4 * num_bytes <= limit


def _kept_metrics(path: Path, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the metrics of a checkpoint of the same arrays, if the new one has no metrics."""
    earlier = _header(path)
    if earlier and not metadata["metrics"] and earlier["arrays"] == metadata["arrays"]:
        return {name: earlier.get(name) for name in ("metrics", "keep_best")}
    return {}


def _header(path: Path) -> dict[str, Any] | None:
    """Returns what mirror knows about a checkpoint, or None if it is damaged or does not exist."""
    with contextlib.suppress(Exception):
        return files.read_metadata(path)
    return None


def _as_json(name: str, value: Any) -> Any:
    """Returns the value as it will be read: tuples become lists, and keys strings."""
    try:
        return json.loads(json.dumps(dict(value)))
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"`{name}` cannot be converted to JSON: {error}. Use a dict of numbers, strings, lists "
            "and None."
        ) from error
