"""Splits the CPU, and lets mirror start the backend.

`tests/devices/test_config.py` runs it.
"""

import os

import jax

import mirror
from mirror import config
from tests.support.inside import has_started, settings_in_words
from tests.support.observe import (
    L,
    begin,
    error_of,
    facts,
    names,
    options,
    print_facts,
    this_line,
    unchanged,
)

CPU, *GPUS = begin()

facts["at first"] = [names(config.list_physical_devices()), has_started()]
facts["never set"] = config.get_logical_device_configuration(CPU)
probe = "jax_cpu_get_local_topology_timeout_minutes"
value = jax.config.values[probe]
config.set_logical_device_configuration(CPU, [L()] * 5)
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"  # too late: an option wins
config.set_logical_device_configuration(CPU, [L(), L(), L()])
facts["set"] = [len(config.get_logical_device_configuration(CPU)), *options()]
facts["words"] = settings_in_words()[0]
facts["before"] = [has_started(), jax.config.values[probe] == value]

pool, find = [], jax.local_devices


def local_devices(*arguments, **options):
    pool.append(os.environ.get("PJRT_NPROC"))
    return find(*arguments, **options)


jax.local_devices = local_devices
facts["line"], logical = this_line(), config.list_logical_devices()
facts["pool"] = pool[0]

facts["after"] = [has_started(), jax.config.values[probe] == value]
facts["logical"] = [[d.name, d.device_type] for d in logical]
facts["physical"] = names(config.list_physical_devices())
facts["devices"] = jax.device_count()
facts["replicas"] = mirror.MirroredStrategy().num_replicas_in_sync
facts["same"] = unchanged(config.set_logical_device_configuration, CPU, [L()] * 3)
facts["other"] = error_of(config.set_logical_device_configuration, CPU, [L()] * 2)
facts["of jax"] = error_of(jax.config.update, probe, value + 1)
print_facts()
