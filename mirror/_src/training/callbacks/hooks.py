"""Checks of the methods of callbacks: hooks that do not exist, and hooks of other libraries."""

import difflib
import inspect
from collections.abc import Mapping

from mirror._src.base.other_names import advice

HOOKS: Mapping[str, tuple[str, ...]] = {
    "on_fit_begin": ("fit",),
    "on_epoch_begin": ("fit",),
    "on_step": ("fit",),
    "on_metrics": ("fit", "step", "logs"),
    "on_epoch_end": ("fit", "logs"),
    "on_fit_end": ("fit",),
}
"""The hooks of `Callback` and their parameters."""

_STEP = "on_step(self, fit), after each launch, or on_metrics(self, fit, step, logs)"
_VALIDATION = "on_epoch_end(self, fit, logs): names of validation metrics start with val_"
_ELSEWHERE = {
    # Keras and Transformers
    "on_train_begin": "on_fit_begin(self, fit)",
    "on_train_end": "on_fit_end(self, fit)",
    "on_batch_begin": _STEP,
    "on_batch_end": _STEP,
    "on_step_begin": _STEP,
    "on_step_end": _STEP,
    "on_train_batch_begin": _STEP,
    "on_train_batch_end": _STEP,
    "on_test_begin": _VALIDATION,
    "on_test_end": _VALIDATION,
    "on_test_batch_begin": _VALIDATION,
    "on_test_batch_end": _VALIDATION,
    "on_predict_begin": "code before trainer.predict",
    "on_predict_end": "code after trainer.predict",
    "on_predict_batch_begin": "code before trainer.predict",
    "on_predict_batch_end": "code after trainer.predict",
    # Lightning
    "on_fit_start": "on_fit_begin(self, fit)",
    "on_train_start": "on_fit_begin(self, fit)",
    "on_train_batch_start": _STEP,
    "on_epoch_start": "on_epoch_begin(self, fit)",
    "on_train_epoch_start": "on_epoch_begin(self, fit)",
    "on_train_epoch_end": "on_epoch_end(self, fit, logs)",
    "on_validation_start": _VALIDATION,
    "on_validation_end": _VALIDATION,
    "on_validation_epoch_end": _VALIDATION,
    "on_save_checkpoint": "to_dict(self)",
    "on_load_checkpoint": "from_dict(self, state)",
    "on_exception": "on_fit_end(self, fit), which is also called after an error",
}
# Parameters of hooks of other libraries, in the place where `fit` is passed.
_NOT_A_RUN = {"epoch", "batch", "step", "logs", "trainer", "model", "pl_module"}
_SIMILAR = 0.75


def require_hooks(callback: object) -> None:
    """Rejects a callback with hooks that would not be called, or with other arguments.

    Methods that begin with `on_` are hooks if `Callback` or another library has them, or if their
    names are similar to a hook. A leading underscore marks other methods.

    Raises:
        TypeError: If the callback has such a hook.
    """
    kind = type(callback)
    for name in dir(kind):
        if name.startswith("on_") and name not in HOOKS and callable(getattr(kind, name, None)):
            instead = _ELSEWHERE.get(name) or _similar(name)
            if instead:
                raise TypeError(
                    f"{kind.__name__}.{name} would never be called, because {name} is not a hook "
                    f"of mirror.callbacks.Callback. Use {instead}. If it is not meant as a hook, "
                    f"rename it: _{name}."
                )
    for name, parameters in HOOKS.items():
        _require_signature(callback, name, parameters)


def advice_for(callback: object) -> str:
    """Returns what to use instead of an object that is not a `Callback`."""
    name = callback.__name__ if isinstance(callback, type) else type(callback).__name__
    told = advice().get(("mirror.callbacks", name))
    if told is not None:
        return told
    if callable(callback):
        return "To call a function with the metrics, pass mirror.callbacks.Log(fn)."
    return "Subclass Callback and override the hooks you need."


def _similar(name: str) -> str:
    found = difflib.get_close_matches(name, HOOKS, n=1, cutoff=_SIMILAR)
    return f"{found[0]}(self, {', '.join(HOOKS[found[0]])})" if found else ""


def _require_signature(callback: object, name: str, parameters: tuple[str, ...]) -> None:
    try:
        signature = inspect.signature(getattr(callback, name))
    except (TypeError, ValueError):
        return
    names = list(signature.parameters)
    try:
        signature.bind(*parameters)
        fits = not names or names[0] not in _NOT_A_RUN
    except TypeError:
        fits = False
    if not fits:
        raise TypeError(
            f"{type(callback).__name__}.{name} has the parameters ({', '.join(['self', *names])}), "
            f"but fit calls it with ({', '.join(['self', *parameters])}). `fit` is the run: the "
            "epoch is fit.position.epoch, the step is fit.position.step, the model is "
            "fit.trainer.model."
        )
