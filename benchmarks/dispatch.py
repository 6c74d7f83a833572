"""Pure dispatch: many small leaves in, the same leaves plus one out, no exchange."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import plan
from benchmarks.contenders import (
    Contender,
    HandWritten,
    MirrorPlain,
    Placement,
    pmapped,
    shard_mapped,
    sharded_jit,
    strategy_over,
)
from benchmarks.models import Array, PyTree

_WIDTH = 8


def _initial(num_leaves: int) -> PyTree:
    leaves = {f"leaf {i}": np.full((_WIDTH,), i, np.float32) for i in range(num_leaves)}
    return {"params": leaves}


def _mirror_step(state: PyTree) -> tuple[PyTree, None]:
    return jax.tree.map(lambda x: x + 1, state), None


def _hand_written_step(state: PyTree, _: Any) -> tuple[PyTree, Array]:
    # The state is donated to the next launch, so that a loop by hand needs a token to wait for.
    return jax.tree.map(lambda x: x + 1, state), jnp.zeros((), jnp.int8)


def dispatch_contenders(num_leaves: int, num_devices: int) -> list[Contender]:
    """All ways to add one to so many leaves on so many devices."""
    place, strategy = Placement(num_devices), strategy_over(num_devices)
    with strategy.scope():
        state = jax.tree.map(jnp.array, _initial(num_leaves))
    found: list[Contender] = [MirrorPlain(strategy, _mirror_step, state)]
    # pmap wants one mapped argument at least; the others get none.
    row = jax.device_put(np.zeros((num_devices,), np.int8), place.sharded)
    makers = {plan.PMAP: pmapped, plan.SHARD_MAP: shard_mapped, plan.JIT: sharded_jit}
    for name, make in makers.items():
        start = jax.device_put(_initial(num_leaves), place.replicated)
        rest = row if name == plan.PMAP else None
        compiled = make(_hand_written_step, place)
        found.append(HandWritten(name, compiled, start, rest, bounded=num_devices > 1))
    return found
