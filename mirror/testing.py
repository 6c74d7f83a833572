"""Asserts for tests of code that uses `mirror`.

The pytest plugin's fixtures and marks are described in the guide to tests.
"""

from mirror._src.testing.asserts import assert_mirrored as assert_mirrored
from mirror._src.testing.asserts import (
    assert_trains_like_one_device as assert_trains_like_one_device,
)
