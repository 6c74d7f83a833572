"""Servers of the simulated cluster with a real `Store` each, beside the model of it."""

import copy
import functools
from typing import Any

import numpy as np
import optax

from mirror._src.ps.messages import Definition, Push, Rejected, ServerSnapshot
from mirror._src.ps.placement import Slice
from mirror._src.ps.store import Store
from tests.ps.simulated import DONE, LOST, Server, State, gradient_of, undisturbed

WEIGHT = 2.0


@functools.cache
def definition(is_sync: bool) -> Definition:
    part = Slice("kernel", 0, 3, (3,), "float32", "trained")
    return Definition((part,), optax.sgd(0.1, momentum=0.9), is_sync)


def first_snapshot(value: int, version: int = 0) -> ServerSnapshot:
    kernel = np.arange(3, dtype=np.float32) + np.float32(value)
    return ServerSnapshot({"kernel": kernel}, version=version)


def pushed(incarnation: int, task: int, part: int, based_on: int, gradient: int) -> Push:
    """Returns a push whose gradients are as odd as those of a network: sums round."""
    values = np.array([gradient % 9973, gradient % 7919, gradient % 104_729], np.float32) / 7
    return Push(incarnation, task, part, based_on, WEIGHT + part, (values,), result=(task, part))


class StoreServer(Server):
    """The model of a server, and a `Store` that must answer as it does."""

    def __init__(self, index: int, staleness: int | None) -> None:
        super().__init__(index, staleness)
        self.store = Store()

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "state" and value is None:
            self.store = Store()  # a restarted process
        super().__setattr__(name, value)

    def load(self, state: State, incarnation: int) -> None:
        super().load(state, incarnation)
        stored = state.stored or first_snapshot(state.value, state.version)
        self.store.load(definition(self.staleness == 0), stored, incarnation)

    def snapshot(self) -> State:
        state = super().snapshot()
        state.stored = copy.deepcopy(self.store.snapshot())
        return state

    def agree(self, ours: object, theirs: object) -> None:
        assert (ours is LOST) == (isinstance(theirs, Rejected) and theirs.reason != "late")
        if self.state is not None:
            assert self.store.statistics()["version"] == self.state.version

    def commit(self, incarnation: int, step: int, task: int, num_parts: int) -> None:
        super().commit(incarnation, step, task, num_parts)
        theirs = self.store.commit(incarnation, step, task, num_parts)
        self.agree(LOST if self.refuses(incarnation) else None, theirs)

    def pull(self, assignment):
        ours = super().pull(assignment)
        a = assignment
        theirs = self.store.pull(a.incarnation, a.step, a.commit, {})
        self.agree(ours, theirs)
        if ours is DONE:
            assert theirs.results[1][a.part] == (a.task, a.part)
        elif ours is not LOST and a.step is not None:
            assert isinstance(theirs, Rejected) == (ours[0] > a.step)
        return ours

    def push(self, assignment, based_on: int, gradient: int):
        ours = super().push(assignment, based_on, gradient)
        a = assignment
        theirs = self.store.push(pushed(a.incarnation, a.task, a.part, based_on, gradient))
        self.agree(ours, theirs)
        return ours


def check_stores(cluster) -> None:
    """Checks that stores hold, bit for bit, what an undisturbed run gives."""
    for server in cluster.servers:
        if server.state is None or cluster.driver._obstacle is not None:
            return
        snapshot = server.store.snapshot()
        if cluster.staleness != 0:
            continue
        first = cluster.first[server.index]
        alone = Store()
        alone.load(definition(True), first_snapshot(first.value, first.version), 0)
        values = [state.value for state in cluster.first]
        for step, (task, num_parts) in enumerate(server.state.steps, first.version):
            for part in range(num_parts):
                gradient = gradient_of(task, part, tuple(values), server.index)
                alone.push(pushed(0, task, part, step, gradient))
            alone.commit(0, step, task, num_parts)
            values = undisturbed(values, [(task, num_parts)])
        want = alone.snapshot()
        np.testing.assert_array_equal(snapshot.values["kernel"], want.values["kernel"])
        assert snapshot.version == want.version
