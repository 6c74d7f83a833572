"""Devices: their names and settings, arrays on the replicas, launches.

In: devices and settings of the user, host arrays. Out: `ReplicaDevices` with mirrored, stacked and
sharded arrays, and launches in an order that cannot deadlock.
Law: `tests/devices`, `tests/laws/test_gpu.py`.
"""
