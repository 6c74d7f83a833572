"""`DriverThread`: a `Driver` in a background thread, for the main program."""

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine
from typing import Any, final

import optax

from mirror._src.ps.driver import Condition, Driver
from mirror._src.ps.engine import RayEngine
from mirror._src.ps.handles import CancelledError
from mirror._src.ps.messages import Definition, ServerSnapshot

_logger = logging.getLogger("mirror")

_START_SECS = 300.0  # of which JAX takes seconds in each process
_LINE_SECS = 10.0  # between the lines about a wait


@final
class DriverThread:
    """A `Driver` in a background thread, for the main program.

    Args:
        engine: The processes.
        staleness: As for `Driver`.
        snapshot_every: As for `Driver`.
    """

    def __init__(
        self, engine: RayEngine, *, staleness: int | None, snapshot_every: int = 0
    ) -> None:
        self._engine, self._is_sync = engine, staleness == 0
        self.driver = Driver(engine, staleness, snapshot_every)
        self._loop = asyncio.new_event_loop()
        self._closing = asyncio.Event()
        self._lock = threading.Lock()  # so that no call comes after the end of the loop
        self._thread = threading.Thread(target=self._run, name="mirror-coordinator", daemon=True)

    def start(self) -> None:
        """Starts the thread, loads the servers, and waits for them and a worker.

        Raises:
            RuntimeError: If they have not started in time.
        """
        self._thread.start()
        driver, count = self.driver, self._engine.num_servers
        definition = self._engine.dumps(Definition((), optax.identity(), self._is_sync))
        self.call(driver.load, [(definition, ServerSnapshot({}), None)] * count)
        for _ in range(round(_START_SECS / _LINE_SECS)):
            try:
                self.wait(lambda: driver.is_idle and driver.ready, _LINE_SECS)
                return
            except TimeoutError:
                missing = "servers" if driver.ready else "workers"
                problem = f"The {missing} have not started. {self._engine.free_resources()}"
                _logger.warning("Waiting for the cluster. %s", problem)
        raise RuntimeError(
            f"{problem} Waited {_START_SECS:.0f} s. Close other strategies and end other actors "
            "that occupy the cluster, start more machines, or demand less in `worker_options` and "
            "`ps_options`."
        )

    def close(self) -> None:
        """Ends the thread; scheduled functions that have not ended are canceled."""
        with self._lock:
            self.driver.ended = RuntimeError("The strategy has been closed. Create a new one.")
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._closing.set)
            self._thread.join(5)

    def join(self, timeout: float | None = None) -> None:
        """Waits until all scheduled functions have ended.

        Raises:
            TimeoutError: If they have not ended in time.
            Exception: What one of them raised.
        """
        self.wait(lambda: self.driver.is_idle, timeout)

    def raise_error(self) -> None:
        """Raises what a function raised, once nothing runs any more."""
        if self.driver.has_error:
            self.wait(lambda: True)

    def wait(self, condition: Condition, timeout: float | None = None) -> None:
        """Waits for a condition of the driver.

        Raises:
            TimeoutError: If it is not met in time.
            Exception: What a function raised, once nothing runs any more.
        """
        self.call(self.driver.wait, condition, timeout=timeout)

    def call(
        self,
        method: Callable[..., Coroutine[Any, Any, BaseException | None]],
        *arguments: Any,
        timeout: float | None = None,
    ) -> None:
        """Calls a method of the driver in its thread, and raises the error that it returns."""
        with self._lock:
            if self.driver.ended is not None:
                raise self.driver.ended
            future = asyncio.run_coroutine_threadsafe(method(*arguments), self._loop)
        try:
            error = future.result(timeout)
        except TimeoutError:
            raise TimeoutError(
                f"join(timeout={timeout:g}) ended with {self.driver.queued} scheduled functions "
                f"waiting and {self.driver.running} running. Call it again, or pass a longer "
                "timeout."
            ) from None
        finally:
            future.cancel()
        if error is not None:
            raise error

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        serving = asyncio.create_task(self.driver.run())
        await self._closing.wait()
        serving.cancel()
        ended = self.driver.ended
        assert ended is not None
        self.driver.end(
            ended, CancelledError("The strategy was closed before this function ended.")
        )
