"""Random replica programs, compared with a reference without JAX; see `tests/fuzz`.

`MIRROR_FUZZ_SECS=600 pytest tests/laws/test_fuzz.py -k "not planted"` searches for ten minutes.
"""

import os
import random
from collections import Counter

import pytest

from tests.fuzz import rows
from tests.fuzz.faults import SEARCHED, plant
from tests.fuzz.generate import PROFILES, generate
from tests.fuzz.laws import (
    Broken,
    Failure,
    Tally,
    cpu_strategies,
    proof_law,
    run_law,
    search,
    shrunk,
)
from tests.fuzz.program import statements

SECS = float(os.environ.get("MIRROR_FUZZ_SECS", "15"))
MOST_FOR_A_FAULT = 400
FOUND_FIRST = "a Ref that is written"


@pytest.fixture(scope="module")
def strategies():
    return cpu_strategies()


def test_a_sample_of_programs_matches_its_marks(strategies):
    law = lambda program, tally: proof_law(strategies["pmap"], program, tally)  # noqa: E731
    tally = search(law, "general", 0, 20)
    assert (tally.programs, tally.mirrored > 0, tally.per_replica > 0) == (20, True, True)


@pytest.mark.nightly
def test_accepted_programs_match_their_marks_and_cannot_hang(strategies):
    tally = search(
        lambda program, tally: proof_law(strategies["pmap"], program, tally),
        "general",
        0.5 * SECS,
        60,
    )
    assert tally.acceptance > 0.6
    assert tally.mirrored > tally.programs
    assert tally.per_replica > tally.programs
    assert tally.equal_by_chance < tally.per_replica / 2, "the proof knows too little"
    assert tally.accepted < tally.programs, "nothing was refused"


@pytest.mark.parametrize(
    ("profile", "share", "at_least"), [("small", 0.3, 4), ("collective", 0.1, 3)]
)
@pytest.mark.nightly
def test_executors_match_the_reference(profile, share, at_least, strategies):
    law = lambda program, tally: run_law(strategies, program, tally)  # noqa: E731
    tally = search(law, profile, share * SECS, at_least)
    assert tally.runs >= 2 * tally.accepted
    assert len(tally.not_implemented) < tally.runs / 2, tally.not_implemented


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.nightly] * (name != FOUND_FIRST)) for name in SEARCHED],
)
def test_fuzzer_finds_planted_faults(name, strategies, monkeypatch):
    wanted = SEARCHED[name].search
    plant(SEARCHED[name], monkeypatch)
    executor = wanted.executor or "pmap"

    def law(program, tally):
        if wanted.executor:
            return run_law({executor: strategies[executor]}, program, tally)
        return proof_law(strategies[executor], program, tally)

    with pytest.raises(Broken) as caught:
        search(law, wanted.profile, 0, MOST_FOR_A_FAULT, shrinks=False)
    seed = caught.value.seed
    assert caught.value.failure.law.startswith(wanted.law), caught.value
    print(f"{name}: found by program {seed}")
    assert f"python -m tests.fuzz {wanted.profile} {seed}" in str(caught.value)
    assert caught.value.program == generate(wanted.profile, seed)


@pytest.mark.nightly
def test_shrinking_keeps_the_violation():
    def law(program, tally):
        found = {statement.op for statement in statements(program.block)}
        return Failure("has a psum in a loop", "") if {"psum", "scan"} <= found else None

    seed = next(s for s in range(100) if law(generate("general", s), Tally()))
    program = generate("general", seed)
    small = shrunk(law, program, "has a psum in a loop")
    assert len(list(statements(small.block))) < len(list(statements(program.block))) / 2
    assert law(small, Tally())


def test_generated_programs_are_reproducible(subtests):
    for profile in PROFILES:
        with subtests.test(msg=f"{profile}"):
            from tests.fuzz import program as names

            program = generate(profile, 7)
            assert program == generate(profile, 7) != generate(profile, 8)
            assert eval(repr(program), vars(names)) == program


@pytest.mark.filterwarnings("ignore")
def test_padding_does_not_change_what_excludes_it():
    """Two of the seeds were found to give NaN: zero times infinity."""
    tally = Counter()
    picking = range(rows.FIRST_PICKING, rows.FIRST_PICKING + 20)
    for seed in (4610, 9553, *range(40), *picking):
        rows.check(seed, tally)
        rows.check_gradient(seed, tally)
    assert tally["excluded, equal"] > tally["padded, equal"] > 0
    assert tally["empty, claimed, NaN"] > 0


@pytest.mark.filterwarnings("ignore")
@pytest.mark.nightly
def test_padding_does_not_change_what_excludes_it_in_new_programs():
    tally, first = Counter(), random.randrange(10**9)
    for seed in range(first, first + 500):
        rows.check(seed, tally)
        rows.check_gradient(seed, tally)
    assert tally["excluded, equal"] > tally["padded, equal"]
