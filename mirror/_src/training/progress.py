"""The progress of a training, and its metrics: what a checkpoint stores besides the arrays."""

import copy
import json
import math
import secrets
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, final

import jax

from mirror._src.base import interrupts
from mirror._src.base.errors import counted, require_int
from mirror._src.base.naming import warn_user
from mirror._src.devices.launch import wait
from mirror._src.devices.replicas import ReplicaDevices
from mirror._src.devices.settings import get_num_cpu_threads
from mirror._src.training.history import History
from mirror._src.training.objective import LOSS, Sums, number_of

MOST_RUNNING = 8
"""Number of launches that may run while the host reads the metrics of older ones."""


class StepMetrics(NamedTuple):
    """The metrics of one launch.

    Attributes:
        step: Last step of the launch.
        means: Means over the examples of the launch.
        empty: Names of the means that are NaN because their weights add up to 0.
    """

    step: int
    means: dict[str, float]
    empty: frozenset[str] = frozenset()


@final
@dataclass(eq=False)
class MetricAccumulator:
    """Adds up the sums of launches, in order: integers exactly, floats in float64.

    Attributes:
        totals: Sums of the losses and metrics collected so far.
        count: Number of examples collected so far.
        weights: Sums of the weights of `Weighted` losses and metrics.
    """

    totals: dict[str, float] = field(default_factory=dict)
    count: int = 0
    weights: dict[str, float] = field(default_factory=dict)
    _pending: deque[tuple[int, Sums, Any]] = field(default_factory=deque, init=False)

    def add(self, step: int, sums: Sums, before: Any = None) -> None:
        """Adds the sums of the launch that ended with `step`, which may still be running.

        Args:
            step: Last step of the launch.
            sums: Its sums.
            before: What `drop_failed` returns if the launch fails.
        """
        self._pending.append((step, sums, before))
        leaves = jax.tree.leaves(sums)
        if _is_on_accelerator(leaves[0]):  # every read would wait for a copy of its own
            for leaf in leaves:
                leaf.copy_to_host_async()

    def drop_failed(self) -> Any:
        """Drops the first launch that failed and all later ones.

        Returns:
            The `before` of the first launch that failed, or None.
        """
        for index, (_, sums, before) in enumerate(self._pending):
            try:
                _read(sums)
            except Exception:
                while len(self._pending) > index:
                    self._pending.pop()
                return before
        return None

    def collect(
        self, *, running: int = 0, then: Callable[[StepMetrics], Any] = lambda _: None
    ) -> None:
        """Collects the launches added so far, except for the last few.

        Args:
            running: Number of last launches not to wait for.
            then: Called with the metrics of each launch. No interrupt prevents the call.
        """
        while len(self._pending) > running:
            step, sums, _ = self._pending[0]
            totals, count, weights, _ = _read(sums)
            with interrupts.deferred():
                self._pending.popleft()  # not if it failed
                unequal = self._unequal(totals, weights)
                _add(self.totals, totals | unequal)
                _add(self.weights, weights)
                self.count += count
                empty = frozenset(n for n in weights if not totals[n] and not weights[n])
                # It may collect the others.
                then(StepMetrics(step, means(totals, count, weights), empty))

    def _unequal(self, totals: dict[str, float], weights: dict[str, float]) -> dict[str, float]:
        """Returns NaN for metrics that a part of the examples lacks, or weights differently.

        A training that is restored within an epoch may have other metrics than before.
        """
        if not self.count:
            return {}
        names = (totals.keys() ^ self.totals.keys()) | (weights.keys() ^ self.weights.keys())
        return dict.fromkeys(names, math.nan)

    @property
    def means(self) -> dict[str, float]:
        """The means over all examples collected so far.

        NaN for a metric that was not computed, in the same way, for all of them.
        """
        return means(self.totals, self.count, self.weights)

    def to_dict(self) -> dict[str, Any]:
        """Returns the state for a checkpoint."""
        totals, weights = dict(self.totals), dict(self.weights)
        return {"totals": totals, "count": self.count, "weights": weights}

    @classmethod
    def from_dict(cls, state: dict[str, Any]) -> "MetricAccumulator":
        """Returns the meter of a `to_dict` result.

        Raises:
            TypeError: If it is not the result of `to_dict`.
        """
        meter = cls(**state)
        numbers = [meter.count, *meter.totals.values(), *meter.weights.values()]
        if not all(type(number) in (int, float) for number in numbers):
            raise TypeError(f"expected numbers, got {state}")
        return meter


def means(totals: dict[str, float], count: int, weights: dict[str, float]) -> dict[str, float]:
    """Divides sums by their weights, or by the number of examples; NaN if that is 0."""
    divisors = dict.fromkeys(totals, count) | weights
    return {
        name: totals[name] / divisors[name] if divisors[name] else math.nan
        for name in in_order(totals)
    }


def in_order(names: Iterable[str]) -> list[str]:
    """Returns the names of metrics with the loss first; JAX has sorted them."""
    return sorted(names, key=lambda name: name != LOSS)


def format_metrics(logs: Mapping[str, float]) -> str:
    """Formats metrics: `loss 0.1234, accuracy 0.9876`."""
    return ", ".join(f"{name} {value:.4g}" for name, value in logs.items())


def _is_on_accelerator(leaf: Any) -> bool:
    is_on_device = hasattr(leaf, "devices")  # not an array of NumPy
    return is_on_device and any(device.platform != "cpu" for device in leaf.devices())


def _read(sums: Sums) -> Sums:
    """Returns the sums as numbers of Python, when they have been computed."""
    tree: Any
    leaves, tree = jax.tree.flatten(sums)
    for leaf in leaves:
        if isinstance(leaf, jax.Array):  # not an array of NumPy
            wait(leaf)
    return tree.unflatten(map(number_of, leaves))


def _add(sums: dict[str, float], more: dict[str, float]) -> None:
    for name, number in more.items():
        sums[name] = sums.get(name, 0) + number


_COUNTS = ("step", "epoch", "epoch_step", "passes", "samples")
_MOST_COUNT = 2**63


class Position:
    """The progress of a training: everything a checkpoint stores besides the arrays.

    During `fit`, only its `FitLoop` changes the position; all others read it.

    Attributes:
        step: Number of updates, over all epochs.
        epoch: The current epoch, from 0.
        epoch_step: Number of updates in the current epoch.
        passes: Number of complete passes over the data.
        samples: Number of examples of the current pass that have been used.
        meter: Metrics of the current epoch.
        history: Metrics of the completed epochs.
        callbacks: States of the callbacks, by name.
        bits: With `replicas=`, what else decides the bits of the weights; see `bits_of`.
        weak: Names of the weakly typed arrays of a checkpoint; None for checkpoints without them.
        data: The rows of in-memory data and their order; empty for other data.
        loader: States of the data loader after these examples, one per process with a local input;
            None if it has none. Only the chief knows the states of others.
        training: Random id. A training that is restored has a new one.
        iterator: Function that returns the iterator that the pass reads, or None. Not in
            checkpoints.
        found: For `CheckpointStore`, by directory. Not in checkpoints.
    """

    def __init__(self) -> None:
        self.step = 0
        self.bits: dict[str, str] = {}
        self.weak: list[str] | None = None
        self.begin(0)

    def begin(self, epoch: int) -> None:
        """Starts a new training of the same model."""
        self.epoch = self.passes = epoch
        self.epoch_step = self.samples = 0
        self.data = ""
        self.loader: Sequence[Any] | None = None
        self.iterator: Callable[[], Any] = lambda: None
        self.training, self.found = secrets.token_hex(8), dict[Path, set[int]]()
        self.meter, self.history = MetricAccumulator(), History()
        self.callbacks: dict[str, Any] = {}

    def advance(
        self, num_steps: int, num_examples: int, sums: Sums, loader: Sequence[Any] | None = None
    ) -> None:
        """Counts a launch, after which the data loader has a state."""
        before = {name: getattr(self, name) for name in (*_COUNTS, "loader")}
        self.loader = loader
        self.step += num_steps
        self.epoch_step += num_steps
        self.samples += num_examples
        self.meter.add(self.step, sums, before)

    def read_from(self, data: str) -> None:
        """Notes the data that the next passes read.

        Raises:
            ValueError: If the rest of this pass would be rows in another order.
        """
        if self.samples and data and self.data not in ("", data):
            raise ValueError(
                f"The epoch to resume has used {counted(self.samples, 'example')} of {self.data}, "
                f"but the data are {data}, so that some examples would be used twice, and others "
                "not at all. Pass the same data, seed, shuffle and validation_split, or start the "
                f"epoch again: trainer.fit(..., initial_epoch={self.epoch})."
            )
        self.data = data

    def num_skipped(self, iterator: Any) -> int:
        """Returns the number of examples that the next pass skips, and notes what it reads.

        An iterator that this pass has read before does not yield them again. A new one does, and so
        do other data, for which the argument is None.
        """
        before = self.iterator()
        try:
            self.iterator = weakref.ref(iterator)
        except TypeError:  # None, and iterators of Python's containers
            self.iterator = lambda: iterator
        if iterator is None or before is not iterator or not self.samples or self.loader:
            return self.samples
        warn_user(
            f"Training resumes after {counted(self.samples, 'example')} of this epoch, with the "
            "iterator that has yielded them. It continues with its next batch; batches that were "
            "loaded ahead are lost. Pass an object that can be iterated repeatedly to use all."
        )
        return 0

    def drop_failed(self) -> None:
        """Returns to the position before the first launch that failed, if one has."""
        for name, count in (self.meter.drop_failed() or {}).items():
            setattr(self, name, count)

    def next_epoch(self) -> None:
        """Counts an epoch as complete."""
        self.epoch += 1
        self.epoch_step = 0
        self.meter = MetricAccumulator()

    def next_pass(self) -> None:
        """Counts a pass over the data as complete."""
        self.passes += 1
        self.samples = 0
        self.loader = None

    def to_dict(self) -> dict[str, Any]:
        """Returns the position as JSON.

        Raises:
            TypeError: If the state of a callback is not JSON.
        """
        for name, state in self.callbacks.items():
            _require_json(name, state)
        state = {**vars(self), "meter": self.meter.to_dict(), "history": self.history.to_dict()}
        del state["iterator"], state["found"]
        return state

    @classmethod
    def from_dict(cls, state: dict[str, Any]) -> "Position":
        """Returns the position of a `to_dict` result.

        Raises:
            ValueError: If it is not the result of `to_dict`.
        """
        position, state = cls(), {"loader": None, "data": "", "weak": None, **state}
        for name in _COUNTS:
            count = state.get(name)
            if type(count) is not int or not 0 <= count < _MOST_COUNT:
                raise ValueError(f"{name} of its position is {count!r}, not a number of {name}")
            setattr(position, name, count)
        for name, read in _PARTS.items():
            try:
                setattr(position, name, read(state[name]))
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                raise ValueError(f"the {name} of its position is invalid: {error!r}") from error
        return position


def bits_of(replicas: ReplicaDevices) -> dict[str, str]:
    """Returns what decides the bits of a training with a fixed number of replicas; else nothing."""
    if not replicas.in_turn:
        return {}
    device = replicas.devices[0]
    facts = {"replicas": str(len(replicas)), "JAX": jax.__version__, "device": device.device_kind}
    if device.platform == "cpu":
        facts["threads of host devices"] = str(get_num_cpu_threads())
    return facts


def warn_of_other_bits(saved: Mapping[str, str], now: Mapping[str, str]) -> None:
    """Warns if a training with a fixed number of replicas continues with other bits."""
    changed = [
        f"{name}: {value}, now {now.get(name, 'not fixed')}"
        for name, value in saved.items()
        if now.get(name) != value
    ]
    if changed:
        warn_user(
            "Training continues with other bits than before the checkpoint, because these have "
            f"changed: {'; '.join(changed)}."
        )


def _strings(facts: dict[str, str]) -> dict[str, str]:
    if not all(isinstance(fact, str) for fact in facts.values()):
        raise ValueError("a value is not a string")
    return dict(facts)


def _require_json(name: str, state: Any) -> None:
    why = ""
    try:
        json.dumps(state)
    except (TypeError, ValueError) as error:
        why = f" ({error})"
    if why or not isinstance(state, dict):
        raise TypeError(
            f"to_dict() of {name} returned {state!r:.200}, which cannot be restored from a "
            f"checkpoint{why}. Return a dict of numbers, strings, lists, dicts and None."
        )


def _callbacks(states: dict[str, Any]) -> dict[str, Any]:
    if not all(isinstance(state, dict) for state in states.values()):
        raise ValueError("a state is not a dict")
    return dict(states)


def _loader(states: list[Any] | None) -> list[Any] | None:
    return states and [
        {"type": str(each["type"]), "state": each["state"], "full": _full(each.get("full", 0))}
        for each in states
    ]


def _full(size: Any) -> int:
    if type(size) is not int or not 0 <= size < _MOST_COUNT:
        raise ValueError(f"{size!r} is not a number of examples")
    return size


_PARTS: dict[str, Callable[[Any], Any]] = {
    "meter": MetricAccumulator.from_dict,
    "history": History.from_dict,
    "callbacks": _callbacks,
    "bits": _strings,
    "weak": lambda names: names and list(map(str, names)),
    "data": str,
    "loader": _loader,
}


def starting_position(
    position: Position, resumes: bool, epochs: int, initial_epoch: int | None
) -> Position:
    """Returns the position to start from. The trainer's own stays unchanged until `fit` starts.

    Args:
        position: The trainer's own.
        resumes: Whether to resume from it, unless there is an `initial_epoch`.
        epochs: As for `Trainer.fit`.
        initial_epoch: As for `Trainer.fit`.

    Raises:
        TypeError: If `epochs` or `initial_epoch` is not an integer.
        ValueError: If one of them is out of range, or there would be nothing to train.
    """
    fix = "For example: trainer.fit(data, epochs=10, validation_data=validation_data)."
    require_int("epochs", epochs, fix=fix)
    position = copy.copy(position)
    if initial_epoch is not None:
        require_int("initial_epoch", initial_epoch, least=0)
        if initial_epoch >= epochs:
            raise ValueError(
                f"`initial_epoch` must be less than `epochs`, got initial_epoch={initial_epoch} and"
                f" epochs={epochs}. `epochs` is the epoch to stop at, not a number to add."
            )
        position.begin(int(initial_epoch))
    elif not resumes:
        position.begin(0)
    return position
