"""Splits the CPU; an eager op of the user starts the backend.

`tests/devices/test_config.py` runs it.
"""

import jax
import jax.numpy as jnp

from mirror import config
from tests.support.inside import has_started
from tests.support.observe import L, begin, error_of, facts, print_facts, this_line

CPU, *GPUS = begin()

config.set_logical_device_configuration(CPU, [L()] * 4)
events = []
jax.monitoring.register_event_duration_secs_listener(lambda *_, **__: events.append(has_started()))
facts["line"], x = this_line(), jnp.zeros(3)
facts["events"] = events
facts["devices"] = [jax.device_count(), len(config.list_logical_devices())]
facts["other"] = error_of(config.set_logical_device_configuration, CPU, [L()] * 2)
print_facts()
