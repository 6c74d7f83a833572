"""The command that installs an extra of the package."""

# Whether a package index has mirror-jax. Until then, pip can only install it from a clone.
IS_PUBLISHED = False


def install_command(extra: str) -> str:
    """Returns the command that installs an extra, and where to run it."""
    if IS_PUBLISHED:
        return f'pip install "mirror-jax[{extra}]"'
    return f'pip install ".[{extra}]" (in a clone of mirror)'
