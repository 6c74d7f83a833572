"""The pytest plugin of mirror: host devices, strategies for tests, and a timeout for hanging tests.

pytest loads it in every run on a machine where mirror is installed, including runs of other
projects. It therefore imports only pytest and the standard library; JAX and Flax, which take about
a second, are imported only if needed.
"""

from mirror._src.tools.plugin.marks import _mirror_layout as _mirror_layout
from mirror._src.tools.plugin.marks import pytest_addoption as pytest_addoption
from mirror._src.tools.plugin.marks import pytest_configure as pytest_configure
from mirror._src.tools.plugin.marks import pytest_generate_tests as pytest_generate_tests
from mirror._src.tools.plugin.marks import pytest_runtest_setup as pytest_runtest_setup
from mirror._src.tools.plugin.marks import pytest_unconfigure as pytest_unconfigure
from mirror._src.tools.plugin.marks import strategy as strategy
from mirror._src.tools.plugin.member import pytest_cmdline_main as pytest_cmdline_main
from mirror._src.tools.plugin.processes import pytest_itemcollected as pytest_itemcollected
from mirror._src.tools.plugin.processes import (
    pytest_load_initial_conftests as pytest_load_initial_conftests,
)
from mirror._src.tools.plugin.timeout import pytest_enter_pdb as pytest_enter_pdb
from mirror._src.tools.plugin.timeout import pytest_runtest_protocol as pytest_runtest_protocol
