"""`Worker`: runs scheduled functions, and the parts of training steps. It does not know Ray."""

import contextlib
import math
import traceback
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, final

from mirror._src.ps.handles import RunningFunction, running
from mirror._src.ps.messages import (
    Assignment,
    Committed,
    Export,
    LostError,
    NotExportedError,
    Push,
    Raised,
    Rejected,
    Result,
    Servers,
    StepWork,
    require_accepted,
)
from mirror._src.ps.sparse import ServerIds
from mirror._src.ps.step_data import as_numpy
from mirror._src.ps.step_program import Portion, StepProgram
from mirror._src.strategy.mirrored import MirroredStrategy

_MAX_EXPORTS = 256
_MAX_PROGRAMS = 16


@final
class Worker:
    """One worker, which runs one assignment at a time.

    Args:
        index: Its index.
        servers: The servers.
        strategy: The strategy over its devices.
        loads: Unpickles an object.
        dumps: Pickles an object.
        fetch: Returns the pickled object of a reference.
    """

    def __init__(
        self,
        index: int,
        servers: Servers,
        strategy: MirroredStrategy,
        *,
        loads: Callable[[Any], Any],
        dumps: Callable[[Any], Any],
        fetch: Callable[[Any], Any],
    ) -> None:
        self.index, self._servers, self._strategy = index, servers, strategy
        self._loads, self._dumps, self._fetch = loads, dumps, fetch
        self._exports: OrderedDict[int, Any] = OrderedDict()
        self._programs: OrderedDict[tuple[int, int], StepProgram] = OrderedDict()
        self._iterators: dict[int, Any] = {}
        # The values of the next step, which are on their way: by incarnation and step.
        self._ahead: dict[tuple[int, int | None], Callable[[], list[Any]]] = {}

    def run_function(self, assignment: Assignment, fn: Export, arguments: Any) -> Any:
        """Runs a function, and returns its `Result` or `Raised`."""
        del assignment
        with self._running():
            try:
                function = self.load(fn)
                args, kwargs = self._loads(arguments)
                with self._strategy.scope():
                    value = function(*args, **kwargs)
                value = as_numpy(value)
                self._dumps(value)  # an error of this function, not of Ray
            except NotExportedError as error:
                return error
            except BaseException as error:
                return self._raised(error)
            return Result(value)

    def run_part(self, assignment: Assignment, work: StepWork, arguments: Any) -> Any:
        """Runs a part of a step: pulls values, computes gradients, pushes them."""
        with self._running():
            try:
                return self._part(assignment, work, arguments)
            except (LostError, NotExportedError) as error:
                return error
            except BaseException as error:
                return self._raised(error)

    def load(self, export: Export) -> Any:
        """Returns an exported object, which is fetched once.

        Raises:
            NotExportedError: If it is missing, and there is no reference to it.
        """
        if export.key not in self._exports:
            if export.reference is None:
                raise NotExportedError
            self._exports[export.key] = self._loads(self._fetch(export.reference[0]))
            if len(self._exports) > _MAX_EXPORTS:
                self._exports.popitem(last=False)
        self._exports.move_to_end(export.key)
        return self._exports[export.key]

    def _part(self, assignment: Assignment, work: StepWork, arguments: Any) -> Any:
        program = self._program(work)
        weight_of = None if work.weight_of is None else self.load(work.weight_of)
        args, kwargs = self._loads(arguments)
        portion = None if weight_of is None else Portion(assignment.part, assignment.num_parts)
        incarnation, task, step = assignment.incarnation, assignment.task, assignment.step

        def pull(
            ids: ServerIds, step: int | None = step, commit: Committed | None = assignment.commit
        ) -> Callable[[], list[Any]]:
            arguments = [(incarnation, step, commit and tuple(commit), own) for own in ids]
            return self._servers.call_all("pull", arguments)

        no_ids: ServerIds = [{}] * program.num_servers
        ahead = self._ahead.pop((incarnation, step), None)
        self._ahead.clear()
        must_wait = step is None or program.has_tables
        if not must_wait:  # the values of a synchronous step do not age
            pulled_values = ahead or pull(no_ids)
        batch = program.batch(args, kwargs, portion)
        if must_wait:
            if step is None and program.must_compile(batch):
                # What is computed with values from before a compilation would be as many updates
                # late as the other workers make meanwhile.
                program.compile(batch)
            pulled_values = pull(batch.ids)
        pulled = pulled_values()
        if (late := _late(pulled)) is not None:
            # Its worker was lost after the commit; otherwise, this worker was believed lost.
            committed, results = late.results or (None, {})
            return Result(results[assignment.part] if committed == task else None)
        result, gradients, changes, rows = program.run(batch, pulled, work.ordinal)
        value = as_numpy(result)
        weight = 1.0 if weight_of is None else float(weight_of(value))
        if not math.isfinite(weight) or weight < 0:
            text = f"The weights of a batch must sum to a non-negative number, got {weight}."
            raise ValueError(text)
        names = incarnation, task, assignment.part
        pushes = [
            Push(*names, values.version, weight, own, moved, touched, value)
            for values, own, moved, touched in zip(pulled, gradients, changes, rows, strict=True)
        ]
        replies = self._servers.call_all("push", [(push,) for push in pushes])
        if must_wait or assignment.num_parts > 1:
            _late(replies())
            return Result(value)
        if len(pushes) > 1:  # no server may commit before all have their gradients
            _late(replies())
        # The step is complete: servers update and send the values while its result travels.
        assert step is not None  # otherwise, it must wait
        self._ahead[incarnation, step + 1] = pull(no_ids, step + 1, Committed(step, task, 1))
        _late(replies())
        return Result(value, is_committed=True)

    def _program(self, work: StepWork) -> StepProgram:
        key = (work.fn.key, work.model.key)
        if key not in self._programs:
            if any(model != work.model.key for _, model in self._programs):
                self._programs.clear()  # the memory of the model before
            self._programs[key] = StepProgram(
                self.load(work.fn), self.load(work.model), self._strategy
            )
            if len(self._programs) > _MAX_PROGRAMS:
                self._programs.popitem(last=False)
        self._programs.move_to_end(key)
        return self._programs[key]

    @contextlib.contextmanager
    def _running(self) -> Iterator[None]:
        running.append(RunningFunction(self._iterators, self.load))
        try:
            yield
        finally:
            running.pop()

    def _raised(self, error: BaseException) -> Raised:
        text = f"{type(error).__name__}: {error}"
        lines = "".join(traceback.format_exception(error))
        if not isinstance(error, Exception):  # such as SystemExit: would end the driver too
            return Raised(None, text, lines)
        # The constructor of many errors does not take `args`, which pickle passes to it; others
        # keep in themselves what they print.
        parts = [(type(error), error.args, attributes) for attributes in (vars(error), {})]
        for form in (error, *parts):
            try:
                pickled = self._dumps(form)
                loaded = self._loads(pickled)
                if form is error and str(loaded) != str(error):
                    continue
            except BaseException:
                continue
            return Raised(pickled, text, lines)
        return Raised(None, text, lines)


def _late(replies: list[Any]) -> Rejected | None:
    """Returns the answer that a step has been committed, if any.

    Raises:
        LostError: If a server has other values, or none.
    """
    accepted = [require_accepted(server, reply) for server, reply in enumerate(replies)]
    return next((reply for reply in accepted if isinstance(reply, Rejected)), None)
