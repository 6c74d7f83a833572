"""Accesses the nodes, variables and arrays of nnx objects by path."""

from collections.abc import Iterator, Sequence
from typing import Any

from flax import nnx

Path = tuple[Any, ...]


def follow(objects: Any, path: Path) -> Any:
    """Returns the node, variable or array at a path."""
    node = objects
    for key in path:
        node = child(node, key)
    return node


def child(node: Any, key: Any) -> Any:
    """Returns an attribute or item of a node."""
    if isinstance(key, str) and not isinstance(node, dict | nnx.State) and hasattr(node, key):
        return getattr(node, key)
    return node[key]


def put(node: Any, key: Any, value: Any) -> None:
    """Sets an attribute or item of a node."""
    if isinstance(key, str) and isinstance(node, nnx.Pytree) and hasattr(node, key):
        setattr(node, key, value)
    else:
        node[key] = value


def holder_at(objects: Sequence[Any], path: Path) -> Any:
    """Returns the variable at a path, or the object or container that holds the array there."""
    node = follow(objects, path)
    return node if isinstance(node, nnx.Variable) else follow(objects, path[:-1])


def read_holder(holder: Any, key: Any) -> Any:
    """Returns the raw value of a variable, or the attribute or item of any other holder."""
    return holder.get_raw_value() if isinstance(holder, nnx.Variable) else child(holder, key)


def read_at(objects: Sequence[Any], path: Path) -> Any:
    """Returns the raw value of the variable at a path, or the array itself."""
    node = follow(objects, path)
    return node.get_raw_value() if isinstance(node, nnx.Variable) else node


def nodes(objects: Sequence[Any]) -> Iterator[tuple[Path, nnx.Pytree]]:
    """Yields the nnx objects that are not variables, each with its path."""
    for path, node in nnx.iter_graph(tuple(objects)):
        if isinstance(node, nnx.Pytree):
            yield path, node
