"""`Throughput`: examples and operations per second, and the share of the time spent in steps."""

from typing import Any, ClassVar, final

from mirror._src.base import clock
from mirror._src.base.errors import expected
from mirror._src.base.modules import set_module
from mirror._src.training.callbacks.callback import Callback
from mirror._src.training.loop import FitLoop
from mirror._src.training.objective import LOSS
from mirror._src.training.runners import flops_of, local_strategy

# Tera-operations per second of dense products in bfloat16, or float16 on the two oldest GPUs, from
# NVIDIA's data sheets. The first name that is in JAX's `device_kind` counts.
_TERA = {
    **{"B200": 2250, "H200": 989, "H100 PCIe": 756, "H100": 989, "A100": 312},
    **{"L40S": 362, "L4": 121, "V100": 125, "T4": 65},
}


def peak_of(kind: str) -> float | None:
    """Returns the most operations per second of a device, or None if it is unknown.

    >>> peak_of("NVIDIA H100 80GB HBM3"), peak_of("NVIDIA A1000"), peak_of("cpu")
    (989000000000000.0, None, None)
    """
    words = f" {kind.replace('-', ' ')} "
    return next((1e12 * tera for name, tera in _TERA.items() if f" {name} " in words), None)


@set_module("mirror.callbacks")
@final
class Throughput(Callback):
    """Adds the speed of the training to the metrics of each epoch.

    It only reads the clock, and once per `fit` XLA's analysis of the step.

    | metric | meaning |
    | --- | --- |
    | `examples_per_sec` | examples of all replicas per second of training steps |
    | `weights_per_sec` | weights of a `mirror.Weighted` loss per second, such as tokens |
    | `flops_per_sec` | floating-point operations of all devices per second, as XLA counts them |
    | `peak_share` | their share of what the devices can do at most |
    | `goodput` | share of the time of `fit` so far that was spent in training steps |

    Steps include waiting for data, but neither the compilation of the first step nor validation and
    callbacks at the end of an epoch. XLA counts the body of a loop once: there is no
    `flops_per_sec` for a step with `jax.lax.scan` or `while_loop`, `accumulate_steps` or
    `steps_per_execution`, nor for a staged step and steps on parameter servers.

    Args:
        peak_flops: The most operations per second of one device, for `peak_share`. Defaults to the
            tensor cores' figure for bfloat16, on NVIDIA's data center GPUs from T4 to B200.

    Raises:
        TypeError: If `peak_flops` is not a number.
        ValueError: If it is not positive.

    >>> history = trainer.fit(data, callbacks=Throughput(), progress=False)
    >>> sorted(history)
    ['examples_per_sec', 'flops_per_sec', 'goodput', 'loss']
    """

    adds: ClassVar[tuple[str, ...]] = ("examples_", "weights_", "flops_", "peak_share", "goodput")

    def __init__(self, peak_flops: float | None = None) -> None:
        if peak_flops is not None:
            fix = "For example peak_flops=989e12, or omit it."
            if isinstance(peak_flops, bool) or not isinstance(peak_flops, int | float):
                raise TypeError(expected("peak_flops", peak_flops, "a number", fix))
            if not peak_flops > 0:
                raise ValueError(expected("peak_flops", peak_flops, "positive", fix))
        self._peak = peak_flops

    def on_fit_begin(self, fit: FitLoop) -> None:  # noqa: ARG002
        """Starts the clock of the run."""
        self._began, self._in_steps = clock.now(), 0.0
        self._compiled = self._end = 0.0
        self._flops: float | None = None

    def on_epoch_begin(self, fit: FitLoop) -> None:
        """Notes where the epoch starts."""
        self._first = fit.position.step
        self._before = self._after = _amounts(fit)

    def on_step(self, fit: FitLoop) -> None:  # noqa: ARG002
        """Notes when the first step has been compiled."""
        self._compiled = self._compiled or clock.now()

    def on_metrics(self, fit: FitLoop, step: int, logs: dict[str, float]) -> None:  # noqa: ARG002
        """Notes when the last step of the epoch has ended."""
        self._end, self._after = clock.now(), _amounts(fit)

    def on_epoch_end(self, fit: FitLoop, logs: dict[str, float]) -> None:
        """Adds the metrics."""
        seconds = self._end - max(self._compiled, fit.steps_began)
        if seconds <= 0:
            return
        self._in_steps += seconds
        for name, amount in self._after.items():
            logs[f"{name}_per_sec"] = (amount - self._before.get(name, 0)) / seconds
        if self._flops is None:
            self._flops = flops_of(fit._runner, fit.last_batch)
        if self._flops:
            devices = list(dict.fromkeys(local_strategy(fit.trainer.strategy).devices))
            rate = self._flops * (fit.position.step - self._first) / seconds
            logs["flops_per_sec"] = rate * len(devices)
            peak = self._peak or peak_of(devices[0].device_kind)
            if peak is not None:
                logs["peak_share"] = rate / peak
        logs["goodput"] = self._in_steps / (clock.now() - self._began)


def _amounts(fit: FitLoop) -> dict[str, Any]:
    """Returns the examples and the weights of the epoch whose metrics have arrived."""
    meter = fit.position.meter
    weights = {"weights": meter.weights[LOSS]} if LOSS in meter.weights else {}
    return {"examples": meter.count, **weights}
