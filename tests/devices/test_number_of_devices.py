"""`MirroredStrategy(n)`: the first n devices, created if JAX has not started."""

import json

import jax
import numpy as np
import pytest

import mirror
from tests.support import fresh
from tests.support.messages import assert_message, raises
from tests.support.tables import rows


@rows("number", [1, 3, 8, np.int64(4)])
def test_number_selects_the_first_devices(number):
    strategy = mirror.MirroredStrategy(number, replicas_per_device=2)
    assert strategy.devices == tuple(d for d in jax.devices()[:number] for _ in range(2))
    named = mirror.MirroredStrategy([f"/cpu:{i}" for i in range(number)], replicas_per_device=2)
    assert strategy.devices == named.devices


def test_number_beyond_the_devices_is_an_error():
    with raises(
        mirror.InvalidDeviceError,
        names="MirroredStrategy(20)",
        values=[20, "8: (/device:CPU:0"],
        fix=["set_num_cpu_devices(20)", "pass at most 8", "replicas_per_device=3"],
    ):
        mirror.MirroredStrategy(20)


PROGRAM = """
import json
import mirror
{before}
facts = []
for number in {numbers}:
    try:
        facts.append(mirror.MirroredStrategy(number).num_replicas_in_sync)
    except mirror.InvalidDeviceError as error:
        facts.append(str(error))
import jax
print(json.dumps([jax.device_count(), *facts]))
"""
TWO = "mirror.config.set_num_cpu_devices(2)"
FLAG = "--xla_force_host_platform_device_count"
# What the program does first, the environment, the numbers, the devices at the end, and parts of
# the error, or the replicas, for each number.
PROCESSES = {
    "nothing is set": ("", {}, [4, 3, 5], 4, [4, 3, ["5 host devices", "has 4", "<string>:8"]]),
    "JAX has started": (
        "import jax.numpy; x = jax.numpy.ones(1)",
        {},
        [2, 1],
        1,
        [["has 1", "set_num_cpu_devices(2)", "restart the kernel", "replicas_per_device=2"], 1],
    ),
    "fewer are configured": (TWO, {}, [4, 2], 2, [["mirror.config sets 2", "Set 4"], 2]),
    "fewer in the environment": (
        "",
        {"JAX_NUM_CPU_DEVICES": "2"},
        [4, 2],
        2,
        [["JAX_NUM_CPU_DEVICES=2 sets 2", "at most 2", "replicas_per_device=2"], 2],
    ),
    "more in a flag": ("", {"XLA_FLAGS": f"{FLAG}=6"}, [4, 6], 6, [4, 6]),
    "the CPU is chosen on a machine with GPUs": (
        "",
        {"JAX_PLATFORMS": "cpu", "STAND_IN_GPUS": "3"},
        [4],
        4,
        [4],
    ),
    "all GPUs are hidden": (
        "mirror.config.set_visible_devices([], 'GPU')",
        {"STAND_IN_GPUS": "3"},
        [4],
        4,
        [4],
    ),
    "GPUs that JAX cannot use": (  # as in `mirror launch`, host devices do not replace GPUs
        "",
        {"STAND_IN_GPUS": "3"},
        [4],
        1,
        [["requires 4 host devices", "has 1"]],
    ),
}
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in list(PROCESSES)[1:]]


@pytest.mark.parametrize("name", [next(iter(PROCESSES)), *SLOW])
def test_number_creates_host_devices_before_the_start(name):
    before, environment, numbers, count, expected = PROCESSES[name]
    environment = {"PYTHONPATH": str(fresh.STAND_INS), **environment}
    program = PROGRAM.format(before=before, numbers=numbers)
    total, *facts = json.loads(fresh.run(program, environment=environment).splitlines()[-1])
    assert total == count
    for fact, wanted in zip(facts, expected, strict=True):
        if isinstance(wanted, int):
            assert fact == wanted
        else:
            assert_message(fact, fix=wanted)
