"""Rewrites a proved program without changing a value that the proof speaks about.

In: a proved jaxpr. Out: a flat program with the same values, after the passes in `passes.PASSES`,
and the interpreter that evaluates it; or stages between collectives on the host.
Law: `tests/laws/test_passes.py`: same marks, same values, no other collectives.
"""
