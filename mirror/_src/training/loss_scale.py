"""`LossScale`: a factor of the loss that keeps small gradients representable in float16."""

from collections.abc import Mapping
from typing import Any, Literal, TypeAlias, final

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mirror._src.base.errors import expected, require_int
from mirror._src.base.modules import set_module
from mirror._src.base.types import Array, PyTree
from mirror._src.training.precision import widened

SCALE, SKIPPED = "loss_scale", "skipped"
"""Names of the metrics."""

LossScaleArgument: TypeAlias = "LossScale | Literal[False] | None"
_LARGEST = float(jnp.finfo(jnp.float32).max)


@set_module("mirror")
@final
class LossScale(nnx.Module):
    """Multiplies the loss, so that gradients in float16 do not become 0, and adapts the factor.

    The smallest positive number of float16 is 6e-8; smaller gradients become 0. The loss is
    multiplied by a scale before it is differentiated, and the gradients are divided by it. If a
    gradient is infinite or NaN, the step is skipped and the scale divided by `factor`. After
    `growth_interval` finite steps in a row it is multiplied by `factor`. As in TensorFlow's
    `LossScaleOptimizer`, the scale starts at 2**15, doubles after 2000 steps, and is at least 1.

    `mirror.Trainer(..., precision="float16")` creates one, and `loss_scale=mirror.LossScale(...)`
    sets its numbers. In a step of your own it is an argument, as an optimizer is. The decision is
    made from the all-reduced gradients, so that all replicas skip the same steps:

        def step(model, optimizer, loss_scale, batch):
            def loss_fn(model):
                return loss_scale.scale(losses(model, batch).mean())

            grads = nnx.grad(loss_fn)(model)
            grads = mirror.all_reduce("mean", grads)
            return loss_scale.apply(optimizer, model, loss_scale.unscale(grads))

        is_finite = strategy.run(step, (model, optimizer, loss_scale, batch))

    Args:
        initial: Scale of the first step.
        growth_interval: Number of consecutive finite steps after which the scale grows.
        factor: Factor by which the scale grows and shrinks. A power of 2 does not round.
        minimum: Smallest scale.

    Attributes:
        current: The scale, a float32 scalar in an `nnx.Variable`.
        finite_steps: Number of consecutive finite steps with this scale, an int32 scalar.
        num_skipped: Number of all skipped steps, an int32 scalar.

    Raises:
        TypeError: If an argument is not a number, or `growth_interval` not an integer.
        ValueError: If `factor` is not greater than 1 in float32, `growth_interval` is less than 1,
            or not `0 < minimum <= initial`.

    >>> scale = LossScale(initial=1024.0)
    >>> scale.scale(0.5)
    Array(512., dtype=float32)
    >>> bool(scale.update({"kernel": jnp.array([1.0, jnp.inf])}))
    False
    >>> float(scale.current[...]), int(scale.num_skipped[...])
    (512.0, 1)
    """

    def __init__(
        self,
        initial: float = 2.0**15,
        *,
        growth_interval: int = 2000,
        factor: float = 2.0,
        minimum: float = 1.0,
    ) -> None:
        require_int("growth_interval", growth_interval)
        initial = _as_float32("initial", initial)
        factor, minimum = _as_float32("factor", factor), _as_float32("minimum", minimum)
        if factor <= 1:
            raise ValueError(expected("factor", factor, "greater than 1", "2 is usual."))
        if minimum > initial:
            raise ValueError(
                f"`minimum` must be at most `initial`, got minimum={minimum} and "
                f"initial={initial}. The scale starts at `initial`."
            )
        self.initial, self.factor, self.minimum = initial, factor, minimum
        self.growth_interval = int(growth_interval)
        self.current = nnx.Variable(jnp.asarray(self.initial, jnp.float32))
        self.finite_steps = nnx.Variable(jnp.zeros((), jnp.int32))
        self.num_skipped = nnx.Variable(jnp.zeros((), jnp.int32))

    def __repr__(self) -> str:
        return (
            f"LossScale(initial={self.initial:g}, growth_interval={self.growth_interval}, "
            f"factor={self.factor:g}, minimum={self.minimum:g})"
        )

    def scale(self, loss: Any) -> Array:
        """Returns the loss times the scale, at least in float32."""
        loss = jnp.asarray(loss)
        return widened(loss) * self.current[...]

    def unscale(self, grads: PyTree) -> PyTree:
        """Returns the gradients divided by the scale, with their dtypes.

        Divide all-reduced gradients: a sum that overflows must be infinite when `update` sees it.
        """
        scale = self.current[...]
        return jax.tree.map(lambda x: (widened(x) / scale).astype(x.dtype), grads)

    def update(self, grads: PyTree) -> Array:
        """Adapts the scale to the gradients of a step, which all replicas must have in common.

        Args:
            grads: Gradients after the all-reduce, before or after `unscale`.

        Returns:
            Whether all of them are finite, a boolean scalar. If not, the step must have no effect.
        """
        leaves = [jnp.isfinite(x).all() for x in jax.tree.leaves(grads)]
        finite = jnp.stack(leaves).all() if leaves else jnp.asarray(True)
        scale, steps = self.current[...], self.finite_steps[...] + 1
        larger = scale * self.factor
        larger = jnp.where(jnp.isfinite(larger), larger, scale)
        smaller = jnp.maximum(scale / self.factor, self.minimum)
        grows = steps >= self.growth_interval
        unless_skipped = jnp.where(grows, larger, scale)
        self.current[...] = jnp.where(finite, unless_skipped, smaller).astype(jnp.float32)
        self.finite_steps[...] = jnp.where(finite & ~grows, steps, 0).astype(jnp.int32)
        self.num_skipped[...] = self.num_skipped[...] + (~finite).astype(jnp.int32)
        return finite

    def apply(self, optimizer: nnx.Optimizer[Any], model: nnx.Module, grads: PyTree) -> Array:
        """Updates the model unless a gradient is not finite, and adapts the scale.

        Args:
            optimizer: The optimizer. A skipped step changes neither it nor the model.
            model: The model, as it is after the forward pass: running statistics of this step stay.
            grads: Unscaled gradients, after the all-reduce.

        Returns:
            Whether the gradients are finite, a boolean scalar.
        """
        before = Snapshot((model, optimizer))
        finite = self.update(grads)
        optimizer.update(model, grads)
        before.restore_unless(finite)
        return finite

    def reset(self) -> None:
        """Sets the scale to `initial`, and the counts to 0."""
        self.current.set_value(jnp.asarray(self.initial, jnp.float32))
        for count in (self.finite_steps, self.num_skipped):
            count.set_value(jnp.zeros((), jnp.int32))


@final
class Snapshot:
    """The values of nnx objects inside a compiled step, to undo what it does.

    Random keys and their counts are left out: a skipped step uses up its random numbers.
    """

    def __init__(self, objects: tuple[Any, ...]) -> None:
        self._objects = objects
        # A state holds the variables themselves, and the copies keep the values of now.
        self._before = {path: jax.tree.map(lambda x: x, leaf) for path, leaf in self._leaves()}

    def restore_unless(self, finite: Array) -> None:
        """Sets the values that existed before back to what they were, unless `finite`."""
        chosen = [
            (path, jax.tree.map(lambda new, old: jnp.where(finite, new, old), leaf, before))
            for path, leaf in self._leaves()
            if (before := self._before.get(path)) is not None
        ]
        nnx.update(self._objects, nnx.from_flat_state(chosen))

    def _leaves(self) -> list[tuple[Any, Any]]:
        state: Any = nnx.state(self._objects, nnx.Not(nnx.RngState))
        return list(nnx.to_flat_state(state))


def loss_scale_of(argument: Any, precision: str | None) -> LossScale | None:
    """Returns the loss scale of a `Trainer` from its argument and its precision.

    Raises:
        TypeError: If the argument is neither a `LossScale`, False nor None.
    """
    if argument is None:
        return LossScale() if precision == "float16" else None
    if argument is False or isinstance(argument, LossScale):
        return argument or None
    fix = "Write loss_scale=mirror.LossScale()."
    if isinstance(argument, int | float) and not isinstance(argument, bool):
        fix = f"Write loss_scale=mirror.LossScale({argument!r})."
    raise TypeError(expected("loss_scale", argument, "a mirror.LossScale, False or None", fix))


def stuck(loss_scale: LossScale | None, logs: Mapping[str, float], step: int) -> str:
    """Returns what to say of a launch whose steps were all skipped at the smallest scale, or `""`.

    A smaller scale cannot help, so that the model may never change again.
    """
    if loss_scale is None or logs.get(SKIPPED) != 1 or logs[SCALE] > loss_scale.minimum:
        return ""
    return (
        f"The gradients of step {step} are infinite or NaN also with the smallest loss scale, "
        f"{loss_scale.minimum:g}, and the step was skipped. As long as this is so, the model does "
        "not change. The cause is not the scale. Common causes: log(0), division by zero, the "
        "gradient of sqrt(0), labels out of range, or activations beyond 65504, the largest number "
        "of float16, for which precision='bfloat16' has room."
    )


def _as_float32(name: str, value: Any) -> float:
    """Returns a number as the step computes with it."""
    is_number = isinstance(value, int | float | np.integer | np.floating)
    if isinstance(value, bool) or not is_number:
        raise TypeError(expected(name, value, "a number"))
    if not 0 < value <= _LARGEST or not np.float32(value) > 0:
        raise ValueError(expected(name, value, "positive and finite in float32"))
    return float(np.float32(value))
