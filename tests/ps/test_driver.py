"""The protocol of the driver, one rule at a time; random orders of events follow."""

import gc
import sys
import weakref

import pytest

from mirror._src.ps.driver import Task
from mirror._src.ps.handles import ParameterServerLostError
from mirror._src.ps.messages import Assignment, Committed, LostError, ServerSnapshot
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


@pytest.fixture
def make():
    """Makes drivers, whose workers are not ready."""
    drivers = []

    def make(workers=2, staleness=0, snapshot_every=0):
        drivers.append(Recorded(workers, staleness, snapshot_every))
        return drivers[-1]

    yield make
    for driver in drivers:
        driver.close()


@pytest.fixture
def ready(make):
    """Makes drivers, whose workers are ready."""

    def make_ready(*args, **kwargs):
        driver = make(*args, **kwargs)
        for worker in range(driver.num_workers):
            assert driver.worker_ready(worker) == []
        return driver

    return make_ready


def started(actions):
    """The assignments that actions start, as (task, part, worker)."""
    each = [action for action in actions if isinstance(action, Start)]
    return [(a.task, a.part, worker) for _, worker, a in each]


def without_starts(actions):
    return [action for action in actions if not isinstance(action, Start)]


def test_step_is_committed_when_all_parts_have_finished(ready):
    driver = ready()
    task, actions = driver.submit(2, is_step=True)
    first = Assignment(task, 0, 2, 0, None, 0)
    assert actions == [Start(0, 0, first), Start(1, 1, first._replace(part=1))]
    assert driver.finished(1, "b") == []
    assert driver.finished(0, "a") == [Commit(0, 0, task, 2), Deliver(task, ("a", "b"))]
    assert driver.driver.is_idle


def test_next_step_carries_the_commit_and_pulls_the_next_version(ready):
    driver = ready(1)
    driver.submit(1, is_step=True)
    _, actions = driver.submit(1, is_step=True)
    assert actions == []
    _, start, _ = driver.finished(0, None)  # before the result is delivered
    assert start.assignment.commit == Committed(step=0, task=0, num_parts=1)
    assert start.assignment.step == 1


def test_commit_of_a_worker_is_sent_again_before_a_snapshot_alone(ready):
    driver = ready(1, snapshot_every=2)
    for _ in range(2):
        driver.submit(1, is_step=True)
    assert [type(each) for each in driver.finished(0, "a", is_committed=True)] == [Start, Deliver]
    actions = driver.finished(1, "b", is_committed=True)
    assert actions[-2:] == [Commit(0, 1, 1, 1), TakeSnapshot()]
    assert Deliver(1, ("b",)) in actions


def test_workers_start_nothing_before_they_are_ready(make):
    driver = make()
    assert driver.submit(2, is_step=True)[1] == []
    assert started(driver.worker_ready(1)) == [(0, 1, 1)]
    assert started(driver.worker_ready(0)) == [(0, 0, 0)]


def test_function_runs_beside_a_step(ready):
    driver = ready(3)
    driver.submit(2, is_step=True)
    task, actions = driver.submit(is_step=False)
    assert started(actions) == [(task, 0, 2)]
    assert driver.finished(2, "x") == [Deliver(task, ("x",))]


def test_part_of_a_lost_worker_runs_on_another_before_later_tasks(ready):
    driver = ready()
    driver.submit(2, is_step=True)
    driver.submit(is_step=False)
    assert driver.worker_lost(0) == [Revive(0)]
    assert started(driver.finished(1, "b")) == [(0, 0, 1)]
    assert started(driver.worker_ready(0)) == [(1, 0, 0)]


def test_revival_that_fails_is_repeated(ready):
    driver = ready()
    driver.submit(2, is_step=True)
    assert driver.worker_lost(0) == [Revive(0)]
    assert driver._answer(driver.set_ups[0], LostError(0)) == [Revive(0)]


def test_asynchronous_steps_start_only_within_the_bound(ready):
    driver = ready(3, staleness=1)
    for _ in range(4):
        driver.submit(is_step=True)
    assert driver.driver.running == 2  # a third one would be two updates behind
    assert started(driver.finished(1, None)) == []  # task 0 has been overtaken once
    assert [task for task, *_ in started(driver.finished(0, None))] == [2, 3]


def test_lost_asynchronous_step_stays_in_flight(ready):
    driver = ready(3, staleness=1)
    for _ in range(3):
        driver.submit(is_step=True)
    assert started(driver.worker_lost(0)) == [(0, 0, 2)]
    assert started(driver.finished(1, None)) == []  # task 0 may still be pushed by worker 0
    assert started(driver.finished(2, None)) != []


def test_next_step_waits_at_the_worker_if_many_follow(ready):
    driver = ready(2, staleness=None)
    for _ in range(8):
        driver.submit(is_step=True)
    assert driver.driver.running == 4
    assert started(driver.finished(0, None)) == [(4, 0, 0)]
    assert started(driver.finished(1, None)) == [(5, 0, 1)]
    assert started(driver.finished(2, None)) == []  # the last two go to whoever is idle first
    assert started(driver.finished(4, None)) == [(6, 0, 0)]


def test_nothing_waits_at_a_worker_of_synchronous_or_bounded_steps(ready):
    for staleness in (0, 1, 5):
        driver = ready(1, staleness=staleness)
        for _ in range(8):
            driver.submit(is_step=True)
        assert driver.driver.running == 1


def test_functions_are_not_overtaken_by_steps_that_wait_at_workers(ready):
    driver = ready(1, staleness=None)
    function, _ = driver.submit(is_step=False)
    for _ in range(4):
        driver.submit(is_step=True)
    assert driver.driver.running == 1  # how long the function takes is not known
    assert started(driver.finished(0, None)) == [(1, 0, 0), (2, 0, 0)]
    waiting, _ = driver.submit(is_step=False)
    assert started(driver.finished(1, None)) == []  # so that the worker is idle some time
    assert started(driver.finished(2, None)) == [(3, 0, 0)]
    assert function < waiting


def test_both_steps_of_a_lost_worker_run_again(ready):
    driver = ready(2, staleness=None)
    for _ in range(8):
        driver.submit(is_step=True)
    assert driver.worker_lost(0) == [Revive(0)]
    assert started(driver.finished(1, None)) == [(0, 0, 1)]
    assert started(driver.finished(3, None)) == [(2, 0, 1)]


def test_asynchronous_steps_without_a_bound_use_all_workers(ready):
    driver = ready(3, staleness=None)
    tasks = [driver.submit(is_step=True)[1] for _ in range(4)]
    assert [started(actions) for actions in tasks] == [[(0, 0, 0)], [(1, 0, 1)], [(2, 0, 2)], []]


def test_error_cancels_what_has_not_started_and_is_raised_once(ready):
    driver = ready()
    driver.submit(1, is_step=True)
    driver.submit(is_step=False)
    driver.submit(1, is_step=True)
    error = ValueError("user")
    assert driver.failed(1, error) == [Fail(1, error), Cancel(2)]
    assert driver.take_error() is None  # the step still runs
    assert Deliver(0, ("a",)) in driver.finished(0, "a")
    assert driver.take_error() is error
    assert driver.take_error() is None
    assert started(driver.submit(1, is_step=True)[1])


def test_failed_step_is_not_committed(ready):
    driver = ready()
    driver.submit(2, is_step=True)
    driver.failed(0, ValueError("user"))
    assert driver.take_error() is None
    assert driver.finished(1, "b") == []
    assert driver.take_error() is not None
    start = driver.submit(2, is_step=True)[1][0]
    assert (start.assignment.step, start.assignment.commit) == (0, None)


def test_error_lets_a_step_that_lost_its_worker_finish(ready):
    driver = ready(staleness=None)
    driver.submit(is_step=True)
    driver.submit(is_step=False)
    driver.worker_lost(0)  # its gradient may have reached one server, and not another
    assert started(driver.failed(1, ValueError("user"))) == [(0, 0, 1)]
    assert driver.take_error() is None
    driver.finished(2, None)
    assert driver.take_error() is not None


def test_snapshot_waits_for_steps_and_steps_wait_for_it(ready):
    driver = ready(staleness=None, snapshot_every=100)
    for _ in range(3):
        driver.submit(is_step=True)
    assert driver.request_snapshot() == []
    assert driver.finished(0, "a") == [Deliver(0, ("a",))]
    assert driver.driver.running == 1
    assert driver.finished(1, "b") == [Deliver(1, ("b",)), TakeSnapshot()]
    actions = driver.snapshot_taken("values")
    assert driver.driver.kept[0][2] == "values"
    assert [task for task, *_ in started(actions)] == [2]


def test_steps_since_the_snapshot_are_repeated_after_the_loss_of_a_server(ready):
    driver = ready(1, snapshot_every=2)
    for number in range(3):
        driver.submit(1, is_step=True)
        driver.finished(number, number)
        if number == 1:
            driver._answer(driver.server["snapshot"], (ServerSnapshot({}, version=2), None))
    assert driver.submit(1, is_step=True)[1]  # call 3
    assert driver.server_fails("commit") == [Restore(1)]
    assert driver.finished(3, "of the earlier incarnation") == []
    (start,) = driver.restored()
    assert start == Start(4, 0, Assignment(2, 0, 1, 1, None, 2))
    actions = driver.finished(4, "delivered before")
    assert without_starts(actions) == [Commit(1, 2, 2, 1)]
    assert started(actions) == [(3, 0, 0)]


def test_old_answers_about_servers_are_ignored(ready):
    driver = ready(1, snapshot_every=1)
    driver.submit(1, is_step=True)
    assert TakeSnapshot() in driver.finished(0, "a")
    assert driver.server_fails("commit") == []  # as soon as the snapshot has failed too
    assert driver.snapshot_taken("too late") == [Restore(1)]
    assert driver.driver.kept[0][2] is None
    assert driver.server_fails("load") == [Restore(2)]  # lost again while it was loading
    (start,) = driver.restored()
    assert start.assignment == Assignment(0, 0, 1, 2, None, 0)
    assert not driver.driver.is_idle


def test_answer_of_an_earlier_incarnation_does_not_end_its_repetition(ready):
    driver = ready(2, staleness=None, snapshot_every=5)
    driver.submit(is_step=True)
    driver.submit(is_step=True)
    assert driver.lost_server_in(1) == [Restore(1)]
    assert started(driver.restored()) == [(0, 0, 1)]
    actions = driver.finished(0, "earlier")
    assert started(actions) == [(1, 0, 0)]
    assert without_starts(actions) == []
    assert driver.finished(2, "repeated") == [Deliver(0, ("repeated",))]


def test_worker_reports_the_loss_of_a_server(ready):
    driver = ready(1, snapshot_every=5)
    driver.submit(1, is_step=True)
    assert driver.lost_server_in(0, 1) == [Restore(1)]
    assert started(driver.restored()) == [(0, 0, 0)]


def test_function_of_a_lost_worker_runs_again_and_the_loss_of_a_server_repeats_none(ready):
    driver = ready(2, snapshot_every=5)
    for _ in range(2):
        driver.submit(is_step=False)
    assert driver.finished(1, None) == [Deliver(1, (None,))]
    assert started(driver.worker_lost(0)) == [(0, 0, 1)]
    driver.request_snapshot()
    assert driver.server_fails("snapshot") == [Restore(1)]
    assert driver.restored() == [TakeSnapshot()]
    assert driver.finished(2, "x") == [Deliver(0, ("x",))]
    driver.snapshot_taken()
    assert driver.driver.is_idle


def test_loss_of_a_server_without_snapshots_ends_training_until_values_are_loaded(ready):
    driver = ready(2, staleness=None)
    for _ in range(4):
        driver.submit(is_step=True)
    assert driver.lost_server_in(0, 1) == [Cancel(task) for task in range(4)]
    assert driver.take_error() is None
    driver.finished(1, None)
    for task in (4, 5):
        error = driver.take_error()
        assert isinstance(error, ParameterServerLostError)
        assert "Parameter server 1" in str(error)
        assert "4 tasks" in str(error)
        assert driver.submit(is_step=True)[1] == [Cancel(task)]
    driver.take_error()
    assert driver.load(7) == [Restore(1)]
    driver.restored()
    assert started(driver.submit(is_step=True)[1])


def test_values_are_loaded_after_all_tasks(ready):
    driver = ready(1)
    driver.submit(1, is_step=True)
    loading = driver.loop.create_task(driver.driver.load([(None, ServerSnapshot({}), None)]))
    assert driver._taken() == []
    actions = driver.finished(0, None)
    assert isinstance(actions[-1], Restore)
    assert loading.done()


def test_all_workers_gone_cancels_tasks_and_says_so(ready):
    driver = ready(2)
    driver.submit(2, is_step=True)
    driver.worker_lost(0, is_forever=True)
    assert driver.worker_lost(1, is_forever=True) == [Cancel(0)]
    assert "2 workers" in str(driver.take_error())
    assert driver.submit(1, is_step=True)[1] == [Cancel(1)]
    assert "2 workers" in str(driver.take_error())


def test_loss_of_a_server_after_all_workers_is_an_error_and_nothing_waits(ready):
    driver = ready(1, snapshot_every=2)
    driver.submit(1, is_step=True)
    driver.finished(0, "a")
    driver.submit(is_step=False)
    assert driver.worker_lost(0, is_forever=True) == [Cancel(1)]
    assert "1 workers" in str(driver.take_error())
    assert driver.server_fails("commit") == [Restore(1)]
    joining = driver.loop.create_task(driver.driver.wait(lambda: driver.driver.is_idle))
    assert driver.restored() == []
    assert joining.done()
    assert "1 workers" in str(joining.result())


def test_task_that_loses_its_workers_again_and_again_fails(ready):
    driver = ready(1)
    driver.driver.max_losses = 2
    driver.submit(1, is_step=True)
    for _ in range(2):
        assert driver.worker_lost(0) == [Revive(0)]
        driver.worker_ready(0)
    fail, *_ = driver.worker_lost(0)
    assert isinstance(fail, Fail)
    assert "3 workers were lost" in str(fail.error)
    assert driver.take_error() is fail.error


def test_all_of_many_workers_may_be_lost_in_a_step(ready):
    """The limit is for each part: otherwise, 9 machines that are reclaimed at once end it."""
    count = 32
    driver = ready(count)
    driver.submit(count, is_step=True)
    for worker in range(count):
        assert driver.worker_lost(worker) == [Revive(worker)]
    assert not driver.driver.has_error
    for worker in range(count):
        assert started(driver.worker_ready(worker)) == [(0, worker, worker)]


def test_servers_that_are_lost_again_and_again_are_an_error(ready):
    driver = ready(1, snapshot_every=1)
    driver.driver.max_losses = 2
    driver.submit(1, is_step=True)
    assert driver.lost_server_in(0) == [Restore(1)]
    assert driver.server_fails("load") == [Restore(2)]
    assert driver.server_fails("load") == [Cancel(0)]
    assert isinstance(driver.take_error(), ParameterServerLostError)


def test_batches_are_dropped_when_a_snapshot_covers_them(ready):
    driver = ready(1, snapshot_every=2)
    tasks = []
    for number in range(2):
        task = Task("", [()], list, is_step=True)
        tasks.append(weakref.ref(task))
        driver.loop.run_until_complete(driver.driver.submit(task))
        del task
        driver.finished(number, None)
    gc.collect()
    assert all(task() is not None for task in tasks)  # they would be repeated
    driver.snapshot_taken()
    gc.collect()
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


def test_cost_of_an_event_does_not_grow_with_the_queue(ready, subtests):
    for staleness in [0, 2, None]:
        with subtests.test(staleness=staleness):

            def cost(queued):
                driver = ready(4, staleness=staleness)
                for _ in range(queued):
                    driver.submit(is_step=True)

                def events():
                    for number in range(10):
                        driver.finished(number, None)
                        driver.submit(is_step=True)

                return lines_of(events)

            assert cost(900) < 1.05 * cost(100)  # heaps


def test_random_scenarios_end_well():
    for seed in range(100):
        play(seed)


@pytest.mark.nightly
def test_many_random_scenarios_end_well():
    for seed in range(100, 21_000):
        play(seed)


@pytest.mark.slow
def test_stores_follow_the_protocol_in_random_scenarios():
    for seed in range(30):
        check_stores(play(seed, events=25, server_class=StoreServer))


@pytest.mark.nightly
def test_stores_follow_the_protocol_in_many_random_scenarios():
    for seed in range(100, 2100):
        check_stores(play(seed, server_class=StoreServer))
