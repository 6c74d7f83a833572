"""Which replicas have arrived at which collective, for `watch(track_arrivals=True)`.

XLA does not say which replica is missing in a collective. With tracking, each replica calls the
host before each collective, and the call counts; replicas that wait have one call more than those
that are missing. Only programs that are compiled meanwhile are tracked, and only with one replica
per device.
"""

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn

from mirror._src.jaxprs.collective_eqns import COLLECTIVES, is_collective
from mirror._src.passes.evaluate import Rule, Rules, bind

_lock = threading.Lock()
_num_watches = 0
_counts: dict[int, "_Count"] = {}


class Arrivals(NamedTuple):
    """The replicas at one collective.

    Attributes:
        eqn: The collective.
        waiting: The replicas that have arrived.
        missing: The replicas that have not arrived.
    """

    eqn: JaxprEqn
    waiting: list[int]
    missing: list[int]


class _Count(NamedTuple):
    eqn: JaxprEqn  # keeps its `id` unique
    calls: list[int]  # by replica


def start_tracking() -> None:
    """Tracks the programs that are compiled from now on, until `stop_tracking`."""
    global _num_watches
    with _lock:
        _num_watches += 1


def stop_tracking() -> None:
    """Tracks no further programs, and drops the counts when no watch tracks any more.

    Programs that were compiled meanwhile still call the host; their counts are not read.
    """
    global _num_watches
    with _lock:
        _num_watches -= 1
        if not _num_watches:
            _counts.clear()


def incomplete_arrivals() -> list[Arrivals]:
    """Returns the collectives at which some replicas have arrived and others have not."""
    with _lock:
        counts = [(count.eqn, list(count.calls)) for count in _counts.values()]
    return [
        Arrivals(
            eqn,
            [i for i, calls in enumerate(each) if calls == max(each)],
            [i for i, calls in enumerate(each) if calls < max(each)],
        )
        for eqn, each in counts
        if min(each) < max(each)
    ]


def tracked(rules: Rules, axis: str, num_replicas: int) -> Rules:
    """Returns rules for `Lowering` that count the arrivals at collectives, if a watch tracks them.

    Args:
        rules: The rules without tracking.
        axis: The mapped axis.
        num_replicas: Number of replicas.
    """
    if not _num_watches:
        return rules

    def find(inner: Callable[[JaxprEqn], Rule | None], eqn: JaxprEqn) -> Rule | None:
        replacement = inner(eqn)
        if not is_collective(eqn):
            return replacement

        def rule(eqn: JaxprEqn, arguments: list[Any]) -> Sequence[Any]:
            arguments = _counted(eqn, arguments, axis, num_replicas)
            if replacement is not None:
                return replacement(eqn, arguments)
            with eqn.ctx.manager:
                return bind(eqn, arguments)

        return rule

    collectives = {
        name: functools.partial(find, rules.get(name, lambda _: None)) for name in COLLECTIVES
    }
    return {**rules, **collectives}


def _counted(eqn: JaxprEqn, operands: list[Any], axis: str, num_replicas: int) -> list[Any]:
    """Returns the operands, which are ready only after this replica's arrival was counted."""
    with _lock:
        calls = _counts.setdefault(id(eqn), _Count(eqn, [0] * num_replicas)).calls

    def arrive(replica: Any, *parts: Any) -> Any:
        del parts
        with _lock:
            calls[int(replica)] += 1
        return np.zeros((), np.int32)

    parts = [jnp.ravel(operand)[:1] for operand in operands]
    flag = jax.pure_callback(
        arrive, jax.ShapeDtypeStruct((), jnp.int32), jax.lax.axis_index(axis), *parts
    )
    # Not a barrier: XLA would remove it, and then the call, whose result is unused.
    return [jnp.where(flag == 0, operand, jnp.zeros_like(operand)) for operand in operands]
