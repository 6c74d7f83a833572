"""`mirror doctor`: checks whether this machine and environment are ready for training.

`check` (one finding, and the runner of a table of checks), `environment` (checks that do not start
JAX's backend), `probes` (checks that do), `distributed` (checks of a job of several processes),
`ray_nodes` (checks of Ray), `command` (runs these in a subprocess, because they may crash it, and
prints the results, also as Markdown for an issue).
"""
