"""Paths of files and directories: local ones, or in an object store, by universal_pathlib."""

import contextlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, final

from mirror._src.base.errors import expected
from mirror._src.base.naming import warn_user
from mirror._src.base.optional import require

_PACKAGES = {"gs": "gcsfs", "s3": "s3fs", "memory": "fsspec"}
_URL = re.compile(rf"({'|'.join(_PACKAGES)})://.+")
_FIX = "Use a local path, or one that begins with gs://, s3:// or memory://."


def path_of_argument(name: str, value: str | os.PathLike[str]) -> Path:
    """Returns a `Path`, or a `UPath` of an object store, which has the same methods.

    Raises:
        ValueError: If it is not a path, or the scheme of its URL is unknown.
        ModuleNotFoundError: If the package of the store is not installed.
    """
    text: Any = str(value) if is_remote(value) else value
    text = os.fspath(text) if isinstance(text, os.PathLike) else text
    is_text = isinstance(text, str) and text and "\0" not in text
    if not is_text or ("://" in text and not _URL.fullmatch(text)):
        raise ValueError(expected(name, text, "a path", _FIX))
    scheme = text.partition(":/")[0]
    if "://" in text:
        require(_PACKAGES[scheme], f"{scheme}://", "stores")
        upath = require("upath", f"{scheme}://", "stores")
        options = {"use_listings_cache": False}  # others write, too
        options |= getattr(value, "storage_options", {})
        return upath.UPath(text.rstrip("/"), **options)
    if scheme != text and scheme in _PACKAGES:
        raise ValueError(expected(name, value, "a URL with two slashes", "pathlib drops one."))
    return Path(text).expanduser()


def is_remote(path: Any) -> bool:
    """Whether the path is in an object store, or any `UPath`."""
    return hasattr(path, "fs")


@contextlib.contextmanager
def named_errors(what: str, path: Path) -> Iterator[None]:
    """Names a path in errors of its store, which may be of any type.

    Raises:
        OSError: If there was an error of the store.
    """
    try:
        yield
    except Exception as error:
        if is_remote(path) and str(path) not in str(error):
            raise OSError(f"Could not {what} {path}: {shorten(error)}.") from error
        raise


def put(path: Any, data: bytes) -> None:
    """Writes an object of a store under its name, at once and whole."""
    path.fs.pipe_file(path.path, data)


def fetched(path: Any, folder: str) -> Path:
    """Returns a local path, or the copy of what is in a store, in a folder."""
    if not is_remote(path):
        return Path(path)
    local = Path(folder) / path.name
    with named_errors("read", path):
        path.fs.get(path.path, str(local), recursive=True)
    return local


def shorten(error: BaseException) -> str:
    """Returns the text of an error, for the middle of a sentence."""
    text = getattr(error, "strerror", None) or str(error)
    return f"{' '.join(text.split()) or type(error).__name__:.300}".rstrip(".")


@final
class LocalCopy:
    """A local file or directory, for writers that append or that know no stores.

    Attributes:
        target: The path of the argument.
        path: The same, or for a path in a store a temporary one, which `upload` copies to it.
    """

    def __init__(self, name: str, value: str | os.PathLike[str]) -> None:
        self.target = path_of_argument(name, value)
        self._folder: str | None = None
        self.path = self.target

    def begin(self) -> None:
        """Creates the parent of `path`, and fetches the file if there is one."""
        if is_remote(self.target):
            self._folder = tempfile.mkdtemp()
            self.path = Path(self._folder) / self.target.name
            if self.target.is_file():  # to a directory, new files are added
                fetched(self.target, self._folder)
        self.path.parent.mkdir(parents=True, exist_ok=True)

    def upload(self) -> None:
        """Copies what is in `path` to the store; a failure is a warning."""
        if self._folder is None or not self.path.exists():
            return
        files = [p for p in [self.path, *sorted(self.path.rglob("*"))] if p.is_file()]
        try:
            for file in files:
                target = self.target / file.relative_to(self.path).as_posix()
                put(self.target if file == self.path else target, file.read_bytes())
        except Exception as error:
            warn_user(f"Could not write {self.target}: {shorten(error)}. Training continues.")

    def close(self) -> None:
        """Uploads for the last time, and deletes the temporary files."""
        self.upload()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._folder = None
