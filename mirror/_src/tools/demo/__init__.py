"""`mirror demo`: trains a small convolutional net on handwritten digits on all devices.

Reading order: `placement` (selects the devices), `data`
(digits in batches), `training` (the model, its loss and its `mirror.Trainer`), `run` (trains, and
checks the replicas), `command`.

This package imports nothing, because `data` requires scikit-learn, which the extra `demo` installs.
"""
