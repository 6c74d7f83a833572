"""The programs of TensorFlow's guides, on 1, 2 and 8 host devices, and with listed GPUs."""

import functools
import json
from concurrent.futures import Future

import pytest

from tests.programs import checks
from tests.support import fresh
from tests.support.messages import assert_message

CPU_ONLY = {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(fresh.STAND_INS)}
ONE_CPU = "Num GPUs Available: 0\n/physical_device:CPU:0 CPU\n"


def show(code: str, **environment: str) -> dict:
    """Returns the last line that a new process prints, as JSON; its `pynvml` is the stand-in."""
    start = "import json\nfrom tests.programs import checks, play\nshown = {}\n"
    end = "\nprint(json.dumps(shown))"
    said = fresh.run(start + code + end, environment={**CPU_ONLY, **environment})
    return json.loads(said.splitlines()[-1])


# The programs of each process, and its environment. Without a GPU they configure nothing, so one
# process can run all of them.
PLAYED: dict[str, tuple[str, dict[str, str]]] = {
    "one CPU": (
        """
from tests.support.inside import has_started
shown["count"] = play("p01_count_gpus").text
shown["by environment"] = play("p13_visible_by_environment").text
shown["started"] = has_started()
shown["first only"] = play("p04_first_gpu_only").text
shown["growth"] = play("p05_memory_growth").text
shown["problems"] = checks.problems(1, "CPU")
""",
        {},
    ),
    "two CPUs": (
        "shown['problems'] = checks.problems(2, 'CPU')",
        {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"},
    ),
    "count and first only with GPUs": (
        """
import jax
from tests.support.inside import has_started
shown["count"], shown["started"] = play("p01_count_gpus").text, has_started()
shown["first only"] = play("p04_first_gpu_only").text
shown["of JAX"] = jax.config.values["jax_cuda_visible_devices"]
""",
        {"STAND_IN_GPUS": "2"},
    ),
    "growth with GPUs": (
        """
import os
shown["growth"] = play("p05_memory_growth").text
shown["of XLA"] = os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"]
""",
        {"STAND_IN_GPUS": "2"},
    ),
    "growth by the environment": (
        "shown['growth'] = play('p05_memory_growth').text",
        {"STAND_IN_GPUS": "2", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
    ),
    "split in 1": ("shown['split'] = play('p06_virtual_gpus', '1').text", {}),
    "split in 2": ("shown['split'] = play('p06_virtual_gpus', '2').text", {}),
    "by environment with GPUs": (
        "shown['by environment'] = play('p13_visible_by_environment').text",
        {"STAND_IN_GPUS": "4"},
    ),
}


AHEAD = {
    name: functools.partial(show, code, **environment)
    for name, (code, environment) in PLAYED.items()
}


@pytest.fixture
def shown(ahead) -> dict[str, Future[dict]]:
    return ahead[__name__]


@pytest.fixture
def on_one_cpu(shown) -> dict:
    return shown["one CPU"].result()


@pytest.fixture
def on_two(shown) -> dict:
    return shown["two CPUs"].result()


def test_programs_run_on_one_host_device(subtests, on_one_cpu):
    for program in checks.CHECKS:
        with subtests.test(msg=program):
            assert not on_one_cpu["problems"][program], on_one_cpu["problems"][program]


@pytest.mark.slow
def test_programs_run_on_two_host_devices(subtests, on_two):
    for program in checks.CHECKS:
        with subtests.test(msg=program):
            assert not on_two["problems"][program], on_two["problems"][program]


@pytest.mark.nightly
def test_programs_run_on_eight_host_devices(subtests):
    for program in checks.CHECKS:
        with subtests.test(msg=program):
            checks.CHECKS[program](8, "CPU")


def test_gpu_programs_run_without_a_gpu(on_one_cpu):
    assert on_one_cpu["count"] == ONE_CPU
    assert on_one_cpu["by environment"] == "Num GPUs Available: 0\n"
    assert on_one_cpu["started"] is False
    assert on_one_cpu["first only"] == "0 Physical GPUs, 0 Logical GPU\n"
    assert on_one_cpu["growth"] == "0 Physical GPUs, 0 Logical GPUs\nMemory grows: []\n"


# With GPUs listed by the driver, and only the CPU in JAX.


def test_programs_count_gpus_and_select_the_first(shown):
    """Counting does not start the backend: the next program may still configure it."""
    found = shown["count and first only with GPUs"].result()
    gpus = "/physical_device:GPU:0 GPU\n/physical_device:GPU:1 GPU\n"
    assert found["count"] == f"{ONE_CPU.replace('0', '2', 1)}{gpus}"
    assert found["started"] is False
    assert found["of JAX"] == "0"
    *_, counts, error = found["first only"].splitlines()
    assert counts == "2 Physical GPUs, 0 Logical GPU"
    line = "p04_first_gpu_only.py:8: logical_gpus = mirror.config.list_logical_devices"
    assert_message(error, values=line, fix="mirror.config")


@pytest.mark.slow
def test_memory_growth_is_fixed_after_the_start(shown):
    found = shown["growth with GPUs"].result()
    assert found["of XLA"] == "false"
    counts, grows, error = found["growth"].splitlines()
    assert counts == "2 Physical GPUs, 0 Logical GPUs"
    assert grows == "Memory grows: [True, True]"
    assert_message(error, values="p05_memory_growth.py:13", fix="mirror.config")


def test_environment_sets_memory_growth(shown):
    """The user's variable takes precedence, also after the start; this is logged, not raised."""
    found = shown["growth by the environment"].result()
    counts, grows, *said = found["growth"].splitlines()
    assert counts == "2 Physical GPUs, 0 Logical GPUs"
    assert grows == "Memory grows: [True, True]"
    assert len(said) == 2
    by, over = "XLA_PYTHON_CLIENT_PREALLOCATE=false", "set_memory_growth(False)"
    for line in said:
        assert_message(line, names=by, fix=over)


@pytest.mark.slow
def test_cpu_is_split_without_a_gpu(subtests, shown):
    for parts, total in [(1, "1.0"), (2, "3.0")]:
        with subtests.test(msg=f"{parts}, {total}"):
            found = shown[f"split in {parts}"].result()
            devices = ", ".join(f"/device:CPU:{i}" for i in range(parts))
            assert found["split"].splitlines() == [
                "0 Physical GPUs, 0 Logical GPUs",
                f"MirroredStrategy({devices})",
                f"Sum over the replicas: {total}",
            ]


@pytest.mark.slow
def test_environment_selects_visible_gpus(shown):
    found = shown["by environment with GPUs"].result()
    assert found["by environment"].splitlines() == [
        "/physical_device:GPU:0 GPU",
        "/physical_device:GPU:1 GPU",
        "Num GPUs Available: 2",
    ]
