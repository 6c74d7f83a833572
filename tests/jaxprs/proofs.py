"""Steps to prove: their arguments, and the marks of their results."""

import jax
import jax.numpy as jnp
import numpy as np

from mirror._src.jaxprs.proof import prove
from mirror._src.jaxprs.trace import trace

FLOATS = jax.ShapeDtypeStruct((8,), np.float32)


def gradient(f, *args):
    return jax.grad(lambda *a: jnp.sum(f(*a)))(*args)


def marks_of(step, num_replicas):
    jaxpr = trace(lambda *a: jax.tree.leaves(step(*a)), [FLOATS, FLOATS], num_replicas)
    marks = prove(jaxpr, [True, False], num_replicas)
    return "".join("P" if mark.per_replica else "M" for mark in marks)
