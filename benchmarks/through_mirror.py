"""Contenders that use `mirror`, with plain pytrees and nnx objects."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import mirror
from benchmarks import plan
from benchmarks.by_hand import (
    create_objects,
    hand_written,
    initial_state,
    nnx_jit,
    nnx_step,
    plain_step,
)
from benchmarks.devices import names_of
from benchmarks.jax_contender import JaxContender, ObjectsContender, Placement
from benchmarks.models import Model, PyTree, model_of
from benchmarks.workloads import Workload


@functools.cache
def strategy_over(num_devices: int) -> mirror.Strategy:
    """Returns the strategy of this process.

    It is created before JAX's backend starts, so that `mirror` can set up the process as it does
    for a user.
    """
    return mirror.MirroredStrategy(names_of(num_devices))


class PlainContender(JaxContender):
    """A step on plain pytrees, run by `strategy.run`."""

    def __init__(
        self,
        strategy: mirror.Strategy,
        step: Callable[..., Any],
        state: PyTree,
        *rest: Any,
        name: str = plan.MIRROR_PLAIN,
    ) -> None:
        self.name = name
        self._run, self._step, self._state, self._rest = strategy.run, step, state, rest
        self._token: Any = None

    def launch(self) -> None:
        """Starts one step."""
        args = (self._state, *self._rest)
        self._state, self._token = self._run(self._step, args, donate_argnums=0)

    def arrays(self) -> tuple[PyTree, Any]:
        """Returns the state and the loss."""
        return self._state, self._token

    def params(self) -> PyTree:
        """Returns the parameters, as a plain pytree."""
        return self._state["params"]


def mirrored_mean(tree: PyTree) -> PyTree:
    """Returns the mean over the replicas."""
    context = mirror.get_replica_context()
    assert context is not None
    return context.all_reduce("mean", tree)


def mirror_nnx(model: Model, strategy: mirror.Strategy) -> ObjectsContender:
    (batch,) = strategy.distribute_dataset([model.batch()])
    with strategy.scope():
        module, opt = create_objects(model)
    step, run = nnx_step(mirrored_mean), strategy.run
    call = lambda *args: run(step, args)  # noqa: E731
    return ObjectsContender(plan.MIRROR_NNX, call, module, opt, batch)


def mirror_plain(
    model: Model, strategy: mirror.Strategy, name: str = plan.MIRROR_PLAIN
) -> PlainContender:
    (batch,) = strategy.distribute_dataset([model.batch()])
    with strategy.scope():
        state = jax.tree.map(jnp.array, initial_state(model))
    return PlainContender(strategy, plain_step(model, mirrored_mean), state, batch, name=name)


def create(name: str, workload: Workload, num_devices: int) -> JaxContender:
    """Returns the contender `name` for a workload."""
    strategy, model = strategy_over(num_devices), model_of(workload)
    return mirror_nnx(model, strategy) if name == plan.MIRROR_NNX else mirror_plain(model, strategy)


def step_contenders(model: Model, num_devices: int) -> list[JaxContender]:
    """Returns all ways to train a model in JAX."""
    strategy, place = strategy_over(num_devices), Placement(num_devices)
    by_hand = [hand_written(name, model, place) for name in plan.by_hand(num_devices)]
    return [mirror_nnx(model, strategy), mirror_plain(model, strategy), *by_hand]


def row_contenders(model: Model) -> list[JaxContender]:
    """Returns contenders with one and with several replicas on one device."""
    return [
        mirror_plain(
            model, mirror.MirroredStrategy(names_of(1), replicas_per_device=count), str(count)
        )
        for count in plan.ON_ONE_DEVICE
    ]


def staged_contenders(model: Model, num_devices: int) -> list[JaxContender]:
    """Returns contenders that reduce on the host and across the devices."""
    ops = mirror.ReductionToOneDevice()
    staged = mirror.MirroredStrategy(names_of(num_devices), ops)
    return [
        mirror_plain(model, staged, plan.STAGED),
        mirror_plain(model, strategy_over(num_devices)),
    ]


def deep_contenders(model: Model, num_devices: int) -> list[JaxContender]:
    """Returns contenders with nnx objects and plain pytrees; on one device also `nnx.jit`."""
    strategy = strategy_over(num_devices)
    contenders: list[JaxContender] = [mirror_nnx(model, strategy), mirror_plain(model, strategy)]
    return [*contenders, nnx_jit(model)] if num_devices == 1 else contenders
