"""Errors, names of the user's values, source lines, tables, interrupts.

In: text and values of any kind. Out: messages, and small tools without knowledge of devices.
Law: `tests/laws/test_bad_input.py`.
"""
