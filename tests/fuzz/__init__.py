"""Random replica programs, compared with a reference without JAX.

`program` describes a step as plain data, `generate` draws such descriptions, `reference` runs one
as NumPy coroutines that meet at the collectives, `lowering` makes a JAX step of it, and `laws` says
what must hold of the two. `python -m tests.fuzz PROFILE SEED` shows and checks one program again.
"""
