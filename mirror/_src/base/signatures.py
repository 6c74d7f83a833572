"""Errors for calls that do not match the signature of a public function."""

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mirror._src.base.errors import nearest_name
from mirror._src.base.naming import signature_of
from mirror._src.base.other_names import advice

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
