"""The dtype in which the layers of a model compute; their parameters stay as they are stored.

Flax's layers have two dtypes: `param_dtype`, in which a parameter is stored, and `dtype`, in which
the layer computes. Parameters and inputs are cast when a layer is called, so that the parameters in
float32 are the ones that the optimizer updates, and there are no copies that could differ.
"""

import contextlib
import dataclasses
import inspect
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, Literal, TypeAlias, final, get_args

import jax
import jax.numpy as jnp
from flax import linen, nnx

from mirror._src.base.errors import counted, expected, nearest
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


def is_half(dtype: Any) -> bool:
    """Whether a dtype is bfloat16, float16 or a smaller float."""
    return jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize < 4


def widened(x: Any) -> Any:
    """Returns an array at least in float32."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


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
