"""Jobs of several processes: find each other, agree, fail and end together.

In: addresses, and lines that must be the same. Out: agreement, or an error in all processes.
Law: `tests/laws/test_several_processes.py`.
"""
