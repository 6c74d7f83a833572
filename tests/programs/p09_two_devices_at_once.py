"""Times A**n + B**n on one device, then on two at the same time.

Usage: p09_two_devices_at_once.py [SIZE]
"""

import datetime
import sys

import jax
import jax.numpy as jnp
import numpy as np

import mirror

n = 10
size = int(sys.argv[1]) if len(sys.argv) > 1 else 10000
random = np.random.default_rng(0)
A = random.random((size, size), np.float32)
B = random.random((size, size), np.float32)

devices = mirror.config.list_logical_devices("GPU") or mirror.config.list_logical_devices("CPU")
first, second = devices[0], devices[1 % len(devices)]


def matpow(m):
    result = m
    for _ in range(n - 1):
        result = result @ m
    return result


def put(m, device):
    with mirror.device(device):
        return jnp.asarray(m)


def compute(device_of_a, device_of_b):
    """The powers, their sum, and how long the powers took, without the copies there and back."""
    a, b = jax.block_until_ready((put(A, device_of_a), put(B, device_of_b)))
    start = datetime.datetime.now()
    with mirror.device(device_of_a):
        power_of_a = matpow(a)
    with mirror.device(device_of_b):  # while the first is still at work
        power_of_b = matpow(b)
    powers = jax.block_until_ready([power_of_a, power_of_b])
    took = datetime.datetime.now() - start
    with mirror.device("/cpu:0"):
        return powers, mirror.add_n(powers), took


compute(first, second)  # compiles
compute(second, first)

powers_on_one, on_one, took_on_one = compute(first, first)
powers_on_two, on_two, took_on_two = compute(first, second)

print(f"One device, {first.name}, computation time:", took_on_one)
print(f"Two devices, {first.name} and {second.name}, computation time:", took_on_two)
print("Equal:", bool((on_one == on_two).all()))
