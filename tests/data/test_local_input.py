"""Local input: the agreement on each step, with a store in memory and in several processes."""

import contextlib
import functools
import itertools
import threading
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import jax
import numpy as np
import pytest

import mirror
from tests.support import inside, processes
from tests.support.messages import assert_message, raises
from tests.support.waiting import wait_until

local_input, step_exchange, batches_of_hosts = inside.local_input()
failures, store = inside.failures(), inside.messages()
consensus = inside.consensus_of_processes()
Form, Part, StepExchange = step_exchange.Form, step_exchange.Part, step_exchange.StepExchange
Plan, host_batches = local_input.Plan, batches_of_hosts.host_batches

FORM = Form("remainder='pad'", "{'x': *}", (("batch['x']", "float32", (3,)),))


class MemoryStore:
    """The store of a job whose processes are threads of this process.

    Its time is not that of a clock: it passes when every process waits for a key, up to the next
    deadline.

    Attributes:
        texts: The texts by key.
        calls: Number of messages that were written, or read with waiting.
        now: The time.
    """

    def __init__(self, count):
        self.texts: dict[str, str] = {}
        self.calls, self.now = 0, 0.0
        self._count, self._me = count, threading.local()
        self._changed = threading.Condition()
        self._processes: set[int] = set()
        self._waiting: dict[int, tuple[str, float]] = {}  # key and deadline by thread

    def patched(self):
        """Context manager in which `store` is this one, and time is its time."""
        names = ("set_default", "set", "get_all", "get", "delete")
        patches = contextlib.ExitStack()
        patches.enter_context(
            mock.patch.multiple(
                store,
                process_index=lambda: getattr(self._me, "index", 0),
                process_count=lambda: self._count,
                **{name: getattr(self, name) for name in names},
            )
        )
        clock = SimpleNamespace(monotonic=lambda: self.now)
        for module in (step_exchange, failures, consensus):
            patches.enter_context(mock.patch.object(module, "time", clock))
        return patches

    def set_default(self, key, text):
        self._put(key, self.texts.get(key, text))

    def set(self, key, text):
        self._put(key, text)

    def get_all(self, directory):
        with self._changed:
            start = f"{directory}/"
            found = {k: v for k, v in self.texts.items() if k.startswith(start)}
            return {key.rpartition("/")[2]: text for key, text in found.items()}

    def get(self, key, deadline, *, stops=True):
        me = threading.get_ident()
        with self._changed:
            self.calls += 1
            if key not in self.texts and self.now < deadline:
                self._waiting[me] = (key, deadline)
                self._pass_time_if_all_wait()
                self._changed.wait_for(lambda: me not in self._waiting)
            return self.texts.get(key)

    def delete(self, key):
        with self._changed:
            for name in [k for k in self.texts if k == key or k.startswith(key.rstrip("/") + "/")]:
                del self.texts[name]

    def is_waited_for(self, key):
        """Whether a process waits for a key."""
        with self._changed:
            return key in [waiting for waiting, _ in self._waiting.values()]

    def pass_time(self, to):
        """Ends the waits whose deadline has then passed."""
        with self._changed:
            self.now = max(self.now, to)
            self._wake(lambda _, deadline: deadline <= self.now)

    def run(self, *programs: Callable[[], Any]) -> list[Any]:
        """Runs a function in each process; returns their results and errors."""
        results: list[Any] = [None] * self._count
        begin = threading.Barrier(self._count)

        def process(i):
            self._me.index = i
            self._processes.add(threading.get_ident())
            begin.wait()
            try:
                results[i] = programs[i]()
            except Exception as error:
                results[i] = error
            finally:
                with self._changed:
                    self._processes.remove(threading.get_ident())
                    self._pass_time_if_all_wait()

        threads = [threading.Thread(target=process, args=(i,)) for i in range(self._count)]
        with self.patched():
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(900)
        assert not any(thread.is_alive() for thread in threads), "a process hangs"
        return results

    def _put(self, key, text):
        with self._changed:
            self.calls += 1
            self.texts[key] = text
            self._wake(lambda waiting, _: waiting == key)

    def _pass_time_if_all_wait(self):
        if self._waiting and self._processes <= self._waiting.keys():
            self.pass_time(min(deadline for _, deadline in self._waiting.values()))

    def _wake(self, ends):
        self._waiting = {thread: wait for thread, wait in self._waiting.items() if not ends(*wait)}
        self._changed.notify_all()


@pytest.fixture(autouse=True)
def no_passes_of_other_tests():
    consensus._closed.clear()


def reading(*sizes, form=FORM, error=None, root="local/train.py:7/0/0"):
    """Returns a process that reads parts of these sizes, and returns the steps."""

    def program():
        exchange, steps = StepExchange(root, "the dataset of train.py:7"), []
        try:
            for size in sizes:
                steps.append(exchange.agree(size, form))
            if error is not None:
                exchange.fail(error)
                raise error
            while (step := exchange.end()) is not None:
                steps.append(step)
            return steps
        finally:
            exchange.close()

    return program


def test_processes_agree_on_each_step_until_the_last_one_has_ended():
    memory = MemoryStore(3)
    first, *others = memory.run(reading(4, 4), reading(4), reading(2, 0, 7))
    sizes = [(step.total, max(step.counts), min(step.counts)) for step in first]
    assert [(step.number, *of, step.has_ended) for step, of in zip(first, sizes, strict=True)] == [
        (0, 10, 4, 2, False),
        (1, 4, 4, 0, True),
        (2, 7, 7, 0, True),
    ]
    assert others == [first, first]
    assert first[1].sizes == "4 on process 0, none left on process 1, 0 on process 2"


def test_the_shapes_of_other_processes_are_read_if_the_data_have_ended():
    found = []

    def ended():
        exchange = StepExchange("local/train.py:7/0/0", "the dataset of train.py:7")
        exchange.agree(4, FORM)
        step = exchange.end()
        found.append(exchange.form(step.form))
        assert exchange.end() is None
        with raises(RuntimeError, names=["Process 1", "train.py:7"]):
            exchange.form("of no process")  # it waits, for which the other process must not
        exchange.close()

    longer = FORM._replace(leaves=(("batch['x']", "float32", (9,)),))

    def longer_examples():
        exchange = StepExchange("local/train.py:7/0/0", "the dataset of train.py:7")
        exchange.agree(4, FORM)
        exchange.agree(4, longer)
        assert exchange.end() is None
        exchange.close()

    assert MemoryStore(2).run(longer_examples, ended) == [None, None]
    assert found == [longer]


def test_sizes_of_many_processes_are_short():
    parts = [Part(i) for i in range(10)]
    assert step_exchange._shown(parts).endswith("7 on process 7 and 2 more")


def test_the_store_does_not_grow():
    """Within a pass, the keys of one or two steps are there; the next pass deletes all of them."""
    memory, most = MemoryStore(2), 0

    def slow():
        nonlocal most
        exchange = StepExchange("local/a/0/0", "the dataset")
        for _ in range(30):
            exchange.agree(1, FORM)
            most = max(most, len(memory.texts))
        exchange.end()
        exchange.close()

    memory.run(slow, reading(*[1] * 30, root="local/a/0/0"))
    assert most <= 8, most
    memory.run(reading(1, root="local/a/0/1"), reading(1, root="local/a/0/1"))
    assert not [key for key in memory.texts if key.startswith("local/a/0/0/")], memory.texts


def test_the_number_of_messages_per_step_grows_with_the_processes(subtests):
    for count in [2, 8]:
        with subtests.test(count=count):
            steps, memory = 50, MemoryStore(count)
            memory.run(*[reading(*[1] * steps, root=f"local/{count}/0/0")] * count)
            # A part and a decision, each written and read.
            assert memory.calls <= 4 * count * (steps + 4), memory.calls


def test_an_error_of_one_process_is_raised_by_all(subtests):
    for who in [0, 1, 2]:
        with subtests.test(who=who):
            programs = [
                reading(4, 4, error=OSError("disk\ngone") if i == who else None) for i in range(3)
            ]
            found = MemoryStore(3).run(*programs)
            for i, error in enumerate(found):
                if i == who:
                    assert isinstance(error, OSError)
                    continue
                assert isinstance(error, RuntimeError), error
                names = [f"Process {who}", "batch 2", "train.py:7", "OSError: disk"]
                assert_message(str(error), names=names)


@pytest.mark.parametrize("kind", ["failure", "program", "value", "stop"])
def test_an_error_in_another_place_ends_the_wait_at_once(kind, monkeypatch):
    expected = failures.error_of(failures.Event(kind, 1, "KeyError: 'label'"))
    monkeypatch.setattr(store, "stop", expected)
    memory = MemoryStore(2)
    error, _ = memory.run(reading(4), lambda: None)
    assert type(error) is type(expected)
    assert str(error) == str(expected)
    assert memory.now < 10  # of the 300 s for a process that does not come


def test_a_process_that_does_not_come_is_named(subtests):
    for who in [0, 1, 2]:
        with subtests.test(who=who):
            programs = [(lambda: None) if i == who else reading(4) for i in range(3)]
            for i, error in enumerate(MemoryStore(3).run(*programs)):
                if i != who:
                    assert isinstance(error, RuntimeError), error
                    assert_message(
                        str(error), names=[f"Process {who}", "batch 0"], fix="agreement_secs"
                    )


def test_a_process_that_stops_earlier_is_named_at_once(subtests):
    for who in [0, 1]:
        with subtests.test(who=who):

            def stops():
                exchange = StepExchange("local/train.py:7/0/0", "the dataset of train.py:7")
                exchange.agree(4, FORM)
                exchange.close()

            programs = [stops if i == who else reading(4, 4) for i in range(2)]
            memory = MemoryStore(2)
            error = memory.run(*programs)[1 - who]
            assert isinstance(error, RuntimeError), error
            assert_message(str(error), names=[f"Process {who}", f"process {1 - who}", "batch 1"])
            assert memory.now < 10  # of the 300 s for a process that does not come


FORMS = {
    "leaf": (FORM._replace(leaves=(("batch['y']", "float32", (3,)),)), ["batch['x']", "missing"]),
    "dtype": (FORM._replace(leaves=(("batch['x']", "int32", (3,)),)), ["int32[3]", "float32[3]"]),
    "shape": (FORM._replace(leaves=(("batch['x']", "float32", ()),)), ["float32[]", "float32[3]"]),
    "structure": (FORM._replace(structure="[*]"), ["[*]", "{'x': *}"]),
    "options": (FORM._replace(settings="remainder='drop'"), ["'drop'", "'pad'"]),
}


def test_parts_that_do_not_belong_together_are_named_by_all(subtests):
    for name, (form, names) in FORMS.items():
        with subtests.test(msg=name):
            errors = MemoryStore(3).run(reading(4), reading(4), reading(4, form=form))
            for error in errors:
                assert isinstance(error, ValueError), error
                assert_message(str(error), names=["process 0", "process 2", "batch 0", *names])


def test_a_process_without_any_part_is_named_by_all():
    for error in MemoryStore(2).run(reading(4), reading()):
        assert isinstance(error, ValueError), error
        assert_message(str(error), names=["Process 1", "np.zeros((0, 3), 'float32')"])
    assert MemoryStore(2).run(reading(), reading()) == [[], []]


def test_a_closed_loop_ends_the_wait():
    """As the loop does that ends: the prefetch thread does not wait for the others."""
    memory, found = MemoryStore(2), []

    def waits():
        exchange = StepExchange("local/a/0/0", "the dataset")

        def read():
            with contextlib.suppress(step_exchange.ClosedError):
                exchange.agree(4, FORM)
                found.append("agreed")
            found.append("ended")

        thread = threading.Thread(target=read)
        thread.start()
        wait_until(lambda: memory.is_waited_for("local/a/0/0/0/1"))
        exchange.cancel()
        memory.pass_time(1.0)  # a wait in the store ends only then
        thread.join(30)
        exchange.close()

    memory.run(waits, lambda: None)
    assert found == ["ended"]


def test_nothing_uses_the_store_after_the_end_of_the_process(monkeypatch):
    memory = MemoryStore(2)

    def program():
        exchange = StepExchange("local/a/0/0", "the dataset")
        step_exchange._end_all()
        before = memory.calls
        with pytest.raises(step_exchange.ClosedError):
            exchange.agree(4, FORM)
        exchange.close()
        assert memory.calls == before
        return "done"

    monkeypatch.setattr(step_exchange, "_has_exited", threading.Event())
    assert memory.run(program, lambda: None)[0] == "done"


# ---- parts


def parts(batches, plan, others):
    """Returns what a process reads while another process reads parts of the sizes `others`."""

    def mine():
        exchange = StepExchange("local/train.py:7/0/0", "the dataset of train.py:7")
        reading = local_input._LocalPass(iter(batches), 2, exchange, "", is_first=True, devices=())
        return list(reading.steps(host_batches(reading.batches, ""), plan))

    def other():
        exchange = StepExchange("local/train.py:7/0/0", "the dataset of train.py:7")
        form = local_input._LocalPass(iter(()), 2, exchange, "", is_first=False, devices=())._form
        (batch,) = host_batches(iter(batches[:1]), "")
        try:
            for size in others:
                exchange.agree(size, form(batch, plan))
            while exchange.end() is not None:
                pass
        finally:
            exchange.close()

    found = MemoryStore(2).run(mine, other)
    if isinstance(found[0], Exception):
        raise found[0]
    return found[0]


def test_padding_is_the_last_example_of_the_process():
    batches = [np.ones((3, 2)), np.zeros((0, 2)), np.full((1, 2), 7.0)]
    found = parts(batches, Plan("pad"), [3, 3, 3, 3])
    padded = [part.padded(part.full).leaves[0] for part in found]
    assert [p[-1].tolist() for p in padded] == [[1, 1], [1, 1], [7, 7], [7, 7]]
    assert [part.mask(part.full).sum() for part in found] == [3, 0, 1, 0]
    assert [part.num_examples for part in found] == [6, 3, 4, 3]


def test_padding_is_zero_before_the_first_example():
    (first, _) = parts([np.zeros((0, 2)), np.ones((4, 2))], Plan("pad"), [4, 4])
    assert (first.padded(first.full).leaves[0] == np.zeros((4, 2))).all()


GROWTH = {
    "the last one is smaller": ([8, 3], [8, 8], 1, [8, 8]),
    "the other process has more": ([2, 2], [8, 8], 1, [8, 8]),
    "a later part is larger": ([2, 2, 2, 2], [2, 3, 9, 1], 1, [2, 4, 16, 16]),
    "a multiple": ([2, 2], [5, 9], 3, [6, 12]),
}


def test_few_padded_sizes(subtests):
    for name, (mine, others, multiple, full) in GROWTH.items():
        with subtests.test(msg=name):
            batches = [np.ones((size, 2)) for size in mine]
            found = parts(batches, Plan("pad", multiple=multiple), others)
            assert [part.full for part in found] == full


def test_skipped_examples_are_those_of_all_processes():
    batches = [np.full((3, 1), i) for i in range(4)]
    plan = Plan("pad", skip=14, skips_empty=True)
    found = parts(batches, plan, [4, 4, 4, 4])
    assert [part.batch.leaves[0][0, 0] for part in found] == [2, 3]
    assert [part.full for part in found] == [4, 4]
    with raises(ValueError, names=["batch 1", "6", "7"]):
        parts(batches, plan._replace(skip=13), [4, 4, 4, 4])
    with raises(ValueError, names=["99", "28"]):
        parts(batches, plan._replace(skip=99), [4, 4, 4, 4])


def test_steps_without_examples_are_skipped_by_a_training_loop():
    batches = [np.zeros((0, 2)), np.ones((2, 2)), np.zeros((0, 2))]
    assert len(parts(batches, Plan("pad", skips_empty=True), [0, 2, 0])) == 1
    assert len(parts(batches, Plan("pad"), [0, 2, 0])) == 3


def test_what_is_left_when_another_process_has_ended_is_not_counted(subtests):
    own = "Dropped the last 1 batches: each step consumes 2, one per replica. Yield a multiple of 2"
    others = "(for it, none left on process 0, 2 on process 1). Yield the same number of batches on"
    cases = {
        "process 0 has none": (4, 10, [others]),
        "process 0 has too few": (5, 10, [others, own]),
        "both have too few": (5, 5, [own, own]),
        "equal": (4, 4, []),
    }

    def reads(count):
        exchange = StepExchange("local/train.py:7/0/0", "the dataset of train.py:7")
        reading = local_input._LocalPass(
            iter(range(count)), 2, exchange, "", is_first=False, devices=()
        )
        return len(list(reading.groups(2, lambda group: group, lambda _: FORM)))

    for name, (first, second, wanted) in cases.items():
        with subtests.test(msg=name), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            programs = functools.partial(reads, first), functools.partial(reads, second)
            assert MemoryStore(2).run(*programs) == [2, 2]
            texts = sorted(str(warning.message) for warning in caught)
            assert len(texts) == len(wanted), texts
            assert all(part in text for part, text in zip(wanted, texts, strict=True)), texts


def test_random_keys_cannot_be_parts():
    with raises(TypeError, names=["batch", "PRNG keys"]):
        parts([jax.random.split(jax.random.key(0), 4)], Plan("pad"), [4])


# ---- one process


def test_in_one_process_local_input_is_global_input(two):
    data = mirror.data.from_arrays(np.arange(10.0), 4, shard=(0, 1))
    (globally, locally) = (
        [np.asarray(batch) for batch, _ in two.distribute_dataset(data, **options, remainder="pad")]
        for options in ({}, {"input": "local"})
    )
    assert [b.tolist() for b in globally] == [b.tolist() for b in locally]
    dataset = two.distribute_dataset(data, input="local", remainder="pad")
    assert dataset.element_spec[0].shape == (2, 2)


def test_unknown_inputs_are_rejected(two):
    with raises(ValueError, names=["input", "'shared'"], fix="'local'"):
        two.distribute_dataset([np.ones(4)], input="shared")


# ---- shards


def test_shards_are_the_global_batches_in_order(subtests):
    for count, batch_size, drop_remainder in itertools.product([1, 2, 3, 4], [3, 8], [False, True]):
        with subtests.test(count=count, batch_size=batch_size, drop_remainder=drop_remainder):
            arrays = {"x": np.arange(38.0).reshape(19, 2), "y": np.arange(19)}
            options = {"shuffle": True, "seed": 5, "drop_remainder": drop_remainder}
            whole = mirror.data.from_arrays(arrays, batch_size, **options)
            shards = [
                mirror.data.from_arrays(arrays, batch_size, shard=(i, count), **options)
                for i in range(count)
            ]
            assert {len(shard) for shard in shards} == {len(whole)}
            for _ in range(2):
                for batch, *own in zip(whole, *shards, strict=True):
                    sizes = [len(part["y"]) for part in own]
                    assert max(sizes) - min(sizes) <= 1
                    for name, array in batch.items():
                        joined = np.concatenate([part[name] for part in own])
                        assert joined.tolist() == array.tolist()
            for data in (whole, *shards):
                data.set_epoch(7)
            own = [shard.peek()[0]["y"] for shard in shards]
            assert np.concatenate(own).tolist() == whole.peek()[0]["y"].tolist()
            assert f"part {count - 1} of {count}" in repr(shards[-1])


BAD_SHARDS = [
    (3, TypeError, "(index, count)"),
    ((0, 1, 2), TypeError, "(index, count)"),
    ((2, 2), ValueError, "index < count"),
    ((-1, 2), ValueError, "a non-negative integer"),
    ((0, 0), ValueError, "a positive integer"),
    ((0.0, 2), TypeError, "a non-negative integer"),
]


def test_wrong_shards_are_rejected(subtests):
    for shard, error, fix in BAD_SHARDS:
        with subtests.test(shard=shard), raises(error, names=["shard"], fix=fix):
            mirror.data.from_arrays(np.arange(8.0), 4, shard=shard)


# ---- several processes

NUM_CHECKS = 26
ON_FOUR = (
    "parts_of_unequal_sizes_are_used_once",
    "growing_parts_have_few_shapes",
    "a_source_that_raises_is_named_by_all",
    "different_structures_are_errors_on_all",
    "a_loop_that_ends_earlier_is_named",
    "datasets_from_functions",
    "training_on_shards_equals_training_on_whole_batches",
    "training_on_unequal_parts_equals_training_on_their_union",
    "no_keys_are_left",
)


def checked(*names, count=2, devices=2):
    """Returns what the processes print; they have passed these checks of the program."""
    ended = processes.run_program(
        "several_local_input", *names, processes=count, devices=devices, after_failure=15
    )
    return processes.outputs_of(ended)


@pytest.mark.slow
def test_two_processes_with_two_devices():
    for output in checked():
        assert output.count("passed ") == NUM_CHECKS, output


@pytest.mark.nightly
def test_four_processes_with_one_device():
    for output in checked(*ON_FOUR, count=4, devices=1):
        assert output.count("passed ") == len(ON_FOUR), output


@pytest.mark.nightly
@pytest.mark.dev("torch")
def test_samplers_of_torch():
    """`DistributedSampler`, with the processes as its replicas."""
    assert all("passed torch_sampler" in output for output in checked("torch"))


FAILS = """
import os, signal, sys, numpy as np, mirror
mirror.distributed.initialize(heartbeat_secs=4, shutdown_secs=5)
strategy = mirror.MultiWorkerMirroredStrategy()
me = mirror.distributed.process_index()
who, how = int(sys.argv[1]), sys.argv[2]
def endless():
    i = 0
    while True:
        if i == 30 and me == who and how == "is killed":
            os.kill(os.getpid(), signal.SIGKILL)
        yield np.full(4, me)
        i += 1
for i, batch in enumerate(strategy.distribute_dataset(endless(), input="local")):
    if i == 30 and me == who and how == "raises":
        raise KeyError("in the loop")
"""


@pytest.mark.slow
@pytest.mark.parametrize("who", [pytest.param(0, marks=pytest.mark.nightly), 1])
@pytest.mark.parametrize("how", ["raises", pytest.param("is killed", marks=pytest.mark.nightly)])
def test_processes_do_not_wait_for_one_that_has_ended(who, how):
    """JAX itself ends the others of a process that was killed, with a message that names it."""
    ended = processes.run(["-c", FAILS, str(who), how], devices=1, timeout=900)
    other = ended[1 - who]
    assert other.status not in (0, None), other
    if how == "raises":
        message = other.output[other.output.index("RuntimeError") :]
        assert_message(message, names=[f"Process {who} has failed", "KeyError", "in the loop"])
    elif who == 1:
        assert "unhealthy" in other.output
