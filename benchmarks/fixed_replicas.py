"""Measures a fixed number of replicas, in turn, against the mappings that round otherwise.

    python -m benchmarks.fixed_replicas [--models narrow,wide] [--replicas 8] [--rounds 20] [--gpu]

prints the CPU time of a step with `replicas=`, divided by the time without it, on as many host
devices as replicas, and on one device, where `replicas_per_device=` runs them. The steps of both
take turns in one process, and each pair has a process of its own. `--gpu` prints the elapsed time
on one GPU.
"""

import argparse
import functools
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence

import jax

import mirror
from benchmarks import devices
from benchmarks.models import model_of
from benchmarks.through_mirror import mirror_plain
from benchmarks.workloads import BY_NAME


def measure(name: str, num_devices: int, replicas: int, rounds: int) -> list[float]:
    """Returns the ratio of each round."""
    clock = time.process_time if devices.is_on_host() else time.perf_counter
    mirror.config.set_num_cpu_devices(max(num_devices, replicas))
    strategy_of = functools.partial(mirror.MirroredStrategy, devices.names_of(num_devices))
    strategies = {
        "in turn": strategy_of(replicas=replicas),
        "together": strategy_of(replicas_per_device=replicas // num_devices),
    }
    model = model_of(BY_NAME[name])
    contenders = [mirror_plain(model, strategy, each) for each, strategy in strategies.items()]
    found: list[list[float]] = [[], []]
    for number in range(-3, rounds):
        for contender, times in zip(contenders, found, strict=True):
            start = clock()
            for _ in range(3):
                contender.launch()
                jax.block_until_ready(contender.arrays())
            if number >= 0:  # the others compile, and fill caches
                times.append(clock() - start)
    return [turns / together for turns, together in zip(*found, strict=True)]


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the table, or, as a child, the ratios of one pair."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", default="narrow,wide,cnn,mobile")
    parser.add_argument("--replicas", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.gpu:
        devices.use_default()
    if options.child is not None:
        name, num_devices = options.child
        print(json.dumps(measure(name, int(num_devices), options.replicas, options.rounds)))
        return
    kind = "elapsed" if options.gpu else "CPU"
    print(f"{'model':8} {'devices':>7}  ratio of {kind} time, median [quartiles]")
    for name in options.models.split(","):
        for num_devices in (1,) if options.gpu else (options.replicas, 1):
            command = [sys.executable, "-m", "benchmarks.fixed_replicas"]
            command += ["--replicas", str(options.replicas), "--rounds", str(options.rounds)]
            command += [*(["--gpu"] if options.gpu else []), "--child", name, str(num_devices)]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            ratios = json.loads(done.stdout.splitlines()[-1])
            low, middle, high = statistics.quantiles(ratios, n=4)
            print(f"{name:8} {num_devices:7}  {middle:.2f} [{low:.2f}, {high:.2f}]", flush=True)


if __name__ == "__main__":
    main()
