"""A simulated cluster around the scheduler: one small step at a time, in any order.

Servers follow the protocol of the parameter server with integers for weights: the result of a step
depends on the values that it pulled and on the order of its parts, so a wrong order, a part that is
applied twice, or a gradient of other values shows in the weights.
"""

import copy
import dataclasses
import functools
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from mirror._src.ps.messages import Assignment
from tests.ps import recorded as act

PRIME = (1 << 61) - 1
LOST = object()


class UserError(Exception):
    """What the function of a task raises."""


@dataclasses.dataclass
class State:
    """What a server holds, and what its snapshots hold."""

    value: int
    version: int = 0
    steps: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    kept: dict[tuple[int, int], int] = dataclasses.field(default_factory=dict)
    stored: Any = None  # the snapshot of a real store


class Server:
    """A parameter server: no state after a loss, until it is loaded again."""

    def __init__(self, index: int, staleness: int | None) -> None:
        self.index, self.staleness = index, staleness
        self.state: Any = None  # a `State`, or None after a loss
        self.incarnation = -1
        self.most_stale = 0

    def refuses(self, incarnation: int) -> bool:
        return self.state is None or self.incarnation != incarnation

    def load(self, state: State, incarnation: int) -> None:
        self.state, self.incarnation = copy.deepcopy(state), incarnation
        self.state.kept.clear()

    def snapshot(self) -> State:
        state = copy.deepcopy(self.state)
        state.kept.clear()
        return state

    def commit(self, incarnation: int, step: int, task: int, num_parts: int) -> None:
        state = self.state
        if self.refuses(incarnation) or state.version > step:
            return
        assert state.version == step, f"commit {step} at version {state.version}"
        assert task not in [done for done, _ in state.steps]
        state.value = combined(state.value, [state.kept[task, part] for part in range(num_parts)])
        state.steps.append((task, num_parts))
        state.kept.clear()
        state.version += 1

    def pull(self, assignment: Assignment) -> Any:
        if self.refuses(assignment.incarnation):
            return LOST
        if assignment.commit is not None:
            self.commit(assignment.incarnation, *assignment.commit)
        if assignment.step is not None:
            assert self.state.version >= assignment.step, "a commit has not arrived"
        return self.state.version, self.state.value

    def push(self, assignment: Assignment, based_on: int, gradient: int) -> object | None:
        state = self.state
        if self.refuses(assignment.incarnation):
            return LOST
        if assignment.step is not None:
            if based_on == state.version:
                state.kept.setdefault((assignment.task, assignment.part), gradient)
        elif assignment.task not in [task for task, _ in state.steps]:
            self.most_stale = max(self.most_stale, state.version - based_on)
            if self.staleness is not None:
                assert self.most_stale <= self.staleness
            state.value = (state.value + assignment.task + 1) % PRIME
            state.steps.append((assignment.task, 1))
            state.version += 1
        return None


def gradient_of(task: int, part: int, values: tuple[int, ...], server: int) -> int:
    """Returns the gradient of a part for a server: of all values that it pulled."""
    gradient = 17 + server
    for number in (task, part, *values):
        gradient = (gradient * 1_000_003 + number) % PRIME
    return gradient


def combined(value: int, gradients: list[int]) -> int:
    """Returns a server's value after a synchronous step; the order of the parts matters."""
    for gradient in gradients:
        value = (value * 8191 + gradient) % PRIME
    return value


def undisturbed(values: list[int], steps: list[tuple[int, int]]) -> list[int]:
    """Returns the values after synchronous steps, `(task, num_parts)` each, without any loss."""
    for task, num_parts in steps:
        values = [
            combined(
                value, [gradient_of(task, part, tuple(values), i) for part in range(num_parts)]
            )
            for i, value in enumerate(values)
        ]
    return values


@dataclasses.dataclass(eq=False)
class Attempt:
    """An assignment that runs on a worker, or on one that is wrongly believed dead."""

    assignment: Assignment
    steps: Iterator[None]
    process: tuple[int, int] = (0, 0)  # the worker, and how often it was lost before


class Cluster:
    """Workers, servers, and an engine that carries out the actions of a scheduler.

    `choices()` are the small steps that can happen next; calling one makes it happen. Checks of
    single actions are in `_do`, those of the whole in `check_end`.
    """

    def __init__(
        self,
        *,
        workers: int = 2,
        servers: int = 2,
        staleness: int | None = 0,
        snapshot_every: int = 0,
        server_class: type[Server] = Server,
        **options: Any,
    ) -> None:
        self.first = [State(value=100 + i) for i in range(servers)]
        self.scheduler = act.Recorded(
            workers,
            staleness=staleness,
            snapshot_every=snapshot_every,
            kept=self.first,
            **{"max_losses": 10**9, **options},
        )
        self.num_workers, self.staleness = workers, staleness
        self.snapshot_every = snapshot_every
        self.servers = [server_class(i, staleness) for i in range(servers)]
        for server, state in zip(self.servers, self.first, strict=True):
            server.load(state, 0)
        self.mail: list[deque[Callable[[], None]]] = [deque() for _ in range(servers)]
        self.news: list[Callable[[], None]] = []  # events that have not reached the scheduler
        self.attempts: list[Attempt] = []
        self.believed: dict[int, list[Attempt]] = {}  # what the engine thinks that a worker runs
        self.num_losses = [0] * workers
        self.ready: set[int] = set()
        self.gone: set[int] = set()
        self.snapshots: dict[int, list[State | None]] = {}
        self.functions: dict[int, str] = {}  # what each task does
        self.ended: dict[int, str] = {}
        self.delivered: list[act.Deliver] = []
        self.commits: dict[int, tuple[int, int]] = {}  # by step
        self.committed: dict[int, int] = {}  # by task
        self.raised: list[BaseException] = []
        self.must_raise = False
        self.times: dict[int, list[int]] = {}  # when a task was submitted, and delivered
        self.frozen: list[Any] = []  # attempts and news that take long
        for worker in range(workers):
            self.news.append(functools.partial(self._is_ready, worker))

    # What users and the world do

    def submit(self, num_parts: int = 1, does: str = "train") -> int:
        """Schedules a task that does `train`, `raise`, `call` or `call raise`."""
        number, actions = self.scheduler.submit(num_parts, is_step=does in ("train", "raise"))
        self.functions[number] = does
        self.times[number] = [len(self.delivered)]
        self._do(actions)
        return number

    def lose_worker(self, worker: int, *, is_alive: bool = False, is_gone: bool = False) -> None:
        """Ends a worker. `is_alive`: it cannot be reached, but continues."""
        if worker not in self.ready:
            return
        self.ready.discard(worker)
        self.num_losses[worker] += 1
        for attempt in self.believed.pop(worker, ()):
            if not is_alive:
                self.attempts.remove(attempt)
        if is_gone:
            self.gone.add(worker)
            if len(self.gone) == self.num_workers:
                self.attempts.clear()
        event = self.scheduler.worker_gone if is_gone else self.scheduler.worker_lost
        self.news.append(lambda: self._do(event(worker)))

    def lose_server(self, index: int, *, is_noticed: bool) -> None:
        """Empties a server, as a restart does. `is_noticed`: the engine is told some time."""
        self.servers[index].state = None
        if is_noticed:
            incarnation = self.servers[index].incarnation
            self.news.append(lambda: self._do(self.scheduler.server_lost(incarnation, index)))

    def request_snapshot(self) -> None:
        """Requests a snapshot, as a checkpoint does."""
        self._do(self.scheduler.request_snapshot())

    def take_error(self) -> BaseException | None:
        """Raises what `join` would raise."""
        error = self.scheduler.take_error()
        if error is not None:
            assert not self.believed, "an error was raised while something ran"
            assert self.unsettled == 0, "an error was raised before all tasks had ended"
            if len(self.gone) < self.num_workers:
                assert not self.scheduler.is_restoring
                assert not self.scheduler._must_repeat
            self.raised.append(error)
            self.must_raise = False
        return error

    def load(self, values: list[int], step: int) -> None:
        """Restores a checkpoint; the engine makes it the kept snapshot."""
        self.first = [State(value=value, version=step) for value in values]
        self.commits.clear()
        self.committed.clear()
        self.ended.update(dict.fromkeys(self.ended, "replaced"))
        self._do(self.scheduler.load(step, self.first))

    @property
    def unsettled(self) -> int:
        return len(self.functions) - len(self.ended)

    # One small step

    def choices(self) -> list[Callable[[], None]]:
        """Returns what can happen next; all of it is independent, so any order is possible."""
        first: dict[Any, Attempt] = {}  # a process runs its assignments one after the other
        for attempt in self.attempts:
            first.setdefault(attempt.process, attempt)
        return [
            *(lambda a=a: self._advance(a) for a in first.values() if a not in self.frozen),
            *(mail[0] for mail in self.mail if mail),
            *(lambda e=e: self._deliver_news(e) for e in self.news if e not in self.frozen),
        ]

    def freeze(self, pick: Callable[[int], int]) -> None:
        """Makes one attempt, or one piece of news, take long: until `thaw`."""
        things = [*self.attempts, *self.news]
        if things:
            self.frozen.append(things[pick(len(things)) % len(things)])

    def run(self, pick: Callable[[int], int], limit: int) -> None:
        """Runs until nothing is left to happen, at most `limit` small steps."""
        for _ in range(limit):
            choices = self.choices()
            if not choices:
                return
            choices[pick(len(choices)) % len(choices)]()
        raise AssertionError(f"work is left after {limit} small steps")

    def _advance(self, attempt: Attempt) -> None:
        if attempt in self.attempts:
            next(attempt.steps, None)

    def _deliver_news(self, event: Callable[[], None]) -> None:
        self.news.remove(event)
        event()

    def _is_ready(self, worker: int) -> None:
        if worker not in self.gone:
            self.ready.add(worker)
            self._do(self.scheduler.worker_ready(worker))

    def _answer(self, attempt: Attempt, event: Callable[..., list[Any]], *args: Any, **kw: Any):
        """Sends the answer of a worker; also that of a worker believed dead arrives."""
        self.attempts.remove(attempt)
        worker = attempt.assignment.worker
        if attempt in self.believed.get(worker, ()):
            self.believed[worker].remove(attempt)
            if not self.believed[worker]:
                del self.believed[worker]
        self._do(event(attempt.assignment.number, *args, **kw))

    def _work(self, attempt: Attempt) -> Iterator[None]:
        """Runs an assignment, with other things between any two of its calls."""
        a, does = attempt.assignment, self.functions[attempt.assignment.task]
        scheduler = self.scheduler
        pulled: list[Any] = []
        for server in self.servers:
            yield
            pulled.append(server.pull(a))
            if pulled[-1] is LOST:
                yield
                return self._answer(attempt, scheduler.lost_server_in, server.index)
        yield
        if "raise" in does and a.part == 0:
            return self._answer(attempt, scheduler.failed, UserError(a.task))
        if a.step is not None and any(version != a.step for version, _ in pulled):
            return self._answer(attempt, scheduler.finished, "late")
        if does in ("train", "raise"):
            values = tuple(value for _, value in pulled)
            for server, (version, _) in zip(self.servers, pulled, strict=True):
                gradient = gradient_of(a.task, a.part, values, server.index)
                if server.push(a, version, gradient) is LOST:
                    yield
                    return self._answer(attempt, scheduler.lost_server_in, server.index)
                yield
        return self._answer(attempt, scheduler.finished, (a.task, a.part))

    # The engine

    def _post(self, index: int, message: Callable[[Server], None]) -> None:
        """Sends a server a message; the messages of the engine keep their order."""

        def arrive() -> None:
            self.mail[index].popleft()
            message(self.servers[index])

        self.mail[index].append(arrive)

    def _do(self, actions: list[Any]) -> None:
        for action in actions:
            getattr(self, f"_on_{type(action).__name__.lower()}")(action)
        self._check_nobody_waits()

    def _on_start(self, action: act.Start) -> None:
        assignment = action.assignment
        worker = assignment.worker
        have = [self.functions[a.assignment.task] for a in self.believed.get(worker, ())]
        assert len(have) <= (self.staleness is None), "a worker has one thread"
        assert set(have) <= {"train", "raise"}, "a step waits for a function"
        attempt = Attempt(assignment, iter(()), (worker, self.num_losses[worker]))
        attempt.steps = self._work(attempt)
        if worker in self.ready:  # otherwise the worker has died, and the news are on their way
            self.believed.setdefault(worker, []).append(attempt)
            self.attempts.append(attempt)

    def _on_commit(self, action: act.Commit) -> None:
        _, step, task, num_parts = action
        assert self.commits.setdefault(step, (task, num_parts)) == (task, num_parts)
        self.committed[task] = num_parts
        for index in range(len(self.servers)):
            self._post(index, lambda server: server.commit(*action))

    def _on_deliver(self, action: act.Deliver) -> None:
        self._end(action.task, "delivered")
        self.delivered.append(action)
        self.times[action.task].append(len(self.delivered))
        if self.functions[action.task] in ("train", "raise"):
            count = len(action.results)
            assert action.results == tuple((action.task, part) for part in range(count))

    def _on_fail(self, action: act.Fail) -> None:
        self._end(action.task, "failed")
        self.must_raise = True

    def _on_cancel(self, action: act.Cancel) -> None:
        self._end(action.task, "canceled")

    def _end(self, task: int, how: str) -> None:
        assert task not in self.ended, f"task {task} was {self.ended[task]}, and now {how}"
        self.ended[task] = how

    def _on_revive(self, action: act.Revive) -> None:
        self.news.append(lambda: self._is_ready(action.worker))

    def _on_takesnapshot(self, action: act.TakeSnapshot) -> None:
        self.snapshots[action.number] = [None] * len(self.servers)
        incarnation = self.scheduler.incarnation
        for index in range(len(self.servers)):
            self._post(index, lambda server: self._collect(action.number, server, incarnation))

    def _collect(self, number: int, server: Server, incarnation: int) -> None:
        if server.refuses(incarnation):
            self.news.append(
                lambda: self._do(self.scheduler.server_lost(incarnation, server.index))
            )
            return
        self.snapshots[number][server.index] = server.snapshot()
        if None not in self.snapshots[number]:
            self.news.append(lambda: self._keep(number))

    def _keep(self, number: int) -> None:
        taken = self.snapshots[number]
        actions = self.scheduler.snapshot_taken(number, taken)
        if self.staleness == 0 and self.scheduler.kept is taken:
            assert len({(s.version, tuple(s.steps)) for s in taken if s is not None}) == 1
        self._do(actions)

    def _on_restore(self, action: act.Restore) -> None:
        loaded: set[int] = set()
        for index, state in enumerate(self.scheduler.kept):

            def load(server: Server, state: State = state) -> None:
                server.load(state, action.incarnation)
                loaded.add(server.index)
                if len(loaded) == len(self.servers):
                    self.news.append(lambda: self._do(self.scheduler.restored(action.incarnation)))

            self._post(index, load)

    # Laws

    def _check_nobody_waits(self) -> None:
        """A worker that is known to be ready does not wait beside a part that could run."""
        s = self.scheduler
        if not s._idle or s.is_restoring or s._loss is not None:
            return
        assert not s._functions, "a function waits beside an idle worker"
        if s._awaits_snapshot:
            return
        if self.staleness == 0:
            assert not any(task.pending for task in s._in_flight.values())
            assert s._in_flight or not s._steps, "a step waits beside an idle worker"
        elif self.staleness is None:
            assert not s._steps, "a step waits beside an idle worker"
        elif self.staleness:
            assert s._in_flight or not s._steps, "all steps wait beside an idle worker"

    def check_end(self) -> None:
        """Checks what must hold when nothing is left to happen."""
        assert not self.unsettled, f"{self.unsettled} tasks have not ended"
        self.take_error()
        assert not self.must_raise, "an error has been lost"
        if any(server.state is None for server in self.servers):
            return  # lost after the last task, or there is no snapshot
        if len(self.gone) == self.num_workers or self.scheduler._loss is not None:
            return
        assert self.scheduler.is_idle
        states = [server.state for server in self.servers]
        delivered = {task for task, how in self.ended.items() if how == "delivered"}
        trained = {task for task in delivered if self.functions[task] in ("train", "raise")}
        for state in states:
            assert {task for task, _ in state.steps} == trained
            assert len(state.steps) == len(trained)
        if self.staleness == 0:
            steps = states[0].steps
            assert steps == sorted(self.committed.items())
            assert all(state.steps == steps for state in states)
            values = undisturbed([state.value for state in self.first], steps)
            assert [state.value for state in states] == values
