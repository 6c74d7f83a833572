"""Training: the `Trainer`, its callbacks, checkpoints and history.

In: a model, a loss, data. Out: the weights that one device trains on the whole batch.
Law: `tests/laws/test_training_generator.py`.
"""
