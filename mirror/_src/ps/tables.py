"""`SparseTables`: the variables of which workers pull and push the touched rows alone."""

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any, final

import numpy as np
import optax

from mirror._src.base.errors import counted, expected, listing, nearest
from mirror._src.ps.placement import Leaf
from mirror._src.ps.sparse_optimizer import lazy_tables

_EXAMPLE = "For example sparse={'embed.embedding': lambda batch: batch['ids']}."
_MOST_ROWS = int(np.iinfo(np.int32).max)

_logger = logging.getLogger("mirror")


@final
class SparseTables:
    """The arguments `sparse` and `sparse_exact` of a strategy.

    Args:
        sparse: For each variable, the function that returns the ids of a batch.
        is_exact: Whether to reject optimizers that would change rows that a batch does not touch.

    Raises:
        TypeError: If `sparse` is not a dict of functions, or `is_exact` is not a bool.
    """

    def __init__(self, sparse: Mapping[str, Callable[..., Any]] | None, is_exact: bool) -> None:
        if not isinstance(sparse, Mapping | None):
            raise TypeError(expected("sparse", sparse, "a dict or None", _EXAMPLE))
        if not isinstance(is_exact, bool):
            raise TypeError(expected("sparse_exact", is_exact, "a bool", "Pass True or False."))
        self.functions = dict(sparse or {})
        for name, function in self.functions.items():
            if not isinstance(name, str):
                raise TypeError(expected("sparse", name, "a dict by names of variables", _EXAMPLE))
            if not callable(function):
                raise TypeError(expected(f"sparse[{name!r}]", function, "callable", _EXAMPLE))
        self._is_exact = is_exact
        self._checked: tuple[Any, Any] | None = None
        self._logged: frozenset[str] = frozenset()

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

    def require_optimizer(
        self, tx: optax.GradientTransformation, trained: Mapping[str, Any]
    ) -> None:
        """Logs once which tables an optimizer updates lazily.

        Args:
            tx: The optimizer.
            trained: Shape and dtype of each trained leaf, whole.

        Raises:
            ValueError: With `sparse_exact`, if it updates any lazily.
        """
        shapes = {name: (leaf.shape, leaf.dtype) for name, leaf in trained.items()}
        is_known = self._checked is not None and self._checked[0] is tx
        if not self.functions or (is_known and self._checked == (tx, shapes)):
            return
        lazy = lazy_tables(tx, trained, self.functions)
        names = ", ".join(map(repr, sorted(lazy)))
        if lazy and self._is_exact:
            raise ValueError(
                f"sparse_exact=True rejects this optimizer, which is lazy for {names}: it changes "
                "rows without a gradient, for example by momentum or weight decay, but only the "
                "rows that a batch touches are updated. Use optax.adagrad or optax.sgd without "
                "momentum, omit sparse_exact, or leave the table out of `sparse`."
            )
        if lazy - self._logged:
            _logger.warning(
                "The optimizer is lazy for the sparse %s %s: momentum and weight decay reach only "
                "the rows that a batch touches, so training differs from that with dense "
                "gradients. sparse_exact=True rejects this.",
                counted(len(lazy), "table").partition(" ")[2],
                names,
            )
            self._logged |= lazy
        self._checked = (tx, shapes)
