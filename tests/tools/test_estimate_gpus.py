"""`mirror estimate-memory --gpu`: steps compiled for GPUs that need not exist."""

import json
from importlib import metadata

import pytest

from mirror import cli
from tests.support import inside
from tests.support.messages import assert_message

JAXLIB = metadata.version("jaxlib")
OTHER = "0.1.2"
STEPS = """
import jax, jax.numpy as jnp, numpy as np, mirror

CONSTANT = jnp.ones((8, 2))
BATCH = np.zeros((16, 8), np.float32)

def prints(strategy):
    def step(w, b):
        jax.debug.print("{}", b.sum())
        return w - mirror.all_reduce("mean", b.sum() * w)
    return step, (jnp.zeros((8, 2)),), [BATCH]

def calls(strategy):
    def step(w, b):
        y = jax.pure_callback(np.sin, jax.ShapeDtypeStruct(b.shape, b.dtype), b)
        return w - mirror.all_reduce("mean", y.sum() * w)
    return step, (jnp.zeros((8, 2)),), [BATCH]

def captures(strategy):
    def step(w, b):
        return w - mirror.all_reduce("mean", (b @ CONSTANT).sum() * w)
    return step, (jnp.zeros((8, 2)),), [BATCH]

def without_batch(strategy):
    return lambda w: w + 1, (jnp.zeros((8, 2)),)
"""


@pytest.fixture
def steps(tmp_path):
    file = tmp_path / "steps.py"
    file.write_text(STEPS)
    return file


def run(capsys, *options):
    status = cli.main(["estimate-memory", *options])
    return status, capsys.readouterr()


def test_help_lists_the_described_gpus():
    text = inside.command_tables()["estimate-memory"]["options"]["--gpu"]["help"]
    assert f": {', '.join(inside.gpu_models())} (" in text


def test_unknown_gpu_lists_the_known_ones(capsys):
    status, shown = run(capsys, "mlp", "--gpu", "b300")
    assert status == 2
    assert_message(shown.err, names="b300", values=list(inside.gpu_models()))


def test_donated_argument_that_does_not_exist_is_named(capsys, steps):
    status, shown = run(capsys, f"{steps}:captures", "--devices", "2", "--donate", "0,7")
    assert status == 2
    assert_message(shown.err, names=["--donate", "7"], values=["2 arguments"])
    assert "Traceback" not in shown.err


def test_too_many_replicas_are_an_error(capsys, steps):
    per_device = ("--replicas-per-device", "1024")
    status, shown = run(capsys, f"{steps}:captures", "--devices", "2,8", *per_device)
    assert status == 2
    assert_message(shown.err, names=per_device, values=["8 devices", 8192, 4096])
    assert cli.main(["demo", "--devices", "8", *per_device]) == 2
    assert_message(capsys.readouterr().err, names=per_device, values=["8 devices", 8192, 4096])


def test_missing_compiler_is_one_sentence_that_says_what_to_install(capsys, monkeypatch, subtests):
    cases = {
        "none": ({}, "12", "no jax-cuda12-pjrt"),
        "one": ({"jax-cuda12-pjrt": JAXLIB}, "12", "no jax-cuda12-plugin"),
        "other version": (
            {"jax-cuda13-pjrt": OTHER, "jax-cuda13-plugin": OTHER},
            "13",
            f"jax-cuda13-pjrt {OTHER}",
        ),
    }
    for name, (installed, cuda, found) in cases.items():
        with subtests.test(msg=name):
            inside.install_gpu_compiler(installed, monkeypatch)
            status, shown = run(capsys, "mlp", "--gpu", "h100", "--devices", "2")
            assert status == 2
            packages = [f"jax-cuda{cuda}-{part}=={JAXLIB}" for part in ("pjrt", "plugin")]
            fix = f"pip install --no-deps {' '.join(packages)}"
            assert_message(shown.err, values=[found, JAXLIB], fix=fix)


@pytest.mark.gpu_aot
def test_every_gpu_has_a_compiler(capsys, subtests):
    for name in inside.gpu_models():
        with subtests.test(msg=name):
            status, shown = run(capsys, "mlp", "--gpu", name.upper(), "--devices", "2", "--json")
            assert status == 0, shown.err
            (row,) = json.loads(shown.out)["rows"]
            assert name.removeprefix("rtx").upper() in row["platform"]
            assert row["devices"] == ["/device:GPU:0", "/device:GPU:1"]
            assert row["bytes"]["temporaries"] > 0


@pytest.mark.gpu_aot
@pytest.mark.filterwarnings("ignore:.* differs from one device")
def test_steps_that_capture_arrays_or_have_no_batch(steps, capsys, subtests):
    """Arrays cannot be placed on GPUs that do not exist."""
    for name, captured in {"captures": 64, "without_batch": 0}.items():
        with subtests.test(msg=name):
            status, shown = run(capsys, f"{steps}:{name}", "--gpu", "h100", "--json")
            assert status == 0, shown.err
            rows = json.loads(shown.out)["rows"]
            assert [len(row["devices"]) for row in rows] == [1, 8]
            assert [row["bytes"]["arguments"] for row in rows] == [captured] * 2


@pytest.mark.gpu_aot
def test_host_callbacks_are_one_sentence(steps, capsys, subtests):
    for name, line in {"prints": 9, "calls": 15}.items():
        with subtests.test(msg=name):
            for count in ("1", "2"):
                options = ("--gpu", "h100", "--devices", count)
                status, shown = run(capsys, f"{steps}:{name}", *options)
                assert status == 2
                assert "Traceback" not in shown.err
                assert_message(shown.err, names=f"steps.py:{line}", fix="omit --gpu")
