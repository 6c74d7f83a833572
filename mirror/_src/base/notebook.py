"""The notebook that the program runs in, if any."""

import sys
from typing import Any


def in_notebook() -> bool:
    """Whether displayed objects go to a notebook, and not as text to a terminal.

    Every kernel replaces IPython's publisher, which prints: ipykernel, Colab, VS Code, JupyterLite.
    """
    shell = _shell()
    if shell is None:
        return False
    from IPython.core.displaypub import DisplayPublisher

    return type(shell.display_pub) is not DisplayPublisher


def current_cell() -> int | None:
    """Returns the number of the running cell; None outside IPython."""
    shell = _shell()
    return None if shell is None else shell.execution_count


def _shell() -> Any:
    ipython = sys.modules.get("IPython")
    return None if ipython is None else ipython.get_ipython()
