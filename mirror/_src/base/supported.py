"""The versions of JAX that mirror has been tried with."""

import functools
from typing import NamedTuple

import jax
from packaging.version import Version

from mirror._src.base.naming import warn_user


class Range(NamedTuple):
    """Range of supported versions.

    Attributes:
        least: The oldest supported version.
        beyond: The first untested version; `None` if unknown.
    """

    least: str
    beyond: str | None = None


# Everything that depends on the version of JAX reads it here: the warning, and `mirror doctor`.
JAX = Range("0.10.2", "0.13")


def base_version(text: str) -> Version:
    """Returns a version without its suffixes: 0.13 for `0.13.dev1`.

    `Version` orders `0.13.dev1` before `0.13`, but it is as untested as `0.13`.
    """
    return Version(Version(text).base_version)


@functools.cache
def warn_about_jax() -> None:
    """Warns once per process if JAX is older or newer than the versions that have been tried."""
    message = untried(jax.__version__)
    if message:
        warn_user(message)


def untried(version: str) -> str:
    """Returns the message for a version of JAX outside the range, or an empty string."""
    if base_version(version) < Version(JAX.least):
        return (
            f"JAX {version} is installed, but mirror requires {JAX.least} or newer. Install it: "
            f'pip install "jax>={JAX.least},<{JAX.beyond}"'
        )
    if JAX.beyond is not None and base_version(version) >= Version(JAX.beyond):
        return (
            f"mirror has not been tried with JAX {version}; it is tested with {JAX.least} and "
            f"newer, below {JAX.beyond}. mirror doctor checks whether it works on this machine; "
            f'otherwise: pip install "jax<{JAX.beyond}"'
        )
    return ""
