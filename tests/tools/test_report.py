"""`mirror doctor --report`: its contents, and what it keeps out."""

import re

import pytest

from mirror import cli
from tests.support import fresh, inside
from tests.support.tables import rows

check_module, command, *_ = inside.doctor()
Check = check_module.Check

CHECKS = [
    Check("jax", "ok", "0.10.2"),
    Check("XLA_FLAGS", "warning", "--xla_a=/home/ann/b|c", "It is slow.", "Remove it."),
]
DEVICES = {
    "physical": [
        {"name": "CPU:0", "what": "x86_64, 2 cores", "memory_bytes": 2**30, "visible": True},
        {"name": "GPU:0", "what": "H100", "memory_bytes": None, "visible": False},
    ],
    "logical": [
        {"name": "CPU:0", "physical": "CPU:0", "device_type": "CPU", "memory_limit": None},
        {
            **{"name": "GPU:0", "physical": "GPU:0", "device_type": "GPU"},
            **{"memory_current": 2**20, "memory_limit": 2**30},
        },
    ],
    "configuration": [{"setting": "host devices", "value": "4", "why": "JAX_X=4, set by you"}],
    "versions": {"backend": "cpu"},
    "notes": ["JAX does not use GPU:0."],
}
VERSIONS = {"mirror": "9.8.7", "jax": "0.10.2"}


@pytest.fixture
def machine(monkeypatch):
    """Sets what the checks and the subprocess find."""
    monkeypatch.setattr(command, "installed_versions", lambda: VERSIONS)
    monkeypatch.setattr(command, "run_checks", lambda *_: iter(CHECKS))
    monkeypatch.setattr(command, "inventory_in_child", lambda environment: DEVICES)
    monkeypatch.setenv("HOME", "/home/ann")
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "/home/ann/cache")


@pytest.mark.usefixtures("machine")
def test_report_is_one_block_of_markdown(capsys):
    assert cli.main(["doctor", "--report"]) == 0
    said = capsys.readouterr()
    assert said.out.startswith("### mirror 9.8.7 on ")
    assert "collecting" in said.err
    for row in (
        "| jax | 0.10.2 |",
        "| CPU:0 | x86_64, 2 cores | 1.0 GiB | yes |",
        "| GPU:0 | H100 | unknown | no |",
        "| CPU:0 | CPU:0 | not counted |",
        "| GPU:0 | GPU:0 | 1.0 MiB of 1.0 GiB |",
        "| host devices | 4 | JAX_X=4, set by you |",
        "| JAX_COMPILATION_CACHE_DIR | ~/cache |",
        "**Note:** JAX does not use GPU:0.",
        "**Checks:** 1 warning (2 checks)",
        "- ok: jax: 0.10.2",
        "- **warning**: XLA_FLAGS: --xla_a=~/b\\|c\n  - It is slow.\n  - Remove it.",
    ):
        assert row in said.out, row
    assert re.search(r"^\| chex \| \d", said.out, re.MULTILINE)
    assert "ann" not in said.out


@pytest.mark.usefixtures("machine")
def test_problem_sets_the_exit_status(monkeypatch, capsys):
    monkeypatch.setattr(command, "run_checks", lambda *_: iter([Check("it", "problem", "broken")]))
    monkeypatch.setattr(command, "inventory_in_child", lambda _: "ended the process with SIGABRT")
    assert cli.main(["doctor", "--report"]) == 1
    assert "**Devices:** ended the process with SIGABRT" in capsys.readouterr().out


VARIABLES = {
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": "--xla_a",
    "CUDA_VISIBLE_DEVICES": '""',  # empty
    "NCCL_DEBUG": "INFO",
    "TF_CPP_MIN_LOG_LEVEL": "1",
    "JAX_API_KEY": "(hidden)",
    "NCCL_AUTH_TOKEN": "(hidden)",
    # Not shown.
    "TF_VAR_password": None,
    "AWS_SECRET_ACCESS_KEY": None,
    "USER": None,
    "PATH": None,
}


def test_variables_without_secrets():
    environment = dict.fromkeys(VARIABLES, "hunter2") | {
        name: "" if value == '""' else value
        for name, value in VARIABLES.items()
        if value not in (None, "(hidden)")
    }
    shown = dict(command.variables(environment))
    assert shown == {name: value for name, value in VARIABLES.items() if value is not None}
    assert list(shown) == sorted(shown)


PATHS = {  # with HOME=/data/people/ann, of the user ann
    "/data/people/ann/x.py": "~/x.py",
    "/data/people/ann": "~",
    "/data/people/anna/x.py": "/data/people/anna/x.py",
    "/scratch/ann/x.py": "/scratch/USER/x.py",
    "/home/bob/x.py": "/home/USER/x.py",
    "/Users/bob": "/Users/USER",
    "https://bob:hunter2@host/x": "https://host/x",
    "grpc://host:80/x": "grpc://host:80/x",
    "announce the plan": "announce the plan",
}


@rows("text", list(PATHS))
def test_paths_have_no_user_names(text, monkeypatch):
    monkeypatch.setattr(command.getpass, "getuser", lambda: "ann")
    assert command.without_names(text, {"HOME": "/data/people/ann"}) == PATHS[text]


@pytest.mark.parametrize("home", ["/", ""])
def test_container_without_a_user(home, monkeypatch):
    def fail():
        raise KeyError("uid not found")

    monkeypatch.setattr(command.getpass, "getuser", fail)
    assert command.without_names("/opt/x/y", {"HOME": home}) == "/opt/x/y"


@pytest.mark.slow
def test_inventory_runs_in_a_subprocess(monkeypatch):
    environment = {**fresh.INHERITED, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "3"}
    devices = command.inventory_in_child(environment)
    assert [d["name"] for d in devices["logical"]] == [f"/device:CPU:{i}" for i in range(3)]
    crash = command.ProbeResult(-6, "", "F1121 16:32:02.13    2020 a.cc:234] Check failed: it\n")
    monkeypatch.setattr(command, "_run_code", lambda code, environment: crash)
    assert command.inventory_in_child({}) == "ended the process with SIGABRT: Check failed: it"


def test_report_and_json_exclude_each_other(capsys):
    with pytest.raises(SystemExit, match="2"):
        cli.main(["doctor", "--report", "--json"])
    assert "--report" in capsys.readouterr().err
