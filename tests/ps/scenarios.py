"""Random scenarios of a simulated cluster, each from one seed.

Faults are rare beside small steps, so that most scenarios reach snapshots, recoveries, and
repetitions that are disturbed again.
"""

import random

from tests.ps.simulated import LIMIT, Cluster, Server


def cluster_of(generator: random.Random, server_class: type[Server]) -> Cluster:
    """Returns a cluster of any mode."""
    workers = generator.randint(1, 4)
    return Cluster(
        workers=workers,
        servers=generator.randint(1, 3),
        staleness=generator.choice([0, 0, 0, 1, 2, 3, None]),
        snapshot_every=generator.choice([0, 1, 2, 3, 5, 8]),
        server_class=server_class,
    )


def happen(cluster: Cluster, generator: random.Random) -> None:
    """Makes one event happen that is no answer."""
    worker = generator.randrange(cluster.num_workers)
    server = generator.randrange(len(cluster.servers))
    kind = generator.choices(
        ["step", "call", "raise", "worker", "gone", "server", "snapshot", "error", "load"],
        [30, 8, 1, 12, 0.5, 10 if cluster.snapshot_every else 0.3, 4, 6, 3],
    )[0]
    if kind == "step":
        for _ in range(generator.randint(1, 4)):
            parts = generator.randint(1, cluster.num_workers + 1)
            cluster.submit(parts if cluster.staleness == 0 else 1)
    elif kind == "call":
        cluster.submit(does="call")
    elif kind == "raise":
        does = generator.choice(["raise", "call raise"])
        cluster.submit(2 if does == "raise" and cluster.staleness == 0 else 1, does)
    elif kind == "worker":
        cluster.lose_worker(worker, is_alive=generator.random() < 0.5)
    elif kind == "gone":
        cluster.lose_worker(worker, is_alive=generator.random() < 0.5, is_gone=True)
    elif kind == "server":
        cluster.lose_server(server)
    elif kind == "snapshot":
        cluster.request_snapshot()
    elif kind == "error":
        cluster.take_error()
    elif not cluster.unsettled:
        cluster.take_error()
        step = generator.randrange(9)
        cluster.load([7 + step + i for i in range(len(cluster.servers))], step)


def play(seed: int, events: int = 40, server_class: type[Server] = Server) -> Cluster:
    """Plays one scenario to its end, and checks it."""
    generator = random.Random(seed)
    cluster = cluster_of(generator, server_class)
    try:
        _play(cluster, generator, events)
    finally:
        cluster.close()
    return cluster


def _play(cluster: Cluster, generator: random.Random, events: int) -> None:
    pace = generator.choice([1, 4, 12, 24])
    sticky = generator.random()  # how often a process runs on, instead of another one
    for _ in range(events):
        happen(cluster, generator)
        if generator.random() < 0.3:
            cluster.freeze(generator.randrange)
        if generator.random() < 0.15:
            cluster.frozen.clear()
        last = 0
        for _ in range(generator.randint(0, 2 * pace)):
            choices = cluster.choices()
            if choices:
                last = last if generator.random() < sticky else generator.randrange(len(choices))
                choices[last % len(choices)]()
    cluster.frozen.clear()
    cluster.run(generator.randrange, LIMIT)
    cluster.check_end()
