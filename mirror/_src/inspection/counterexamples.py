"""Whether numbers refute that a step differs: terms may cancel, or one operation undo another."""

import itertools
import math
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from mirror._src.base.types import is_half
from mirror._src.devices.op_log import unlogged
from mirror._src.devices.transfer import NoMesh
from mirror._src.engine.replica_function import TracedStep
from mirror._src.jaxprs.collective_eqns import is_stateful
from mirror._src.jaxprs.equations import equations
from mirror._src.jaxprs.primitives import CALLBACK, SAMPLER, shape_of

_MOST_NUMBERS = 2**26  # of the results of all operations
_UNKNOWN = SAMPLER | CALLBACK | {"while"}  # which may not end for random arguments
_SIZES = ((1.0, 1.0), (30.0, 30.0), (0.01, 1.0))  # of what replicas share, and of rows
_LARGE_INTEGER = 1000  # such as a number of updates
_ROUNDINGS = 64


class Program(NamedTuple):
    """A trace of a step, and the program after it; see `Analysis.finish`."""

    traced: TracedStep
    finish: ClosedJaxpr


def agreeing(
    many: Program,
    one: Program,
    types: Sequence[jax.ShapeDtypeStruct],
    masks: Collection[int],
    outputs: Sequence[int],
) -> set[int]:
    """Returns the outputs whose numbers agree for all of a few random arguments.

    Numbers cannot tell for random numbers, callbacks, `while_loop` and large programs.

    Args:
        many: The program of the replicas.
        one: The program of one device.
        types: The types of its inputs, with the whole batch.
        masks: Positions of inputs that are all True.
        outputs: Positions of the outputs to compare.
    """
    eqns = [e for each in (many, one) for e in equations(each.traced.jaxpr.jaxpr)]
    is_unknown = any(e.primitive.name in _UNKNOWN or is_stateful(e) for e in eqns)
    count = sum(math.prod(shape_of(var)) for e in eqns for var in e.outvars)
    rounds = max((e.params["length"] for e in eqns if e.primitive.name == "scan"), default=1)
    if is_unknown or rounds * count > _MOST_NUMBERS:
        return set()
    is_own = [a.shape != b.shape for a, b in zip(many.traced.jaxpr.in_avals, types, strict=True)]
    rng = np.random.default_rng(0)
    agreed, differing = set[int](), set[int]()
    try:
        with NoMesh(), unlogged(), jax.default_device("cpu"):
            run_many, run_one = (_runner(each, is_own, outputs) for each in (many, one))
            for sizes, is_signed in itertools.product(_SIZES, (False, True)):
                values = [
                    _drawn(rng, each, sizes[own], is_signed=is_signed, is_mask=i in masks)
                    for i, (each, own) in enumerate(zip(types, is_own, strict=True))
                ]
                for k, a, b in zip(outputs, run_many(values), run_one(values), strict=True):
                    is_finite = np.isfinite(a) & np.isfinite(b)
                    agreed |= {k} if is_finite.all() else set()
                    differing |= {k} if _differ(a[is_finite], b[is_finite]) else set()
    except Exception:  # of an operation that has no rule for replicas on one device
        return set()
    return agreed - differing


def _runner(
    program: Program, is_own: Sequence[bool], outputs: Sequence[int]
) -> Callable[[Sequence[Any]], list[np.ndarray]]:
    """Returns a function of the whole batch that returns outputs of the first replica."""
    step, finish = (
        jaxpr_as_fun(ClosedJaxpr(each.jaxpr, list(map(np.asarray, each.consts))))
        for each in (program.traced.jaxpr, program.finish)
    )
    function = program.traced.function
    n = function.group.num_replicas_in_sync

    def replica(*values: Any) -> list[Any]:
        results = finish(*values, *step(*values))
        return [results[k] for k in outputs]

    axes = [0 if own else None for own in is_own]
    run = jax.jit(jax.vmap(replica, axes, axis_name=function.axis_name, axis_size=n))

    def first(values: Sequence[Any]) -> list[np.ndarray]:
        pairs = zip(values, is_own, strict=True)
        stacked = [x.reshape(n, -1, *x.shape[1:]) if own else x for x, own in pairs]
        return [np.asarray(x)[0] for x in run(*stacked)]

    return first


def _drawn(
    rng: np.random.Generator,
    aval: jax.ShapeDtypeStruct,
    size: float,
    *,
    is_signed: bool,
    is_mask: bool,
) -> Any:
    """Returns a random argument; integers may be labels, so that arrays have small ones."""
    if jnp.issubdtype(aval.dtype, jax.dtypes.prng_key):  # with which nothing is sampled
        return jax.random.split(jax.random.key(0), aval.shape)
    if is_mask:
        return np.ones(aval.shape, aval.dtype)
    if jnp.issubdtype(aval.dtype, jnp.inexact):
        x = rng.normal(size=aval.shape) if is_signed else rng.uniform(0.1, 1.0, aval.shape)
        return np.asarray(size * x).astype(aval.dtype)
    is_large = not aval.shape and size > 1 and aval.dtype.itemsize > 1
    return np.asarray(rng.integers(0, 2, aval.shape) + _LARGE_INTEGER * is_large).astype(aval.dtype)


def _differ(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether finite numbers differ by more than rounding."""
    if not jnp.issubdtype(a.dtype, jnp.inexact):
        return not np.array_equal(a, b)
    if is_half(a.dtype):  # whose roundings would hide an update
        return True
    allowed = _ROUNDINGS * float(jnp.finfo(a.dtype).eps) * np.abs(b).max(initial=0.0)
    return bool((np.abs(a - b) > allowed).any())
