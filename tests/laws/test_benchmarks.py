"""The benchmark runs, its contenders compute the same, and its statistics are correct."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from benchmarks import __main__ as command
from benchmarks import (
    limits,
    memory,
    own_process,
    paired,
    plan,
    processes,
    saves,
    stats,
    step_tables,
    suite_tables,
    tables,
    timing,
)
from benchmarks.dispatch import dispatch_contenders
from benchmarks.jax_contender import JaxContender
from benchmarks.models import BY_NAME, model_of, params_of
from benchmarks.record import Done, Record, start
from benchmarks.through_mirror import step_contenders
from benchmarks.workloads import Workload
from tests.support.messages import assert_message, raises

ROOT = Path(__file__).parents[2]
QUICK = plan.Timing(rounds=2, round_secs=1e-4)
TIMES = {
    plan.MIRROR_NNX: [2.4, 2.4, 2.4],
    plan.MIRROR_PLAIN: [2.0, 9.0, 2.0],
    plan.PMAP: [3.0, 3.0, 3.0],
    plan.SHARD_MAP: [2.0, 9.0, 1.0],
    plan.JIT: [4.0, 4.0, 4.0],
}
INSTALLED = [name for name in plan.RIVALS if importlib.util.find_spec(name)]


def test_ratios_are_taken_within_each_round():
    found = stats.ratio({"a": [2.0, 9.0, 4.0], "b": [1.0, 3.0, 4.0]}, "a", "b")
    assert (found.median, found.low, found.high) == (2.0, 1.0, 3.0)
    assert stats.difference({"a": [2.0, 9.0], "b": [1.0, 3.0]}, "a", "b").median == 3.5


def test_rounds_of_several_starts_are_compared_one_by_one():
    times = {"a": [[2.0, 9.0], [4.0]], "b": [[1.0, 3.0], [4.0, 5.0]], "once": [[1.0, 1.0]]}
    assert stats.pairs(times, "a", "b") == [(2.0, 1.0), (9.0, 3.0), (4.0, 4.0)]
    assert stats.ratio(times, "a", "once").median == 5.5
    assert stats.median(times["a"]) == 4.0


def test_best_is_the_smallest_median_of_the_given_names():
    assert stats.best_of(TIMES, plan.HAND_WRITTEN) == plan.SHARD_MAP
    assert stats.best_of(TIMES, [plan.PMAP, plan.JIT]) == plan.PMAP
    assert stats.best_of({"none": [[]], "some": [[1.0]]}, ["none", "some"]) == "some"


def test_interval_narrows_with_rounds_and_omits_outliers():
    found = stats.estimate([*range(1, 100), 10_000])
    assert found.median == 50.5
    assert 35 < found.low < 50 < found.high < 65


def test_spread_is_the_interquartile_range():
    assert stats.spread([1.0, 2.0, 3.0, 4.0, 5.0]) == pytest.approx(2 / 3)
    assert stats.spread([1.0]) == 0


def test_verdicts_follow_the_limits(subtests):
    for interval, verdict in [
        ((1.0, 0.9, 1.04), "holds"),
        ((1.0, 0.9, 1.1), "holds?"),
        ((1.06, 1.0, 1.1), "broken?"),
        ((1.2, 1.1, 1.3), "BROKEN"),
    ]:
        with subtests.test(msg=f"{interval}, {verdict}"):
            assert stats.Estimate(*interval).at_most(1.05) == verdict


def test_rounds_alternate_direction_and_rotate_the_first_contender():
    orders = [timing.in_order(["a", "b", "c"], i) for i in range(6)]
    assert [order[0] for order in orders[::2]] == ["a", "b", "c"]
    assert all(orders[i + 1] == orders[i][::-1] for i in (0, 2, 4))


def as_rows(table):
    return [dict(zip(table.headers, row, strict=True)) for row in table.rows]


def done(kind, devices, result, *names):
    return Done(plan.Job(kind, devices, names), result)


def own(devices, times, lost=None):
    starts = {name: [values] for name, values in times.items()}
    return done("own", devices, {"narrow": {"times": starts, "losses": {}, "lost": lost or {}}})


def test_steps_table_marks_the_limits():
    table = step_tables.paired_table([done("steps", 2, {"narrow": TIMES})])
    (row,) = as_rows(table)
    assert row["best"] == "shard_map"
    assert row["plain/best"].startswith("1.00")
    assert row["nnx/plain"].startswith("1.20")
    assert row["S2"] == "broken?"
    assert row["jit alone ms"] == "-"
    lines = table.text().splitlines()
    assert len({len(line) for line in lines[1:]}) == 1
    assert table.markdown().splitlines()[2].startswith("| model | devices |")


def test_limits_depend_on_the_suite_and_on_the_leaves():
    times = {plan.MIRROR_NNX: [1.0] * 3, plan.MIRROR_PLAIN: [1.04] * 3, plan.JIT: [1.0] * 3}
    (paired_row,) = as_rows(step_tables.paired_table([done("steps", 2, {"narrow": times})]))
    (own_row,) = as_rows(step_tables.own_table([own(2, times)]))
    assert (paired_row["S1"], own_row["S1"]) == ("BROKEN", "holds")
    assert limits.s1("leaves", 1.05) == 1
    assert limits.dispatch_plain_us(100) == pytest.approx(20)
    assert limits.dispatch_nnx_us(100) == pytest.approx(35)


def test_jit_is_the_baseline_on_one_device():
    times = {**TIMES, plan.ONE_DEVICE: [1.0, 1.0, 1.0]}
    (one,) = as_rows(step_tables.own_table([own(1, times)]))
    assert one["best"] == plan.ONE_DEVICE
    (summary,) = step_tables.own_summary([own(1, times), own(2, TIMES)]).rows[:1]
    assert summary == ["narrow, mirror plain", "2.00 [2.00, 9.00]", "1.00 [1.00, 2.00]"]


def test_report_marks_faster_and_missing_rivals():
    times = {**TIMES, plan.TENSORFLOW: [8.0] * 3, plan.KERAS: [1.2] * 3, plan.TORCH: []}
    each = own(2, times, {plan.TORCH: "not installed"})
    (row,) = step_tables.rivals_table([each]).rows
    assert row[3:6] == ["8.000", "0.30 [0.30, 0.30]", "holds"]
    assert row[6:9] == ["1.200", "2.00 [2.00, 2.00]", "BROKEN"]
    assert row[9:] == ["-", "-", "-"]
    hung = Done(plan.Job("steps", 8, ("cnn",)), {}, "hung: no answer in 60 s")
    record = Record({"cores": 2, "cpu": "?", "python": "3"}, {"jax": "1"}, [each, hung])
    assert tables.tables(record)[-1].rows == [
        ["own", "torch", "on 2", "not installed"],
        ["steps", "the job", "cnn on 8", "hung: no answer in 60 s"],
    ]
    assert not command.is_broken([each])
    assert command.is_broken([each, hung])
    assert command.is_broken([own(2, times, {plan.KERAS: "hung"})])


STORED = {"state": 2**20, "temporaries": 2**21, "process": 3 * 2**20, "first": 4.5}


def test_dispatch_table_shows_goals():
    times = {name: [0.1] * 3 for name in plan.HAND_WRITTEN}
    times |= {plan.MIRROR_PLAIN: [0.119] * 3, plan.MIRROR_NNX: [0.136] * 3}
    (row,) = suite_tables.dispatch_table([done("dispatch", 2, {"100": times})]).rows
    assert row[7:-1] == ["+19 [+19, +19]", "20", "holds", "+36 [+36, +36]", "35", "BROKEN"]


def test_remaining_tables_show_their_columns():
    whole, split = {"share": 1.0, "least": 0.5}, {"share": 0.503, "least": 0.5}
    two = {"state_bytes": 2048, "copies": [1.0, 2.0], "reused": 1.0, "sharded": whole}
    one = {"state_bytes": 2048, "copies": [1.0, 1.001], "reused": 1.0, "sharded": split}
    rows = suite_tables.memory_table([done("memory", 2, {"narrow": two, "cnn": one})]).rows
    assert [row[6] for row in rows] == ["BROKEN", "holds"]
    sharded = [["1.000", "0.500", "BROKEN"], ["0.503", "0.500", "holds"]]
    assert [row[7:10] for row in rows] == sharded
    assert [row[10:] for row in rows] == [["-", "-"]] * 2
    del one["sharded"]
    alone = suite_tables.memory_table([done("memory", 1, {"cnn": one})]).rows
    assert alone[0][7:] == ["-"] * 5
    one["peak"] = {"reported": None, "estimate": 3 * 2**20}
    alone = suite_tables.memory_table([done("memory", 1, {"cnn": one})]).rows
    assert alone[0][10:] == ["-", "3.0"]
    ways = [(plan.MIRRORED, 2.0), (plan.SLICED, 1.5), (plan.SLICED_BY_HAND[0], 1.0)]
    stored = [
        Done(plan.Job("slices", 8, contenders=(way,)), {"mlp": {**STORED, "step": step}})
        for way, step in ways * 2
    ]
    (_, sliced, _) = suite_tables.slices_table(stored).rows
    assert sliced[2:6] == ["1.0", "2.0", "3.0", "4.5"]
    assert sliced[6:] == ["0.75 [0.75, 0.75]", "1.50 [1.50, 1.50]", "BROKEN"]
    deep = suite_tables.deep_table([done("deep", 1, {"deep": {**TIMES, plan.NNX_JIT: [20.0] * 3}})])
    assert deep.rows[0][3] == "20.000"
    assert deep.rows[0][5] == "holds"
    counts = {"1": [1.0] * 3, "2": [1.0] * 3, "4": [1.04] * 3, "8": [6.0] * 3}
    shared = suite_tables.rows_table([done("rows", 1, {"wide": counts})])
    assert list(shared.rows[0][3:8:2]) == ["holds", "holds", "BROKEN"]
    times = {plan.MIRROR_PLAIN: [1.0] * 3, plan.STAGED: [1.6] * 3}
    staged = suite_tables.staged_table([done("staged", 2, {"wide": times})])
    assert staged.rows[0][1:6] == ["2", "1.000", "1.600", "1.60 [1.60, 1.60]", "BROKEN"]
    epochs = {plan.LOOP: [1.0] * 3, plan.FIT: [1.0] * 3, plan.FIT_16: [0.8] * 3}
    epochs[plan.JIT_LOOP] = [2.0] * 3
    trainer = suite_tables.trainer_table([done("trainer", 1, {"small": epochs, "leaves": epochs})])
    assert [(row["T1"], row["T2"]) for row in as_rows(trainer)] == [
        ("holds", "BROKEN"),
        ("holds", ""),
    ]
    assert as_rows(trainer)[0]["fit / jit loop"] == "0.50 [0.50, 0.50]"


def test_first_call_table_takes_the_minimum_and_judges_lowering_and_devices():
    secs = [
        (2, plan.MIRROR_NNX, 1.0, 0.4),
        (2, plan.MIRROR_PLAIN, 1.0, 0.3),
        (2, plan.SHARD_MAP, 1.0, 0.2),
        (64, plan.MIRROR_NNX, 9.0, 0.4),
        (64, plan.MIRROR_NNX, 1.2, 0.4),
        (64, plan.MIRROR_PLAIN, 1.0, 0.2),
        (64, plan.SHARD_MAP, 2.0, 0.2),
    ]
    firsts = [
        done("first", n, {name: {"first": first, "lowered": lowered}}, name)
        for n, name, first, lowered in secs
    ]
    few, many = suite_tables.first_table(firsts).rows
    assert few[4:6] == ["1.50", "BROKEN"]
    assert many[4:6] == ["1.00", "holds"]
    assert many[6:11] == ["1.20", "1.00", "2.00", "1.20", "holds"]


def test_starts_table_takes_the_minimum_of_each_start():
    parts = [(9.0, 3.5), (8.0, 2.5)]
    starts = [done("starts", 2, {"cnn": {"first": a, "second": b}}, "cnn") for a, b in parts]
    (row,) = as_rows(suite_tables.starts_table(starts))
    assert [row[name] for name in ("first s", "second s", "C1")] == ["8.00", "2.50", "holds"]


def test_jobs_round_trip_through_json():
    jobs = plan.Settings().jobs()
    kinds = {*plan.SUITES, "starts", "slices"}  # of the suites `first` and `memory`
    assert {job.kind for job in jobs} == kinds
    assert [plan.Job.from_dict(json.loads(json.dumps(job.to_dict()))) for job in jobs] == jobs
    assert all((plan.ONE_DEVICE in job.contenders) == (job.devices == 1) for job in jobs[:1])


def test_command_line_selects_suites():
    settings, options = command.parse(["--quick", "--devices", "1,8", "--models", "cnn"])
    assert settings.devices == (1, 8)
    assert settings.models == ("cnn",)
    assert "deep" not in settings.suites
    assert not options.markdown
    settings, _ = command.parse(["--repeats", "3", "--own-repeats", "4", "--starts", "5"])
    assert (settings.timing.rounds, settings.own_timing.rounds) == (3, 4)
    assert settings.own_timing.starts == 5
    for wrong in (["--models", "resnet"], ["--devices", "0"], ["--starts", "0"]):
        with pytest.raises(SystemExit):
            command.parse(wrong)


# Processes


def test_children_have_forced_host_devices_and_nothing_else(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_foo=1 --xla_force_host_platform_device_count=3")
    environment = processes.child_environment(8)
    assert environment.pop("XLA_FLAGS") == "--xla_foo=1 --xla_force_host_platform_device_count=8"
    assert environment.pop("JAX_PLATFORMS") == "cpu"
    assert environment.items() <= os.environ.items()


@pytest.fixture
def program(tmp_path, monkeypatch):
    """Writes a module that a child can run."""
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{ROOT}")

    def write(name, text):
        (tmp_path / f"{name}.py").write_text(text)
        return name

    return write


def test_child_is_killed_when_it_hangs(program):
    sleeper = program("sleeper", "import time\nprint('{}', flush=True)\ntime.sleep(600)\n")
    with processes.Child(sleeper, {}, 2) as child:
        assert child.answer(60) == {}
        with raises(processes.ChildError, values=["1 s", child.pid]):
            child.answer(1)
        with pytest.raises(ProcessLookupError):
            os.kill(child.pid, 0)
        with raises(processes.ChildError, values="SIGKILL"):
            child.ask("more")


def test_child_reports_how_it_ended(subtests, program):
    for text, how, last in [
        ("import os; os.abort()", "SIGABRT", ""),
        ("raise ValueError('too ' + 'x' * 999)", 1, r"ValueError: too x+ \.\.\. x+$"),
    ]:
        with subtests.test(msg=f"{text}, {how}, {last}"):
            with (
                processes.Child(program("ends", text), {}, 2) as child,
                raises(processes.ChildError, values=how) as caught,
            ):
                child.answer(60)
            assert re.search(last, str(caught.value))


@pytest.mark.slow
def test_the_second_start_loads_what_the_first_has_compiled(monkeypatch):
    """`measure_starts` fails if it compiles a program; a user's own cache is not used."""
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "1e9")
    found = command.run_job(plan.Job("starts", 2, ("small",)), lambda _: None)
    assert not found.lost
    assert found.result["small"]["loaded"]


@pytest.mark.slow
def test_lost_child_keeps_its_measurements():
    said: list[str] = []
    found = command.run_job(plan.Job("memory", 1, ("small", "resnet")), said.append)
    assert list(found.result) == ["small"]
    assert "KeyError: 'resnet'" in found.lost
    assert said == [found.lost]


def test_gpu_suite_is_for_jaxs_default_device():
    """The other suites are for host devices; only the processes differ."""
    assert all(job.on_host for job in plan.Settings().jobs())
    jobs = plan.Settings(suites=(plan.GPU,)).jobs()
    kinds = ["steps", "dispatch", "trainer", "memory", *["first"] * 3, "starts"]
    assert [job.kind for job in jobs] == kinds
    assert not any(job.on_host or job.devices > 1 for job in jobs)
    assert [plan.Job.from_dict(job.to_dict()) for job in jobs] == jobs
    settings, _ = command.parse(["--suites", "gpu", "--models", "cnn"])
    assert settings.jobs()[0].names == ("cnn",)
    assert processes.child_environment(None) == os.environ


@pytest.mark.slow
def test_gpu_suite_names_the_device_that_it_ran_on():
    """On JAX's default device, which is a CPU here."""
    job = plan.Job("memory", 1, ("small",), on_host=False)
    found = command.run_job(job, lambda _: None)
    assert (found.device, found.lost) == ("cpu", "")
    assert found.result["small"]["peak"]["estimate"] > found.result["small"]["state_bytes"]
    record = start(["--suites", "gpu"])
    record.done.append(found)
    (table,) = tables.tables(record)
    assert table.title.endswith(", on cpu")


def test_by_hand_runs_without_mirror():
    program = "import sys, benchmarks.by_hand; sys.exit('mirror' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=False).returncode == 0


# Own process


@pytest.mark.parametrize("model", ["cnn", "leaves"])
@pytest.mark.nightly
def test_separate_processes_alternate_and_train_to_the_same_loss(model, program):
    """With torch, and without TensorFlow."""
    program("tensorflow", "raise ModuleNotFoundError('no', name='tensorflow')")
    names = (plan.SHARD_MAP, plan.MIRROR_NNX, plan.TENSORFLOW, plan.TORCH)
    timing = plan.Timing(rounds=2, round_secs=1e-3, starts=1)
    job = plan.Job("own", 2, (model,), contenders=names, timing=timing)
    said: list[str] = []
    found = own_process.Cell(job, said.append).measure()
    assert found["lost"] == {plan.TENSORFLOW: "not installed"}
    assert said == ["tensorflow: not installed"]
    rounds = {name: [len(start) for start in starts] for name, starts in found["times"].items()}
    assert rounds == {name: [0 if name == plan.TENSORFLOW else 2] for name in names}
    assert found["losses"][plan.TORCH] == pytest.approx(found["losses"][plan.SHARD_MAP], rel=1e-3)
    before, after = found["losses"][plan.MIRROR_NNX]
    assert after < before


@pytest.mark.parametrize("rival", INSTALLED)
@pytest.mark.nightly
def test_rivals_train_to_the_same_loss_on_one_device(rival):
    job = plan.Job("own", 1, ("small",), contenders=(plan.ONE_DEVICE, rival), timing=QUICK)
    found = own_process.Cell(job, lambda _: None).measure()
    assert not found["lost"]
    assert set(found["losses"]) == {plan.ONE_DEVICE, rival}


@pytest.mark.nightly
def test_lost_contender_keeps_its_rounds(program):
    program("torch", "import os, sys; sys.exit(3)")
    names = (plan.ONE_DEVICE, plan.TORCH)
    timing = plan.Timing(rounds=1, round_secs=1e-3, starts=2)
    job = plan.Job("own", 1, ("small",), contenders=names, timing=timing)
    found = own_process.Cell(job, lambda _: None).measure()
    assert list(found["lost"]) == [plan.TORCH]
    assert_message(found["lost"][plan.TORCH], values=3)
    assert [len(start) for start in found["times"][plan.ONE_DEVICE]] == [1, 1]
    assert found["times"][plan.TORCH] == [[]]


def test_different_loss_is_an_error():
    losses = {plan.TORCH: [2.0, 1.0], plan.JIT: [2.0, 1.0005], plan.SHARD_MAP: [2.0, 1.0]}
    assert own_process.reference(losses) == plan.SHARD_MAP
    assert own_process.reference({plan.TORCH: [2.0, 1.0]}) == plan.TORCH
    assert not own_process.difference([2.0, 1.0], [2.0, 1.0005], "jit", 1e-3)
    reason = own_process.difference([2.0, 1.1], [2.0, 1.0], "jit", 1e-3)
    assert_message(reason, names="jit", values=["1.1", 5, 1])


def test_rivals_are_configured_as_their_users_do(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert own_process.environment_of(plan.KERAS, 2) == {"KERAS_BACKEND": "jax"}
    assert own_process.environment_of(plan.TORCH, 2) == {"OMP_NUM_THREADS": "1"}
    assert own_process.environment_of(plan.TORCH, 1) == {}
    assert own_process.environment_of(plan.MIRROR_NNX, 8) == {}


# Paired


@pytest.mark.nightly
def test_initial_params_are_those_of_the_module(subtests):
    for name in BY_NAME:
        with subtests.test(msg=name):
            model = BY_NAME[name]
            initial, made = model.workload.initial_params(), params_of(model.module())
            assert jax.tree.structure(initial) == jax.tree.structure(made)
            jax.tree.map(np.testing.assert_array_equal, initial, made)


@pytest.mark.nightly
def test_contenders_compute_the_same_and_are_timed(subtests):
    for num_devices in [1, 2]:
        with subtests.test(msg=f"{num_devices}"):
            model = model_of(Workload("mlp", (8, 16, 4), 8))
            times = paired.measure(step_contenders(model, num_devices), QUICK)
            assert set(times) == {plan.MIRROR_NNX, plan.MIRROR_PLAIN, *plan.by_hand(num_devices)}
            assert all(len(rounds) == 2 and min(rounds) > 0 for rounds in times.values())


def test_dispatch_step_adds_one():
    contenders = dispatch_contenders(3, 2)
    paired.require_same(contenders)
    assert {c.name for c in contenders} == {
        plan.MIRROR_PLAIN,
        plan.MIRROR_NNX,
        *plan.HAND_WRITTEN,
    }
    for contender in contenders:
        assert np.asarray(contender.params()["leaves"][2]).tolist() == [5.0] * 8


class Constant(JaxContender):
    """Launches nothing."""

    def __init__(self, name, value):
        self.name, self._value = name, value

    def launch(self):
        pass

    def arrays(self):
        return []

    def params(self):
        return {"w": np.full(3, self._value)}


def test_contenders_that_differ_are_an_error():
    paired.require_same([Constant("a", 1.0), Constant("b", 1.00001)])
    with raises(paired.ContendersDifferError, names=["a", "b", "['w']"], values=3):
        paired.require_same([Constant("a", 1.0), Constant("b", 1.01)])


@pytest.mark.nightly
def test_sharded_optimizer_state_is_one_shard_per_divisible_leaf():
    leaves = [np.zeros((8, 3), np.float32), np.zeros((8,), np.float32), np.zeros((), np.float32)]
    assert memory.least_share(leaves, 8) == pytest.approx((96 / 8 + 32 / 8 + 4) / 132)
    found = memory.measure_sharded("small", 2)
    assert found["share"] == pytest.approx(found["least"], rel=0.01)
    assert found["share"] < 0.51


# The command


@pytest.mark.nightly
def test_command_starts_no_backend_and_prints_tables(tmp_path):
    file, picture = tmp_path / "out.json", tmp_path / "out.png"
    quick = ["--quick", "--devices", "2", "--suites", "own,dispatch,memory", "--repeats", "2"]
    only = ["--own-repeats", "1", "--contenders", "mirror plain,jit"]
    run = subprocess.run(
        [sys.executable, "-m", "benchmarks", *quick, *only, "--json", str(file)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={k: v for k, v in os.environ.items() if k != "XLA_FLAGS"},
        timeout=900,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    assert "Pure dispatch" in run.stdout
    assert "S5" in run.stdout
    data = json.loads(file.read_text())
    assert [entry["job"]["kind"] for entry in data["jobs"]] == ["own", "dispatch", "memory"]
    assert data["versions"]["jax"] == jax.__version__
    assert data["machine"]["cores"] >= 1
    again = subprocess.run(
        [sys.executable, "-m", "benchmarks.tables", str(file), "--picture", str(picture)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=True,
    )
    assert again.stdout == run.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")
    parent = "import sys, benchmarks.__main__; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", parent], cwd=ROOT, check=False).returncode == 0


def test_record_round_trips_through_a_file(tmp_path):
    record = start(["--quick"])
    record.done.append(own(2, TIMES, {plan.TORCH: "not installed"}))
    record.save(tmp_path / "out.json")
    assert Record.load(tmp_path / "out.json") == record
    assert record.machine["command"] == ["--quick"]
    assert f"JAX {jax.__version__}" in record.title


def test_plot_rejects_empty_records(tmp_path):
    with raises(ValueError, names="own"):
        tables.draw(start([]), tmp_path / "out.png")


def test_plot_requires_matplotlib(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    fix = ['pip install ".[bench]"', "--picture"]
    with raises(ModuleNotFoundError, names="matplotlib", fix=fix):
        tables.draw(start([]), tmp_path / "out.png")


def test_saves_are_measured_with_and_without_fsync(subtests, tmp_path_factory):
    for asynchronous in [False, True]:
        with subtests.test(msg=f"{asynchronous}"), pytest.MonkeyPatch.context() as monkeypatch:
            tmp_path = tmp_path_factory.mktemp("row")
            synced: list[int] = []
            monkeypatch.setattr(os, "fsync", synced.append)
            times = saves.measure(tmp_path, 8192, 2, asynchronous=asynchronous)
            for arms in times.values():
                assert {arm: len(secs) for arm, secs in arms.items()} == {
                    saves.SYNCED: 2,
                    saves.UNSYNCED: 2,
                }
            for arm in (saves.SYNCED, saves.UNSYNCED):
                for returned, durable in zip(
                    *(times[moment][arm] for moment in times), strict=True
                ):
                    assert 0 < returned <= durable
            with saves.unsynced():
                before = len(synced)
                with saves.CheckpointStore(tmp_path, asynchronous=asynchronous) as store:
                    saves.seconds(store, 99, {"w": np.ones(3)})
            assert len(synced) == before > 0
