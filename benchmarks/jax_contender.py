"""Base classes of contenders in JAX, whose launches are asynchronous. Does not import mirror."""

import abc
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks.contender import Contender
from benchmarks.devices import first_devices
from benchmarks.models import Array, Batch, PyTree, params_of

AXIS = "replica"


class JaxContender(Contender):
    """A contender that launches its steps, and waits for them at the end."""

    @abc.abstractmethod
    def launch(self) -> None:
        """Starts one step."""

    @abc.abstractmethod
    def arrays(self) -> PyTree:
        """Returns the state, and other arrays that are ready when the step is complete."""

    @abc.abstractmethod
    def params(self) -> PyTree:
        """Returns the parameters, as a plain pytree."""

    def advance(self, steps: int) -> None:
        """Takes some steps, and waits until all results are computed."""
        for _ in range(steps):
            self.launch()
        jax.block_until_ready(self.arrays())

    def loss(self) -> float:
        """Returns the loss of the last step, before its update."""
        return float(np.asarray(self.arrays()[1]))


class ObjectsContender(JaxContender):
    """A step on nnx objects, run by `strategy.run` or `nnx.jit`."""

    def __init__(self, name: str, call: Any, module: nnx.Module, *rest: Any) -> None:
        self.name = name
        self._call, self.args = call, (module, *rest)
        nodes = [node for arg in self.args if _is_object(arg) for _, node in nnx.iter_graph(arg)]
        self._variables = [node for node in nodes if isinstance(node, nnx.Variable)]
        self._loss: Any = None

    def launch(self) -> None:
        """Starts one step."""
        self._loss = self._call(*self.args)

    def arrays(self) -> tuple[list[Array], Any]:
        """Returns the values of the variables and the loss."""
        return [v.get_raw_value() for v in self._variables], self._loss

    def params(self) -> PyTree:
        """Returns the parameters, as a plain pytree."""
        return params_of(self.args[0])


def _is_object(value: Any) -> bool:
    return isinstance(value, nnx.Module | nnx.Optimizer)


class Placement:
    """Shardings over the first devices.

    Raises:
        RuntimeError: If there are fewer than `num_devices`.
    """

    def __init__(self, num_devices: int) -> None:
        self.devices = first_devices(num_devices)
        self.num_devices = num_devices
        self.mesh = Mesh(np.asarray(self.devices), (AXIS,))
        self.replicated = NamedSharding(self.mesh, PartitionSpec())
        self.sharded = NamedSharding(self.mesh, PartitionSpec(AXIS))

    def stack(self, batch: Batch) -> Batch:
        """Returns the batch with a leading device axis, as pmap requires."""
        n = self.num_devices
        rows = jax.tree.map(lambda x: x.reshape(n, x.shape[0] // n, *x.shape[1:]), batch)
        return jax.device_put(rows, self.sharded)
