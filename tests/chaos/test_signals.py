"""SIGTERM and Ctrl-C are noticed wherever `fit` is, and nothing that was trained is lost.

Most tests send the signals to their own process, while `fit` waits for an event that only the
signal brings: a signal that is not noticed is a hang. One process per signal is real.
"""

import contextlib
import ctypes
import functools
import multiprocessing
import os
import signal
import sys
import threading
from pathlib import Path

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import mirror
from tests.support import inside
from tests.support.checkpoints import START
from tests.support.messages import assert_message
from tests.support.strategies import cpu_strategy
from tests.support.waiting import main_thread_waits, wait_until

CheckpointStore, files = inside.checkpoint_store(), inside.checkpoint_files()
STEPS = 6  # before the place that blocks
LIMIT = 60  # seconds: ends a test that hangs
INT, TERM, HUP = signal.SIGINT, signal.SIGTERM, signal.SIGHUP
STOP, CONT = signal.SIGSTOP, signal.SIGCONT
SAVED, INTERRUPTED, KILLED = 143, 130, -HUP


class Batches:
    """Batches of which one takes forever."""

    def __init__(self, block=None, at: int = STEPS):
        self.block, self.at = block, at

    def __iter__(self):
        for number in range(10**6 if self.block else 2):
            if number == self.at and self.block:
                self.block()
            yield {"x": np.full((4, 2), number, np.float32)}


class OnStep(mirror.callbacks.Callback):
    def __init__(self, call):
        self.call = call

    def on_step(self, fit):
        if fit.position.step == STEPS:
            self.call()


def loss_fn(model, batch):
    return optax.l2_loss(model(batch["x"]))[:, 0]


def trainer_of(strategy, loss=loss_fn) -> mirror.Trainer:
    with strategy.scope():
        return mirror.Trainer(nnx.Linear(2, 1, rngs=nnx.Rngs(0)), optax.adam(1e-3), loss)


def fit_at(trainer, place: str, block, *callbacks):
    """Trains, and calls a function at a place."""
    data, options = Batches(), {"epochs": 10**6}
    others = []
    if place == "source":
        data = Batches(block)
    elif place == "source without prefetch":
        data = trainer.strategy.distribute_dataset(Batches(block), remainder="pad", prefetch=0)
    elif place == "validation":
        options["validation_data"] = Batches(block, at=0)
        data, options["steps_per_epoch"] = Batches(lambda: None), STEPS
    elif place in ("callback", "step"):
        others = [OnStep(block)]
    trainer.fit(data, callbacks=[*callbacks, *others], progress=False, **options)


# In this process


class Block:
    """Blocks once, in any thread, until it is released; another thread then does something."""

    def __init__(self, then):
        self.then, self.began, self.released = then, threading.Event(), threading.Event()

    def __call__(self) -> None:
        self.began.set()
        assert self.released.wait(LIMIT), "the signal was not noticed"

    def _run(self) -> None:
        assert self.began.wait(LIMIT), "the place was not reached"
        self.then()

    def __enter__(self):
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        return self

    def __exit__(self, *_):
        self.released.set()
        self.began.set()
        self._thread.join()


def send(number: int) -> None:
    os.kill(os.getpid(), number)


def send_after_the_steps(trainer, number: int) -> None:
    wait_until(lambda: trainer._position.step == STEPS and main_thread_waits())
    send(number)


@pytest.fixture(scope="module")
def compiled():
    """A trainer whose programs are compiled, and its first state."""
    trainer = trainer_of(cpu_strategy(2))
    state = jax.tree.map(np.asarray, nnx.state((trainer.model, trainer.optimizer)))
    trainer.fit(Batches(), 1, validation_data=Batches(), progress=False)
    return trainer, state


@pytest.fixture
def untrained(compiled, tmp_path):
    """Returns a function that gives the trainer as it was at first."""
    trainer, _ = compiled
    first = trainer_of(cpu_strategy(1))
    first.save(tmp_path / "first")

    def again():
        trainer.restore(tmp_path / "first")
        return trainer

    return again


PLACES = ["source", "source without prefetch", "validation", "callback"]


def test_sigterm_saves_soon(untrained, tmp_path, subtests, capfd):
    for place in PLACES:
        directory = tmp_path / place
        trainer = untrained()
        then = functools.partial(send_after_the_steps, trainer, TERM)
        with subtests.test(msg=place), Block(then) as block:
            checkpoint = mirror.callbacks.Checkpoint(directory, every_epochs=0)
            with pytest.raises(SystemExit) as caught:
                fit_at(trainer, place, block, checkpoint)
            assert caught.value.code == SAVED
            assert capfd.readouterr().err == f"SIGTERM: step {STEPS} is saved in {directory}.\n"
            assert mirror.load_checkpoint(directory).step == STEPS
            assert signal.getsignal(TERM) is signal.SIG_DFL


def test_sigterm_at_the_end_of_fit_saves(untrained, tmp_path, subtests, capfd, monkeypatch):
    """While the last checkpoint is written, and when there is nothing to write."""
    places = {(files, "write"): 1, (CheckpointStore, "wait"): 0}
    for (owner, name), every_epochs in places.items():
        directory, call = tmp_path / name, getattr(owner, name)

        def send_first(*args, call=call):
            if signal.getsignal(TERM) is not signal.SIG_DFL:
                send(TERM)
            call(*args)

        with subtests.test(msg=name), monkeypatch.context() as patch:
            trainer = untrained()
            patch.setattr(owner, name, send_first)
            checkpoint = mirror.callbacks.Checkpoint(directory, every_epochs=every_epochs)
            with pytest.raises(SystemExit) as caught:
                trainer.fit(Batches(), 1, callbacks=checkpoint, progress=False)
            assert caught.value.code == SAVED
            assert capfd.readouterr().err == f"SIGTERM: step 2 is saved in {directory}.\n"
            assert mirror.load_checkpoint(directory).step == 2
            assert signal.getsignal(TERM) is signal.SIG_DFL


def test_interrupt_ends_fit_soon(untrained, subtests):
    for place in PLACES:
        trainer = untrained()
        then = functools.partial(send_after_the_steps, trainer, INT)
        with subtests.test(msg=place), Block(then) as block:
            with pytest.raises(KeyboardInterrupt):
                fit_at(trainer, place, block)
            assert trainer._position.step == STEPS


class Timers:
    """Timers that run when a test says so."""

    def __init__(self) -> None:
        self.calls: list = []

    def __call__(self, secs, function, arguments=()):
        assert 0 < secs < 2
        timer = threading.Thread(target=function, args=arguments)  # for its attributes
        timer.start = lambda: self.calls.append(functools.partial(function, *arguments))
        return timer

    def run(self) -> None:
        while self.calls:
            self.calls.pop()()


@pytest.fixture
def timers(monkeypatch) -> Timers:
    timers = Timers()
    monkeypatch.setattr(threading, "Timer", timers)
    return timers


def test_first_interrupt_says_how_to_stop_at_once(timers, capfd):
    def press_twice():
        send(INT)
        wait_until(lambda: timers.calls)
        timers.run()
        send(INT)

    with Block(press_twice) as block:

        def loss(model, batch):
            block()
            return loss_fn(model, batch)

        trainer = trainer_of(cpu_strategy(2), loss)
        with pytest.raises(KeyboardInterrupt):
            fit_at(trainer, "compile", None)
    assert trainer._position.step == 0
    words = capfd.readouterr().err
    assert words.count("Interrupted") == 1
    assert_message(words, fix="Press Ctrl-C again to stop at once.")


def test_interrupt_that_stops_soon_prints_nothing(untrained, timers, capfd):
    with Block(lambda: send(INT)) as block, pytest.raises(KeyboardInterrupt):
        fit_at(untrained(), "source", block)
    timers.run()
    assert capfd.readouterr().err == ""


@pytest.mark.slow
def test_interrupts_in_a_checkpoint_complete_it(untrained, tmp_path, subtests, capfd, monkeypatch):
    write = files.write

    for count in (1, 2, 8):

        def press(count=count):
            for _ in range(count):
                wait_until(lambda: main_thread_waits("complete"))
                send(INT)
            wait_until(lambda: "the checkpoint for step 6" in words())
            block.released.set()

        said: list[str] = []

        def words(said=said) -> str:
            said.append(capfd.readouterr().err)
            return "".join(said)

        def blocks(path, *contents):
            if path.stem == f"step-{STEPS}":
                block()
            write(path, *contents)

        with subtests.test(msg=str(count)), Block(press) as block:
            monkeypatch.setattr(files, "write", blocks)
            checkpoint = mirror.callbacks.Checkpoint(
                tmp_path / str(count), every_epochs=0, every_steps=2, asynchronous=False
            )
            with pytest.raises(KeyboardInterrupt):
                fit_at(untrained(), "", None, checkpoint)
            assert mirror.load_checkpoint(tmp_path / str(count)).step == STEPS
            assert_message(words(), names="the checkpoint for step 6", fix="Ctrl-\\")


# In processes of their own


def fit_in_process(place: str, directory: Path, grace_secs: float, every_steps: int, says) -> None:
    jax.config.update("jax_platforms", "cpu")
    mirror.config.set_num_cpu_devices(2)
    sys.stderr = (directory / "stderr").open("w")
    os.dup2(sys.stderr.fileno(), 2)
    loss, block = loss_fn, functools.partial(blocked, says)
    if place == "step":  # which goes on
        block = functools.partial(says.send, "blocked")
    elif place.startswith("compile"):
        block = functools.partial(blocked, says, in_native_code="native" in place)

        def loss(model, batch):
            block()
            return loss_fn(model, batch)

    trainer = trainer_of(mirror.MirroredStrategy(), loss)
    checkpoint = mirror.callbacks.Checkpoint(
        directory / "runs",
        every_epochs=0,
        every_steps=every_steps,
        grace_secs=grace_secs,
        asynchronous=not every_steps,
    )
    try:
        fit_at(trainer, place, block, checkpoint)
    except KeyboardInterrupt:
        signal.signal(INT, signal.SIG_IGN)
        says.send(f"interrupted after {trainer._position.step}")
        sys.exit(INTERRUPTED)


def blocked(says, in_native_code: bool = False) -> None:
    """Tells that it blocks, and then blocks forever."""
    if in_native_code:  # as in a compiler: no handler runs in this thread
        library, begins = ctypes.CDLL(None), threading.Event()

        def tell() -> None:
            begins.wait()
            says.send("blocked")

        sys.setswitchinterval(1000)  # the thread runs as soon as native code runs in this one
        threading.Thread(target=tell).start()
        signal.pthread_sigmask(signal.SIG_BLOCK, {INT, TERM})
        begins.set()
        library.sleep(1000)
    says.send("blocked")
    threading.Event().wait()


@contextlib.contextmanager
def started(target, *arguments):
    """Yields a process, and the connection that it speaks through."""
    listens, says = START.Pipe(duplex=False)
    process = START.Process(target=target, args=(*arguments, says))
    process.start()
    says.close()
    try:
        with listens:
            yield process, listens
    finally:
        process.kill()
        process.join()


def heard(listens, directory: Path | None = None) -> object:
    assert listens.poll(LIMIT), (
        "the process is silent" if directory is None else words_in(directory)
    )
    return listens.recv()


def blocked_at(place: str, directory: Path, *, grace_secs: float = 25.0, every_steps: int = 0):
    return started(fit_in_process, place, directory, grace_secs, every_steps)


def ended_at(place: str, directory: Path, *numbers: int, gap_secs: float = 0.05, **options):
    """Sends signals to a process that blocks; returns its status and its words."""
    with blocked_at(place, directory, **options) as (process, listens):
        assert heard(listens) == "blocked"
        for number in numbers:
            with contextlib.suppress(ProcessLookupError):  # it has ended
                os.kill(process.pid, number)
            process.join(gap_secs)
        process.join(LIMIT)
        status = process.exitcode
    return status, words_in(directory)


def words_in(directory: Path) -> str:
    return (directory / "stderr").read_text()


@pytest.mark.slow
def test_sigterm_ends_a_process_that_compiles(tmp_path):
    """Within the grace period, and it says what was not done."""
    status, words = ended_at("compile in native code", tmp_path, TERM, grace_secs=2.0)
    assert status == SAVED
    assert_message(words, names="SIGTERM", values=2, fix=["no checkpoint", "none", "grace_secs"])


SEQUENCES: dict[str, tuple[str, list[int], set[int]]] = {
    "SIGTERM in a step": ("step", [TERM], {SAVED}),
    "Ctrl-C in a step": ("step", [INT], {INTERRUPTED}),
    "SIGHUP in a step": ("step", [HUP], {KILLED}),
    "SIGTERM while stopped": ("source", [STOP, TERM, CONT], {SAVED}),
    "Ctrl-C while stopped": ("validation", [STOP, INT, CONT], {INTERRUPTED}),
}
MORE_SEQUENCES: dict[str, tuple[str, list[int], set[int]]] = {
    # One that comes when the checkpoint has been written ends the process as by default.
    "SIGTERM twice in the source": ("source", [TERM] * 2, {SAVED, -TERM}),
    "SIGTERM eight times in the source": ("source", [TERM] * 8, {SAVED, -TERM}),
    "SIGTERM eight times in a step": ("step", [TERM] * 8, {SAVED, -TERM}),
    "SIGTERM eight times in a callback": ("callback", [TERM] * 8, {SAVED, -TERM}),
    # Each but the first raises wherever the process is, also while it ends.
    "Ctrl-C twice in a step": ("step", [INT] * 2, {INTERRUPTED, 1}),
    "Ctrl-C eight times in the source": ("source", [INT] * 8, {INTERRUPTED, 1}),
    "Ctrl-C eight times in a step": ("step", [INT] * 8, {INTERRUPTED, 1}),
    "Ctrl-C eight times in validation": ("validation", [INT] * 8, {INTERRUPTED, 1}),
    "Ctrl-C, then SIGTERM in a step": ("step", [INT, TERM], {INTERRUPTED, SAVED}),
    "SIGTERM, then Ctrl-C in the source": ("source", [TERM, INT], {INTERRUPTED, SAVED, 1}),
    "SIGHUP in the source": ("source", [HUP], {KILLED}),
    "SIGHUP in a callback": ("callback", [HUP], {KILLED}),
    "stopped and continued in a step": ("step", [STOP, CONT, TERM], {SAVED}),
}


@pytest.mark.parametrize(
    "rows",
    [
        pytest.param(SEQUENCES, id="one", marks=pytest.mark.slow),
        pytest.param(MORE_SEQUENCES, id="several", marks=pytest.mark.nightly),
    ],
)
def test_signals_end_the_process_and_lose_nothing(tmp_path_factory, rows, subtests):
    for case, (place, numbers, wanted) in rows.items():
        with subtests.test(msg=case):
            directory = tmp_path_factory.mktemp("row")
            status, words = ended_at(place, directory, *numbers, every_steps=2)
            assert status in wanted, words
            found = mirror.load_checkpoint(directory / "runs")
            if place == "source":  # it blocks while earlier batches are on their way
                assert found.step >= 2
            else:
                assert found.step >= (STEPS if status == SAVED else STEPS - 2)
            assert found.position["step"] == found.step


def end_in_save(directory: Path, says) -> None:
    """Ends while a save waits for a disk that does not answer."""
    store, has_begun = CheckpointStore(directory), threading.Event()
    store.save(1, {"x": np.ones(4)}, {})
    store.wait()

    def never_answers(descriptor):
        has_begun.set()
        threading.Event().wait()

    os.fsync = never_answers
    store.save(2, {"x": np.ones(4)}, {})
    says.send(has_begun.wait(900))


def test_process_that_ends_in_a_save_does_not_hang(tmp_path):
    with started(end_in_save, tmp_path) as (process, listens):
        assert heard(listens), "the save has not begun"
        process.join(LIMIT)
        assert process.exitcode == 0
    assert mirror.load_checkpoint(tmp_path).step == 1


@pytest.mark.slow
def test_interrupt_is_acknowledged_while_native_code_runs(tmp_path):
    """No handler runs then, and a second Ctrl-C could not stop it, so that is not promised."""
    with blocked_at("compile in native code", tmp_path) as (process, listens):
        assert heard(listens) == "blocked"
        os.kill(process.pid, INT)
        wait_until(lambda: "Interrupted" in words_in(tmp_path))
        assert_message(words_in(tmp_path), names="native code", fix="Ctrl-\\")
        assert "Ctrl-C" not in words_in(tmp_path)
        os.kill(process.pid, INT)
        process.join(1)
        assert words_in(tmp_path).count("Interrupted") == 1


class ForksWorker:
    """Batches from a source that forks a worker, as PyTorch's DataLoader does."""

    def __init__(self, says):
        self.says = says

    def wait(self) -> None:
        self.says.send(os.getpid())
        threading.Event().wait()

    def __iter__(self):
        worker = multiprocessing.get_context("fork").Process(target=self.wait)
        worker.start()
        worker.join()
        self.says.send(worker.exitcode)
        yield {"x": np.ones((4, 2), np.float32)}


def fit_with_worker(directory: Path, prefetch: int, says) -> None:
    jax.config.update("jax_platforms", "cpu")
    mirror.config.set_num_cpu_devices(2)
    sys.stderr = (directory / "stderr").open("w")
    os.dup2(sys.stderr.fileno(), 2)
    trainer = trainer_of(mirror.MirroredStrategy())
    distribute = trainer.strategy.distribute_dataset
    data = distribute(ForksWorker(says), remainder="pad", prefetch=prefetch)
    checkpoint = mirror.callbacks.Checkpoint(directory / "runs", every_epochs=0)
    trainer.fit(data, epochs=1, callbacks=checkpoint, progress=False)
    says.send(f"trained {trainer._position.step}")


WORKERS = {  # the signal, the status of the worker, and `prefetch`: with 2, a thread forks
    "SIGTERM, prefetch thread": (TERM, -TERM, 2),
    "Ctrl-C, main thread": (INT, 1, 0),
}
MORE_WORKERS = {
    "SIGTERM, main thread": (TERM, -TERM, 0),
    "Ctrl-C, prefetch thread": (INT, 1, 2),
    "SIGHUP, main thread": (HUP, -HUP, 0),
    "SIGHUP, prefetch thread": (HUP, -HUP, 2),
}


@pytest.mark.parametrize(
    "rows",
    [
        pytest.param(WORKERS, id="some", marks=pytest.mark.slow),
        pytest.param(MORE_WORKERS, id="more", marks=pytest.mark.nightly),
    ],
)
def test_signal_to_a_forked_worker_ends_the_worker_only(tmp_path_factory, rows, subtests):
    """It neither runs the handlers of the training, nor is it noticed by the training."""
    for case, (number, status, prefetch) in rows.items():
        directory = tmp_path_factory.mktemp("row")
        with (
            subtests.test(msg=case),
            started(fit_with_worker, directory, prefetch) as (_, listens),
        ):
            os.kill(heard(listens), number)
            assert heard(listens) == status
            assert heard(listens, directory) == "trained 1"
            assert "Interrupted:" not in words_in(directory)
            assert "SIGTERM:" not in words_in(directory)
            assert not list((directory / "runs").glob("step-*"))
