"""The checks of `mirror doctor --distributed`, in a subprocess that joins the job.

Every process runs them, and prints its own findings. After the processes have met, a check that
fails in one of them is a problem in all: otherwise, the others would wait for it.

JAX aborts a process whose job is not complete in time, and does not say who is missing. So before
JAX joins the processes, process 0 listens on the port of the coordinator, which JAX takes next, and
tells all others who has joined.
"""

import contextlib
import errno
import functools
import ipaddress
import json
import socket
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from mirror._src.base.errors import counted, first_line
from mirror._src.base.types import Array
from mirror._src.cluster import consensus, store
from mirror._src.cluster.resolvers import Membership
from mirror._src.cluster.start import initialize, processes, resolver_of_environment
from mirror._src.devices import backend
from mirror._src.devices.device_checks import known_rows, run_in_threads, wrong_sum
from mirror._src.engine.per_replica import PerReplica
from mirror._src.strategy.current_replica import all_reduce
from mirror._src.strategy.mirrored import MultiWorkerMirroredStrategy
from mirror._src.tools.doctor.check import Check, Problem, run_steps

CLUSTER, PROCESSES, VERSIONS, ADDRESS = "cluster", "processes", "versions and settings", "address"
DEVICES, ALL_REDUCE, ROUND_TRIP = "devices", "all-reduce", "coordinator"
_SIZES = {"32 bytes": 8, "4 MiB": 2**20}
_TIMES, _MESSAGES = 5, 20
_SHOWN = 8
_END_SECS = 10.0
_SHUTDOWN_SECS = 10
_START = (
    "Set TF_CONFIG, start the program with srun or with mirror launch --processes 2, or pass the "
    "address to mirror.distributed.initialize, which this command cannot see."
)
_OUTPUT = "Read the output of this process."
_RETRY_SECS, _CONNECT_SECS = 0.2, 5.0
_GREETING_SECS = 1.0  # for the first line of a connection, which may come from another program
_MARGIN_SECS = 5.0  # for the answer of process 0, which may have started later
_LONGEST_LINE = 2**16


class Rendezvous(NamedTuple):
    """The processes that have joined; the same in all of them.

    Attributes:
        absent: The processes that have not joined.
        repeated: Indices that several processes have.
        other_counts: Pairs of a process and its number of processes, where it is another one.
    """

    absent: Sequence[int]
    repeated: Sequence[int]
    other_counts: Sequence[tuple[int, int]]


class UnreachableError(Exception):
    """Raised if process 0 cannot listen, or cannot be reached."""


def run(secs: float) -> Iterator[dict[str, Any]]:
    """Runs the checks; yields the lines of `run_steps`, and one at the end.

    Args:
        secs: How long to wait for the other processes in each check.
    """
    yield from run_steps(_steps(secs), "--distributed")
    yield {"ends": True}
    if store.process_count() > 1:
        # Process 0 is the coordinator, which the others need until here.
        with contextlib.suppress(RuntimeError):
            consensus.gather("doctor/end", {}, time.monotonic() + _END_SECS)


def _steps(secs: float) -> Iterator[tuple[str, Callable[[], Check | Iterable[Check]]]]:
    members: list[Membership | None] = []
    strategies: list[MultiWorkerMirroredStrategy] = []

    def find() -> Check:
        member, check = find_cluster()
        members.append(member)
        return check

    def join() -> Iterable[Check]:
        try:
            initialize(initialization_secs=secs, agreement_secs=secs, shutdown_secs=_SHUTDOWN_SECS)
        except (RuntimeError, ValueError) as error:
            raise Problem(_of_lines(VERSIONS, error)) from None
        count = store.process_count()
        if count == 1:
            return []
        place = f"detected by JAX: process {store.process_index()} of {count}"
        found = [Check(CLUSTER, "ok", place)] if members[0] is None else []
        return [*found, Check(VERSIONS, "ok", f"equal in all {count} processes")]

    def list_devices() -> Check:
        try:
            strategies.append(MultiWorkerMirroredStrategy())
        except RuntimeError as error:
            raise Problem(_of_lines(DEVICES, error)) from None
        return check_devices(strategies[0], secs)

    yield CLUSTER, find
    member = members[0]
    if member is not None and member.num_processes > 1:
        yield PROCESSES, functools.partial(check_processes, member, secs)
    yield VERSIONS, join
    if store.process_count() > 1:
        yield ADDRESS, lambda: check_address(_hosts(member, secs))
    yield DEVICES, list_devices
    yield ALL_REDUCE, lambda: check_all_reduce(strategies[0], secs)
    if store.process_count() > 1:
        yield ROUND_TRIP, check_round_trip


def find_cluster() -> tuple[Membership | None, Check]:
    """Returns the place of this process in its job, without joining it."""
    try:
        resolver = resolver_of_environment()
        member = None if resolver is None else resolver.membership()
    except (ValueError, TypeError, RuntimeError) as error:
        raise Problem(Check(CLUSTER, "problem", first_line(error))) from None
    if resolver is None:
        finding = "none in TF_CONFIG or Slurm's variables"
        meaning = "Unless JAX detects one, the process trains alone."
        return None, Check(CLUSTER, "warning", finding, meaning, _START)
    name = type(resolver).__name__
    if member is None:
        finding = f"{name}: this process is the evaluator, which trains alone"
        return None, Check(CLUSTER, "ok", finding)
    finding = (
        f"{name}: process {member.process_id} of {member.num_processes}, coordinator "
        f"{member.coordinator_address}"
    )
    return member, Check(CLUSTER, "ok", finding)


def check_processes(member: Membership, secs: float) -> Check:
    """Waits for all processes of the job."""
    try:
        met = meet(member, secs)
    except UnreachableError as error:
        raise Problem(_unreachable(member, str(error), secs)) from None
    problems = list(_problems_of(met, member.num_processes, secs))
    if problems:
        raise Problem(*problems)
    return Check(PROCESSES, "ok", f"all {member.num_processes} have joined")


def _unreachable(member: Membership, reason: str, secs: float) -> Check:
    address = member.coordinator_address
    if member.process_id == 0:
        fix = "End the program that uses it, or give process 0 another port."
        return Check(PROCESSES, "problem", f"process 0, {address}: {reason}", "", fix)
    return Check(
        PROCESSES,
        "problem",
        f"process 0 at {address} could not be reached within {secs:g} s: {reason}",
        "It has not joined, its address is wrong, or a firewall blocks its port.",
        f"Start process 0, and test its port from this machine, {socket.gethostname()}. "
        "--deadline waits longer.",
    )


def _problems_of(met: Rendezvous, count: int, secs: float) -> Iterator[Check]:
    if met.repeated:
        finding = f"several processes are {processes(met.repeated)}"
        fix = "Give every process its own index, such as the task in TF_CONFIG."
        yield Check(PROCESSES, "problem", finding, "", fix)
    if met.other_counts:
        texts = [f"process {i} has {n} processes" for i, n in met.other_counts[:_SHOWN]]
        finding = f"process 0 has {count} processes in its cluster, but {', '.join(texts)}"
        yield Check(PROCESSES, "problem", finding, "", "Give every process the same cluster.")
    if met.absent:
        finding = f"{processes(met.absent)} of {count} did not join within {secs:g} s"
        fix = "Start every process at about the same time; their output says what they do. "
        yield Check(PROCESSES, "problem", finding, "", f"{fix}--deadline waits longer.")


def _of_lines(name: str, error: Exception) -> Check:
    """Returns the check for an error whose first line says what differs, and whose last the fix."""
    finding, *rest = [line.strip() for line in str(error).splitlines()]
    if len(rest) < 2:
        return Check(name, "problem", " ".join([finding, *rest]), "", _OUTPUT)
    return Check(name, "problem", finding.rstrip(":"), "; ".join(rest[:-1]), rest[-1])


def _hosts(member: Membership | None, secs: float) -> list[dict[str, Any]]:
    """Returns the host name and addresses of each process."""
    host = socket.gethostname()
    coordinator = member.coordinator_address.rpartition(":")[0] if member is not None else ""
    mine = {
        "host": host,
        "gloo": gloo_address(host),
        "network": address_towards(coordinator.strip("[]")) if coordinator else None,
    }
    return consensus.gather("doctor/host", mine, time.monotonic() + secs)


def check_address(hosts: Sequence[Mapping[str, Any]]) -> Check:
    """Checks that the other machines can reach the address at which gloo listens here."""
    me = hosts[store.process_index()]
    host, address, network = me["host"], me["gloo"], me["network"]
    num_machines = len({each["host"] for each in hosts})
    known = network if network and not is_loopback(network) else "ADDRESS"
    fix = f"In /etc/hosts, give the name its address in the network: {known} {host}"
    if address is None:
        finding = f"the host name {host} does not resolve to an address of this machine"
        meaning = "gloo, which reduces among CPU devices, fails. GPUs do not use it."
        return Check(ADDRESS, "warning", finding, meaning, fix)
    finding = f"{host} is {address}"
    if num_machines == 1:
        return Check(ADDRESS, "ok", f"{finding}; all processes are on this machine")
    if is_loopback(address):
        meaning = (
            "gloo, which reduces among CPU devices, listens there, and the other machines cannot "
            "reach it. GPUs do not use it."
        )
        return Check(ADDRESS, "warning", finding, meaning, fix)
    return Check(ADDRESS, "ok", f"{finding}; {counted(num_machines, 'machine')}")


def check_devices(strategy: MultiWorkerMirroredStrategy, secs: float) -> Check:
    """Lists the devices of each process."""
    local = strategy.local_devices
    mine = {"text": f"{len(local)} x {backend.type_of(local[0])}", "host": socket.gethostname()}
    if store.process_count() == 1:
        return Check(DEVICES, "ok", f"{mine['text']}: {backend.names(local)}")
    each = consensus.gather("doctor/devices", mine, time.monotonic() + secs)
    texts = [f"process {i} on {x['host']}: {x['text']}" for i, x in enumerate(each[:_SHOWN])]
    more = ["..."] if len(each) > _SHOWN else []
    count = counted(strategy.num_replicas_in_sync, "device")
    return Check(DEVICES, "ok", f"{count}; {'; '.join([*texts, *more])}")


def check_all_reduce(strategy: MultiWorkerMirroredStrategy, secs: float) -> Check:
    """Computes known sums over all devices; every process compares its own copies."""
    count = strategy.num_replicas_in_sync
    if count == 1:
        return Check(ALL_REDUCE, "ok", "a single device, which needs no collectives")
    fault, times = f"did not finish within {secs:g} s", dict[str, float]()
    (result,) = run_in_threads([lambda _: _sums(strategy)], secs)
    if result is not None:
        error = result.exception()
        fault = "" if error is None else first_line(error)
        times = {} if fault else result.result()
    faults = [{"fault": fault}]
    if store.process_count() > 1:
        faults = consensus.gather("doctor/all-reduce", faults[0], time.monotonic() + secs)
    wrong = {i: said["fault"] for i, said in enumerate(faults) if said["fault"]}
    if wrong:
        texts = [f"process {i}: {text}" for i, text in list(wrong.items())[:_SHOWN]]
        meaning = "A training step would fail or hang."
        raise Problem(Check(ALL_REDUCE, "problem", "; ".join(texts), meaning, _fix(strategy)))
    took = ", ".join(f"{secs * 1e3:.1f} ms for {size}" for size, secs in times.items())
    where = f" of {store.process_count()} processes" if store.process_count() > 1 else ""
    return Check(ALL_REDUCE, "ok", f"correct across {count} devices{where}: {took}")


def _fix(strategy: MultiWorkerMirroredStrategy) -> str:
    if backend.type_of(strategy.devices[0]) == "GPU":
        return "export NCCL_DEBUG=INFO NCCL_SOCKET_IFNAME=eth0, with the name of your interface."
    return "Allow connections between all machines, on all ports. See the check of the address."


def _sums(strategy: MultiWorkerMirroredStrategy) -> dict[str, float]:
    """Returns the median seconds of an all-reduce of each size.

    Raises:
        ValueError: If a copy on a device of this process is wrong.
    """
    times = {}
    for name, size in _SIZES.items():
        rows = known_rows(strategy.num_replicas_in_sync, size)
        x, expected = PerReplica.from_stacked(rows), rows.sum(axis=0)
        secs = []
        for _ in range(_TIMES + 1):
            start = time.monotonic()
            total = strategy.run(_sum, (x,)).block_until_ready()
            secs.append(time.monotonic() - start)
            _require_equal(total, expected)
        times[name] = statistics.median(secs[1:])  # without compiling and connecting
    return times


def _sum(x: Array) -> Array:
    total: Array = all_reduce("sum", x)
    return total


def _require_equal(total: Array, expected: np.ndarray) -> None:
    for shard in total.addressable_shards:
        fault = wrong_sum(shard.device, np.asarray(shard.data), expected)
        if fault is not None:
            raise ValueError(fault)


def check_round_trip() -> Check:
    """Measures messages to the coordinator, which the agreement on each new program needs."""
    secs = []
    for _ in range(_MESSAGES):
        start = time.perf_counter()
        store.set(f"doctor/round-trip/{store.process_index()}", "x")
        secs.append(time.perf_counter() - start)
    finding = f"{statistics.median(secs) * 1e3:.2f} ms per message (median of {_MESSAGES})"
    return Check(ROUND_TRIP, "ok", finding)


def meet(member: Membership, secs: float) -> Rendezvous:
    """Waits until all processes have joined, or for some seconds.

    Raises:
        UnreachableError: If process 0 cannot use its port, or this process cannot reach it.
    """
    host, _, port = member.coordinator_address.rpartition(":")
    deadline = time.monotonic() + secs
    if member.process_id == 0:
        return _listen(int(port), member, deadline)
    return _answer(host.strip("[]"), int(port), member, deadline)


def _listen(port: int, member: Membership, deadline: float) -> Rendezvous:
    try:
        server = _server(port)
    except OSError as error:
        raise UnreachableError(f"port {port} cannot be used: {error.strerror}") from None
    arrived: dict[int, list[int]] = {0: [member.num_processes]}  # process: its numbers of processes
    with server, contextlib.ExitStack() as stack:
        server.settimeout(_RETRY_SECS)
        connections = []
        while time.monotonic() < deadline and len(arrived) < member.num_processes:
            with contextlib.suppress(TimeoutError):
                connection, _ = server.accept()
                stack.enter_context(connection)
                greeting = _read(connection, time.monotonic() + _GREETING_SECS)
                match greeting:
                    case {"process": int(process), "of": int(count)}:
                        arrived.setdefault(process, []).append(count)
                        connections.append(connection)
        found = Rendezvous(
            [i for i in range(member.num_processes) if i not in arrived],
            [i for i, counts in arrived.items() if len(counts) > 1],
            [(i, n) for i, ns in arrived.items() for n in ns if n != member.num_processes],
        )
        for connection in connections:
            with contextlib.suppress(OSError):
                _write(connection, found._asdict())
        for connection in connections:  # they close first, so that JAX can take the port at once
            with contextlib.suppress(OSError):
                connection.settimeout(_GREETING_SECS)
                connection.recv(1)
    return found


def _server(port: int) -> socket.socket:
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET  # as JAX does
    create = functools.partial(
        socket.create_server, ("", port), family=family, dualstack_ipv6=family == socket.AF_INET6
    )
    try:
        return create()
    except OSError as error:
        if error.errno != errno.EADDRINUSE or _is_served(port):
            raise
    return create(reuse_port=True)  # `mirror launch` reserves the port for the job


def _is_served(port: int) -> bool:
    with contextlib.suppress(OSError):
        socket.create_connection(("localhost", port), _CONNECT_SECS).close()
        return True
    return False


def _answer(host: str, port: int, member: Membership, deadline: float) -> Rendezvous:
    reason = "no time was left"
    while (left := deadline - time.monotonic()) > 0:
        try:
            with socket.create_connection((host, port), min(left, _CONNECT_SECS)) as connection:
                _write(connection, {"process": member.process_id, "of": member.num_processes})
                answer = _read(connection, deadline + _MARGIN_SECS)
            if answer is not None:
                counts = [(int(i), int(n)) for i, n in answer["other_counts"]]
                return Rendezvous(answer["absent"], answer["repeated"], counts)
            reason = "another program answers, or process 0 has ended"
        except OSError as error:
            reason = error.strerror or str(error)
        time.sleep(min(_RETRY_SECS, max(left, 0.0)))
    raise UnreachableError(reason)


def _write(connection: socket.socket, message: dict[str, Any]) -> None:
    connection.sendall(json.dumps({"mirror": message}).encode() + b"\n")


def _read(connection: socket.socket, deadline: float) -> dict[str, Any] | None:
    """Returns a message; None if the connection ends first, or another program sends something."""
    with (
        contextlib.suppress(OSError, ValueError, KeyError, TypeError),
        connection.makefile("rb") as file,
    ):
        connection.settimeout(deadline - time.monotonic())
        message = json.loads(file.readline(_LONGEST_LINE))["mirror"]
        return message if isinstance(message, dict) else None
    return None


def gloo_address(host: str) -> str | None:
    """Returns the first address of this machine's host name that can be used, as gloo does.

    None if the name does not resolve to an address of this machine.
    """
    return _own_address(host, 0, socket.SOCK_STREAM, socket.socket.bind)


def is_loopback(address: str) -> bool:
    """Whether only this machine can reach an address."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def address_towards(host: str) -> str | None:
    """Returns this machine's address in the network of another one. Sends nothing."""
    return _own_address(host, 9, socket.SOCK_DGRAM, socket.socket.connect)


def _own_address(
    host: str, port: int, kind: int, use: Callable[[socket.socket, Any], None]
) -> str | None:
    """Returns the own address of a socket after the first use of an address that succeeds."""
    with contextlib.suppress(OSError):
        for family, *arguments, _, address in socket.getaddrinfo(host, port, type=kind):
            with contextlib.suppress(OSError), socket.socket(family, *arguments) as test:
                use(test, address)
                return str(test.getsockname()[0])
    return None
