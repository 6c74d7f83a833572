"""Executors: run replica programs on the devices of a strategy."""
