"""Memory reports and estimates equal the bytes on the devices and the figures of XLA."""

import collections
import itertools
import json
import re
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training import train_state

import mirror
from mirror import cli
from tests.support import fresh, inside, models
from tests.support.messages import assert_message
from tests.support.strategies import LAYOUTS, cpu_strategy
from tests.support.tables import rows

estimate_memory, memory, workload_module = inside.memory_estimates()
without_arrays, Workload = estimate_memory.without_arrays, workload_module.Workload
Estimate, estimate = estimate_memory.Estimate, estimate_memory.estimate
memory_report = memory.memory_report
COUNTED, Kind = memory.COUNTED, memory.Kind
MemoryGroup, MemoryReport = memory.MemoryGroup, memory.MemoryReport

ADAM = optax.adam(1e-3)
BATCH = models.batches((12,), 1)[0]


class Net(nnx.Module):
    """Has all kinds of state: parameters, batch statistics, rngs."""

    def __init__(self, rngs: nnx.Rngs):
        self.first = nnx.Linear(12, 32, rngs=rngs)
        self.norm = nnx.BatchNorm(32, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.out = nnx.Linear(32, models.CLASSES, rngs=rngs)

    def __call__(self, x):
        return self.out(self.drop(jax.nn.relu(self.norm(self.first(x)))))


def nnx_net(strategy):
    model = Net(nnx.Rngs(0))
    return models.nnx_step, (model, nnx.Optimizer(model, ADAM, wrt=nnx.Param))


def linen(strategy):
    params = models._LINEN.init(jax.random.key(0), jnp.zeros((1, 12)))["params"]
    state = train_state.TrainState.create(apply_fn=models._LINEN.apply, params=params, tx=ADAM)
    return models.linen_step, (state,)


def plain(strategy):
    """Its names do not tell the kinds of state, but `moments` comes from Optax."""
    weights = {"w": jnp.ones((12, models.CLASSES)), "b": jnp.zeros(models.CLASSES)}
    state = {"weights": weights, "moments": ADAM.init(weights)}
    return plain_step, (state, jnp.ones(7))


def plain_step(state, scale, batch):
    def loss_fn(weights):
        logits = batch["image"] @ weights["w"] + weights["b"]
        return (models.losses_of(logits, batch["label"]) * scale.mean()).mean()

    loss, grads = jax.value_and_grad(loss_fn)(state["weights"])
    grads, loss = jax.lax.pmean((grads, loss), mirror.REPLICA_AXIS)
    updates, moments = ADAM.update(grads, state["moments"], state["weights"])
    return {"weights": optax.apply_updates(state["weights"], updates), "moments": moments}, loss


def trainer(strategy):
    with strategy.scope():  # entered again, while the function is traced
        return mirror.Trainer(models.MLP(nnx.Rngs(0)), ADAM, trainer_loss, accumulate_steps=2)


def trainer_loss(model, batch):
    return models.losses_of(model(batch["image"]), batch["label"])


def bytes_held(tree) -> collections.Counter:
    """Returns the bytes of all arrays of a tree per device, by their shards."""
    found: collections.Counter = collections.Counter()
    for leaf in jax.tree.leaves(tree):
        if isinstance(leaf, jax.Array):
            for shard in leaf.addressable_shards:
                found[shard.device] += shard.data.nbytes
    return found


def kinds_of_nnx(args):
    model, optimizer = args
    params, rest = nnx.state(model, nnx.Param, ...)
    return {
        Kind.PARAMETERS: params,
        Kind.OPTIMIZER_STATE: nnx.state(optimizer, nnx.OptState),
        Kind.OTHER_STATE: rest,
    }


def kinds_of_linen(args):
    (state,) = args
    # A Python number becomes an array, and part of the state, in the first step.
    sharding = jax.tree.leaves(state.params)[0].sharding
    step = jax.device_put(np.asarray(state.step, np.int32), sharding)
    return {
        Kind.PARAMETERS: state.params,
        Kind.OPTIMIZER_STATE: state.opt_state,
        Kind.OTHER_STATE: step,
    }


def kinds_of_plain(args):
    state, scale = args
    return {
        Kind.OPTIMIZER_STATE: state["moments"],
        Kind.OTHER_STATE: state["weights"],
        Kind.ARGUMENTS: scale,
    }


STEPS = {
    "nnx": (nnx_net, kinds_of_nnx),
    "linen": (linen, kinds_of_linen),
    "plain": (plain, kinds_of_plain),
}


def workload(make):
    """Returns a constructor of workloads with batches on the devices."""

    def made(strategy):
        step, args = make(strategy)
        return Workload(step, args, strategy.distribute_dataset([BATCH], prefetch=0))

    return made


def layout(name):
    num_devices, on_each = LAYOUTS[name]
    return cpu_strategy(num_devices, replicas_per_device=on_each)


SOME = [("plain", "2"), ("nnx", "2-on-2"), ("linen", "3-on-1")]
ALL = list(itertools.product(STEPS, ["1", "2", "8", "2-on-2", "3-on-1"]))


@pytest.mark.parametrize(
    "rows", [SOME, pytest.param(ALL, marks=pytest.mark.nightly)], ids=["some", "all"]
)
@pytest.mark.filterwarnings("ignore:nnx_step differs")
def test_estimate_equals_the_compiled_memory(rows, subtests):
    """The estimate, made without arrays, equals the bytes of a later run on each device."""
    for step, name in rows:
        with subtests.test(msg=f"{step} {name}"):
            check_estimate(step, name)


def check_estimate(step, name):
    make, kinds_of = STEPS[step]
    strategy = layout(name)
    before = jax.live_arrays()
    found = estimate(step, workload(make), strategy)
    assert {id(array) for array in jax.live_arrays()} <= set(map(id, before))
    assert found.is_estimate
    with strategy.scope():
        fn, args = make(strategy)
    (batch,) = strategy.distribute_dataset([BATCH], prefetch=0)
    strategy.run(fn, (*args, batch))  # writes new state into nnx objects, on the devices
    truth = {kind: bytes_held(tree) for kind, tree in kinds_of(args).items()}
    truth[Kind.BATCH] = bytes_held(batch)
    for kind in COUNTED:
        held = [truth.get(kind, {}).get(device, 0) for device in dict.fromkeys(strategy.devices)]
        groups = [group.device_bytes for group in found.groups if group.kind is kind]
        assert [sum(each) for each in zip(*groups, strict=True)] == (held if groups else []), kind
        assert found.by_kind[kind] == max(held), kind
    compiled = strategy._runner.lower(fn, (*args, batch), {}).compile().memory_analysis()
    assert found.by_kind[Kind.TEMPORARIES] == compiled.temp_size_in_bytes > 0
    outputs = compiled.output_size_in_bytes - compiled.alias_size_in_bytes
    assert found.by_kind[Kind.RESULTS] == outputs
    # All inputs are used, so that XLA's own sum confirms them.
    assert sum((found.by_kind[kind] or 0) for kind in COUNTED) == compiled.argument_size_in_bytes
    # And the same for existing arrays, which are counted by their shards.
    there = memory_report(strategy._runner.examined(fn, (*args, batch), {}), strategy._replicas)
    assert not there.is_estimate
    assert there.by_kind == found.by_kind
    assert there.groups == found.groups


@pytest.mark.parametrize("step", ["linen", "plain"])
def test_donated_state_is_overwritten(step):
    make, _ = STEPS[step]
    strategy = layout("2")
    beside = estimate(step, workload(make), strategy)
    over = estimate(step, workload(make), strategy, (0,))
    state = [k for k in COUNTED if k in (Kind.PARAMETERS, Kind.OPTIMIZER_STATE, Kind.OTHER_STATE)]
    assert beside.result_bytes - over.result_bytes == sum(
        (over.by_kind[kind] or 0) for kind in state
    )


def test_estimate_supports_models_larger_than_any_device():
    """Four TiB of parameters, twelve with Adam's state, none of which may be allocated."""
    size = 2**20

    def make(strategy):
        model = nnx.Linear(size, size, use_bias=False, rngs=nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, ADAM, wrt=nnx.Param)
        batch = {"x": np.broadcast_to(np.float32(0), (8, size))}
        return Workload(step, (model, optimizer), strategy.distribute_dataset([batch]))

    def step(model, optimizer, batch):
        grads = nnx.grad(lambda model: model(batch["x"]).mean())(model)
        optimizer.update(model, mirror.all_reduce("mean", grads))

    found = estimate("large", make, layout("2"))
    assert found.by_kind[Kind.PARAMETERS] == 4 * size**2
    assert found.by_kind[Kind.OPTIMIZER_STATE] == 2 * 4 * size**2 + 2 * 4
    assert found.by_kind[Kind.BATCH] == 4 * 4 * size
    assert "TiB" in str(found) or "GiB" in str(found)


def test_estimate_counts_sharded_state_per_device():
    """Optimizer state that is sharded across the devices counts 1/n on each."""
    strategy = layout("8")
    with strategy.scope():
        model = nnx.Linear(16, 16, use_bias=False, rngs=nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)
    (batch,) = strategy.distribute_dataset([{"x": np.ones((8, 16), np.float32)}])

    def step(model, optimizer, batch):
        grads = nnx.grad(lambda model: model(batch["x"]).mean())(model)
        optimizer.update(model, mirror.all_reduce("mean", grads))

    examined = strategy._runner.examined(step, (model, optimizer, batch), {})
    whole = memory_report(examined, strategy._replicas)
    by_axis = jax.sharding.PartitionSpec(mirror.REPLICA_AXIS)
    sharding = jax.sharding.NamedSharding(strategy._replicas.mesh, by_axis)
    momentum = optimizer.opt_state[0].trace["kernel"].get_raw_value()
    leaves = [jax.device_put(x, sharding) if x is momentum else x for x in examined.leaves]
    sharded = memory_report(examined._replace(leaves=leaves), strategy._replicas)
    count, size = 4, 4 * 16 * 16  # the optimizer's own count of steps, and the momentum
    assert whole.by_kind[Kind.OPTIMIZER_STATE] == size + count
    assert sharded.by_kind[Kind.OPTIMIZER_STATE] == size // 8 + count
    assert sharded.by_kind[Kind.PARAMETERS] == whole.by_kind[Kind.PARAMETERS] == size
    (group,) = [g for g in sharded.groups if g.kind is Kind.OPTIMIZER_STATE]
    assert (group.num_bytes, group.is_whole) == (size + count, False)


def test_estimate_counts_captured_arrays():
    strategy, scale = layout("2"), jnp.ones(1000)

    def step(batch):
        return mirror.all_reduce("sum", (batch * scale).sum())

    (batch,) = strategy.distribute_dataset([np.ones((4, 1000), np.float32)])
    found = memory_report(strategy._runner.examined(step, (batch,), {}), strategy._replicas)
    (group,) = [g for g in found.groups if g.kind is Kind.ARGUMENTS]
    assert group.device_bytes == (4000, 4000)
    assert_message(group.name, fix="arrays")


def test_estimate_of_a_staged_step_counts_no_temporaries():
    strategy = cpu_strategy(2, cross_device_ops=mirror.ReductionToOneDevice())
    batch = mirror.PerReplica([np.ones((3, 5), np.float32)] * 2)

    def step(w, batch):
        return mirror.all_reduce("sum", (batch @ w).sum())

    found = memory_report(
        strategy._runner.examined(step, (np.ones(5, np.float32), batch), {}), strategy._replicas
    )
    (group,) = [g for g in found.groups if g.kind is Kind.BATCH]
    assert group.device_bytes == (60, 60)
    assert found.temporary_bytes is None
    assert re.search(r"temporaries +unknown", str(found))
    assert_message(found.heading, names="step", values="80 bytes")
    assert_message("\n".join(found.notes), fix="stages")
    assert found.to_dict()["bytes"]["temporaries"] is None


def test_estimate_keeps_weak_types():
    """A weakly typed array promotes as it would in a run: bfloat16 stays bfloat16."""

    def make(strategy):
        state = {"params": jnp.full(64, 1.0), "x": jnp.ones(64, jnp.bfloat16)}
        return Workload(lambda state: {**state, "x": state["params"] * state["x"]}, (state,), None)

    strategy = layout("1")
    with strategy.scope():
        step, args, _ = make(strategy)
    compiled = strategy._runner.lower(step, args, {}).compile().memory_analysis()
    found = estimate("weak", make, strategy)
    assert found.result_bytes == compiled.output_size_in_bytes - compiled.alias_size_in_bytes
    arrays = jax.tree.leaves(without_arrays("weak", make, strategy)[1])
    assert sorted(array.declared.weak_type for array in arrays) == [False, True]


# the report


def report(devices=2, temporaries=10, results=0, **counts):
    """Returns a report with some MiB of each kind."""
    groups = [
        MemoryGroup(
            Kind(kind.replace("_", " ")), f"a {kind}", 1, mib * 2**20, (mib * 2**20,) * devices
        )
        for kind, mib in counts.items()
    ]
    names = tuple(f"/device:CPU:{i}" for i in range(devices))
    return MemoryReport(
        *("train", names, devices, "cpu", False, tuple(groups)),
        *(results * 2**20, temporaries * 2**20),
    )


ADVICE = {  # name: how many MiB, the largest kind, other sizes in the advice, the options it names
    "temporaries": ({}, "Temporaries", [], ["Trainer(accumulate_steps=k)", "nnx.remat"]),
    "optimizer state": (
        {"optimizer_state": 80},
        "Optimizer state",
        ["40.0 MiB"],
        ["MirroredStrategy(shard='optimizer')", "optax.adafactor"],
    ),
    "one device": (
        {"devices": 1, "optimizer_state": 80},
        "Optimizer state",
        [],
        ["MirroredStrategy(shard='optimizer')", "optax.adafactor"],
    ),
    "parameters": (
        {"parameters": 80},
        "Parameters",
        ["40.0 MiB"],
        ["param_dtype=jnp.bfloat16", "MirroredStrategy(shard='model')"],
    ),
    "state": ({"other_state": 80}, "Other state", [], []),
    "arguments": ({"arguments": 80}, "Arguments", [], ["distribute_dataset"]),
    "batch": ({"batch": 80}, "Batch", [], ["prefetch=0"]),
    "results": ({"results": 80}, "Results", [], ["donate_argnums=0"]),
}


@rows("name", list(ADVICE))
def test_advice_names_what_to_shrink_and_how(name):
    counts, largest, sizes, fix = ADVICE[name]
    found = report(**counts)
    assert found.largest.capitalize() == largest
    of = ["80.0 MiB", "90.0 MiB"] if found.largest is not Kind.TEMPORARIES else ["10.0 MiB"]
    assert_message(found.advice, names=largest, values=[*of, *sizes], fix=fix)
    assert found.advice in str(found)


def test_advice_does_not_suggest_sharding_sharded_state():
    sharded = MemoryGroup(Kind.OPTIMIZER_STATE, "optimizer", 2, 8 * 2**20, (4 * 2**20,) * 2)
    found = MemoryReport("train", ("a", "b"), 2, "cpu", False, (sharded,), 0, 0)
    assert_message(found.advice, values=2, fix="optax.adafactor")
    assert "shard=" not in found.advice


def test_report_has_a_table_and_json():
    found = report(parameters=30, batch=20, other_state=0)
    assert repr(found) == str(found)
    rows = {row[0]: row[1:3] for row in found.table.rows}
    assert rows["parameters"] == ("30.0 MiB", "50%")
    assert rows["peak estimate"] == ("60.0 MiB", "")
    assert "other state" not in rows  # empty
    assert found._repr_html_().count("<tr>") == len(found.table.rows) + 1
    again = json.loads(json.dumps(found.to_dict()))
    assert again["bytes"]["optimizer_state"] == 0
    assert again["peak_bytes"] == found.peak_bytes == 60 * 2**20
    assert again["largest"] == "parameters"
    assert again["groups"][0]["device_bytes"] == [30 * 2**20] * 2


def test_report_groups_the_parts_of_an_argument():
    layers = {f"layer_{i}": jnp.ones(3) for i in range(9)}
    strategy = layout("1")

    def step(layers):
        return jax.tree.map(lambda x: x + 1, layers)

    examined = strategy._runner.examined(step, (layers,), {})
    (group,) = memory_report(examined, strategy._replicas).groups
    assert (group.kind, group.name, group.num_arrays) == (Kind.OTHER_STATE, "layers", 9)
    examined = strategy._runner.examined(step, (dict(list(layers.items())[:5]),), {})
    found = memory_report(examined, strategy._replicas)
    assert [g.name for g in found.groups] == [f"layers['layer_{i}']" for i in range(5)]
    assert_message(str(found.table), names="layers['layer_2'] 12 bytes", values=2)
    assert "layers['layer_3']" not in str(found.table)


# explain


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.* differs from one device")
def test_explain_contains_the_memory_report(two):
    with two.scope():
        model, optimizer = nnx_net(two)[1]
    data = two.distribute_dataset([BATCH] * 4)
    found = two.explain(models.nnx_step, (model, optimizer), data=data, steps=2)
    estimated = estimate("net", workload(nnx_net), two)
    assert found.memory.by_kind == estimated.by_kind
    assert (
        found.to_dict()["memory"]["bytes"]["parameters"]
        == bytes_held(nnx.state(model, nnx.Param))[two.devices[0]]
    )
    assert "optimizer state" in str(found)


# mirror estimate-memory


OWN = (fresh.PROGRAMS / "estimate_steps.py").read_text()


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A user's file with steps."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    file = tmp_path / "model.py"
    file.write_text(OWN)
    yield str(file)
    sys.modules.pop("mirror_bench_model", None)


def estimated(capsys, *options):
    assert cli.main(["estimate-memory", *options, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_command_estimates_a_users_step(own, capsys):
    assert cli.main(["estimate-memory", f"{own}:make", "--devices", "8,1,2,2"]) == 0
    out, said = capsys.readouterr()
    heading, table, detail, advice, notes = out.strip().split("\n\n")
    assert_message(heading, names=f"{own}:make")
    columns, *rows = [re.split(r"  +", line) for line in table.splitlines()]
    assert columns[:4] == ["devices", "parameters", "optimizer state", "batch"]
    assert [row[:4] for row in rows] == [
        ["1", "32 bytes", "72 bytes", "96 bytes"],
        ["2", "32 bytes", "72 bytes", "48 bytes"],
        ["8", "32 bytes", "72 bytes", "12 bytes"],
    ]
    assert_message(detail.splitlines()[0], values=8)
    assert re.search(r"parameters +32 bytes +\d+% +model \(Param\)", detail)
    assert_message(advice, fix="device")
    assert_message(notes, values="cpu")
    assert_message(said, names=f"{own}:make", values=[1, 2, 8])


@rows("name", ["make", "in_scope", "training"])
def test_command_accepts_all_forms_of_a_step(name, own, capsys):
    found = estimated(capsys, f"{own}:{name}", "--devices", "2")
    (row,) = found["rows"]
    mask = 4 if name == "training" else 0
    assert row["bytes"]["parameters"] == 32
    assert row["bytes"]["optimizer_state"] == 72
    assert row["bytes"]["batch"] == 48 + mask
    assert row["platform"] == "cpu"


def test_command_supports_weak_scaling_and_replicas_per_device(own, capsys):
    (strong,) = estimated(capsys, f"{own}:make", "--devices", "2")["rows"]
    weak = estimated(capsys, f"{own}:make", "--devices", "2", "--weak")
    assert weak["scaling"] == "weak"
    assert weak["rows"][0]["bytes"]["batch"] == 2 * strong["bytes"]["batch"]
    several = ("--devices", "2", "--replicas-per-device", "4")
    (row,) = estimated(capsys, f"{own}:make", *several)["rows"]
    assert (row["replicas"], len(row["devices"])) == (8, 2)
    assert row["bytes"]["batch"] == strong["bytes"]["batch"]


def test_named_steps_grow_with_the_batch(capsys):
    rows = [
        estimated(capsys, "cnn", "--devices", "2", "--batch-size", str(size))["rows"][0]["bytes"]
        for size in (8, 64)
    ]
    assert rows[1]["batch"] == 8 * rows[0]["batch"]
    assert rows[1]["temporaries"] > rows[0]["temporaries"]
    assert rows[1]["parameters"] == rows[0]["parameters"]


def line_of(code: str) -> str:
    """Returns a line of the user's file, as messages name it."""
    number = [line.strip() for line in OWN.splitlines()].index(code) + 1
    return f"model.py:{number}: {code}"


EXHAUSTS = line_of('return step, objects(), [{"x": np.ones((2**40, 2**10), np.float32)}]')
CONVERTS = line_of("return lambda w: w, (np.asarray(jnp.ones(3)),)")
REFUSED = {
    "no step": (["mpl"], {"names": "'mpl'", "fix": "module:function"}),
    "no file": (
        ["no_such.py:make"],
        {"names": "no_such.py", "fix": "path/to/file.py:function"},
    ),
    "no function": ([":other"], {"names": "other", "fix": "(step, args)"}),
    "nothing": (
        [":nothing"],
        {"names": ":nothing", "values": ["None", "NoneType"], "fix": "(step, args)"},
    ),
    "reads": ([":reads"], {"names": [":reads", line_of("if w.sum() > 2:")], "fix": "NumPy"}),
    "converts": ([":converts"], {"names": [":converts", CONVERTS], "fix": "NumPy"}),
    "exhausts": (
        [":exhausts"],
        {"names": [":exhausts", EXHAUSTS], "values": "4.00 PiB", "fix": "np.broadcast_to"},
    ),
    "outside": ([":outside"], {"names": ":outside", "values": "float32[3]", "fix": "NumPy"}),
    "variable": (
        [":variable"],
        {"names": ["count", ":variable"], "fix": "(step, (variable, ...))"},
    ),
    "unequal": ([":unequal"], {"values": ["(2,)", "(3,)"]}),
    "distributed": ([":distributed"], {"names": ":distributed", "fix": "(trainer, data)"}),
    "devices": ([":make", "--devices", "9"], {"names": "--devices", "values": [9, 8]}),
    "batch size": (
        [":make", "--batch-size", "4"],
        {"names": ["--batch-size", ":make"], "values": 4, "fix": ["mlp", "cnn"]},
    ),
}


@rows("name", list(REFUSED))
def test_command_rejects_steps_it_cannot_estimate(name, own, capsys):
    (step, *options), wanted = REFUSED[name]
    step = own + step if step.startswith(":") else step
    options = options or ["--devices", "2"]
    assert cli.main(["estimate-memory", step, *options]) == 2
    said = capsys.readouterr().err
    assert_message(said.partition("error: ")[2], **wanted)
    assert "Traceback" not in said


FAILS = {
    "forgetful": {"names": ["ReplicaDivergenceError", "step"]},
    "raises": {"names": ["KeyError", "'weights'"]},
    "accumulated": {"names": "ValueError", "values": 4, "fix": "accumulate_steps=3"},
}


@rows("name", list(FAILS))
def test_command_reports_errors_of_the_step(name, own, capsys):
    assert cli.main(["estimate-memory", f"{own}:{name}", "--devices", "2"]) == 1
    said = capsys.readouterr().err
    message = said.rpartition("error: ")[2]
    assert_message(message, names=f"{own}:{name}")
    assert_message(message, **FAILS[name])
    assert "Traceback" in said


@rows("text", ["a", "-1", "0,"])
def test_donate_option_requires_numbers(text, capsys):
    with pytest.raises(SystemExit, match="2"):
        cli.main(["estimate-memory", "mlp", f"--donate={text}"])
    said = capsys.readouterr().err.partition("error: ")[2]
    assert_message(said, names="--donate", values=repr(text), fix="0,1")


def test_command_prefers_accelerators(monkeypatch):
    there = tuple(jax.devices("cpu"))

    def made(asked):
        options = {"devices": asked, "gpu": None, "replicas_per_device": 1, "shard": "none"}
        return [s.devices for s in estimate_memory._strategies(types.SimpleNamespace(**options))]

    assert list(map(len, made(None))) == [1, 2, 4]
    monkeypatch.setattr(estimate_memory, "MirroredStrategy", stand_in_strategy)
    monkeypatch.setattr(estimate_memory.backend, "default_devices", lambda: there[6:])
    assert made((1, 2, 3)) == [there[6:7], there[6:8], there[:3]]
    monkeypatch.setattr(estimate_memory.backend, "type_of", lambda device: "GPU")
    assert made(None) == [there[6:7], there[6:8]]


def stand_in_strategy(devices, ops, replicas_per_device, shard):
    """Has only devices, which need not exist."""
    return types.SimpleNamespace(devices=tuple(devices))


@pytest.mark.slow
def test_command_estimates_more_devices_than_the_machine_has():
    """In a new process, as users run it: host devices are forced."""
    code = (
        "import sys; from mirror import cli\n"
        "sys.exit(cli.main(['estimate-memory', 'mlp', '--devices', '12', '--batch-size', '24', "
        "'--json']))"
    )
    said = fresh.run(code)
    first, _, rest = said.partition("\n")
    assert_message(first, names="mlp", values=12)
    (row,) = json.loads(rest)["rows"]
    assert len(row["devices"]) == 12
    assert row["bytes"]["batch"] == 2 * (784 + 1) * 4


def test_importing_mirror_does_not_import_the_command_line():
    code = (
        "import sys, mirror; mirror.Trainer; print([m for m in sys.modules if '_src.tools.' in m])"
    )
    assert fresh.run(code).strip() == "['mirror._src.tools.asserts']"  # of mirror.testing


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.* differs from one device")
def test_estimate_of_several_device_counts_is_one_table():
    reports = tuple(estimate("net", workload(nnx_net), layout(name)) for name in ("1", "2"))
    found = Estimate("net", False, reports)
    assert [row[0] for row in found.table.rows] == ["1", "2"]
    assert len(set(found.notes)) == len(found.notes)


def test_estimate_uses_batches_that_take_no_memory():
    """A batch is represented by a `PerReplica` that takes no memory."""
    _, args = without_arrays("net", workload(nnx_net), layout("2"))
    batch = args[-1]
    leaves = jax.tree.leaves(batch, is_leaf=lambda x: isinstance(x, mirror.PerReplica))
    assert all(isinstance(leaf, mirror.PerReplica) for leaf in leaves)
    assert {leaf.stacked.base is not None for leaf in leaves} == {True}
    assert [leaf.stacked.strides for leaf in leaves] == [(0, 0, 0), (0, 0)]
