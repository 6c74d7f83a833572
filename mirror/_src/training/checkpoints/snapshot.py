"""Reads the arrays of nnx objects by name for a checkpoint, and writes them back."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.tree_util import keystr

from mirror._src.base.errors import describe, listing
from mirror._src.base.types import is_numeric
from mirror._src.devices.replicas import ReplicaDevices
from mirror._src.engine.per_replica import per_replica
from mirror._src.engine.variable import Variable, spread_over
from mirror._src.training.checkpoints.files import KeyData, require_arrays
from mirror._src.training.precision import SCALE

T = TypeVar("T")

OPTIONAL = SCALE
"""The object that checkpoint and trainer need not both have: the loss scale."""


def read(objects: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `{"model.out.kernel": array}`, with aggregated values of `"on_read"` variables.

    Aggregating is a collective, which every process must take part in.

    Raises:
        ValueError: If two arrays have one name.
    """
    arrays: dict[str, Any] = {}
    for path, holder in _places(objects):
        for inside, value in jax.tree_util.tree_leaves_with_path(value_of(holder)):
            name = path + keystr(inside)
            if name in arrays:
                raise ValueError(
                    f"Two arrays have the name {name} in a checkpoint, which joins the names of "
                    "attributes and keys with dots. Rename one."
                )
            arrays[name] = _as_on_devices(value)
    return arrays


def require_values(objects: Mapping[str, Any]) -> None:
    """Rejects objects that a checkpoint cannot contain. A collective, as `read`.

    Raises:
        TypeError: If one is not an array of numbers or PRNG keys, as a `ServerTable`.
        ValueError: If two arrays have one name.
    """
    require_arrays(read(objects))


def described(objects: Mapping[str, Any]) -> dict[str, str]:
    """Returns `{"model.out.kernel": "float32[3,2]"}`. A collective, as `read`."""
    return {name: _described(value) for name, value in read(objects).items()}


def require_match(current: Mapping[str, str], entries: Mapping[str, Any]) -> None:
    """Checks names, shapes and dtypes of a checkpoint, before its arrays are read.

    Raises:
        ValueError: If they differ from the descriptions of the objects.
    """
    saved = {name: _described_entry(entry) for name, entry in entries.items()}
    if not (_has_optional(current) and _has_optional(saved)):
        current, saved = _without_optional(current), _without_optional(saved)
    wrong = [f"{name}: not in the checkpoint" for name in current if name not in saved]
    wrong += [f"{name}: only in the checkpoint" for name in saved if name not in current]
    wrong += [
        f"{name}: {saved[name]} in the checkpoint, {current[name]} in the trainer"
        for name in current.keys() & saved.keys()
        if saved[name] != current[name]
    ]
    if wrong:
        raise ValueError(
            "The checkpoint does not match this model and optimizer:\n"
            f"{listing(sorted(wrong))}\nCreate the Trainer with the model, optimizer and `wrt` "
            "it was saved with. To read only the arrays, use mirror.load_checkpoint."
        )


def weak_names(arrays: Mapping[str, Any]) -> list[str]:
    """Returns the names of the weakly typed arrays: a strong type would promote bfloat16."""
    return [name for name, value in arrays.items() if getattr(value, "weak_type", False)]


def placed(
    objects: Mapping[str, Any],
    saved: Iterable[tuple[str, Any]],
    weak: Collection[str] | None,
    replicas: ReplicaDevices,
) -> dict[str, Any]:
    """Returns the arrays of a checkpoint on the devices of the replicas, each placed as it is read.

    Call `require_match` first. A loss scale that the objects do not have is skipped. If a
    checkpoint does not tell which arrays are weak, numbers are as in the objects.
    """
    old, arrays = read(objects), {}
    weak = weak_names({n: x for n, x in old.items() if not x.ndim}) if weak is None else weak
    for name, value in saved:
        if name in old:
            array = replicas.store(value.keys() if isinstance(value, KeyData) else value)
            arrays[name] = replicas.weaken(array) if name in weak else array
    return arrays


def write(objects: Mapping[str, Any], new: Mapping[str, Any], replicas: ReplicaDevices) -> None:
    """Writes placed arrays into the objects by name.

    The loss scale does not change if the arrays do not contain one.
    """
    for root, obj in objects.items():
        if root == OPTIONAL and not _has_optional(new):
            continue
        bare = []  # arrays that are plain attributes, not variables
        for path, holder in nnx.to_flat_state(nnx.state(obj)):
            value = _taken(new, _name(root, path), value_of(holder))
            if isinstance(holder, nnx.Variable):
                _set(holder, value, replicas)
            else:
                bare.append((path, value))
        nnx.update(obj, nnx.from_flat_state(bare))


def _has_optional(names: Iterable[str]) -> bool:
    return any(name.startswith(f"{OPTIONAL}.") for name in names)


def _without_optional(entries: Mapping[str, T]) -> dict[str, T]:
    return {name: x for name, x in entries.items() if not name.startswith(f"{OPTIONAL}.")}


def _taken(new: Mapping[str, Any], name: str, like: Any) -> Any:
    return jax.tree_util.tree_map_with_path(lambda inside, _: new[name + keystr(inside)], like)


def _set(variable: nnx.Variable[Any], value: Any, replicas: ReplicaDevices) -> None:
    if isinstance(variable, Variable) and variable.is_on_read:
        variable.set_raw_value(per_replica(spread_over(variable, replicas)))
        variable.assign(value)
    else:
        variable.set_raw_value(value)


def _described(value: Any) -> str:
    if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        return f"key<{jax.random.key_impl(value)}>{list(value.shape)}"
    return describe(value)


def _described_entry(entry: Mapping[str, Any]) -> str:
    """Describes an entry of the metadata as `_described` does its array."""
    shape = entry["shape"]
    if "impl" in entry:
        return f"key<{entry['impl']}>{shape[:-1]}"
    return f"{entry['dtype']}[{','.join(map(str, shape))}]"


def _as_on_devices(value: Any) -> Any:
    """Converts values of a model that has not run yet: JAX may not support their 64 bits."""
    if isinstance(value, jax.Array) or not is_numeric(np.asarray(value).dtype):
        return value
    return jnp.asarray(value)


def _places(objects: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for root, obj in objects.items():
        for path, holder in nnx.to_flat_state(nnx.state(obj)):
            yield _name(root, path), holder


def _name(root: str, path: Any) -> str:
    return ".".join([root, *map(str, path)])


def value_of(holder: Any) -> Any:
    """Returns the value of a variable, or the array itself that is a plain attribute."""
    return holder.get_value() if isinstance(holder, nnx.Variable) else holder
