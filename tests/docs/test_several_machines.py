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
            timeout=180,
            check=False,
        )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


RAYS = {"stand-in": [str(fresh.STAND_INS)], "ray": []}


@pytest.mark.parametrize(
    "ray", [pytest.param("stand-in", marks=pytest.mark.long), pytest.param("ray", marks=NEEDS_RAY)]
)
def test_actors_of_ray_train_together(ray, tmp_path):
    """Starts three processes, two of which import JAX."""
    output = on_ray(block("python no-run", "import ray"), tmp_path, *RAYS[ray])
    # Two processes with two replicas; each replica has one of the four ones, so the sum is 4 * 3.
    # Ray prints what the actors print, too.
    assert "[(2, 12.0), (2, 12.0)]" in output


HEARTBEAT_SECS = 8
ENDS = f"""\
running = [worker.train.remote(address, i) for i, worker in enumerate(workers)]
deadline = time.monotonic() + 120
while len(os.listdir("trains")) < 2:
    assert time.monotonic() < deadline
    time.sleep(0.1)
start = time.monotonic()
ray.kill(workers[1])
try:
    ray.get(running[0], timeout={HEARTBEAT_SECS} + 20)
except ray.exceptions.GetTimeoutError:
    raise
except ray.exceptions.RayError as error:
    with open("ended", "w") as file:
        print(time.monotonic() - start, type(error).__name__, file=file)
"""


@NEEDS_RAY
def test_an_actor_ends_when_another_one_is_killed(tmp_path):
    """By an error of gloo, or because JAX ends its process, which Ray says."""
    (tmp_path / "trains").mkdir()
    code = block("python no-run", "import ray")
    forever = """\
        while True:
            total = float(strategy.run(step, (x,)))
            open(f"trains/{process_id}", "w").close()
"""
    for before, after in (
        ("import socket\n", "import os\nimport socket\nimport time\n"),
        ("process_id=process_id,\n", f"process_id=process_id, heartbeat_secs={HEARTBEAT_SECS},\n"),
        ("        return strategy.num_workers, float(strategy.run(step, (x,)))\n", forever),
    ):
        assert code.count(before) == 1, before
        code = code.replace(before, after)
    driver, separator, _ = code.partition("results = ray.get(")
    assert separator
    output = on_ray(driver + ENDS, tmp_path)
    secs, error = (tmp_path / "ended").read_text().split()
    print(f"The other actor ended after {secs} s: {error}\n{output}")
    assert float(secs) < HEARTBEAT_SECS + 5
