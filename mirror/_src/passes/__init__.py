"""Changes a proved program without changing a value that the proof speaks about.

In: a proved jaxpr. Out: the same values by other operations: packed collectives, a sharded update,
stages between collectives on the host, several replicas per device.
Law: `tests/laws/test_laws.py`, `tests/laws/test_conformance.py`.
"""
