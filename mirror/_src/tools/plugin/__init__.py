"""The pytest plugin: hooks that need no JAX, and `support`, which does."""
