"""The public strategies and their scope.

In: devices, a step, arguments. Out: what the engine and the reports return.
Law: `tests/strategy`, `tests/laws/test_laws.py`.
"""
