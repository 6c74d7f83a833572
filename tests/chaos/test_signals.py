"""SIGTERM and Ctrl-C are noticed soon, wherever `fit` is, and nothing that was trained is lost."""

import contextlib
import ctypes
import multiprocessing
import os
import signal
import sys
import threading
import time
from pathlib import Path

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import mirror
from mirror._src.training.checkpoints import files
from mirror._src.training.checkpoints.store import CheckpointStore
from tests.support.checkpoints import START
from tests.support.messages import assert_message

STEPS = 6  # before the place that blocks
LONG = 40.0  # seconds, far more than any limit here
AT_ONCE = 4.0  # seconds: 1, and what a busy machine takes


class Blocks:
    """Something that takes very long, once; it tells when it begins."""

    def __init__(self, says, in_native_code: bool = False):
        self.says, self.in_native_code = says, in_native_code

    def __call__(self) -> None:
        self.says.send("blocked")
        if self.in_native_code:  # as in a compiler: no handler runs in this thread
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
            ctypes.CDLL(None).sleep(int(LONG))
        time.sleep(LONG)


class Batches:
    """Batches of which one takes very long."""

    def __init__(self, block=None, at: int = STEPS):
        self.block, self.at = block, at

    def __iter__(self):
        for number in range(10**6 if self.block else 2):
            if number == self.at and self.block:
                self.block()
            yield {"x": np.full((4, 2), number, np.float32)}


class TellsOnStep(mirror.callbacks.Callback):
    """Tells once that training has begun, and leaves it alone."""

    def __init__(self, says):
        self.says = says

    def on_step(self, fit):
        if fit.position.step == STEPS:
            self.says.send("blocked")


class BlocksOnStep(mirror.callbacks.Callback):
    def __init__(self, block):
        self.block = block

    def on_step(self, fit):
        if fit.position.step == STEPS:
            self.block()


def slow_down_write(says, at: int) -> None:
    """Makes the checkpoint of a step take a second, and tells when it begins."""
    write = files.write

    def slow_write(path, *contents):
        if path.name == str(at):
            says.send("blocked")
            time.sleep(1.0)
        write(path, *contents)

    files.write = slow_write


class EndsAtTheEnd(mirror.callbacks.Callback):
    """Sends SIGTERM to its process at the end of an epoch, and waits for an event."""

    def __init__(self, says, event=None):
        self.says, self.event = says, event

    def on_epoch_end(self, fit, logs):
        self.says.send("blocked")
        os.kill(os.getpid(), signal.SIGTERM)
        if self.event is not None:
            assert self.event.wait(10)


def close_before_the_signal() -> None:
    """Makes `fit` close the checkpoints while the thread that saved is about to end the process."""
    close, send = CheckpointStore.close, signal.pthread_kill

    def close_slowly(store):
        time.sleep(1.5)
        close(store)

    def send_late(thread, number):
        end = time.monotonic() + 3
        while signal.getsignal(number) is not signal.SIG_DFL and time.monotonic() < end:
            time.sleep(0.01)
        send(thread, number)

    CheckpointStore.close, signal.pthread_kill = close_slowly, send_late


def save_before_the_signal(directory: Path) -> threading.Event:
    """Makes `fit` save while the thread that saved is about to end the process.

    Returns:
        The event that this thread has begun to save. A save that is cut off creates a file.
    """
    save, wait, send = CheckpointStore.save, CheckpointStore.wait, signal.pthread_kill
    is_waiting, is_saving = threading.Event(), threading.Event()

    def wait_slowly(store):
        if threading.current_thread().name == "mirror SIGTERM":
            is_waiting.set()
            time.sleep(1)
        wait(store)

    def save_slowly(store, *arguments):
        if threading.current_thread() is threading.main_thread():
            is_saving.set()
            try:
                time.sleep(1)
            except BaseException:
                (directory / "cut off").touch()
                raise
        save(store, *arguments)

    def send_late(thread, number):
        is_saving.wait(2)
        send(thread, number)

    CheckpointStore.save, CheckpointStore.wait = save_slowly, wait_slowly
    signal.pthread_kill = send_late
    return is_waiting


def loss_fn(model, batch):
    return optax.l2_loss(model(batch["x"]))[:, 0]


def fit_at(place: str, directory: Path, says, grace_secs: float, every_steps: int) -> None:
    jax.config.update("jax_platforms", "cpu")
    mirror.config.set_num_cpu_devices(2)
    sys.stderr = (directory / "stderr").open("w")
    os.dup2(sys.stderr.fileno(), 2)
    strategy = mirror.MirroredStrategy()
    block = Blocks(says)
    loss, data, options = loss_fn, Batches(), {"epochs": STEPS // 2}
    others: list[mirror.callbacks.Callback] = []
    if place == "source":
        data = Batches(block)
    elif place == "source without prefetch":
        data = strategy.distribute_dataset(Batches(block), remainder="pad", prefetch=0)
    elif place == "validation":
        options["validation_data"] = Batches(block, at=0)
        data, options["steps_per_epoch"] = Batches(lambda: None), STEPS
    elif place == "callback":
        others, options["epochs"] = [BlocksOnStep(block)], 10**6
    elif place == "step":
        others, options["epochs"] = [TellsOnStep(says)], 10**6
    elif place == "checkpoint":
        slow_down_write(says, at=STEPS)
        options["epochs"] = 10**6
    elif place == "close":
        close_before_the_signal()
        others, options["epochs"] = [EndsAtTheEnd(says)], 1
    elif place == "save":
        others, options["epochs"] = [EndsAtTheEnd(says, save_before_the_signal(directory))], 1
    else:
        block.in_native_code = place == "compile in native code"

        def loss(model, batch):
            block()
            return loss_fn(model, batch)

    with strategy.scope():
        trainer = mirror.Trainer(nnx.Linear(2, 1, rngs=nnx.Rngs(0)), optax.adam(1e-3), loss)
    checkpoint = mirror.callbacks.Checkpoint(
        directory / "runs",
        every_epochs=int(place == "save"),
        every_steps=every_steps,
        grace_secs=grace_secs,
        asynchronous=not every_steps,
    )
    callbacks = [checkpoint, *others]
    try:
        trainer.fit(data, callbacks=callbacks, progress=False, **options)
    except SystemExit:
        time.sleep(0.2)  # a late signal would kill the process
        raise
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        says.send(f"interrupted after {trainer._position.step}")
        sys.exit(130)


@contextlib.contextmanager
def blocked_at(place: str, directory: Path, *, grace_secs: float = 25.0, every_steps: int = 0):
    """Yields a process that trains and blocks, and the connection that it speaks through."""
    listens, says = START.Pipe(duplex=False)
    process = START.Process(target=fit_at, args=(place, directory, says, grace_secs, every_steps))
    process.start()
    says.close()
    try:
        with listens:
            assert listens.poll(60), "the process is silent"
            assert listens.recv() == "blocked"
            time.sleep(0.1)
            yield process, listens
    finally:
        process.kill()
        process.join()


def ended_at(place: str, directory: Path, *numbers: int, gap_secs: float = 1.5, **options):
    """Sends signals to a process that blocks; returns its status, its words and the time."""
    with blocked_at(place, directory, **options) as (process, listens):
        begin = time.monotonic()
        for number in numbers:
            with contextlib.suppress(ProcessLookupError):  # it has ended
                os.kill(process.pid, number)
            process.join(gap_secs)
        process.join(30)
        secs, status = time.monotonic() - begin, process.exitcode
        try:
            said = listens.recv() if listens.poll() else ""
        except EOFError:
            said = ""
    return status, said, secs, words_in(directory)


def words_in(directory: Path) -> str:
    return (directory / "stderr").read_text()


PLACES = ["source", "source without prefetch", "validation", "callback"]


@pytest.mark.parametrize("place", PLACES)
def test_sigterm_saves_soon(tmp_path, place):
    status, _, secs, words = ended_at(place, tmp_path, signal.SIGTERM)
    assert status == 143
    assert secs < AT_ONCE
    assert words == f"SIGTERM: step {STEPS} is saved in {tmp_path / 'runs'}.\n"
    assert mirror.load_checkpoint(tmp_path / "runs").step == STEPS


@pytest.mark.parametrize("place", ["close", "save"])
def test_sigterm_at_the_end_of_fit_saves(tmp_path, place):
    """The thread that saves sends no signal after `fit` has restored the handler, or in a save."""
    status, *_ = ended_at(place, tmp_path)
    assert status == 143
    assert mirror.load_checkpoint(tmp_path / "runs").step == 2
    assert not (tmp_path / "cut off").exists()


@pytest.mark.parametrize("place", PLACES)
def test_interrupt_ends_fit_soon(tmp_path, place):
    status, said, secs, _ = ended_at(place, tmp_path, signal.SIGINT)
    assert (status, said) == (130, f"interrupted after {STEPS}")
    assert secs < AT_ONCE


@pytest.mark.parametrize("place", ["compile", "compile in native code"])
def test_sigterm_ends_a_process_that_compiles(tmp_path, place):
    """Within the grace period, and it says what was not done."""
    status, _, secs, words = ended_at(place, tmp_path, signal.SIGTERM, grace_secs=3.0)
    assert status == 143
    assert 1 < secs < 3 + AT_ONCE
    assert_message(words, names="SIGTERM", values=3, fix=["no checkpoint", "none", "grace_secs"])


def test_first_interrupt_says_how_to_stop_at_once(tmp_path):
    status, said, _, words = ended_at("compile", tmp_path, signal.SIGINT, signal.SIGINT)
    assert (status, said) == (130, "interrupted after 0")
    assert_message(words, fix="Press Ctrl-C again to stop at once.")


def test_interrupt_that_stops_soon_prints_nothing(tmp_path):
    *_, words = ended_at("source", tmp_path, signal.SIGINT)
    assert words == ""


INT, TERM, HUP = signal.SIGINT, signal.SIGTERM, signal.SIGHUP
STOP, CONT = signal.SIGSTOP, signal.SIGCONT
SAVED, INTERRUPTED, KILLED = 143, 130, -HUP
SEQUENCES: dict[str, tuple[str, list[int], set[int]]] = {
    "SIGTERM in a step": ("step", [TERM], {SAVED}),
    # One that comes when the checkpoint has been written ends the process as by default.
    "SIGTERM twice in the source": ("source", [TERM] * 2, {SAVED, -TERM}),
    "SIGTERM eight times in the source": ("source", [TERM] * 8, {SAVED, -TERM}),
    "SIGTERM eight times in a step": ("step", [TERM] * 8, {SAVED, -TERM}),
    "SIGTERM eight times in a callback": ("callback", [TERM] * 8, {SAVED, -TERM}),
    "Ctrl-C in a step": ("step", [INT], {INTERRUPTED}),
    # Each but the first raises wherever the process is, also while it ends.
    "Ctrl-C twice in a step": ("step", [INT] * 2, {INTERRUPTED, 1}),
    "Ctrl-C eight times in the source": ("source", [INT] * 8, {INTERRUPTED, 1}),
    "Ctrl-C eight times in a step": ("step", [INT] * 8, {INTERRUPTED, 1}),
    "Ctrl-C eight times in validation": ("validation", [INT] * 8, {INTERRUPTED, 1}),
    "Ctrl-C, then SIGTERM in a step": ("step", [INT, TERM], {INTERRUPTED, SAVED}),
    "SIGTERM, then Ctrl-C in the source": ("source", [TERM, INT], {INTERRUPTED, SAVED, 1}),
    "SIGHUP in a step": ("step", [HUP], {KILLED}),
    "SIGHUP in the source": ("source", [HUP], {KILLED}),
    "SIGHUP in a callback": ("callback", [HUP], {KILLED}),
    "stopped and continued in a step": ("step", [STOP, CONT, TERM], {SAVED}),
    "SIGTERM while stopped": ("source", [STOP, TERM, CONT], {SAVED}),
    "Ctrl-C while stopped": ("validation", [STOP, INT, CONT], {INTERRUPTED}),
}


@pytest.mark.parametrize("case", SEQUENCES)
def test_signals_end_the_process_and_lose_nothing(tmp_path, case):
    place, numbers, wanted = SEQUENCES[case]
    status, _, secs, words = ended_at(place, tmp_path, *numbers, gap_secs=0.05, every_steps=2)
    assert status in wanted, words
    assert secs < AT_ONCE
    found = mirror.load_checkpoint(tmp_path / "runs")
    if place == "source":  # it blocks while earlier batches are on their way
        assert found.step >= 2
    else:
        assert found.step >= (STEPS if status == SAVED else STEPS - 2)
    assert found.position["step"] == found.step


@pytest.mark.parametrize("count", [1, 2, 8])
def test_interrupts_in_a_checkpoint_complete_it(tmp_path, count):
    """A process that ended in the middle of it would hang in the threads of Orbax."""
    status, _, secs, words = ended_at(
        "checkpoint", tmp_path, *[INT] * count, gap_secs=0.05, every_steps=2
    )
    assert status == INTERRUPTED, words
    assert secs < AT_ONCE
    assert mirror.load_checkpoint(tmp_path / "runs").step == STEPS
    assert_message(words, names="the checkpoint for step 6", fix="Ctrl-\\")


def end_in_save(directory: Path, says) -> None:
    """Ends while a save has started threads of Orbax, which wait for each other."""
    store, start, has_begun = CheckpointStore(directory), threading.Thread.start, threading.Event()
    store.save(1, {"x": np.ones(4)}, {})
    store.wait()

    def start_and_linger(thread):
        start(thread)
        if type(thread).__name__ == "_SignalingThread":
            has_begun.set()
            time.sleep(1.0)

    threading.Thread.start = start_and_linger
    store.save(2, {"x": np.ones(4)}, {})
    says.send(has_begun.wait(30))


def test_process_that_ends_in_a_save_does_not_hang(tmp_path):
    listens, says = START.Pipe(duplex=False)
    process = START.Process(target=end_in_save, args=(tmp_path, says))
    process.start()
    says.close()
    try:
        assert listens.poll(60), "the process is silent"
        assert listens.recv(), "Orbax has no such threads any more"
        process.join(1.0 + AT_ONCE)
        assert process.exitcode == 0
    finally:
        process.kill()
        process.join()
    assert mirror.load_checkpoint(tmp_path).step in (1, 2)


def test_interrupt_is_acknowledged_while_native_code_runs(tmp_path):
    """No handler runs then, and a second Ctrl-C could not stop it, so that is not promised."""
    with blocked_at("compile in native code", tmp_path) as (process, _):
        begin = time.monotonic()
        os.kill(process.pid, INT)
        while "Interrupted" not in words_in(tmp_path):
            assert time.monotonic() - begin < AT_ONCE, "it is silent"
            time.sleep(0.02)
        assert_message(words_in(tmp_path), names="native code", fix="Ctrl-\\")
        assert "Ctrl-C" not in words_in(tmp_path)
        os.kill(process.pid, INT)
        process.join(1)
        assert words_in(tmp_path).count("Interrupted") == 1


class ForksWorker:
    """Batches from a source that forks a worker, as PyTorch's DataLoader does."""

    def __init__(self, says):
        self.says = says

    def __iter__(self):
        worker = multiprocessing.get_context("fork").Process(target=time.sleep, args=(LONG,))
        worker.start()
        self.says.send(worker.pid)
        worker.join()
        self.says.send(worker.exitcode)
        yield {"x": np.ones((4, 2), np.float32)}


def fit_with_worker(directory: Path, says, prefetch: int) -> None:
    jax.config.update("jax_platforms", "cpu")
    mirror.config.set_num_cpu_devices(2)
    sys.stderr = (directory / "stderr").open("w")
    os.dup2(sys.stderr.fileno(), 2)
    strategy = mirror.MirroredStrategy()
    with strategy.scope():
        trainer = mirror.Trainer(nnx.Linear(2, 1, rngs=nnx.Rngs(0)), optax.adam(1e-3), loss_fn)
    data = strategy.distribute_dataset(ForksWorker(says), remainder="pad", prefetch=prefetch)
    checkpoint = mirror.callbacks.Checkpoint(directory / "runs", every_epochs=0)
    trainer.fit(data, epochs=1, callbacks=checkpoint, progress=False)
    says.send(f"trained {trainer._position.step}")


WORKERS = {"SIGTERM": (TERM, -TERM), "Ctrl-C": (INT, 1), "SIGHUP": (HUP, -HUP)}


@pytest.mark.parametrize("prefetch", [0, 2], ids=["main thread", "prefetch thread"])
@pytest.mark.parametrize(("number", "status"), WORKERS.values(), ids=WORKERS)
def test_signal_to_a_forked_worker_ends_the_worker_only(tmp_path, number, status, prefetch):
    """It neither runs the handlers of the training, nor is it noticed by the training."""
    listens, says = START.Pipe(duplex=False)
    process = START.Process(target=fit_with_worker, args=(tmp_path, says, prefetch))
    process.start()
    says.close()
    try:
        with listens:
            assert listens.poll(60), "the process is silent"
            worker = listens.recv()
            time.sleep(0.5)
            os.kill(worker, number)
            assert listens.poll(20), "the worker does not end"
            assert listens.recv() == status
            assert listens.poll(60), words_in(tmp_path)
            assert listens.recv() == "trained 1"
    finally:
        process.kill()
        process.join()
    assert "Interrupted:" not in words_in(tmp_path)
    assert "SIGTERM:" not in words_in(tmp_path)
    assert not [path for path in (tmp_path / "runs").iterdir() if path.name.isdigit()]
