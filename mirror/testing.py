"""Assertions for tests of code that uses `mirror`.

The guide to testing describes the fixtures and marks of the pytest plugin.
"""

from mirror._src.base.tracebacks import make_public as _make_public
from mirror._src.tools.asserts import assert_equals_one_device as assert_equals_one_device
from mirror._src.tools.asserts import assert_mirrored as assert_mirrored
from mirror._src.tools.asserts import (
    assert_trains_like_one_device as assert_trains_like_one_device,
)

_make_public("mirror.testing")
