"""`mirror bench`: measurements, output and rejected arguments."""

import functools
import itertools
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
import types

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import mirror
from mirror import cli
from tests.support import fresh, inside
from tests.support.inside import builtin_step, quartiles
from tests.support.messages import assert_message, raises
from tests.support.strategies import cpu_strategy
from tests.support.tables import rows

bench_module, workload = inside.bench()
workload_of = workload.workload_of
_, OptionError = inside.launcher()

_, reports, _ = inside.memory_estimates()
EXPLAINED = types.SimpleNamespace(
    bound="compute",
    verdict="compute-bound: good.",
    memory=reports.MemoryReport("it", ("/device:CPU:0",), 1, "cpu", False, (), 0, 0),
)
OWN = (fresh.PROGRAMS / "bench_steps.py").read_text()


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A user's file with steps."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    file = tmp_path / "train.py"
    file.write_text(OWN)
    yield str(file)
    for name in ("mirror_bench_train", "train"):
        sys.modules.pop(name, None)


@pytest.fixture
def unexplained(monkeypatch):
    """Replaces `explain`, which other tests cover and which takes time."""
    monkeypatch.setattr(mirror.Strategy, "explain", lambda *args, **kwargs: EXPLAINED)


def interrupted() -> tuple[int, str, list[str]]:
    """Runs a new process until Ctrl-C ends it; returns its status, its output, and its log."""
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder, "train.py")
        file.write_text(OWN)
        return _interrupted(f"{file}:bench")


def _interrupted(step: str) -> tuple[int, str, list[str]]:
    with subprocess.Popen(
        [sys.executable, "-u", "-m", "mirror", "bench", step, "--steps", "1000000"],
        cwd=fresh.ROOT,
        env={**fresh.INHERITED, "JAX_PLATFORMS": "cpu"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        said = []
        for line in iter(process.stderr.readline, ""):  # "" at its end
            said.append(line)
            if _compiles_for_four(line):
                break
        said.append(process.stderr.readline())  # the line that starts the measurement
        process.send_signal(signal.SIGINT)
        output, rest = process.communicate(timeout=900)
    return process.returncode, output, [*said, *rest.splitlines(keepends=True)]


def _compiles_for_four(line: str) -> bool:
    return "train.py:bench" in line and re.search(r"\b4\b", line) is not None


AHEAD = {"interrupted": interrupted}


def bench(*options: str) -> int:
    return cli.main(["bench", *options])


@pytest.mark.slow
def test_bench_forces_host_devices_and_ctrl_c_ends_it_cleanly(ahead):
    status, output, said = ahead[__name__]["interrupted"].result()
    assert (status, output) == (130, "")
    assert any(map(_compiles_for_four, said))
    assert_message(said[-1], fix="Interrupted")
    assert "Traceback" not in "".join(said)


@pytest.mark.slow
def test_users_step_is_measured_explained_and_plotted(own, capsys, tmp_path):
    picture = tmp_path / "scaling.png"
    assert bench(f"{own}:bench", "--devices", "2,1,2", "--steps", "3", "--plot", str(picture)) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    heading, table, notes, memory = capsys.readouterr().out.strip().split("\n\n")
    assert_message(heading, names=[f"{own}:bench", "strong"], values=[8, 3])
    rows = [re.split(r"  +", line) for line in table.splitlines()]
    assert {len(row) for row in rows} == {7}
    assert [row[0] for row in rows[1:]] == ["1", "2"]
    assert rows[1][4:6] == ["1.00", "100%"]
    assert all(row[6].endswith("-bound") for row in rows[1:])
    verdict, cores = notes.splitlines()
    assert_message(verdict, values=2)
    assert_message(cores, values=os.cpu_count())
    title, columns, *rows = [re.split(r"  +", line) for line in memory.splitlines()]
    assert_message(" ".join(title), fix="bytes")
    assert columns[:2] == ["devices", "parameters"]
    assert [row[:2] for row in rows] == [["1", "32 bytes"], ["2", "32 bytes"]]
    assert [row[columns.index("batch")] for row in rows] == ["96 bytes", "48 bytes"]


@pytest.mark.parametrize(
    ("name", "weak", "counts"),
    [("mlp", False, [1, 2]), pytest.param("cnn", True, [2], marks=pytest.mark.nightly)],
)
@pytest.mark.slow
def test_named_steps_are_measured(name, weak, counts, unexplained, capsys):
    options = [
        "--devices",
        ",".join(map(str, counts)),
        "--steps",
        "2",
        "--batch-size",
        "8",
        "--json",
    ]
    assert bench(name, *options, *(["--weak"] if weak else [])) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["step"] == name
    assert found["scaling"] == ("weak" if weak else "strong")
    assert [len(row["devices"]) for row in found["rows"]] == counts
    assert [row["num_examples"] for row in found["rows"]] == [
        8 * (n if weak else 1) for n in counts
    ]
    for row in found["rows"]:
        low, high = row["ms_quartiles"]
        assert 0 < low <= row["ms"] <= high
        assert row["examples_per_sec"] == pytest.approx(row["num_examples"] / row["ms"] * 1e3)
        assert row["efficiency"] == pytest.approx(row["speedup"] / len(row["devices"]) * counts[0])
        assert row["verdict"] == "compute-bound: good."


def test_named_steps_train_as_on_one_device(two):
    # `mirror doctor` verifies the cnn.
    assert two.verify(*builtin_step("mlp", two, 8)).largest <= 1e-5


@pytest.mark.parametrize("name", ["bench", "each"])
def test_weak_scaling_keeps_the_batch_per_device(name, own, unexplained, capsys):
    assert bench(f"{own}:{name}", "--devices", "1,4", "--steps", "1", "--weak", "--json") == 0
    sizes = [row["num_examples"] for row in json.loads(capsys.readouterr().out)["rows"]]
    assert sizes[1] == 4 * sizes[0] > 0


def test_batch_is_repeated_as_often_as_requested():
    data = workload.RepeatedBatches([{"x": np.arange(2)}, {"x": np.arange(3)}], 2)
    for _ in range(2):
        assert [list(batch["x"]) for batch in data] == [[0, 1, 0, 1], [0, 1, 2, 0, 1, 2]]


def test_step_without_a_batch_is_measured_by_time_only(own, unexplained, capsys):
    assert bench(f"{own}:alike", "--devices", "2", "--steps", "1") == 0
    heading, table, *_ = capsys.readouterr().out.split("\n\n")
    assert_message(heading, names=[f"{own}:alike", "strong"], values=1, fix="batch")
    assert_message(table.splitlines()[0], values=2)  # against which count of devices
    assert re.split(r"  +", table.splitlines()[1])[3] == "unknown"


def test_trainer_is_measured(own, unexplained, capsys):
    assert bench(f"{own}:training", "--devices", "2", "--steps", "1", "--weak") == 0
    heading, *_ = capsys.readouterr().out.split("\n\n")
    assert_message(heading, names=[f"{own}:training", "weak"], values=8)


def test_step_of_a_trainer_has_its_loss_scale():
    strategy = cpu_strategy(2)

    def make(strategy):
        model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
        trainer = mirror.Trainer(model, optax.sgd(0.1), "mse", precision="float16")
        return trainer, [(np.ones((4, 2), np.float32), np.ones((4, 1), np.float32))]

    step, args, data = workload._custom("it", make, strategy, False)
    strategy.run(step, (*args, *data))
    (scale,) = (each for each in args if isinstance(each, mirror.LossScale))
    assert scale.finite_steps[...] == 1


def test_module_in_the_working_directory_is_found(own, unexplained, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert bench("train:distributed", "--devices", "2", "--steps", "1") == 0


def test_default_device_counts_are_powers_of_two_and_all_gpus(monkeypatch):
    devices = tuple(jax.devices("cpu"))
    assert bench_module._devices(None) == (devices, (1, 2, 4))
    monkeypatch.setattr(bench_module.backend, "type_of", lambda device: "GPU")
    assert bench_module._devices(None) == (devices, (1, 2, 4, 8))
    monkeypatch.setattr(bench_module.backend, "default_devices", lambda: devices[:6])
    assert bench_module._devices(None) == (devices[:6], (1, 2, 4, 6))


def test_missing_devices_are_named(monkeypatch):
    found = [8, "CPU"]
    with raises(OptionError, names="--devices 1,9", values=found, fix="jax_num_cpu_devices=8"):
        bench_module._devices((1, 9))
    monkeypatch.setattr(bench_module.backend, "type_of", lambda device: "GPU")
    with raises(OptionError, names="--devices 9", values=[8, "GPU"], fix="JAX_PLATFORMS=cpu"):
        bench_module._devices((9,))


REFUSED = {
    "no step": (["mpl"], {"names": "'mpl'", "fix": ["mlp", "cnn", "module:function"]}),
    "no module": (["no_such_module:f"], {"names": "no_such_module", "fix": "module:function"}),
    "no file": (["no_such.py:f"], {"names": "no_such.py", "fix": "path/to/file.py:function"}),
    "no function": (
        [":other"],
        {"names": ["other", "step", "model", "bench"], "fix": "(step, args)"},
    ),
    "the step itself": (
        [":step"],
        {"names": ["(model, batch)", "(strategy)"], "fix": "(step, args)"},
    ),
    "not callable": ([":number"], {"names": "number", "fix": "(step, args)"}),
    "nothing": (
        [":nothing"],
        {
            "names": ":nothing",
            "values": ["None", "NoneType"],
            "fix": ["(step, args)", "(step, args, data)"],
        },
    ),
    "no arguments": (
        [":bare"],
        {"names": ":bare", "values": [3, "int"], "fix": "(model, optimizer)"},
    ),
    "silent": ([":silent"], {"fix": "loss"}),
    "batch size": (
        [":bench", "--batch-size", "4"],
        {"names": ["--batch-size", ":bench"], "values": 4, "fix": ["mlp", "cnn"]},
    ),
    "odd": (
        ["mlp", "--devices", "3", "--batch-size", "4"],
        {"values": [4, 3], "fix": ["--batch-size 6", "--weak"]},
    ),
    "other batch": ([":each", "--devices", "1,2"], {"values": [4, 1, 8, 2], "fix": "--weak"}),
    "no batch": ([":alike", "--weak"], {"names": "--weak", "fix": "(step, args, data)"}),
    "indivisible batch": (
        [":distributed", "--weak", "--devices", "1,2"],
        {"values": [8, 1, 4, 2], "fix": ["(step, args, data)", "strategy.num_replicas_in_sync"]},
    ),
    "picture": (
        ["mlp", "--plot", "a.xyz"],
        {"names": ["--plot", "'a.xyz'"], "fix": "--plot a.png"},
    ),
    "too many": (["mlp", "--devices", "9"], {"names": "--devices", "values": [9, 8, "CPU"]}),
}


@rows("case", list(REFUSED))
def test_bench_rejects_steps_it_cannot_measure(case, own, unexplained, capsys):
    (step, *options), wanted = REFUSED[case]
    step = own + step if step.startswith(":") else step
    assert bench(step, *options) == 2
    said = capsys.readouterr().err
    _, found, message = said.partition("mirror bench: error: ")
    assert found
    assert_message(message, **wanted)


@pytest.mark.parametrize(
    ("name", "error"), [("broken", "KeyError"), ("breaks", "ZeroDivisionError")]
)
def test_failing_step_exits_with_status_1_and_its_traceback(name, error, own, capsys):
    assert bench(f"{own}:{name}", "--devices", "1") == 1
    said = capsys.readouterr().err
    assert "Traceback" in said
    assert_message(said.splitlines()[-1], names=[f"{own}:{name}", error])


def test_import_error_in_the_users_module_is_reported(own, tmp_path, capsys):
    (tmp_path / "train.py").write_text("import no_such_package")
    assert bench(f"{own}:bench") == 1
    assert "ModuleNotFoundError: No module named 'no_such_package'" in capsys.readouterr().err
    sys.path.insert(0, str(tmp_path))
    with pytest.raises(ModuleNotFoundError, match="no_such_package"):
        workload_of("train:bench", None, False)


def test_missing_matplotlib_fails_before_measuring(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert bench("--plot", "a.png") == 2
    assert 'pip install ".[train]"' in capsys.readouterr().err


@rows("devices, wrong", [("0", "0"), ("1,", ""), ("two", "two"), ("1;2", "1;2")])
def test_bad_counts_are_named(devices, wrong, capsys):
    with pytest.raises(SystemExit, match="2"):
        bench("--devices", devices)
    message = capsys.readouterr().err.partition("error: ")[2]
    assert_message(message, names="--devices", values=repr(wrong))


def test_help_lists_the_exit_statuses_and_a_working_example(capsys, tmp_path, monkeypatch):
    with pytest.raises(SystemExit, match="0"):
        bench("--help")
    said = capsys.readouterr().out
    assert re.findall(r"^  (\d+) +\w", said, re.MULTILINE) == ["0", "1", "2", "130"]
    _, _, after = said.partition("  # train.py\n")
    lines = after.splitlines(keepends=True)
    example = "".join(itertools.takewhile(lambda x: x.startswith("  ") or x.isspace(), lines))
    before = """
        import jax.numpy as jnp, mirror, numpy as np, optax
        from flax import nnx
        x = y = np.ones((256, 2), np.float32)
        Net = lambda rngs: nnx.Linear(2, 2, kernel_init=nnx.initializers.ones, rngs=rngs)
        loss_fn = lambda model, batch: ((model(batch["x"]) - batch["y"]) ** 2).mean()
    """
    file = tmp_path / "example.py"
    file.write_text(textwrap.dedent(before) + textwrap.dedent(example))
    monkeypatch.setattr(sys, "path", list(sys.path))
    contender = bench_module.Candidate(
        two := cpu_strategy(2), workload_of(f"{file}:bench", None, False)(two)
    )
    contender.warm_up()
    assert contender.sizes == (128, 128)
    sys.modules.pop("mirror_bench_example")


class Turns:
    """Stands in for a contender: notes its turns."""

    sizes = (4,)

    def __init__(self, count: int, log: list[tuple[int, int]]) -> None:
        self.strategy = types.SimpleNamespace(devices=jax.devices("cpu")[:count])
        self._count, self._log = count, log

    def time_steps(self, steps: int) -> float:
        self._log.append((self._count, steps))
        return 1.0 / self._count

    def row(self, secs: list[float]):
        return row(self._count, 4, *secs)


def test_rounds_interleave_all_device_counts():
    log: list[tuple[int, int]] = []
    turns = functools.partial(Turns, log=log)
    found = bench_module.measure("it", list(map(turns, (1, 2, 4))), 25, False)
    assert found.steps == 27
    assert len(log) == 3 * 9
    rounds = [[n for n, _ in log[i : i + 3]] for i in range(0, len(log), 3)]
    assert rounds[:3] == [[1, 2, 4], [4, 2, 1], [1, 2, 4]]
    assert {steps for _, steps in log} == {3}


def row(count: int, examples: int | None, *secs: float):
    names = tuple(f"/device:CPU:{i}" for i in range(count))
    return bench_module.Row(names, examples, secs, EXPLAINED)


SPEEDUPS = {
    "strong": ([(1, 8, 0.03), (4, 8, 0.01)], 3.0, 0.75),
    "weak": ([(1, 8, 0.03), (4, 32, 0.03)], 4.0, 1.0),
    "without examples": ([(1, None, 0.03), (2, None, 0.02)], 1.5, 0.75),
    "against two": ([(2, 8, 0.03), (4, 8, 0.015)], 2.0, 1.0),
    "within each round": ([(1, 8, 0.01, 0.1, 1), (2, 8, 0.005, 0.05, 5)], 2.0, 1.0),
}


@rows("case", list(SPEEDUPS))
def test_speedup_compares_work_per_second(case):
    rows, speedup, efficiency = SPEEDUPS[case]
    found = bench_module.Scaling(
        "it", case == "weak", 1, False, tuple(row(*cells) for cells in rows)
    )
    assert found.speedup(found.rows[-1]) == pytest.approx(speedup)
    assert found.efficiency(found.rows[-1]) == pytest.approx(efficiency)
    assert found.speedup(found.rows[0]) == 1
    assert len(found.notes) == 1


@pytest.mark.parametrize(("weak", "kind", "size"), [(False, "strong", 8), (True, "weak", 4)])
def test_heading_describes_the_batch(weak, kind, size):
    heading = bench_module.Scaling("it", weak, 1, False, (row(2, 8, 0.1),)).heading
    assert_message(heading, names=["it", kind], values=size)


def test_plot_shows_measurements_and_the_ideal():
    rows = (row(1, 8, 0.03, 0.03), row(2, 8, 0.02, 0.02), row(4, 8, 0.01, 0.01))
    axes = bench_module.Scaling("it", False, 1, True, rows).plot().axes[0]
    ideal, measured = (list(line.get_ydata()) for line in axes.lines[:2])
    assert ideal == [1, 2, 4]
    assert measured == pytest.approx([1, 1.5, 3])
    assert list(axes.get_xticks()) == [1, 2, 4]


def test_single_value_has_no_spread():
    assert quartiles([3.0]) == (3.0, 3.0)


@pytest.mark.slow
def test_different_amounts_of_work_are_not_compared():
    contenders = [Turns(1, []), Turns(2, [])]
    contenders[1].sizes = (4, 4)
    with raises(workload.WorkloadError, values=[4, 1, 8, 2], fix="--weak"):
        bench_module.measure("it", contenders, 1, False)
    bench_module.measure("it", contenders, 1, True)
