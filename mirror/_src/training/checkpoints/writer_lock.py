"""One process at a time writes to a directory of checkpoints.

The lock is a POSIX record lock of a file in the directory. The operating system releases it when
the process ends in any way, and a forked process does not inherit it. It works on NFS; where a file
system has no locks, and in object stores, nothing protects the directory.
"""

import contextlib
import errno
import os
import socket
import stat
import threading
from pathlib import Path
from typing import final

from mirror._src.training.checkpoints.directory import LOCK
from mirror._src.training.paths import is_remote

try:
    import fcntl
except ModuleNotFoundError:  # Windows
    fcntl = None  # type: ignore[assignment]

_WITHOUT_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


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
