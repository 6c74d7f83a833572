"""`mirror doctor`: checks whether this machine and environment are ready for training.

`check` (one finding, and the runner of a table of checks), `versions` and `environment` (checks
that do not start JAX's backend), `probes` (checks that do), `distributed` (checks of a job of
several processes, with `rendezvous` and `addresses`), `ray_nodes` (checks of Ray), `child` (runs
these in a subprocess, because they may crash it), `report` (Markdown for an issue), `command`.
"""
