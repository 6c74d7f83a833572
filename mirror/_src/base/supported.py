"""The versions of JAX that mirror has been tried with."""

import functools

import jax
from packaging.version import Version

from mirror._src.base.naming import warn_user

# Everything that depends on the version of JAX reads it here: the warning, and `mirror doctor`.
LEAST, BEYOND = "0.10.2", "0.13"  # the oldest one, and the first untested one


def base_version(text: str) -> Version:
    """Returns a version without its suffixes: 0.13 for `0.13.dev1`.

    `Version` orders `0.13.dev1` before `0.13`, but it is as untested as `0.13`.
    """
    return Version(Version(text).base_version)


@functools.cache
def warn_about_jax() -> None:
    """Warns once per process if JAX is older or newer than the versions that have been tried."""
    version = jax.__version__
    if base_version(version) < Version(LEAST):
        warn_user(
            f"JAX {version} is installed, but mirror requires {LEAST} or newer. Install it: "
            f'pip install "jax>={LEAST},<{BEYOND}"'
        )
    elif base_version(version) >= Version(BEYOND):
        warn_user(
            f"mirror has not been tried with JAX {version}; it is tested with {LEAST} and newer, "
            f"below {BEYOND}. mirror doctor checks whether it works on this machine; otherwise: "
            f'pip install "jax<{BEYOND}"'
        )
