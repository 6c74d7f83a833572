"""Time of the first step, including tracing and compilation, in a fresh process."""

import time
from typing import Any

import jax

from benchmarks import contender, workloads
from benchmarks.jax_contender import JaxContender

MODEL = "narrow"
_COMPILING = "/jax/core/compile/backend_compile_duration"


class CompileClock:
    """Sums the time spent in XLA's compiler; the rest of the call is tracing and lowering."""

    def __init__(self) -> None:
        self.secs = 0.0
        jax.monitoring.register_event_duration_secs_listener(self)

    def __call__(self, event: str, duration_secs: float, **_: str | int) -> None:
        """Handles an event of JAX."""
        if event == _COMPILING:
            self.secs += duration_secs


def measure_first(name: str, num_devices: int) -> dict[str, Any]:
    """Returns the seconds of the first step.

    Args:
        name: The contender.
        num_devices: Number of devices.

    Returns:
        `first`, the whole first step; `lowered`, from the call to the lowered program (tracing,
        proof, lowering); `compiling`, in XLA's compiler; `second`, the second step.

    Raises:
        RuntimeError: If JAX reports no compilation because the event has been renamed.
    """
    candidate = contender.create(name, workloads.BY_NAME[MODEL], num_devices)
    assert isinstance(candidate, JaxContender)
    jax.block_until_ready(jax.live_arrays())
    clock = CompileClock()
    start = time.perf_counter()
    candidate.launch()
    called = time.perf_counter() - start
    jax.block_until_ready(candidate.arrays())
    first = time.perf_counter() - start
    if not clock.secs:
        raise RuntimeError(f"JAX {jax.__version__} reported no event {_COMPILING}.")
    start = time.perf_counter()
    candidate.advance(1)
    return {
        "first": first,
        "lowered": called - clock.secs,
        "compiling": clock.secs,
        "second": time.perf_counter() - start,
    }
