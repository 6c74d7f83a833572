"""Workers and servers of a model with a sparse table, all in this process."""

import pickle

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import mirror
from mirror._src.ps.messages import (
    Assignment,
    Committed,
    Definition,
    Export,
    Raised,
    ServerSnapshot,
    StepWork,
)
from mirror._src.ps.objects import TrainingObjects, split_optimizer_state
from mirror._src.ps.separable import place_separably
from mirror._src.ps.step_data import ArgumentOfStep
from mirror._src.ps.store import Store
from mirror._src.ps.work import Worker
from tests.ps.one_worker import LocalServers, collect

LOCAL = mirror.OneDeviceStrategy("/cpu:0")
TABLE = "embed.embedding"
SPARSE = {TABLE: lambda batch: batch["ids"]}


class Bag(nnx.Module):
    """Classifies the mean of embeddings."""

    def __init__(self, rngs, num_rows=40):
        self.embed = nnx.Embed(num_rows, 4, rngs=rngs)
        self.out = nnx.Linear(4, 2, rngs=rngs)

    def __call__(self, ids):
        return self.out(self.embed(ids).mean(1))


def losses(model, batch):
    logits = model(batch["ids"])
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), batch["y"][:, None], 1)[:, 0]


def step_of(loss_fn, change=lambda model, grads: grads):
    def train_step(model, optimizer, batch):
        loss, grads = nnx.value_and_grad(lambda m: loss_fn(m, batch).mean())(model)
        grads, loss = mirror.all_reduce("mean", (grads, loss))
        optimizer.update(model, change(model, grads))
        return loss

    return train_step


train_step = step_of(losses)


def batches(count, size=12, num_rows=40, seed=0):
    """Returns batches that touch few rows, some of them several times and in several parts."""
    rng = np.random.default_rng(seed)
    chosen = rng.choice(num_rows, 15, replace=False)
    return [
        {"ids": rng.choice(chosen, (size, 3)), "y": rng.integers(0, 2, size)} for _ in range(count)
    ]


def create(tx, num_rows=40):
    with LOCAL.scope():
        model = Bag(nnx.Rngs(0), num_rows)
        return model, nnx.Optimizer(model, tx, wrt=nnx.Param)


def on_one_device(model, optimizer, data, step=train_step):
    for batch in data:
        row = jax.tree.map(lambda x: mirror.PerReplica([x]), batch)
        LOCAL.run(step, (model, optimizer, row))


class Cluster:
    """Workers and servers that train a model synchronously."""

    def __init__(self, model, optimizer, workers=2, servers=2, step=train_step, **options):
        self.sparse, devices = options.get("sparse", SPARSE), options.get("devices", 1)
        self.objects = objects = TrainingObjects(model, optimizer)
        self.tx, self.num_parts = optimizer.tx, workers
        self.placement = place_separably(
            self.tx,
            objects.leaves,
            servers,
            mirror.ps.FixedShardsPartitioner(servers),
            tables=self.sparse,
        )
        self.stores = [Store() for _ in range(servers)]
        states = split_optimizer_state(
            objects.state_structs, objects.trained, self.placement, objects.read_optimizer()
        )
        values = self.placement.split(objects.read())
        held = zip(self.stores, self.placement.servers, values, states, strict=True)
        self.definitions = []
        for store, slices, own, state in held:
            definition = Definition(
                slices, self.tx, True, self.placement.tables, objects.first_rows
            )
            self.definitions.append(definition)
            store.load(definition, ServerSnapshot(own, state), 0)
        share = objects.definition(self.placement, self.sparse)
        # The workers share a program, because each would compile it.
        self.worker = Worker(
            0,
            LocalServers(self.stores),
            mirror.MirroredStrategy([f"/cpu:{i}" for i in range(devices)]),
            loads=lambda value: value,
            dumps=pickle.dumps,
            fetch=lambda name: {"fn": step, "model": share}.get(name, name),
        )
        self.version = 0
        self.commit: Committed | None = None

    def part(self, arguments, part=0, weight_of=None):
        """Returns the reply of a worker."""
        assignment = Assignment(self.version, part, self.num_parts, 0, self.commit, self.version)
        weight = None if weight_of is None else Export(2, [weight_of])
        work = StepWork(Export(0, ["fn"]), Export(1, ["model"]), self.version, weight)
        places = (ArgumentOfStep("model"), ArgumentOfStep("optimizer"))
        return self.worker.run_part(assignment, work, ((*places, *arguments), {}))

    def step(self, batch):
        for part in range(self.num_parts):
            cut = jax.tree.map(lambda x, i=part: np.split(x, self.num_parts)[i], batch)
            reply = self.part((cut,), part)
            if isinstance(reply, Raised):
                kind, args, _ = pickle.loads(reply.pickled)
                raise kind(*args)
        self.commit = Committed(self.version, self.version, self.num_parts)
        self.version += 1

    def train(self, data):
        """Trains, and writes the values into model and optimizer."""
        for batch in data:
            self.step(batch)
        collect(self.objects, self.placement, self.stores, self.commit)

    def snapshots(self):
        return [store.snapshot() for store in self.stores]

    def restart(self):
        """Replaces the servers by new ones, which load their snapshots."""
        for i, (store, snapshot) in enumerate(zip(self.stores, self.snapshots(), strict=True)):
            self.stores[i] = Store()
            self.stores[i].load(self.definitions[i], snapshot, 0, store.held_tables())

    def bytes_moved(self):
        counts = [store.statistics() for store in self.stores]
        return sum(each["bytes_in"] + each["bytes_out"] for each in counts)
