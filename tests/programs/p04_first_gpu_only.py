"""Lets JAX see the first GPU only."""

import mirror

gpus = mirror.config.list_physical_devices("GPU")
try:
    mirror.config.set_visible_devices(gpus[:1], "GPU")
    logical_gpus = mirror.config.list_logical_devices("GPU")
    print(len(gpus), "Physical GPUs,", len(logical_gpus), "Logical GPU")

    # JAX has started: this comes too late.
    mirror.config.set_visible_devices([], "GPU")
except RuntimeError as error:
    print(error)
