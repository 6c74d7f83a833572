"""One worker with servers in the same process."""

import pickle

import mirror
from mirror._src.ps.actions import Assignment, Committed
from mirror._src.ps.messages import Definition, ServerSnapshot
from mirror._src.ps.objects import TrainingObjects
from mirror._src.ps.optimizer_tree import join_optimizer_state, split_optimizer_state
from mirror._src.ps.placement import place
from mirror._src.ps.replies import ArgumentOfStep, Export, ModelShare, StepWork
from mirror._src.ps.store import Store
from mirror._src.ps.work import Worker
from tests.ps.digits import train_step


class LocalServers:
    """Stores in this process."""

    def __init__(self, stores):
        self.stores = stores

    def call_all(self, method, arguments):
        calls = zip(self.stores, arguments, strict=True)
        return [getattr(store, method)(*each) for store, each in calls]

    def call(self, server, method, *arguments):
        return getattr(self.stores[server], method)(*arguments)


def collect(objects, placement, stores, commit):
    """Commits the last step, if any, and writes the values of the stores into the objects."""
    snapshots = []
    for store in stores:
        store.commit(0, *(commit or ()))
        snapshots.append(store.snapshot())
    state = join_optimizer_state(
        objects.optimizer.tx, objects.trained, placement, [s.state for s in snapshots]
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
            self.tx, objects.trained, self.placement, objects.read_optimizer()
        )
        values = self.placement.split(objects.read())
        for store, slices, own, state in zip(
            self.stores, self.placement.servers, values, states, strict=True
        ):
            snapshot = ServerSnapshot(own, state, objects.step)
            store.load(Definition(slices, self.tx, True), snapshot, 0)
        share = ModelShare(objects.definition(), self.placement)
        self.exports = exports = {"fn": step, "model": share}
        self.worker = Worker(
            0,
            LocalServers(self.stores),
            mirror.MirroredStrategy([f"/cpu:{i}" for i in range(num_devices)]),
            loads=lambda value: value,
            dumps=pickle.dumps,
            fetch=exports.__getitem__,
        )
        self.commit, self.version = None, objects.step

    def part(self, batch, part=0, num_parts=1, task=None, num_rows=0, weight_of=None):
        """Runs a part. Unless `num_rows` is 0, its results are joined; None stands for unknown."""
        version = self.version
        task = version if task is None else task
        assignment = Assignment(0, task, part, num_parts, 0, 0, self.commit, version)
        work = StepWork(Export(0, ["fn"]), Export(1, ["model"]), version, None)
        if weight_of is not None:
            self.exports["weight_of"] = weight_of
            work = work._replace(weight_of=Export(2, ["weight_of"]))
        if num_rows != 0:
            work = work._replace(num_parts=num_parts, num_rows=num_rows)
        arguments = (ArgumentOfStep("model"), ArgumentOfStep("optimizer"), batch)
        return self.worker.run_part(assignment, work, (arguments, {}))

    def train(self, batch, mask, num_parts, weight_of):
        """Runs the first part of a step of a `Trainer`, which joins its parts itself."""
        self.exports["weight_of"] = weight_of
        assignment = Assignment(0, 0, 0, num_parts, 0, 0, self.commit, self.version)
        work = StepWork(
            *(Export(0, ["fn"]), Export(1, ["model"]), self.version, Export(2, ["weight_of"])),
            num_rows=num_parts * len(mask),
        )
        places = (ArgumentOfStep("model"), ArgumentOfStep("optimizer"))
        return self.worker.run_part(assignment, work, ((*places, batch, mask), {}))

    def end_step(self, num_parts=1, task=None):
        self.commit = Committed(self.version, self.version if task is None else task, num_parts)
        self.version += 1

    def collect(self):
        collect(self.objects, self.placement, self.stores, self.commit)
