"""Optional packages, imported when they are first used."""

import importlib
import importlib.metadata
from typing import Any

# Whether a package index has mirror-jax. Until then, pip can only install it from a clone.
IS_PUBLISHED = False


def require(module: str, feature: str = "This feature", extra: str | None = "train") -> Any:
    """Imports and returns a module of an optional package.

    Args:
        module: Name of the module.
        feature: The feature that needs it, for the message.
        extra: The extra of the package that installs it; None if no extra does.

    Raises:
        ModuleNotFoundError: If the package is not installed; the message says how to install it.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        missing = (error.name or module).partition(".")[0]
        if missing != module.partition(".")[0]:
            raise
        text = describe_missing(missing, feature, extra)
        raise ModuleNotFoundError(text, name=missing) from error


def version_of(package: str) -> str | None:
    """Returns the version of an installed package; None without it."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def describe_missing(package: str, feature: str, extra: str | None) -> str:
    """Returns the message for a missing package, with the command that installs it."""
    command = f"pip install {package}" if extra is None else install_command(extra)
    return f"{feature} requires {package}, which is not installed. Install it: {command}"


def install_command(extra: str) -> str:
    """Returns the command that installs an extra, and where to run it."""
    if IS_PUBLISHED:
        return f'pip install "mirror-jax[{extra}]"'
    return f'pip install ".[{extra}]" (in a clone of mirror)'
