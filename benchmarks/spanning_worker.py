"""Process of a job that trains in turns: one for every line on standard input."""

import json
import sys
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import mirror
from benchmarks.processes import claim_stdout
from benchmarks.scale_program import NUM_MATRICES, loss_of, step
from benchmarks.stats import median
from mirror._src.engine import runner

BATCH_SIZE, WIDTH = 64, 64
_AGREEMENTS = 20
_MOST_IN_FLIGHT = 2  # as in mirror: JAX 0.10 hangs with more


class Training(Protocol):
    """The training step of `benchmarks.scale`, with 30 matrices of 16 KiB, on a global batch."""

    agreement_secs: float | None

    def take(self, steps: int) -> float:
        """Takes some steps; returns the milliseconds per step."""

    def loss(self) -> float:
        """Returns the loss of the last step."""


def _data() -> tuple[list[np.ndarray], np.ndarray]:
    """Returns the matrices and the global batch, equal in all processes."""
    draw = np.random.default_rng(0)
    shapes = [(WIDTH, WIDTH)] * NUM_MATRICES
    matrices = [draw.normal(size=s).astype(np.float32) for s in shapes]
    return matrices, draw.normal(size=(BATCH_SIZE, WIDTH)).astype(np.float32)


class ThroughMirror:
    """The step through `strategy.run`.

    Attributes:
        agreement_secs: Median duration of the agreement on the program, repeated; None in a single
            process.
    """

    def __init__(self, pack_bytes: int | None, replicas_per_device: int) -> None:
        self.agreement_secs: float | None = None
        mirror.distributed.initialize()
        self.strategy = mirror.MultiWorkerMirroredStrategy(
            cross_device_ops=mirror.AllReduce(pack_bytes=pack_bytes),
            replicas_per_device=replicas_per_device,
        )
        matrices, x = _data()
        with self.strategy.scope():
            self._params: Any = matrices
        (self._batch,) = self.strategy.distribute_dataset([x])
        self._loss: Any = None
        module: Any = runner
        agree = module.require_agreement

        def timed(*arguments: Any) -> str:
            times = []
            for _ in range(_AGREEMENTS):
                # Meet first, so that the time is not the time until the other process comes.
                mirror.distributed.barrier("agreement")
                start = time.perf_counter()
                identity = agree(*arguments)
                times.append(time.perf_counter() - start)
            self.agreement_secs = median(times)
            return identity

        module.require_agreement = timed
        self.take(3)
        module.require_agreement = agree

    def take(self, steps: int) -> float:
        """See `Training`."""
        start = time.perf_counter()
        for _ in range(steps):
            self._params, self._loss = self.strategy.run(
                step, (self._params, self._batch), donate_argnums=0
            )
        self._loss.block_until_ready()
        return (time.perf_counter() - start) / steps * 1e3

    def loss(self) -> float:
        """See `Training`."""
        return float(self._loss)


def _in_two_steps(flat: jax.Array) -> jax.Array:
    """Returns the sum, first over the devices of a process, then over processes."""
    return jax.lax.psum(jax.lax.psum(flat, "device"), "process")


def _by_one_device(flat: jax.Array) -> jax.Array:
    """Returns the sum over two processes with two devices, of which one exchanges sums."""
    flat = flat + jax.lax.ppermute(flat, "device", [(1, 0)])
    flat = flat + jax.lax.ppermute(flat, _AXES, [(0, 2), (2, 0)])
    received = jax.lax.ppermute(flat, "device", [(0, 1)])
    return jnp.where(jax.lax.axis_index("device") == 0, flat, received)


_AXES = ("process", "device")
REDUCTIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "all": lambda flat: jax.lax.psum(flat, _AXES),
    "two steps": _in_two_steps,
    "one device": _by_one_device,
}


class ByHand:
    """The step in JAX alone, with all gradients in one buffer.

    Args:
        reduce: Sums the buffer over the replicas.
    """

    agreement_secs: float | None = None

    def __init__(self, reduce: Callable[[jax.Array], jax.Array]) -> None:
        mirror.distributed.initialize()
        devices = sorted(jax.devices(), key=lambda device: (device.process_index, device.id))
        mesh = Mesh(np.asarray(devices).reshape(jax.process_count(), -1), _AXES)
        rows = PartitionSpec(_AXES)
        mirrored, stacked = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, rows)

        def place(array: np.ndarray, sharding: NamedSharding) -> jax.Array:
            return jax.make_array_from_callback(array.shape, sharding, lambda i: array[i])

        def replica(params: list[jax.Array], x: jax.Array) -> tuple[list[jax.Array], jax.Array]:
            loss, grads = jax.value_and_grad(loss_of)(params, x)
            # As in mirror, so that XLA does not fuse the packing with the operations around it.
            leaves = jax.lax.optimization_barrier([*grads, loss])
            flat = jnp.concatenate([leaf.reshape(-1) for leaf in leaves])
            flat = reduce(flat) / len(devices)
            ends = np.cumsum([grad.size for grad in grads])
            *parts, loss = jax.lax.optimization_barrier(jnp.split(flat, ends))
            pairs = zip(params, parts, strict=True)
            return [w - 0.1 * part.reshape(w.shape) for w, part in pairs], loss[0]

        mapped = jax.shard_map(
            replica,
            mesh=mesh,
            in_specs=(PartitionSpec(), rows),
            out_specs=PartitionSpec(),
            check_vma=False,  # otherwise JAX adds an all-reduce for each gradient
        )
        self._step = jax.jit(
            mapped,
            in_shardings=(mirrored, stacked),
            out_shardings=mirrored,
            donate_argnums=0,
        )
        matrices, x = _data()
        self._params = [place(matrix, mirrored) for matrix in matrices]
        self._batch = place(x, stacked)
        self._loss: Any = None
        self.take(3)

    def take(self, steps: int) -> float:
        """See `Training`."""
        start = time.perf_counter()
        in_flight: deque[Any] = deque()
        for _ in range(steps):
            while len(in_flight) >= _MOST_IN_FLIGHT:
                in_flight.popleft().block_until_ready()
            self._params, self._loss = self._step(self._params, self._batch)
            in_flight.append(self._loss)
        self._loss.block_until_ready()
        return (time.perf_counter() - start) / steps * 1e3

    def loss(self) -> float:
        """See `Training`."""
        return float(self._loss)


def main(text: str) -> None:
    """Answers the orders on standard input: a number of steps."""
    request = json.loads(text)
    answers = claim_stdout()
    training: Training = (
        ByHand(REDUCTIONS[request["by_hand"]])
        if request["by_hand"]
        else ThroughMirror(request["pack_bytes"], request["replicas_per_device"])
    )
    first = {"loss": training.loss(), "agreement_secs": training.agreement_secs}
    print(json.dumps(first), file=answers, flush=True)
    for line in sys.stdin:
        answer = {"ms": training.take(int(line)), "loss": training.loss()}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
