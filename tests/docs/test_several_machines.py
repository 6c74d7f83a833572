"""The files for schedulers on the page about several machines, and its example with Ray."""

import os
import re
import subprocess
import sys
import tempfile

import pytest
import yaml

from mirror.distributed import TFConfigClusterResolver
from tests.support import fresh
from tests.support.pages import PAGES
from tests.support.processes import free_ports

PAGE = PAGES["docs/several-machines.md"]
NEEDS_RAY = pytest.mark.dev("ray")


def block(language: str, word: str) -> str:
    """Returns the only block in this language that contains a word."""
    found = re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.DOTALL | re.M)
    (text,) = [text for text in found if word in text]
    return text


def test_jobset_makes_its_pods_a_cluster(monkeypatch):
    jobset = yaml.safe_load(block("yaml", "JobSet"))
    name = jobset["metadata"]["name"]
    (group,) = jobset["spec"]["replicatedJobs"]
    job = group["template"]["spec"]
    count = job["completions"]
    assert job["parallelism"] == count
    (container,) = job["template"]["spec"]["containers"]
    first, second = container["env"]
    # Kubernetes expands only the variables that are defined earlier in the list.
    assert "job-completion-index" in first["valueFrom"]["fieldRef"]["fieldPath"]
    port = container["ports"][0]["containerPort"]
    for index in range(count):
        text = second["value"].replace(f"$({first['name']})", str(index))
        monkeypatch.setenv(second["name"], text)
        resolver = TFConfigClusterResolver()
        # Kubernetes gives a pod of a JobSet this name, in the subdomain of the JobSet.
        pods = [f"{name}-{group['name']}-0-{i}.{name}:{port}" for i in range(count)]
        assert resolver.cluster_spec().job_tasks("worker") == pods
        assert (resolver.task_id, resolver.master()) == (index, pods[0])


def test_slurm_script_is_valid_and_retries(tmp_path):
    srun = tmp_path / "srun"
    srun.write_text('#!/bin/sh\necho "$@" >> calls\ntest $(wc -l < calls) -ge 2\n')
    srun.chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    script = block("sh", "#SBATCH")
    subprocess.run(["bash", "-c", script], cwd=tmp_path, env={"PATH": path}, check=True)
    calls = (tmp_path / "calls").read_text().splitlines()
    assert calls == ["--kill-on-bad-exit=1 python train.py"] * 2


PORTS = 4096  # from which Slurm's resolver takes one, by the number of the job
FIRST_PORT = 65536 - PORTS
TRAIN = f"""\
import os, runpy, sys
# The first attempt sends SIGTERM to task 1; the next one resumes.
mode = "SIGTERM" if os.environ["SLURM_STEP_ID"] == "0" else "resume"
sys.argv = ["train.py", mode, "ckpt"]
runpy.run_path({str(fresh.PROGRAMS / "several_training.py")!r}, run_name="__main__")
"""


@pytest.fixture
def in_slurm(tmp_path):
    """Runs a script as `sbatch` does, with a stand-in for `srun`."""
    programs = tmp_path / "bin"
    programs.mkdir()
    srun = fresh.STAND_INS / "srun.py"
    commands = {"python": "", "mirror": "-m mirror", "srun": str(srun)}
    for name, arguments in commands.items():
        (programs / name).write_text(f'#!/bin/sh\nexec {sys.executable} {arguments} "$@"\n')
        (programs / name).chmod(0o755)
    (port,) = free_ports(1, FIRST_PORT, PORTS // 20)
    job = PORTS + port - FIRST_PORT

    def run(script):
        options = dict(re.findall(r"--(nodes|ntasks-per-node)=(\d+)", block("sh", "#SBATCH")))
        return subprocess.run(
            ["bash", "-c", script],
            cwd=tmp_path,
            env={
                **{k: v for k, v in fresh.INHERITED.items() if not k.startswith("SLURM_")},
                "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
                "PYTHONPATH": str(fresh.ROOT),
                "JAX_PLATFORMS": "cpu",
                "JAX_NUM_CPU_DEVICES": "2",
                "SLURM_JOB_ID": str(job),
                "SLURM_NNODES": options["nodes"],
                "SLURM_NTASKS_PER_NODE": options["ntasks-per-node"],
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=900,
            check=False,
        )

    return run


@pytest.mark.slow
def test_slurm_script_saves_after_sigterm_and_resumes(in_slurm, tmp_path):
    (tmp_path / "train.py").write_text(TRAIN)
    done = in_slurm(block("sh", "#SBATCH"))
    assert done.returncode == 0, done.stdout
    first, second, third, fourth = re.findall(r"ended at (\d+) (\w+)", done.stdout)
    assert first == second  # both tasks of the first attempt
    assert 7 <= int(first[0]) < 20
    # The task that exits first does so with 143. SIGTERM of --kill-on-bad-exit may meet the other
    # one, when everything is saved and the tasks have left each other.
    ends = re.findall(r"^srun: error: (\w+): task (\d): (.*)$", done.stdout, re.MULTILINE)
    assert {end[:2] for end in ends} == {("localhost", "0"), ("node1", "1")}
    assert ends[0][2] == "Exited with exit code 143"
    assert ends[1][2] in ("Exited with exit code 143", "Terminated")
    assert done.stdout.count(f"resumes at {first[0]}") == 2
    assert third == fourth
    assert third[0] == "20"


@pytest.mark.nightly
def test_doctor_finds_the_tasks_of_slurm(in_slurm):
    (command,) = re.findall(r"^srun .* mirror doctor --distributed$", PAGE, re.MULTILINE)
    done = in_slurm(command)
    assert done.returncode == 0, done.stdout
    for i in (0, 1):
        pattern = rf"cluster: SlurmClusterResolver: process {i} of 2, coordinator localhost:\d+"
        assert re.search(pattern, done.stdout), done.stdout
    assert done.stdout.count("correct across 4 devices of 2 processes") == 2


def on_ray(code, directory, *paths):
    """Returns what a driver prints; its actors are processes of this machine."""
    file = directory / "on_ray.py"
    file.write_text(code)
    # Ray's sockets are in its directory, and their paths must be short.
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as temporary:
        done = subprocess.run(
            [sys.executable, str(file)],
            env={
                **fresh.INHERITED,
                "PYTHONPATH": os.pathsep.join([str(fresh.ROOT), *paths]),
                "HOME": str(directory),
                "JAX_PLATFORMS": "cpu",
                "JAX_NUM_CPU_DEVICES": "2",
                "RAY_ADDRESS": "local",
                "RAY_AUTH_MODE": "disabled",
                "RAY_TMPDIR": temporary,
                "RAY_USAGE_STATS_ENABLED": "0",
            },
            cwd=directory,
            capture_output=True,
            text=True,
            timeout=900,
            check=False,
        )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


RAYS = {"stand-in": [str(fresh.STAND_INS)], "ray": []}


@pytest.mark.parametrize(
    "ray",
    [
        pytest.param("stand-in", marks=pytest.mark.nightly),
        pytest.param("ray", marks=[NEEDS_RAY, pytest.mark.nightly]),
    ],
)
def test_actors_of_ray_train_together(ray, tmp_path):
    """Starts three processes, two of which import JAX."""
    output = on_ray(block("python no-run", "import ray"), tmp_path, *RAYS[ray])
    # Two processes with two replicas; each replica has one of the four ones, so the sum is 4 * 3.
    # Ray prints what the actors print, too.
    assert "[(2, 12.0), (2, 12.0)]" in output


ENDS = """\
pipe = open(os.open("trains", os.O_RDWR))
running = [worker.train.remote(address, i) for i, worker in enumerate(workers)]
print("train:", sorted(pipe.readline().strip() for _ in workers))
ray.kill(workers[1])
try:
    ray.get(running[0], timeout=900)
except ray.exceptions.GetTimeoutError:
    raise
except ray.exceptions.RayError as error:
    print("ended by", type(error).__name__)
"""


@NEEDS_RAY
@pytest.mark.nightly
def test_an_actor_ends_when_another_one_is_killed(tmp_path):
    """By an error of gloo, or because JAX ends its process, which Ray says."""
    os.mkfifo(tmp_path / "trains")
    code = block("python no-run", "import ray")
    forever = """\
        float(strategy.run(step, (x,)))
        with open("trains", "w") as pipe:
            print(process_id, file=pipe)
        while True:
            float(strategy.run(step, (x,)))
"""
    for before, after in (
        ("import socket\n", "import os\nimport socket\n"),
        ("process_id=process_id,\n", "process_id=process_id, heartbeat_secs=8,\n"),
        ("        return strategy.num_workers, float(strategy.run(step, (x,)))\n", forever),
    ):
        assert code.count(before) == 1, before
        code = code.replace(before, after)
    driver, separator, _ = code.partition("results = ray.get(")
    assert separator
    output = on_ray(driver + ENDS, tmp_path)
    assert "train: ['0', '1']" in output
    assert "ended by" in output
