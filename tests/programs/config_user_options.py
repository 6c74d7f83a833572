"""Configures devices beside the user's own JAX options.

`tests/devices/test_config.py` runs it.
"""

import os

import jax

from mirror import config
from tests.support.inside import settings_in_words
from tests.support.observe import L, begin, error_of, facts, log_lines, names, options, print_facts

CPU, *GPUS = begin()

jax.config.update("jax_cuda_visible_devices", "1,0")
mine = [options(), dict(os.environ)]
facts["too many"] = error_of(config.set_logical_device_configuration, CPU, [L()] * 3)
config.set_logical_device_configuration(CPU, [L()] * 2)
facts["as many"] = log_lines()
config.set_visible_devices(GPUS[:1], "GPU")
facts["one"] = log_lines()
config.set_logical_device_configuration(GPUS[1], [L(), L()])
config.set_logical_device_configuration(GPUS[0], [L(1024)])
facts["limit"] = log_lines()
config.set_visible_devices([], "GPU")
facts["none"] = log_lines()
facts["kept"] = mine == [options(), dict(os.environ)]
facts["words"] = settings_in_words()
facts["logical"] = names(config.list_logical_devices())
print_facts()
