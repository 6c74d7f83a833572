"""The report of launches that do not end: steps, replicas, collectives, callbacks and threads."""

import sys
import threading
import traceback
from collections.abc import Iterable, Iterator, Sequence

from mirror._src.base import clock
from mirror._src.base.source_lines import is_users
from mirror._src.devices import backend, launches
from mirror._src.devices.launches import Launch
from mirror._src.passes.callbacks import RunningCallback, running_callbacks

_MOST_SITES = 4
_MOST_FRAMES = 12


def report(stalled: Launch, secs: float, actions: Iterable[str], peers: Sequence[str] = ()) -> str:
    """Returns the report about a launch that has not ended for some seconds.

    Args:
        stalled: The launch.
        secs: Time for which nothing has changed.
        actions: What to do, and what happens next, one sentence each.
        peers: What the other processes do, one line each.
    """
    lines = [
        f"mirror: {_subject(stalled)} has not ended for {in_words(secs)}.",
        *(f"  {line}" for line in state_of_launches()),
        *(["Other processes, by what they last posted:"] if peers else []),
        *(f"  {line}" for line in peers),
        "Threads, with the calls of your code and the innermost call:",
        *(f"  {line}" for line in stacks()),
        *actions,
    ]
    return "\n".join(lines)


def _subject(launch: Launch) -> str:
    if launch.collective:
        return f"{launch.described}, in the {launch.collective},"
    return f"{launch.described}, launch {launch.joint_number or launch.number},"


def state_of_launches() -> list[str]:
    """Returns a line per launch, collective and host callback that has not ended."""
    log, callbacks = launches.log, running_callbacks()
    lines = []
    for launch in log.unfinished() if log is not None else []:
        lines.append(_progress(launch))
        lines += _waits(launch, callbacks)
    lines += [_callback(callback) for callback in callbacks]
    return lines


def _progress(launch: Launch) -> str:
    """Returns what a launch does, and which replicas have not ended."""
    secs, devices = clock.now() - launch.began, launch.described.devices
    subject = _subject(launch)
    if launch.phase == "waiting":
        return f"{subject} waits for its turn, for {in_words(secs)}"
    if launch.phase == "compiling":
        return f"{subject} is being compiled, for {in_words(secs)}"
    missing = launch.missing()
    if launch.collective:
        return f"{subject} waits for {replicas(missing)}, for {in_words(secs)}"
    running = dict.fromkeys(
        device for i, device in zip(launch.described.replicas, devices, strict=True) if i in missing
    )
    ended = [i for i in launch.local_replicas if i not in missing]
    on = f" on {backend.names(list(running))}" if running else ""
    end = f", {replicas(ended)} ended" if ended else ""
    return f"{subject} runs {replicas(missing)}{on}{end}, for {in_words(secs)}"


def _waits(launch: Launch, callbacks: Sequence[RunningCallback]) -> Iterator[str]:
    """Yields the collective that the other replicas wait in, or all where it may be."""
    if launch.phase != "running" or len(launch.described.replicas) == 1:
        return
    sites = launch.described.sites()
    running = {id(callback.eqn) for callback in callbacks}
    blocked = [k for k, site in enumerate(sites) if id(site.key) in running]
    after = [site for site in sites[min(blocked, default=0) :] if not site.is_callback]
    if blocked and after:
        yield f"  the other replicas wait at the latest in the {after[0].what} at {after[0].line}"
    elif not blocked and after:
        places = [f"{site.what} at {site.line}" for site in after[:_MOST_SITES]]
        more = len(after) - _MOST_SITES
        rest = f", and {more} more" if more > 0 else ""
        yield f"  its collectives: {', '.join(places)}{rest}"


def _callback(callback: RunningCallback) -> str:
    on = f" of replica {callback.replica}" if callback.replica is not None else ""
    secs = clock.now() - callback.began
    return (
        f"the {callback.eqn.primitive.name}{on} at {callback.line} has not returned for "
        f"{in_words(secs)}; it runs in thread {callback.thread}"
    )


def in_words(secs: float) -> str:
    """Returns a duration: `0.4 s`, `61 s`."""
    return f"{secs:.1f} s" if secs < 10 else f"{secs:.0f} s"


def replicas(ids: Sequence[int]) -> str:
    """Returns `replica 1`, `replicas 0, 2`, or `no replica`."""
    if not ids:
        return "no replica"
    return f"replica{'s' * (len(ids) > 1)} {', '.join(map(str, ids))}"


def stacks() -> Iterator[str]:
    """Yields what each thread of Python executes, except for those that watch and wait."""
    threads = {thread.ident: thread.name for thread in threading.enumerate()}
    for ident, frame in sys._current_frames().items():
        name = threads.get(ident, "not started by Python")
        if ident == threading.get_ident() or name in _OWN_THREADS:
            continue
        yield f"Thread {ident} ({name}):"
        yield from _stack(traceback.extract_stack(frame))


def _stack(entries: Sequence[traceback.FrameSummary]) -> Iterator[str]:
    """Yields the last calls of the user's code, and the innermost call of all."""
    shown = [entry for entry in entries if is_users(entry.filename)][-_MOST_FRAMES:]
    if entries and entries[-1] not in shown:
        shown.append(entries[-1])
    for entry in shown:
        text = f": {entry.line}" if entry.line else ""
        yield f"  {entry.filename}:{entry.lineno} in {entry.name}{text}"


THREAD_NAME = "mirror watch"
PEERS_THREAD_NAME = "mirror peers"
_OWN_THREADS = (THREAD_NAME, PEERS_THREAD_NAME, "mirror failures", "mirror stop")
