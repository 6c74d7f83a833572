"""`mirror estimate-memory`: estimates the bytes per device of a step without executing it.

`abstract` (makes a workload whose arrays have shapes but no memory), `estimate` (counts its bytes,
compiles the step, and formats the results), `command`.
"""
