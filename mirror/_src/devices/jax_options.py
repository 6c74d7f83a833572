"""Options that JAX reads when its backend starts. Values set by the user are never overwritten."""

import os
from typing import Any, final

import jax

from mirror._src.base.compile_cache import DIRECTORY, LEAST_SECS


@final
class JaxOption:
    """A process-wide option, in `jax.config` or in the environment.

    Args:
        name: Name of the `jax.config` option or environment variable.
        aliases: Other environment variables with the same meaning.
        unset: Values of a `jax.config` option that mean that it is not set.
    """

    def __init__(self, name: str, *aliases: str, unset: tuple[Any, ...] = (None,)) -> None:
        self._name = name
        self._aliases = aliases
        self._unset = unset
        self._is_option = name.startswith("jax_")
        self._set_by_mirror: Any = None

    @property
    def value(self) -> Any:
        """The current value, or None if it is not set."""
        if not self._is_option:
            values = (os.environ.get(name) for name in (self._name, *self._aliases))
            return next(filter(None, values), None)
        value = jax.config.values[self._name]
        return None if value in self._unset else value

    @property
    def of_user(self) -> Any:
        """The value that the user set, or None if mirror may set it."""
        return None if self.value == self._set_by_mirror else self.value

    @property
    def source(self) -> str:
        """A description of where the value comes from."""
        if self.value is None:
            return "default"
        return "set by mirror.config" if self.of_user is None else f"{self}, set by you"

    def set(self, value: Any) -> None:
        """Sets the value, or restores the default with None. Keeps a value set by the user."""
        if self.of_user is not None or value == self.value:
            return
        if self._is_option:
            jax.config.update(self._name, self._unset[0] if value is None else value)
        elif value is None:
            os.environ.pop(self._name, None)
        else:
            os.environ[self._name] = value
        self._set_by_mirror = value

    def __str__(self) -> str:
        """Returns the setting, like `XLA_CLIENT_MEM_FRACTION=0.5` or `jax_platforms='cpu'`."""
        if self._is_option:
            return f"{self._name}={self.value!r}"
        names = [name for name in (self._name, *self._aliases) if os.environ.get(name)]
        return f"{names[0] if names else self._name}={self.value}"


GPU_PLATFORMS = ("gpu", "cuda", "rocm")  # JAX's names


def names_gpus(platforms: str) -> bool:
    """Whether a value of `PLATFORMS` includes GPUs."""
    return not set(GPU_PLATFORMS).isdisjoint(platforms.split(","))


HOST_DEVICES = JaxOption("jax_num_cpu_devices", unset=(-1,))
VISIBLE_GPUS = JaxOption("jax_cuda_visible_devices", unset=("all",))
PLATFORMS = JaxOption("jax_platforms", unset=(None, ""))
HOST_THREADS = JaxOption("PJRT_NPROC")
PREALLOCATE = JaxOption("XLA_PYTHON_CLIENT_PREALLOCATE")
CACHE_DIRECTORY = JaxOption(DIRECTORY, unset=(None, ""))
CACHE_LEAST_SECS = JaxOption(LEAST_SECS, unset=(1.0,))
MEMORY_FRACTION = JaxOption("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
