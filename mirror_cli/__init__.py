"""The `mirror` command, as far as it works without JAX.

Importing `mirror` loads JAX, Flax and Optax, which takes seconds. The parser, the help texts, shell
completion and the launcher do not need them, so they are in a package of their own that imports
only the standard library. The commands themselves are in `mirror._src.tools`, and `main` imports
them by name when they run.
"""
