"""What `mirror demo` runs: a small convolutional net on real digits, mirrored over all devices.

A reader meets it in this order: `options` (what was asked for), `placement` (on which devices),
`data` (digits in batches), `models` (one net in nnx, in Linen and as a plain pytree), `loop`
(training by hand), `trained` (by `mirror.Trainer`, or by hand), `plot`, and `run`, which puts them
together.

Nothing is imported here: `data`, `loop` and `plot` need what `pip install "mirror-jax[demo]"`
brings.
"""
