"""Contenders beyond JAX, each in its own library; none of these modules imports another."""
