"""Compares the speed of `strategy.run` with the same step written by hand in JAX."""
