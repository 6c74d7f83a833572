"""Hides unlisted GPUs; `jax.devices()` of the user starts the backend.

`tests/devices/test_config.py` runs it.
"""

import sys

import jax
import jax.numpy as jnp

from mirror import config
from tests.support.inside import unlist_gpus
from tests.support.observe import (
    L,
    begin,
    error_of,
    facts,
    log_lines,
    names,
    options,
    print_facts,
    this_line,
    unchanged,
)

CPU, *GPUS = begin()

sys.modules["pynvml"] = None
unlist_gpus()
facts["none"] = names(config.list_physical_devices("GPU"))
config.set_visible_devices([], "GPU")
facts["hidden"] = options()
facts["lines"], _ = [this_line()], jax.eval_shape(lambda x: x + 1, 1.0)
jax.devices()
facts["asked"] = error_of(config.set_logical_device_configuration, CPU, [L()] * 2)
line, x = this_line(), jnp.zeros(3)
facts["lines"].append(line)
facts["computed"] = error_of(config.set_logical_device_configuration, CPU, [L()] * 2)
facts["same"] = unchanged(config.set_visible_devices, [], "GPU")
facts["said"] = log_lines()
print_facts()
