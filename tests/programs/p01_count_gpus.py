"""Counts the GPUs and lists the devices, before anything is configured or started."""

import mirror

print("Num GPUs Available:", len(mirror.config.list_physical_devices("GPU")))
for device in mirror.config.list_physical_devices():
    print(device.name, device.device_type)
