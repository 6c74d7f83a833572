"""Reads jaxprs: the trace of one replica, the proof, its text, and what it says about rows.

In: a function and abstract leaves. Out: a `ClosedJaxpr`, and a `Mark` for each of its values.
Law: `tests/laws/test_fuzz.py`.
"""
