"""Process that lowers and compiles a training step for a mesh, and counts its collectives.

Nothing runs, and no array exists. The executor and its packing are those of several processes.
"""

import functools
import json
import math
import re
import socket
import sys
import time
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp

import mirror
from benchmarks.processes import claim_stdout
from benchmarks.stats import median
from mirror._src.cluster import store
from mirror._src.engine import runner
from mirror._src.engine.executor import MeshExecutor
from mirror._src.tools.estimate_memory import without_arrays
from mirror._src.tools.workload import Workload

NUM_MATRICES = 30
_ROWS = 8  # per replica
_MESSAGES = 400
_TEXTS = 512  # in a directory
_COLLECTIVE = re.compile(
    r"= (\([^()]*\)|\S+) "
    r"(all-reduce|all-gather|reduce-scatter|collective-permute|all-to-all)(?:-start)?\("
)
_ARRAY = re.compile(r"(pred|[a-z]+\d+)\[([\d,]*)\]")


class Collectives(NamedTuple):
    """The collectives of a program.

    Attributes:
        operations: Number of collectives, each executed once per step.
        arrays: Number of arrays in them.
        num_bytes: Bytes that each replica contributes to all of them.
        kinds: Their kinds.
    """

    operations: int
    arrays: int
    num_bytes: int
    kinds: list[str]


def count_collectives(text: str) -> Collectives:
    """Returns the collectives of a program, given as HLO text.

    >>> count_collectives("  %b = f32[3,2]{1,0} all-reduce(%a), channel_id=1")
    Collectives(operations=1, arrays=1, num_bytes=24, kinds=['all-reduce'])
    """
    found = _COLLECTIVE.findall(text)
    arrays = [array for types, _ in found for array in _ARRAY.findall(types)]
    num_bytes = sum(
        _item_bytes(dtype) * math.prod(int(size) for size in shape.split(",") if size)
        for dtype, shape in arrays
    )
    return Collectives(len(found), len(arrays), num_bytes, sorted({kind for _, kind in found}))


def _item_bytes(dtype: str) -> int:
    return 1 if dtype == "pred" else int(re.findall(r"\d+", dtype)[0]) // 8


def strategy_of_processes() -> mirror.Strategy:
    """Returns a strategy on the host devices of this process, as if each had a process."""

    def choose(replicas: Any, ops: Any, shard: Any = "none") -> Any:
        del shard
        limit = ops._packed_bytes(on_host=True, spans_processes=True)
        return MeshExecutor(replicas, pack_bytes=limit, mapping="shard_map")

    with mock.patch.object(runner, "choose", choose):
        return mirror.MirroredStrategy(jax.devices("cpu"))


def loss_of(matrices: list[jax.Array], x: jax.Array) -> jax.Array:
    """Returns the loss of a residual chain of square matrices."""
    h = x
    for matrix in matrices:
        h = h + 0.01 * jnp.tanh(h @ matrix)
    return jnp.mean(h**2)


def step(params: list[jax.Array], x: jax.Array) -> tuple[list[jax.Array], jax.Array]:
    """Trains the chain by SGD."""
    loss, grads = jax.value_and_grad(loss_of)(params, x)
    loss, grads = mirror.all_reduce("mean", (loss, grads))
    return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads), loss


def make(width: int, strategy: mirror.Strategy) -> Workload:
    """Returns the step with its parameters and batch."""
    n = strategy.num_replicas_in_sync
    params = [jnp.zeros((width, width)) for _ in range(NUM_MATRICES)]
    batch = mirror.PerReplica.from_stacked(jnp.zeros((n, _ROWS, width)))
    return Workload(step, (params, batch), None)


def examine(width: int, *, compiles: bool) -> dict[str, Any]:
    """Lowers and compiles the step on all host devices of this process."""
    strategy = strategy_of_processes()
    name, args = without_arrays("step", functools.partial(make, width), strategy)
    start = time.perf_counter()
    examined = strategy._runner.examined_without_arrays(name, args, (0,))
    lowered = examined.lowered
    assert lowered is not None
    answer: dict[str, Any] = {"lower_secs": time.perf_counter() - start}
    answer["lowered"] = count_collectives(lowered.as_text(dialect="hlo"))._asdict()
    if compiles:
        start = time.perf_counter()
        compiled = lowered.compile()
        answer["compile_secs"] = time.perf_counter() - start
        answer["compiled"] = count_collectives(compiled.as_text() or "")._asdict()
    return answer


def time_messages() -> dict[str, float]:
    """Returns the median seconds of a message to the coordination service of this process.

    `text_secs` is the time that each text of a directory adds to reading the directory.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    jax.distributed.initialize(f"127.0.0.1:{port}", 1, 0, cluster_detection_method="deactivate")
    posts, reads = [], []
    for i in range(_MESSAGES):
        start = time.perf_counter()
        store.set(f"message/{i}", "x" * 70)
        middle = time.perf_counter()
        store.get(f"message/{i}", time.monotonic() + 10)
        posts.append(middle - start)
        reads.append(time.perf_counter() - middle)
    directories = []
    for i in range(_TEXTS):
        store.set(f"directory/{i}", "x" * 70)
    for _ in range(_MESSAGES // 10):
        start = time.perf_counter()
        store.get_all("directory")
        directories.append(time.perf_counter() - start)
    jax.distributed.shutdown()
    read_secs = median(reads)
    text_secs = max(median(directories) - read_secs, 0.0) / _TEXTS
    return {"post_secs": median(posts), "read_secs": read_secs, "text_secs": text_secs}


def main(text: str) -> None:
    """Answers a request in JSON."""
    request = json.loads(text)
    answers = claim_stdout()
    if "width" in request:
        answer = examine(request["width"], compiles=request["compiles"])
    else:
        answer = time_messages()
    print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
