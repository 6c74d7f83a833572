"""An extension of griffe: examples in docstrings are shown as code."""

import re
from typing import Any

import griffe

_EXAMPLE = re.compile(r"^>>> .*(?:\n.+)*", re.M)


class Examples(griffe.Extension):
    """Puts each example of a docstring into a fence, as Markdown has it."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrites the docstring, before it is parsed."""
        if obj.docstring:
            fenced = _EXAMPLE.sub(lambda found: f"```pycon\n{found[0]}\n```", obj.docstring.value)
            obj.docstring.value = fenced
