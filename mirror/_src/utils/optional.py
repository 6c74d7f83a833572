"""Packages that only some users need, brought in when they are used."""

import importlib
from typing import Any

_EXTRA = "train"


def require(module: str) -> Any:
    """The module, imported.

    Raises:
        ModuleNotFoundError: it is not installed; the message says how to install it.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        missing = (error.name or module).partition(".")[0]
        if missing != module.partition(".")[0]:
            raise
        raise ModuleNotFoundError(
            f"This needs {missing}, which is not installed. Install what training can use: "
            f'pip install "mirror-jax[{_EXTRA}]"',
            name=missing,
        ) from error
