"""States of Grain's iterators and torchdata's loaders, with which a pass resumes where it was."""

import base64
import itertools
import warnings
from collections.abc import Iterator
from typing import Any, final

import numpy as np

from mirror._src.base.naming import depth_of_user
from mirror._src.base.optional import require


@final
class StatefulPass:
    """A pass over a dataset, which begins at a state if the dataset can restore it.

    Args:
        dataset: The dataset.
        saved: A result of `state`, or None.

    Attributes:
        batches: The batches of the pass.
        is_restored: Whether it begins at the state.
    """

    def __init__(self, dataset: Any, saved: dict[str, Any] | None) -> None:
        # Hugging Face datasets have such methods, too, but do not resume in shuffled buffers.
        packages = [kind.__module__.partition(".")[0] for kind in type(dataset).__mro__]
        loader = dataset if "torchdata" in packages else None
        self._type = type(dataset).__qualname__
        self.is_restored = saved is not None and saved["type"] == self._type
        try:
            state = _decoded(saved["state"]) if saved is not None and self.is_restored else None
            self.batches: Any = _started(dataset, loader, state)
        except Exception as error:
            if not self.is_restored:
                raise
            self.is_restored = False
            _warn(f"{self._type} does not accept its state in the checkpoint: {error}")
            self.batches = iter(dataset)
        of_iterator = getattr(self.batches, "get_state", None)
        self._get = of_iterator if loader is None else loader.state_dict

    def put_before(self, peeked: list[Any]) -> None:
        """Puts batches before the others, unless they are those after a restored state."""
        if peeked and not self.is_restored:
            self.batches, self._get = itertools.chain(peeked, self.batches), None

    def state(self) -> dict[str, Any] | None:
        """Returns the state after the last batch, as JSON, or None if the dataset has none."""
        try:
            return self._get and {"type": self._type, "state": _encoded(self._get())}
        except Exception as error:
            self._get = None
            _warn(f"The state of {self._type} cannot be stored in checkpoints: {error}")
            return None


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
    warnings.warn(
        f"{what.rstrip('.')}. Training that resumes within an epoch reads and drops the batches "
        "that were used.",
        stacklevel=depth_of_user(),
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
