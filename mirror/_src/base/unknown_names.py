"""Errors for names that mirror does not have: of other libraries, and misspellings."""

import dis
import inspect
import sys
from collections.abc import Iterable
from types import FrameType
from typing import Any

from mirror._src.base import lazy_names
from mirror._src.base.errors import nearest_name
from mirror._src.base.lazy_names import NAMES_OF_PS
from mirror._src.base.other_names import advice

_MODULES = ("mirror", "mirror.config", "mirror.data", "mirror.callbacks", "mirror.debugging")
# Objects whose attributes are looked for in other places, and how programs refer to them.
_OBJECTS = {
    "Strategy": "strategy",
    "ReplicaContext": "mirror.get_replica_context()",
    "Trainer": "trainer",
}
_IMPORT_FROM = dis.opmap["IMPORT_FROM"]


def explain_unknown_names(module: str) -> None:
    """Makes a module of `mirror` explain the names that it does not have.

    `hasattr` still returns False, and `from mirror import x` still raises an `ImportError`.
    """

    def __getattr__(name: str) -> Any:
        if _is_private(name):
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        raise unknown_name(module, name, sys._getframe(1))

    sys.modules[module].__getattr__ = __getattr__  # type: ignore[method-assign]


def unknown_name(module: str, name: str, caller: FrameType) -> Exception:
    """Returns the error for a name that a module does not have, in the frame that looks for it."""
    lazy_names.load()  # if the program has imported only this module
    if caller.f_code.co_code[caller.f_lasti] == _IMPORT_FROM:
        # Python would replace an AttributeError by one that does not have this text.
        text = f"cannot import name {name!r} from {module!r}."
        return ImportError(f"{text} {suggestion(module, name)}".strip(), name=name)
    text = f"module {module!r} has no attribute {name!r}."
    # Without `obj`, which would make Python append its own suggestion.
    return AttributeError(f"{text} {suggestion(module, name)}".strip(), name=name)


def unknown_attribute(
    owner: str, value: object, name: str, first: str | None = None
) -> AttributeError:
    """Returns the error for an attribute that an object does not have.

    Args:
        owner: "strategy", "replica_context", "trainer" or "variable"; see `other_names.advice`.
        value: The object.
        name: Name of the attribute.
        first: Owner whose advice replaces the one for `owner`, such as "parameter servers".
    """
    text = f"{type(value).__name__!r} object has no attribute {name!r}"
    if _is_private(name):
        return AttributeError(text, name=name)
    if first is not None and (told := advice().get((first, name))) is not None:
        return AttributeError(f"{text}. {told}", name=name)
    known = dir(type(value))
    return AttributeError(f"{text}. {suggestion(owner, name, known)}".strip(), name=name)


def suggestion(owner: str, name: str, known: Iterable[str] | None = None) -> str:
    """Returns a sentence that says what to use in place of an unknown name, or ""."""
    if name in NAMES_OF_PS and owner != "mirror.ps":
        return f"It is in mirror.ps: mirror.ps.{name}."
    told = advice().get((owner, name)) or _elsewhere(owner, name)
    if told is None and owner.startswith("mirror."):
        told = advice().get(("mirror", name))
    if told is not None:
        return told
    names = [n for n in (dir(sys.modules[owner]) if known is None else known) if n[0] != "_"]
    nearest = nearest_name(name, names)
    if nearest is not None:
        return f"Did you mean {owner}.{nearest}?"
    if owner == "mirror":
        return "help(mirror) lists the public names."
    return f"Its public names are {', '.join(names)}."


def _elsewhere(owner: str, name: str) -> str | None:
    """Returns a sentence that says where a name of mirror is, if not at `owner`."""
    for module in _MODULES:
        found = vars(sys.modules[module]).get(name) if module != owner else None
        if found is not None and not inspect.ismodule(found):
            return f"It is in {module}: {module}.{name}."
    for kind, text in _OBJECTS.items():
        cls = getattr(sys.modules["mirror"], kind)
        if hasattr(cls, name) and not text.startswith(owner):
            where = " in a step" if kind == "ReplicaContext" else ""
            call = "(...)" if callable(getattr(cls, name)) else ""
            return f"It belongs to a {kind}{where}: {text}.{name}{call}."
    return None


def _is_private(name: str) -> bool:
    """Whether Python, a library or a notebook asks for this name, rather than a user."""
    return name.startswith("_")
