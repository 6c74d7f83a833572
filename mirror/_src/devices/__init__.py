"""Devices: names, configuration, placement of ops, and layout of arrays on the replicas."""
