"""Random training programs equal plain JAX on one device, or are refused; see `tests/fuzz`.

`python -m tests.fuzz.training SEED` shows one program, `python -m tests.fuzz.training SEED SECS`
searches.
"""

import time

import pytest

from tests.fuzz.training import Case, batches, broken, generate, search, trainer_of

SECS = 600.0

# Programs of each class of faults that random programs have found, or should have.
CHOSEN = {
    "unequal weights and an all-reduce": Case(4, 2, loss="weighted", mix="mean", norm=True),
    "weights with a gradient, in pieces": Case(
        1, 2, "vmap", (8, 6), "parameters", pieces=2, at_once=2, keyed=True, dtypes=("bool",)
    ),
    "padding in batch statistics": Case(2, 4, sizes=(10, 10), norm=True),
    "padding that is excluded": Case(3, 4, "pairs", (10, 7), mix="masked gather"),
    "integers": Case(
        8, 2, sizes=(8, 5), loss="integers", at_once=2, dtypes=("int32", "uint32", "int8", "int16")
    ),
}
ALSO_CHOSEN = {
    "padding that is not needed": Case(8, 2, sizes=(8, 6), norm=True, at_once=3),
    "padding in gathered rows": Case(4, 4, sizes=(10,), mix="gather"),
    "pieces of rows": Case(5, 1, mix="own", pieces=2),
}


def test_chosen_training_programs_equal_one_device(subtests):
    for name, case in CHOSEN.items():
        with subtests.test(msg=name):
            assert not broken(case), case


@pytest.mark.slow
def test_random_training_programs_equal_one_device(subtests):
    for name, case in {**ALSO_CHOSEN, **{str(seed): generate(seed) for seed in range(3)}}.items():
        with subtests.test(msg=name):
            assert not broken(case), case


@pytest.mark.nightly
def test_new_training_programs_equal_one_device():
    found = search(int(time.time()), SECS)
    assert not found.broken, "see python -m tests.fuzz.training SEED"
    assert found.count > 20


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:A launch of steps_per_execution")
def test_training_programs_are_proved_equal(subtests):
    """All that `broken` compares in numbers."""
    cases = [
        case
        for case in map(generate, range(40))
        if not (case.is_refused or case.is_warned_of)
        and min(case.sizes) > case.replicas * case.pieces  # else JAX traces other operations
    ]
    assert len(cases) > 10
    for case in cases:
        with subtests.test(msg=str(case)):
            trainer_of(case, require_equal=True).fit(batches(case), progress=False)
