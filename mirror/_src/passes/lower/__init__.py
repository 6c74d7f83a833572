"""The pass `lower`: replaces operations that a platform executes slowly by equivalent ones.

It is a table of rules for the evaluation of the program: `table.py`, with one module per family.
Law: `tests/passes/test_lower.py`: same values as `jax.lax`; at night, each rule is still faster.
"""
