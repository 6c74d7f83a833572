"""What `mirror bench` runs: how a training step scales over 1 to n devices.

`named` (small built-in steps), `workload` (a step with what it takes, built-in or the user's own),
`measure` (all counts of devices in turn), `scaling` (what comes of it, as a table, a picture and
JSON), and `command`, which puts them together.
"""
