"""`strategy.verify` of a Keras model: its training step on n devices, and on one."""

import itertools
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mirror._src.base.errors import expected
from mirror._src.base.keras_library import is_built, state_variables, variables_of
from mirror._src.devices.replicas import ReplicaDevices
from mirror._src.devices.transfer import NoMesh
from mirror._src.inspection.verify import (
    Difference,
    VerifyReport,
    checked,
    nudged,
    relative_difference,
    rows_of,
    rtol_of,
)
from mirror._src.keras.owners import Owner, owner_of
from mirror._src.keras.precision import compute_dtypes
from mirror._src.keras.step_function import StepFunction, assign

_Outcome = tuple[dict[str, Any], list[np.ndarray]]
"""The logs of a step, and the variables after it."""

_CAUSES = (
    "The step of a Keras model sees the whole batch on any number of devices, so that only the "
    "order of additions differs. Common causes: gradients in float16 overflow on one device and "
    "not in the sum over all, so that the loss scale skips an update; a custom layer reads "
    "something else on each call."
)


def verify_model(
    model: Any,
    scope: AbstractContextManager[Any],
    single: ReplicaDevices,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    rtol: float | None,
) -> VerifyReport:
    """Implements `Strategy.verify` for a Keras model, which keeps its state.

    Raises:
        ValueError: If the model is not compiled or not built, or its class makes the function of
            its training step.
        TypeError: If the arguments are not a global batch.
    """
    if kwargs or not 2 <= len(args) <= 3:
        what = "a global batch: (x, y) or (x, y, sample_weight)"
        raise TypeError(expected("args", [*args, *kwargs], what, "strategy.verify(model, (x, y))."))
    missing = "built" if model.compiled else "compiled"
    # The layers of a class without a method `build` are not built by `model.build`.
    if not (model.compiled and is_built(model)):
        raise ValueError(
            f"The Keras model {model.name!r} is not {missing} yet. Call model.compile(...) and "
            "model.build(input_shape), or model(x) if its class has no method build, before "
            "strategy.verify."
        )
    with scope:
        owner = owner_of(model)
        assert owner is not None
        if not model.optimizer.built:
            model.optimizer.build(model.trainable_variables)
        _require_step(model)
        variables = variables_of(model)
        # Metrics are of an epoch in progress. The step may create more, which start again.
        everything = [*variables, *model.metrics_variables]
        saved = [jnp.copy(variable.value) for variable in everything]
    before = list(map(np.asarray, saved[: len(variables)]))

    def run_one(signs: np.random.Generator | None) -> _Outcome:
        values = map(jnp.copy, saved)
        with NoMesh():
            assign(everything, values if signs is None else (nudged(signs, x) for x in values))
            model.reset_metrics()
            return _on_one_device(model, single, args, variables)

    def compare(outcome: _Outcome, other: _Outcome) -> Iterator[Difference]:
        for name, value in other[0].items():
            distance = relative_difference(np.asarray(outcome[0][name]), value)
            yield Difference(f"logs[{name!r}]", distance)
        for variable, new, wanted, old in zip(variables, outcome[1], other[1], before, strict=True):
            if not (np.array_equal(new, old) and np.array_equal(wanted, old)):
                yield Difference(variable.path, relative_difference(new, wanted))

    rtol = rtol_of(compute_dtypes(model)) if rtol is None else rtol
    try:
        with scope:
            logs = model.train_on_batch(*args, return_dict=True)
        after = [np.array(variable.value) for variable in variables]
        rows = rows_of(rtol, compare, (logs, after), run_one)
    finally:
        with NoMesh():
            model.reset_metrics()
            assign(everything, saved)
    return checked(VerifyReport(len(owner.replicas), rtol, rows), _CAUSES)


def _require_step(model: Any) -> None:
    model.make_train_function()
    if not isinstance(model.train_function, StepFunction):
        raise ValueError(
            f"The class of the Keras model {model.name!r}, {type(model).__name__}, overrides "
            "make_train_function, so that its step cannot run on one device. Remove it, or keep "
            "what super().make_train_function(force) sets as self.train_function."
        )


def _on_one_device(
    model: Any, single: ReplicaDevices, args: Sequence[Any], variables: Sequence[Any]
) -> _Outcome:
    """Returns the logs of a training step on one device, and the variables after it."""
    step = StepFunction(model.train_function.made, Owner("one device", single), model, "train")
    groups = state_variables(model, "train")
    state = tuple([variable.value for variable in group] for group in groups)
    logs, state = step(state, iter([(*args, None)[:3]]))
    assign(itertools.chain(*groups), itertools.chain(*state))
    # Without the dicts inside, as `train_on_batch` returns them.
    leaves: Any = jax.tree.leaves_with_path(logs)
    flat = {path[-1].key: np.asarray(value) for path, value in leaves}
    return flat, [np.array(variable.value) for variable in variables]
