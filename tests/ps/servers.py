"""Parameter servers in one process: stores that several parts of a step push to."""

from collections.abc import Collection, Mapping, Sequence

import jax
import numpy as np
import optax

from mirror._src.ps.messages import BufferLayout, Definition, Push, ServerSnapshot
from mirror._src.ps.objects import flatten, nest
from mirror._src.ps.placement import FixedShardsPartitioner, Leaf, Placement, place
from mirror._src.ps.sparse import split_ids
from mirror._src.ps.store import Store

SHAPES = {
    "embed.table": (12, 4),
    "layers.0.kernel": (4, 6),
    "layers.0.bias": (6,),
    "layers.1.kernel": (6, 3),
    "layers.1.bias": (3,),
    "scale": (),
}


def random_leaves(seed: int, shapes: Mapping[str, tuple[int, ...]] = SHAPES, scale: float = 1.0):
    rng = np.random.default_rng(seed)
    return {n: (scale * rng.normal(size=s)).astype(np.float32) for n, s in shapes.items()}


def leaves_of(values: Mapping[str, np.ndarray], moving: Collection[str] = ()) -> list[Leaf]:
    return [
        Leaf(n, np.shape(v), str(v.dtype), "moving" if n in moving else "trained")
        for n, v in values.items()
    ]


class Servers:
    """Stores of a placement, and the numbers of the next step and task."""

    def __init__(
        self,
        tx: optax.GradientTransformation,
        values: Mapping[str, np.ndarray],
        num_ps: int = 2,
        *,
        partitioner=FixedShardsPartitioner(8),  # noqa: B008
        moving: Collection[str] = (),
        tables: Collection[str] = (),
        is_sync: bool = True,
        states: Sequence | None = None,
        placement: Placement | None = None,
    ):
        if placement is None:
            placement = place(leaves_of(values, moving), num_ps, partitioner, tables=tables)
        self.placement, self.is_sync, self.incarnation, self.task = placement, is_sync, 0, 0
        self.tables = tables
        self.definitions = [
            Definition(slices, tx, is_sync, frozenset(tables)) for slices in placement.servers
        ]
        self.stores = [Store() for _ in placement.servers]
        parts = placement.split(values)
        states = states or [None] * len(parts)
        self.load([ServerSnapshot(v, s) for v, s in zip(parts, states, strict=True)])

    def load(self, snapshots, incarnation=0):
        self.incarnation = incarnation
        for store, definition, snapshot in zip(
            self.stores, self.definitions, snapshots, strict=True
        ):
            store.load(definition, snapshot, incarnation)

    @property
    def version(self):
        (version,) = {store.statistics()["version"] for store in self.stores}
        return version

    def layout(self, server, kind="trained"):
        slices = self.placement.servers[server]
        return BufferLayout(p for p in slices if p.kind == kind and p.leaf not in self.tables)

    def pushes(self, gradients, *, part=0, weight=1.0, based_on=None, changes=None, ids=None):
        """The push of one part to each server, given whole leaves (of a table too)."""
        based_on = self.version if based_on is None else based_on
        by_server = split_ids(self.placement, ids or {})
        pushes = []
        for server, own in enumerate(self.placement.split({**gradients, **(changes or {})})):
            moving = self.layout(server, "moving")
            own |= {p.leaf: np.zeros(p.shape, p.dtype) for p in moving.slices if not changes}
            rows = {t: (i, gradients[t][i]) for t, i in by_server[server].items()}
            pushes.append(
                Push(
                    *(self.incarnation, self.task, part, based_on, weight),
                    self.layout(server).pack_np(own),
                    moving.pack_np(own),
                    rows,
                )
            )
        return pushes

    def push(self, gradients, **options):
        pushes = self.pushes(gradients, **options)
        return [store.push(push) for store, push in zip(self.stores, pushes, strict=True)]

    def step(self, *parts, **options):
        """One update with the mean of the gradients of parts."""
        step = self.version
        for part, gradients in enumerate(parts):
            self.push(gradients, part=part, **options)
        if self.is_sync:
            for store in self.stores:
                store.commit(self.incarnation, step, self.task, len(parts))
        self.task += 1

    def snapshots(self):
        return [store.snapshot() for store in self.stores]

    def values(self):
        return self.placement.join([s.values for s in self.snapshots()])

    def states(self):
        return [s.state for s in self.snapshots()]


def trained_by_optax(tx, values, gradients, state=None, **extra):
    """The values and the state after optax has applied gradients to whole leaves."""
    params = nest(values)
    state = tx.init(params) if state is None else state

    @jax.jit
    def update(gradients, state, params):
        with_extra = optax.with_extra_args_support(tx)
        updates, state = with_extra.update(gradients, state, params, **extra)
        return optax.apply_updates(params, updates), state

    for each in gradients:
        params, state = update(nest(each), state, params)
    return {n: np.asarray(v) for n, v in flatten(params, [*values]).items()}, state


def assert_equal_trees(one, other, tolerance=0.0):
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(
            np.asarray(a, np.float64), np.asarray(b, np.float64), rtol=tolerance, atol=tolerance
        )
