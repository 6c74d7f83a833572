"""Configures devices beside the user's own flags.

`tests/devices/test_config.py` runs it.
"""

import os

import jax

import mirror
from mirror import config
from tests.support.inside import settings_in_words
from tests.support.observe import (
    L,
    begin,
    error_of,
    facts,
    log_lines,
    names,
    options,
    print_facts,
    unchanged,
)

CPU, *GPUS = begin()

jax.config.update("jax_cuda_visible_devices", "0,1")
mine = [options(), dict(os.environ)]
facts["visible"] = names(config.get_visible_devices("GPU"))
facts["growth"] = [config.get_memory_growth(gpu) for gpu in GPUS]
facts["too many"] = error_of(config.set_logical_device_configuration, CPU, [L()] * 9)
config.set_logical_device_configuration(CPU, [L()] * 4)
facts["split"] = log_lines()
facts["hidden"] = error_of(config.set_visible_devices, GPUS[1:], "GPU")
config.set_visible_devices(GPUS[:1], "GPU")
facts["one"] = log_lines()
facts["grow"] = [unchanged(config.set_memory_growth, GPUS[0], grow) for grow in (True, False)]
facts["grow said"] = log_lines()
config.set_logical_device_configuration(GPUS[0], [L(1024)] * 2)
facts["limit"] = log_lines()
facts["kept"] = mine == [options(), dict(os.environ)]
facts["words"] = settings_in_words()
facts["logical"] = len(config.list_logical_devices())
facts["devices"] = jax.device_count()
facts["left out"] = error_of(mirror.device, jax.devices()[7])
facts["grow"].append(unchanged(config.set_memory_growth, GPUS[2], True))
facts["kept after the start"] = mine == [options(), dict(os.environ)]
print_facts()
