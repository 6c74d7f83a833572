"""One step, from the call to its results.

In: the user's function and its arguments. Out: results, plain if they are proved to be mirrored and
`PerReplica` otherwise, and new values in the objects. Executors run the program that was proved.
Law: `tests/laws/test_laws.py`, `tests/laws/test_bad_input.py`.
"""
