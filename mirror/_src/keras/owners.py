"""Which strategy a Keras model trains on."""

import weakref
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding

from mirror._src.context.scopes import current_frame
from mirror._src.devices.replicas import ReplicaDevices
from mirror._src.utils.errors import listing
from mirror._src.utils.keras_library import BACKEND, backend, variables_of

_COPY = (
    "To copy it into a scope: copy = keras.models.clone_model(model); "
    "copy.set_weights(model.get_weights())."
)


class Owner(NamedTuple):
    """A strategy that Keras models train on.

    Attributes:
        name: The strategy in words.
        replicas: Its devices. A model runs on each distinct one, for all of its replicas.
    """

    name: str
    replicas: ReplicaDevices


_by_mesh: dict[Mesh, Owner] = {}
_created_in: "weakref.WeakKeyDictionary[Any, Owner]" = weakref.WeakKeyDictionary()


def add_scope(strategy: object, replicas: ReplicaDevices) -> None:
    """Remembers whose arrays lie on this mesh: of optimizers that are created in the scope."""
    if not replicas.are_mixed and replicas.mesh not in _by_mesh:
        _by_mesh[replicas.mesh] = Owner(str(strategy), replicas)


def claim(model: Any) -> None:
    """Remembers that the current scope, if there is one, has created a model.

    Raises:
        RuntimeError: If Keras does not use JAX.
        NotImplementedError: If a model cannot train on the devices of the scope.
    """
    owner = _of_scope("created")
    if owner is not None:
        _created_in[model] = owner


def owner_of(model: Any) -> Owner | None:
    """Returns the strategy that a model trains on; None if it has nothing to do with any.

    It is the strategy in whose scope the model was created; else, in whose scope it was compiled or
    is being trained.

    Raises:
        RuntimeError: If the caller is in the scope of another strategy, or in a replica; or if
            variables of a model that was created outside were created in several scopes.
        NotImplementedError: If a model cannot train on the devices of the current scope.
    """
    created, current = _created_in.get(model), _of_scope("trained")
    lying = {} if created is not None else _owners_of_variables(model)
    if len(lying) > 1:
        names = listing(f"{path}: {owner.name}" for owner, path in lying.items())
        raise RuntimeError(
            f"Variables of the Keras model {model.name!r} were created in the scopes of several "
            f"strategies:\n{names}\nCreate and compile the model in one scope: with "
            f"strategy.scope(): model = ...; model.compile(...). {_COPY}"
        )
    owner = created or next(iter(lying), None)
    if owner is None or current is None or owner.replicas.mesh == current.replicas.mesh:
        return owner or current
    verb = "created" if created is not None else "compiled or trained"
    raise RuntimeError(
        f"The Keras model {model.name!r} was {verb} in the scope of {owner.name}, but is used in "
        f"the scope of another strategy, {current.name}. Exit that scope first, or create the "
        f"model in it. {_COPY}"
    )


def _owners_of_variables(model: Any) -> dict[Owner, str]:
    """Returns the strategies on whose mesh variables lie, each with the path of one of them."""
    found: dict[Owner, str] = {}
    for variable in variables_of(model):
        owner = _owner_of_array(variable.value)
        if owner is not None:
            found.setdefault(owner, variable.path)
    return found


def _owner_of_array(value: Any) -> Owner | None:
    sharding = value.sharding if isinstance(value, jax.Array) else None
    if not isinstance(sharding, NamedSharding) or not isinstance(sharding.mesh, Mesh):
        return None
    return _by_mesh.get(sharding.mesh)


def _of_scope(verb: str) -> Owner | None:
    """Returns the strategy whose scope the caller is in, if a Keras model can train on it.

    Args:
        verb: What happens to the model, for messages.
    """
    frame = current_frame()
    if frame is None:
        return None
    strategy = frame.strategy
    if frame.replica is not None or frame.devices is None:
        raise RuntimeError(
            f"A Keras model was {verb} inside a replica, in a step run by {strategy}. Call it "
            "outside: fit, evaluate and predict use all replicas themselves."
        )
    if backend() != BACKEND:
        raise RuntimeError(
            f"A Keras model was {verb} inside strategy.scope() of {strategy}, but Keras uses the "
            f"backend {backend()!r}, and mirror needs {BACKEND!r}. Set it before the first import "
            f'of Keras: os.environ["KERAS_BACKEND"] = "{BACKEND}".'
        )
    replicas = frame.devices
    if replicas.are_mixed or replicas.spans_processes:
        what = "of several processes" if replicas.spans_processes else "of several types"
        raise NotImplementedError(
            f"A Keras model was {verb} inside strategy.scope() of {strategy}, but Keras models "
            f"cannot train on devices {what} yet. Use the devices of one type in one process, "
            'mirror.MirroredStrategy(mirror.config.list_logical_devices("GPU")), or train a Flax '
            "model with mirror.Trainer."
        )
    return Owner(str(strategy), replicas)
