"""Training in several processes: stopping together, checkpoints of the chief, restarts."""

import functools
import os
import re
import subprocess
import sys
import tempfile

import numpy as np
import optax
import pytest
from flax import nnx

import mirror
from tests.support import fresh, loaders, processes
from tests.support.strategies import cpu_strategy

SIGNALED = 7  # the step after which a process sends itself the signal
STEPS = 20  # of an undisturbed run: 4 epochs of 5 batches


def train(mode, directory, **options):
    return processes.run_program(
        "several_training", mode, str(directory), timeout=900, after_failure=30, **options
    )


def ends(ended):
    """Returns the step and the digest of the state at which each process has ended."""
    found = [re.findall(r"ended at (\d+) (\w+)", each.output) for each in ended]
    text = "\n---\n".join(each.output for each in ended)
    assert all(len(pairs) == 1 for pairs in found), text
    return [(int(step), digest) for ((step, digest),) in found]


STOPS = {"stop": 7, "stop slow": 7, "all stop": 9, "epoch": 10}  # the first step that may be last


@pytest.mark.slow
def test_all_processes_stop_after_the_same_step(tmp_path):
    ended = train(",".join(STOPS), tmp_path / "ckpt")
    first, *others = outputs = processes.outputs_of(ended)
    found = [re.findall(r"ended at (\d+) \w+", output) for output in outputs]
    for mode, steps in zip(STOPS, zip(*found, strict=True), strict=True):
        (step,) = set(map(int, steps))
        assert STOPS[mode] <= step < STEPS, mode
        if mode in ("all stop", "epoch"):
            assert step == STOPS[mode]
        assert list(mirror.load_checkpoint(tmp_path / "ckpt" / mode).arrays)
        assert mirror.load_checkpoint(tmp_path / "ckpt" / mode).position["step"] == step
    digests = [re.findall(r"ended at \d+ (\w+)", output) for output in outputs]
    assert digests == [digests[0]] * len(digests)
    assert first.count("epoch 1/4") == len(STOPS), "the chief shows the progress"
    assert all("epoch 1/4" not in output for output in others)


@pytest.mark.nightly
@pytest.mark.parametrize("mode", ["SIGTERM", "SIGINT", "SIGTERM slow"])
def test_a_signal_to_one_process_ends_all_with_one_checkpoint(mode, tmp_path):
    directory = tmp_path / "ckpt"
    ended = train(mode, directory)
    first, *others = ends(ended)
    assert others == [first] * len(others)
    expected = (143,) if mode.startswith("SIGTERM") else (130, -2)
    assert all(each.status in expected for each in ended), ended
    assert SIGNALED <= first[0] < STEPS, "they stop soon after the step with the signal"
    assert mirror.load_checkpoint(directory).position["step"] == first[0]
    # It resumes there, and ends where an undisturbed run ends.
    resumed = train("resume", directory)
    assert f"resumes at {first[0]}" in resumed[1].output
    assert ends(resumed) == ends(undisturbed())


@pytest.mark.slow
def test_sigterm_to_one_process_ends_all_without_a_checkpoint(tmp_path):
    ended = train("SIGTERM alone", tmp_path / "ckpt")
    first, *others = ends(ended)
    assert others == [first] * len(others)
    assert SIGNALED <= first[0] < STEPS
    assert [each.status for each in ended] == [143] * len(ended), ended
    assert not (tmp_path / "ckpt").exists()


@functools.cache
def undisturbed():
    with tempfile.TemporaryDirectory() as directory:
        return train("undisturbed", directory)


@pytest.mark.nightly
def test_checkpoints_are_restored_on_any_number_of_processes_and_devices(tmp_path):
    ended = train("undisturbed", tmp_path / "ckpt")
    processes.outputs_of(ended)
    (step, _), *_ = ends(ended)
    assert step == STEPS
    arrays = mirror.load_checkpoint(tmp_path / "ckpt").arrays
    with cpu_strategy(3).scope():
        model = nnx.Sequential(
            nnx.Linear(3, 8, rngs=nnx.Rngs(5)), nnx.Linear(8, 1, rngs=nnx.Rngs(6))
        )
        trainer = mirror.Trainer(
            model, optax.adam(0.01), lambda model, batch: model(batch["x"])[:, 0]
        )
    trainer.restore(tmp_path / "ckpt")
    kernel = np.asarray(trainer.model.layers[0].kernel[...])
    np.testing.assert_array_equal(kernel, arrays["model.layers.0.kernel"])
    trainer.save(tmp_path / "ckpt")
    wide = train("resume", tmp_path / "ckpt", processes=4, devices=1)
    assert all(f"resumes at {STEPS}" in output for output in processes.outputs_of(wide))


@pytest.mark.slow
def test_a_checkpoint_that_only_the_chief_has_is_restored_by_all(tmp_path):
    """Every process has its own directory, as on machines that share no file system."""
    ended = processes.run_program("several_restoring", str(tmp_path), after_failure=15)
    for output in processes.outputs_of(ended):
        assert output.count("passed ") == 6


@pytest.mark.slow
def test_data_loaders_resume_from_their_states(tmp_path):
    """With whole batches in every process, and with a part in each, whose states differ."""
    ended = processes.run_program("several_loaders", str(tmp_path / "ckpt"), after_failure=15)
    for output in processes.outputs_of(ended):
        assert output.count("passed ") == 7
    with cpu_strategy(2).scope():
        model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
        trainer = mirror.Trainer(model, optax.adam(0.1), lambda m, batch: m(batch["x"])[:, 0])
    trainer.restore(tmp_path / "ckpt")  # of 5 steps of two processes with 4 examples each
    source = loaders.Stateful(1)
    trainer.fit(source, progress=False)
    assert source.read == loaders.STEPS, "one process reads again what two have used"


@pytest.mark.slow
@pytest.mark.dev("torch", "torchdata")
def test_data_loaders_of_torchdata_resume_from_their_states(tmp_path):
    arguments = str(tmp_path / "ckpt"), "torchdata"
    ended = processes.run_program("several_loaders", *arguments, after_failure=15)
    for output in processes.outputs_of(ended):
        assert "passed torchdata" in output


@pytest.mark.nightly
def test_a_killed_process_is_started_again_and_ends_like_an_undisturbed_run(tmp_path):
    arguments = ["--processes", "2", "--devices", "2", "--cpu", "--restarts", "2"]
    program = str(fresh.PROGRAMS / "several_training.py")
    code = [sys.executable, "-m", "mirror", "launch", *arguments, program]
    path = os.pathsep.join(filter(None, [fresh.INHERITED.get("PYTHONPATH"), str(fresh.ROOT)]))
    done = subprocess.run(
        [*code, "kill", str(tmp_path / "ckpt")],
        env={**fresh.INHERITED, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert "process 1 ended first, by SIGKILL; all start again (restart 1 of 2)" in done.stdout
    assert "[1] resumes at 5" in done.stdout
    found = re.findall(r"\[(\d)\] ended at (\d+) (\w+)", done.stdout)
    assert [(int(step), digest) for _, step, digest in sorted(found)] == ends(undisturbed())
