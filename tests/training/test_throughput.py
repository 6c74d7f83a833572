"""`mirror.callbacks.Throughput`: rates of an epoch, from a clock that the test moves."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import mirror
from mirror import callbacks
from tests.support import inside
from tests.support.clocks import FakeClock
from tests.support.messages import raises
from tests.support.strategies import EXECUTORS, cpu_strategy
from tests.support.tables import rows

N, SIZE, IN, OUT = 250, 50, 64, 32  # 5 steps
DATA = {"x": np.ones((N, IN), "float32"), "tokens": np.arange(N) % 3}
STEP_FLOPS = 2 * 2 * SIZE * IN * OUT  # of the outputs, and of the gradient of the kernel


def loss_fn(model, batch):
    return (model(batch["x"]) ** 2).sum(-1)


def weighted(model, batch):
    return mirror.Weighted(loss_fn(model, batch), batch["tokens"])


def scanned(model, batch):
    _, losses = jax.lax.scan(lambda c, x: (c, (model(x) ** 2).sum()), 0, batch["x"])
    return losses


class Moves(callbacks.Callback):
    """Moves the clock: a second for the compilation, half for each launch, three for the rest."""

    adds = ("nothing",)  # for the order of `Throughput`

    def __init__(self, clock: FakeClock):
        self._clock = clock

    def on_fit_begin(self, fit):
        self._is_first = True

    def on_step(self, fit):
        self._clock.jump(float(self._is_first))
        self._is_first = False

    def on_metrics(self, fit, step, logs):
        self._clock.jump(0.5)

    def on_epoch_end(self, fit, logs):
        self._clock.jump(3)


class Saves(callbacks.Callback):
    """Moves the clock by a second, as a checkpoint of the epoch before."""

    runs_last = True

    def __init__(self, clock: FakeClock):
        self._clock = clock

    def on_epoch_begin(self, fit):
        self._clock.jump(1)


def trained(monkeypatch, strategy, loss=loss_fn, peak=None, **options) -> mirror.History:
    clock = FakeClock()
    inside.use_clock(clock, monkeypatch)
    with strategy.scope():
        net = nnx.Linear(IN, OUT, rngs=nnx.Rngs(0))
        trainer = mirror.Trainer(net, optax.sgd(0.1), loss, **options)
    added = [Moves(clock), callbacks.Throughput(peak), Saves(clock)]
    return trainer.fit(DATA, epochs=2, batch_size=SIZE, callbacks=added, progress=False)


LAYOUTS = {"1": (1, 1), "2": (2, 1), "2-on-1": (1, 2), "2-on-2": (2, 2)}


@rows("layout", list(LAYOUTS))
def test_rates_are_of_the_steps_without_compilation(layout, monkeypatch):
    devices, per_device = LAYOUTS[layout]
    strategy = cpu_strategy(devices, replicas_per_device=per_device)
    history = trained(monkeypatch, strategy, weighted, peak=1e6)
    assert history["examples_per_sec"] == [N / 2.5] * 2
    assert history["weights_per_sec"] == [DATA["tokens"].sum() / 2.5] * 2
    np.testing.assert_allclose(history["flops_per_sec"], [STEP_FLOPS * 2] * 2, rtol=0.2)
    shares = np.array(history["flops_per_sec"]) / devices / 1e6
    np.testing.assert_allclose(history["peak_share"], shares)
    np.testing.assert_allclose(history["goodput"], [2.5 / 7.5, 5 / 14])


class SavesEpoch(callbacks.Callback):
    """Saves after the last step of an epoch, before its end."""

    def __init__(self, directory):
        self._directory = directory

    def on_step(self, fit):
        if fit.position.step == N // SIZE:
            fit.trainer.save(self._directory)


def test_epoch_that_is_resumed_at_its_end_has_no_steps(tmp_path):
    """Its rates are unknown; the share of the time in steps is known."""
    histories = []
    for added in (SavesEpoch(tmp_path), callbacks.Throughput()):
        with cpu_strategy(1).scope():
            net = nnx.Linear(IN, OUT, rngs=nnx.Rngs(0))
            trainer = mirror.Trainer(net, optax.sgd(0.1), loss_fn)
        if histories:
            trainer.restore(tmp_path)
        histories.append(
            trainer.fit(DATA, epochs=2, batch_size=SIZE, callbacks=added, progress=False)
        )
    assert histories[1]["goodput"][0] == 0 < histories[1]["goodput"][1]
    assert np.isnan(histories[1]["examples_per_sec"][0])


NO_FLOPS = {
    "a loop": {"loss": scanned},
    "pieces": {"accumulate_steps": 2},
    "groups": {"steps_per_execution": 5},
}


@rows("case", list(NO_FLOPS))
def test_loops_have_no_flops(case, monkeypatch):
    history = trained(monkeypatch, cpu_strategy(1), peak=1e6, **NO_FLOPS[case])
    launches = 1 if case == "groups" else 5
    assert history["examples_per_sec"][-1] == N / (0.5 * launches)
    assert {"flops_per_sec", "peak_share", "weights_per_sec"}.isdisjoint(history)


def test_staged_steps_and_unknown_devices(monkeypatch):
    history = trained(monkeypatch, EXECUTORS["staged"]())
    assert "flops_per_sec" not in history
    history = trained(monkeypatch, cpu_strategy(1))
    assert "flops_per_sec" in history
    assert "peak_share" not in history


def test_peak_must_be_positive():
    with raises(TypeError, names="peak_flops", values="'H100'"):
        callbacks.Throughput("H100")
    for wrong in (0, jnp.nan):
        with raises(ValueError, names="peak_flops", values=wrong):
            callbacks.Throughput(wrong)


def test_logs_and_progress_have_the_rates(capsys):
    seen: list[dict[str, float]] = []
    with cpu_strategy(2).scope():
        trainer = mirror.Trainer(nnx.Linear(IN, OUT, rngs=nnx.Rngs(0)), optax.sgd(0.1), loss_fn)
    log = callbacks.Log(lambda logs, step: seen.append(logs))
    added = [log, callbacks.Throughput()]
    trainer.fit(DATA, epochs=2, batch_size=SIZE, callbacks=added)
    assert capsys.readouterr().err.count("goodput") == len(seen) == 2
    assert all({"examples_per_sec", "goodput"} <= logs.keys() for logs in seen)
    assert all(0 < logs["goodput"] <= 1 for logs in seen)
