"""The parser: help, versions, suggestions, completion; and output that cannot be written."""

import os
import re
import shutil
import subprocess
import sys
import tomllib

import pytest

import mirror
from mirror import cli
from tests.support import fresh, inside
from tests.support.messages import assert_message
from tests.support.tables import rows

TABLES = inside.command_tables()
COMMANDS = list(TABLES)
SHELLS = TABLES["completion"]["options"]["shell"]["choices"]
install = inside.optional_packages()


def start(arguments: list[str], **options) -> subprocess.CompletedProcess[str]:
    """Runs `mirror` in a new process, whatever the exit status."""
    options = {"stdout": subprocess.PIPE, "env": fresh.INHERITED, **options}
    return subprocess.run(
        [sys.executable, "-m", "mirror", *arguments],
        cwd=fresh.ROOT,
        stderr=subprocess.PIPE,
        text=True,
        timeout=900,
        check=False,
        **options,
    )


# Without JAX.

LIGHT = [["--version"], ["--help"], [], *([name, "--help"] for name in COMMANDS)]


def test_help_and_version_do_not_import_jax():
    code = f"""
        import contextlib, io, sys
        from mirror import cli
        for arguments in {LIGHT}:
            text = io.StringIO()
            with contextlib.redirect_stdout(text), contextlib.suppress(SystemExit):
                cli.main(arguments)
            assert len(text.getvalue()) > 5, arguments
            loaded = {{"jax", "flax", "optax", "numpy"}} & sys.modules.keys()
            assert not loaded, (arguments, loaded)
    """
    fresh.run(code)


def test_entry_points_are_public_modules():
    project = tomllib.loads((fresh.ROOT / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"mirror": f"{cli.__name__}:main"}
    assert project["entry-points"]["pytest11"] == {"mirror": mirror.pytest_plugin.__name__}


def test_package_runs_as_a_module():
    done = start(["--version"])
    assert (done.returncode, done.stdout) == (0, f"mirror {mirror.__version__}\n")


def test_no_arguments_print_the_help(capsys):
    assert cli.main([]) == 0
    alone = capsys.readouterr().out
    with pytest.raises(SystemExit, match="0"):
        cli.main(["--help"])
    assert capsys.readouterr().out == alone
    assert cli.main(["--"]) == 0
    assert capsys.readouterr().out == alone
    for name in COMMANDS:
        assert re.search(rf"^ +{name}\b", alone, re.MULTILINE), name


@rows("name", COMMANDS)
def test_help_of_each_command_fits_80_columns(name, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit, match="0"):
        cli.main([name, "--help"])
    said = capsys.readouterr().out
    assert said.startswith(f"usage: mirror {name}")
    assert "examples:" in said
    assert "exit status:" in said
    assert "install_command" not in said


# Suggestions.

MISTAKES = {
    ("devics",): "Did you mean devices?",
    ("lanch", "--devices", "2"): "Did you mean launch?",
    ("estimate",): "Did you mean estimate-memory?",
    ("xyzzy",): "Choose from demo, devices",
    ("devices", "--jsn"): "Did you mean --json?",
    ("doctor", "--reprot"): "Did you mean --report?",
    ("bench", "--device=2,4", "--stpes=3"): "Did you mean --steps?",
    ("run", "train.py"): "Did you mean launch?",
    ("launch", "-n", "4", "train.py"): "Did you mean --devices?",
    ("launch", "--nproc_per_node=4", "train.py"): "Did you mean --devices?",
    ("launch", "--num_processes", "4", "train.py"): "Did you mean --devices?",
    ("--verison",): "Did you mean --version?",
    ("completion", "bsh"): "bash",
}


@rows("arguments", list(MISTAKES))
def test_mistakes_get_a_suggestion(arguments, capsys):
    with pytest.raises(SystemExit, match="2"):
        cli.main(list(arguments))
    said = capsys.readouterr()
    assert said.out == ""
    assert_message(said.err, fix=MISTAKES[arguments])


# Completion.


def test_completion_without_argcomplete_says_how_to_install_it(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "argcomplete", None)
    assert cli.main(["completion", "bash"]) == 2
    command = install.install_command("completion")
    assert_message(capsys.readouterr().err, names="argcomplete", fix=command)


@rows("shell", SHELLS)
def test_completion_prints_a_script(shell, capsys):
    pytest.importorskip("argcomplete", reason="needs the extra completion")
    assert cli.main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert "mirror" in script
    if shutil.which(shell):
        check = {"bash": ["-n"], "zsh": ["-n"], "fish": ["--no-execute"]}[shell]
        subprocess.run([shell, *check], input=script, text=True, check=True, timeout=900)


COMPLETIONS = {
    "mirror de": {"demo", "devices"},
    "mirror doctor --re": {"--report"},
    "mirror demo --executor p": {"pmap"},
    "mirror launch --d": {"--devices"},
}


@pytest.mark.parametrize("line", COMPLETIONS)
def test_shell_gets_the_completions(line, tmp_path):
    pytest.importorskip("argcomplete", reason="needs the extra completion")
    file = tmp_path / "answers"
    environment = {
        **os.environ,
        "_ARGCOMPLETE": "1",
        "_ARGCOMPLETE_IFS": "\n",
        "_ARGCOMPLETE_STDOUT_FILENAME": str(file),
        "COMP_LINE": line,
        "COMP_POINT": str(len(line)),
    }
    done = start([], env=environment)
    assert done.returncode == 0, done.stderr
    assert {answer.strip() for answer in file.read_text().split("\n")} == COMPLETIONS[line]


# Output that cannot be written.

HELP = [["--help"], ["demo", "--help"], ["--version"], []]
OUTPUTS = {  # with PYTHONUNBUFFERED, writing fails at once, otherwise at the end
    "without JAX": [[unbuffered, *arguments] for unbuffered in ("", "1") for arguments in HELP],
    "with JAX": [["1", "devices", "--json"]],
}
BOTH = ["without JAX", pytest.param("with JAX", marks=pytest.mark.slow)]


@pytest.mark.parametrize("kind", BOTH)
def test_full_disk_is_one_line(kind, subtests):
    for case in OUTPUTS[kind]:
        with subtests.test(msg=" ".join(case)):
            check_full_disk(case)


def check_full_disk(case):
    with open("/dev/full", "w") as full:
        done = start_into(full, case)
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert_message(done.stderr, names="mirror: error", values="No space left on device")


def test_closed_output_is_one_line():
    line = ["sh", "-c", 'exec "$0" -m mirror --help >&-', sys.executable]
    options = {"cwd": fresh.ROOT, "env": fresh.INHERITED, "check": False}
    done = subprocess.run(line, stderr=subprocess.PIPE, text=True, **options)
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert_message(done.stderr, names="mirror: error", values="closed")


@pytest.mark.parametrize("kind", BOTH)
def test_closed_pipe_ends_silently(kind, subtests):
    for case in OUTPUTS[kind]:
        with subtests.test(msg=" ".join(case)):
            check_closed_pipe(case)


def check_closed_pipe(case):
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = start_into(writer, case)
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


def start_into(stdout, case: list[str]) -> subprocess.CompletedProcess[str]:
    unbuffered, *arguments = case
    more = {"JAX_PLATFORMS": "cpu", "PYTHONUNBUFFERED": unbuffered}
    return start(arguments, stdout=stdout, env={**fresh.INHERITED, **more})


def test_other_errors_are_not_hidden(monkeypatch):
    def fail(command, parsed):
        raise FileNotFoundError(2, "No such file", "x.json")

    monkeypatch.setattr(inside.commands(), "run_command", fail)
    with pytest.raises(FileNotFoundError):
        cli.main(["devices"])


@rows("number", ["abc", "-3", "0", "2.5"])
@rows("command", ["devices", "doctor"])
def test_invalid_number_of_host_devices_is_one_line(number, command, monkeypatch, capsys):
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", number)
    monkeypatch.setattr(inside.commands(), "run_command", lambda *_: pytest.fail("it started"))
    assert cli.main([command]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"mirror {command}: error: ")
    setting = f"JAX_NUM_CPU_DEVICES={number}"
    assert_message(said, values=setting, fix="unset JAX_NUM_CPU_DEVICES")


@rows("number", ["", "-1", "4"])
def test_valid_number_of_host_devices_is_accepted(number, monkeypatch):
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", number)
    monkeypatch.setattr(inside.commands(), "run_command", lambda *_: 0)
    assert cli.main(["devices"]) == 0


# The command that installs an extra.


def test_install_commands_work_while_the_package_is_not_published(monkeypatch):
    assert install.install_command("train") == 'pip install ".[train]" (in a clone of mirror)'
    monkeypatch.setattr(install, "IS_PUBLISHED", True)
    assert install.install_command("train") == 'pip install "mirror-jax[train]"'


def test_extras_of_messages_exist():
    """Each extra that the code names is one of the package."""
    text = (fresh.ROOT / "pyproject.toml").read_text()
    table = text.split("[project.optional-dependencies]")[1].split("\n\n")[0]
    extras = set(re.findall(r"^(\w+) = ", table, re.MULTILINE))
    files = [*(fresh.ROOT / "mirror").rglob("*.py"), *(fresh.ROOT / "mirror").rglob("*.toml")]
    named = {
        name
        for file in files
        for name in re.findall(
            r"(?:install_command|INSTALL)\(['\"]?(\w+)['\"]?\)(?! ->)", file.read_text()
        )
        if name != "extra"
    }
    assert named >= {"completion", "demo", "train", "cuda12"}
    assert named <= extras


@pytest.mark.skipif(install.IS_PUBLISHED, reason="pip finds the package on the index")
def test_no_text_names_a_package_that_pip_does_not_find():
    folders = ("mirror", "docs", "notebooks")
    files = [file for folder in folders for file in (fresh.ROOT / folder).rglob("*.*")]
    texts = {
        str(file.relative_to(fresh.ROOT)): file.read_text()
        for file in [*files, fresh.ROOT / "README.md"]
        if file.suffix in (".py", ".md", ".toml", ".ipynb")
    }
    found = [name for name, text in texts.items() if re.search(r"install .{0,4}mirror-jax", text)]
    assert found == ["mirror/_src/base/optional.py"]
