"""The files for schedulers on the page about several machines, and its example with Ray."""

import ast
import importlib.util
import os
import re
import subprocess
import sys

import pytest
import yaml

from mirror.distributed import TFConfigClusterResolver
from tests.support import fresh
from tests.support.pages import PAGES

PAGE = PAGES["docs/several-machines.md"]


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


@pytest.mark.long
@pytest.mark.parametrize("ray", ["stand-in", "ray"])
def test_actors_of_ray_train_together(ray, tmp_path):
    """Starts three processes, two of which import JAX."""
    if ray == "ray" and importlib.util.find_spec("ray") is None:
        pytest.skip("Ray is not installed")
    file = tmp_path / "on_ray.py"
    file.write_text(block("python no-run", "import ray"))
    paths = [str(fresh.ROOT), *([str(fresh.STAND_INS)] if ray == "stand-in" else [])]
    done = subprocess.run(
        [sys.executable, str(file)],
        env={
            **fresh.INHERITED,
            "PYTHONPATH": os.pathsep.join(paths),
            "JAX_PLATFORMS": "cpu",
            "JAX_NUM_CPU_DEVICES": "2",
        },
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    # Two processes with two replicas; each replica has one of the four ones, so the sum is 4 * 3.
    assert ast.literal_eval(done.stdout.splitlines()[-1]) == [(2, 12.0), (2, 12.0)]
