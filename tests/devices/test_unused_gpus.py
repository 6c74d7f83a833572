"""One warning if JAX does not use the GPUs that the driver lists."""

import sys
from types import SimpleNamespace

import jax
import pytest

import mirror
from tests.support import fresh, inside
from tests.support.messages import assert_message
from tests.support.tables import rows


@pytest.fixture
def warnings_of(monkeypatch, caplog):
    """Returns the warnings of a call on a machine whose driver lists GPUs; JAX has CPUs only."""
    drivers, unused = inside.drivers(), inside.unused_gpus()

    def forget():
        drivers._visible.cache_clear()
        unused.warn_about_gpus.cache_clear()

    def call(function, gpus, *, platforms=None, **environment):
        forget()
        caplog.clear()
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, "pynvml", fresh.stand_in("pynvml"))
            patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
            for name, value in {"STAND_IN_GPUS": str(gpus), **environment}.items():
                patch.setenv(name, value)
            jax.config.update("jax_platforms", platforms)
            function()
        return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]

    yield call
    jax.config.update("jax_platforms", "cpu")
    forget()


@rows("devices", [None, 2])
@rows("platforms", [None, "cuda,cpu"])
def test_strategies_on_the_cpu_warn_about_gpus_that_jax_did_not_find(
    warnings_of, devices, platforms
):
    def strategies():
        for _ in range(3):
            mirror.MirroredStrategy(devices)

    (warning,) = warnings_of(strategies, 8, platforms=platforms)
    assert_message(warning, values=["8 GPUs"], fix=["mirror doctor", "JAX_PLATFORMS=cpu"])


SILENT = {
    "no GPU": (0, None, {}),
    "hidden": (8, None, {"CUDA_VISIBLE_DEVICES": ""}),
    "the CPU was asked for": (8, "cpu", {}),
}


@rows("gpus, platforms, environment", SILENT)
def test_strategies_on_the_cpu_are_silent_without_visible_gpus(
    warnings_of, gpus, platforms, environment
):
    assert warnings_of(mirror.MirroredStrategy, gpus, platforms=platforms, **environment) == []


def test_strategies_on_given_devices_are_silent(warnings_of):
    assert warnings_of(lambda: mirror.MirroredStrategy(["/cpu:0"]), 8) == []


A, B = "NVIDIA A100", "NVIDIA T4"
FOUND = {  # names and UUIDs of the driver, names of JAX, what the warning says
    "equal": ([(A, "GPU-0"), (B, "GPU-1")], [A, B], None),
    "other order": ([(B, "GPU-0"), (A, "GPU-1")], [A, B], [A, B, "CUDA_DEVICE_ORDER=PCI_BUS_ID"]),
    "other words": ([("A100", "GPU-0"), ("A100", "GPU-1")], [A, A], None),
    "fewer, of a user's choice": ([(A, "GPU-0"), (A, "GPU-1")], [A], None),
    "partitions": ([(A, "MIG-0"), (A, "MIG-1")], [A], ["2 GPUs", "nvidia-smi -mig 0"]),
    "one partition": ([(A, "MIG-0")], [A], None),
}


@rows("listed, kinds, said", FOUND)
def test_gpus_of_jax_are_compared_with_those_of_the_driver(listed, kinds, said):
    """With fake GPUs of JAX."""
    gpus = [inside.drivers().Gpu(uuid, name, None, 0) for name, uuid in listed]
    devices = [SimpleNamespace(device_kind=kind) for kind in kinds]
    problem = inside.unused_gpus().problem_with(gpus, devices)
    assert (problem is None) is (said is None)
    if problem is not None:
        assert_message(problem, fix=said)
