"""What goes wrong while a `Trainer` trains on parameter servers, on real processes."""

import json
import os
import signal
import tempfile
import threading
from pathlib import Path

import jax
import numpy as np
import pytest

import mirror
from tests.ps.programs import run_program
from tests.ps.trained import create, data, fit, loss_fn, on_one_device, require_same, values
from tests.support import inside
from tests.support.messages import raises
from tests.support.waiting import main_thread_waits, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.dev("ray")]


@pytest.fixture
def strategy(on_ray):
    return on_ray


@pytest.fixture(scope="module")
def undisturbed():
    trainer = on_one_device()
    fit(trainer)
    return trainer


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"steps_per_execution": 2}, "steps_per_execution=2"),
        ({"require_equal": True}, "require_equal=True"),
        ({"precision": "float16"}, "loss_scale"),
        ({"loss_scale": mirror.LossScale()}, "loss_scale"),
        ({"stall_secs": 5}, "stall_secs=5"),
        ({"micro_batch": 4}, "micro_batch=4"),
    ],
)
def test_options_that_need_one_process_are_rejected(strategy, options, part):
    with raises(ValueError, names=[part, "ParameterServerStrategy"]):
        create(strategy, **options)


def test_what_belongs_to_the_servers_cannot_be_replaced(strategy):
    trainer = create(strategy)
    for name in ("model", "optimizer"):
        with raises(TypeError, names=f"trainer.{name}", fix="nnx.update("):
            setattr(trainer, name, getattr(trainer, name))
    with raises(NotImplementedError, names="ParameterServerStrategy"):
        inside.lowered_text(trainer)


def test_loss_functions_that_cannot_be_sent_are_named(strategy):
    lock = threading.Lock()

    def locked_loss(model, batch):
        with lock:
            return loss_fn(model, batch)

    trainer = create(strategy, loss=locked_loss)
    with raises(TypeError, names=["locked_loss", "'lock'"]):
        fit(trainer)
    assert trainer._position.step == 0


class Failing(mirror.callbacks.Callback):
    """Raises an error after a step, once."""

    def __init__(self, step, error):
        self.step, self.error = step, error

    def on_step(self, fit):
        if fit.position.step == self.step:
            error, self.error = self.error, None
            if error is not None:
                raise error


@pytest.mark.parametrize("error", [ValueError("mine")], ids=repr)
def test_training_resumes_after_an_error_of_a_callback(strategy, undisturbed, error):
    trainer = create(strategy)
    with pytest.raises(type(error)):
        fit(trainer, callbacks=Failing(6, error))
    assert trainer._position.step == int(trainer.optimizer.step[...]) == 6
    fit(trainer)
    require_same(trainer, undisturbed)


class Interrupted(mirror.callbacks.Callback):
    """Sends Ctrl-C to this process while it waits for a step."""

    def __init__(self):
        self.sender = threading.Thread(target=self.send)

    def send(self):
        wait_until(lambda: main_thread_waits("fetch"))
        os.kill(os.getpid(), signal.SIGINT)

    def on_step(self, fit):
        if fit.position.step == 5:
            self.sender.start()


def test_training_resumes_after_ctrl_c(strategy):
    trainer, other = create(strategy), on_one_device()
    with pytest.raises(KeyboardInterrupt):
        fit(trainer, epochs=50, callbacks=Interrupted())
    step = trainer._position.step
    assert 5 <= step < 200
    assert int(trainer.optimizer.step[...]) == step
    fit(trainer, epochs=step // 4 + 1)
    fit(other, epochs=step // 4 + 1)
    require_same(trainer, other)


class Flaky:
    """A loss that fails where an example has the label 7, until a file exists."""

    def __init__(self, path):
        self.path = str(path)

    def __call__(self, model, batch):
        def check(labels):
            if np.any(labels == 7) and not os.path.exists(self.path):
                raise ValueError("label 7")
            return np.float32(0)

        zero = jax.pure_callback(check, jax.ShapeDtypeStruct((), np.float32), batch["y"])
        losses, metrics = loss_fn(model, batch)
        return losses + zero, metrics


@pytest.fixture
def stale(ray_cluster):
    with mirror.ps.ParameterServerStrategy(ps=2, workers=2, staleness=1) as strategy:
        yield strategy


@pytest.mark.parametrize("name", ["on_ray", pytest.param("stale", marks=pytest.mark.nightly)])
def test_training_resumes_before_the_step_that_failed(name, request, tmp_path):
    strategy = request.getfixturevalue(name)
    examples = data(24 * 8)
    examples["y"] = np.minimum(examples["y"], 6)
    examples["y"][24 * 5 + 3] = 7  # in the 6th batch

    def run(trainer):
        fit(trainer, data=examples, shuffle=False, epochs=1)

    trainer = create(strategy, loss=Flaky(tmp_path / "file"))
    with pytest.raises(Exception, match="label 7"):
        run(trainer)
    assert trainer._position.step == 5
    assert trainer._position.samples == 5 * 24
    trainer.save(tmp_path / "saved")
    # With staleness, another worker may have made the next update.
    updates = int(trainer.optimizer.step[...])
    assert updates == 5 or (name == "stale" and updates == 6)
    (tmp_path / "file").touch()
    run(trainer)
    assert trainer._position.step == 8
    if name == "on_ray":
        other = on_one_device()
        run(other)
        require_same(trainer, other)


class Kill(mirror.callbacks.Callback):
    """Kills processes after a step."""

    def __init__(self, strategy, step, *processes):
        self.strategy, self.step, self.processes = strategy, step, processes

    def on_step(self, fit):
        if fit.position.step == self.step:
            for job, index in self.processes:
                os.kill(inside.servers_and_workers(self.strategy)[job][index], signal.SIGKILL)


@pytest.mark.parametrize("lost", [("workers", 1), ("servers", 0)], ids=lambda lost: lost[0])
def test_lost_processes_change_no_bit(strategy, lost):
    calm, trainer = create(strategy), create(strategy)
    fit(calm, epochs=4)
    fit(trainer, epochs=4, callbacks=Kill(strategy, 6, lost))
    require_same(trainer, calm, 0)


def test_lost_values_are_not_saved_or_trained_further(ray_cluster, tmp_path, undisturbed):
    options = {"ps": 1, "workers": 1, "snapshot_every": 0}
    with mirror.ps.ParameterServerStrategy(**options) as strategy:
        trainer = create(strategy)
        fit(trainer, epochs=1)
        trainer.save(tmp_path)
        kill = Kill(strategy, 6, ("servers", 0))
        with pytest.raises(mirror.ps.ParameterServerLostError):
            fit(trainer, callbacks=kill)
        assert int(trainer.optimizer.step[...]) == 4
        for use in (lambda: fit(trainer), lambda: trainer.save(tmp_path)):
            with raises(RuntimeError, fix="trainer.restore("):
                use()
        trainer.restore(tmp_path)
        fit(trainer)
        require_same(trainer, undisturbed)


CLOSED = """
import mirror
import ray

if __name__ == "__main__":
    with mirror.ps.ParameterServerStrategy(ps=1, workers=1) as strategy:
        coordinator = mirror.ps.ClusterCoordinator(strategy)
        coordinator.schedule(len, ([1],)).fetch()
    with mirror.ps.ParameterServerStrategy(ps=1, workers=1) as first:
        second = mirror.ps.ParameterServerStrategy(ps=1, workers=1)
        first.close()
        assert ray.is_initialized()
        assert mirror.ps.ClusterCoordinator(second).schedule(len, ([1],)).fetch(900) == 1
        ray.shutdown()
        try:
            mirror.ps.ClusterCoordinator(second).schedule(len, ([1],))
        except RuntimeError as error:
            assert "has left the Ray cluster" in str(error), error
        else:
            raise AssertionError("schedule after ray.shutdown()")
        second.close()
        assert not ray.is_initialized()
    uses = {
        "schedule": lambda: coordinator.schedule(max, ([1],)),
        "join": coordinator.join,
        "dataset": lambda: coordinator.create_per_worker_dataset(list),
        "variable": lambda: strategy.Variable(1.0),
        "report": strategy.report,
    }
    for name, use in uses.items():
        try:
            use()
        except RuntimeError as error:
            assert "The strategy has been closed" in str(error), (name, error)
        else:
            raise AssertionError(name)
        assert not ray.is_initialized(), name
"""


@pytest.mark.nightly
def test_closed_strategy_does_not_start_ray_again(tmp_path):
    run_program(tmp_path, CLOSED)


ALONE = """
import mirror

if __name__ == "__main__":
    with mirror.ps.ParameterServerStrategy(ps=1, workers=1) as strategy:
        assert mirror.ps.ClusterCoordinator(strategy).schedule(len, ([1],)).fetch(900) == 1
"""


@pytest.mark.nightly
def test_cluster_that_was_left_behind_is_not_joined(tmp_path, monkeypatch):
    """By an address in the environment, and in the file that Ray writes: nothing answers there."""
    with tempfile.TemporaryDirectory() as directory:  # short, for the names of Ray's sockets
        os.mkdir(f"{directory}/ray")
        Path(directory, "ray", "ray_current_cluster").write_text("127.0.0.1:1")
        monkeypatch.setenv("RAY_TMPDIR", directory)
        monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
        run_program(tmp_path, ALONE)


CTRL_C = """
import os, signal, time
import mirror
from tests.ps.trained import create, fit
from tests.support import inside

class CtrlC(mirror.callbacks.Callback):
    def on_step(self, fit):
        if fit.position.step == 5:
            os.killpg(0, signal.SIGINT)  # as a terminal does: Ray's processes get it, too

if __name__ == "__main__":
    with mirror.ps.ParameterServerStrategy(ps=1, workers=1) as strategy:
        processes = inside.servers_and_workers(strategy)
        trainer = create(strategy)
        try:
            fit(trainer, epochs=50, callbacks=CtrlC())
        except KeyboardInterrupt:
            pass
        else:
            raise AssertionError("no interrupt")
        assert 5 <= trainer._position.step == int(trainer.optimizer.step[...]) < 200
        time.sleep(0.5)
        fit(trainer, epochs=50)
        assert trainer._position.step == 200
        assert inside.servers_and_workers(strategy) == processes
"""


@pytest.mark.nightly
def test_ctrl_c_in_a_terminal_ends_no_process_of_ray(tmp_path):
    run_program(tmp_path, CTRL_C)


PROGRAM = """
import json, os, signal, sys
import mirror
from tests.ps.trained import create, fit, values
from tests.support import inside

class Die(mirror.callbacks.Callback):
    def on_step(self, fit):
        if fit.position.step == 6 and not was_saved:
            print(json.dumps(inside.servers_and_workers(strategy)), flush=True)
            os.kill(os.getpid(), signal.SIGKILL)

if __name__ == "__main__":
    directory = sys.argv[1]
    was_saved = os.path.exists(directory)
    with mirror.ps.ParameterServerStrategy(ps=2, workers=2) as strategy:
        trainer = create(strategy)
        if was_saved:
            trainer.restore(directory)
        checkpoint = mirror.callbacks.Checkpoint(directory, every_steps=1, asynchronous=False)
        fit(trainer, callbacks=[checkpoint, Die()])
    trainer.save(directory + "-end")
"""


@pytest.mark.nightly
def test_program_that_is_killed_continues_from_its_checkpoint(tmp_path, undisturbed):
    saved = str(tmp_path / "saved")
    first = run_program(tmp_path, PROGRAM, saved, status=-signal.SIGKILL)
    processes = json.loads(first)
    for process in [*processes["servers"], *processes["workers"]]:
        wait_until(lambda process=process: not os.path.exists(f"/proc/{process}"))
    run_program(tmp_path, PROGRAM, saved)
    trainer = on_one_device()
    trainer.restore(tmp_path / "saved-end")
    require_same(trainer, undisturbed)
    assert set(values(trainer)) == set(values(undisturbed))
