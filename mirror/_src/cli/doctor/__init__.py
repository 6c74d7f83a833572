"""What `mirror doctor` runs: is this machine, with this environment, fit for training?

`check` (one finding, and how it is shown), `versions` and `environment` (what can be told without
JAX's backend), `probes` (what only a started backend tells), `child` (runs the probes in a process
of their own, which may die of them), and `command`, which puts them together.
"""
