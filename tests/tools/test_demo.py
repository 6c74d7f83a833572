"""`mirror demo` as users run it: in its own process."""

import gc
import json
import pathlib
import re
import signal
import subprocess
import sys
import tempfile

import pytest

import mirror
from mirror import cli
from tests.support import fresh, inside
from tests.support.messages import assert_message
from tests.support.tables import rows

run = inside.demo_run()  # here, since scikit-learn sets environment variables
interrupts = inside.deferred_interrupts()

TIMEOUT_SECS = 240


def environment(**more: str) -> dict[str, str]:
    return {**fresh.INHERITED, "JAX_PLATFORMS": "cpu", **more}


def demo(*options: str, **variables: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "mirror", "demo", *options],
        cwd=fresh.ROOT,
        env=environment(**variables),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECS,
    )


def accuracy(output: str) -> float:
    found = re.search(r"accuracy: (\d+\.\d)% \((\d+)\D+360\)", output)
    assert found, output
    percent, correct = float(found[1]), int(found[2])
    assert percent == round(100 * correct / 360, 1)
    return percent


def assert_passed(output: str, num_replicas: int) -> None:
    """Checks the first line, and the two that say whether a check has passed."""
    assert_message(output.splitlines()[0], names="MirroredStrategy", values=num_replicas)
    assert re.findall(r": (yes|no)\b", output) == ["yes", "yes"]


def with_curves() -> tuple[subprocess.CompletedProcess, bytes]:
    """A run that plots, and its plot."""
    with tempfile.TemporaryDirectory() as folder:
        picture = pathlib.Path(folder, "curves.png")
        done = demo("--plot", str(picture))
        return done, picture.read_bytes() if picture.exists() else b""


def interrupted() -> tuple[int, str]:
    """The exit status and the standard error of a run that Ctrl-C ends."""
    with subprocess.Popen(
        [sys.executable, "-u", "-m", "mirror", "demo", "--epochs", "1000"],
        cwd=fresh.ROOT,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=TIMEOUT_SECS)
    return process.returncode, errors


ODD = ["--batch-size", "50", "--epochs", "2"]
AHEAD = {
    "digits": with_curves,
    "vmap": lambda: demo("--devices", "1", "--replicas-per-device", "3", *ODD),
    "staged": lambda: demo("--executor", "staged", *ODD, JAX_NUM_CPU_DEVICES="3"),
    "interrupted": interrupted,
}


@pytest.mark.slow
def test_demo_learns_the_digits_and_plots_the_curves(ahead):
    done, curves = ahead[__name__]["digits"].result()
    assert done.returncode == 0, done.stderr
    assert_passed(done.stdout, 4)
    assert accuracy(done.stdout) >= 97
    assert re.search(r"epoch 15/15: loss 0\.0\d+, accuracy \d", done.stderr)
    assert "Warning" not in done.stderr
    assert curves.startswith(b"\x89PNG")


@pytest.mark.nightly
@pytest.mark.parametrize("executor", ["vmap", "staged"])
def test_demo_trains_with_batches_that_do_not_divide(ahead, executor):
    done = ahead[__name__][executor].result()
    assert done.returncode == 0, done.stderr
    assert_passed(done.stdout, 3)
    assert accuracy(done.stdout) >= 90


@pytest.mark.nightly
def test_ctrl_c_ends_the_demo_cleanly(ahead):
    status, errors = ahead[__name__]["interrupted"].result()
    assert status == 130
    assert_message(errors.splitlines()[-1], fix="Interrupted")
    assert "Traceback" not in errors


def test_ctrl_c_waits_for_a_safe_point():
    before = signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises(KeyboardInterrupt), interrupts.DeferredInterrupts():  # noqa: PT012  at the end
            interrupts.check()
            signal.raise_signal(signal.SIGINT)
            with pytest.raises(KeyboardInterrupt):
                interrupts.check()
            assert signal.getsignal(signal.SIGINT) is signal.default_int_handler  # a second one
        assert signal.getsignal(signal.SIGINT) is before
        interrupts.check()
    finally:
        signal.signal(signal.SIGINT, before)


def test_alarm_leaves_the_ctrl_c_handler_unchanged():
    """The handler of the alarm may raise anywhere, also between entering and leaving."""

    class AlarmError(Exception):
        pass

    fired: list[int] = []

    def on_alarm(number, frame):
        fired.append(number)
        raise AlarmError

    before = signal.signal(signal.SIGALRM, on_alarm)
    gc.disable()  # JAX has a callback in the garbage collector, where Python drops exceptions

    def enter_and_leave():  # a function, see tests/base/test_loops.py
        while not fired:
            with interrupts.DeferredInterrupts():
                pass

    def has_raised(secs):
        """Whether the one alarm raised its exception; Python may drop it."""
        fired.clear()
        try:
            signal.setitimer(signal.ITIMER_REAL, secs)
            enter_and_leave()
        except AlarmError:
            return True
        return False

    try:
        for i in range(600):
            while not has_raised((10 + i % 60) * 1e-6):
                pass
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
            interrupts.check()
            with interrupts.DeferredInterrupts():
                assert signal.getsignal(signal.SIGINT) is interrupts._defer
            assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        gc.enable()
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_demo_keeps_the_users_forced_devices(monkeypatch, capsys):
    wanted = {"names": "--devices", "values": [99, 8], "fix": "jax_num_cpu_devices=8"}
    assert cli.main(["demo", "--devices", "99"]) == 2
    assert_message(capsys.readouterr().err, **wanted)
    flag = "--xla_force_host_platform_device_count=8"
    monkeypatch.setenv("XLA_FLAGS", f"--xla_some_other=1 {flag}")
    assert cli.main(["demo", "--devices", "99"]) == 2
    assert_message(capsys.readouterr().err, **wanted)  # it wins in JAX too


@rows(
    "option, value, wanted",
    [
        ("--devices", "0", ["'0'"]),
        ("--devices", "99999", ["'99999'", 1024]),
        ("--replicas-per-device", "1000000", ["'1000000'", 1024]),
        ("--epochs", "some", ["'some'"]),
        ("--seed", "-1", ["'-1'", 0, 2**32 - 1]),
        ("--executor", "spmd", ["'spmd'"]),
    ],
)
def test_bad_options_are_named(option, value, wanted, capsys):
    with pytest.raises(SystemExit, match="2"):
        cli.main(["demo", option, value])
    message = capsys.readouterr().err.partition("error: ")[2]
    assert_message(message, names=option, values=wanted)


@rows(
    "option, value, wanted",
    [
        ("--devices", "99", {"values": [99, 8, "CPU"]}),
        (
            *("--plot", "curves.xyz"),
            {"values": ["'curves.xyz'", "avif", "eps"], "fix": "--plot curves.png"},
        ),
        ("--plot", "/no/such/folder/curves.png", {"values": "/no/such/folder"}),
        ("--plot", "tests.png", {"values": "tests.png"}),
        ("--plot", "/proc/x.png", {"values": "/proc/x.png", "fix": "directory"}),
    ],
)
def test_impossible_options_fail_before_training(
    option, value, wanted, capsys, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tests.png").mkdir(exist_ok=True)
    assert cli.main(["demo", option, value]) == 2
    message = capsys.readouterr().err.partition("error: ")[2]
    assert_message(message, names=f"{option} {value}", **wanted)


def test_missing_packages_are_named_with_the_line_that_installs_them(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    assert cli.main(["demo"]) == 2
    errors = capsys.readouterr().err
    assert_message(errors, names="sklearn", fix='pip install ".[demo]"')


@pytest.mark.slow
def test_failed_checks_set_the_exit_status(monkeypatch, capsys):
    def diverged(*args, **kwargs):
        raise mirror.ReplicaDivergenceError("model.kernel differs")

    def mismatched(*args, **kwargs):
        raise mirror.VerifyError("model.bias is off")

    monkeypatch.setattr(mirror.Strategy, "check_mirrored", diverged)
    monkeypatch.setattr(mirror.Trainer, "verify", mismatched)
    assert cli.main(["demo", "--epochs", "1", "--devices", "1", "--json"]) == 1
    output = capsys.readouterr()
    assert ": no\nmodel.kernel differs" in output.err
    assert ": no\nmodel.bias is off" in output.err
    found = json.loads(output.out)  # and nothing else
    assert found["devices"] == ["/device:CPU:0"]
    assert (found["passed"], found["replicas_equal"]) == (False, False)
    assert found["same_step_as_one_device"] == {"same": False, "largest": None, "rtol": None}
    assert found["history"]["metrics"]["val_accuracy"] == [found["test_accuracy"]]


@rows("equal", [True, False])
@rows("same", [True, False])
def test_demo_succeeds_when_both_checks_pass(equal, same):
    verified = {"same": same, "largest": 1e-7, "rtol": 1e-5}
    outcome = run.Outcome(("/device:CPU:0",), 0.98, 3.0, mirror.History(), equal, verified)
    assert outcome.passed == outcome.to_dict()["passed"] == (equal and same)


def test_version_option_prints_the_version(capsys):
    with pytest.raises(SystemExit, match="0"):
        cli.main(["--version"])
    assert capsys.readouterr().out == f"mirror {mirror.__version__}\n"


@pytest.mark.slow
def test_importing_mirror_does_not_import_the_demo():
    code = "import mirror, sys; print([m for m in sys.modules if '_src.tools.demo' in m])"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"
