"""Contenders beyond JAX, each in its own library."""
