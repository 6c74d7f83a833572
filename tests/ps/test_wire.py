"""Messages travel as plain tuples, and what a worker knows is not sent again."""

import asyncio
import enum
from concurrent.futures import Future

import jax
import numpy as np
import pytest

from mirror._src.ps.engine import RayEngine, dumps, loads
from mirror._src.ps.messages import (
    Assignment,
    Committed,
    Export,
    NotExportedError,
    Pulled,
    Push,
    Rejected,
    Result,
    StepWork,
    plain,
    received,
    request,
    typed,
)

VALUE = np.arange(3.0)
MESSAGES = [
    Pulled(3, (VALUE,), (), {}),
    Push(0, 1, 2, 3, 4.0, (VALUE,)),
    Result((1, 2)),
    Result({"a": ("Result", 1, 2.0)}),
    Rejected("late"),
    7,
]
ASSIGNMENT = Assignment(4, 0, 1, 0, Committed(3, 3, (0, 1)), 4)


def test_messages_arrive_as_they_were(subtests):
    for message in MESSAGES:
        with subtests.test(message=message):
            sent = plain(message)
            arrived = typed(sent)
            assert type(arrived) is type(message)
            assert repr(arrived) == repr(message)
            assert type(sent) in (tuple, type(message))


def test_messages_of_every_update_are_plain():
    for message in MESSAGES[:4]:
        assert type(plain(message)) is tuple


def test_references_are_sent_once(subtests):
    for work in [
        Export(1, ["fn"]),
        StepWork(Export(1, ["fn"]), Export(2, ["model"]), 7, None),
        StepWork(Export(1, ["fn"]), Export(2, ["model"]), 7, Export(3, ["w"])),
    ]:
        with subtests.test(work=work):
            header, references = request(ASSIGNMENT, work, ())
            assert received(header, references) == (ASSIGNMENT, work)
            header, again = request(ASSIGNMENT, work, references)
            assert again == {}
            assignment, bare = received(header, again)
            assert assignment == ASSIGNMENT
            exports = (
                [bare] if isinstance(bare, Export) else [e for e in bare if isinstance(e, Export)]
            )
            assert [export.key for export in exports] == sorted(references)
            assert all(export.reference is None for export in exports)


@pytest.mark.dev("ray")
def test_arguments_arrive_as_they_were_scheduled(monkeypatch, subtests):
    monkeypatch.setenv("RAY_CLIENT_MODE", "0")  # which Ray sets when it is imported

    class Color(enum.IntEnum):  # pickled by value
        RED = 1

    class Samples(np.ndarray):
        pass

    large, small = np.zeros(100_000), np.zeros(3)
    given = [
        {"x": large, "y": small},
        [(small, Color.RED), {Color.RED: 2}, None, np.float32(0)],
        (small.view(Samples), np.array([Color.RED], object)),
        {"f": lambda x: x + 1, "x": large},
    ]
    sent = [dumps(each) for each in given]
    large[:], small[:] = 7, 7  # a loader fills them again
    arrived = list(map(loads, sent))
    for each, before in zip(arrived, given, strict=True):
        with subtests.test(before=before):
            assert jax.tree.structure(each) == jax.tree.structure(before)
            arrays = [x for x in jax.tree.leaves(each) if isinstance(x, np.ndarray)]
            assert not any(x.any() for x in arrays if x.dtype.kind == "f")
    assert arrived[1][0][1] == Color.RED
    assert arrived[3]["f"](1) == 2


class ForgetfulWorker:
    """The handle of an actor that has none of the exports whose references it does not receive."""

    def __init__(self):
        self.run = self
        self.calls = []

    def remote(self, call):
        method, _, references, data = call
        self.calls.append((method, sorted(references)))
        reply = Future()
        reply.set_result(plain(Result(data)) if references else NotExportedError())
        reply.future = lambda: reply
        return reply


@pytest.mark.dev("ray")
def test_engine_sends_references_again_to_a_worker_that_has_forgotten_them():
    engine, worker = object.__new__(RayEngine), ForgetfulWorker()
    engine._workers, engine._known = [worker], [set()]
    engine._require_open = lambda: None  # Ray does not run
    for _ in range(2):
        call = engine.call_worker(0, "run_function", ASSIGNMENT, Export(1, ["fn"]), ["x"])
        assert asyncio.run(call) == Result("x")
    assert worker.calls == [("run_function", keys) for keys in ([1], [], [1])]
