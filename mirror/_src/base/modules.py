"""The public module of a class."""

from collections.abc import Callable
from typing import TypeVar

_T = TypeVar("_T")


def set_module(name: str) -> Callable[[type[_T]], type[_T]]:
    """Returns a decorator that sets the module that tracebacks and reprs show for a class."""

    def decorate(cls: type[_T]) -> type[_T]:
        cls.__module__ = name
        return cls

    return decorate
