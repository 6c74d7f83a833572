"""Assertions for tests of code that uses `mirror`.

The guide to testing describes the fixtures and marks of the pytest plugin.
"""

from mirror._src.base.unknown_names import explain_unknown_names as _explain_unknown_names
from mirror._src.tools.asserts import assert_equals_one_device as assert_equals_one_device
from mirror._src.tools.asserts import assert_mirrored as assert_mirrored
from mirror._src.tools.asserts import (
    assert_trains_like_one_device as assert_trains_like_one_device,
)

_explain_unknown_names("mirror.testing")
