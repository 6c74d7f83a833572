"""Programs on real GPUs, in separate processes: `pytest --gpu tests/laws/test_gpu.py`.

Without a GPU that JAX can use they fail. They work with one GPU, and with several. In a clone that
is not installed, pass `-p mirror.pytest_plugin` too. The rows `CPU` run the same code on a CPU, so
that it is known to work where no GPU is.
"""

import json
import os
import signal
import subprocess
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.programs import checks, one_device
from tests.support import fast, fresh, packages
from tests.support.messages import assert_message

needs_gpu = pytest.mark.gpu

MIB = 2**20
ON_ONE = "from tests.programs import one_device"
COUNT = """
import jax, mirror
shown["jax"] = jax.device_count("gpu")
shown["kinds"] = [d.device_kind for d in jax.devices("gpu")]
shown["driver"] = len(mirror.config.list_physical_devices("GPU"))
"""
UUID = """
import importlib
shown["uuid"] = "GPU-00000000-0000-0000-0000-000000000000"
try:
    pynvml = importlib.import_module("pynvml")
    pynvml.nvmlInit()
    shown["uuid"] = pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetHandleByIndex(0))
except Exception as error:
    shown["error"] = str(error)
"""
NONE = (
    "--gpu asks for tests on GPUs, and JAX finds none. Install jax[cuda12] or jax[cuda13] and "
    "nvidia-ml-py on a machine with a GPU, or leave --gpu out. With JAX_PLATFORMS=cuda,cpu it said:"
)


def start(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs code in a process with JAX on the GPUs that `CUDA_VISIBLE_DEVICES` leaves us."""
    inherited = {k: v for k, v in os.environ.items() if k == "CUDA_VISIBLE_DEVICES"}
    wanted = {"JAX_PLATFORMS": "cuda,cpu", "KERAS_BACKEND": "jax", **inherited, **environment}
    before = "import json\nfrom tests.programs import checks, play\nshown = {}\n"
    after = "\nprint(json.dumps(shown))"
    return fresh.start(before + code + after, environment=wanted, timeout=900)


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


@needs_gpu
@pytest.mark.parametrize("program", checks.CHECKS)
def test_programs_run_without_configuration(problems, program):
    assert not problems[program], problems[program]


@needs_gpu
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


@needs_gpu
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


@needs_gpu
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


@needs_gpu
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


@needs_gpu
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


@needs_gpu
def test_environment_selects_gpus(count):
    """CUDA reads up to the first number that names no GPU."""
    shown = show("shown['by environment'] = play('p13_visible_by_environment').text")
    expected = [f"/physical_device:GPU:{i} GPU" for i in range(min(count, 2))]
    lines = shown["by environment"].splitlines()
    assert lines == [*expected, f"Num GPUs Available: {len(expected)}"]


@needs_gpu
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


@needs_gpu
def test_devices_command_shows_every_gpu_and_its_memory(gpus):
    shown = show(
        """
import contextlib, io, json
from mirror import cli
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


@needs_gpu
def test_mirrored_strategy_trains_on_all_gpus(count):
    shown = show(
        ON_ONE
        + """
import mirror
strategy = mirror.MirroredStrategy()
shown["losses"], model = one_device.train(strategy)
shown["replicas"] = strategy.num_replicas_in_sync
gpus = mirror.config.list_logical_devices("GPU")
shown["on"] = sorted(gpus[d.id].name for d in model.layers[0].kernel[...].devices())
"""
    )
    assert shown["replicas"] == count
    assert shown["on"] == sorted(f"/device:GPU:{i}" for i in range(count))
    assert shown["losses"][-1] < 0.8 * shown["losses"][0]


@needs_gpu
def test_demo_trains_on_a_gpu_and_the_cpu(gpus):
    shown = show(
        """
from mirror import cli
shown["status"] = cli.main(["demo", "--devices", "/gpu:0,/cpu:0", "--epochs", "3"])
"""
    )
    assert shown == {"status": 0}


# On one device: the rows `CPU` are not about GPUs, but about this code.

KINDS = [
    pytest.param("GPU", marks=pytest.mark.gpu),
    pytest.param("CPU", marks=pytest.mark.slow),
]


@pytest.fixture(scope="module", params=KINDS)
def kind(request) -> str:
    if request.param == "GPU":
        request.getfixturevalue("gpus")
    return request.param


def platforms(kind: str) -> dict[str, str]:
    return {"JAX_PLATFORMS": "cpu", **fast.ENVIRONMENT} if kind == "CPU" else {}


@pytest.fixture(scope="module")
def problems_on_one(kind) -> dict:
    code = f"{ON_ONE}\nshown['problems'] = one_device.problems({kind!r})"
    return show(code, **platforms(kind))["problems"]


@pytest.mark.parametrize("check", packages.rows(one_device.CHECKS))
def test_one_device_works_as_promised(problems_on_one, check):
    assert not problems_on_one[check], problems_on_one[check]


def test_interrupt_ends_a_program_with_launches_in_flight(kind):
    done = start(f"{ON_ONE}\none_device.endless({kind!r})", **platforms(kind))
    assert done.returncode in (-signal.SIGINT, 128 + signal.SIGINT), done.stdout
    assert done.stdout.rstrip().endswith("KeyboardInterrupt")


def test_launch_with_one_device(kind):
    """With a second GPU or a second host device, the script has one only."""
    code = """
from mirror import cli
cli.main(["launch", "--devices", "1", "-m", "tests.programs.one_device"])
"""
    shown = show(code, **platforms(kind))
    if kind == "CPU":
        assert shown == {"visible": None, "devices": ["cpu"]}
    else:
        first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
        assert shown == {"visible": first, "devices": ["gpu"]}


def test_selected_gpus_are_those_of_jax(kind):
    """By index, UUID, prefix of a UUID, up to an entry that selects none; and repeated ones."""
    code = """
import jax, mirror
shown["driver"] = len(mirror.config.list_physical_devices("GPU"))
shown["jax"] = sum(device.platform == "gpu" for device in jax.devices())
"""
    uuid = show(UUID, **platforms(kind))["uuid"]
    selections = ["0", uuid, uuid[:12], "-1", "", "0,-1", f"{uuid},{uuid}", "0,0", "0,99", "GPU-"]

    if kind == "CPU":
        selections = selections[:2]

    def counts(selection: str) -> dict:
        environment = {"JAX_PLATFORMS": "", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        return show(code, **{**environment, **platforms(kind), "CUDA_VISIBLE_DEVICES": selection})

    with ThreadPoolExecutor(4) as pool:
        found = dict(zip(selections, pool.map(counts, selections), strict=True))
    different = {text: shown for text, shown in found.items() if shown["driver"] != shown["jax"]}
    assert not different
    selected = {text for text, shown in found.items() if shown["jax"]}
    if kind == "GPU":
        assert selected >= {"0", uuid, uuid[:12]}
        assert not selected & {"-1", ""}
    else:
        assert not selected
