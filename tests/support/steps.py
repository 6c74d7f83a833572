"""Parts of steps: the replica's context, its id, and what it computes from it."""

import jax.numpy as jnp

import mirror


def context() -> mirror.ReplicaContext | None:
    return mirror.get_replica_context()


def replica_id():
    return context().replica_id_in_sync_group


def number():
    """Returns 1 on the first replica, 2 on the second."""
    return jnp.float32(replica_id() + 1)


def nothing(_: object) -> None:
    """Discards a value: the result of a step that only assigns."""
