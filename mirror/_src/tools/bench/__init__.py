"""`mirror bench`: measures how a training step scales from one device to n.

`workload` (a step with its arguments and data, built-in or the user's own), `measure` (measures all
device counts in turns), `scaling` (the results as a table, a picture and JSON), `command`.
"""
