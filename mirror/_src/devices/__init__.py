"""Devices: their names, and how a value gets onto those of the replicas."""
