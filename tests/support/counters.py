"""A small model with state that a step counts up."""

import jax.numpy as jnp
from flax import nnx


class Counter(nnx.Module):
    def __init__(self, value=0.0):
        self.total = nnx.Param(jnp.full(4, value))
        self.deterministic = False
        self.none = nnx.Variable(None)


def count(model, by=1.0):
    model.total[...] = model.total[...] + by


def read(model):
    return model.total[...].sum()
