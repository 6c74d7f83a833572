"""Programs on real GPUs, in separate processes: `pytest --gpu tests/laws/test_gpu.py`.

Without a GPU that JAX can use they fail. They work with one GPU, and with several. In a clone that
is not installed, pass `-p pytest_mirror` too.
"""

import json
import os
import subprocess

import pytest

from tests.programs import checks
from tests.support import fresh
from tests.support.messages import assert_message

pytestmark = pytest.mark.gpu

MIB = 2**20
COUNT = """
import jax, mirror
shown["jax"] = jax.device_count("gpu")
shown["kinds"] = [d.device_kind for d in jax.devices("gpu")]
shown["driver"] = len(mirror.config.list_physical_devices("GPU"))
"""
NONE = (
    "--gpu asks for tests on GPUs, and JAX finds none. Install jax[cuda12] or jax[cuda13] and "
    "nvidia-ml-py on a machine with a GPU, or leave --gpu out. With JAX_PLATFORMS=cuda,cpu it said:"
)


def start(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs code in a process with JAX on the GPUs that `CUDA_VISIBLE_DEVICES` leaves us."""
    inherited = {k: v for k, v in os.environ.items() if k == "CUDA_VISIBLE_DEVICES"}
    wanted = {"JAX_PLATFORMS": "cuda,cpu", **inherited, **environment}
    before = "import json\nfrom tests.programs import checks, play\nshown = {}\n"
    after = "\nprint(json.dumps(shown))"
    return fresh.start(before + code + after, environment=wanted, timeout=600)


def show(code: str, **environment: str) -> dict:
    """Returns the last line of its output, as JSON."""
    done = start(code, **environment)
    assert done.returncode == 0, f"ended with {done.returncode}:\n{done.stdout}"
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="session")
def gpus() -> dict:
    """The GPUs of JAX. Fails if JAX has no GPU."""
    done = start(COUNT)
    if done.returncode != 0:
        last = done.stdout.strip().splitlines()[-1:]
        pytest.fail(f"{NONE} {''.join(last)}", pytrace=False)
    found = json.loads(done.stdout.splitlines()[-1])
    if found["driver"] != found["jax"]:
        pytest.fail(
            f"JAX has {found['jax']} GPUs, but NVML lists {found['driver']}: install nvidia-ml-py.",
            pytrace=False,
        )
    return found


@pytest.fixture(scope="session")
def count(gpus) -> int:
    return gpus["jax"]


@pytest.fixture(scope="module")
def problems(count) -> dict:
    return show(f"shown['problems'] = checks.problems({count}, 'GPU')")["problems"]


@pytest.mark.parametrize("program", checks.CHECKS)
def test_programs_run_without_configuration(problems, program):
    assert not problems[program], problems[program]


def test_visible_devices_select_the_first_gpu(count):
    """With one GPU nothing is hidden; to hide it comes too late either way."""
    shown = show(
        """
from tests.support.inside import has_started
shown["count"], shown["started"] = play("p01_count_gpus").text, has_started()
shown["first only"] = play("p04_first_gpu_only").text
import jax
shown["of JAX"] = jax.device_count("gpu")
"""
    )
    lines = shown["count"].splitlines()
    assert lines[0] == f"Num GPUs Available: {count}"
    assert lines[2:] == [f"/physical_device:GPU:{i} GPU" for i in range(count)]
    assert shown["started"] is False
    *_, counts, error = shown["first only"].splitlines()
    assert counts == f"{count} Physical GPUs, 1 Logical GPU"
    assert_message(error, values="p04_first_gpu_only.py:8", fix="mirror.config")
    assert shown["of JAX"] == 1


def test_visible_devices_hide_all_gpus(count):
    shown = show(
        """
import mirror
mirror.config.set_visible_devices([], "GPU")
shown["gpus"] = mirror.config.list_logical_devices("GPU")
shown["default"] = mirror.MirroredStrategy().devices[0].platform
shown["driver"] = len(mirror.config.list_physical_devices("GPU"))
""",
        JAX_PLATFORMS="",
    )
    assert shown == {"gpus": [], "default": "cpu", "driver": count}


GROWTH = """
import jax, jax.numpy as jnp
shown["growth"] = play("p05_memory_growth").text
stats = jax.local_devices(backend="gpu")[0].memory_stats
taken = lambda: stats()["pool_bytes"]
first = jnp.ones(1).block_until_ready()
shown["at first"] = taken()
large = jnp.ones((512, 2**20)).block_until_ready()
shown["then"] = taken()
"""


@pytest.mark.parametrize("environment", [{}, {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}], ids=str)
def test_memory_growth_allocates_on_demand(count, environment):
    shown = show(GROWTH, **environment)
    counts, grows, *said = shown["growth"].splitlines()
    assert counts == f"{count} Physical GPUs, {count} Logical GPUs"
    assert grows == f"Memory grows: {[True] * count}"
    assert shown["at first"] < 512 * MIB
    assert shown["then"] >= 2048 * MIB
    if environment:
        assert len(said) == count
        by, over = "XLA_PYTHON_CLIENT_PREALLOCATE=false", "set_memory_growth(False)"
        for line in said:
            assert_message(line, names=by, fix=over)
    else:
        (error,) = said
        assert_message(error, values="p05_memory_growth.py:13", fix="mirror.config")


def test_memory_is_preallocated_by_default(count):
    shown = show(GROWTH.replace('shown["growth"] = play("p05_memory_growth").text', ""))
    assert shown["at first"] > 2048 * MIB


PARTS = """
import jax, jax.numpy as jnp, numpy as np, mirror
played = play("p06_virtual_gpus", "{parts}")
shown["split"] = played.text.splitlines()
strategy = played.values["strategy"]
def step(x):
    context = mirror.get_replica_context()
    return x * 2, context.all_reduce("mean", x.sum())
(batch,) = strategy.distribute_dataset([np.arange(8, dtype=np.float32)])
rows, mean = strategy.run(step, (batch,))
shown["rows"] = np.asarray(strategy.gather(rows)).tolist()
shown["mean"] = float(mean)
shown["at"] = sorted({{d.id for d in mean.devices()}})
shown["info"] = mirror.config.get_memory_info("GPU:0")
try:
    jnp.ones(({parts} * 1024 + 256, 2**18), jnp.float32).block_until_ready()
except Exception as error:
    shown["beyond"] = str(error)
"""


@pytest.mark.parametrize("parts", [1, 2])
def test_logical_devices_limit_and_split_a_gpu(count, parts):
    shown = show(PARTS.format(parts=parts))
    names = [f"/device:GPU:{i}" for i in range(parts)]
    counts, *limits, strategy, total = shown["split"]
    assert counts == f"{count} Physical GPUs, {parts} Logical GPUs"
    for name, line in zip(names, limits, strict=True):
        start, mib, unit = line.rsplit(" ", 2)
        assert (start, unit) == (name, "MiB")
        assert float(mib) == pytest.approx(parts * 1024, rel=0.02)
    assert strategy.startswith("MirroredStrategy(")
    assert total == f"Sum over the replicas: {sum(range(parts + 1)):.1f}"
    assert shown["rows"] == list(range(0, 16, 2))
    assert shown["mean"] == sum(range(8)) / parts
    assert len(shown["at"]) == 1
    assert 0 <= shown["info"]["current"] <= shown["info"]["peak"] <= shown["info"]["limit"]
    assert shown["info"]["limit"] == pytest.approx(parts * 1024 * MIB, rel=0.02)
    assert "RESOURCE_EXHAUSTED" in shown["beyond"]


def test_environment_selects_gpus(count):
    """CUDA reads up to the first number that names no GPU."""
    shown = show("shown['by environment'] = play('p13_visible_by_environment').text")
    expected = [f"/physical_device:GPU:{i} GPU" for i in range(min(count, 2))]
    lines = shown["by environment"].splitlines()
    assert lines == [*expected, f"Num GPUs Available: {len(expected)}"]


def test_driver_and_jax_agree_on_device_details(gpus):
    shown = show(
        """
import jax, mirror
found = mirror.config.list_physical_devices("GPU")
shown["details"] = [mirror.config.get_device_details(gpu) for gpu in found]
shown["capability"] = [d.compute_capability for d in jax.devices("gpu")]
"""
    )
    assert [d["device_name"] for d in shown["details"]] == gpus["kinds"]
    capability = [".".join(map(str, d["compute_capability"])) for d in shown["details"]]
    assert capability == shown["capability"]


def test_devices_command_shows_every_gpu_and_its_memory(gpus):
    shown = show(
        """
import contextlib, io, json
from mirror_cli import main as cli
with contextlib.redirect_stdout(io.StringIO()) as output:
    assert cli.main(["devices", "--json"]) == 0
shown = json.loads(output.getvalue())
"""
    )
    found = [device for device in shown["logical"] if device["device_type"] == "GPU"]
    assert [device["physical"] for device in found] == [
        f"/physical_device:GPU:{i} ({kind})" for i, kind in enumerate(gpus["kinds"])
    ]
    assert all(0 <= d["memory_current"] <= d["memory_limit"] for d in found)
    assert all(d["memory_limit"] > MIB for d in found)
    assert shown["versions"]["NVIDIA driver"]
    assert shown["notes"] == []


TRAINING = """
import jax, jax.numpy as jnp, mirror, numpy as np, optax
from flax import nnx

class Net(nnx.Module):
    def __init__(self, rngs):
        self.inner, self.outer = nnx.Linear(8, 32, rngs=rngs), nnx.Linear(32, 3, rngs=rngs)
    def __call__(self, x):
        return self.outer(nnx.relu(self.inner(x)))

jax.config.update("jax_default_matmul_precision", "highest")
strategy = mirror.MirroredStrategy()
with strategy.scope():
    model = Net(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

def loss_fn(model, x, y):
    return optax.softmax_cross_entropy_with_integer_labels(model(x), y).mean()

def step(model, optimizer, x, y):
    loss, grads = nnx.value_and_grad(loss_fn)(model, x, y)
    context = mirror.get_replica_context()
    grads, loss = context.all_reduce("mean", (grads, loss))
    optimizer.update(model, grads)
    return loss

random = np.random.default_rng(0)
x = random.normal(size=(20, 24, 8)).astype(np.float32)
y = (x.sum(-1) > 0).astype(np.int32)
n = strategy.num_replicas_in_sync
size = 24 - 24 % n
batches = [(a[:size], b[:size]) for a, b in zip(x, y)]
(first, *_) = strategy.distribute_dataset(batches[:1])
strategy.verify(step, (model, optimizer, *first), rtol=1e-3)
losses = [float(strategy.run(step, (model, optimizer, *b)))
          for b in strategy.distribute_dataset(batches)]
strategy.check_mirrored((model, optimizer))
shown["replicas"], shown["losses"] = n, losses
shown["on"] = sorted(str(mirror.config.list_logical_devices("GPU")[d.id].name)
                     for d in model.inner.kernel[...].devices())
"""


def test_mirrored_strategy_trains_on_all_gpus(count):
    shown = show(TRAINING)
    assert shown["replicas"] == count
    assert shown["on"] == sorted(f"/device:GPU:{i}" for i in range(count))
    assert shown["losses"][-1] < 0.8 * shown["losses"][0]


def test_two_gpus_compute_concurrently_at_full_size(count):
    """On two GPUs it takes close to half the time; on one there is nothing to overlap with."""
    shown = show(
        """
values = play("p09_two_devices_at_once").values
shown["one"] = values["took_on_one"].total_seconds()
shown["two"] = values["took_on_two"].total_seconds()
shown["finite"] = bool(abs(values["on_two"]).max() < float("inf"))
"""
    )
    assert shown["finite"]
    assert shown["two"] < (0.75 if count > 1 else 1.5) * shown["one"]


STRATEGIES = {
    "GPU and CPU": "mirror.MirroredStrategy(['/gpu:0', '/cpu:0'])",
    "staged on the GPUs": "mirror.MirroredStrategy(None, mirror.ReductionToOneDevice())",
    "reduced on a GPU": "mirror.MirroredStrategy(None, mirror.ReductionToOneDevice('/gpu:0'))",
    "two on one GPU": "mirror.MirroredStrategy(['/gpu:0'], replicas_per_device=2)",
    "four on one GPU": "mirror.MirroredStrategy(['/gpu:0'], replicas_per_device=4)",
}


@pytest.fixture(scope="module")
def alone(gpus) -> list[float]:
    one = TRAINING.replace("mirror.MirroredStrategy()", "mirror.OneDeviceStrategy('/gpu:0')")
    return show(one.replace("24 % n", "0"))["losses"]


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_layout_trains_as_one_gpu(name, alone):
    code = TRAINING.replace("mirror.MirroredStrategy()", STRATEGIES[name])
    code = code.replace('shown["on"]', 'shown["unused"]').split('shown["unused"]')[0]
    losses = show(code)["losses"]
    assert losses == pytest.approx(alone, rel=1e-3)


def test_demo_trains_on_a_gpu_and_the_cpu(gpus):
    shown = show(
        """
from mirror_cli import main as cli
shown["status"] = cli.main(["demo", "--devices", "/gpu:0,/cpu:0", "--epochs", "3"])
"""
    )
    assert shown == {"status": 0}
