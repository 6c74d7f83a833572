"""Settings that JAX reads when its backend starts; what the user has set is never overwritten."""

import os
from typing import Any, final

import jax


@final
class JaxOption:
    """One value for the whole process, in JAX's configuration or in the environment.

    Args:
        name: an option of `jax.config`, or an environment variable.
        aliases: further environment variables that set the same.
        unset: what an option of `jax.config` holds where nobody set it.
    """

    def __init__(self, name: str, *aliases: str, unset: tuple[Any, ...] = (None,)) -> None:
        self._name = name
        self._aliases = aliases
        self._unset = unset
        self._is_option = name.startswith("jax_")
        self._ours: Any = None

    @property
    def value(self) -> Any:
        """What it is set to, by whomever; `None` where by nobody."""
        if not self._is_option:
            found = (os.environ.get(name) for name in (self._name, *self._aliases))
            return next(filter(None, found), None)
        value = jax.config.values[self._name]
        return None if value in self._unset else value

    @property
    def of_user(self) -> Any:
        """What the user set it to; `None` where it is free for us."""
        return None if self.value == self._ours else self.value

    @property
    def source(self) -> str:
        """Who set it, in words."""
        if self.value is None:
            return "default"
        return "set by mirror.config" if self.of_user is None else f"{self}, set by you"

    def set(self, value: Any) -> None:
        """Sets it, or with `None` takes back what was set here; leaves the user's value alone."""
        if self.of_user is not None or value == self.value:
            return
        if self._is_option:
            jax.config.update(self._name, self._unset[0] if value is None else value)
        elif value is None:
            os.environ.pop(self._name, None)
        else:
            os.environ[self._name] = value
        self._ours = value

    def __str__(self) -> str:
        """As the user knows it: `XLA_CLIENT_MEM_FRACTION=0.5`, `jax_platforms='cpu'`."""
        if self._is_option:
            return f"{self._name}={self.value!r}"
        names = [name for name in (self._name, *self._aliases) if os.environ.get(name)]
        return f"{names[0] if names else self._name}={self.value}"


GPU_PLATFORMS = ("gpu", "cuda", "rocm")  # as JAX calls them


def names_gpus(platforms: str) -> bool:
    """Whether a value of `PLATFORMS` has GPUs in it."""
    return not set(GPU_PLATFORMS).isdisjoint(platforms.split(","))


HOST_DEVICES = JaxOption("jax_num_cpu_devices", unset=(-1,))
VISIBLE_GPUS = JaxOption("jax_cuda_visible_devices", unset=("all",))
PLATFORMS = JaxOption("jax_platforms", unset=(None, ""))
PREALLOCATE = JaxOption("XLA_PYTHON_CLIENT_PREALLOCATE")
MEMORY_FRACTION = JaxOption("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
