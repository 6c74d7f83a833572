"""`mirror launch`: runs a script with N devices, in this process or in several."""

import argparse
import contextlib
import difflib
import importlib.machinery
import importlib.metadata
import importlib.util
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, NamedTuple

from mirror._src.base.compile_cache import DIRECTORY, cache_options
from mirror._src.base.interrupts import arriving
from mirror._src.devices import physical
from mirror._src.tools.job import POLL_SECS, Job, tf_configs
from mirror._src.tools.options import USAGE_ERROR, OptionError, report_error

_FLAG = "--xla_force_host_platform_device_count"
_HOST_DEVICES = "JAX_NUM_CPU_DEVICES"
_PLATFORMS = "JAX_PLATFORMS"
_VISIBLE, _VISIBLE_TO_JAX = "CUDA_VISIBLE_DEVICES", "JAX_CUDA_VISIBLE_DEVICES"
_GPU_PLATFORMS = {"gpu", "cuda", "rocm"}  # JAX's names
_FAILURE_GRACE_SECS = 5.0  # the others stand in a collective, and often cannot react to a signal
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_output = threading.Lock()


def run(parsed: argparse.Namespace) -> int:
    """Starts the script in place of this process, unless several processes or restarts are asked.

    Returns:
        The exit status, if the script runs in other processes or cannot be started.
    """
    # Python 3.11 keeps the `--` of `launch -- train.py`.
    script, *arguments = parsed.target[parsed.target[0] == "--" :]
    try:
        if parsed.is_module:
            require_module(script)
        else:
            require_script(script)
        is_job = parsed.processes is not None or parsed.restarts is not None
        environments = environments_for(
            os.environ, parsed.processes or 1, parsed.devices, on_cpu=parsed.cpu
        )
    except OptionError as error:
        return report_error("launch", str(error), USAGE_ERROR)
    if hint := misplaced_options(parsed, script, arguments):
        print(f"mirror launch: {hint}", file=sys.stderr)
    if parsed.cache:
        environments = with_cache(environments)
    target = ["-m", script] if parsed.is_module else [script]
    sys.stderr.flush()
    if is_job:
        return run_job(
            [*target, *arguments],
            environments,
            restarts=parsed.restarts or 0,
            grace_secs=parsed.grace,
        )
    (environment,) = environments
    return os.execve(sys.executable, [sys.executable, *target, *arguments], environment)


def with_cache(environments: Sequence[Mapping[str, str]]) -> list[dict[str, str]]:
    """Returns the environments with JAX's compile cache, in the user's folder or the default."""
    options, warning = cache_options(os.environ.get(DIRECTORY.upper()) or None)
    if warning:
        print(f"mirror launch: {warning}", file=sys.stderr)
    added = {name.upper(): str(value) for name, value in options.items()}
    folder = {k: v for k, v in added.items() if k == DIRECTORY.upper()}  # also for one set to ""
    return [{**added, **environment, **folder} for environment in environments]


def misplaced_options(
    parsed: argparse.Namespace, script: str, arguments: Sequence[str]
) -> str | None:
    """Returns a hint about options of the launcher that it did not get, but the script does."""
    if parsed.devices is not None or parsed.processes is not None:
        return None
    names = {argument.partition("=")[0] for argument in arguments}
    own = [option for option in ("--devices", "--processes") if option in names]
    if not own:
        return None
    options = " and ".join(own)
    write = " ".join(f"{option} N" for option in own)
    module = "-m " if parsed.is_module else ""
    return (
        f"{options} after {script} is passed to {script}. For the launcher, write it before: "
        f"mirror launch {write} {module}{script}"
    )


def require_script(script: str) -> None:
    """Rejects a script that Python cannot read.

    Raises:
        OptionError: If the file does not exist, is a directory or cannot be read.
    """
    path = Path(script)
    if path.is_dir():
        raise OptionError(f"{script} is a directory. Pass a script: {path / 'train.py'}")
    if not path.exists():
        directory = path.parent
        files = [file.name for file in directory.glob("*.py")] if directory.is_dir() else []
        close = difflib.get_close_matches(path.name, files, n=1)
        if close:
            fix = f"Did you mean {directory / close[0]}?"
        elif re.fullmatch(r"\w+(\.\w+)*", script) and not script.endswith(".py"):
            fix = f"Pass the path of a script, or of a module: -m {script}"
        else:
            fix = f"The current directory is {Path.cwd()}."
        raise OptionError(f"{script} does not exist. {fix}")
    if not os.access(path, os.R_OK):
        raise OptionError(f"{script} cannot be read. Change its permissions: chmod u+r {script}")


def require_module(name: str) -> None:
    """Rejects a module that does not exist, without importing its packages.

    Raises:
        OptionError: If the module or a package on the way to it does not exist.
    """
    first, *rest = name.split(".")
    # `python -m` has the current directory on its path; this process may not.
    spec = importlib.machinery.PathFinder.find_spec(first, [os.getcwd()])
    with contextlib.suppress(ValueError):  # an empty name
        spec = spec or importlib.util.find_spec(first)
    found = first
    for part in rest:
        if spec is None:
            break
        found = f"{found}.{part}"
        places = spec.submodule_search_locations
        spec = None if places is None else importlib.machinery.PathFinder.find_spec(found, places)
    if spec is not None:
        return
    if name.endswith(".py"):
        raise OptionError(f"-m {name}: the name of a module has no .py. Omit -m to run a script.")
    raise OptionError(
        f"-m {name}: no module {found} found in {os.getcwd()} or the installed packages. Start in "
        "the directory that contains it, or pass the path of a script without -m."
    )


def environments_for(
    environment: Mapping[str, str], processes: int, num_devices: int | None, *, on_cpu: bool
) -> list[dict[str, str]]:
    """Returns the environment of each process, in which JAX has its devices only.

    Args:
        environment: The environment of this process.
        processes: Number of processes.
        num_devices: Number of devices of each process. None shares all GPUs among several
            processes, if there are any, and does not change the devices of a single one.
        on_cpu: Whether to use host devices although there may be GPUs.

    Raises:
        OptionError: If there are fewer GPUs, a variable contradicts the options, or the environment
            already defines a cluster. Variables that the user set are never overwritten.
    """
    if processes > 1 and environment.get("TF_CONFIG"):
        raise OptionError(
            f"--processes {processes} contradicts TF_CONFIG={environment['TF_CONFIG']}, which "
            "already defines a cluster. Unset TF_CONFIG, or omit --processes."
        )
    setting = f"{_PLATFORMS}={environment.get(_PLATFORMS)}"
    platforms = set(filter(None, environment.get(_PLATFORMS, "").split(",")))
    excludes_cpu = bool(platforms) and "cpu" not in platforms
    if on_cpu and excludes_cpu:
        raise OptionError(f"--cpu contradicts {setting}. Unset {_PLATFORMS}, or omit --cpu.")
    may_use_gpus = not on_cpu and (not platforms or not platforms.isdisjoint(_GPU_PLATFORMS))
    asks = processes > 1 or num_devices is not None
    if asks and may_use_gpus and (gpus := visible_gpus()):
        parts = _parts_of(environment, gpus, processes, num_devices)
        return [{**environment, _VISIBLE: ",".join(part)} for part in parts]
    added = {_PLATFORMS: "cpu"} if on_cpu else {}
    if num_devices is not None:
        if excludes_cpu:
            raise OptionError(
                f"--devices {num_devices}: {setting} excludes host devices, and mirror found no "
                f"GPU. Unset {_PLATFORMS}, or set {_PLATFORMS}=cpu."
            )
        added |= _host_devices(environment, num_devices)
    return [{**environment, **added}] * processes


def _parts_of(
    environment: Mapping[str, str], gpus: Sequence[str], processes: int, num_devices: int | None
) -> list[list[str]]:
    """Returns the GPUs of each process, as entries of `CUDA_VISIBLE_DEVICES`."""
    each = num_devices or len(gpus) // processes
    if processes > 1 and not 0 < each * processes <= len(gpus):
        raise OptionError(
            f"--processes {processes} with {each or 1} devices each need {(each or 1) * processes} "
            f"GPUs, but this machine has {len(gpus)}. Request fewer, or use host devices: --cpu"
        )
    selected = _first_gpus(environment, each * processes, len(gpus))
    _require_whole_gpus(gpus, each)
    return [selected[i : i + each] for i in range(0, len(selected), each)]


def _first_gpus(environment: Mapping[str, str], count: int, available: int) -> list[str]:
    visible = environment.get(_VISIBLE)
    if environment.get(_VISIBLE_TO_JAX, "all") != "all":
        raise OptionError(
            f"--devices {count}: {_VISIBLE_TO_JAX}={environment[_VISIBLE_TO_JAX]} also selects "
            f"GPUs. Unset it, and set {_VISIBLE} instead."
        )
    entries = [str(i) for i in range(available)] if visible is None else visible.split(",")
    if count > available:
        names = ", ".join(f"/device:GPU:{i}" for i in range(available))
        selected = "" if visible is None else f", selected by {_VISIBLE}={visible}"
        widen = "" if visible is None else f", extend {_VISIBLE}"
        raise OptionError(
            f"--devices {count}: this machine has {available} GPU{'s' * (available > 1)} ({names})"
            f"{selected}. Request at most {available}{widen}, or use host devices: "
            f"mirror launch --devices {count} --cpu"
        )
    return [entry.strip() for entry in entries[:count]]


def _require_whole_gpus(uuids: Sequence[str], count: int) -> None:
    """Rejects several devices for a process that would have MIG partitions.

    Raises:
        OptionError: If `count` is not 1 and a GPU is a partition: CUDA shows a process only one.
    """
    partitions = [uuid for uuid in uuids if uuid.startswith("MIG-")]
    if count > 1 and partitions:
        raise OptionError(
            f"--devices {count}: in MIG mode, CUDA shows one partition to a process, and "
            f"{partitions[0]} is selected. Use one partition, --devices 1, or turn MIG mode off: "
            "nvidia-smi -mig 0"
        )


def _host_devices(environment: Mapping[str, str], count: int) -> dict[str, str]:
    forced = re.findall(rf"{_FLAG}=(\S*)", environment.get("XLA_FLAGS", ""))[-1:]
    settings = {f"XLA_FLAGS={_FLAG}={number}": number for number in forced}
    if environment.get(_HOST_DEVICES):
        settings[f"{_HOST_DEVICES}={environment[_HOST_DEVICES]}"] = environment[_HOST_DEVICES]
    for setting, number in settings.items():
        if number.strip() != str(count):
            fix = f"Unset {setting.partition('=')[0]}"
            if setting.startswith("XLA_FLAGS"):
                fix = f"Remove {_FLAG} from XLA_FLAGS"
            raise OptionError(f"--devices {count} contradicts {setting}. {fix}, or omit --devices.")
    return {_HOST_DEVICES: str(count)}


def visible_gpus() -> list[str]:
    """Returns the UUIDs of the visible GPUs that JAX can use. Does not import JAX.

    Raises:
        OptionError: If JAX may use GPUs that cannot be listed.
    """
    unlisted = physical.unlisted_platforms()
    if any(map(_has_plugin, unlisted)):
        raise OptionError(
            f"--devices: the GPUs of this machine cannot be listed. {physical.how_to_list()} Or "
            "omit --devices, or use host devices: --cpu"
        )
    gpus = [] if unlisted else physical.gpus_of_process()
    if gpus and not _has_plugin():
        print(
            "mirror launch: JAX has no CUDA plugin, so the script runs on host devices. "
            "mirror doctor says how to install one; --cpu omits this message.",
            file=sys.stderr,
        )
        return []
    return [gpu.uuid for gpu in gpus]


def _has_plugin(platform: str = "cuda|rocm") -> bool:
    """Whether a plugin for JAX is installed that supports these GPUs."""
    plugins = importlib.metadata.entry_points(group="jax_plugins")
    return any(re.search(platform, plugin.name) for plugin in plugins)


class Exit(NamedTuple):
    """The end of a process.

    Attributes:
        process: Its index in the job.
        status: Exit status as `subprocess` has it: negative if a signal ended the process.
    """

    process: int
    status: int

    def __str__(self) -> str:
        if self.status >= 0:
            return f"process {self.process} ended first, with exit status {self.status}"
        return f"process {self.process} ended first, by {signal.Signals(-self.status).name}"

    @property
    def shell_status(self) -> int:
        """The exit status as shells have it: 137 for SIGKILL."""
        return self.status if self.status >= 0 else 128 - self.status


def run_job(
    arguments: Sequence[str],
    environments: Sequence[Mapping[str, str]],
    *,
    restarts: int,
    grace_secs: float,
) -> int:
    """Runs a job until all of its processes succeed; returns the exit status.

    If a process fails, the others are ended, and all start again, up to `restarts` times.

    Args:
        arguments: Arguments of Python.
        environments: The environment of each process, without `TF_CONFIG`.
        restarts: How often to start again.
        grace_secs: Time that the processes get to end after Ctrl-C or SIGTERM.
    """
    number = 0
    with arriving(*_SIGNALS) as received:
        while True:
            failure = _attempt(arguments, environments, number, received, grace_secs)
            if received:
                _say(f"ended by {signal.Signals(received[0]).name}")
                return 128 + received[0]
            if failure is None:
                return 0
            if number == restarts:
                _say(f"{failure}; all processes have been ended")
                return failure.shell_status
            number += 1
            _say(f"{failure}; all start again (restart {number} of {restarts})")


def _attempt(
    arguments: Sequence[str],
    environments: Sequence[Mapping[str, str]],
    number: int,
    received: Sequence[int],
    grace_secs: float,
) -> Exit | None:
    """Runs the processes once; returns the first failure. A signal is passed on, and ends them."""
    added = {"MIRROR_RESTARTS": str(number), "PYTHONUNBUFFERED": "1"}
    with tf_configs(len(environments)) as configs:
        clusters = [{"TF_CONFIG": config} if len(configs) > 1 else {} for config in configs]
        job = Job(
            [arguments] * len(configs),
            [{**e, **added, **c} for e, c in zip(environments, clusters, strict=True)],
        )
        threads = _pumps(job)
        failure = _first_failure(job, received)
        before = len(received)
        if before:
            job.end(received[0], grace_secs, lambda: len(received) > before)
        else:
            grace_secs = min(_FAILURE_GRACE_SECS, grace_secs)
            job.end(signal.SIGTERM, grace_secs, lambda: bool(received))
        for thread in threads:
            thread.join(1.0)
    return failure


def _first_failure(job: Job, received: Sequence[int]) -> Exit | None:
    """Waits until a process fails, all succeed, or the launcher receives a signal."""
    while not received:
        statuses = job.statuses()
        failures = [Exit(i, status) for i, status in enumerate(statuses) if status]
        if failures:
            return failures[0]
        if None not in statuses:
            return None
        time.sleep(POLL_SECS)
    return None


def _pumps(job: Job) -> Sequence[threading.Thread]:
    """Starts the threads that print the lines of the processes."""
    threads = []
    for i, process in enumerate(job.processes):
        prefix = f"[{i}] ".encode() if len(job.processes) > 1 else b""
        for stream, target in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
            arguments = (prefix, stream, target.buffer)
            threads.append(threading.Thread(target=_pump, args=arguments, daemon=True))
            threads[-1].start()
    return threads


def _pump(prefix: bytes, stream: IO[bytes], target: IO[bytes]) -> None:
    with stream:
        for line in stream:
            with _output, contextlib.suppress(OSError, ValueError):  # a closed pipe
                target.write(prefix + line.rstrip(b"\n") + b"\n")
                target.flush()


def _say(text: str) -> None:
    with _output, contextlib.suppress(OSError):
        print(f"mirror launch: {text}", file=sys.stderr, flush=True)
