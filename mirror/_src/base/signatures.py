"""Errors for calls that do not match the signature of a public function."""

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mirror._src.base.errors import nearest_name
from mirror._src.base.naming import signature_of

# Arguments that people guess, by the argument that they are for.
_GUESSES = {
    "num_replicas": "devices",
    "num_gpus": "devices",
    "num_devices": "devices",
    "n_devices": "devices",
    "gpus": "devices",
    "device_ids": "devices",
    "batch_size": "dataset",
    "batch": "dataset",
    "drop_last": "remainder",
    "drop_remainder": "remainder",
    "communication": "cross_device_ops",
}
_HINTS = {
    "devices": "Pass the number of devices, devices={0}, or omit it to use all. For "
    "several replicas on each device, pass replicas_per_device={0}.",
    "dataset": "A dataset yields global batches: mirror.data.from_arrays(arrays, batch_size={0}).",
    "remainder": "Pass remainder='drop' to skip uneven batches, or remainder='pad' to pad them.",
    "cross_device_ops": "Pass cross_device_ops=mirror.AllReduce().",
}


_ELSEWHERE = {
    "restore_best_weights": "Save the best epoch with mirror.callbacks.Checkpoint(directory, "
    "monitor='val_loss'), and then call trainer.restore(directory, 'best').",
}
# For calls with too many positional arguments.
_AS_ONE = {
    **{
        method: "Pass all arguments of the step as one tuple: "
        f"strategy.{method}(step, (model, batch))."
        for method in ("verify", "inspect", "explain")
    },
    "from_arrays": "Pass all arrays as one tree: from_arrays({'x': x, 'y': y}, batch_size=32).",
    "distribute_dataset": "Pass one dataset, which yields global batches: "
    "strategy.distribute_dataset(mirror.data.from_arrays((x, y), batch_size=32)).",
}
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
        hint = _AS_ONE.get(name, "") if i is None or hasattr(args[i], "shape") else ""
    owners = [type(args[0])] if args and "self" in signature.parameters else []
    example = "" if hint else _example(name, [documented, *owners])
    return " ".join(filter(None, [f"{text}. The signature is {name}{shown}.", hint, example]))


def _hint(name: str, value: object, names: Sequence[str]) -> str:
    """Returns a sentence about an unknown argument, or ""."""
    if name in _ELSEWHERE:
        return _ELSEWHERE[name]
    guess = _GUESSES.get(name)
    if guess is not None and guess in names:
        return _HINTS[guess].format(value if isinstance(value, int) else "n")
    nearest = nearest_name(name, names)
    return f"Did you mean {nearest}=?" if nearest is not None else ""


def _example(name: str, documented: Sequence[Any]) -> str:
    """Returns the first example of a call in the docstrings, or ""."""
    texts = "\n".join(each.__doc__ or "" for each in documented)
    lines = re.findall(r"^ *(?:>>>|\.\.\.) +(.*)", texts, re.M)
    calls = [line for line in lines if re.search(rf"\b{name}\(", line)]
    return f"For example: {calls[0].partition('  #')[0].removeprefix('return ')}" if calls else ""
