"""Parameter servers, on Ray.

In: a step or a function, and variables. Out: updates by workers that may be lost.
Law: `tests/ps`.
"""
