"""Asks for platforms whose backend does not start.

`tests/devices/test_config.py` runs it.
"""

import jax

import mirror
from mirror import config
from tests.support.inside import has_started
from tests.support.observe import L, begin, error_of, facts, names, print_facts

CPU, *GPUS = begin()

facts["cuda"] = error_of(config.list_logical_devices)
facts["strategy"] = error_of(mirror.MirroredStrategy)
jax.config.update("jax_platforms", "nonsense")
facts["nonsense"] = error_of(config.list_logical_devices)
facts["started"] = has_started()
jax.config.update("jax_platforms", "cpu")
config.set_logical_device_configuration(CPU, [L()] * 2)
facts["logical"] = names(config.list_logical_devices())
print_facts()
