"""Contenders written by hand in JAX, the way an expert would. Does not import `mirror`.

All of them keep their state on the devices, donate it, and read a batch that is already there. On
several host devices, at most two launches are in flight: JAX 0.10.2 can deadlock with more.
"""

from collections import deque
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import PartitionSpec

from benchmarks import plan
from benchmarks.devices import first_devices
from benchmarks.jax_contender import AXIS, JaxContender, ObjectsContender, Placement
from benchmarks.models import Array, Batch, Model, PyTree, loss_of, model_of, optimizer
from benchmarks.workloads import Workload

MOST_IN_FLIGHT = 2


class HandWritten(JaxContender):
    """A compiled `(state, batch) -> (state, token)`, launched by the fastest safe loop."""

    def __init__(
        self, name: str, step: Callable[..., Any], state: PyTree, batch: PyTree, *, bounded: bool
    ) -> None:
        self.name = name
        self._step, self._state, self._batch = step, state, batch
        self._most_in_flight = MOST_IN_FLIGHT if bounded else 2**30
        self._in_flight: deque[Array] = deque(maxlen=None if bounded else 1)

    def launch(self) -> None:
        """Starts one step."""
        if len(self._in_flight) >= self._most_in_flight:
            self._in_flight.popleft().block_until_ready()
        self._state, token = self._step(self._state, self._batch)
        self._in_flight.append(token)

    def arrays(self) -> tuple[PyTree, Array]:
        """Returns the state and the loss."""
        return self._state, self._in_flight[-1]

    def params(self) -> PyTree:
        """Returns the parameters, as a plain pytree."""
        return self._state["params"]


def plain_step(model: Model, reduce: Callable[[PyTree], PyTree]) -> Callable[..., Any]:
    """Returns a step on a plain pytree; `reduce` averages gradients and loss over the devices."""
    tx = optimizer(model)

    def step(state: PyTree, batch: Batch) -> tuple[PyTree, Array]:
        def loss_fn(params: PyTree) -> Array:
            return loss_of(model.apply(params, batch["image"]), batch["label"])

        loss, grads = jax.value_and_grad(loss_fn)(state["params"])
        grads, loss = reduce((grads, loss))
        updates, moments = tx.update(grads, state["moments"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "moments": moments}, loss

    return step


def nnx_step(reduce: Callable[[PyTree], PyTree]) -> Callable[..., Array]:
    """Returns the same step on nnx objects."""

    def step(module: nnx.Module, opt: nnx.Optimizer, batch: Batch) -> Array:
        def loss_fn(module: Any) -> Array:
            return loss_of(module(batch["image"]), batch["label"])

        loss, grads = nnx.value_and_grad(loss_fn)(module)
        grads, loss = reduce((grads, loss))
        opt.update(module, grads)
        return loss

    return step


def unreduced(tree: PyTree) -> PyTree:
    """Returns its argument, for steps that see the whole batch."""
    return tree


def mean_over_axis(tree: PyTree) -> PyTree:
    """Returns the mean over the devices."""
    return jax.lax.pmean(tree, AXIS)


def initial_state(model: Model) -> PyTree:
    """Returns parameters and moments as host arrays."""
    params = model.workload.initial_params()
    return {"params": params, "moments": jax.tree.map(np.array, optimizer(model).init(params))}


def create_objects(model: Model) -> tuple[nnx.Module, nnx.Optimizer]:
    """Returns the nnx module and its optimizer."""
    module = model.module()
    return module, nnx.Optimizer(module, optimizer(model), wrt=nnx.Param)


def nnx_jit(model: Model) -> ObjectsContender:
    """Returns the step compiled by `nnx.jit`, on one device."""
    module, opt = create_objects(model)
    batch = jax.device_put(model.batch(), first_devices(1)[0])
    return ObjectsContender(plan.NNX_JIT, nnx.jit(nnx_step(unreduced)), module, opt, batch)


def pmapped(step: Callable[..., Any], place: Placement) -> Callable[..., Any]:
    """Returns `jax.pmap` of the step; axis `None` for the state avoids stacked copies."""
    return jax.pmap(
        step,
        axis_name=AXIS,
        in_axes=(None, 0),
        out_axes=None,
        devices=place.devices,
        donate_argnums=0,
    )


def shard_mapped(step: Callable[..., Any], place: Placement) -> Callable[..., Any]:
    """Returns `jit(shard_map)` of the step, which reduces its gradients explicitly."""
    mapped = jax.shard_map(
        step,
        mesh=place.mesh,
        in_specs=(PartitionSpec(), PartitionSpec(AXIS)),
        out_specs=PartitionSpec(),
        check_vma=False,
    )
    return jax.jit(mapped, donate_argnums=0)


def sharded_jit(step: Callable[..., Any], place: Placement) -> Callable[..., Any]:
    """Returns `jit` of the step on the global batch, for which XLA inserts the collectives."""
    return jax.jit(
        step,
        in_shardings=(place.replicated, place.sharded),
        out_shardings=place.replicated,
        donate_argnums=0,
    )


def single_device_jit(step: Callable[..., Any], _: Placement) -> Callable[..., Any]:
    """Returns `jit` of the step without shardings."""
    return jax.jit(step, donate_argnums=0)


COMPILERS = {
    plan.PMAP: pmapped,
    plan.SHARD_MAP: shard_mapped,
    plan.JIT: sharded_jit,
    plan.ONE_DEVICE: single_device_jit,
}


def hand_written(name: str, model: Model, place: Placement) -> HandWritten:
    """Returns the hand-written contender `name` for a model."""
    is_mapped = name in (plan.PMAP, plan.SHARD_MAP)
    step = plain_step(model, mean_over_axis if is_mapped else unreduced)
    if name == plan.ONE_DEVICE:
        (device,) = place.devices
        state, batch = jax.device_put((initial_state(model), model.batch()), device)
    else:
        state = jax.device_put(initial_state(model), place.replicated)
        stacked = name == plan.PMAP
        batch = (
            place.stack(model.batch()) if stacked else jax.device_put(model.batch(), place.sharded)
        )
    compiled = COMPILERS[name](step, place)
    return HandWritten(name, compiled, state, batch, bounded=place.num_devices > 1)


def create(name: str, workload: Workload, num_devices: int) -> HandWritten:
    """Returns the hand-written contender `name` for a workload."""
    return hand_written(name, model_of(workload), Placement(num_devices))
