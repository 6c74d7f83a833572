"""The model and optimizer of a training step, as arrays by name that parameter servers hold."""

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, final

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx, traverse_util

from mirror._src.base.errors import describe, listing
from mirror._src.base.types import PyTree, keys_like
from mirror._src.devices.transfer import copied, move
from mirror._src.engine.nnx.structure import with_copies, with_snapshots
from mirror._src.engine.variable import Variable
from mirror._src.ps.placement import Leaf, Placement, rows
from mirror._src.ps.sparse import ServerRows
from mirror._src.training.checkpoints.files import KeyData, on_host
from mirror._src.training.checkpoints.snapshot import value_of

Path = tuple[Any, ...]
Structs = list[tuple[Path, jax.ShapeDtypeStruct]]
OptimizerState = Mapping[tuple[str, ...], np.ndarray]


def nest(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Returns nested dicts: `{"a": {"b": x}}` for `{"a.b": x}`.

    Raises:
        ValueError: If the name of a leaf is the beginning of another one, as `a` of `a.b`.
    """
    for name in leaves:
        for outer in itertools.accumulate(name.split(".")[:-1], "{}.{}".format):
            if outer in leaves:
                raise ValueError(
                    f"The name of the variable {outer!r} is the beginning of {name!r}. Rename one "
                    "of them."
                )
    tree: dict[str, Any] = traverse_util.unflatten_dict(leaves, sep=".")
    return tree


def flatten(tree: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Returns leaves by their names; the inverse of `nest`."""
    leaves = traverse_util.flatten_dict(tree, sep=".")
    return {name: leaves[name] for name in names}


def structs(leaves: Mapping[str, Any]) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the shape and dtype of each leaf."""
    return {n: jax.ShapeDtypeStruct(x.shape, np.dtype(x.dtype)) for n, x in leaves.items()}


def init_structs(
    tx: optax.GradientTransformation, leaves: Mapping[str, Any]
) -> tuple[Structs, Any]:
    """Returns the paths, shapes and dtypes of the state of an optimizer, and its structure.

    Raises:
        ValueError: If the optimizer cannot be initialized with these leaves alone.
    """
    try:
        state = jax.eval_shape(tx.init, nest(structs(leaves)))
    except Exception as error:
        raise ValueError(
            f"`tx` cannot be initialized with the variables of one parameter server alone, "
            f"{', '.join(sorted(leaves)) or 'none'}: {type(error).__name__}: {error} "
            "Pass masks and labels of optax as functions of the parameters, not as trees of fixed "
            "structure, or use one server, ps=1."
        ) from error
    return jax.tree_util.tree_flatten_with_path(state)


def owner(path: Path, names: Mapping[str, Any]) -> str | None:
    """Returns the leaf that a leaf of the state belongs to: whose path ends its path."""
    inner = itertools.takewhile(lambda k: isinstance(k, jax.tree_util.DictKey), reversed(path))
    keys = [str(key.key) for key in inner][::-1]
    ends = (".".join(keys[i:]) for i in range(len(keys)))
    return next((name for name in ends if name in names), None)


def row_owner(path: Path, shape: Sequence[int], leaves: Mapping[str, Any]) -> str | None:
    """Returns the leaf whose rows the rows of a leaf of the state belong to; `None` without any."""
    name = owner(path, leaves)
    if name is None or not shape or not leaves[name].shape:
        return None
    return name if shape[0] == leaves[name].shape[0] else None


def by_path(state: PyTree) -> OptimizerState:
    """Returns the leaves of an optimizer's state, in NumPy, by the keys of their paths as strings.

    So the states of nested dicts and of nnx, which counts the items of a list in integers, match.
    """
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return {path_text(path): as_numpy(leaf) for path, leaf in leaves}


def path_text(path: Path) -> tuple[str, ...]:
    """Returns the keys of a path as strings."""
    return tuple(
        str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", key)))) for key in path
    )


def join_optimizer_state(
    structs: Structs,
    trained: Mapping[str, Any],
    placement: Placement,
    states: Sequence[OptimizerState],
) -> OptimizerState:
    """Returns the state of an optimizer for whole leaves, given its state on each server.

    What does not belong to a leaf, such as a count of steps, is equal on all servers.

    Args:
        structs: Paths, shapes and dtypes of the whole state.
        trained: Shape and dtype of each trained leaf, whole.
        placement: Where the rows of the leaves are.
        states: The state on each server.
    """
    joined = {}
    for path, struct in structs:
        key, name = path_text(path), row_owner(path, struct.shape, trained)
        holders = [] if name is None else placement.holders[name]
        if len(holders) > 1:
            joined[key] = np.concatenate([states[server][key] for server, _ in holders])
        else:
            joined[key] = next(state[key] for state in states if key in state)
    return joined


def split_optimizer_state(
    structs: Structs,
    trained: Mapping[str, Any],
    placement: Placement,
    state: OptimizerState,
) -> list[OptimizerState]:
    """Returns the state of an optimizer for each server; the inverse of `join_optimizer_state`."""
    states: list[OptimizerState] = []
    for slices in placement.servers:
        own, parts = {part.leaf: part for part in slices}, {}
        for path, struct in structs:
            name, key = owner(path, trained), path_text(path)
            if name is None or name in own:
                is_cut = row_owner(path, struct.shape, trained) is not None
                parts[key] = rows(state[key], own[name]) if name and is_cut else state[key]
        states.append(parts)
    return states


def as_numpy(leaf: Any) -> np.ndarray:
    """Returns an array in NumPy; the data of a random key. It may be a view."""
    if jax.dtypes.issubdtype(getattr(leaf, "dtype", None), jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return np.asarray(leaf)


def as_jax(leaf: np.ndarray, like: Any, device: jax.Device | None = None) -> jax.Array:
    """Returns a copy of an array as an array of JAX with the dtype and the weak type of another.

    Args:
        leaf: The array.
        like: The other one.
        device: Where the copy is committed; None leaves it uncommitted on the default device.
    """
    if jax.dtypes.issubdtype(like.dtype, jax.dtypes.prng_key):
        array = keys_like(jax.numpy.array(leaf), like)
    elif getattr(like, "weak_type", False) and not np.ndim(leaf):
        array = jax.numpy.asarray(np.asarray(leaf).item())
    else:
        return copied(np.asarray(leaf, like.dtype), device)
    return array if device is None else move(array, device)


class ModelDefinition(NamedTuple):
    """The parts from which a worker builds its own copy of the model, and where its leaves are.

    Attributes:
        graphdef: Structure of the model.
        paths: Path of each array in the flat state of the model, by name.
        local: Values of the arrays that servers do not hold, by name: random keys, counts and other
            integers.
        wrt: The filter of the optimizer, which selects the trained variables.
        placement: Where the leaves are.
        id_functions: For each table, the function of its ids.
    """

    graphdef: Any
    paths: dict[str, Path]
    local: dict[str, Any]
    wrt: Any
    placement: Placement
    id_functions: Mapping[str, Callable[..., Any]] = {}

    def build(self) -> nnx.Module:
        """Returns a new model, whose trained and moving arrays are zeros; tables have no rows."""
        arrays = dict(self.local)
        for name, leaf in self.placement.leaves.items():
            shape = (0, *leaf.shape[1:]) if name in self.id_functions else leaf.shape
            arrays[name] = np.zeros(shape, np.dtype(leaf.dtype))
        flat = [(path, device_array(arrays[name])) for name, path in self.paths.items()]
        model: nnx.Module = nnx.merge(self.graphdef, nnx.from_flat_state(flat))
        return model


@final
class TrainingObjects:
    """A model and its optimizer, both on the driver.

    Args:
        model: The model.
        optimizer: Its optimizer.

    Raises:
        ValueError: If servers cannot hold one of the variables.
        TypeError: If `optimizer` is a subclass of nnx.Optimizer, which may have another `update`.
    """

    def __init__(self, model: nnx.Module, optimizer: nnx.Optimizer[Any]) -> None:
        if type(optimizer) is not nnx.Optimizer:
            raise TypeError(
                f"`optimizer` must be an nnx.Optimizer itself, got {type(optimizer).__name__}. "
                "Parameter servers run its optax transformation, not its methods. Pass "
                "nnx.Optimizer(model, tx, wrt=nnx.Param)."
            )
        self.model, self.optimizer = model, optimizer
        graphdef: Any
        graphdef, state = nnx.split(model)
        self._graphdef, _ = with_snapshots(graphdef)
        trained = {path for path, _ in nnx.to_flat_state(nnx.state(model, optimizer.wrt))}
        flat = nnx.to_flat_state(state)
        self._paths: dict[str, Path] = {".".join(map(str, path)): path for path, _ in flat}
        self._local: dict[str, Any] = {}
        self.leaves: list[Leaf] = []
        self.tables: dict[str, ServerRows] = {}
        for name, (path, holder) in zip(self._paths, flat, strict=True):
            value, kind = value_of(holder), _kind(name, holder, path in trained)
            if kind == "local":
                self._local[name] = value
            else:
                self.leaves.append(Leaf(name, value.shape, str(value.dtype), kind))
            if isinstance(value, ServerRows):
                self.tables[name] = value
        if not any(leaf.kind == "trained" for leaf in self.leaves):
            raise ValueError(
                f"{describe(model)} has no variables that wrt={describe(optimizer.wrt)} of the "
                "optimizer selects, so there is nothing to train."
            )

    @property
    def trained(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shape and dtype of the trained leaves that this program holds, by name."""
        return structs({leaf.name: leaf for leaf in self._held if leaf.kind == "trained"})

    @functools.cached_property
    def state_structs(self) -> Structs:
        """Paths, shapes and dtypes of the state of the optimizer."""
        return init_structs(self.optimizer.tx, self.trained)[0]

    @property
    def _held(self) -> list[Leaf]:
        """The leaves that this program holds too."""
        return [leaf for leaf in self.leaves if leaf.name not in self.tables]

    @property
    def first_rows(self) -> dict[str, Callable[[int, int], Any]]:
        """The functions of the tables that this program does not hold, by name."""
        return {name: rows.first_rows for name, rows in self.tables.items()}

    @property
    def step(self) -> int:
        """The number of updates that the optimizer has made."""
        return int(self.optimizer.step[...])

    def definition(
        self, placement: Placement, id_functions: Mapping[str, Callable[..., Any]] = {}
    ) -> ModelDefinition:
        """Returns what a worker builds its copy from."""
        local = {name: on_host(value) for name, value in self._local.items()}
        graphdef = self._graphdef
        if self.tables:
            copy: Any = nnx.merge(*nnx.split(self.model))
            for name in self.tables:
                _replace(copy, self._paths[name], nnx.Param(jnp.zeros(0)))
            graphdef, _ = with_snapshots(nnx.split(copy)[0])
        graphdef = with_copies(graphdef)
        return ModelDefinition(
            *(graphdef, self._paths, local, self.optimizer.wrt, placement, id_functions)
        )

    def has_same_structure(self) -> bool:
        """Whether the model still has the structure that it had at first."""
        return bool(with_snapshots(nnx.split(self.model)[0])[0] == self._graphdef)

    def arrays(self) -> list[Any]:
        """Returns the arrays of model and optimizer as they are; equal lists mean no change."""
        model = jax.tree.leaves(nnx.state(self.model))
        return [*model, *jax.tree.leaves(nnx.state(self.optimizer))]

    def read(self) -> dict[str, np.ndarray]:
        """Returns the trained and moving arrays by name, in NumPy."""
        arrays = self._arrays()
        return {leaf.name: np.asarray(arrays[leaf.name]) for leaf in self._held}

    def _arrays(self) -> dict[str, Any]:
        """Returns the arrays of the model by name."""
        holders = dict(nnx.to_flat_state(nnx.state(self.model)))
        return {name: value_of(holders[path]) for name, path in self._paths.items()}

    def read_optimizer(self) -> OptimizerState:
        """Returns the optimizer's state, as servers see it."""
        state = by_path(nnx.as_pure(self.optimizer.opt_state))
        wanted = {path_text(path) for path, _ in self.state_structs}
        if state.keys() != wanted:
            differing = sorted(wanted - state.keys()) or sorted(state)
            raise ValueError(
                "The state of the optimizer does not match its transformation: "
                f"{'.'.join(differing[0])}. Create the optimizer with the model: "
                "nnx.Optimizer(model, tx, wrt=nnx.Param)."
            )
        return state

    def write(self, values: Mapping[str, np.ndarray], state: OptimizerState, step: int) -> None:
        """Writes values, the optimizer's state and its number of updates into the objects."""
        arrays, names = self._arrays(), [leaf.name for leaf in self._held]
        flat = [(self._paths[name], _like(values[name], arrays[name])) for name in names]
        nnx.update(self.model, nnx.from_flat_state(flat))
        pure = nnx.as_pure(self.optimizer.opt_state)
        treedef: Any
        paths, treedef = jax.tree_util.tree_flatten_with_path(pure)
        filled = [_like(state[path_text(path)], old) for path, old in paths]
        nnx.update(self.optimizer.opt_state, nnx.state(treedef.unflatten(filled)))
        # Not `[...] =`, which fails for a step on several devices, of another strategy.
        self.optimizer.step.set_value(_like(np.asarray(step), self.optimizer.step.get_value()))


def device_array(value: Any) -> Any:
    """Returns the array of the result of `on_host`."""
    if isinstance(value, KeyData):
        return value.keys()
    return jnp.asarray(value)


def bits(value: Any) -> np.ndarray:
    """Returns the bits of the result of `on_host`."""
    return value.data if isinstance(value, KeyData) else value


def _kind(name: str, holder: Any, is_trained: bool) -> Literal["trained", "moving", "local"]:
    """Returns the kind of an array: `moving` if steps change it without a gradient."""
    value = value_of(holder)
    if isinstance(holder, Variable) and holder.is_on_read:
        raise ValueError(
            f"{name} is a mirror.Variable with synchronization='on_read', which has one value per "
            "replica. Parameter servers hold one value of a variable. Return the value from the "
            "step instead."
        )
    if isinstance(holder, nnx.metrics.MetricState):
        raise ValueError(
            f"{name} is the state of a metric inside the model, which parameter servers cannot "
            "merge. Return the values from the step, and update the metric with them."
        )
    if not hasattr(value, "dtype"):
        raise ValueError(
            f"{name} must be one array to be on parameter servers, got {describe(value)}. Create "
            "one variable for each array."
        )
    is_float = jnp.issubdtype(value.dtype, jnp.inexact)
    if is_trained or isinstance(value, ServerRows):
        return "trained"
    return "moving" if is_float else "local"


def _replace(node: Any, path: Path, variable: nnx.Variable[Any]) -> None:
    """Replaces the variable at a path of a model."""
    *outer, last = path
    for key in outer:
        node = node[key] if isinstance(node, nnx.List | nnx.Dict) else getattr(node, str(key))
    if isinstance(node, nnx.List | nnx.Dict):
        node[last] = variable
    else:
        setattr(node, str(last), variable)


def _like(value: np.ndarray, old: Any) -> Any:
    """Returns an array of JAX with the dtype of the old one, on its first device."""
    if not isinstance(old, jax.Array):
        return as_jax(value, old)
    return as_jax(value, old, min(old.devices(), key=lambda device: device.id))


def require_unchanged(before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
    """Rejects a step that changed a variable whose change cannot reach the servers.

    Raises:
        ValueError: If an integer variable or a random key has changed.
    """
    changed = [name for name in before if not np.array_equal(before[name], after[name])]
    if changed:
        raise ValueError(
            f"The step changed variables that are not on parameter servers:\n{listing(changed)}\n"
            "Only float variables are. Use a float variable, an nnx.Rngs for random numbers, or "
            "return the value from the step."
        )
