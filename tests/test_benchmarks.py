"""The benchmark runs, its contenders compute the same, and its arithmetic is right."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks import __main__ as command
from benchmarks import plan, report, stats, timing
from benchmarks.contenders import Contender, step_contenders
from benchmarks.dispatch import dispatch_contenders
from benchmarks.models import mlp

ROOT = Path(__file__).parent.parent
QUICK = plan.Timing(rounds=2, round_secs=1e-4)
TIMES = {
    plan.MIRROR_NNX: [2.4, 2.4, 2.4],
    plan.MIRROR_PLAIN: [2.0, 9.0, 2.0],
    plan.PMAP: [3.0, 3.0, 3.0],
    plan.SHARD_MAP: [2.0, 9.0, 1.0],
    plan.JIT: [4.0, 4.0, 4.0],
}


def test_ratios_are_taken_within_each_round():
    found = stats.ratio({"a": [2.0, 9.0, 4.0], "b": [1.0, 3.0, 4.0]}, "a", "b")
    assert (found.median, found.low, found.high) == (2.0, 1.0, 3.0)
    assert stats.difference({"a": [2.0, 9.0], "b": [1.0, 3.0]}, "a", "b").median == 3.5


def test_best_is_the_smallest_median_of_those_asked():
    assert stats.best_of(TIMES, plan.HAND_WRITTEN) == plan.SHARD_MAP
    assert stats.best_of(TIMES, [plan.PMAP, plan.JIT]) == plan.PMAP


def test_interval_narrows_with_rounds_and_leaves_outliers_out():
    found = stats.estimate([*range(1, 100), 10_000])
    assert found.median == 50.5
    assert 35 < found.low < 50 < found.high < 65


def test_spread_is_the_interquartile_range():
    assert stats.spread([1.0, 2.0, 3.0, 4.0, 5.0]) == pytest.approx(2 / 3)
    assert stats.spread([1.0]) == 0


@pytest.mark.parametrize(
    ("interval", "verdict"),
    [
        ((1.0, 0.9, 1.04), "holds"),
        ((1.0, 0.9, 1.1), "holds?"),
        ((1.06, 1.0, 1.1), "broken?"),
        ((1.2, 1.1, 1.3), "BROKEN"),
    ],
)
def test_verdicts(interval, verdict):
    assert stats.Estimate(*interval).at_most(1.05) == verdict


def test_every_other_round_runs_backwards_and_each_contender_is_first_in_turn():
    orders = [timing.in_order(["a", "b", "c"], i) for i in range(6)]
    assert [order[0] for order in orders[::2]] == ["a", "b", "c"]
    assert all(orders[i + 1] == orders[i][::-1] for i in (0, 2, 4))


def test_steps_table_marks_the_limits():
    table = report.steps_table([(plan.Job("steps", 2, ("narrow",)), {"narrow": TIMES})])
    row = dict(zip(table.headers, table.rows[0], strict=True))
    assert row["best"] == "shard_map"
    assert row["plain/best"].startswith("1.00")
    assert row["nnx/plain"].startswith("1.20")
    assert row["S2"] == "broken?"
    lines = table.text().splitlines()
    assert len({len(line) for line in lines[1:]}) == 1
    assert table.markdown().splitlines()[2].startswith("| model | devices |")


def test_other_tables():
    job = plan.Job("memory", 2, ("narrow",))
    two = {"state_bytes": 2048, "copies": [1.0, 2.0], "reused": 1.0}
    one = {"state_bytes": 2048, "copies": [1.0, 1.001], "reused": 1.0}
    rows = report.memory_table([(job, {"narrow": two, "cnn": one})]).rows
    assert [row[-1] for row in rows] == ["BROKEN", "holds"]
    firsts = [
        (plan.Job("first", n, (name,)), {name: secs})
        for n, name, secs in [
            (2, plan.MIRROR_NNX, 1.0),
            (2, plan.SHARD_MAP, 1.0),
            (64, plan.MIRROR_NNX, 9.0),
            (64, plan.MIRROR_NNX, 1.4),
            (64, plan.SHARD_MAP, 2.0),
        ]
    ]
    rows = report.first_table(firsts).rows
    assert rows[1][:5] == ["64", "1.40", "2.00", "1.40", "holds"]
    deep = report.deep_table([(plan.Job("deep", 1), {"deep": {**TIMES, plan.NNX_JIT: [20.0] * 3}})])
    assert deep.rows[0][3] == "20.000"
    assert deep.rows[0][5] == "holds"
    rows = {"1": [1.0] * 3, "2": [1.0] * 3, "4": [1.04] * 3, "8": [6.0] * 3}
    shared = report.rows_table([(plan.Job("rows", 1), {"wide": rows})])
    assert list(shared.rows[0][3:8:2]) == ["holds", "holds", "BROKEN"]
    times = {plan.MIRROR_PLAIN: [1.0] * 3, plan.STAGED: [1.6] * 3}
    staged = report.staged_table([(plan.Job("staged", 2), {"wide": times})])
    assert staged.rows[0][1:6] == ["2", "1.000", "1.600", "1.60 [1.60, 1.60]", "BROKEN"]


def test_jobs_survive_json():
    jobs = plan.Settings().jobs()
    assert {job.kind for job in jobs} == set(plan.SUITES)
    assert [plan.Job.from_dict(json.loads(json.dumps(job.to_dict()))) for job in jobs] == jobs


def test_command_line():
    settings, options = command.parse(["--quick", "--devices", "1,8", "--models", "cnn"])
    assert settings.devices == (1, 8)
    assert settings.models == ("cnn",)
    assert "deep" not in settings.suites
    assert not options.markdown
    with pytest.raises(SystemExit):
        command.parse(["--models", "resnet"])
    with pytest.raises(SystemExit):
        command.parse(["--devices", "0"])


def test_child_keeps_the_users_flags(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_foo=1 --xla_force_host_platform_device_count=3")
    environment = command.child_environment(8)
    flags = environment["XLA_FLAGS"]
    assert flags == "--xla_foo=1 --xla_force_host_platform_device_count=8"
    assert int(environment["PJRT_NPROC"]) >= 32


def test_contenders_compute_the_same_and_are_timed():
    times = timing.measure(step_contenders(mlp([8, 16, 4], 8), 2), QUICK)
    assert set(times) == {plan.MIRROR_NNX, plan.MIRROR_PLAIN, *plan.HAND_WRITTEN}
    assert all(len(rounds) == 2 and min(rounds) > 0 for rounds in times.values())


def test_dispatch_adds_one_a_step():
    contenders = dispatch_contenders(3, 2)
    timing.require_same(contenders)
    assert np.asarray(contenders[0].params()["leaf 2"]).tolist() == [5.0] * 8


class Fixed(Contender):
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
    timing.require_same([Fixed("a", 1.0), Fixed("b", 1.00001)])
    with pytest.raises(timing.ContendersDifferError, match=r"a and b differ after 3 steps .*'w'"):
        timing.require_same([Fixed("a", 1.0), Fixed("b", 1.01)])


def test_command_starts_no_backend_and_prints_tables(tmp_path):
    file = tmp_path / "out.json"
    quick = ["--quick", "--devices", "2", "--suites", "dispatch,memory", "--repeats", "2"]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", *quick, "--json", str(file)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={k: v for k, v in os.environ.items() if k != "XLA_FLAGS"},
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "Pure dispatch" in done.stdout
    assert "S5" in done.stdout
    kinds = [entry["job"]["kind"] for entry in json.loads(file.read_text())["jobs"]]
    assert kinds == ["dispatch", "memory"]
    parent = "import sys, benchmarks.__main__; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", parent], cwd=ROOT, check=False).returncode == 0


def test_failed_child_says_what_it_said():
    with pytest.raises(command.ChildFailedError, match="KeyError: 'resnet'"):
        command.run_job(plan.Job("memory", 1, ("resnet",)))
