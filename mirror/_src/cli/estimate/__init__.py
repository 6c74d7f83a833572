"""What `mirror estimate-memory` runs: bytes per device of a step that is never executed.

`abstract` (makes a workload whose arrays have shapes and no memory), `estimate` (counts its bytes
and lets XLA compile the step; a table and JSON), and `command`, which puts them together.
"""
