"""The launches of all processes, compared through a store in memory."""

import json
import math

import pytest

import mirror
from mirror._src.cluster import agreement, consensus, failures, ledger, store
from tests.support.messages import assert_message


class Value:
    """A checksum that is ready, or not yet."""

    def __init__(self, text, ready=True):
        self.text, self.ready = text, ready

    def is_ready(self):
        return self.ready

    def value(self):
        return self.text


class Job:
    """The ledgers of some processes in one process."""

    def __init__(self, monkeypatch, count):
        self.texts, self.me = {}, 0
        self.ledgers = [ledger.Ledger() for _ in range(count)]
        monkeypatch.setattr(store, "process_index", lambda: self.me)
        monkeypatch.setattr(store, "process_count", lambda: count)
        monkeypatch.setattr(store, "set", self.texts.__setitem__)
        monkeypatch.setattr(store, "set_default", self.texts.setdefault)
        monkeypatch.setattr(store, "get", lambda key, *_, **__: self.texts.get(key))
        monkeypatch.setattr(store, "get_all", self.get_all)
        monkeypatch.setattr(store, "delete", self.delete)

    def get_all(self, root):
        texts = self.texts.items()
        return {k.removeprefix(f"{root}/"): v for k, v in texts if k.startswith(f"{root}/")}

    def delete(self, root):
        for key in [key for key in self.texts if key.startswith(root)]:
            del self.texts[key]

    def launch(self, process, *programs, **values):
        for program in programs:
            digests = {k: v if isinstance(v, Value) else Value(v) for k, v in values.items()}
            self.ledgers[process].note(program, f"{program} (train.py:1)", digests)

    def exchange(self, *processes):
        """Lets the processes post, and then process 0 compare."""
        found = []
        for self.me in (*processes, 0):
            found.append(self.ledgers[self.me].exchange())
        return next((each for each in found if each is not None), None)


@pytest.fixture
def job(monkeypatch):
    return lambda count=2: Job(monkeypatch, count)


def test_equal_launches_are_equal_however_they_are_posted(job):
    job = job(3)
    for i, parts in enumerate([(7,), (1, 6), (3, 3, 1)]):
        launches = iter("aaabbaa")
        for part in parts:
            for _ in range(part):
                job.launch(i, next(launches), lr="0.1")
            assert job.exchange(i) is None
    assert [each.count for each in job.ledgers] == [7, 7, 7]


def test_what_all_processes_have_compared_is_deleted(job):
    job = job()
    for _ in range(50):
        for i in range(2):
            job.launch(i, "a", "b", lr="0.1")
        assert job.exchange(0, 1) is None
        assert len(job.texts) <= 2
    comparison = job.ledgers[0]._comparison
    assert len(comparison._runs) <= 2
    assert not comparison._values


@pytest.mark.parametrize("late", [0, 1, 2])
def test_another_order_is_found_before_all_have_come(job, late):
    job = job(3)
    first, second = [i for i in range(3) if i != late]
    job.launch(first, "a", "a", "b")
    job.launch(second, "a", "b", "a")
    difference = job.exchange(1, 2)
    assert difference.kind == "program"
    labels = [f"process {first} runs a (train.py:1)", f"process {second} runs b (train.py:1)"]
    assert_message(difference.text, names=labels, values=2, fix=["strategy.is_chief", "one thread"])


@pytest.mark.parametrize("new", [0, 1])
def test_a_step_that_one_process_compiles_again_probably_has_other_shapes(job, new):
    job, label = job(), "step (train.py:1) for the first time, input x: float32[5,3] per replica"
    job.launch(1 - new, "step", "step")
    job.launch(new, "step")
    job.ledgers[new].note("new", label)
    text = job.exchange(0, 1).text
    assert_message(
        text, names=[f"process {new} runs {label}"], values=2, fix=["shapes", 'remainder="pad"']
    )
    assert "is_chief" not in text


def test_values_that_differ_are_named(job, subtests):
    rows = {
        "another value": ({"lr": "1", "w": "2"}, {"lr": "1", "w": "3"}),
        "in process 1 only": ({}, {"w": "3"}),
        "in process 0 only": ({"w": "3"}, {}),
    }
    for name, (mine, theirs) in rows.items():
        with subtests.test(msg=name):
            one = job()
            for i, values in enumerate([mine, theirs]):
                one.launch(i, "a")
                one.launch(i, "a", **values)
            difference = one.exchange(1)
            assert difference.kind == "value"
            assert_message(difference.text, names=["a (train.py:1)", "w", "process 1"], values=2)
            assert "lr" not in difference.text


def test_a_checksum_that_is_not_ready_is_awaited_by_no_thread(job):
    job = job()
    slow = Value("2", ready=False)
    job.launch(0, "a", w="1")
    job.launch(1, "a", w=slow)
    job.launch(1, "a")
    job.launch(0, "a")
    assert job.exchange(1) is None
    assert not job.ledgers[1].is_settled
    slow.ready = True
    assert job.exchange(1).kind == "value"
    assert job.ledgers[1].is_settled


def test_a_change_of_the_program_is_compared_the_first_times_and_then_rarely():
    book, compared = ledger.Ledger(), 0
    for i in range(10_000):
        compared += book.changes_program(f"{i % 2}")
        book.note(f"{i % 2}", "a")
    assert ledger._FREE < compared <= ledger._FREE + 10_000 // ledger._LAUNCHES
    assert not book.changes_program("1"), "the same as before"


def test_a_launch_that_an_ended_process_will_not_make_is_named():
    ended = failures.Event("end", 1, "", 29)
    text = failures.missing_launch(ended, 0, 30, "train_step")
    assert_message(text, names=["Process 1", "train_step"], values=[29, 30], fix="sys.exit")


def stopped_by(job, monkeypatch):
    """Returns the error of this process, once its thread has read how another one has ended."""
    thread = failures.Failures(shutdown_secs=0.0)

    def read(key, *_, **__):
        if key == "end/1":
            thread._is_over.set()
        return job.texts.get(key)

    monkeypatch.setattr(store, "get", read)
    thread._watch()
    return store.stop


@pytest.mark.parametrize("me", [0, 1])
def test_a_canceled_launch_needs_no_other_process(job, monkeypatch, me):
    """Neither here, when the absent process ends first, nor there, when this one does."""
    job, mine, other = job(), ledger.Ledger(), 1 - me
    job.me, job.ledgers[me] = me, mine
    for module in (agreement, failures):
        monkeypatch.setattr(module, "ledger", mine)
    monkeypatch.setattr(store, "stop", None)

    def error():
        job.texts["end/0"] = json.dumps(failures.Event("end", other, "", 1))
        found = stopped_by(job, monkeypatch)
        del job.texts["end/0"]
        return found

    job.launch(me, "train_step")
    program = agreement.Program("evaluate_step", ["program"], lambda: [""])
    with pytest.raises(mirror.ProgramMismatchError, match=f"Process {other} has not reached"):
        agreement.find_difference(program, timeout_secs=0.0)
    assert error() is None, "the handled error is the only one"
    failures.Failures(shutdown_secs=0.0)._await_ends()
    assert json.loads(job.texts["end/0"]) == ["end", me, "", 1], "what the others must join"
    job.launch(me, "train_step")
    assert_message(str(error()), names=[f"Process {other}", "train_step"], fix="sys.exit")


def test_the_first_failure_is_found_behind_the_end_of_another_process(monkeypatch):
    texts = {"end/0": json.dumps(failures.Event("end", 1, "", 3))}
    monkeypatch.setattr(store, "get", lambda key, deadline, stops=True: texts.get(key))
    assert failures.first_failure() is None
    texts["end/1"] = json.dumps(failures.Event("failure", 0, "ValueError: row 3"))
    assert failures.first_failure()[1:3] == (0, "ValueError: row 3")


DIVERGES = "The dataset of train.py:7 yields different batches on process 1 and process 0"


@pytest.mark.parametrize(
    "posted",
    [("end", 1, DIVERGES, 0), ("failure", 1, f"ReplicaDivergenceError: {DIVERGES}", 0)],
    ids=["caught", "uncaught"],
)
def test_data_that_one_process_finds_to_differ_are_an_error_of_all(posted, job, monkeypatch):
    """Whether another process waits for its program, or its thread reads the event."""
    job, mine = job(), ledger.Ledger()
    monkeypatch.setattr(failures, "ledger", mine)
    monkeypatch.setattr(failures, "_ALL_SECS", 0.0)
    monkeypatch.setattr(store, "stop", None)
    monkeypatch.setattr(store, "get_many", lambda *_, **__: {})
    mine.note("new", "step")
    job.texts["end/0"] = json.dumps(failures.Event(*posted))
    job.texts["left/1"] = ""
    with pytest.raises(mirror.ReplicaDivergenceError, match=DIVERGES):
        consensus.Topic("program").decide("", lambda _: "", math.inf)
    error = stopped_by(job, monkeypatch)
    assert isinstance(error, mirror.ReplicaDivergenceError)
    assert DIVERGES in str(error)


def test_the_end_of_a_process_has_the_difference_of_its_data_until_a_launch(job, monkeypatch):
    for launches, wanted in [(0, DIVERGES), (1, "")]:
        own, mine = job(), ledger.Ledger()
        monkeypatch.setattr(failures, "ledger", mine)
        monkeypatch.setattr(store, "stop", None)
        mine.divergence = DIVERGES
        for _ in range(launches):
            mine.note("a", "a")
        failures.Failures(shutdown_secs=0.0)._await_ends()
        assert json.loads(own.texts["end/0"]) == ["end", 0, wanted, launches]
