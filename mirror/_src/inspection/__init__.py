"""Reports on a step: verify, check, inspect, explain, memory, launches that do not end.

In: a step and arguments, or a mirrored value. Out: a report, or an error with the first difference.
Law: `tests/inspection`, `tests/laws/test_real_programs.py`.
"""
