"""One worker with servers in the same process."""

import itertools
import pickle

import jax

import mirror
from mirror._src.ps.messages import (
    Assignment,
    Committed,
    Definition,
    Export,
    ServerSnapshot,
    StepWork,
)
from mirror._src.ps.objects import TrainingObjects, join_optimizer_state, split_optimizer_state
from mirror._src.ps.placement import place
from mirror._src.ps.step_data import ArgumentOfStep
from mirror._src.ps.store import Store
from mirror._src.ps.work import Worker
from tests.ps.digits import train_step


class LocalServers:
    """Stores in this process."""

    def __init__(self, stores):
        self.stores = stores

    def call_all(self, method, arguments):
        calls = zip(self.stores, arguments, strict=True)
        replies = [getattr(store, method)(*each) for store, each in calls]
        return lambda: replies


def collect(objects, placement, stores, commit):
    """Commits the last step, if any, and writes the values of the stores into the objects."""
    snapshots = []
    for store in stores:
        store.commit(0, *(commit or ()))
        snapshots.append(store.snapshot())
    state = join_optimizer_state(
        objects.state_structs, objects.trained, placement, [s.state for s in snapshots]
    )
    values = placement.join([s.values for s in snapshots])
    objects.write(values, state, snapshots[0].version)


class Training:
    """One worker and two servers that train a model."""

    def __init__(self, model, optimizer, num_devices=1, step=train_step):
        self.objects = objects = TrainingObjects(model, optimizer)
        self.tx = optimizer.tx
        self.placement = place(objects.leaves, 2, mirror.ps.FixedShardsPartitioner(2))
        self.stores = [Store(), Store()]
        states = split_optimizer_state(
            objects.state_structs, objects.trained, self.placement, objects.read_optimizer()
        )
        values = self.placement.split(objects.read())
        for store, slices, own, state in zip(
            self.stores, self.placement.servers, values, states, strict=True
        ):
            snapshot = ServerSnapshot(own, state, objects.step)
            store.load(Definition(slices, self.tx, True), snapshot, 0)
        share = objects.definition(self.placement)
        exports, self.keys = {"fn": step, "model": share}, itertools.count(2)
        self.worker = Worker(
            0,
            LocalServers(self.stores),
            mirror.MirroredStrategy([f"/cpu:{i}" for i in range(num_devices)]),
            loads=lambda value: value,
            dumps=pickle.dumps,
            fetch=lambda name: exports.get(name, name),
        )
        self.commit, self.version = None, objects.step

    def part(self, batch, part=0, num_parts=1, task=None, weight=None):
        """Runs a part of a step, whose weight is its number of rows by default."""
        weight = jax.tree.leaves(batch)[0].shape[0] if weight is None else weight
        return self._run((batch,), part, num_parts, task, lambda _: weight)

    def train(self, batch, mask, num_parts, weight_of):
        """Runs the first part of a step of a `Trainer`."""
        return self._run((batch, mask), 0, num_parts, None, weight_of)

    def _run(self, arguments, part, num_parts, task, weight_of):
        version = self.version
        task = version if task is None else task
        assignment = Assignment(task, part, num_parts, 0, self.commit, version)
        weight = Export(next(self.keys), [weight_of])
        work = StepWork(Export(0, ["fn"]), Export(1, ["model"]), version, weight)
        places = (ArgumentOfStep("model"), ArgumentOfStep("optimizer"))
        return self.worker.run_part(assignment, work, ((*places, *arguments), {}))

    def end_step(self, num_parts=1, task=None):
        self.commit = Committed(self.version, self.version if task is None else task, num_parts)
        self.version += 1

    def collect(self):
        collect(self.objects, self.placement, self.stores, self.commit)
