"""A fixed number of replicas: the same bits on any number of devices, and in any processes.

The programs run in processes of their own: the settings of the tests would prove nothing.
"""

import itertools
import re

import pytest

from tests.support import fresh, processes
from tests.support.conformance import STEPS
from tests.support.models import TRAININGS

REAL = [path.stem for path in (fresh.ROOT / "tests/real_programs").glob("[a-z]*.py")]
REAL.remove("harness")


def bits(devices, names):
    """Returns the hashes of each program, one for each number of devices."""
    return hashes(dict.fromkeys(names, tuple(devices)))


def hashes(programs):
    """Returns the hashes of each program, whose numbers of devices are given."""
    code = f"from tests.programs import same_bits; same_bits.main({programs})"
    output = fresh.run(code, environment={"JAX_NUM_CPU_DEVICES": "8"})
    found: dict[str, list[str]] = {}
    for line in output.splitlines():
        if line.startswith("bits|"):
            _, name, digest = line.split("|")
            found.setdefault(name, []).append(digest)
    assert {name: len(digests) for name, digests in found.items()} == {
        name: len(devices) for name, devices in programs.items()
    }
    return found


def assert_equal(found):
    assert not {name: digests for name, digests in found.items() if len(set(digests)) > 1}


def assert_all_equal(found):
    assert len({digest for digests in found.values() for digest in digests}) == 1, found


def test_some_programs_on_eight_devices_and_one():
    assert_equal(hashes({"nnx-MLP": (8, 1), "contrastive": (2, 1)}))


@pytest.mark.slow
def test_models_and_a_trainer_that_resumes_elsewhere():
    trained = ["trainer", "history 1"], ["resizes", *(f"resizes {i}" for i in range(2))]
    found = hashes(
        {
            "nnx-CNN": (8, 1),
            "nnx-SyncBatchNorm momentum": (4, 1),
            "nanogpt": (4, 1),
            **dict.fromkeys(itertools.chain(*trained), (8,)),
        }
    )
    for names in trained:
        assert_all_equal({name: found.pop(name) for name in names})
    assert_equal(found)


@pytest.mark.slow
@pytest.mark.parametrize(
    "devices",
    [[(4, 1), (2, 1), (4, 2)], pytest.param([(4, 2, 1)], marks=pytest.mark.nightly)],
    ids=str,
)
def test_all_collectives(devices):
    assert_equal(hashes(dict(zip(STEPS, itertools.cycle(devices), strict=False))))


@pytest.mark.nightly
@pytest.mark.parametrize("names", [REAL[:5], REAL[5:9], REAL[9:]], ids=str)
def test_real_programs(names):
    assert_equal(bits([4, 2, 1], names))


@pytest.mark.nightly
def test_all_models_and_many_histories():
    models = [f"{kind} {optimizer}" for kind in TRAININGS for optimizer in ("sgd", "adam")]
    assert_equal(bits([8, 4, 2, 1], models))
    assert_all_equal(bits([8], ["trainer", *(f"history {i}" for i in range(10))]))
    for first in range(0, 100, 20):
        histories = [f"resizes {i}" for i in range(first, first + 20)]
        assert_all_equal(bits([8], ["resizes", *histories]))


@pytest.mark.slow
@pytest.mark.parametrize(
    "layouts",
    [[(2, 2)], pytest.param([(1, 2), (2, 1), (4, 1), (4, 2)], marks=pytest.mark.nightly)],
    ids=str,
)
def test_in_several_processes(layouts):
    (wanted,) = bits([1], ["nnx-MLP"])["nnx-MLP"]
    for count, devices in layouts:
        ended = processes.run_program(
            "several_bits",
            processes=count,
            devices=devices,
            environment={"JAX_DISABLE_MOST_OPTIMIZATIONS": "0", "XLA_FLAGS": ""},
            after_failure=15,
        )
        for output in processes.outputs_of(ended):
            assert re.findall(r"^bits: (\w+)$", output, re.MULTILINE) == [wanted]
