"""Keras models under `strategy.scope()`.

In: a `keras.Model` and its calls of fit, evaluate, predict. Out: the same calls, mirrored.
Law: `tests/keras`.
"""
