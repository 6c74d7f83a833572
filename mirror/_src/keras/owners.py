"""Which strategy a Keras model trains on."""

import weakref
from typing import Any, NamedTuple

from jax.sharding import Mesh

from mirror._src.base.errors import listing
from mirror._src.base.keras_library import BACKEND, backend, variables_of
from mirror._src.devices.replicas import ReplicaDevices
from mirror._src.engine.replica_context import current_frame
from mirror._src.keras.precision import require_float_policy

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
_found: "weakref.WeakKeyDictionary[Any, Owner]" = weakref.WeakKeyDictionary()
"""The strategies of parts of models: new values of the variables need not lie on its devices."""

_compiled_in: "weakref.WeakKeyDictionary[Any, Owner | None]" = weakref.WeakKeyDictionary()


def add_scope(strategy: object, replicas: ReplicaDevices) -> None:
    """Remembers whose arrays lie on this mesh: of variables that are created in the scope.

    The mesh of mixed devices is their home device alone, which may also be the mesh of a strategy
    with one device, and a fixed number of replicas may have the mesh of another strategy. The last
    strategy takes precedence that models can train on.
    """
    if replicas.mesh not in _by_mesh or not (replicas.are_mixed or replicas.in_turn):
        _by_mesh[replicas.mesh] = Owner(str(strategy), replicas)


def claim(model: Any) -> None:
    """Remembers that the current scope, if there is one, has created a model.

    Raises:
        RuntimeError: If Keras does not use JAX.
        NotImplementedError: If a model cannot train on the devices of the scope.
        ValueError: If Keras' dtype policy is not a policy of floats.
    """
    owner = _of_scope("created")
    if owner is not None:
        require_float_policy()
        _created_in[model] = owner


def claim_compiled(model: Any) -> None:
    """Remembers the scope that a model is compiled in, if there is one.

    The optimizer does not tell: it may have been created outside.

    Raises:
        RuntimeError: If Keras does not use JAX.
        NotImplementedError: If a model cannot train on the devices of the scope.
    """
    _compiled_in[model] = _of_scope("compiled")


def owner_of(model: Any) -> Owner | None:
    """Returns the strategy that a model trains on; None if it has nothing to do with any.

    It is the strategy in whose scope the model was created; else, in whose scope it was compiled or
    is being trained. A model that was only built in a scope has its variables there; it keeps the
    strategy when they get values that lie elsewhere, if this function has seen them before.

    Raises:
        RuntimeError: If the caller is in the scope of another strategy, or in a replica; or if
            parts of a model that was created outside were created in several scopes.
        NotImplementedError: If a model cannot train on the devices of the current scope, or of the
            scope that parts of it were created in.
    """
    created, current = _created_in.get(model), _of_scope("trained")
    parts = {} if created is not None else _owners_of_parts(model)
    if len(parts) > 1:
        names = listing(f"{part}: {owner.name}" for owner, part in parts.values())
        raise RuntimeError(
            f"Parts of the Keras model {model.name!r} were created in the scopes of several "
            f"strategies:\n{names}\nCreate and compile the model in one scope: with "
            f"strategy.scope(): model = ...; model.compile(...). {_COPY}"
        )
    for part_owner, _ in parts.values():
        _require_supported(part_owner, "created, compiled or built")
        _found[model] = part_owner
    owner = created or _found.get(model)
    if owner is None or current is None or owner.replicas.mesh == current.replicas.mesh:
        return owner or current
    verb = "created" if created is not None else "compiled or trained"
    raise RuntimeError(
        f"The Keras model {model.name!r} was {verb} in the scope of {owner.name}, but is used in "
        f"the scope of another strategy, {current.name}. Exit that scope first, or create the "
        f"model in it. {_COPY}"
    )


def _owners_of_parts(model: Any) -> dict[Mesh, tuple[Owner, str]]:
    """Returns the strategies that `compile` or variables belong to, each with one such part."""
    compiled = _compiled_in.get(model)
    parts = {} if compiled is None else {compiled.replicas.mesh: (compiled, "model.compile")}
    for variable in variables_of(model):
        mesh: Any = getattr(getattr(variable.value, "sharding", None), "mesh", None)
        if mesh in _by_mesh:
            parts.setdefault(mesh, (_by_mesh[mesh], variable.path))
    return parts


def _of_scope(verb: str) -> Owner | None:
    """Returns the strategy whose scope the caller is in, if a Keras model can train on it.

    Args:
        verb: What happens to the model, for messages.
    """
    frame = current_frame()
    if frame is None:
        return None
    strategy = frame.strategy
    if frame.shown_as is not None:
        why = "cannot train with parameter servers. Use a mirror.MirroredStrategy"
        raise _unsupported(verb, frame.shown_as, why)
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
    owner = Owner(str(strategy), frame.devices)
    _require_supported(owner, verb)
    return owner


def _require_supported(owner: Owner, verb: str) -> None:
    replicas = owner.replicas
    if replicas.in_turn:
        why = "see the whole batch, so that replicas= cannot fix the order of sums. Omit replicas="
        raise _unsupported(verb, owner.name, why)
    if replicas.are_mixed or replicas.spans_processes:
        what = "processes" if replicas.spans_processes else "types"
        why = (
            f"cannot train on devices of several {what} yet. Use the devices of one type in one "
            'process, mirror.MirroredStrategy(mirror.config.list_logical_devices("GPU"))'
        )
        raise _unsupported(verb, owner.name, why)


def _unsupported(verb: str, strategy: object, why: str) -> NotImplementedError:
    return NotImplementedError(
        f"A Keras model was {verb} inside strategy.scope() of {strategy}, but Keras models {why}, "
        "or train a Flax model with mirror.Trainer."
    )
