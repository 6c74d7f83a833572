"""Time from the start of a program to the end of its first step, with mirror's compile cache.

The parent starts the same program twice: with an empty cache, and with the cache of the first.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter

import jax

import mirror
from benchmarks.devices import is_on_host, use_default
from benchmarks.models import BY_NAME
from benchmarks.through_mirror import strategy_over
from benchmarks.trainer import ByTrainer

_CACHE_VARIABLES = ("JAX_COMPILATION_CACHE", "JAX_PERSISTENT_CACHE")
_EVENT = "/jax/compilation_cache/cache_"


def measure_starts(model: str, num_devices: int) -> dict[str, float]:
    """Returns the seconds of both starts, `first` and `second`, and the programs of the second.

    Raises:
        RuntimeError: If the second start compiled a program, or a start failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        job = json.dumps([model, num_devices, folder, is_on_host()])
        first, _ = _start(job)
        second, events = _start(job)
    loaded, compiled = (events.get(f"{_EVENT}{kind}", 0) for kind in ("hits", "misses"))
    if compiled or not loaded:
        raise RuntimeError(f"The second start compiled {compiled} programs, and loaded {loaded}.")
    return {"first": first, "second": second, "loaded": loaded}


def _start(job: str) -> tuple[float, dict[str, int]]:
    began = time.perf_counter()
    command = [sys.executable, "-m", __name__, job]
    # With a cache of the user, these starts would not use their own, or only for slow compiles.
    env = {k: v for k, v in os.environ.items() if not k.startswith(_CACHE_VARIABLES)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        secs = time.perf_counter() - began
    if not line or process.returncode:
        raise RuntimeError(f"A start of {job} ended with status {process.returncode}.")
    return secs, json.loads(line)


def main(text: str) -> None:
    """Trains one step, as a user's program does."""
    model, num_devices, folder, on_host = json.loads(text)
    if not on_host:
        use_default()
    mirror.config.set_compilation_cache(folder)
    events: Counter[str] = Counter()
    jax.monitoring.register_event_listener(lambda event, **_: events.update([event]))
    ByTrainer(model, BY_NAME[model], strategy_over(num_devices), steps=1).launch()
    print(json.dumps(events), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
