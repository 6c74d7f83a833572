"""The driver under any order of events: deaths, losses, late answers, errors, snapshots."""

import random

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.ps.simulated import Cluster

LIMIT = 20_000  # small steps until everything has ended


class Machine(RuleBasedStateMachine):
    """A cluster to which anything happens between any two calls of any process."""

    @initialize(
        staleness=st.sampled_from([0, 0, 0, 1, 2, 3, None]),
        workers=st.integers(1, 4),
        servers=st.integers(1, 3),
        every=st.sampled_from([0, 1, 2, 3, 5]),
    )
    def begin(self, staleness, workers, servers, every):
        self.cluster = Cluster(
            workers=workers, servers=servers, staleness=staleness, snapshot_every=every
        )

    @rule(count=st.integers(1, 4), parts=st.integers(1, 5))
    def schedule_steps(self, count, parts):
        for _ in range(count):
            self.cluster.submit(parts if self.cluster.staleness == 0 else 1)

    @rule(does=st.sampled_from(["call", "call", "raise", "call raise"]))
    def schedule_other(self, does):
        parts = 3 if does == "raise" and self.cluster.staleness == 0 else 1
        self.cluster.submit(parts, does)

    @rule(picks=st.lists(st.integers(0, 11), min_size=1, max_size=30))
    def go_on(self, picks):
        for pick in picks:
            choices = self.cluster.choices()
            if choices:
                choices[pick % len(choices)]()

    @rule(seed=st.integers(0, 1000), count=st.integers(1, 60))
    def go_on_longer(self, seed, count):
        generator = random.Random(seed)
        for _ in range(count):
            choices = self.cluster.choices()
            if choices:
                generator.choice(choices)()

    @rule(worker=st.integers(0, 3), is_alive=st.booleans())
    def lose_worker(self, worker, is_alive):
        self.cluster.lose_worker(worker, is_alive=is_alive)

    @rule(worker=st.integers(0, 3), is_alive=st.booleans(), chance=st.integers(0, 3))
    def lose_worker_for_good(self, worker, is_alive, chance):
        if chance == 0:
            self.cluster.lose_worker(worker, is_alive=is_alive, is_gone=True)

    @precondition(lambda self: self.cluster.snapshot_every)
    @rule(server=st.integers(0, 2))
    def lose_server(self, server):
        self.cluster.lose_server(server % len(self.cluster.servers))

    @precondition(lambda self: not self.cluster.snapshot_every)
    @rule(server=st.integers(0, 2), chance=st.integers(0, 5))
    def lose_server_without_snapshots(self, server, chance):
        if chance == 0:
            self.cluster.lose_server(server % len(self.cluster.servers))

    @rule()
    def request_snapshot(self):
        self.cluster.request_snapshot()

    @rule()
    def take_error(self):
        self.cluster.take_error()

    @precondition(lambda self: not self.cluster.unsettled)
    @rule(step=st.integers(0, 9))
    def load(self, step):
        self.cluster.take_error()
        self.cluster.load([7 + step + i for i in range(len(self.cluster.servers))], step)

    @rule(thing=st.integers(0, 11))
    def freeze(self, thing):
        self.cluster.freeze(lambda count: thing % count)

    @rule()
    def thaw(self):
        self.cluster.frozen.clear()

    def teardown(self):
        if hasattr(self, "cluster"):
            try:
                self.cluster.frozen.clear()
                self.cluster.run(random.Random(0).randrange, LIMIT)
                self.cluster.check_end()
            finally:
                self.cluster.close()


def run_machine(examples: int, steps: int, *, derandomize: bool = True) -> None:
    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            derandomize=derandomize,
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.slow
def test_laws_hold_in_any_order_of_events():
    run_machine(150, 50)


@pytest.mark.nightly
def test_laws_hold_in_many_orders_of_events():
    run_machine(4000, 60, derandomize=False)
