"""Scale and cost of several processes: what is counted is what the programs contain."""

import jax
import pytest

from benchmarks import scale, scale_messages, scale_program, spanning


def test_arrays_and_bytes_of_collectives_are_counted():
    text = """
      %a = f32[3,2]{1,0} all-reduce(%x), channel_id=1
      %b = (bf16[5]{0}, /*index=1*/pred[]) all-reduce-start(%y, %z), channel_id=2
      %c = f32[8]{0} add(%p, %q)
    """
    found = scale_program.count_collectives(text)
    assert found == (2, 3, 24 + 10 + 1, ["all-reduce"])


@pytest.mark.parametrize(("width", "lowered"), [(8, 1), (600, 31)])
def test_program_reduces_its_gradients_once(width, lowered):
    """Small gradients are packed; of 1.4 MB, each has an all-reduce, and the loss too."""
    found = scale_program.examine(width, compiles=True)
    num_bytes = 4 * (scale_program.NUM_MATRICES * width**2 + 1)
    assert found["lowered"]["operations"] == lowered
    for kind in ("lowered", "compiled"):
        assert (found[kind]["num_bytes"], found[kind]["kinds"]) == (num_bytes, ["all-reduce"])
    assert scale_program.strategy_of_processes().num_replicas_in_sync == len(jax.devices())


@pytest.mark.parametrize("n", [2, 8, 64])
def test_messages_of_an_agreement_grow_with_the_processes(n):
    """Each posts and reads one text; process 0 reads one of each, posts one and deletes one."""
    found = scale_messages.agreement_on_program(n)
    assert (found.total, found.of_first) == (3 * n + 1, n + 3)


def test_messages_at_the_start_are_those_of_pairs():
    """Twice, each process posts a text and reads all."""
    assert scale_messages.comparison_at_start(8, 4).total == 2 * (8 + 8 * 8)


def test_links_of_a_ring_carry_at_most_twice_the_bytes():
    assert [scale.ring_bytes(120, n) for n in (1, 2, 4)] == [0, 120, 180]
    row = scale.Row("m", 4, 2, {"lowered": {"num_bytes": 80}})
    assert (row.replicas, row.ring_rounds, row.link_bytes) == (8, 14, 140)


@pytest.mark.long
def test_layouts_take_turns_and_train_to_the_same_loss():
    """Starts three processes."""
    times, agreements = spanning.measure(["1 x 4", "2 x 2"], rounds=2, steps=2)
    assert {name: len(values) for name, values in times.items()} == {"1 x 4": 2, "2 x 2": 2}
    assert agreements.keys() == {"2 x 2"}
    with pytest.raises(ValueError, match="different losses"):
        spanning._require_same({"1 x 4": 1.0, "2 x 2": 1.1})
