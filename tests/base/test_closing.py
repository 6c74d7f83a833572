"""`Closing` calls everything, in reverse order, and keeps the first error."""

import pytest

from mirror._src.base.errors import Closing, closing


class Calls:
    """Functions that note their call, and raise."""

    def __init__(self):
        self.names = []

    def __call__(self, name, error=None):
        self.names.append(name)
        if error is not None:
            raise error


FIRST, SECOND, THIRD = ValueError("first"), OSError("second"), KeyError("third")
STOP, EXIT = KeyboardInterrupt(), SystemExit(143)
# The error of the block, those of the functions in the order of their calls, and who wins.
TABLE = {
    "nothing": (None, [None, None], None, []),
    "the block": (FIRST, [None, None], FIRST, []),
    "a function": (None, [None, SECOND], SECOND, []),
    "two functions": (None, [SECOND, THIRD], SECOND, ["KeyError: 'third'"]),
    "everything": (FIRST, [SECOND, THIRD], FIRST, ["OSError: second", "KeyError: 'third'"]),
    "an exit afterwards": (FIRST, [EXIT, None], EXIT, []),
    "an exit, then an error": (FIRST, [EXIT, SECOND], EXIT, ["OSError: second"]),
    "an interrupt of the block": (STOP, [SECOND, None], STOP, ["OSError: second"]),
    "the same error again": (FIRST, [FIRST, None], FIRST, []),
}


def test_the_first_error_is_raised(subtests):
    for name in TABLE:
        with subtests.test(msg=name):
            in_block, in_functions, wanted, notes = TABLE[name]
            for error in (FIRST, SECOND, THIRD, STOP, EXIT):
                error.__dict__.pop("__notes__", None)
            calls, caught = Calls(), None
            try:
                with Closing() as at_end:
                    for i, error in reversed([*enumerate(in_functions)]):
                        at_end.add(f"function {i}", calls, i, error)
                    if in_block is not None:
                        raise in_block
            except BaseException as error:
                caught = error
            assert caught is wanted
            assert calls.names == [0, 1]
            told = getattr(caught, "__notes__", [])
            assert len(told) == len(notes)
            for note, text in zip(told, notes, strict=True):
                assert text in note
                assert "function" in note
                assert "test_closing.py:" in note


def test_closing_a_generator_raises():
    """`GeneratorExit` is not an error of the block."""

    def generate():
        with closing("the source", lambda: calls("closed", OSError("disk"))):
            yield 1

    calls = Calls()
    generator = generate()
    next(generator)
    with pytest.raises(OSError, match="disk"):
        generator.close()
