"""Allocates the memory of all GPUs as it is needed.

The other way is to set XLA_PYTHON_CLIENT_PREALLOCATE=false in the environment.
"""

import mirror

gpus = mirror.config.list_physical_devices("GPU")
try:
    # It must be the same on all GPUs.
    for gpu in gpus:
        mirror.config.set_memory_growth(gpu, True)
    logical_gpus = mirror.config.list_logical_devices("GPU")
    print(len(gpus), "Physical GPUs,", len(logical_gpus), "Logical GPUs")
    print("Memory grows:", [mirror.config.get_memory_growth(gpu) for gpu in gpus])

    # JAX has started: this comes too late.
    for gpu in gpus:
        mirror.config.set_memory_growth(gpu, False)
except RuntimeError as error:
    print(error)
