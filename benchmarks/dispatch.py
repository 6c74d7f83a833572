"""Dispatch overhead: adds one to many small leaves, without collectives."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks import plan
from benchmarks.by_hand import COMPILERS, HandWritten
from benchmarks.jax_contender import JaxContender, ObjectsContender, Placement
from benchmarks.models import Array, PyTree
from benchmarks.through_mirror import PlainContender, strategy_over

_WIDTH = 8


class Leaves(nnx.Module):
    """Module that contains only variables."""

    def __init__(self, values: Sequence[Array]) -> None:
        self.leaves = nnx.List([nnx.Param(value) for value in values])


def _initial(num_leaves: int) -> PyTree:
    leaves = {i: np.full((_WIDTH,), i, np.float32) for i in range(num_leaves)}
    return {"params": {"leaves": leaves}}


def _plain_step(state: PyTree) -> tuple[PyTree, None]:
    return jax.tree.map(lambda x: x + 1, state), None


def _nnx_step(module: Leaves) -> None:
    for leaf in module.leaves:
        leaf[...] = leaf[...] + 1


def _hand_written_step(state: PyTree, _: Any) -> tuple[PyTree, Array]:
    # The state is donated to the next launch, so the hand-written loop needs a token to wait for.
    return jax.tree.map(lambda x: x + 1, state), jnp.zeros((), jnp.int8)


def _through_mirror(num_leaves: int, num_devices: int) -> list[JaxContender]:
    strategy = strategy_over(num_devices)
    with strategy.scope():
        state = jax.tree.map(jnp.array, _initial(num_leaves))
        module = Leaves(
            [jnp.array(leaf) for leaf in _initial(num_leaves)["params"]["leaves"].values()]
        )
    call = lambda *args: strategy.run(_nnx_step, args)  # noqa: E731
    return [
        PlainContender(strategy, _plain_step, state),
        ObjectsContender(plan.MIRROR_NNX, call, module),
    ]


def dispatch_contenders(num_leaves: int, num_devices: int) -> list[JaxContender]:
    """Returns all contenders for adding one to the leaves of a state."""
    contenders = _through_mirror(num_leaves, num_devices)
    place = Placement(num_devices)
    # pmap requires at least one mapped argument.
    row = jax.device_put(np.zeros((num_devices,), np.int8), place.sharded)
    for name in plan.HAND_WRITTEN:
        state = jax.device_put(_initial(num_leaves), place.replicated)
        batch = row if name == plan.PMAP else None
        compiled = COMPILERS[name](_hand_written_step, place)
        contenders.append(HandWritten(name, compiled, state, batch, bounded=num_devices > 1))
    return contenders
