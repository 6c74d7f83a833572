"""A stand-in for Slurm's `srun`, whose nodes are all this machine.

It has the options that the pages use, sets the variables of tasks (srun(1), "output environment
variables"), and exits as `srun` does: with the highest status of the tasks, 128 + N for a task that
signal N has ended. With --kill-on-bad-exit, the first task that fails ends the others: SIGTERM, and
SIGKILL after KillWait. A signal to `srun` goes to all tasks. Each line of their output is printed
whole.
"""

import argparse
import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

_KILL_WAIT_SECS = 30.0  # the default of slurm.conf
_printing = threading.Lock()


def main() -> int:
    """Runs the tasks; returns the exit status."""
    options = _parse()
    per_node, num_nodes = options.ntasks_per_node, options.nodes
    hosts = ["localhost", *(f"node{i}" for i in range(1, num_nodes))]  # only the first is contacted
    step = _next_step()
    common = {
        "SLURM_JOB_NODELIST": ",".join(hosts),
        "SLURM_JOB_NUM_NODES": str(num_nodes),
        "SLURM_NNODES": str(num_nodes),
        "SLURM_NODELIST": ",".join(hosts),
        "SLURM_NPROCS": str(num_nodes * per_node),
        "SLURM_NTASKS": str(num_nodes * per_node),
        "SLURM_STEPID": str(step),
        "SLURM_STEP_ID": str(step),
        "SLURM_STEP_NODELIST": ",".join(hosts),
        "SLURM_STEP_NUM_NODES": str(num_nodes),
        "SLURM_STEP_NUM_TASKS": str(num_nodes * per_node),
        "SLURM_STEP_TASKS_PER_NODE": _counts(num_nodes, per_node),
        "SLURM_TASKS_PER_NODE": _counts(num_nodes, per_node),
    }
    tasks: list[subprocess.Popen[bytes]] = []
    copies: list[threading.Thread] = []
    for i in range(num_nodes * per_node):
        own = {
            "SLURMD_NODENAME": hosts[i // per_node],
            "SLURM_LOCALID": str(i % per_node),
            "SLURM_NODEID": str(i // per_node),
            "SLURM_PROCID": str(i),
        }
        task = subprocess.Popen(
            options.command,
            env={**os.environ, **common, **own},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        tasks.append(task)
        copies.append(threading.Thread(target=_copy_lines, args=(task,)))
        copies[-1].start()

    def forward(number: int, frame: object) -> None:
        del frame
        _send(tasks, number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, forward)
    status = _wait(tasks, hosts, per_node, ends=options.kill_on_bad_exit)
    for copy in copies:
        copy.join()
    return status


def _copy_lines(task: subprocess.Popen[bytes]) -> None:
    assert task.stdout is not None
    for line in task.stdout:
        with _printing:
            sys.stdout.buffer.write(line)
            sys.stdout.buffer.flush()


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="srun")
    inherited = os.environ.get
    parser.add_argument("-N", "--nodes", type=int, default=inherited("SLURM_NNODES", 1))
    parser.add_argument(
        "--ntasks-per-node", type=int, default=inherited("SLURM_NTASKS_PER_NODE", 1)
    )
    parser.add_argument("-K", "--kill-on-bad-exit", type=int, nargs="?", const=1, default=0)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    return parser.parse_args()


def _next_step() -> int:
    """Returns the number of this step in its job, which Slurm's controller counts."""
    file = pathlib.Path(f"slurm-{os.environ['SLURM_JOB_ID']}.steps")
    step = int(file.read_text()) if file.exists() else 0
    file.write_text(str(step + 1))
    return step


def _counts(num_nodes: int, per_node: int) -> str:
    """Returns the numbers of tasks per node, as Slurm abbreviates them."""
    return f"{per_node}(x{num_nodes})" if num_nodes > 1 else str(per_node)


def _wait(tasks: list[subprocess.Popen[bytes]], hosts: list[str], per_node: int, ends: int) -> int:
    deadline, shown = None, set()
    while True:
        statuses = [task.poll() for task in tasks]
        for i, status in enumerate(statuses):
            if not status or i in shown:
                continue
            shown.add(i)
            words = f"Exited with exit code {status}"
            if status < 0:
                words = signal.strsignal(-status) or str(-status)
            print(f"srun: error: {hosts[i // per_node]}: task {i}: {words}", file=sys.stderr)
            if ends and deadline is None:
                _send(tasks, signal.SIGTERM)
                deadline = time.monotonic() + _KILL_WAIT_SECS
        ended = [status for status in statuses if status is not None]
        if len(ended) == len(tasks):  # and all are shown
            return max(status if status >= 0 else 128 - status for status in ended)
        if deadline is not None and time.monotonic() > deadline:
            _send(tasks, signal.SIGKILL)
        time.sleep(0.05)


def _send(tasks: list[subprocess.Popen[bytes]], number: int) -> None:
    for task in tasks:
        if task.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                task.send_signal(number)


if __name__ == "__main__":
    sys.exit(main())
