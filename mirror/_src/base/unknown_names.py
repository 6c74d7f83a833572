"""Errors for names and arguments that mirror does not have: of other libraries, and misspellings.

`other_names.md` gives the replacements for names of TensorFlow, Keras and PyTorch, and for guesses.
"""

import dis
import functools
import importlib.resources
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import FrameType
from typing import Any, NamedTuple

from mirror._src.base import public_names
from mirror._src.base.errors import nearest_name
from mirror._src.base.naming import signature_of
from mirror._src.base.public_names import NAMES_OF_PS


class NameTable(NamedTuple):
    """A table of `other_names.md`.

    Attributes:
        page: Name of the page that shows the table, or "".
        owner: Module or object whose names it explains, such as "mirror.config" or "strategy"; for
            arguments, "devices=".
        prefix: Prefix of the names in the first column.
        text: The table.
        rows: The cells of every row. Without a page, the second cell is a sentence.
    """

    page: str
    owner: str
    prefix: str
    text: str
    rows: list[tuple[str, str]]


_OWNERS = {
    "strategy": "strategy",
    "replica_context": "replica_context",
    "model": "trainer",
    "variable": "variable",
    "callbacks": "mirror.callbacks",
}
_NAME = re.compile(r"`([A-Za-z_]\w*(?:\.\w+)*)(?:\([^`]*\))?`")
_DASH = "\N{EN DASH} "


def name_tables() -> list[NameTable]:
    """Returns the tables, guesses first."""
    text = importlib.resources.files(__package__).joinpath("other_names.md").read_text("utf-8")
    tables = []
    for section in text.split("\n## ")[1:]:
        heading, _, table = section.partition("\n\n")
        page, _, names = heading.rpartition(": ")
        owner, _, prefix = names.partition(", ")
        lines = [line.strip("| ").split(" | ") for line in table.splitlines()[2:] if line]
        rows = [(theirs, ours) for theirs, ours in lines]
        tables.append(NameTable(page, owner, prefix, table.strip() + "\n", rows))
    return tables


@functools.cache
def advice() -> dict[tuple[str, str], str]:
    """Returns the advice for each name of another library, by owner and name.

    The owners are `mirror` and its modules, "strategy", "replica_context", "trainer" and "variable"
    for the attributes of objects, and parameters such as "devices=" for arguments.

    >>> advice()["strategy", "experimental_local_results"]
    'Instead of strategy.experimental_local_results, use strategy.local_results.'
    """
    found: dict[tuple[str, str], str] = {}
    for table in name_tables():
        for theirs, ours in table.rows:
            for full_name in _NAME.findall(theirs):
                head, _, name = full_name.rpartition(".")
                head = head.partition(".")[0]
                owner = _OWNERS.get(head, table.owner)
                shown = full_name if head in _OWNERS else table.prefix + full_name
                text = ours.replace("`", "")
                found.setdefault((owner, name), _sentence(shown, text) if table.page else text)
    return found


def _sentence(theirs: str, ours: str) -> str:
    if ours.startswith(_DASH):
        return f"There is no equivalent of {theirs}: {ours.removeprefix(_DASH)}."
    if ours.startswith("pass "):
        return f"Instead of {theirs}: {ours}."
    return f"Instead of {theirs}, use {ours}."


_SECOND_ARRAY = {"distribute_dataset": 2, "from_arrays": 1}  # which position shows the mistake


def mismatch_message(
    fn: Callable[..., Any], error: TypeError, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> str:
    """Returns the message for a call that Python rejected, with the signature and an example.

    Args:
        fn: The function.
        error: Python's error.
        args: Positional arguments of the call, with `self`.
        kwargs: Keyword arguments of the call.
    """
    signature = inspect.signature(fn)
    is_init = fn.__name__ == "__init__"
    documented = type(args[0]) if is_init else fn
    name = documented.__name__
    shown = signature_of(fn, is_method=True)
    text = str(error).replace(f"{name}.__init__()", f"{name}()")
    unknown = [key for key in kwargs if key not in signature.parameters]
    names = [name for name in signature.parameters if name != "self"]
    hint = _hint(unknown[0], kwargs[unknown[0]], names) if unknown else ""
    if not unknown and "positional argument" in text and "takes" in text:
        i = _SECOND_ARRAY.get(name)
        if i is None or hasattr(args[i], "shape"):
            hint = advice().get(("too many arguments", name), "")
    owners = [type(args[0])] if args and "self" in signature.parameters else []
    example = "" if hint else _example(name, [documented, *owners])
    return " ".join(filter(None, [f"{text}. The signature is {name}{shown}.", hint, example]))


def _hint(name: str, value: object, names: Sequence[str]) -> str:
    """Returns a sentence about an unknown argument, or ""."""
    for parameter in ["any", *names]:
        if (told := advice().get((f"{parameter}=", name))) is not None:
            return told.replace("{0}", str(value) if isinstance(value, int) else "n")
    nearest = nearest_name(name, names)
    return f"Did you mean {nearest}=?" if nearest is not None else ""


def _example(name: str, documented: Sequence[Any]) -> str:
    """Returns the first example of a call in the docstrings, or ""."""
    texts = "\n".join(each.__doc__ or "" for each in documented)
    lines = re.findall(r"^ *(?:>>>|\.\.\.) +(.*)", texts, re.M)
    calls = [line for line in lines if re.search(rf"\b{name}\(", line)]
    return f"For example: {calls[0].partition('  #')[0].removeprefix('return ')}" if calls else ""


_MODULES = ("mirror", *(f"mirror.{name}" for name in public_names.MODULES))
# Objects whose attributes are looked for in other places, and how programs refer to them.
_OBJECTS = {
    "Strategy": "strategy",
    "ReplicaContext": "mirror.get_replica_context()",
    "Trainer": "trainer",
}
_OTHERS = ("mirror", "mirror.callbacks", "strategy")  # owners whose advice helps at any place
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
    public_names.load()  # if the program has imported only this module
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
        owner: "strategy", "replica_context", "trainer" or "variable"; see `advice`.
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
    if told is None:
        told = next(filter(None, (advice().get((other, name)) for other in _OTHERS)), None)
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
        if hasattr(cls, name) and text != owner:
            where = " in a step" if kind == "ReplicaContext" else ""
            call = "(...)" if callable(getattr(cls, name)) else ""
            return f"It belongs to a {kind}{where}: {text}.{name}{call}."
    return None


def _is_private(name: str) -> bool:
    """Whether Python, a library or a notebook asks for this name, rather than a user."""
    return name.startswith("_")
