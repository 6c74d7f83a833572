"""Stalls the collective check; `tests/devices/test_collective_check.py` runs it."""

import time

import jax
import numpy as np

from mirror._src.devices import device_checks
from mirror._src.devices.replicas import ReplicaDevices

jax.config.update("jax_platforms", "cpu")
devices = tuple(jax.devices())
real = device_checks._sums


def stalls(devices, over):
    time.sleep(600)


device_checks._sums = stalls
print(device_checks.all_reduce_fault(devices, 0.2))
device_checks._sums = real
device_checks._faults.clear()


def forever(rows):
    x = rows[0, :1] * np.ones((400, 400), np.float32)
    return jax.lax.fori_loop(0, 10**9, lambda i, x: x @ x * 1e-3, x)


rows = jax.ShapeDtypeStruct((1, 8), np.float32, sharding=ReplicaDevices(devices).stacked)
compiled = jax.jit(forever).lower(rows).compile()
device_checks._compiled = lambda replicas, size: compiled
print(device_checks.all_reduce_fault(devices, 0.5))
