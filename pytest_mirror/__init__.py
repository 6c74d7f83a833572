"""The pytest plugin of mirror: host devices, strategies for a test, and an end for what hangs.

pytest loads it in every run on a machine where mirror is installed, of other projects too. So it
stands beside the package, whose import brings JAX and Flax (about a second), and imports only
pytest and the standard library; `mirror` is imported where JAX is needed.
"""

from pytest_mirror.marks import _mirror_layout as _mirror_layout
from pytest_mirror.marks import pytest_generate_tests as pytest_generate_tests
from pytest_mirror.marks import pytest_runtest_setup as pytest_runtest_setup
from pytest_mirror.marks import strategy as strategy
from pytest_mirror.settings import pytest_addoption as pytest_addoption
from pytest_mirror.settings import pytest_configure as pytest_configure
from pytest_mirror.settings import pytest_unconfigure as pytest_unconfigure
from pytest_mirror.timeout import pytest_enter_pdb as pytest_enter_pdb
from pytest_mirror.timeout import pytest_runtest_protocol as pytest_runtest_protocol
