"""Sets the number of host devices before and after the backend starts.

`tests/devices/test_config.py` runs it.
"""

import jax

import mirror
from mirror import config
from tests.support.inside import has_started
from tests.support.observe import begin, error_of, facts, print_facts, unchanged

begin()

config.set_num_cpu_devices(3)
config.set_num_cpu_devices(3)
config.set_num_cpu_devices(4)
facts["started"] = has_started()
start = jax.numpy.zeros(1)
facts["devices"] = jax.device_count()
facts["replicas"] = mirror.MirroredStrategy().num_replicas_in_sync
facts["again"] = [unchanged(config.set_num_cpu_devices, n) for n in (1, 3, 4)]
facts["more"] = error_of(config.set_num_cpu_devices, 5)
print_facts()
