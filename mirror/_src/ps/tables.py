"""`SparseTables`: the variables of which workers pull and push the touched rows alone."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, final

import numpy as np

from mirror._src.base.errors import expected, listing, nearest
from mirror._src.ps.placement import Leaf

_EXAMPLE = "For example sparse={'embed.embedding': lambda batch: batch['ids']}."
_MOST_ROWS = int(np.iinfo(np.int32).max)


@final
class SparseTables:
    """The argument `sparse` of a strategy.

    Args:
        sparse: For each variable, the function that returns the ids of a batch.

    Raises:
        TypeError: If `sparse` is not a dict of functions.
    """

    def __init__(self, sparse: Mapping[str, Callable[..., Any]] | None) -> None:
        if not isinstance(sparse, Mapping | None):
            raise TypeError(expected("sparse", sparse, "a dict or None", _EXAMPLE))
        self.functions = dict(sparse or {})
        for name, function in self.functions.items():
            if not isinstance(name, str):
                raise TypeError(expected("sparse", name, "a dict by names of variables", _EXAMPLE))
            if not callable(function):
                raise TypeError(expected(f"sparse[{name!r}]", function, "callable", _EXAMPLE))

    def require_in(self, leaves: Iterable[Leaf]) -> None:
        """Checks that a model has the tables.

        Raises:
            ValueError: If a name does not belong to a trained variable with rows.
        """
        by_name = {leaf.name: leaf for leaf in leaves}
        trained = [name for name, leaf in by_name.items() if leaf.kind == "trained"]
        for name in self.functions:
            if name not in by_name:
                raise ValueError(
                    f"`sparse` names {name!r}, which must be a trained variable of the model."
                    f"{nearest(name, trained)} They are:\n{listing(trained)}"
                )
            leaf = by_name[name]
            text = f"`sparse` names {name!r}, {leaf.dtype}{[*leaf.shape]}, "
            if leaf.kind != "trained":
                raise ValueError(
                    f"{text}which the optimizer does not train (`wrt`). Omit it from `sparse`."
                )
            if not leaf.shape or not 0 < leaf.shape[0] <= _MOST_ROWS:
                raise ValueError(
                    f"{text}which must be an array of 1 to {_MOST_ROWS} rows. Omit it from "
                    "`sparse`."
                )
