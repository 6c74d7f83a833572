"""The pytest plugin of mirror: host devices, strategies for tests, and a timeout for hanging tests.

pytest loads it in every run on a machine where mirror is installed, including runs of other
projects. It is therefore a package of its own that imports only pytest, the standard library and
the launcher of `mirror_cli`; importing `mirror` loads JAX and Flax, which takes about a second, and
happens only if needed.
"""

from pytest_mirror.marks import _mirror_layout as _mirror_layout
from pytest_mirror.marks import pytest_generate_tests as pytest_generate_tests
from pytest_mirror.marks import pytest_runtest_setup as pytest_runtest_setup
from pytest_mirror.marks import strategy as strategy
from pytest_mirror.member import pytest_cmdline_main as pytest_cmdline_main
from pytest_mirror.processes import pytest_itemcollected as pytest_itemcollected
from pytest_mirror.processes import pytest_load_initial_conftests as pytest_load_initial_conftests
from pytest_mirror.settings import pytest_addoption as pytest_addoption
from pytest_mirror.settings import pytest_configure as pytest_configure
from pytest_mirror.settings import pytest_unconfigure as pytest_unconfigure
from pytest_mirror.timeout import pytest_enter_pdb as pytest_enter_pdb
from pytest_mirror.timeout import pytest_runtest_protocol as pytest_runtest_protocol
