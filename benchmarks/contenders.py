"""The contenders: one training step through `mirror`, and written by hand as an expert would.

All of them keep their state on the devices, donate it, and read a batch that is there already. On
several host devices at most two launches are in flight, through `mirror` and by hand: JAX 0.10.2
deadlocks there when more pile up.
"""

import abc
import functools
from collections import deque
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import mirror
from benchmarks import plan
from benchmarks.models import Array, Batch, Model, PyTree, loss_of, optimizer, params_of

AXIS = mirror.REPLICA_AXIS
MOST_IN_FLIGHT = 2


class Contender(abc.ABC):
    """One way to run a step; it holds its state."""

    name: str

    @abc.abstractmethod
    def launch(self) -> None:
        """Starts one step."""

    @abc.abstractmethod
    def arrays(self) -> PyTree:
        """All that has to be ready for the last step to be done."""

    @abc.abstractmethod
    def params(self) -> PyTree:
        """The parameters, as a plain pytree."""


class Placement:
    """Where arrays lie on the first `n` host devices."""

    def __init__(self, num_devices: int) -> None:
        self.devices = jax.devices("cpu")[:num_devices]
        if len(self.devices) < num_devices:
            raise RuntimeError(f"{num_devices} host devices asked for, {len(self.devices)} there.")
        self.num_devices = num_devices
        self.mesh = Mesh(np.asarray(self.devices), (AXIS,))
        self.replicated = NamedSharding(self.mesh, PartitionSpec())
        self.sharded = NamedSharding(self.mesh, PartitionSpec(AXIS))

    def stack(self, batch: Batch) -> Batch:
        """The batch with a leading device axis, as pmap takes it."""
        n = self.num_devices
        rows = jax.tree.map(lambda x: x.reshape(n, x.shape[0] // n, *x.shape[1:]), batch)
        return jax.device_put(rows, self.sharded)


@functools.cache
def strategy_over(num_devices: int) -> mirror.Strategy:
    """The strategy of this process: a program has one, and so has a benchmark."""
    return mirror.MirroredStrategy(Placement(num_devices).devices)


class HandWritten(Contender):
    """A compiled `(state, batch) -> (state, token)`, launched by the best loop there is for it."""

    def __init__(
        self, name: str, step: Callable[..., Any], state: PyTree, batch: PyTree, *, bounded: bool
    ) -> None:
        self.name = name
        self._step, self._state, self._batch = step, state, batch
        self._most = MOST_IN_FLIGHT if bounded else 2**30
        self._in_flight: deque[Array] = deque(maxlen=None if bounded else 1)

    def launch(self) -> None:
        """Starts one step."""
        if len(self._in_flight) >= self._most:
            self._in_flight.popleft().block_until_ready()
        self._state, token = self._step(self._state, self._batch)
        self._in_flight.append(token)

    def arrays(self) -> PyTree:
        """State and loss."""
        return self._state, self._in_flight[-1]

    def params(self) -> PyTree:
        """The parameters, as a plain pytree."""
        return self._state["params"]


class MirrorPlain(Contender):
    """A step on plain pytrees through `run`."""

    name = plan.MIRROR_PLAIN

    def __init__(
        self, strategy: mirror.Strategy, step: Callable[..., Any], state: PyTree, *rest: Any
    ) -> None:
        self._run, self._step, self._state, self._rest = strategy.run, step, state, rest
        self._token: Any = None

    def launch(self) -> None:
        """Starts one step."""
        args = (self._state, *self._rest)
        self._state, self._token = self._run(self._step, args, donate_argnums=0)

    def arrays(self) -> PyTree:
        """State and loss."""
        return self._state, self._token

    def params(self) -> PyTree:
        """The parameters, as a plain pytree."""
        return self._state["params"]


class Objects(Contender):
    """A step on nnx objects, through whatever runs it: `strategy.run`, or `nnx.jit`."""

    def __init__(
        self,
        name: str,
        call: Callable[..., Array],
        module: nnx.Module,
        opt: nnx.Optimizer,
        batch: Any,
    ) -> None:
        self.name = name
        self._call, self._args = call, (module, opt, batch)
        nodes = nnx.iter_graph((module, opt))
        self._variables = [node for _, node in nodes if isinstance(node, nnx.Variable)]
        self._loss: Any = None

    def launch(self) -> None:
        """Starts one step."""
        self._loss = self._call(*self._args)

    def arrays(self) -> PyTree:
        """State and loss."""
        return [v.get_raw_value() for v in self._variables], self._loss

    def params(self) -> PyTree:
        """The parameters, as a plain pytree."""
        return params_of(self._args[0])


def plain_step(model: Model, exchange: Callable[[PyTree], PyTree]) -> Callable[..., Any]:
    """A step on a plain pytree, `exchange` being what makes gradients and loss the global ones."""
    tx = optimizer()

    def step(state: PyTree, batch: Batch) -> tuple[PyTree, Array]:
        def loss_fn(params: PyTree) -> Array:
            return loss_of(model.apply(params, batch["image"]), batch["label"])

        loss, grads = jax.value_and_grad(loss_fn)(state["params"])
        grads, loss = exchange((grads, loss))
        updates, moments = tx.update(grads, state["moments"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "moments": moments}, loss

    return step


def nnx_step(exchange: Callable[[PyTree], PyTree]) -> Callable[..., Array]:
    """The same step on nnx objects."""

    def step(module: nnx.Module, opt: nnx.Optimizer, batch: Batch) -> Array:
        def loss_fn(module: Any) -> Array:
            return loss_of(module(batch["image"]), batch["label"])

        loss, grads = nnx.value_and_grad(loss_fn)(module)
        grads, loss = exchange((grads, loss))
        opt.update(module, grads)
        return loss

    return step


def mirrored_mean(tree: PyTree) -> PyTree:
    """The exchange as users of `mirror` write it."""
    context = mirror.get_replica_context()
    assert context is not None
    return context.all_reduce("mean", tree)


def hand_written_mean(tree: PyTree) -> PyTree:
    """The exchange as it is written by hand."""
    return jax.lax.pmean(tree, AXIS)


def initial_state(model: Model) -> PyTree:
    """Parameters and moments as host arrays."""
    params = model.initial_params()
    return {"params": params, "moments": jax.tree.map(np.array, optimizer().init(params))}


def create_objects(model: Model) -> tuple[nnx.Module, nnx.Optimizer]:
    """The nnx module with its optimizer."""
    module = model.module()
    return module, nnx.Optimizer(module, optimizer(), wrt=nnx.Param)


def mirror_nnx(model: Model, strategy: mirror.Strategy) -> Contender:
    (batch,) = strategy.distribute_dataset([model.batch()])
    with strategy.scope():
        module, opt = create_objects(model)
    step, run = nnx_step(mirrored_mean), strategy.run
    call = lambda *args: run(step, args)  # noqa: E731
    return Objects(plan.MIRROR_NNX, call, module, opt, batch)


def mirror_plain(model: Model, strategy: mirror.Strategy) -> Contender:
    (batch,) = strategy.distribute_dataset([model.batch()])
    with strategy.scope():
        state = jax.tree.map(jnp.array, initial_state(model))
    return MirrorPlain(strategy, plain_step(model, mirrored_mean), state, batch)


def nnx_jit(model: Model) -> Contender:
    """`nnx.jit` on one device."""
    module, opt = create_objects(model)
    batch = jax.device_put(model.batch(), jax.devices("cpu")[0])
    return Objects(plan.NNX_JIT, nnx.jit(nnx_step(lambda tree: tree)), module, opt, batch)


def pmapped(step: Callable[..., Any], place: Placement) -> Callable[..., Any]:
    """Mirrored state in and out with axis None: no stacked copies."""
    return jax.pmap(
        step,
        axis_name=AXIS,
        in_axes=(None, 0),
        out_axes=None,
        devices=place.devices,
        donate_argnums=0,
    )


def shard_mapped(step: Callable[..., Any], place: Placement) -> Callable[..., Any]:
    """`jit(shard_map)`; the gradients are reduced by hand, so replication is not inferred."""
    mapped = jax.shard_map(
        step,
        mesh=place.mesh,
        in_specs=(PartitionSpec(), PartitionSpec(AXIS)),
        out_specs=PartitionSpec(),
        check_vma=False,
    )
    return jax.jit(mapped, donate_argnums=0)


def sharded_jit(step: Callable[..., Any], place: Placement) -> Callable[..., Any]:
    """`jit` of the step on the global batch; XLA makes the exchanges."""
    return jax.jit(
        step,
        in_shardings=(place.replicated, place.sharded),
        out_shardings=place.replicated,
        donate_argnums=0,
    )


def hand_written(name: str, model: Model, place: Placement) -> Contender:
    """The step by hand: with pmap, `jit(shard_map)` or sharded `jit`."""
    state = jax.device_put(initial_state(model), place.replicated)
    if name == plan.PMAP:
        compiled = pmapped(plain_step(model, hand_written_mean), place)
        batch = place.stack(model.batch())
    else:
        batch = jax.device_put(model.batch(), place.sharded)
        if name == plan.SHARD_MAP:
            compiled = shard_mapped(plain_step(model, hand_written_mean), place)
        else:
            compiled = sharded_jit(plain_step(model, lambda tree: tree), place)
    return HandWritten(name, compiled, state, batch, bounded=place.num_devices > 1)


def step_contenders(model: Model, num_devices: int) -> list[Contender]:
    """All ways to train a model on so many devices."""
    place, strategy = Placement(num_devices), strategy_over(num_devices)
    by_hand = [hand_written(name, model, place) for name in plan.HAND_WRITTEN]
    return [mirror_nnx(model, strategy), mirror_plain(model, strategy), *by_hand]


def row_contenders(model: Model) -> list[Contender]:
    """The same global batch on one device, by one replica and by several."""
    found = []
    for count in plan.ON_ONE_DEVICE:
        strategy = mirror.MirroredStrategy(Placement(1).devices, replicas_per_device=count)
        contender = mirror_plain(model, strategy)
        contender.name = str(count)
        found.append(contender)
    return found


def staged_contenders(model: Model, num_devices: int) -> list[Contender]:
    """The same step through `run`, exchanged among the devices and on the host."""
    ops = mirror.ReductionToOneDevice()
    staged = mirror_plain(model, mirror.MirroredStrategy(Placement(num_devices).devices, ops))
    staged.name = plan.STAGED
    return [staged, mirror_plain(model, strategy_over(num_devices))]


def deep_contenders(model: Model, num_devices: int) -> list[Contender]:
    """Objects against plain pytrees through `run`; on one device also `nnx.jit`."""
    strategy = strategy_over(num_devices)
    found = [mirror_nnx(model, strategy), mirror_plain(model, strategy)]
    return [*found, nnx_jit(model)] if num_devices == 1 else found
