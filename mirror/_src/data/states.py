"""States of Grain's iterators and torchdata's loaders, with which a pass resumes where it was."""

import base64
import itertools
import json
from collections.abc import Iterator
from typing import Any, final

import numpy as np

from mirror._src.base.naming import warn_user
from mirror._src.base.optional import require
from mirror._src.data.batches import host_batch

_MOST_SENT = 2**16  # bytes of JSON, for each step of a local input


@final
class StatefulPass:
    """A pass over a dataset, which begins at a state if the dataset can restore it.

    Args:
        dataset: The dataset.
        saved: A result of `state`, or None.
        is_local: Whether the process needs a batch if others have some, and sends its states.

    Attributes:
        batches: The batches of the pass.
        is_restored: Whether it begins at the state.
        is_only: Whether the dataset has no other pass.
        full: The padded size of the batches before the state, or 0.
    """

    def __init__(
        self, dataset: Any, saved: dict[str, Any] | None, *, is_local: bool = False
    ) -> None:
        # Hugging Face datasets have such methods, too, but do not resume in shuffled buffers.
        packages = [kind.__module__.partition(".")[0] for kind in type(dataset).__mro__]
        loader = dataset if "torchdata" in packages else None
        self._type, self._is_local, state = type(dataset).__qualname__, is_local, None
        self.is_restored = saved is not None and saved["type"] == self._type
        try:
            if saved is not None and self.is_restored:
                state = _decoded(saved["state"])
            self.batches: Any = _started(dataset, loader, state)
        except Exception as error:
            if not self.is_restored:
                raise
            self.is_restored = False
            _warn(f"{self._type} does not accept its state in the checkpoint: {error}")
            self.batches = iter(dataset)
        self.full: int = saved.get("full", 0) if saved is not None and self.is_restored else 0
        of_iterator = getattr(self.batches, "get_state", None)
        self._get = of_iterator if loader is None else loader.state_dict
        self.is_only = self.batches is dataset
        if is_local and self.is_restored:
            self.batches = self._or_empty(self.batches, dataset, state)

    def put_before(self, peeked: list[Any]) -> None:
        """Puts batches before the others, unless they are those after a restored state."""
        if peeked and not self.is_restored:
            self.batches, self._get = itertools.chain(peeked, self.batches), None

    def state(self) -> dict[str, Any] | None:
        """Returns the state after the last batch, as JSON, or None if the dataset has none."""
        try:
            state = self._get and {"type": self._type, "state": _encoded(self._get())}
            size = len(json.dumps(state)) if self._is_local else 0
            if size > _MOST_SENT:
                raise ValueError(f"it has {size:,} bytes, and input='local' sends {_MOST_SENT:,}")
            return state
        except Exception as error:
            self._get = None
            _warn(f"The state of {self._type} cannot be stored in checkpoints: {error}")
            return None

    def _or_empty(self, batches: Iterator[Any], dataset: Any, state: Any) -> Iterator[Any]:
        """Yields the batches; without any, one without examples, which changes no state."""
        first = next(batches, None)
        if first is not None:
            yield from itertools.chain([first], batches)
            return
        self._get = lambda: state
        for batch in itertools.islice(iter(dataset), 1):
            yield host_batch("batch", batch).part(slice(0)).map(lambda leaf: leaf)


def _started(dataset: Any, loader: Any, state: Any) -> Iterator[Any]:
    """Returns the batches of a pass that begins at a state of the loader, or of its iterator."""
    if loader is not None and state is not None:
        loader.load_state_dict(state)
    try:
        batches = iter(dataset)
    except Exception:
        if loader is not None:
            loader.load_state_dict({})
        raise
    if loader is None and state is not None:
        batches.set_state(state)
    return batches


def _warn(what: str) -> None:
    warn_user(
        f"{what.rstrip('.')}. Training that resumes within an epoch reads and drops the batches "
        "that were used."
    )


def _encoded(value: Any) -> Any:
    """Returns a state as JSON; lists with a tag stand for all that JSON has no type for."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, bytes):
        return ["bytes", base64.b64encode(value).decode()]
    if isinstance(value, list | tuple):
        return [type(value).__name__, [_encoded(item) for item in value]]
    if isinstance(value, dict):
        return ["dict", [[_encoded(key), _encoded(item)] for key, item in value.items()]]
    is_torch = type(value).__module__ == "torch"
    if is_torch or isinstance(value, np.ndarray | np.generic):
        array = np.asarray(value)
        kind = "torch" if is_torch else "numpy"
        return [kind, [array.dtype.str, array.shape, base64.b64encode(array.tobytes()).decode()]]
    raise TypeError(f"it contains a {type(value).__name__}")


def _decoded(value: Any) -> Any:
    """Returns the state of a result of `_encoded`."""
    if not isinstance(value, list):
        return value
    kind, content = value
    if kind == "bytes":
        return base64.b64decode(content)
    if kind == "dict":
        return {_decoded(key): _decoded(item) for key, item in content}
    if kind in ("list", "tuple"):
        items = [_decoded(item) for item in content]
        return items if kind == "list" else tuple(items)
    dtype, shape, data = content
    array = np.frombuffer(base64.b64decode(data), dtype).reshape(shape).copy()
    return require("torch").from_numpy(array) if kind == "torch" else array[()]
