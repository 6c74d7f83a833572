"""Workers for which the others would wait get fewer asynchronous steps."""

import heapq

import pytest

from mirror._src.ps.actions import Start
from mirror._src.ps.pace import Pace
from mirror._src.ps.schedule import Scheduler


def run(secs, *, steps=400, **options):
    """Runs steps with workers of which number i takes `secs[i]` for a batch, by a simulated clock.

    Returns:
        Time and worker of each batch. A synchronous step has one batch for each worker.
    """
    scheduler = Scheduler(len(secs), **options)
    is_sync = options["staleness"] == 0
    events, done, now = [], [], 0.0

    def carry_out(actions):
        for action in actions:
            if isinstance(action, Start):
                number, worker = action.assignment.number, action.assignment.worker
                took = secs[worker](now) if callable(secs[worker]) else secs[worker]
                heapq.heappush(events, (now + took, number, worker, took))

    for worker in range(len(secs)):
        carry_out(scheduler.worker_ready(worker))
    for _ in range(steps // len(secs) if is_sync else steps):
        carry_out(scheduler.submit(len(secs) if is_sync else 1, is_step=True)[1])
    while events:
        now, number, worker, took = heapq.heappop(events)
        done.append((now, worker))
        carry_out(scheduler.finished(number, None, secs=took))
    assert scheduler.is_idle
    assert len(done) == steps
    return done


def rate(*args, **options):
    """Returns batches per second of `run`."""
    done = run(*args, **options)
    return len(done) / done[-1][0]


SLOW = (0.15, 0.03, 0.03, 0.03)


def test_one_slow_worker_of_four_does_not_slow_the_others_to_its_rate():
    synchronous = rate(SLOW, staleness=0)
    assert rate(SLOW, staleness=3) > 2.5 * synchronous
    assert rate(SLOW, staleness=15) > 3 * synchronous


@pytest.mark.parametrize("staleness", [1, 2, 3, 7, None])
@pytest.mark.parametrize("workers", [1, 2, 3, 4, 8])
def test_workers_of_similar_speed_all_work(workers, staleness):
    secs = [0.03 * (1 + 0.1 * worker / workers) for worker in range(workers)]
    scheduler = Scheduler(workers, staleness=staleness)
    for _ in range(5):
        for worker in range(workers):
            scheduler.pace.add(worker, secs[worker], range(workers))
    assert not scheduler.pace.resting(range(workers))


@pytest.mark.parametrize("slow", [0.06, 0.15, 0.3, 3.0])
@pytest.mark.parametrize("staleness", [1, 2, 3, 5])
def test_rate_is_close_to_that_of_the_best_choice_of_workers(staleness, slow):
    with_it = min(staleness + 1, 1 + 3 * slow / 0.03) / slow
    without = min(staleness + 1, 3) / 0.03
    steps = int(60 * slow / 0.03)  # several rests, so that the first trial of all does not count
    found = rate((slow, 0.03, 0.03, 0.03), staleness=staleness, steps=max(steps, 400))
    assert found > 0.75 * max(with_it, without)


def test_worker_that_becomes_faster_works_again():
    done = run((lambda now: 0.15 if now < 3 else 0.03, 0.03, 0.03, 0.03), staleness=3, steps=2000)
    assert [worker for _, worker in done[-400:]].count(0) == 100
    early = [worker for now, worker in done if now < 3]
    assert early.count(0) < 0.03 * len(early)


def test_worker_that_becomes_slower_rests():
    found = rate((lambda now: 0.03 if now < 3 else 0.15, 0.03, 0.03, 0.03), staleness=3, steps=2000)
    assert found > 80  # 4 / 0.15 = 27 with it, 100 without


def test_one_long_step_does_not_make_a_worker_rest():
    pace = Pace(3)
    for secs in (5.0, 0.03, 0.03, 5.0, 0.03):  # compiles, then waits for a processor
        for worker in range(4):
            pace.add(worker, secs if worker == 0 else 0.03, range(4))
            assert not pace.resting(range(4))


def test_slow_worker_works_when_the_others_are_lost():
    pace = Pace(3)
    for _ in range(3):
        for worker, secs in enumerate(SLOW):
            pace.add(worker, secs, range(4))
    assert pace.resting(range(4)) == {0}
    assert not pace.resting([0])


def test_worker_that_was_restarted_is_tried_again():
    pace = Pace(3)
    for _ in range(3):
        for worker, secs in enumerate(SLOW):
            pace.add(worker, secs, range(4))
    pace.forget(0)
    assert not pace.resting(range(4))
