"""The protocol of the scheduler, one rule at a time; random orders of events follow."""

import gc
import sys
import weakref

import pytest

from mirror._src.ps.handles import ParameterServerLostError
from mirror._src.ps.messages import Assignment, Committed
from mirror._src.ps.schedule import Task
from tests.ps.recorded import (
    Cancel,
    Commit,
    Deliver,
    Fail,
    Recorded,
    Restore,
    Revive,
    Start,
    TakeSnapshot,
)
from tests.ps.scenarios import play
from tests.ps.stored import StoreServer, check_stores


def ready(workers=2, *, staleness=0, **options):
    scheduler = Recorded(workers, staleness=staleness, **options)
    for worker in range(workers):
        assert scheduler.worker_ready(worker) == []
    return scheduler


def started(actions):
    """The assignments that actions start, as (task, part, worker)."""
    each = [action.assignment for action in actions if isinstance(action, Start)]
    return [(a.task, a.part, a.worker) for a in each]


def without_starts(actions):
    return [action for action in actions if not isinstance(action, Start)]


def test_step_is_committed_when_all_parts_have_finished():
    scheduler = ready()
    task, actions = scheduler.submit(2, is_step=True)
    first = Assignment(0, task, 0, 2, 0, 0, None, 0)
    assert actions == [Start(first), Start(first._replace(number=1, part=1, worker=1))]
    assert scheduler.finished(1, "b") == []
    assert scheduler.finished(0, "a") == [
        Commit(0, 0, task, 2),
        Deliver(task, ("a", "b")),
    ]
    assert scheduler.is_idle


def test_next_step_carries_the_commit_and_pulls_the_next_version():
    scheduler = ready(1)
    scheduler.submit(1, is_step=True)
    _, actions = scheduler.submit(1, is_step=True)
    assert actions == []
    start = scheduler.finished(0, None)[-1]
    assert start.assignment.commit == Committed(step=0, task=0, num_parts=1)
    assert start.assignment.step == 1


def test_workers_start_nothing_before_they_are_ready():
    scheduler = Recorded(2, staleness=0)
    assert scheduler.submit(2, is_step=True)[1] == []
    assert started(scheduler.worker_ready(1)) == [(0, 1, 1)]
    assert scheduler.worker_ready(1) == []
    assert started(scheduler.worker_ready(0)) == [(0, 0, 0)]


def test_function_runs_beside_a_step():
    scheduler = ready(3)
    scheduler.submit(2, is_step=True)
    task, actions = scheduler.submit(is_step=False)
    assert started(actions) == [(task, 0, 2)]
    assert scheduler.finished(2, "x") == [Deliver(task, ("x",))]


def test_part_of_a_lost_worker_runs_on_another_before_later_tasks():
    scheduler = ready()
    scheduler.submit(2, is_step=True)
    scheduler.submit(is_step=False)
    assert scheduler.worker_lost(0) == [Revive(0)]
    assert started(scheduler.finished(1, "b")) == [(0, 0, 1)]
    assert scheduler.finished(0, "from a worker believed dead") == []
    assert scheduler.finished(99, "unknown") == []
    assert started(scheduler.worker_ready(0)) == [(1, 0, 0)]


def test_revival_that_fails_is_repeated():
    scheduler = ready()
    assert scheduler.worker_lost(0) == [Revive(0)]
    assert scheduler.worker_lost(0) == [Revive(0)]


def test_asynchronous_steps_start_only_within_the_bound():
    scheduler = ready(3, staleness=1)
    for _ in range(4):
        scheduler.submit(is_step=True)
    assert scheduler.running == 2  # a third one would be two updates behind
    assert started(scheduler.finished(1, None)) == []  # task 0 has been overtaken once
    assert started(scheduler.finished(0, None)) == [(2, 0, 2), (3, 0, 1)]


def test_lost_asynchronous_step_stays_in_flight():
    scheduler = ready(3, staleness=1)
    for _ in range(3):
        scheduler.submit(is_step=True)
    assert started(scheduler.worker_lost(0)) == [(0, 0, 2)]
    assert started(scheduler.finished(1, None)) == []  # task 0 may still be pushed by worker 0
    assert started(scheduler.finished(2, None)) != []


def test_next_step_waits_at_the_worker_if_many_follow():
    scheduler = ready(2, staleness=None)
    for _ in range(8):
        scheduler.submit(is_step=True)
    assert scheduler.running == 4
    assert started(scheduler.finished(0, None)) == [(4, 0, 0)]
    assert started(scheduler.finished(1, None)) == [(5, 0, 1)]
    assert started(scheduler.finished(2, None)) == []  # the last two go to whoever is idle first
    assert started(scheduler.finished(4, None)) == [(6, 0, 0)]


def test_nothing_waits_at_a_worker_of_synchronous_or_bounded_steps():
    for staleness in (0, 1, 5):
        scheduler = ready(1, staleness=staleness)
        for _ in range(8):
            scheduler.submit(is_step=True)
        assert scheduler.running == 1


def test_functions_are_not_overtaken_by_steps_that_wait_at_workers():
    scheduler = ready(1, staleness=None)
    function, _ = scheduler.submit(is_step=False)
    for _ in range(4):
        scheduler.submit(is_step=True)
    assert scheduler.running == 1  # how long the function takes is not known
    assert started(scheduler.finished(0, None)) == [(1, 0, 0), (2, 0, 0)]
    waiting, _ = scheduler.submit(is_step=False)
    assert started(scheduler.finished(1, None)) == []  # so that the worker is idle some time
    assert started(scheduler.finished(2, None)) == [(3, 0, 0)]
    assert function < waiting


def test_both_steps_of_a_lost_worker_run_again():
    scheduler = ready(2, staleness=None)
    for _ in range(8):
        scheduler.submit(is_step=True)
    assert started(scheduler.worker_lost(0)) == []
    assert started(scheduler.finished(1, None)) == [(0, 0, 1)]
    assert scheduler.finished(0, "of a worker that was lost") == []
    assert started(scheduler.finished(3, None)) == [(2, 0, 1)]


def test_asynchronous_steps_without_a_bound_use_all_workers():
    scheduler = ready(3, staleness=None)
    tasks = [scheduler.submit(is_step=True)[1] for _ in range(4)]
    assert [started(actions) for actions in tasks] == [[(0, 0, 0)], [(1, 0, 1)], [(2, 0, 2)], []]


def test_error_cancels_what_has_not_started_and_is_raised_once():
    scheduler = ready()
    scheduler.submit(1, is_step=True)
    scheduler.submit(is_step=False)
    scheduler.submit(1, is_step=True)
    error = ValueError("user")
    actions = scheduler.failed(1, error)
    assert actions == [Fail(1, error), Cancel(2)]
    assert scheduler.submit(is_step=False)[1] == [Cancel(3)]
    assert scheduler.take_error() is None  # the step still runs
    assert Deliver(0, ("a",)) in scheduler.finished(0, "a")
    assert scheduler.take_error() is error
    assert scheduler.take_error() is None
    assert started(scheduler.submit(1, is_step=True)[1])


def test_failed_step_is_not_committed():
    scheduler = ready()
    scheduler.submit(2, is_step=True)
    scheduler.failed(0, ValueError("user"))
    assert scheduler.take_error() is None
    assert scheduler.finished(1, "b") == []
    assert scheduler.take_error() is not None
    start = scheduler.submit(2, is_step=True)[1][0]
    assert (start.assignment.step, start.assignment.commit) == (0, None)


def test_error_lets_a_step_that_lost_its_worker_finish():
    scheduler = ready(staleness=None)
    scheduler.submit(is_step=True)
    scheduler.submit(is_step=False)
    scheduler.worker_lost(0)  # its gradient may have reached one server, and not another
    assert started(scheduler.failed(1, ValueError("user"))) == [(0, 0, 1)]
    assert scheduler.take_error() is None
    scheduler.finished(2, None)
    assert scheduler.take_error() is not None


def test_snapshot_waits_for_steps_and_steps_wait_for_it():
    scheduler = ready(staleness=None, snapshot_every=100)
    for _ in range(3):
        scheduler.submit(is_step=True)
    assert scheduler.request_snapshot() == []
    assert without_starts(scheduler.finished(0, "a")) == [Deliver(0, ("a",))]
    assert scheduler.running == 1
    assert scheduler.finished(1, "b") == [Deliver(1, ("b",)), TakeSnapshot(0)]
    actions = scheduler.snapshot_taken(0, "values")
    assert scheduler.kept == "values"
    assert [task for task, *_ in started(actions)] == [2]


def test_steps_since_the_snapshot_are_repeated_after_the_loss_of_a_server():
    scheduler = ready(1, snapshot_every=2)
    for number in range(3):
        scheduler.submit(1, is_step=True)
        scheduler.finished(number, number)
        scheduler.snapshot_taken(0, None)
    assert scheduler.submit(1, is_step=True)[1]  # assignment 3
    assert scheduler.server_lost(0) == [Restore(1)]
    assert scheduler.finished(3, "of the earlier incarnation") == []
    (start,) = scheduler.restored(1)
    assert start.assignment == Assignment(4, 2, 0, 1, 0, 1, None, 2)
    actions = scheduler.finished(4, "delivered before")
    assert without_starts(actions) == [Commit(1, 2, 2, 1)]
    assert started(actions) == [(3, 0, 0)]


def test_old_answers_about_servers_are_ignored():
    scheduler = ready(1, snapshot_every=1)
    scheduler.submit(1, is_step=True)
    assert TakeSnapshot(0) in scheduler.finished(0, "a")
    assert scheduler.server_lost(0) == [Restore(1)]
    assert scheduler.server_lost(0) == []  # seen by a second call
    assert scheduler.snapshot_taken(0, None) == []
    assert scheduler.server_lost(1) == [Restore(2)]  # lost again while it was loading
    assert scheduler.restored(1) == []
    assert scheduler.restored(2) == [TakeSnapshot(1)]
    assert not scheduler.is_idle


def test_answer_of_an_earlier_incarnation_does_not_end_its_repetition():
    scheduler = ready(2, snapshot_every=5)
    scheduler.submit(1, is_step=True)
    scheduler.server_lost(0)
    assert started(scheduler.restored(1)) == [(0, 0, 1)]
    assert scheduler.finished(0, "earlier") == []
    assert Deliver(0, ("repeated",)) in scheduler.finished(1, "repeated")


def test_worker_reports_the_loss_of_a_server():
    scheduler = ready(1, snapshot_every=5)
    scheduler.submit(1, is_step=True)
    assert scheduler.lost_server_in(0, 1) == [Restore(1)]
    assert started(scheduler.restored(1)) == [(0, 0, 0)]


def test_function_of_a_lost_worker_runs_again_and_the_loss_of_a_server_repeats_none():
    scheduler = ready(2, snapshot_every=5)
    for _ in range(2):
        scheduler.submit(is_step=False)
    assert scheduler.finished(1, None) == [Deliver(1, (None,))]
    assert started(scheduler.worker_lost(0)) == [(0, 0, 1)]
    scheduler.server_lost(0)
    assert scheduler.restored(1) == []
    assert scheduler.finished(2, "x") == [Deliver(0, ("x",))]
    assert scheduler.is_idle


def test_loss_of_a_server_without_snapshots_ends_training_until_values_are_loaded():
    scheduler = ready(1)
    scheduler.submit(1, is_step=True)
    scheduler.submit(1, is_step=True)
    assert scheduler.server_lost(0, 1) == [Cancel(0), Cancel(1)]
    assert scheduler.take_error() is None
    scheduler.finished(0, None)
    for _ in range(2):
        error = scheduler.take_error()
        assert isinstance(error, ParameterServerLostError)
        assert "Parameter server 1" in str(error)
        assert "step 0" in str(error)
        assert scheduler.submit(1, is_step=True)[1][0] == Cancel(scheduler._num_tasks - 1)
    scheduler.take_error()
    assert scheduler.load(7, None) == [Restore(1)]
    scheduler.restored(1)
    assert scheduler.submit(1, is_step=True)[1][0].assignment.step == 7


def test_load_refuses_while_tasks_run():
    scheduler = ready(1)
    scheduler.submit(1, is_step=True)
    with pytest.raises(RuntimeError, match=r"1 scheduled .*join\(\)"):
        scheduler.load(0, None)


def test_all_workers_gone_cancels_tasks_and_says_so():
    scheduler = ready(2)
    scheduler.submit(2, is_step=True)
    scheduler.worker_gone(0)
    assert scheduler.worker_gone(1) == [Cancel(0)]
    assert "2 workers" in str(scheduler.take_error())
    assert scheduler.submit(1, is_step=True)[1] == [Cancel(1)]
    assert "2 workers" in str(scheduler.take_error())
    scheduler.worker_ready(0)
    assert started(scheduler.submit(1, is_step=True)[1]) == [(2, 0, 0)]


def test_task_that_loses_its_workers_again_and_again_fails():
    scheduler = ready(1, max_losses=2)
    scheduler.submit(1, is_step=True)
    for _ in range(2):
        assert Revive(0) in scheduler.worker_lost(0)
        scheduler.worker_ready(0)
    fail, *_ = scheduler.worker_lost(0)
    assert isinstance(fail, Fail)
    assert "3 workers were lost" in str(fail.error)
    assert scheduler.take_error() is fail.error


def test_all_of_many_workers_may_be_lost_in_a_step():
    """The limit is for each part: otherwise, 9 machines that are reclaimed at once end it."""
    count = 32
    scheduler = ready(count)
    scheduler.submit(count, is_step=True)
    for worker in range(count):
        assert Revive(worker) in scheduler.worker_lost(worker)
    assert not scheduler.has_error
    for worker in range(count):
        assert started(scheduler.worker_ready(worker)) == [(0, worker, worker)]


def test_servers_that_are_lost_again_and_again_are_an_error():
    scheduler = ready(1, snapshot_every=1, max_losses=2)
    scheduler.submit(1, is_step=True)
    assert scheduler.server_lost(0) == [Restore(1)]
    assert scheduler.server_lost(1) == [Restore(2)]
    assert Cancel(0) in scheduler.server_lost(2)
    scheduler.finished(0, None)
    assert isinstance(scheduler.take_error(), ParameterServerLostError)


def test_batches_are_dropped_when_a_snapshot_covers_them():
    scheduler = ready(1, snapshot_every=2)
    tasks = []
    for number in range(2):
        task = Task("", [()], list, is_step=True)
        tasks.append(weakref.ref(task))
        scheduler.scheduler.submit(task)
        del task
        scheduler.finished(number, None)
    assert all(task() is not None for task in tasks)  # they would be repeated
    scheduler.snapshot_taken(0, None)
    assert [task() for task in tasks] == [None, None]


def lines_of(call):
    """Returns how many lines of Python a call executes, without finalizers of other tests."""
    count, before = 0, sys.gettrace()

    def trace(frame, event, arg):
        nonlocal count
        count += event == "line"
        return trace

    gc.disable()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
        gc.enable()
    return count


def test_cost_of_an_event_does_not_grow_with_the_queue(subtests):
    for staleness in [0, 2, None]:
        with subtests.test(staleness=staleness):

            def cost(queued):
                scheduler = ready(4, staleness=staleness)
                for _ in range(queued):
                    scheduler.submit(is_step=True)

                def events():
                    for _ in range(10):
                        scheduler.finished(next(iter(scheduler._running)), None)
                        scheduler.submit(is_step=True)

                return lines_of(events)

            assert cost(2000) == cost(100)


def test_random_scenarios_end_well():
    for seed in range(200):
        play(seed)


@pytest.mark.nightly
def test_many_random_scenarios_end_well():
    for seed in range(200, 21_000):
        play(seed)


@pytest.mark.slow
def test_stores_follow_the_protocol_in_random_scenarios():
    for seed in range(30):
        check_stores(play(seed, events=25, server_class=StoreServer))


@pytest.mark.nightly
def test_stores_follow_the_protocol_in_many_random_scenarios():
    for seed in range(100, 2100):
        check_stores(play(seed, server_class=StoreServer))
