"""Callbacks for `Trainer.fit`, exported by `mirror.callbacks`."""
