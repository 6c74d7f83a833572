"""Each rule of the pass `lower` is faster than XLA's operation. Otherwise, delete it."""

import json

import pytest

from benchmarks.lowering import CASES
from tests.support import fresh
from tests.support.tables import rows

MARGIN = 1.5


@pytest.fixture(scope="module")
def ratios():
    """Measured in another process, because tests compile without XLA's optimizations."""
    code = "from benchmarks.lowering import main; main(['--json'])"
    return json.loads(fresh.run(code).splitlines()[-1])


@pytest.mark.nightly
@rows("name", list(CASES))
def test_rule_is_faster_than_xla(ratios, name):
    assert ratios[name] > MARGIN, f"delete {CASES[name].rule} of passes/lower: XLA has caught up"
