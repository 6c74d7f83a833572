"""Griffe extension that renders the examples in docstrings as code."""

import re
from typing import Any

import griffe

_EXAMPLE = re.compile(r"^>>> .*(?:\n.+)*", re.M)


class Examples(griffe.Extension):
    """Wraps each example of a docstring in a fenced code block."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrites the docstring before it is parsed."""
        if obj.docstring:
            fenced = _EXAMPLE.sub(lambda match: f"```pycon\n{match[0]}\n```", obj.docstring.value)
            obj.docstring.value = fenced
