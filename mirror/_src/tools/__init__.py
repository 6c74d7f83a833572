"""Commands, and the part of the pytest plugin that needs JAX.

In: parsed arguments. Out: text and an exit status.
Law: `tests/tools`.
"""
