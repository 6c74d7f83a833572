"""Leaves JAX the first two GPUs, by CUDA's own variable."""

import os

os.environ["CUDA_VISIBLE_DEVICES"] = "0,1"  # before the import

import mirror

for device in mirror.config.list_physical_devices("GPU"):
    print(device.name, device.device_type)
print("Num GPUs Available:", len(mirror.config.list_physical_devices("GPU")))
