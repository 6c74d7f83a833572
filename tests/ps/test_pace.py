"""Workers for which the others would wait get fewer asynchronous steps."""

import heapq

from mirror._src.ps.actions import Start
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
