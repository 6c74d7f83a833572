"""The dtype in which the layers of a model compute, and `LossScale`, which float16 needs.

Flax's layers have two dtypes: `param_dtype`, in which a parameter is stored, and `dtype`, in which
the layer computes. Parameters and inputs are cast when a layer is called, so that the parameters in
float32 are the ones that the optimizer updates, and there are no copies that could differ.
"""

import contextlib
import dataclasses
import inspect
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, TypeAlias, final, get_args

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen, nnx

from mirror._src.base.errors import counted, expected, nearest, require_int
from mirror._src.base.public_names import set_module
from mirror._src.base.types import Array, PyTree, widened
from mirror._src.inspection.verify import rtol_of

PrecisionName: TypeAlias = Literal["float32", "bfloat16", "float16"]

NAMES: tuple[str, ...] = get_args(PrecisionName)
_CHOICES = "'float32', 'bfloat16', 'float16' or None"

# Names of the same thing in other libraries, for the message.
_OTHER_NAMES = {
    **dict.fromkeys(("bf16", "bf16-mixed", "bf16-true", "mixed_bfloat16", "half_bf16"), "bfloat16"),
    **dict.fromkeys(("fp16", "f16", "16", "16-mixed", "mixed_float16", "half"), "float16"),
    **dict.fromkeys(("fp32", "f32", "32", "32-true", "single", "full", "float"), "float32"),
}

# They store what they compute in the parameters of another layer, which are not to be rounded.
_WEIGHTS = (nnx.SpectralNorm, nnx.WeightNorm, linen.SpectralNorm, linen.WeightNorm)

# The dtype that `set_on` gave to a layer, by the id of the layer.
_given: dict[int, tuple[weakref.ref[Any], Any]] = {}
SCALE, SKIPPED = "loss_scale", "skipped"
"""Names of the metrics."""
LossScaleArgument: TypeAlias = "LossScale | Literal[False] | None"
_LARGEST = float(jnp.finfo(jnp.float32).max)


@final
class Precision:
    """The dtype in which the layers of one model compute.

    Args:
        name: `"float32"`, `"bfloat16"`, `"float16"`, or None to leave the layers as they are.

    Raises:
        TypeError: If `name` is not a string or None.
        ValueError: If it is another string.
    """

    def __init__(self, name: PrecisionName | None) -> None:
        if name is not None and not isinstance(name, str):
            raise TypeError(expected("precision", name, _CHOICES, _line_of(name)))
        if name is not None and name not in NAMES:
            guess = _OTHER_NAMES.get(name.lower())
            fix = f"Did you mean {guess!r}?" if guess else nearest(name, NAMES).strip()
            raise ValueError(expected("precision", name, _CHOICES, fix))
        self.name = name
        self._dtype: Any = None if name is None else getattr(jnp, name)
        self._wraps_linen = self._reaches_nnx = False

    def set_on(self, model: nnx.Module) -> None:
        """Sets the attribute `dtype` of all layers that have one and left it None.

        Linen modules do not change: see `computing`.

        Raises:
            ValueError: If it does not reach a layer, or a layer computes in the precision of
                another trainer. The model is not changed.
        """
        if self._dtype is None:
            return
        modules: dict[Any, Any] = dict(nnx.iter_modules(model))
        layers = {path: module for path, module in modules.items() if _has_dtype(module)}
        self._wraps_linen = any(isinstance(x, nnx.bridge.ToNNX) for x in modules.values())
        others = [layer for layer in layers.values() if _was_given_another(layer, self._dtype)]
        if others:
            theirs = _name(others[0].dtype)
            raise ValueError(
                f"precision={self.name!r} cannot be set on {type(model).__name__}: "
                f"{counted(len(others), 'layer')} of it have dtype={theirs}, which another trainer "
                f"of the same model has set. Create a model for each trainer, or pass "
                f"precision={theirs!r}."
            )
        unset = [layer for layer in layers.values() if layer.dtype is None]
        self._reaches_nnx = bool(unset) or self._has_all(layers.values())
        if not (self._reaches_nnx or self._wraps_linen):
            raise ValueError(self._not_reached(type(model).__name__, layers))
        for layer in unset:
            layer.dtype = self._dtype
            _remember(layer, self._dtype)

    def _has_all(self, layers: Iterable[Any]) -> bool:
        """Whether layers whose dtype is set compute in this precision, or in float32."""
        dtypes = [layer.dtype for layer in layers]
        others = [dtype for dtype in dtypes if not _is(dtype, self._dtype)]
        return len(others) < len(dtypes) and all(_is(dtype, jnp.float32) for dtype in others)

    @contextlib.contextmanager
    def computing(self, what: str = "") -> Iterator[None]:
        """Context manager in which also Linen modules compute in this precision.

        A Linen module creates its layers in each call. A method of a layer whose `dtype` is None is
        called on a copy of the layer that has the same variables, and this `dtype`.

        Args:
            what: Name of the function that is called inside, if it must reach a layer.

        Raises:
            ValueError: If it does not reach a layer.
        """
        if not self._wraps_linen:
            yield
            return
        reached = False

        def call(next_fn: Any, args: Any, kwargs: Any, context: Any) -> Any:
            nonlocal reached
            layer, name = context.module, context.method_name
            # A lifted transformation calls functions on a module that are not its methods.
            if not _has_field(layer) or layer.scope is None or not hasattr(type(layer), name):
                return next_fn(*args, **kwargs)
            reached = reached or layer.dtype is None or _is(layer.dtype, self._dtype)
            if layer.dtype is not None:
                return next_fn(*args, **kwargs)
            # Its carry is float32, and `jax.lax.scan` would reject another dtype of the next one.
            dtype = jnp.float32 if isinstance(layer, linen.SimpleCell) else self._dtype
            copy = layer.clone(parent=layer.scope.rewound(), dtype=dtype)
            return getattr(copy, name)(*args, **kwargs)

        with linen.intercept_methods(call):
            yield
        if what and not reached and not self._reaches_nnx:
            raise ValueError(self._not_reached(f"the Linen modules that {what} calls", {}))

    def _not_reached(self, where: str, layers: dict[Any, Any]) -> str:
        dtype = f"jnp.{self.name}"
        if layers:
            names = {".".join(map(str, path)) or "model": layer for path, layer in layers.items()}
            shown = ", ".join(f"{name}: {_name(layer.dtype)}" for name, layer in names.items())
            return (
                f"precision={self.name!r} does not reach any layer of {where}, whose layers have a "
                f"dtype already ({shown:.300}). Create them without dtype, or omit precision."
            )
        return (
            f"precision={self.name!r} does not reach any layer of {where}: no layer has an "
            "attribute `dtype` that is None, as Flax's layers have. Cast in the model, x = "
            f"x.astype({dtype}) and kernel.astype({dtype}), and omit precision."
        )

    def rtol_of(self, model: nnx.Module) -> float:
        """Returns the relative difference that rounding in this model's layers may cause."""
        return rtol_of(self._dtypes(model))

    def has_float16(self, model: nnx.Module) -> bool:
        """Whether layers compute in float16, or variables are stored in it."""
        stored = [x.dtype for x in jax.tree.leaves(nnx.state(model)) if hasattr(x, "dtype")]
        return any(_is(dtype, jnp.float16) for dtype in [*self._dtypes(model), *stored])

    def _dtypes(self, model: nnx.Module) -> list[Any]:
        modules: dict[Any, Any] = dict(nnx.iter_modules(model))
        layers = [module.dtype for module in modules.values() if _has_dtype(module)]
        return [self._dtype, *layers]


def _has_dtype(module: Any) -> bool:
    if isinstance(module, _WEIGHTS) or not hasattr(module, "dtype"):
        return False
    return not isinstance(inspect.getattr_static(type(module), "dtype", None), property)


def _has_field(module: Any) -> bool:
    fields = {field.name for field in dataclasses.fields(module)}
    return "dtype" in fields and not isinstance(module, _WEIGHTS)


def _remember(layer: Any, dtype: Any) -> None:
    key = id(layer)  # a layer may be a dataclass, which has no hash
    _given[key] = (weakref.ref(layer, lambda _: _given.pop(key, None)), dtype)


def _was_given_another(layer: Any, dtype: Any) -> bool:
    """Whether another precision was set on a layer, which still has it."""
    known, given = _given.get(id(layer), (None, None))
    return known is not None and layer.dtype is given and given is not dtype


def _is(dtype: Any, wanted: Any) -> bool:
    try:
        return dtype is not None and bool(jnp.dtype(dtype) == jnp.dtype(wanted))
    except TypeError:  # an attribute of the user's that has this name
        return False


def _name(dtype: Any) -> str:
    try:
        return "None" if dtype is None else str(jnp.dtype(dtype))
    except TypeError:
        return repr(dtype)


def _line_of(value: Any) -> str:
    name = next((name for name in NAMES if _is(value, getattr(jnp, name))), "bfloat16")
    return f"Write precision={name!r}."


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
