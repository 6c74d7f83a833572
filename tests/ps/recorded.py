"""A driver whose calls of the engine are recorded, and answered when the test says so."""

import asyncio
from typing import Any, NamedTuple

from mirror._src.ps.driver import Driver, Task
from mirror._src.ps.handles import CancelledError
from mirror._src.ps.messages import Assignment, LostError, Result, ServerSnapshot


class Start(NamedTuple):
    number: int  # of the call
    worker: int
    assignment: Assignment


class Commit(NamedTuple):
    incarnation: int
    step: int
    task: int
    num_parts: int


class Deliver(NamedTuple):
    task: int
    results: tuple[Any, ...]


class Fail(NamedTuple):
    task: int
    error: BaseException


class Cancel(NamedTuple):
    task: int


class Revive(NamedTuple):
    worker: int


class TakeSnapshot(NamedTuple):
    pass


class Restore(NamedTuple):
    incarnation: int


class Value:
    """The value of a task."""

    def __init__(self, actions: list[Any]) -> None:
        self._actions, self.task = actions, Task("", [], tuple, False)

    def _resolve(self, value: Any = None, error: BaseException | None = None) -> None:
        number = self.task.number
        action: Any = Deliver(number, value) if error is None else Fail(number, error)
        self._actions.append(Cancel(number) if isinstance(error, CancelledError) else action)


def values_of(results: list[Result]) -> tuple[Any, ...]:
    """Returns the values of the parts of a task."""
    return tuple(result.value for result in results)


class Recorded:
    """A driver of some workers and one server.

    The methods answer its calls, and return what it did then.
    """

    num_servers = 1

    def __init__(self, num_workers: int, staleness: int | None, snapshot_every: int = 0) -> None:
        self.num_workers, self.actions = num_workers, []
        self.loop = asyncio.new_event_loop()
        self.calls: list[tuple[int, asyncio.Future[Any]]] = []  # of workers
        self.set_ups: dict[int, asyncio.Future[Any]] = {}
        self.server: dict[str, asyncio.Future[Any]] = {}  # the last call of each method
        self.driver = Driver(self, staleness, snapshot_every)
        self.driver.kept = [(None, ServerSnapshot({}), None)]
        self.serving = self.loop.create_task(self.driver.run())
        self._settle()
        self.actions.clear()

    def close(self) -> None:
        self.serving.cancel()
        self._settle()
        self.loop.close()

    def _settle(self) -> None:
        async def settle() -> None:
            await asyncio.sleep(0)
            while self.loop._ready:
                await asyncio.sleep(0)

        self.loop.run_until_complete(settle())

    def _taken(self) -> list[Any]:
        self._settle()
        taken = [*self.actions]
        self.actions.clear()
        return taken

    def _answer(self, future: asyncio.Future[Any], reply: Any) -> list[Any]:
        if isinstance(reply, BaseException):
            future.set_exception(reply)
        else:
            future.set_result(reply)
        return self._taken()

    # The engine

    async def set_up_worker(self, worker: int) -> int:
        self.actions.append(Revive(worker))
        self.set_ups[worker] = self.loop.create_future()
        return await self.set_ups[worker]

    async def call_worker(self, worker: int, method: str, assignment: Assignment) -> Any:
        self.actions.append(Start(len(self.calls), worker, assignment))
        future = self.loop.create_future()
        self.calls.append((worker, future))
        return await future

    def call_server(self, server: int, method: str, *arguments: Any) -> asyncio.Future[Any]:
        if method == "commit":
            self.actions.append(Commit(*arguments))
        else:
            self.actions.append(TakeSnapshot() if method == "snapshot" else Restore(arguments[-1]))
        self.server[method] = self.loop.create_future()
        return self.server[method]

    # Answers

    def worker_ready(self, worker: int) -> list[Any]:
        return self._answer(self.set_ups[worker], 1)

    def worker_lost(self, worker: int, *, is_forever: bool = False) -> list[Any]:
        """All that runs on a worker ends; a worker that is lost forever cannot be set up again."""
        for owner, future in self.calls:
            if owner == worker and not future.done():
                future.set_exception(LostError(worker))
        if self.set_ups[worker].done():
            actions = self._taken()
        if is_forever:
            actions = self._answer(self.set_ups[worker], LostError(worker, is_forever=True))
        return actions

    def finished(self, number: int, result: Any, *, is_committed: bool = False) -> list[Any]:
        return self._answer(self.calls[number][1], Result(result, is_committed))

    def failed(self, number: int, error: BaseException) -> list[Any]:
        return self._answer(self.calls[number][1], error)

    def lost_server_in(self, number: int, server: int | None = None) -> list[Any]:
        self.calls[number][1].set_result(LostError(server))  # the worker is well
        return self._taken()

    def snapshot_taken(self, value: Any = None) -> list[Any]:
        return self._answer(self.server["snapshot"], (ServerSnapshot({}), value))

    def restored(self) -> list[Any]:
        return self._answer(self.server["load"], None)

    def server_fails(self, method: str, server: int | None = None) -> list[Any]:
        return self._answer(self.server[method], LostError(server))

    # Calls of the main program

    def submit(self, num_parts: int = 1, *, is_step: bool) -> tuple[int, list[Any]]:
        value: Any = Value(self.actions)
        value.task = Task("", [()] * num_parts, values_of, is_step, value)
        error = self.loop.run_until_complete(self.driver.submit(value.task))
        assert error is None
        return value.task.number, self._taken()

    def load(self, step: int) -> list[Any]:
        kept = [(None, ServerSnapshot({}, version=step), None)]
        error = self.loop.run_until_complete(self.driver.load(kept))
        assert error is None
        return self._taken()

    def request_snapshot(self) -> list[Any]:
        self.driver._is_requested = True
        self.driver._notify()
        return self._taken()

    def take_error(self) -> BaseException | None:
        """What `done` would raise now, if it would not wait."""
        waiting = self.loop.create_task(self.driver.wait(lambda: True))
        self._settle()
        if waiting.done():
            return waiting.result()
        waiting.cancel()
        self._settle()
        return None
