"""Parts of error messages about checkpoints: short error texts, and lists of steps."""

from collections.abc import Iterable
from typing import Any

_MOST_STEPS = 12


def in_short(error: BaseException) -> str:
    """Returns the text of an error, without the long details that TensorStore appends."""
    text = getattr(error, "strerror", None) or str(error).split(" [")[0]
    return f"{text or type(error).__name__:.300}".rstrip(".")


def in_words(names: Iterable[Any]) -> str:
    """Returns a list such as `1, 2, 3`, with the last twelve names at most."""
    texts = [str(name) for name in names]
    shown = ", ".join(texts[-_MOST_STEPS:])
    if len(texts) > _MOST_STEPS:
        return f"{len(texts) - _MOST_STEPS} others, {shown}"
    return shown or "none"
