"""How fast a step through `strategy.run` is, against the same step written by hand in JAX."""
