"""Where the caller stands: in which strategy, and in which context."""

import mirror
from tests.support.messages import raises


def standing() -> tuple[mirror.Strategy, bool, bool, bool]:
    """Returns the strategy, and whether in a scope, in cross-replica context, in a replica."""
    cross = mirror.in_cross_replica_context()
    if cross:
        with raises(RuntimeError, names="mirror.get_replica_context", fix="strategy.run"):
            mirror.get_replica_context()
    in_replica = not cross and mirror.get_replica_context().num_replicas_in_sync > 0
    return mirror.get_strategy(), mirror.has_strategy(), cross, in_replica
