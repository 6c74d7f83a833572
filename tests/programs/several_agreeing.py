"""Runs the steps of the conformance table over processes: they agree with one device."""

import sys

import jax
import numpy as np
import optax
from flax import nnx

import mirror

print("from", mirror.__file__)
strategy = mirror.MultiWorkerMirroredStrategy()  # before the steps, which create arrays

from tests.support.conformance import (  # noqa: E402
    NET,
    STEPS,
    Regularized,
    assert_agree,
    is_per_replica,
    linen_step,
    nnx_step,
    on_host,
    rows,
)
from tests.support.inside import next_agreement  # noqa: E402

assert strategy.num_replicas_in_sync == 4
one = mirror.MirroredStrategy(["/cpu:0"], replicas_per_device=4)


def result_of(strategy, step, args):
    leaves, treedef = jax.tree.flatten(strategy.run(step, args), is_leaf=is_per_replica)
    return treedef, [on_host(leaf) for leaf in leaves]


def of_this_process(result):
    ids = list(strategy.local_replica_ids)
    treedef, leaves = result
    own = [(kind, t, x[ids] if kind == "per-replica" else x) for kind, t, x in leaves]
    return treedef, own


for name in sys.argv[1:] or STEPS:
    if name == "keys":  # JAX cannot reduce random keys across devices
        continue
    step, args = STEPS[name]
    assert_agree(result_of(strategy, step, args()), of_this_process(result_of(one, step, args())))
    print("agrees:", name, flush=True)

x = rows(8, 6)
for tx in (optax.sgd(0.1, momentum=0.9), optax.adam(0.01)):
    states = []
    for each in (strategy, one):
        with each.scope():
            model = Regularized(nnx.Rngs(0))
            optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
        model.dropout.deterministic = True
        losses = [float(each.run(nnx_step, (model, optimizer, x))) for _ in range(3)]
        state = nnx.state(model, (nnx.Param, nnx.BatchStat))
        states.append(([*map(np.asarray, jax.tree.leaves(state))], losses))
        each.check_mirrored((model, optimizer))
    for a, b in zip(jax.tree.leaves(states[0]), jax.tree.leaves(states[1]), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
print("agrees: nnx", flush=True)

states = []
for each in (strategy, one):
    state = jax.tree.map(np.asarray, NET.init(jax.random.key(0), np.ones((2, 6), np.float32)))
    for _ in range(3):
        state, loss = each.run(linen_step, (state, x), donate_argnums=0)
    states.append((jax.tree.map(np.asarray, state), float(loss)))
for a, b in zip(jax.tree.leaves(states[0]), jax.tree.leaves(states[1]), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
print("agrees: linen", flush=True)


def loss_fn(model, batch):
    return optax.squared_error(model(batch["x"]).sum(-1), batch["y"])


arrays = {"x": np.ones((6, 6), np.float32), "y": np.ones(6, np.float32)}
trainer = mirror.Trainer(Regularized(nnx.Rngs(0)), optax.adamw(0.1), loss_fn, strategy=strategy)
trainer.fit(arrays, batch_size=4, progress=False)
trainer.evaluate(arrays, batch_size=4)
trainer.predict(arrays, lambda model, batch: model(batch["x"]), batch_size=4)
strategy.reduce("mean", x)
strategy.reduce("max", x, axis=0)
strategy.gather(x)
print("programs:", next_agreement())
