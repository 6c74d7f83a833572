"""Explains why a step could not be traced, in the words of the step instead of JAX and Flax."""

import inspect
import itertools
import linecache
import re
from collections.abc import Callable, Sequence
from traceback import walk_tb
from types import CodeType, FrameType
from typing import Any, NamedTuple

import flax
import jax
import numpy as np
from flax import nnx
from jax import errors

from mirror._src.base.errors import counted, describe
from mirror._src.base.naming import code_of, name_of, parameter_names, signature_of
from mirror._src.base.tracebacks import is_own, is_users, place, users_function
from mirror._src.base.types import ARRAY_LIKE
from mirror._src.base.unknown_names import advice
from mirror._src.engine.arguments import Call, ObjectPlaceholder
from mirror._src.engine.closures import captured_message, stale_message
from mirror._src.engine.mesh import failed_mapping_message, unbound_axis_message
from mirror._src.engine.per_replica import PerReplica

_MOST_ITEMS = 6
_OF_LIBRARIES = (jax.core.Tracer, nnx.Optimizer)
_ANNOTATED = (TypeError, ValueError, LookupError, AttributeError)

_RETURN_IT = (
    "Return the array from the step, and convert the result: float(strategy.run({step}, args)). "
    'To print it in the step, use jax.debug.print("{{}}", x).'
)
_KEEP_IT = 'Return the array without float(). To print it, use jax.debug.print("{{}}", x).'
_SELECT = (
    "Use jnp.where(condition, a, b) or jax.lax.cond(condition, f, g, x) instead of if, and "
    "jax.lax.while_loop instead of while."
)
_STATIC_SIZE = (
    "Take sizes from x.shape or len(x), or bind them before the loop: "
    "{step} = functools.partial({step}, n=3). Loop over a traced count with jax.lax.fori_loop."
)
_USE_JNP = "Use jax.numpy instead of numpy in a step: import jax.numpy as jnp; jnp.mean(x)."
_MASK = "Use jnp.where(mask, x, 0), or a reduction with a mask: x.mean(where=mask)."
_PRINT = 'Print with jax.debug.print("{{x:.3f}}", x=x), or return it and print the result.'


class _Use(NamedTuple):
    """An operation that needs the numbers of a traced array, and what to do instead."""

    kind: type[Exception]
    text: str
    needed_for: str
    fix: str


# The first one that matches counts: some of JAX's classes derive from others.
_CONVERSIONS = (
    _Use(TypeError, "__format__", "formats a traced array as text", _PRINT),
    _Use(errors.TracerBoolConversionError, "", "takes a branch on a traced array", _SELECT),
    _Use(errors.NonConcreteBooleanIndexError, "", "selects elements by a traced mask", _MASK),
    _Use(errors.TracerArrayConversionError, "", "passes a traced array to NumPy", _USE_JNP),
    _Use(errors.TracerIntegerConversionError, "", "uses a traced array as an int", _STATIC_SIZE),
    _Use(
        ValueError, "Non-hashable static", "makes a traced array static in a jax.jit", _STATIC_SIZE
    ),
    _Use(TypeError, "Shapes must be 1D sequences", "uses a traced array as a size", _STATIC_SIZE),
    _Use(errors.ConcretizationTypeError, "", "converts a traced array to a number", _RETURN_IT),
)


def explain_failed_trace(call: Call, run_code: CodeType, error: Exception, axis_name: str) -> None:
    """Raises an error in the words of the step in place of an error of JAX, Flax or Python.

    Errors of the step itself are left alone, except that a note lists the arguments. The search for
    an explanation visits the user's objects, which can fail in any way: the error of the step then
    stays as it is.

    Args:
        call: The call that was traced.
        run_code: Code of the function that calls the step.
        error: Exception of the trace.
        axis_name: Name of the replica axis.

    Raises:
        Exception: The same exception with another message, or a `ValueError` or `TypeError`.
    """
    try:
        explained = _explanation(call, run_code, error, axis_name)
    except Exception:
        return
    if explained is not None:
        raise explained.with_traceback(error.__traceback__) from None


def _explanation(
    call: Call, run_code: CodeType, error: Exception, axis_name: str
) -> Exception | None:
    """Returns the error that replaces `error`, or None; may change the message of `error`."""
    fn = call.fn
    frames = _frames_inside(run_code, error)
    if isinstance(error, NameError) and (message := unbound_axis_message(fn, error, axis_name)):
        return ValueError(message)
    if isinstance(error, ValueError) and (message := failed_mapping_message(fn, error)):
        return ValueError(message)
    if isinstance(error, TypeError) and (message := _mismatch_message(call)):
        return TypeError(message)
    if _is_of_trace_level(error) and (message := captured_message(fn, frames)):
        return ValueError(message)
    if isinstance(error, errors.UnexpectedTracerError):
        stale = [v for f in frames for v in f.f_locals.values() if isinstance(v, jax.core.Tracer)]
        if stale:
            error.args = (stale_message(fn, stale[0]),)
        return None
    if isinstance(error, AssertionError) and str(error).startswith("ManualAxisType("):
        return ValueError(
            f"{name_of(fn)} uses jax.lax.pcast{_user_line(error)}, which marks values as varying "
            "in jax.shard_map. In a step, every value may vary, and gradients are of one replica. "
            'Remove the call, and all-reduce: mirror.all_reduce("mean", grads).'
        )
    conversion = _conversion(error)
    if conversion is not None:
        error.args = (_conversion_message(call, conversion, error),)
    elif isinstance(error, AttributeError) and (told := _told(error)) is not None:
        what = f"{name_of(fn)} uses {error.name!r} of {describe(error.obj)}{_user_line(error)}"
        return AttributeError(f"{what}, which does not have it. {told}")
    elif isinstance(error, _ANNOTATED) and _is_of_users_step(fn, error):
        error.add_note(f"{name_of(fn)} was traced with {_received(call)}.")
    return None


def _told(error: AttributeError) -> str | None:
    """Returns what to write for a name of PyTorch that arrays and optimizers do not have."""
    name = error.name or ""
    return advice().get(("in a step", name)) if isinstance(error.obj, _OF_LIBRARIES) else None


def _is_of_trace_level(error: Exception) -> bool:
    """Whether Flax stopped the step because it uses an object from outside the trace.

    By the text: JAX removes the frames of libraries, so that the innermost one is the user's.
    """
    if isinstance(error, flax.errors.TraceContextError):
        return True
    starts = ("Cannot extract graph node from different", "Cannot mutate", "Trying to extract")
    return str(error).startswith(starts) and "trace level" in str(error)


def _frames_inside(run_code: CodeType, error: Exception) -> list[FrameType]:
    """Returns the frames of the traceback inside the step that are not a library's."""
    frames = [frame for frame, _ in walk_tb(error.__traceback__)]
    outside = itertools.takewhile(lambda frame: frame.f_code is not run_code, frames)
    inside = frames[len(list(outside)) + 1 :]
    return [frame for frame in inside if is_users(frame.f_code.co_filename)]


def _is_of_users_step(fn: Callable[..., Any], error: Exception) -> bool:
    """Whether the user wrote the step, and mirror, whose messages name the values, raised not."""
    code = code_of(fn)
    files = [frame.f_code.co_filename for frame, _ in walk_tb(error.__traceback__)]
    return code is not None and is_users(code.co_filename) and not is_own(files[-1])


def _mismatch_message(call: Call) -> str | None:
    """Returns the message for a call whose arguments do not fit the parameters of the step."""
    args, kwargs = call.tree
    try:
        signature = inspect.signature(call.fn)
    except (TypeError, ValueError):
        return None
    try:
        signature.bind(*args, **kwargs)
    except TypeError as mismatch:
        name = name_of(call.fn)
        count = counted(len(args) + len(kwargs), "argument")
        received = _received(call)
        shown = f": {received}" if received else ""
        names = parameter_names(call.fn)
        wanted = ", ".join(names) + ("," if len(names) == 1 else "")
        return (
            f"strategy.run called {name}{signature_of(call.fn)} with {count}{shown}; Python "
            f"says: {mismatch}. Pass one value for every parameter: strategy.run({name}, "
            f"({wanted}))."
        )
    return None


def _received(call: Call) -> str:
    """Returns the arguments as the step receives them, such as `batch = float32[2,3]`."""
    args, kwargs = call.tree
    names = parameter_names(call.fn)
    values = [_shown(value, call.objects) for value in args]
    named = [f"{names[i]} = {v}" if i < len(names) else v for i, v in enumerate(values)]
    return ", ".join([*named, *(f"{k} = {_shown(v, call.objects)}" for k, v in kwargs.items())])


def _shown(value: Any, objects: Sequence[Any]) -> str:
    """Returns the type of an argument: the shape on one replica, the items of containers."""
    if isinstance(value, ObjectPlaceholder):
        return type(objects[value.number]).__name__
    if isinstance(value, PerReplica):
        return _type(value.shapes[0], value.dtype)
    if isinstance(value, dict):
        items = [f"{key!r}: {_shown(item, objects)}" for key, item in value.items()]
        return "{" + _joined(items) + "}"
    if type(value) in (list, tuple):
        inside = _joined([_shown(item, objects) for item in value])
        comma = "," if len(value) == 1 and isinstance(value, tuple) else ""
        return f"[{inside}]" if isinstance(value, list) else f"({inside}{comma})"
    if isinstance(value, jax.Array | np.ndarray):
        return _type(value.shape, value.dtype)
    return describe(value) if isinstance(value, ARRAY_LIKE) else type(value).__name__


def _type(shape: Sequence[int], dtype: Any) -> str:
    """Returns the type of an array in the step, where float64 is float32 by default."""
    if not jax.dtypes.issubdtype(dtype, jax.dtypes.extended):
        dtype = jax.dtypes.canonicalize_dtype(dtype)
    return describe(jax.ShapeDtypeStruct(tuple(shape), dtype))


def _joined(items: list[str]) -> str:
    return ", ".join(items[:_MOST_ITEMS] + (["..."] if len(items) > _MOST_ITEMS else []))


def _conversion(error: Exception) -> _Use | None:
    text = str(error)
    for each in _CONVERSIONS:
        is_certain = each.kind is not TypeError or "Tracer" in text
        if is_certain and isinstance(error, each.kind) and each.text in text:
            return each
    return None


def _conversion_message(call: Call, conversion: _Use, error: Exception) -> str:
    user = users_function(call.fn)
    text, name, fix = str(error), name_of(user), conversion.fix
    if user is not call.fn and fix is _RETURN_IT:
        fix = _KEEP_IT
    found = re.search(r"\b((?:float|int|uint|bool|complex|bfloat)\w*\[[\d,]*\])", text)
    operation = conversion.needed_for
    if found is not None:
        operation = operation.replace("traced array", f"traced {found[1]}")
    depends = re.search(r"depends on the values? of the arguments? (.+?)\.(?:\s|$)", text)
    source = f"; the value depends on {_inputs(call, depends[1])}" if depends is not None else ""
    where = _user_line(error)
    return (
        f"{name} {operation}{where}{source}. A step is compiled before it runs: its arrays have "
        f"shapes and dtypes, but no values. {fix.format(step=name)}"
    )


def _inputs(call: Call, text: str) -> str:
    """Returns the user's names for `args[0] and args[1]` of the traced function."""
    names = call.input_names
    positions = [int(number) for number in re.findall(r"\bargs\[(\d+)\]", text)]
    if not positions or max(positions) >= len(names):
        return text
    return _joined([names[i] for i in positions])


def _user_line(error: Exception) -> str:
    """Returns ` in `x = float(loss)` (train.py:12)`, the innermost line of the user, or ""."""
    line = ""
    for frame, number in walk_tb(error.__traceback__):
        filename = frame.f_code.co_filename
        if is_users(filename):
            text, where = linecache.getline(filename, number).strip(), place(filename, number)
            line = f" in `{text}` ({where})" if text else f" ({where})"
    return line
