"""The report of launches that do not end: of this process, and what the other processes post.

During a watch, a thread of each process posts every second or so what its process does, to JAX's
coordination service. It reads the posts of the others only while a launch is overdue. Everything
that may wait for the coordinator, which may be stopped itself, happens in this thread.
"""

import itertools
import json
import math
import sys
import threading
import traceback
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, final

from mirror._src.base import clock
from mirror._src.base.tracebacks import is_users, place
from mirror._src.cluster import store
from mirror._src.cluster.start import heartbeat_secs, processes
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


_POSTS_PER_LIMIT, _LOOKS_PER_LIMIT = 20, 16
_SHORTEST_INTERVAL_SECS, _LONGEST_INTERVAL_SECS = 0.1, 2.0
_MISSED_POSTS, _SHORTEST_SILENCE_SECS = 4, 1.0
_CLOSE_SECS = 2.0
_MOST_THREADS, _MOST_LINES = 3, 8
_ACTS_AFTER_SECS, _CHIEF_STAYS_SECS = 5.0, 1.0

_beats = itertools.count(1)  # all watches of a process post under one key


class Post(NamedTuple):
    """Description of a process, which it has posted itself.

    Attributes:
        beat: Number of the post.
        interval: Seconds until the next post.
        begun: How many launches that span processes it has begun.
        names: Number and step of the last ones.
        oldest: Number of the oldest one that has not ended; 0 without one.
        compiles: The step that it compiles, or "".
        callbacks: The host callbacks that have not returned.
        places: What its threads execute: the user's lines, the main thread first.
        reported: Number of the launch that it has reported; 0 without one.
        is_closed: Whether all of its watches have ended, or its program has.
    """

    beat: int
    interval: float
    begun: int
    names: Sequence[tuple[int, str]]
    oldest: int
    compiles: str
    callbacks: Sequence[str]
    places: Sequence[str]
    reported: int
    is_closed: bool


class _Heard(NamedTuple):
    """The last post of a process, and when it changed, in seconds of `clock.now`."""

    post: Post
    at: float


@final
class Peers:
    """The thread that posts and reads.

    Attributes:
        interval: Seconds between two posts.
    """

    def __init__(self, secs: float) -> None:
        limit = min(secs, heartbeat_secs())
        self.interval = min(
            max(limit / _POSTS_PER_LIMIT, _SHORTEST_INTERVAL_SECS), _LONGEST_INTERVAL_SECS
        )
        self._look_after = limit / _LOOKS_PER_LIMIT
        self._reported, self._is_leaving = 0, False
        self._heard: dict[int, _Heard] = {}
        self._answered = 0.0
        self._overdue: Launch | None = None
        self._wakes, self._is_over = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name=PEERS_THREAD_NAME, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread, unless it waits for the coordinator."""
        self._is_over.set()
        self._wakes.set()
        self._thread.join(_CLOSE_SECS)

    def leave(self) -> None:
        """Says at the exit of the process that no more posts come; JAX closes the store later."""
        self._is_leaving = True
        self.close()

    def look(self, launch: Launch | None, secs: float) -> None:
        """Reads what the others do while a launch is overdue; called again and again."""
        is_overdue = launch is not None and launch.joint_number > 0 and secs > self._look_after
        overdue = launch if is_overdue else None
        if overdue is not self._overdue:
            self._answered = clock.now()
            self._heard = {}
            self._overdue = overdue

    def is_compiling(self) -> bool:
        """Whether another process compiles, for which this one waits."""
        silent = self._silent()  # their last post may be older than the end of a compilation
        return any(x.post.compiles for i, x in tuple(self._heard.items()) if i not in silent)

    def must_report(self) -> bool:
        """Whether JAX may soon end this process, because another one is silent."""
        return self._overdue is not None and any(
            # JAX sends a heartbeat every half of this time, so the end may come after another half.
            # It takes some of it to look at the others, and to find that one is silent.
            secs > heartbeat_secs() / _POSTS_PER_LIMIT * _MISSED_POSTS
            for secs in self._silent().values()
        )

    def end_by_jax(self) -> str:
        """Returns what JAX does about a silent process, or ""."""
        if not self._silent() or not math.isfinite(heartbeat_secs()):
            return ""
        secs = f"{heartbeat_secs():g} s (heartbeat_secs of mirror.distributed.initialize)"
        return f"If a process has ended or is stopped, JAX ends the others after {secs}."

    def lines(self) -> list[str]:
        """Returns what each other process does about the launch that is overdue."""
        launch = self._overdue
        if launch is None:
            return []
        silent, heard = self._silent(), self._heard
        lines, waiting = [], []
        for i in self._others():
            post = heard[i].post if i in heard else None
            if i in silent:
                lines.append(_silence(i, silent[i], post))
            elif post is None:
                if 0 not in silent:  # or else nothing can be read
                    lines.append(f"process {i} has posted nothing: it has not started a watch")
            elif _waits_too(post, launch):
                waiting.append(i)
            else:
                lines.append(_state(i, post, launch, clock.now() - heard[i].at))
        more = len(lines) - _MOST_LINES
        lines = [*lines[:_MOST_LINES], *([f"and {more} more processes"] if more > 0 else [])]
        if waiting:
            verb = "waits" if len(waiting) == 1 else "wait"
            lines.append(f"{processes(waiting)} {verb} in launch {launch.joint_number}, too")
        return lines

    def has_reported(self, launch: Launch) -> None:
        """Posts that this process has reported a launch."""
        self._reported = launch.joint_number
        self._wakes.set()

    def await_reports(self, launch: Launch) -> None:
        """Waits for the others that wait in a launch to report it, before this process ends.

        Otherwise they would report a closed connection, and not the process that is missing.
        """
        deadline = clock.now() + _ACTS_AFTER_SECS
        while clock.now() < deadline and any(
            _waits_too(heard.post, launch) and heard.post.reported < launch.joint_number
            for i, heard in tuple(self._heard.items())
            if i not in self._silent()
        ):
            clock.wait(self._is_over, _SHORTEST_INTERVAL_SECS)
        stays = _CHIEF_STAYS_SECS * store.is_chief()  # all end without it
        clock.wait(self._is_over, self.interval + stays)

    def _others(self) -> list[int]:
        return [i for i in range(store.process_count()) if i != store.process_index()]

    def _silent(self) -> dict[int, float]:
        """Returns for how long each silent process has not been heard of, at least."""
        now = clock.now()
        unanswered = now - self._answered
        limit = max(_MISSED_POSTS * self.interval, _SHORTEST_SILENCE_SECS)
        if self._overdue is not None and unanswered > limit and not store.is_chief():
            return {0: unanswered}
        ages = {i: (heard.post, now - heard.at) for i, heard in tuple(self._heard.items())}
        return {
            i: age
            for i, (post, age) in ages.items()
            if not post.is_closed
            and age > max(_MISSED_POSTS * post.interval, _SHORTEST_SILENCE_SECS)
        }

    def _run(self) -> None:
        try:
            while not self._is_over.is_set():
                self._exchange()
                clock.wait(self._wakes, self.interval)
                self._wakes.clear()
            self._exchange()
        except RuntimeError:  # the coordinator has ended, and JAX ends this process
            pass

    def _exchange(self) -> None:
        me, overdue = store.process_index(), self._overdue
        post = _post(next(_beats), self.interval, self._reported)
        if self._is_leaving:
            post = post._replace(is_closed=True)
        store.set(f"watch/{me}", json.dumps(post))
        if overdue is None:
            return
        texts = store.get_all("watch")
        now, before = clock.now(), self._heard
        heard = {int(i): Post(*json.loads(text)) for i, text in texts.items() if int(i) != me}
        found = {
            i: before[i] if i in before and before[i].post.beat == post.beat else _Heard(post, now)
            for i, post in heard.items()
        }
        if self._overdue is overdue:
            self._heard, self._answered = found, now


def _post(beat: int, interval: float, reported: int) -> Post:
    """Returns what this process does."""
    log, joint = launches.log, tuple(launches.joint)
    unfinished = log.unfinished() if log is not None else []
    return Post(
        beat=beat,
        interval=interval,
        begun=joint[-1].joint_number if joint else 0,
        names=[(launch.joint_number, str(launch.described)) for launch in joint],
        oldest=next((launch.joint_number for launch in unfinished if launch.joint_number), 0),
        compiles=next((str(x.described) for x in unfinished if x.phase == "compiling"), ""),
        callbacks=[f"{x.eqn.primitive.name} at {x.line}" for x in running_callbacks()],
        places=_places(),
        reported=reported,
        is_closed=log is None,
    )


def _places() -> list[str]:
    """Returns the innermost line of the user in the main thread and a few others."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    found = []
    for ident, innermost in sys._current_frames().items():
        frame, name = innermost, names.get(ident, "a thread not started by Python")
        while frame is not None and not is_users(frame.f_code.co_filename):
            frame = frame.f_back  # type: ignore[assignment]
        if frame is None:
            continue
        where = f"{place(frame.f_code.co_filename, frame.f_lineno)} in {frame.f_code.co_name}"
        # Threads of mirror read the data.
        rank = 0 if ident == main else 1 if name.startswith("mirror") else 2
        found.append((rank, where if ident == main else f"{where} ({name})"))
    return [where for _, where in sorted(found)[:_MOST_THREADS]]


def _waits_too(post: Post, launch: Launch) -> bool:
    number = launch.joint_number
    is_same = dict(post.names).get(number, str(launch.described)) == str(launch.described)
    return is_same and post.oldest == number and not post.callbacks and not post.compiles


def _silence(i: int, secs: float, post: Post | None) -> str:
    text = (
        f"process {i} has not been heard of for {in_words(secs)}: it has ended or is stopped, its "
        "machine cannot be reached, or native code holds Python's interpreter lock"
    )
    if i == 0:
        text += "; it is the coordinator, without which nothing is known of other processes"
    if post is None:
        return text
    where = f". It was last at {'; '.join(post.places)}" if post.places else ""
    return f"{text}; {_last(post)}{where}"


def _last(post: Post) -> str:
    names = dict(post.names)
    last = f", the last: {names[post.begun]}" if names else ""
    return f"it has begun {post.begun} launch{'es' * (post.begun != 1)}{last}"


def _state(i: int, post: Post, launch: Launch, secs: float) -> str:
    """Returns a sentence about a process that is heard of and does not wait in the launch."""
    number, name = launch.joint_number, str(launch.described)
    theirs = dict(post.names).get(number, name)
    where = f"It is at {'; '.join(post.places)}" if post.places else "It is not in your code"
    if post.compiles:
        where = f"It compiles {post.compiles}"
    elif post.callbacks:
        where = f"It runs the {'; the '.join(post.callbacks)}. {where}"
    if post.is_closed:
        what, where = f"has ended its watch or program; {_last(post)}", ""
    elif post.begun < number:
        what = f"has begun fewer launches, {post.begun} of {number}"
        what += f", the last: {dict(post.names)[post.begun]}" if post.names else ""
    elif theirs != name:
        what = f"runs another step as launch {number}: {theirs}"
    elif post.oldest and post.oldest <= number:
        what = f"has not ended launch {post.oldest}, either"
    else:
        what = f"has ended launch {number}"
    return f"process {i} {what} ({in_words(secs)} ago). {where}".rstrip(". ")
