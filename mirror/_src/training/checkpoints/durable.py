"""Files and directories that survive a power failure: written to the disk before they are used.

A file that was only written is in the memory of the operating system, and so is a name that was
only created or changed. `os.fsync` writes a file, or the names in a directory, to the disk. On
macOS the disk may still keep them in its own cache.
"""

import contextlib
import os
import shutil
from pathlib import Path


def sync_tree(path: Path) -> None:
    """Writes all files and directories below a path to the disk, and the directory itself.

    Raises:
        OSError: If the disk reports an error, such as one of an earlier write.
    """
    for directory, _, files in os.walk(path):
        for file in files:
            _sync(os.path.join(directory, file))
        _sync(directory)


def rename(path: Path, target: Path) -> None:
    """Renames within a directory; when it returns, the new name is on the disk."""
    path.rename(target)
    _sync(path.parent)


def delete(path: Path) -> None:
    """Deletes a file, a link or a directory, as far as possible; never what a link points to."""
    with contextlib.suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()  # `rmtree` would open a named pipe, and wait for its other end


def _sync(path: str | os.PathLike[str]) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
