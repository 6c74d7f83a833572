"""A simulated cluster around the driver: one small step at a time, in any order.

Servers follow the protocol of the parameter server with integers for weights: the result of a step
depends on the values that it pulled and on the order of its parts, so a wrong order, a part that is
applied twice, or a gradient of other values shows in the weights.
"""

import asyncio
import copy
import dataclasses
import functools
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest

from mirror._src.ps.driver import Driver, Task
from mirror._src.ps.handles import CancelledError
from mirror._src.ps.messages import Assignment, Committed, LostError, Result
from tests.ps.recorded import values_of

PRIME = (1 << 61) - 1
LIMIT = 50_000  # small steps until everything has ended
LOST = object()
DONE = object()  # the answer to the pull of a task that was committed last


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
            if self.state.version > assignment.step and self.was_last(assignment.task):
                return DONE
        return self.state.version, self.state.value

    def was_last(self, task: int) -> bool:
        """Whether a task was committed last, so that its results are kept."""
        return bool(self.state.steps) and self.state.steps[-1][0] == task

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
    answer: asyncio.Future[Any]
    process: tuple[int, int]  # the worker, and how often it was lost before
    steps: Any = None


class Value:
    """The value of a task, which tells the cluster how the task ended."""

    def __init__(self, cluster: "Cluster") -> None:
        self.cluster, self.task = cluster, None

    def _resolve(self, value: Any = None, error: BaseException | None = None) -> None:
        how = "canceled" if isinstance(error, CancelledError) else "failed"
        self.cluster.end(self.task.number, "delivered" if error is None else how, value)


class Cluster:
    """Workers and servers, and a driver to which they are the engine.

    `choices()` are the small steps that can happen next; calling one makes it happen. Checks of
    single calls are in the methods of the engine, those of the whole in `check_end`.
    """

    def __init__(
        self,
        *,
        workers: int = 2,
        servers: int = 2,
        staleness: int | None = 0,
        snapshot_every: int = 0,
        server_class: type[Server] = Server,
    ) -> None:
        self.num_workers, self.num_servers, self.staleness = workers, servers, staleness
        self.first = [State(value=100 + i) for i in range(servers)]
        self.snapshot_every = snapshot_every
        self.servers = [server_class(i, staleness) for i in range(servers)]
        for server, state in zip(self.servers, self.first, strict=True):
            server.load(state, 0)
        self.mail: list[deque[Callable[[], None]]] = [deque() for _ in range(servers)]
        self.news: list[Callable[[], None]] = []  # answers that have not reached the driver
        self.attempts: list[Attempt] = []
        self.believed: dict[int, list[Attempt]] = {}  # what the engine thinks that a worker runs
        self.num_losses = [0] * workers
        self.ready: set[int] = set()
        self.gone: set[int] = set()
        self.functions: dict[int, str] = {}  # what each task does
        self.ended: dict[int, str] = {}
        self.commits: dict[int, tuple[int, int]] = {}  # by step
        self.committed: dict[int, int] = {}  # by task
        self.raised: list[BaseException] = []
        self.must_raise = False
        self.frozen: list[Any] = []  # attempts and news that take long
        self.ahead: list[Callable[[], Any]] = []  # pulls of next steps, which workers have sent
        self.driver = Driver(self, staleness, snapshot_every)
        self.driver.max_losses = 10**9
        self.driver.kept = self.checked = [(None, state, None) for state in self.first]
        self.loop = asyncio.new_event_loop()
        self.calls: set[asyncio.Task[None]] = set()  # of the main program
        self.serving = self.loop.create_task(self.driver.run())
        self._settle()

    def close(self) -> None:
        self.serving.cancel()
        self._settle()
        self.loop.close()

    def _settle(self) -> None:
        """Lets the driver run until all of it waits for answers."""
        self.loop.run_until_complete(self._until_all_wait())
        if self.serving.done():
            with pytest.raises(asyncio.CancelledError):
                self.serving.result()
            return
        assert self.driver.ended is None, self.driver.ended
        self._check_nobody_waits()
        if self.staleness == 0 and self.driver.kept is not self.checked:
            self.checked = self.driver.kept
            assert len({(s.version, tuple(s.steps)) for _, s, _ in self.checked}) == 1

    async def _until_all_wait(self) -> None:
        await asyncio.sleep(0)
        while self.loop._ready:
            await asyncio.sleep(0)

    # What users and the world do

    def _call(self, method: Coroutine[Any, Any, Any], then: Callable[[], None] = int) -> None:
        """Calls the driver as the main program does, and lets it wait."""

        async def call() -> None:
            error = await method
            if error is None:
                then()
            else:
                self._raise(error)

        call_task = self.loop.create_task(call())
        self.calls.add(call_task)
        call_task.add_done_callback(self.calls.discard)
        self._settle()

    def submit(self, num_parts: int = 1, does: str = "train") -> None:
        """Schedules a task that does `train`, `raise`, `call` or `call raise`."""
        value = Value(self)
        task = Task("", [()] * num_parts, values_of, does in ("train", "raise"), value)
        value.task = task
        self._call(self.driver.submit(task), lambda: self.functions.update({task.number: does}))

    def lose_worker(self, worker: int, *, is_alive: bool = False, is_gone: bool = False) -> None:
        """Ends a worker. `is_alive`: it cannot be reached, but continues."""
        if worker not in self.ready:
            return
        self.ready.discard(worker)
        self.num_losses[worker] += 1
        if is_gone:
            self.gone.add(worker)
        for attempt in self.believed.pop(worker, ()):
            if not is_alive:
                self.attempts.remove(attempt)
            self._lose(attempt.answer, worker)
        if len(self.gone) == self.num_workers:
            self.attempts.clear()

    def _lose(self, answer: asyncio.Future[Any], index: int) -> None:
        self.news.append(lambda: answer.done() or answer.set_exception(LostError(index)))

    def lose_server(self, index: int) -> None:
        """Empties a server, as a restart does."""
        self.servers[index].state = None

    def request_snapshot(self) -> None:
        """Requests a snapshot, as a checkpoint does."""
        self._call(self.driver.take_snapshot())

    def take_error(self) -> None:
        """Waits for an error, as `done` does."""
        self._call(self.driver.wait(lambda: True))

    def _raise(self, error: BaseException) -> None:
        assert not self.believed, "an error was raised while something ran"
        assert self.unsettled == 0, "an error was raised before all tasks had ended"
        if len(self.gone) < self.num_workers:
            assert not self.driver._is_restoring
            assert not self.driver._must_repeat
        self.raised.append(error)
        self.must_raise = False

    def load(self, values: list[int], step: int) -> None:
        """Restores a checkpoint, which the servers return to from then on."""
        first = [State(value=value, version=step) for value in values]

        def loaded() -> None:
            self.first = first
            self.commits.clear()
            self.committed.clear()
            self.ended.update(dict.fromkeys(self.ended, "replaced"))

        self._call(self.driver.load([(None, state, None) for state in first]), loaded)

    @property
    def unsettled(self) -> int:
        return len(self.functions) - len(self.ended)

    # One small step

    def choices(self) -> list[Callable[[], None]]:
        """Returns what can happen next; all of it is independent, so any order is possible."""
        first: dict[Any, Attempt] = {}  # a process runs its assignments one after the other
        for attempt in self.attempts:
            first.setdefault(attempt.process, attempt)
        actions: list[Callable[[], Any]] = [
            *(functools.partial(next, a.steps, None) for a in first.values() if self._moves(a)),
            *(mail.popleft for mail in self.mail if mail),
            *(functools.partial(self._arrive, each) for each in self.ahead),
            *(functools.partial(self._hear, each) for each in self.news if self._moves(each)),
        ]
        return [functools.partial(self._do, action) for action in actions]

    def _moves(self, thing: Any) -> bool:
        return thing not in self.frozen

    def _arrive(self, pull: Callable[[], Any]) -> None:
        self.ahead.remove(pull)
        pull()

    def _hear(self, news: Callable[[], None]) -> Callable[[], None]:
        self.news.remove(news)
        return news

    def _do(self, action: Callable[[], Any]) -> None:
        then = action()
        if then is not None:
            then()
        self._settle()

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

    def _answer(self, attempt: Attempt, reply: Any) -> None:
        """Sends the answer of a worker; also that of a worker believed dead may arrive."""
        self.attempts.remove(attempt)
        worker, _ = attempt.process
        if attempt in self.believed.get(worker, ()):
            self.believed[worker].remove(attempt)
            if not self.believed[worker]:
                del self.believed[worker]
        if not attempt.answer.done():
            attempt.answer.set_result(reply)

    def _work(self, attempt: Attempt) -> Iterator[None]:
        """Runs an assignment, with other things between any two of its calls."""
        a, does = attempt.assignment, self.functions[attempt.assignment.task]
        pulled: list[Any] = []
        for server in self.servers:
            yield
            pulled.append(server.pull(a))
            if pulled[-1] is LOST:
                yield
                return self._answer(attempt, LostError(server.index))
        yield
        if DONE in pulled:
            return self._answer(attempt, Result((a.task, a.part)))
        if "raise" in does and a.part == 0:
            return self._answer(attempt, UserError(a.task))
        if a.step is not None and any(version != a.step for version, _ in pulled):
            return self._answer(attempt, Result("late"))
        if does in ("train", "raise"):
            values = tuple(value for _, value in pulled)
            for server, (version, _) in zip(self.servers, pulled, strict=True):
                gradient = gradient_of(a.task, a.part, values, server.index)
                if server.push(a, version, gradient) is LOST:
                    yield
                    return self._answer(attempt, LostError(server.index))
                yield
        is_committed = a.step is not None and a.num_parts == 1
        if is_committed:
            ahead = a._replace(commit=Committed(a.step, a.task, 1), step=a.step + 1)
            self.ahead += [functools.partial(server.pull, ahead) for server in self.servers]
        return self._answer(attempt, Result((a.task, a.part), is_committed))

    # The engine

    async def set_up_worker(self, worker: int) -> int:
        answer = self.loop.create_future()

        def arrive() -> None:
            if worker in self.gone:
                answer.set_exception(LostError(worker, "gone", is_forever=True))
            else:
                self.ready.add(worker)
                answer.set_result(1)

        self.news.append(arrive)
        return await answer

    async def call_worker(self, worker: int, method: str, assignment: Assignment) -> Any:
        have = [self.functions[a.assignment.task] for a in self.believed.get(worker, ())]
        assert len(have) <= (self.staleness is None), "a worker has one thread"
        assert set(have) <= {"train", "raise"}, "a step waits for a function"
        answer = self.loop.create_future()
        if worker in self.ready:
            attempt = Attempt(assignment, answer, (worker, self.num_losses[worker]))
            attempt.steps = self._work(attempt)
            self.believed.setdefault(worker, []).append(attempt)
            self.attempts.append(attempt)
        else:  # the worker has died
            self._lose(answer, worker)
        return await answer

    def call_server(self, index: int, method: str, *arguments: Any) -> asyncio.Future[Any]:
        """Sends a server a message; the messages of the engine keep their order."""
        answer, server = self.loop.create_future(), self.servers[index]
        if method == "commit":
            _, step, task, num_parts = arguments
            assert self.commits.setdefault(step, (task, num_parts)) == (task, num_parts)

        def arrive() -> None:
            reply = None
            if method == "load":
                _, state, _, incarnation = arguments
                server.load(state, incarnation)
            elif server.state is None or (method == "commit" and server.refuses(arguments[0])):
                self._lose(answer, index)
                return
            elif method == "commit":
                server.commit(*arguments)
            else:
                reply = server.snapshot(), None
            self.news.append(lambda: answer.done() or answer.set_result(reply))

        self.mail[index].append(arrive)
        return answer

    def end(self, task: int, how: str, value: Any) -> None:
        assert task not in self.ended, f"task {task} was {self.ended[task]}, and now {how}"
        self.ended[task] = how
        self.must_raise |= how == "failed"
        if how == "delivered" and self.functions[task] in ("train", "raise"):
            assert value == tuple((task, part) for part in range(len(value)))
            self.committed[task] = len(value)

    # Laws

    def _check_nobody_waits(self) -> None:
        """A worker that is known to be ready does not wait beside a part that could run."""
        d = self.driver
        is_blocked = d._is_restoring or d._obstacle is not None
        if is_blocked or all(d._running[worker] for worker in d.ready):
            return
        assert not d._functions, "a function waits beside an idle worker"
        if d._awaits_snapshot:
            return
        if self.staleness == 0:
            assert not any(task.waiting for task in d._in_flight.values())
            assert d._in_flight or not d._steps, "a step waits beside an idle worker"
        elif self.staleness is None:
            assert not d._steps, "a step waits beside an idle worker"
        else:
            assert d._in_flight or not d._steps, "all steps wait beside an idle worker"

    def check_end(self) -> None:
        """Checks what must hold when nothing is left to happen."""
        assert not self.unsettled, f"{self.unsettled} tasks have not ended"
        self.take_error()
        self.request_snapshot()  # before it, servers commit what workers have left
        self.run(lambda _: 0, LIMIT)
        assert not self.calls, "the main program waits"
        assert not self.must_raise, "an error has been lost"
        if any(server.state is None for server in self.servers):
            return  # lost after the last task, or there is no snapshot
        if len(self.gone) == self.num_workers or self.driver._obstacle is not None:
            return
        assert self.driver.is_idle
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
