"""JAX's compile cache: its folder, and the options that turn it on. The launcher uses it, too."""

import os
from pathlib import Path

from mirror._src.base.optional import require

DIRECTORY = "jax_compilation_cache_dir"
LEAST_SECS = "jax_persistent_cache_min_compile_time_secs"
_NEVER_SECS = 1e9


def cache_options(
    directory: str | os.PathLike[str] | None = None,
) -> tuple[dict[str, float | str], str]:
    """Returns JAX's options for a cache in a folder, which it makes, and a warning or "".

    A folder that cannot be made gives no options. To one that is read-only, nothing is added:
    otherwise, JAX would warn for each program.
    """
    if directory is None:
        dirs = require("platformdirs", "The default folder of the compile cache")
        directory = dirs.user_cache_path("mirror") / "programs"
    if "://" in os.fspath(directory):  # JAX opens it, by etils.epath
        return {DIRECTORY: os.fspath(directory), LEAST_SECS: 0.0}, ""
    folder = Path(directory).absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return {}, f"No compile cache: {folder} cannot be created ({error.strerror})."
    options: dict[str, float | str] = {DIRECTORY: str(folder), LEAST_SECS: 0.0}
    if os.access(folder, os.W_OK):
        return options, ""
    text = f"The compile cache {folder} is read-only: its programs are used, and none is added."
    return {**options, LEAST_SECS: _NEVER_SECS}, text
