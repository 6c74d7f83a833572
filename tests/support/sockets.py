"""Directories for Unix sockets, whose paths have at most 107 bytes."""

import multiprocessing.util
import os
import shutil
import tempfile

LONGEST = 35  # Ray adds up to 70 characters, and multiprocessing 32


def shorten_paths() -> None:
    """Lets Ray and multiprocessing create sockets below /tmp if the path of TMPDIR is too long.

    Child processes inherit the directory, and its creator deletes it.
    """
    if len(os.fsencode(tempfile.gettempdir())) <= LONGEST:
        return
    if "RAY_TMPDIR" not in os.environ:
        os.environ["RAY_TMPDIR"] = tempfile.mkdtemp(prefix="mirror-", dir="/tmp")
        options = {"ignore_errors": True}
        # After multiprocessing has deleted its own directory, with priority -100.
        multiprocessing.util.Finalize(
            None, shutil.rmtree, (os.environ["RAY_TMPDIR"],), options, exitpriority=-200
        )
    before, tempfile.tempdir = tempfile.tempdir, os.environ["RAY_TMPDIR"]
    multiprocessing.util.get_temp_dir()  # creates its directory, and remembers it
    tempfile.tempdir = before
