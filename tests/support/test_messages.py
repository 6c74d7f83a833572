"""The helper that the tests of messages share."""

import pytest

from tests.support.messages import assert_message, raises

TEXT = "`batch['a']` has 31 rows,\n  got model.kernel of (3, 4) in 0.5 s. Use remainder='pad'."


def test_assert_message_requires_every_part():
    assert_message(
        TEXT, names=["batch['a']", "model.kernel"], values=[31, (3, 4), 0.5], fix="remainder='pad'"
    )
    assert_message(ValueError(TEXT), values=31)
    assert_message("Use strategy.run(step).", fix="run(step)")


def test_assert_message_fails_on_missing_parts(subtests):
    for wanted in [
        {"values": 1},
        {"values": 5},
        {"values": [31, 30]},
        {"names": "batc"},
        {"names": "kernel"},
        {"fix": "remainder='drop'"},
        {},
    ]:
        with subtests.test(msg=f"{wanted}"), pytest.raises(AssertionError):
            assert_message(TEXT, **wanted)


def test_raises_checks_kind_and_message():
    with raises(ValueError, values=3) as caught:
        raise ValueError("got 3")
    assert caught.value.args == ("got 3",)
    with pytest.raises(AssertionError, match="missing"), raises(ValueError, values=4):
        raise ValueError("got 3")
    with pytest.raises(TypeError), raises(ValueError, values=3):
        raise TypeError("got 3")
