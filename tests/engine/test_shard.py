"""`shard="optimizer"`: each device stores and updates 1/n of the state; training is the same."""

import json
import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from flax.training import train_state

import mirror
from mirror import cli
from tests.support.compilations import compiler_options
from tests.support.copies import assert_close
from tests.support.inside import pretended_types
from tests.support.messages import assert_message, raises
from tests.support.strategies import cpu_strategy
from tests.support.tables import rows

# Most networks have batch statistics of each replica.
pytestmark = pytest.mark.filterwarnings("ignore:.* differs from one device")
RNG = np.random.RandomState(0)
X = RNG.randn(16, 16).astype(np.float32)
PARAMS = {
    "w": RNG.randn(16, 32).astype(np.float32) / 4,
    "b": np.zeros(32, np.float32),
    "v": RNG.randn(32, 10).astype(np.float32) / 6,
    "c": np.zeros(10, np.float32),
    "k": RNG.randn(3, 8, 2).astype(np.float32),
}
BUCKETS = "xla_gpu_reduce_scatter_combine_threshold_bytes"
SHARED = {2: {"w", "b", "v", "c", "k"}, 4: {"w", "b", "v", "k"}, 8: {"w", "b", "v", "k"}}


def forward(p, x):
    return jnp.tanh(x @ p["w"] + p["b"]) @ p["v"] + p["c"] + (p["k"] ** 2).mean()


def step_of(tx):
    def step(state, x):
        params, opt_state = state
        loss, grads = jax.value_and_grad(lambda p: (forward(p, x) ** 2).mean())(params)
        context = mirror.get_replica_context()
        grads = context.all_reduce("mean", grads)
        updates, opt_state = tx.update(grads, opt_state, params)
        new = optax.apply_updates(params, updates)
        return (new, opt_state), context.all_reduce("mean", loss)

    return step


def train(strategy, tx, steps=4):
    with strategy.scope():
        params = jax.tree.map(jnp.asarray, PARAMS)
        state = (params, tx.init(params))
    (batch,) = strategy.distribute_dataset([X])
    step = step_of(tx)
    losses = []
    for _ in range(steps):
        state, loss = strategy.run(step, (state, batch), donate_argnums=0)
        losses.append(float(loss))
    return state, losses


def stored(tree) -> list[float]:
    """Returns the fraction of each array of a tree that the first device stores."""
    leaves = [x for x in jax.tree.leaves(tree) if x.ndim]
    return [x.addressable_shards[0].data.size / x.size for x in leaves]


def masked():
    is_matrix = lambda p: jax.tree.map(lambda x: x.ndim > 1, p)  # noqa: E731
    schedule = optax.cosine_decay_schedule(1e-2, 100)
    return optax.chain(
        optax.clip_by_global_norm(0.5), optax.adamw(schedule, weight_decay=0.1, mask=is_matrix)
    )


# For each optimizer, the number of parameter copies that it shards: those that it computes per
# element, or with norms of whole arrays. Other optimizers train the same, with unsharded state.
OPTIMIZERS = {
    "adam": (lambda: optax.adam(1e-2), 2),
    "clipped masked adamw with a schedule": (masked, 2),
    "sgd": (lambda: optax.sgd(1e-2), 0),
    "momentum": (lambda: optax.sgd(1e-2, momentum=0.9, nesterov=True), 1),
    "rmsprop": (lambda: optax.rmsprop(1e-3, momentum=0.9), 2),
    "lion": (lambda: optax.lion(1e-3), 1),
    "trace and ema": (
        lambda: optax.chain(optax.trace(0.9), optax.ema(0.99), optax.scale(-1e-2)),
        2,
    ),
    "amsgrad": (lambda: optax.amsgrad(1e-2), 3),
    "adagrad": (lambda: optax.adagrad(1e-2), 1),
    "lamb": (lambda: optax.lamb(1e-2), 2),
    "lars": (lambda: optax.lars(1e-2), 1),
    "adafactor": (lambda: optax.adafactor(1e-2), None),
    "zero_nans": (lambda: optax.chain(optax.zero_nans(), optax.adam(1e-2)), 2),
    "MultiSteps": (lambda: optax.MultiSteps(optax.adam(1e-2), 2), 0),
    "apply_if_finite": (lambda: optax.apply_if_finite(optax.adam(1e-2), 3), 0),
    "adaptive clipping": (
        lambda: optax.chain(optax.adaptive_grad_clip(0.1), optax.adam(1e-2)),
        None,
    ),
}


ROWS = [(name, 4) for name in OPTIMIZERS]
ROWS += [("adam", n) for n in (2, 8)]


@pytest.mark.nightly
@rows("name, n", ROWS)
def test_sharded_update_trains_every_optimizer_as_unsharded(name, n):
    make, copies = OPTIMIZERS[name]
    state, losses = train(cpu_strategy(n, shard="optimizer"), make())
    wanted, plain = train(cpu_strategy(n), make())
    assert_close(state, wanted, 2e-6)
    np.testing.assert_allclose(losses, plain, rtol=1e-6)
    assert losses[-1] < losses[0]
    params, opt_state = state
    assert set(stored(params)) == {1.0}  # the forward pass reads the full parameters
    found = stored(opt_state)
    if copies is not None:
        assert sum(part < 1 for part in found) == copies * len(SHARED[n])
    assert {part for part in found if part < 1} <= {1 / n}


class Net(nnx.Module):
    def __init__(self, rngs):
        # No bias: the normalization removes it, and its gradient is rounding noise.
        self.first = nnx.Linear(16, 32, use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(32, rngs=rngs)
        self.drop = nnx.Dropout(0.2, rngs=rngs)
        self.second = nnx.Linear(32, 8, rngs=rngs)

    def __call__(self, x):
        return self.second(self.drop(jax.nn.relu(self.norm(self.first(x)))))


def nnx_step(model, optimizer, x):
    loss, grads = nnx.value_and_grad(lambda m: (m(x) ** 2).mean())(model)
    context = mirror.get_replica_context()
    optimizer.update(model, context.all_reduce("mean", grads))
    return context.all_reduce("mean", loss)


def nnx_training(strategy):
    with strategy.scope():
        model = Net(nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    return model, optimizer


def of_nnx(strategy):
    model, optimizer = nnx_training(strategy)
    (batch,) = strategy.distribute_dataset([X])
    for _ in range(4):
        strategy.run(nnx_step, (model, optimizer, batch))
    strategy.check_mirrored((model, optimizer))
    return nnx.state(model), nnx.state(optimizer)


class LinenNet(linen.Module):
    @linen.compact
    def __call__(self, x):
        return linen.Dense(8)(linen.relu(linen.Dense(32)(x)))


def of_linen(strategy):
    net = LinenNet()
    with strategy.scope():
        params = net.init(jax.random.key(0), X[:1])["params"]
        tx = optax.adam(1e-2)
        state = train_state.TrainState.create(apply_fn=net.apply, params=params, tx=tx)

    def step(state, x):
        grads = jax.grad(lambda p: (state.apply_fn({"params": p}, x) ** 2).mean())(state.params)
        return state.apply_gradients(grads=mirror.all_reduce("mean", grads))

    (batch,) = strategy.distribute_dataset([X])
    for _ in range(4):
        state = strategy.run(step, (state, batch), donate_argnums=0)
    strategy.check_mirrored((state.params, state.opt_state))
    return state.params, state.opt_state


def of_equinox(strategy):
    tx = optax.adam(1e-2)
    with strategy.scope():
        model = eqx.nn.MLP(16, 8, 32, 1, key=jax.random.key(0))
        opt_state = tx.init(eqx.filter(model, eqx.is_array))

    def step(model, opt_state, x):
        loss = lambda m: (jax.vmap(m)(x) ** 2).mean()  # noqa: E731
        grads = mirror.all_reduce("mean", eqx.filter_grad(loss)(model))
        updates, opt_state = tx.update(grads, opt_state)
        return eqx.apply_updates(model, updates), opt_state

    (batch,) = strategy.distribute_dataset([X])
    for _ in range(4):
        model, opt_state = strategy.run(step, (model, opt_state, batch), donate_argnums=(0, 1))
    arrays = eqx.filter(model, eqx.is_array)
    strategy.check_mirrored((arrays, opt_state))
    return arrays, opt_state


KINDS = {"nnx": of_nnx, "linen": of_linen, "equinox": of_equinox}


@pytest.mark.nightly
@rows("kind, n", [("nnx", 2), ("linen", 4), ("equinox", 4)])
def test_sharded_update_shards_every_kind_of_state(kind, n):
    model, opt_state = KINDS[kind](cpu_strategy(n, shard="optimizer"))
    wanted = KINDS[kind](cpu_strategy(n))
    for x, y in zip(*map(jax.tree.leaves, ((model, opt_state), wanted)), strict=True):
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x, y = map(jax.random.key_data, (x, y))
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=2e-6, atol=2e-6)
    parts = [x for x in stored(opt_state) if x < 1]
    # Two moments; every array of these nets has an axis that eight divide.
    assert parts == [1 / n] * len(parts)
    assert (
        len(parts)
        == 2 * len([x for x in jax.tree.leaves(model) if is_weight(x)]) - 2 * (kind == "nnx") * 2
    )  # running statistics


def is_weight(x) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


def adam_training(strategy, steps=1):
    """Returns a trained state, and a function that continues its training."""
    tx = optax.adam(1e-2)
    with strategy.scope():
        params = jax.tree.map(jnp.asarray, PARAMS)
        state = (params, tx.init(params))
    (batch,) = strategy.distribute_dataset([X])
    step = step_of(tx)

    def go_on(state):
        return strategy.run(step, (state, batch), donate_argnums=0)[0]

    for _ in range(steps):
        state = go_on(state)
    return state, go_on


def test_donated_shards_are_reused():
    state, go_on = adam_training(cpu_strategy(4, shard="optimizer"))
    old = state[1][0].mu["w"]
    before = {s.data.unsafe_buffer_pointer() for s in old.addressable_shards}
    new = go_on(state)[1][0]
    assert old.is_deleted()
    after = {
        s.data.unsafe_buffer_pointer()
        for leaf in (*new.mu.values(), *new.nu.values())
        for s in leaf.addressable_shards
    }
    assert before <= after
    with raises(ValueError, names="state[0]['b']", fix="donate_argnums"):
        go_on(state)


def test_state_may_come_from_any_device():
    """State from NumPy, another strategy, unsharded, or sharded along another axis is the same."""
    strategy = cpu_strategy(4, shard="optimizer")
    (whole, _), (sliced, go_on) = adam_training(cpu_strategy(2)), adam_training(strategy)
    mesh = sliced[1][0].mu["w"].sharding.mesh
    along_one = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "replica"))
    moved = sliced[1][0]._replace(mu=sliced[1][0].mu | {"w": jnp.copy(sliced[1][0].mu["w"])})
    moved.mu["w"] = jax.device_put(moved.mu["w"], along_one)
    others = [
        jax.tree.map(np.asarray, whole),
        jax.tree.map(jnp.copy, whole),
        jax.tree.map(jnp.copy, (sliced[0], (moved, sliced[1][1]))),
    ]
    wanted = go_on(sliced)
    for other in others:
        got = go_on(other)
        assert_close(got, wanted, 2e-6)
        assert set(stored(got[1][0].mu["w"])) == {0.25}


def test_one_array_in_two_arguments_is_copied():
    strategy = cpu_strategy(4, shard="optimizer")
    state, go_on = adam_training(strategy)
    adam = state[1][0]
    shared = (state[0], (adam._replace(nu=adam.mu), state[1][1]))
    apart = jax.tree.map(lambda x: jnp.asarray(np.asarray(x)), shared)
    got = go_on(shared)
    assert_close(got, go_on(apart))
    assert set(stored(got[1][0].nu["w"])) == {0.25}


def test_step_reads_sharded_state_as_full_arrays():
    strategy = cpu_strategy(4, shard="optimizer")
    state, go_on = adam_training(strategy)
    wanted = np.asarray(state[1][0].mu["w"]) @ np.ones((32, 2), np.float32)
    got = strategy.run(lambda mu: mu @ jnp.ones((32, 2)), (state[1][0].mu["w"],))
    np.testing.assert_allclose(np.asarray(got), wanted, rtol=1e-6)
    assert len(strategy.local_results(state[1][0].mu)) == 4
    for copy in strategy.local_results(state[1][0].mu["w"]):
        np.testing.assert_array_equal(np.asarray(copy), np.asarray(state[1][0].mu["w"]))
    other = cpu_strategy(2)
    moved = other.run(lambda mu: mu * 2, (state[1][0].mu["w"],))
    assert moved.sharding.is_fully_replicated
    strategy.check_mirrored(state)
    go_on(state)


@pytest.mark.slow
def test_steps_alternate_on_one_optimizer():
    """One step shards the state, the other reads it unsharded."""

    def look(optimizer):
        kernels = [x for x in jax.tree.leaves(nnx.state(optimizer)) if x.ndim == 2]
        return sum((x @ jnp.ones((x.shape[1], 1))).sum() for x in kernels)

    found = []
    for shard in ("optimizer", "none"):
        strategy = cpu_strategy(4, shard=shard)
        model, optimizer = nnx_training(strategy)
        (batch,) = strategy.distribute_dataset([X])
        for _ in range(4):
            loss = strategy.run(nnx_step, (model, optimizer, batch))
            seen = strategy.run(look, (optimizer,))
        strategy.run(nnx_step, (model, optimizer, batch))
        assert (0.25 in stored(nnx.state(optimizer))) is (shard == "optimizer")
        found.append((loss, seen, nnx.state(model, nnx.Param)))
    assert_close(*found, 2e-6)


@pytest.mark.slow
def test_step_trains_two_models():
    def step(models, optimizers, x):
        context = mirror.get_replica_context()
        for model, optimizer in zip(models, optimizers, strict=True):
            grads = nnx.grad(lambda m: (m(x) ** 2).mean())(model)
            optimizer.update(model, context.all_reduce("mean", grads))

    found = []
    for shard in ("optimizer", "none"):
        strategy = cpu_strategy(2, shard=shard)
        models, optimizers = zip(*(nnx_training(strategy) for _ in range(2)), strict=True)
        (batch,) = strategy.distribute_dataset([X])
        for _ in range(3):
            strategy.run(step, (models, optimizers, batch))
        found.append(nnx.state((models, optimizers), nnx.Any(nnx.Param, nnx.optimizer.OptState)))
    assert_close(*found, 2e-6)
    assert 0.5 in stored(found[0])


def test_reductions_of_shards_are_reductions_of_all():
    def step(momentum, x):
        momentum = 0.9 * momentum + mirror.all_reduce("mean", x.mean(0))
        is_large = momentum > 0.5
        found = momentum.sum(), momentum.max(), momentum.min(), is_large.all(), is_large.any()
        return momentum, found

    strategy = cpu_strategy(2, shard="optimizer")
    (batch,) = strategy.distribute_dataset([np.tile(np.arange(4, dtype=np.float32), (2, 1))])
    with strategy.scope():
        momentum = jnp.zeros(4)
    momentum, found = strategy.run(step, (momentum, batch), donate_argnums=0)
    assert stored(momentum) == [0.5]
    assert list(map(float, found)) == [6, 3, 0, False, True]


def test_gradients_in_half_precision_are_not_scattered():
    """A reduce-scatter rounds them in another order than `jax.lax.psum`."""

    def step(state, x):
        grads = jax.grad(lambda p: (forward(p, x) ** 2).mean())(state[0])
        grads = jax.tree.map(lambda g: jax.lax.psum(g, mirror.REPLICA_AXIS), grads)
        updates, opt_state = tx.update(grads, state[1], state[0])
        return optax.apply_updates(state[0], updates), opt_state

    strategy, tx = cpu_strategy(4, shard="optimizer"), optax.adam(1e-2)
    (batch,) = strategy.distribute_dataset([X.astype(jnp.bfloat16)])
    with strategy.scope():
        params = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), PARAMS)
        state = (params, tx.init(params))
    report = strategy.inspect(step, (state, batch))
    assert "sharded" in {row.state for row in report.sharding}
    assert "reduce-scatter" not in {row.kind for row in report.collectives}


def test_missing_all_reduce_is_still_an_error():
    strategy = cpu_strategy(2, shard="optimizer")
    model, optimizer = nnx_training(strategy)
    (batch,) = strategy.distribute_dataset([X])

    def step(model, optimizer, x):
        optimizer.update(model, nnx.grad(lambda m: (m(x) ** 2).mean())(model))

    names = ["step", "model.first.kernel", "x"]
    with raises(mirror.ReplicaDivergenceError, names=names, fix="all_reduce"):
        strategy.run(step, (model, optimizer, batch))


def test_verify_and_the_report_support_shards():
    strategy = cpu_strategy(4, shard="optimizer")
    state, go_on = adam_training(strategy)
    (batch,) = strategy.distribute_dataset([X])
    step = step_of(optax.adam(1e-2))
    assert strategy.verify(step, (state, batch), rtol=1e-4).largest < 1e-4
    rows = {row.name: row for row in strategy.inspect(step, (state, batch)).sharding}
    mu = rows["state[1][0].mu['w']"]
    assert mu.state == "sharded"
    assert_message(mu.why, values=["1/4", "axis 0"])
    assert_message(rows["state[1][0].mu['k']"].why, values=["1/4", "axis 1"])
    assert_message(rows["state[1][0].mu['c']"].why, values=["float32[10]", 4])
    weight = rows["state[0]['w']"]
    assert weight.state == "mirrored"
    assert_message(weight.why, names=["dot_general", "test_shard.py"])
    assert mu.why in str(strategy.inspect(step, (state, batch)))
    collectives = strategy.inspect(step, (state, batch)).collectives
    assert [(row.in_words, row.num_leaves) for row in collectives] == [
        ("reduce-scatter (sum)", 4),
        ("all-reduce (sum)", 2),  # for arrays without a divisible axis, and for the loss
        ("all-gather", 4),
    ]
    assert not cpu_strategy(4).inspect(step, (state, batch)).sharding
    go_on(state)


def test_report_names_the_reason_for_unsharded_state():
    strategy = cpu_strategy(4, shard="optimizer")
    tx = optax.MultiSteps(optax.adam(1e-2), 2)
    with strategy.scope():
        params = jax.tree.map(jnp.asarray, PARAMS)
        state = (params, tx.init(params))
    (batch,) = strategy.distribute_dataset([X])
    report = strategy.inspect(step_of(tx), (state, batch))
    assert {row.state for row in report.sharding} == {"mirrored"}
    assert any("cond" in row.why.split() for row in report.sharding)


def test_state_whose_new_value_is_read_whole_is_not_sharded():
    """Its slices would be gathered again at once."""
    strategy = cpu_strategy(4, shard="optimizer")

    def step(state, x):
        w, mean, preconditioned = state
        mean = 0.9 * mean + jax.lax.pmean(x, mirror.REPLICA_AXIS)
        preconditioned = 0.9 * preconditioned + mean @ mean
        return w - preconditioned, mean, preconditioned

    with strategy.scope():
        state = tuple(jnp.ones((8, 8)) for _ in range(3))
    batch = mirror.PerReplica.from_stacked(np.ones((4, 8, 8), np.float32))
    _, mean, preconditioned = strategy.inspect(step, (state, batch)).sharding
    assert (mean.state, preconditioned.state) == ("mirrored", "sharded")
    assert_message(mean.why, names=["read whole", "test_shard.py"])


@pytest.mark.slow
def test_memory_reports_count_shards(capsys):
    options = ["estimate-memory", "mlp", "--devices", "4", "--batch-size", "32", "--json"]
    found = []
    for more in ([], ["--shard", "optimizer"]):
        assert cli.main([*options, *more]) == 0
        (row,) = json.loads(capsys.readouterr().out)["rows"]
        found.append(row["bytes"])
    whole, sharded = found
    assert whole["parameters"] == sharded["parameters"]
    # Momentum; the bias of ten classes has no axis that four divide.
    assert whole["optimizer_state"] == pytest.approx(4 * sharded["optimizer_state"], rel=1e-3)
    strategy = cpu_strategy(2, shard="optimizer")
    model, optimizer = nnx_training(strategy)
    data = strategy.distribute_dataset([X] * 4)
    memory = strategy.explain(nnx_step, (model, optimizer), data=data, steps=2).memory
    (group,) = (each for each in memory.groups if each.kind.value == "optimizer state")
    assert max(group.device_bytes) < 0.51 * group.num_bytes


def trainer_of(strategy, **options):
    def loss_fn(model, batch):
        return (model(batch["x"]) ** 2).mean(-1)

    with strategy.scope():
        return mirror.Trainer(Net(nnx.Rngs(0)), optax.adam(1e-2), loss_fn, **options)


DATA = {"x": RNG.randn(44, 16).astype(np.float32)}


@pytest.mark.slow
def test_checkpoint_of_shards_is_one_full_copy(tmp_path):
    data = mirror.data.from_arrays(DATA, batch_size=16)
    results = {}
    for shard in ("optimizer", "none"):
        trainer = trainer_of(cpu_strategy(4, shard=shard))
        trainer.fit(data, epochs=1, progress=False)
        results[shard] = nnx.state(trainer.optimizer)
        trainer.save(tmp_path / shard)
    assert_close(*results.values(), 2e-6)
    assert 0.25 in stored(results["optimizer"])
    for saved in ("optimizer", "none"):
        for n, shard in ((2, "optimizer"), (4, "none")):
            trainer = trainer_of(cpu_strategy(n, shard=shard))
            trainer.restore(tmp_path / saved)
            assert_close(nnx.state(trainer.optimizer), results[saved], 0)
            trainer.fit(data, epochs=2, progress=False)
            parts = stored(nnx.state(trainer.optimizer))
            assert (1 / n in parts) is (shard == "optimizer")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:A launch of steps_per_execution=2")
def test_grouped_steps_stay_mirrored():
    data = mirror.data.from_arrays(DATA, batch_size=16)
    trainers = [
        trainer_of(cpu_strategy(2, shard=each), steps_per_execution=2)
        for each in ("optimizer", "none")
    ]
    for trainer in trainers:
        trainer.fit(data, epochs=2, progress=False)
    assert_close(*(nnx.state(trainer.optimizer) for trainer in trainers), 2e-6)


WHOLE = {
    "one replica": (lambda: cpu_strategy(1, shard="optimizer"), {"fix": "replica"}),
    "rows": (
        lambda: cpu_strategy(2, replicas_per_device=2, shard="optimizer"),
        {"fix": "replicas"},
    ),
    "host": (
        lambda: cpu_strategy(2, cross_device_ops=mirror.ReductionToOneDevice(), shard="optimizer"),
        {"names": "cross_device_ops", "values": "ReductionToOneDevice('/CPU:0')"},
    ),
}


@rows("make, wanted", WHOLE)
def test_sharding_says_when_it_has_no_effect(make, wanted, caplog):
    """In the log with one device, else in a warning."""
    caplog.clear()
    with caplog.at_level("INFO", logger="mirror"), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        strategy = make()
    (said,) = [r for r in (*caplog.messages, *(str(w.message) for w in caught)) if "shard=" in r]
    assert bool(caught) is (len(strategy.devices) > 1)
    assert_message(said, **wanted)
    assert strategy.shard == "none"
    state, _ = train(strategy, optax.adam(1e-2))
    assert set(stored(state)) == {1.0}
    assert_close(state, train(cpu_strategy(2), optax.adam(1e-2))[0], 1e-5)


@rows(
    "types, flags, number",
    {
        "GPUs": (["GPU"] * 4, "", 1),
        "GPUs, and the user's flag": (["GPU"] * 4, f"--{BUCKETS}=1000", 0),
        "host devices": ([], "", 0),
    },
)
def test_gradients_are_scattered_in_buckets_on_gpus(monkeypatch, types, flags, number):
    """XLA compares its limit with the slices, not with the 30 MiB of gradients."""
    monkeypatch.setenv("XLA_FLAGS", flags)
    with pretended_types(types), compiler_options() as options:
        train(cpu_strategy(4, shard="optimizer"), optax.adam(1e-2), steps=1)
    assert [each for each in options if BUCKETS in each] == [{BUCKETS: 30 * 2**20 // 4}] * number


def test_shard_must_be_one_of_the_words():
    words = ["'none'", "'optimizer'", "'model'", "'auto'"]
    with raises(ValueError, names="shard", values=["True", *words]):
        cpu_strategy(2, shard=True)
