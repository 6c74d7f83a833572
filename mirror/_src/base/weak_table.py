"""`WeakTable`: values by function, which live as long as the function."""

import sys
import weakref
from collections.abc import Callable, Hashable, Iterator
from types import CodeType, FunctionType, MethodType
from typing import Any, Generic, TypeAlias, TypeVar

V = TypeVar("V")
Function: TypeAlias = Callable[..., Any] | CodeType


class WeakTable(Generic[V]):
    """Values by function or code object, each dropped when the function is.

    `weakref.WeakKeyDictionary` does not serve: `obj.method` is a new object in every call, so the
    object is referenced in its place, which need not be hashable. A function without support for
    weak references is kept.

    Args:
        on_drop: Receives the value of a function that is dropped.
    """

    def __init__(self, on_drop: Callable[[V], None] | None = None) -> None:
        self._values: dict[Hashable, V] = {}
        self._on_drop = on_drop

    def get(self, fn: Function) -> V | None:
        """Returns the value of a function, or None."""
        is_plain = type(fn) is FunctionType  # the common case, and fast
        return self._values.get(weakref.ref(fn) if is_plain else reference(fn))

    def set_default(self, fn: Function, value: V) -> V:
        """Returns the value of a function, which is `value` unless it has one."""
        key = reference(fn)
        known = self._values.get(key)
        if known is not None:
            return known
        return self._values.setdefault(reference(fn, self._dropped), value)

    def pop(self, fn: Function) -> None:
        """Removes the value of a function, if it has one."""
        self._values.pop(reference(fn), None)

    def values(self) -> Iterator[V]:
        """Yields the values of all functions."""
        return iter(list(self._values.values()))

    def clear(self) -> None:
        """Removes all values."""
        self._values.clear()

    def _dropped(
        self, key: Hashable, is_finalizing: Callable[[], bool] = sys.is_finalizing
    ) -> None:
        value = self._values.pop(key, None)
        # When Python ends, the names that `on_drop` uses may be None.
        if value is not None and self._on_drop is not None and not is_finalizing():
            self._on_drop(value)


class _Method:
    """A weak reference to a bound method: equal for the same object and function."""

    __slots__ = ("_function", "_hash", "_object")

    def __init__(self, method: MethodType, on_drop: Callable[[Any], None] | None) -> None:
        self._function = method.__func__
        self._hash = hash((id(method.__self__), method.__func__))
        drop = None if on_drop is None else lambda _: on_drop(self)
        self._object = weakref.ref(method.__self__, drop)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, _Method) or self._function != other._function:
            return False
        owner = self._object()
        return owner is not None and owner is other._object()


def reference(fn: Any, on_drop: Callable[[Any], None] | None = None) -> Hashable:
    """Returns a weak reference to a function, equal for the same function."""
    try:
        hash(fn)
    except TypeError:  # an object with `__call__`, such as a dataclass
        fn = fn.__call__
    try:
        if isinstance(fn, MethodType):
            return _Method(fn, on_drop)
        return weakref.ref(fn, on_drop)
    except TypeError:  # no support for weak references
        return fn
