"""Variables, and the copies that the replicas have of them."""

import numpy as np

import mirror
from tests.support.steps import nothing, replica_id


def variable(value=0.0, aggregation="none", **kwargs) -> mirror.Variable:
    return mirror.Variable(value, aggregation=aggregation, **kwargs)


def on_read(aggregation="none", value=0.0, **kwargs) -> mirror.Variable:
    return variable(value, aggregation, synchronization="on_read", **kwargs)


def copies(strategy: mirror.Strategy, v: mirror.Variable) -> list:
    return [np.asarray(x).tolist() for x in strategy.local_results(v)]


def set_copies(strategy: mirror.Strategy, *variables: mirror.Variable) -> None:
    """Sets the first replica's copy to 3, the second's to 5, and so on by twos."""
    strategy.run(
        lambda: nothing([v.assign((2 * replica_id() + 3).astype(v.dtype)) for v in variables])
    )
