"""Logs placement before and after the start; `tests/devices/test_op_log.py` runs it."""

import logging
import sys

import jax.numpy as jnp

import mirror

cpu = mirror.config.list_physical_devices("CPU")[0]
part = mirror.config.LogicalDeviceConfiguration()
mirror.config.set_logical_device_configuration(cpu, [part] * 2)
mirror.debugging.set_log_device_placement(True)
a = jnp.array([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
b = jnp.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
c = a @ b
print(c, flush=True)
print("== towers", flush=True)
towers = []
for device in mirror.config.list_logical_devices("CPU"):
    with mirror.device(device):
        towers.append(a @ b)
with mirror.device("/cpu:0"):
    print(mirror.add_n(towers), flush=True)
print("== configured", flush=True)
logging.basicConfig(stream=sys.stdout, level=logging.WARNING, format="root: %(message)s")
a @ b
print("== off", flush=True)
mirror.debugging.set_log_device_placement(False)
a @ b
assert logging.getLogger("mirror").handlers == []
assert logging.getLogger("mirror").level == logging.NOTSET
