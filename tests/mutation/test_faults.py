"""The table of planted faults fits the source and the tests; `python -m tests.mutation` runs it."""

import ast
from collections import Counter
from pathlib import Path

from tests.mutation.faults import FAULTS
from tests.mutation.run import ESCAPED, escaped_now

ROOT = Path(__file__).parents[2]


def test_each_planted_fault_fits_the_source_and_its_tests(subtests):
    names = Counter(fault.name for fault in FAULTS)
    assert [name for name, count in names.items() if count > 1] == []
    for fault in FAULTS:
        with subtests.test(msg=fault.name):
            text = (ROOT / fault.file).read_text()
            count = text.count(fault.old)
            assert count == 1, f"{fault.old!r} occurs {count} times in {fault.file}"
            changed = ast.dump(ast.parse(text.replace(fault.old, fault.new)))
            assert changed != ast.dump(ast.parse(text)), "the fault changes nothing"
            missing = [file for file in fault.tests if not (ROOT / file).is_file()]
            assert fault.tests, "no tests are named"
            assert not missing, "follow the tests that have moved"


def test_planted_faults_that_escape_now_are_found():
    before = {"a mask": "tests/a.py", "a divisor": "tests/b.py", "a check": ESCAPED, "gone": "c.py"}
    after = {"a mask": ESCAPED, "a divisor": "tests/a.py", "a check": ESCAPED}
    assert escaped_now(before, after) == {"a mask": "tests/a.py"}
