"""Batches onto the replicas.

In: arrays, datasets, iterators. Out: `PerReplica` batches, the same number in all processes.
Law: `tests/laws/test_training_generator.py`, `tests/data`.
"""
