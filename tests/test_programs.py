"""The guides' programs, on one host device, on two, on eight, and where the driver lists GPUs."""

import functools
import json
from concurrent.futures import Future

import pytest

from tests import fresh
from tests.programs import checks

CPU_ONLY = {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(fresh.STAND_INS)}
ONE_CPU = "Num GPUs Available: 0\n/physical_device:CPU:0 CPU\n"
TOO_LATE = "cannot be modified after being initialized: JAX's backend has started"


def show(code: str, **environment: str) -> dict:
    """What a process of its own prints last, as JSON; `pynvml` there is the stand-in."""
    start = "import json\nfrom tests.programs import checks, play\nshown = {}\n"
    end = "\nprint(json.dumps(shown))"
    said = fresh.run(start + code + end, environment={**CPU_ONLY, **environment})
    return json.loads(said.splitlines()[-1])


# What is played in each process, and its environment. Without a GPU nothing is configured, so that
# all can be played one after the other.
PLAYED: dict[str, tuple[str, dict[str, str]]] = {
    "one CPU": (
        """
from mirror.devices.start import started
shown["P1"] = play("p01_count_gpus").text
shown["P13"] = play("p13_visible_by_environment").text
shown["started"] = started()
shown["P4"] = play("p04_first_gpu_only").text
shown["P5"] = play("p05_memory_growth").text
shown["problems"] = checks.problems(1, "CPU")
""",
        {},
    ),
    "two CPUs": (
        "shown['problems'] = checks.problems(2, 'CPU')",
        {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"},
    ),
    "P1 and P4 with GPUs": (
        """
import jax
from mirror.devices.start import started
shown["P1"], shown["started"] = play("p01_count_gpus").text, started()
shown["P4"] = play("p04_first_gpu_only").text
shown["of JAX"] = jax.config.values["jax_cuda_visible_devices"]
""",
        {"STAND_IN_GPUS": "2"},
    ),
    "P5 with GPUs": (
        """
import os
shown["P5"] = play("p05_memory_growth").text
shown["of XLA"] = os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"]
""",
        {"STAND_IN_GPUS": "2"},
    ),
    "P5 by the environment": (
        "shown['P5'] = play('p05_memory_growth').text",
        {"STAND_IN_GPUS": "2", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
    ),
    "P6 in 1": ("shown['P6'] = play('p06_virtual_gpus', '1').text", {}),
    "P6 in 2": ("shown['P6'] = play('p06_virtual_gpus', '2').text", {}),
    "P13 with GPUs": (
        "shown['P13'] = play('p13_visible_by_environment').text",
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


@pytest.mark.parametrize("program", checks.CHECKS)
def test_on_one_host_device(on_one_cpu, program):
    assert not on_one_cpu["problems"][program], on_one_cpu["problems"][program]


@pytest.mark.parametrize("program", checks.CHECKS)
def test_on_two_host_devices(on_two, program):
    assert not on_two["problems"][program], on_two["problems"][program]


@pytest.mark.parametrize("program", checks.CHECKS)
def test_on_eight_host_devices(program):
    checks.CHECKS[program](8, "CPU")


def test_P1_P4_P5_P13_without_a_gpu(on_one_cpu):
    assert on_one_cpu["P1"] == ONE_CPU
    assert on_one_cpu["P13"] == "Num GPUs Available: 0\n"
    assert on_one_cpu["started"] is False
    assert on_one_cpu["P4"] == "0 Physical GPUs, 0 Logical GPU\n"
    assert on_one_cpu["P5"] == "0 Physical GPUs, 0 Logical GPUs\nMemory grows: []\n"


# Where the driver lists GPUs, and JAX has only the CPU.


def test_P1_P4_with_gpus(shown):
    """Counting starts nothing: P4 may still configure."""
    found = shown["P1 and P4 with GPUs"].result()
    gpus = "/physical_device:GPU:0 GPU\n/physical_device:GPU:1 GPU\n"
    assert found["P1"] == f"{ONE_CPU.replace('0', '2', 1)}{gpus}"
    assert found["started"] is False
    assert found["of JAX"] == "0"
    *_, counts, error = found["P4"].splitlines()
    assert counts == "2 Physical GPUs, 0 Logical GPU"
    assert error.startswith(f"Visible devices {TOO_LATE}")
    assert "p04_first_gpu_only.py:8: logical_gpus = mirror.config.list_logical_dev" in error


def test_P5_with_gpus(shown):
    found = shown["P5 with GPUs"].result()
    assert found["of XLA"] == "false"
    counts, grows, error = found["P5"].splitlines()
    assert counts == "2 Physical GPUs, 0 Logical GPUs"
    assert grows == "Memory grows: [True, True]"
    assert error.startswith(f"Physical devices {TOO_LATE}")


def test_P5_by_the_environment(shown):
    """The user's variable wins, also over what comes too late; that is said, and is no error."""
    found = shown["P5 by the environment"].result()
    counts, grows, *said = found["P5"].splitlines()
    assert counts == "2 Physical GPUs, 0 Logical GPUs"
    assert grows == "Memory grows: [True, True]"
    wins = "XLA_PYTHON_CLIENT_PREALLOCATE=false is set, and wins over set_memory_growth(False)."
    assert said == [wins] * 2


@pytest.mark.parametrize(("parts", "total"), [(1, "1.0"), (2, "3.0")])
def test_P6_splits_the_cpu_where_there_is_no_gpu(shown, parts, total):
    found = shown[f"P6 in {parts}"].result()
    devices = ", ".join(f"/device:CPU:{i}" for i in range(parts))
    assert found["P6"].splitlines() == [
        "0 Physical GPUs, 0 Logical GPUs",
        f"MirroredStrategy({devices})",
        f"Sum over the replicas: {total}",
    ]


def test_P13_with_gpus(shown):
    found = shown["P13 with GPUs"].result()
    assert found["P13"].splitlines() == [
        "/physical_device:GPU:0 GPU",
        "/physical_device:GPU:1 GPU",
        "Num GPUs Available: 2",
    ]
