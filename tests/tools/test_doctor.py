"""`mirror doctor`: its findings, its suggested fixes, and its exit status."""

import importlib.metadata
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import tomllib

import pytest

import mirror
from mirror import cli
from tests.support import fresh, inside
from tests.support.messages import assert_message
from tests.support.tables import rows

check_module, command, environment, probes = inside.doctor()
supported = inside.versions()
Check, summary, worst = check_module.Check, check_module.summary, check_module.worst
ProbeResult, findings = command.ProbeResult, command.findings
check_environment = environment.check_environment
check_versions = environment.check_versions
SUPPORTED = environment.SUPPORTED
base_version = supported.base_version

TYPO = "--xla_force_host_platform_devices_count=3"
COMMAND = "import sys; from mirror import cli; sys.exit(cli.main(['doctor', '--json']))"


def with_a_typo() -> subprocess.CompletedProcess[str]:
    more = {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(fresh.STAND_INS), "STAND_IN_GPUS": "0"}
    return fresh.start(COMMAND, environment={**more, "XLA_FLAGS": TYPO})


AHEAD = {"typo": with_a_typo}


@pytest.mark.slow
def test_doctor_isolates_a_flag_that_crashes_the_process(ahead):
    done = ahead[__name__]["typo"].result()
    assert done.returncode == 1, done.stdout
    found = json.loads(done.stdout)
    assert found["state"] == "problem"
    assert found["versions"]["mirror"] == mirror.__version__
    (problem,) = (check for check in found["checks"] if check["state"] != "ok")
    assert_message(problem["found"], values=TYPO)
    fix = ["XLA_FLAGS", "--xla_force_host_platform_device_count"]
    assert_message(problem["fix"], values=TYPO, fix=fix)
    started, *rest = found["checks"][-4:]
    assert started["name"] == probes.BACKEND
    devices, _, forced = started["found"].rpartition("/device:CPU:3)")
    assert devices
    assert forced, "it says that they are forced"
    assert [check["name"] for check in rest] == list(probes.PROBES)
    assert_message(rest[0]["found"], values=[4, os.cpu_count()])


@pytest.fixture(scope="module")
def on_eight_devices():
    """Returns what the probes print in this process, where threads have been counted before."""
    here = probes.start()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(probes, "start", lambda: here)
        return [json.loads(json.dumps(line)) for line in probes.run()]


@pytest.mark.slow
def test_all_probes_pass_on_this_machine(on_eight_devices):
    names = [line["begins"] for line in on_eight_devices if "begins" in line]
    assert names == [probes.BACKEND, *probes.PROBES]
    checks = [Check(**line) for line in on_eight_devices if "begins" not in line]
    assert [check.name for check in checks] == names
    assert {check.state for check in checks} == {"ok"}
    assert_message(checks[-1].found, values=8)


@pytest.mark.slow
@rows(
    "flags, status, state",
    [("", 0, "ok"), ("--xla_dump_to=/tmp", 0, "warning"), (TYPO, 1, "problem")],
)
def test_exit_status_is_that_of_the_worst_check(
    flags, status, state, on_eight_devices, monkeypatch, capsys
):
    def probe(environment):
        if TYPO in environment["XLA_FLAGS"]:
            return ProbeResult(1, "", f"F0 x.cc:1] Unknown flag in XLA_FLAGS: {TYPO}\n")
        return ProbeResult(0, "\n".join(map(json.dumps, on_eight_devices)), "")

    monkeypatch.setenv("XLA_FLAGS", flags)
    monkeypatch.setattr(command, "probe", probe)
    assert cli.main(["doctor"]) == status
    text = capsys.readouterr().out
    (line,) = re.findall(rf"^ok +{probes.ALL_REDUCE}: .*", text, re.MULTILINE)
    assert_message(line, values=8)
    assert cli.main(["doctor", "--json"]) == status
    found = json.loads(capsys.readouterr().out)
    assert found["state"] == state
    assert len(found["checks"]) == int(re.search(r"\((\d+) \w+\)\n$", text)[1])


def test_probes_print_json_lines(monkeypatch, capsys):
    monkeypatch.setattr(probes, "run", lambda secs: iter([{"begins": "it"}, {"name": "it"}]))
    check_module.main("probes", 0)
    assert capsys.readouterr().out == '{"begins": "it"}\n{"name": "it"}\n'


POOLS = {  # threads, cores, state
    "as JAX has it": (8, 2, "ok"),
    "a thread for each core": (16, 16, "ok"),
    "wide": (32, 2, "warning"),
    "a little wide": (9, 8, "warning"),
}


@rows("case", list(POOLS))
def test_doctor_reports_an_oversized_thread_pool(case, monkeypatch):
    num_threads, cores, state = POOLS[case]
    monkeypatch.setattr(probes.os, "cpu_count", lambda: cores)
    monkeypatch.setattr(probes, "get_num_cpu_threads", lambda: num_threads)
    check = probes.check_pool(probes.start())
    assert check.state == state
    assert_message(check.found, values=[num_threads, 8, cores])
    assert bool(check.fix) == (state != "ok")


def test_one_host_device_uses_a_pool_of_its_cores(monkeypatch):
    monkeypatch.setattr(probes.backend, "devices_of_type", lambda kind: (1,))
    monkeypatch.setattr(probes.os, "cpu_count", lambda: 2)
    monkeypatch.setattr(probes, "get_num_cpu_threads", lambda: 2)
    check = probes.check_pool(probes.start())
    assert check.state == "ok"
    assert_message(check.found, values=2)


@rows("asked", ["12", "", "many"])
def test_nproc_widens_the_thread_pool(asked, monkeypatch):
    monkeypatch.setenv("NPROC", asked)
    assert mirror.config.get_num_cpu_threads() >= (12 if asked == "12" else 8)


@pytest.mark.parametrize("kind", ["CPU", "GPU"])
def test_failed_all_reduce_is_a_problem(kind, monkeypatch):
    here = probes.start()
    monkeypatch.setattr(probes, "all_reduce_fault", lambda devices, secs: "it got 3 for 4")
    monkeypatch.setattr(probes.backend, "type_of", lambda device: kind)
    check = probes.check_all_reduce(here)
    assert (check.state, check.found) == ("problem", "it got 3 for 4")
    assert ("NCCL_P2P_DISABLE=1" in check.fix) == (kind == "GPU")


def test_one_device_skips_the_collective_check():
    one = probes.start()._replace(devices=probes.start().devices[:1])
    check = probes.check_all_reduce(one)
    assert check.state == "ok"
    assert_message(check.found, fix="device")


def test_differing_step_is_a_problem(monkeypatch, two):
    def mismatched(*args, **kwargs):
        raise mirror.VerifyError("1 of 9 leaves differ:\n  model.kernel")

    monkeypatch.setattr(mirror.Strategy, "verify", mismatched)
    check = probes.check_step(probes.start()._replace(devices=two.devices))
    assert (check.state, check.found) == ("problem", "1 of 9 leaves differ:")


def test_failing_probe_is_a_problem_and_the_next_one_runs(monkeypatch):
    def fail(started):
        raise RuntimeError("no luck\nat all")

    well = Check("second", "ok", "well")
    monkeypatch.setattr(probes, "PROBES", {"first": fail, "second": lambda started: well})
    first, second = [Check(**line) for line in probes.run() if "begins" not in line][-2:]
    assert first.state == "problem"
    assert_message(first.found, values="no luck")
    assert "at all" not in first.found
    assert second == well


def test_failed_backend_start_ends_the_probes(monkeypatch):
    monkeypatch.setattr(probes, "start", lambda: 1 / 0)
    begins, line = probes.run()
    assert begins == {"begins": probes.BACKEND}
    assert Check(**line).found == "division by zero"
    assert_message(line["fix"], fix="JAX_PLATFORMS=cpu")


NOTES = {
    "left out": ("JAX does not use G: it leaves it out.", "cpu", "CPU", "warning", "unset JAX_"),
    "no CUDA": ("JAX does not use G: none. Install it: pip", None, "CPU", "problem", "Install it:"),
    "asked for": ("JAX does not use G: none. Install it: pip", "cuda", "CPU", "problem", "Install"),
    "not listed": ("JAX has GPUs. pip install", None, "GPU", "warning", "pip install"),
}


@rows("case", list(NOTES))
def test_unused_gpus_are_a_problem_unless_intended(case, monkeypatch):
    note, platforms, kind, state, fix = NOTES[case]
    here = probes.start()
    monkeypatch.setattr(probes.inventory, "inventory", lambda: {"notes": [note]})
    monkeypatch.setattr(type(probes.PLATFORMS), "value", platforms)
    monkeypatch.setattr(probes.backend, "type_of", lambda device: kind)
    _, check = probes.check_backend(here)
    assert check.state == state
    assert check.fix.startswith(fix)


BEGINS = json.dumps({"begins": "all-reduce"})
ENDS = {
    "signal": (ProbeResult(-signal.SIGABRT, BEGINS, "Fatal: x\n\n"), "all-reduce", "SIGABRT"),
    "status": (ProbeResult(3, f"noise\n{BEGINS}", ""), "all-reduce", 3),
    "deadline": (ProbeResult(None, "", ""), "start", "240 s"),
    "bad flag": (
        ProbeResult(1, "", "E1 2 c.cc:3] Couldn't interpret value two for flag xla_x.\nF1 check"),
        "XLA_FLAGS",
        1,
    ),
    "no file": (
        ProbeResult(
            1, "", 'F1 2 p.cc:1] Could not open file "x" to read flags for variable "XLA_FLAGS"'
        ),
        "XLA_FLAGS",
        1,
    ),
}


@rows("case", list(ENDS))
def test_cause_of_a_crash_is_named(case):
    ended, name, how = ENDS[case]
    (check,) = findings(ended)
    assert (check.name, check.state) == (name, "problem")
    assert_message(check.found, values=how)


def test_most_informative_line_is_shown():
    errors = "W1\nF1121 16:32:02.13    2020 a.cc:234] Check failed: it\n@ 0x7f\n"
    assert next(findings(ProbeResult(-6, "", errors))).meaning == "Check failed: it"
    assert next(findings(ProbeResult(-6, "", "first\nlast\n\n"))).meaning == "last"


def test_hanging_process_is_killed(monkeypatch):
    monkeypatch.setattr(command, "_CHILD_SECS", 0.01)
    assert command.probe({}).status is None


def test_ctrl_c_ends_the_doctor_cleanly(monkeypatch, capsys):
    def interrupted(command, **kwargs):
        signal.raise_signal(signal.SIGINT)
        return subprocess.CompletedProcess(command, -2, b"", b"KeyboardInterrupt")

    monkeypatch.setattr(command.subprocess, "run", interrupted)
    assert cli.main(["doctor"]) == 130
    assert_message(capsys.readouterr().err, fix="Interrupted")


HERE = {"python": "3.12.1", "jax": "0.12.0", "jaxlib": "0.12.0", "flax": "0.12.12", "optax": "1"}
CUDA12, CUDA13 = "jax-cuda12-plugin", "jax-cuda13-plugin"
VERSIONS: dict[str, tuple[dict[str, str | None], dict[str, str]]] = {
    "all supported": ({}, {}),
    "old": ({"python": "3.10.9", "jax": "0.9.9"}, {"python": "problem", "jax": "problem"}),
    "new": ({"jax": "0.13.1", "jaxlib": "0.13.0.dev1"}, {"jax": "warning", "jaxlib": "warning"}),
    "missing": ({"flax": None, "jaxlib": None}, {"flax": "problem", "jaxlib": "problem"}),
    "fits": ({CUDA12: "0.12.0", "NVIDIA driver": "525.60.13"}, {}),
    "other jaxlib": ({CUDA12: "0.11.0", "NVIDIA driver": "580.1"}, {CUDA12: "problem"}),
    "no driver": ({CUDA13: "0.12.0"}, {CUDA13: "warning"}),
    "old driver": ({CUDA13: "0.12.0", "NVIDIA driver": "570.1"}, {CUDA13: "problem"}),
    "older driver": ({CUDA12: "0.12.0", "NVIDIA driver": "470.1"}, {CUDA12: "problem"}),
}


@rows("case", list(VERSIONS))
def test_versions_are_compared_with_supported_versions(case):
    there, expected = VERSIONS[case]
    present = {name: v for name, v in {**HERE, **there}.items() if v is not None}
    checks = list(check_versions(present))
    assert {check.name: check.state for check in checks if check.state != "ok"} == expected
    assert all(check.meaning and check.fix for check in checks if check.state != "ok")


def test_known_deadlocks_are_reported():
    for jaxlib in ("0.10.2", "0.11.2", "0.12.0.1"):
        checks = check_versions({**HERE, "jaxlib": jaxlib})
        (known,) = (check for check in checks if check.name == "known faults")
        assert_message(known.found, names="mirror", values=jaxlib)
    untested = check_versions({**HERE, "jaxlib": "0.13.0"})  # mirror limits no launches there
    assert "known faults" not in [check.name for check in untested]
    assert [str(base_version(v)) for v in ("0.12.0.dev3+x", "1")] == ["0.12.0", "1"]


def test_supported_versions_match_the_requirements():
    project = tomllib.loads(pathlib.Path(fresh.ROOT, "pyproject.toml").read_text())["project"]
    required = dict(line.split(">=") for line in [*project["dependencies"], "jaxlib>=0.10.2"])
    required["python"] = project["requires-python"].removeprefix(">=")
    assert {name: required[name] for name in SUPPORTED} == SUPPORTED


def test_installed_versions_are_listed(monkeypatch):
    found = environment.installed_versions()
    assert found["python"] == sys.version.split()[0].rstrip("+")
    assert found["jax"] == importlib.metadata.version("jax")
    monkeypatch.setattr(environment, "_PACKAGES", ("no-such-package", "jax"))
    monkeypatch.setattr(environment, "driver_version", lambda: "570.1")
    monkeypatch.setattr(environment.platform, "python_version", lambda: "3.13.0+")
    found = environment.installed_versions()
    assert list(found) == ["mirror", "python", "jax", "NVIDIA driver"]
    assert (found["python"], found["NVIDIA driver"]) == ("3.13.0", "570.1")


FORCED = "--xla_force_host_platform_device_count"
FRACTION, OLD_FRACTION = "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"
PREALLOCATE, ALLOCATOR = "XLA_PYTHON_CLIENT_PREALLOCATE", "XLA_PYTHON_CLIENT_ALLOCATOR"
TERMINATE = "--xla_cpu_collective_call_terminate_timeout_seconds"
FAST_MATH = "--xla_cpu_enable_fast_math"
VARIABLES = {  # name: the variables, the states, and what the checks hold
    "none": ({}, [], {}),
    "agree": ({"XLA_FLAGS": f"{FORCED}=8", "JAX_NUM_CPU_DEVICES": "8"}, [], {}),
    "disagree": (
        {"XLA_FLAGS": f"{FORCED}=2 {FORCED}=8", "JAX_NUM_CPU_DEVICES": "4"},
        ["warning"],
        {
            "values": [f"{FORCED}=8", "JAX_NUM_CPU_DEVICES=4", 4],
            "fix": "unset JAX_NUM_CPU_DEVICES",
        },
    ),
    "dump": (
        {"XLA_FLAGS": "--xla_dump_to=/x"},
        ["warning"],
        {"values": "--xla_dump_to=/x", "fix": "XLA_FLAGS"},
    ),
    "fast math": (
        {"XLA_FLAGS": f"{FAST_MATH}=true"},
        ["warning"],
        {"values": f"{FAST_MATH}=true", "fix": "XLA_FLAGS"},
    ),
    "no fast math": ({"XLA_FLAGS": f"{FAST_MATH}=false"}, [], {}),
    "soon": (
        {"XLA_FLAGS": f"{TERMINATE}=5"},
        ["warning"],
        {"values": [f"{TERMINATE}=5", "SIGABRT", 40], "fix": f"{TERMINATE}=600"},
    ),
    "late": ({"XLA_FLAGS": f"{TERMINATE}=600"}, [], {}),
    "both": (
        {FRACTION: ".5", OLD_FRACTION: ".5"},
        ["problem", "ok"],
        {"values": [f"{FRACTION}=.5", f"{OLD_FRACTION}=.5"], "fix": f"unset {OLD_FRACTION}"},
    ),
    "half": ({OLD_FRACTION: "0.5"}, ["ok"], {"values": f"{OLD_FRACTION}=0.5"}),
    "not a number": (
        {FRACTION: "half"},
        ["problem"],
        {"values": f"{FRACTION}=half", "fix": f"export {FRACTION}=0.75"},
    ),
    "too much": (
        {FRACTION: "75"},
        ["warning"],
        {"values": [f"{FRACTION}=75", 0, 1], "fix": f"export {FRACTION}=0.75"},
    ),
    "grows": ({PREALLOCATE: "false"}, ["ok"], {"values": f"{PREALLOCATE}=false"}),
    "at once": ({PREALLOCATE: "1"}, ["ok"], {"values": f"{PREALLOCATE}=1"}),
    "no": (
        {PREALLOCATE: "no"},
        ["warning"],
        {
            "values": [f"{PREALLOCATE}=no", "false", "False", 0],
            "fix": f"export {PREALLOCATE}=false",
        },
    ),
    "unknown": (
        {ALLOCATOR: "best"},
        ["problem"],
        {"values": [f"{ALLOCATOR}=best", "default", "platform"], "fix": f"unset {ALLOCATOR}"},
    ),
    "slow": (
        {ALLOCATOR: "PLATFORM"},
        ["warning"],
        {"values": f"{ALLOCATOR}=PLATFORM", "fix": f"unset {ALLOCATOR}"},
    ),
    "quick": ({ALLOCATOR: "cuda_async"}, [], {}),
}


@rows("case", list(VARIABLES))
def test_environment_variables_are_checked(case):
    variables, states, wanted = VARIABLES[case]
    *checks, gpus = check_environment(variables)
    assert gpus.name == "GPUs"
    assert [check.state for check in checks] == states
    if wanted:
        assert_message("\n".join(map(str, checks)), **wanted)
    assert all(check.meaning and check.fix for check in checks if check.state != "ok")


def test_gpus_are_listed_from_the_driver(monkeypatch):
    gpus = [inside.drivers().Gpu(f"GPU-{i}", "Some GPU", (9, 0), 16 * 2**30) for i in range(2)]
    monkeypatch.setattr(environment, "gpus_of_process", lambda: tuple(gpus))
    (check,) = check_environment({})
    assert check.found == "2: Some GPU (16.0 GiB), Some GPU (16.0 GiB)"
    monkeypatch.setattr(environment, "unlisted_platforms", lambda: ["cuda"])
    monkeypatch.setitem(sys.modules, "pynvml", None)
    (check,) = check_environment({})
    assert check.state == "warning"
    assert_message(check.fix, fix="pip install nvidia-ml-py")


def test_checks_print_meaning_and_fix():
    check = Check("it", "warning", "3 of 4", "One is missing.", "pip install one")
    assert str(check).split("\n") == [
        "warning  it: 3 of 4",
        "         One is missing.",
        "         pip install one",
    ]


def test_summary_counts_the_worst():
    checks = [Check("", state, "") for state in ("ok", "problem", "warning", "warning")]
    assert worst(checks) == "problem"
    assert worst([]) == "ok"
    assert_message(summary(checks), names=["problem", "warnings"], values=[1, 2, 4])
    assert_message(summary(checks[:1]), values=1)


def test_help_lists_the_exit_statuses(capsys):
    with pytest.raises(SystemExit, match="0"):
        cli.main(["doctor", "--help"])
    said = capsys.readouterr().out
    assert re.findall(r"^  (\d+) +\w", said, re.MULTILINE) == ["0", "1", "2", "130"]


def test_unknown_option_exits_with_status_2(capsys):
    with pytest.raises(SystemExit, match="2"):
        cli.main(["doctor", "--yaml"])
    assert "unrecognized arguments: --yaml" in capsys.readouterr().err
