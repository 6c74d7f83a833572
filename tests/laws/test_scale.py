"""Scale and cost of several processes: what is counted is what the programs contain."""

import math

import jax
import pytest

from benchmarks import scale, scale_messages, scale_program, spanning
from tests.support import inside


def test_arrays_and_bytes_of_collectives_are_counted():
    text = """
      %a = f32[3,2]{1,0} all-reduce(%x), channel_id=1
      %b = (bf16[5]{0}, /*index=1*/pred[]) all-reduce-start(%y, %z), channel_id=2
      %c = f32[8]{0} add(%p, %q)
    """
    found = scale_program.count_collectives(text)
    assert found == (2, 3, 24 + 10 + 1, ["all-reduce"])


def test_program_reduces_its_gradients_once(subtests):
    """Small gradients are packed; of 1.4 MB, each has an all-reduce, and the loss too."""
    for width, lowered in [(8, 1), (600, 31)]:
        with subtests.test(msg=f"{width}, {lowered}"):
            found = scale_program.examine(width, compiles=True)
            num_bytes = 4 * (scale_program.NUM_MATRICES * width**2 + 1)
            assert found["lowered"]["operations"] == lowered
            for kind in ("lowered", "compiled"):
                assert (found[kind]["num_bytes"], found[kind]["kinds"]) == (
                    num_bytes,
                    ["all-reduce"],
                )
            assert scale_program.strategy_of_processes().num_replicas_in_sync == len(jax.devices())


def test_messages_grow_with_the_processes(subtests):
    """Each process posts one text and reads one decision; process 0 reads all texts at once."""
    for n in [3, 8, 64]:
        with subtests.test(msg=f"{n}"):
            program = scale_messages.agreement_on_program(n)
            # Process 0 also deletes the texts of the last program but one.
            assert (program.total, program.of_first) == (2 * n + 2, 4)
            assert program.texts_of_first == n
            start = scale_messages.comparison_at_start(n, 4)  # versions and settings, then devices
            assert (start.total, start.of_first) == (2 * (2 * n + 1), 2 * 3)
            # To stop, process 0 calls each of them; each posts once more when `fit` ends.
            end = scale_messages.agreed_end(n)
            assert (end.total, end.of_first) == (4 * (n - 1) + n + 7, n + 7)


def test_process_0_waits_for_few_of_many_processes(subtests):
    """Of processes that come in order, each wait halves the number that is missing."""
    for n in [8, 64]:
        for order in ["forward", "backward", "all", "none"]:
            with subtests.test(msg=f"{n}, {order}"), pytest.MonkeyPatch.context() as monkeypatch:
                check_process_0_waits_for_few_of_many_processes(n, order, monkeypatch)


def check_process_0_waits_for_few_of_many_processes(n, order, monkeypatch):
    come, messages = [], []
    ids = range(1, n)
    orders = {"forward": list(ids), "backward": list(ids)[::-1], "all": [*ids], "none": []}
    due = orders[order]
    if order == "all":
        come.extend(due)

    def read(key, deadline, *, stops=True):
        messages.append(key)
        number = int(key.rpartition("/")[2])
        if number in due:
            come.extend(due[: due.index(number) + 1])
        return str(number) if number in come else None

    def read_all(directory):
        messages.append(directory)
        return {"0": "0", **{str(i): str(i) for i in come}, "decision": "not a number"}

    store = inside.messages()
    monkeypatch.setattr(store, "get", read)
    monkeypatch.setattr(store, "get_all", read_all)
    found = store.get_many("d", n, 0.0, {0: "0"})
    assert found == {0: "0", **{i: str(i) for i in due}}
    most = {"all": 1, "none": 3}.get(order, 2 * math.ceil(math.log2(n)))
    assert len(messages) <= most


def test_links_of_a_ring_carry_at_most_twice_the_bytes():
    assert [scale.ring_bytes(120, n) for n in (1, 2, 4)] == [0, 120, 180]
    row = scale.Row("m", 4, 2, {"lowered": {"num_bytes": 80}})
    assert (row.replicas, row.ring_rounds, row.link_bytes) == (8, 14, 140)


@pytest.mark.nightly
def test_layouts_take_turns_and_train_to_the_same_loss():
    """Starts three processes."""
    times, agreements = spanning.measure(["1 x 4", "2 x 2"], rounds=2, steps=2)
    assert {name: len(values) for name, values in times.items()} == {"1 x 4": 2, "2 x 2": 2}
    assert agreements.keys() == {"2 x 2"}
    with pytest.raises(ValueError, match="different losses"):
        spanning._require_same({"1 x 4": 1.0, "2 x 2": 1.1})
