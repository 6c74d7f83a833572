"""`mirror launch`: the environment, the process that it becomes, and errors before it starts."""

import json
import os
import pathlib
import signal
import subprocess
import sys

import pytest

from mirror import cli
from tests.support import fresh, inside
from tests.support.messages import assert_message, raises
from tests.support.tables import rows

launch, OptionError = inside.launcher()
FLAG = "--xla_force_host_platform_device_count"
PRINTS = """
import json, os, sys
names = ("JAX_NUM_CPU_DEVICES", "JAX_PLATFORMS", "CUDA_VISIBLE_DEVICES")
print(json.dumps([__name__, sys.argv, {n: os.environ[n] for n in names if n in os.environ}]))
"""


def start(
    *arguments: str, cwd: pathlib.Path, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Runs `mirror launch` in a directory, whatever the exit status."""
    return subprocess.run(command(*arguments), cwd=cwd, env=env(**environment), **PIPES)


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "mirror", "launch", *arguments]


def env(**environment: str) -> dict[str, str]:
    path = os.pathsep.join(filter(None, [environment.pop("PYTHONPATH", ""), str(fresh.ROOT)]))
    return {**fresh.INHERITED, **environment, "PYTHONPATH": path}


PIPES = {"capture_output": True, "text": True, "timeout": 100, "check": False}


# What it sets. On a machine with this many GPUs that JAX can use:
CPUS = {"JAX_NUM_CPU_DEVICES": "4"}
ENVIRONMENTS = {  # GPUs, options, environment, what is added
    "nothing asked": (8, None, False, {}, {}),
    "no GPU": (0, 4, False, {}, CPUS),
    "the flag agrees": (0, 4, False, {"XLA_FLAGS": f"{FLAG}=2 {FLAG}=4"}, CPUS),
    "the variable agrees": (0, 4, False, {**CPUS}, CPUS),
    "GPUs": (8, 3, False, {}, {"CUDA_VISIBLE_DEVICES": "0,1,2"}),
    "all GPUs": (2, 2, False, {}, {"CUDA_VISIBLE_DEVICES": "0,1"}),
    "selected GPUs": (
        3,
        2,
        False,
        {"CUDA_VISIBLE_DEVICES": "5, GPU-1,2"},
        {"CUDA_VISIBLE_DEVICES": "5,GPU-1"},
    ),
    "the flag does not matter on GPUs": (
        2,
        1,
        False,
        {"XLA_FLAGS": f"{FLAG}=8"},
        {"CUDA_VISIBLE_DEVICES": "0"},
    ),
    "on the CPU": (8, 4, True, {}, {**CPUS, "JAX_PLATFORMS": "cpu"}),
    "on the CPU, without a number": (8, None, True, {}, {"JAX_PLATFORMS": "cpu"}),
    "of two platforms": (
        8,
        4,
        True,
        {"JAX_PLATFORMS": "cuda,cpu"},
        {**CPUS, "JAX_PLATFORMS": "cpu"},
    ),
    "JAX is set to the CPU": (8, 4, False, {"JAX_PLATFORMS": "cpu"}, CPUS),
    "JAX is set to GPUs": (2, 1, False, {"JAX_PLATFORMS": "cuda"}, {"CUDA_VISIBLE_DEVICES": "0"}),
}


@rows("case", list(ENVIRONMENTS))
def test_environment_has_the_devices(case, monkeypatch):
    num_gpus, count, on_cpu, environment, added = ENVIRONMENTS[case]
    monkeypatch.setattr(launch, "visible_gpus", lambda: ["GPU-"] * num_gpus)
    environment = {"HOME": "/x", **environment}
    before = dict(environment)
    (made,) = launch.environments_for(environment, 1, count, on_cpu=on_cpu)
    assert made == {**before, **added}
    assert environment == before


CONTRADICTIONS = {  # GPUs, options, environment, the message
    "the flag": (
        0,
        4,
        False,
        {"XLA_FLAGS": f"{FLAG}=4 {FLAG}=2"},
        {"names": "--devices 4", "values": f"XLA_FLAGS={FLAG}=2", "fix": f"Remove {FLAG}"},
    ),
    "the variable": (
        0,
        4,
        False,
        {"JAX_NUM_CPU_DEVICES": "8"},
        {
            "names": "--devices 4",
            "values": "JAX_NUM_CPU_DEVICES=8",
            "fix": "Unset JAX_NUM_CPU_DEVICES",
        },
    ),
    "not a number": (
        0,
        4,
        False,
        {"JAX_NUM_CPU_DEVICES": "abc"},
        {"values": "JAX_NUM_CPU_DEVICES=abc", "fix": "Unset JAX_NUM_CPU_DEVICES"},
    ),
    "too few GPUs": (
        2,
        4,
        False,
        {},
        {
            "names": ["--devices 4", "/device:GPU:0", "/device:GPU:1"],
            "values": 2,
            "fix": ["at most 2", "mirror launch --devices 4 --cpu"],
        },
    ),
    "too few visible GPUs": (
        1,
        2,
        False,
        {"CUDA_VISIBLE_DEVICES": "3"},
        {"names": "CUDA_VISIBLE_DEVICES=3", "fix": ["extend CUDA_VISIBLE_DEVICES", "--cpu"]},
    ),
    "selected by JAX": (
        4,
        2,
        False,
        {"JAX_CUDA_VISIBLE_DEVICES": "2,3"},
        {"names": "JAX_CUDA_VISIBLE_DEVICES=2,3", "fix": "CUDA_VISIBLE_DEVICES"},
    ),
    "no host devices": (
        0,
        2,
        False,
        {"JAX_PLATFORMS": "cuda"},
        {"names": "JAX_PLATFORMS=cuda", "fix": ["Unset JAX_PLATFORMS", "JAX_PLATFORMS=cpu"]},
    ),
    "not the CPU": (
        2,
        None,
        True,
        {"JAX_PLATFORMS": "cuda"},
        {"names": ["--cpu", "JAX_PLATFORMS=cuda"], "fix": ["Unset JAX_PLATFORMS", "omit --cpu"]},
    ),
}


@rows("case", list(CONTRADICTIONS))
def test_contradictions_are_rejected(case, monkeypatch):
    num_gpus, count, on_cpu, environment, message = CONTRADICTIONS[case]
    monkeypatch.setattr(launch, "visible_gpus", lambda: ["GPU-"] * num_gpus)
    with raises(OptionError, **message):
        launch.environments_for(environment, 1, count, on_cpu=on_cpu)


# The GPUs. The stand-in of NVML reports GPUs; a folder with metadata stands for JAX's plugin.
GPUS = {  # GPUs, plugin, CUDA_VISIBLE_DEVICES, variables, whether standard error says something
    "no driver": ("0", True, None, CPUS, False),
    "two of three": ("5", True, "4,0,1,2", {"CUDA_VISIBLE_DEVICES": "4,0,1,2"}, False),
    "hidden": ("5", True, "", {"CUDA_VISIBLE_DEVICES": "", **CPUS}, False),
    "no plugin": ("5", False, None, CPUS, True),
}


@pytest.mark.parametrize(
    "case",
    ["two of three", *(pytest.param(c, marks=pytest.mark.nightly) for c in GPUS if c[0] != "t")],
)
def test_gpus_are_those_that_jax_can_use(case, tmp_path):
    gpus, has_plugin, visible, variables, says = GPUS[case]
    (tmp_path / "train.py").write_text(PRINTS)
    if has_plugin:
        metadata = tmp_path / "plugin-1.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text("Name: plugin\nVersion: 1\n")
        (metadata / "entry_points.txt").write_text("[jax_plugins]\nxla_cuda12 = json\n")
    environment = {
        "STAND_IN_GPUS": gpus,
        "PYTHONPATH": f"{fresh.STAND_INS}{os.pathsep}{tmp_path}",
        **({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}),
    }
    done = start("--devices", "4", "train.py", cwd=tmp_path, **environment)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)[2] == variables
    assert bool(done.stderr) == says
    if says:
        assert_message(done.stderr, fix=["mirror doctor", "--cpu"])


BINDINGS = ["pip install nvidia-ml-py", "--cpu"]
LIBRARY = ["NVIDIA_DRIVER_CAPABILITIES=compute,utility", "--cpu"]
AMD = ["HIP_VISIBLE_DEVICES", "--cpu"]
UNLISTED = {  # whether nvidia-ml-py is installed, the driver's file, JAX's plugin, the fix
    "no bindings": (False, "_DRIVERS", "cuda", BINDINGS),
    "no library": (True, "_DRIVERS", "cuda", LIBRARY),
    "AMD": (False, "_DRIVER_OF_ROCM", "rocm", AMD),
    "AMD with bindings": (True, "_DRIVER_OF_ROCM", "rocm", AMD),
    "no plugin": (True, "_DRIVERS", None, None),
    "AMD without a plugin": (True, "_DRIVER_OF_ROCM", "cuda", None),
    "no driver": (True, None, "cuda", None),
}


@rows("bindings, driver, plugin, fix", UNLISTED)
def test_gpus_that_cannot_be_listed_are_an_error(monkeypatch, bindings, driver, plugin, fix):
    """The stand-in of NVML fails, as in a container without libnvidia-ml."""
    monkeypatch.delenv("STAND_IN_GPUS", raising=False)
    monkeypatch.setitem(sys.modules, "pynvml", fresh.stand_in("pynvml") if bindings else None)
    drivers = inside.drivers()
    drivers._visible.cache_clear()
    monkeypatch.setattr(drivers, "_DRIVERS", ("/",) if driver == "_DRIVERS" else ())
    monkeypatch.setattr(drivers, "_DRIVER_OF_ROCM", "/" if driver == "_DRIVER_OF_ROCM" else "")
    monkeypatch.setattr(launch, "_has_plugin", lambda name="cuda|rocm": plugin in name.split("|"))
    for processes in (1, 2):
        if fix is None:
            environments = launch.environments_for({}, processes, 2, on_cpu=False)
            assert environments == [{"JAX_NUM_CPU_DEVICES": "2"}] * processes
        else:
            with raises(OptionError, names="--devices", fix=fix):
                launch.environments_for({}, processes, 2, on_cpu=False)


def test_gpus_are_listed_once(monkeypatch):
    """Otherwise, a message about them is printed twice."""
    calls = []
    monkeypatch.setattr(launch, "visible_gpus", lambda: calls.append("listed") or [])
    launch.environments_for({}, 2, 4, on_cpu=False)
    assert calls == ["listed"]


def test_several_mig_partitions_are_not_several_devices_of_a_process(monkeypatch):
    """The stand-in of NVML lists both partitions; CUDA shows a process the first one."""
    first, second = (f"MIG-{i * 8}-0000-0000-0000-000000000000" for i in "01")
    monkeypatch.setitem(sys.modules, "pynvml", fresh.stand_in("pynvml"))
    monkeypatch.setattr(launch, "_has_plugin", lambda: True)
    selected = {"CUDA_VISIBLE_DEVICES": f"{first},{second}"}
    for name, value in {"STAND_IN_GPUS": "2", "STAND_IN_MIG": "9984", **selected}.items():
        monkeypatch.setenv(name, value)
    inside.drivers()._visible.cache_clear()
    for processes in (1, 2):
        made = launch.environments_for(selected, processes, 1, on_cpu=False)
        assert [each["CUDA_VISIBLE_DEVICES"] for each in made] == [first, second][:processes]
    with raises(OptionError, names=["--devices 2", first], fix=["--devices 1", "-mig 0"]):
        launch.environments_for(selected, 1, 2, on_cpu=False)
    monkeypatch.setattr(launch, "visible_gpus", lambda: ["MIG-0", "MIG-1", "MIG-2", "MIG-3"])
    with raises(OptionError, names=["--devices 2", "MIG-0"], fix=["--devices 1", "-mig 0"]):
        launch.environments_for({}, 2, None, on_cpu=False)
    inside.drivers()._visible.cache_clear()


# The process that it becomes.


@pytest.mark.parametrize("path", ["train.py", "package.train"])
def test_script_has_its_own_arguments_and_name(path, tmp_path):
    (tmp_path / "package").mkdir()
    for file in ("train.py", "package/train.py"):
        (tmp_path / file).write_text(PRINTS)
    (tmp_path / "package" / "__init__.py").write_text("")
    how = [path] if path.endswith(".py") else ["-m", path]
    arguments = ["--devices", "7", "-m", "--", "-h", "a b"]
    done = start("--devices", "3", "--cpu", *how, *arguments, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    name, (file, *rest), variables = json.loads(done.stdout)
    assert (name, rest) == ("__main__", arguments)
    assert pathlib.Path(file).name == "train.py"
    assert variables == {"JAX_NUM_CPU_DEVICES": "3", "JAX_PLATFORMS": "cpu"}


DASHES = {  # what follows `mirror launch`, and the script's arguments
    "train.py -- x": ["--", "x"],
    "train.py --devices 2": ["--devices", "2"],
    "--devices 2 train.py -- -- x": ["--", "--", "x"],
    "-- train.py -x": ["-x"],
    "--cpu -m train --cpu": ["--cpu"],
}


@rows("line", list(DASHES))
def test_options_end_at_the_script(line, tmp_path, monkeypatch, capsys):
    (tmp_path / "train.py").write_text("")
    monkeypatch.chdir(tmp_path)
    started = []

    def execve(*arguments):
        started.append(arguments)
        return 0

    monkeypatch.setattr(launch.os, "execve", execve)
    monkeypatch.setattr(launch, "visible_gpus", list)
    assert cli.main(["launch", *line.split()]) == 0
    ((file, arguments, _),) = started
    count = len(DASHES[line])
    assert file == arguments[0] == sys.executable
    assert arguments[-count:] == DASHES[line]
    assert arguments[1:-count] == (["-m", "train"] if "-m" in line else ["train.py"])
    hint = capsys.readouterr().err
    if line == "train.py --devices 2":
        assert_message(hint, names="train.py", fix="mirror launch --devices N train.py")
        assert hint.count("\n") == 1
    else:
        assert hint == ""


def test_script_has_its_own_exit_status_and_traceback(tmp_path):
    (tmp_path / "train.py").write_text("import sys; sys.exit(7)")
    assert start("train.py", cwd=tmp_path).returncode == 7
    (tmp_path / "train.py").write_text("1 / 0")
    done = start("train.py", cwd=tmp_path)
    assert done.returncode == 1
    assert "ZeroDivisionError" in done.stderr
    assert "mirror/_src" not in done.stderr
    assert done.stderr.count("File ") == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_script_receives_signals(number, tmp_path):
    code = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
    (tmp_path / "train.py").write_text(code)
    with subprocess.Popen(
        command("train.py"), cwd=tmp_path, env=env(), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert int(process.stdout.readline()) == process.pid, "the same process"
        process.send_signal(number)
        assert process.wait(timeout=900) == -number


@pytest.mark.slow
def test_script_has_host_devices(tmp_path):
    code = "import jax, mirror; print(jax.device_count(), mirror.MirroredStrategy())"
    (tmp_path / "train.py").write_text(code)
    done = start("--devices", "3", "train.py", cwd=tmp_path)
    assert done.stdout.startswith("3 "), done.stderr
    assert "/device:CPU:2" in done.stdout


def test_launcher_does_not_import_jax():
    code = """
        import os, sys
        os.execve = lambda *arguments: print(sorted({"jax", "flax", "numpy"} & sys.modules.keys()))
        from mirror import cli
        cli.main(["launch", "--devices", "3", "--cpu", "tests/conftest.py"])
    """
    assert fresh.run(code) == "[]\n"


def test_cache_is_in_the_environment(tmp_path, monkeypatch, capsys, subtests):
    (tmp_path / "train.py").write_text("")
    (tmp_path / "file").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    started = []
    monkeypatch.setattr(launch.os, "execve", lambda *arguments: started.append(arguments[2]))
    least = "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"
    for folder, where in {"": "xdg/mirror/programs", "mine": "mine", "file/x": None}.items():
        with subtests.test(msg=folder):
            monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", folder and str(tmp_path / folder))
            monkeypatch.setenv(least, "3")
            cli.main(["launch", "--cache", "train.py"])
            environment = started.pop()
            assert environment[least] == "3", "of the user"
            if where is not None:
                assert environment["JAX_COMPILATION_CACHE_DIR"] == str(tmp_path / where)
                assert (tmp_path / where).is_dir()
            said = capsys.readouterr().err
            assert ("file/x" in said) == (where is None)


# Errors before anything starts.

MISSING = {
    "no script": ("trainn.py", {"names": "trainn.py", "fix": "train.py"}),
    "nothing like it": ("x/y.py", {"names": "x/y.py", "fix": "current directory"}),
    "a module": ("numpy.nothing", {"names": "numpy.nothing", "fix": "-m numpy.nothing"}),
    "a directory": ("folder", {"names": "folder is a directory", "fix": "folder/train.py"}),
    "no module": ("-m nowhere.at_all", {"names": "nowhere", "fix": "directory"}),
    "no module in a package": ("-m json.nowhere", {"names": "json.nowhere", "fix": "directory"}),
    "a module of no package": ("-m train.more", {"names": "train.more", "fix": "directory"}),
    "the file of a module": ("-m train.py", {"names": "train.py", "fix": "Omit -m"}),
}


@rows("case", list(MISSING))
def test_missing_scripts_are_rejected(case, tmp_path, monkeypatch, capsys):
    arguments, message = MISSING[case]
    (tmp_path / "train.py").write_text("")
    (tmp_path / "folder").mkdir(exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launch.os, "execve", lambda *arguments: pytest.fail("it started"))
    assert cli.main(["launch", *arguments.split()]) == 2
    said = capsys.readouterr().err
    assert said.startswith("mirror launch: error: ")
    assert_message(said, **message)


def test_unreadable_scripts_are_rejected(tmp_path, monkeypatch):
    script = tmp_path / "train.py"
    script.write_text("")
    monkeypatch.setattr(launch.os, "access", lambda path, mode: False)  # root reads all files
    with raises(OptionError, names=str(script), fix="chmod"):
        launch.require_script(str(script))


BAD_OPTIONS = {
    "no devices": (["--devices", "0", "x.py"], "from 1 to 1024"),
    "not a number": (["--devices", "two", "x.py"], "from 1 to 1024"),
    "too many": (["--devices", "99999", "x.py"], "from 1 to 1024"),
    "too many processes": (["--processes", "99999999999", "x.py"], "from 1 to 1024"),
    "no script": ([], "SCRIPT"),
    "an unknown option": (["--devcies", "2", "x.py"], "--devices"),
}


@rows("case", list(BAD_OPTIONS))
def test_bad_options_are_rejected(case, capsys):
    arguments, says = BAD_OPTIONS[case]
    with pytest.raises(SystemExit, match="2"):
        cli.main(["launch", *arguments])
    assert_message(capsys.readouterr().err, fix=says)
