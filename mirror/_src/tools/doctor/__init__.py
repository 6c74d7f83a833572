"""`mirror doctor`: checks whether this machine and environment are ready for training.

`check` (one finding), `versions` and `environment` (checks that do not start JAX's backend),
`probes` (checks that do), `distributed` (checks of a job of several processes, with `roll_call` and
`addresses`), `child` (runs these in a subprocess, because they may crash it), `report` (Markdown
for an issue), `command`.
"""
