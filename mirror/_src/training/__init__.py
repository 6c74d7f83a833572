"""Training: the `Trainer`, its callbacks, checkpoints and history."""
