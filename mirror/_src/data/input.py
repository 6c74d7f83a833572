"""The rows of the global batches that a process reads: by default all, compared with the others."""

import abc
import contextlib
import itertools
import json
import os
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar, final

import jax
import numpy as np

from mirror._src.base.errors import ReplicaDivergenceError, describe
from mirror._src.base.foreign_arrays import to_array
from mirror._src.base.naming import keys, warn_user
from mirror._src.base.tracebacks import line_of_user
from mirror._src.base.types import PyTree
from mirror._src.cluster import store
from mirror._src.cluster.ledger import ledger
from mirror._src.data.batches import (
    HostBatch,
    Remainder,
    grown,
    is_kept,
    padded,
    padded_size,
    reject_keys,
    shape_on_devices,
)
from mirror._src.data.foreign import taken
from mirror._src.data.step_exchange import Form
from mirror._src.devices.replicas import ReplicaDevices
from mirror._src.jaxprs.text import checksum

_MOST_CHECKS = 20  # batches of a pass after which the others are not waited for
_datasets: dict[str, Iterator[int]] = defaultdict(itertools.count)
InputMode: TypeAlias = Literal["global", "local"]
Inspect: TypeAlias = Callable[[int, PyTree], None]
States: TypeAlias = Sequence[dict[str, Any] | None] | None
T = TypeVar("T")


class Plan(NamedTuple):
    """Options for the batches of a pass.

    Attributes:
        remainder: How to handle a batch that cannot be split evenly.
        multiple: The padded number of examples per replica is a multiple of this.
        skip: Number of examples of the pass to skip.
        skips_empty: Whether to skip batches without examples.
        inspect: Called with the number and the tree of each batch that this process has read.
        group: Number of batches per launch.
        is_restored: Whether the pass begins after the examples to skip.
        full: The padded size before these; 0 if it is unknown.
        on_host: Whether batches stay in NumPy.
    """

    remainder: Remainder
    multiple: int = 1
    skip: int = 0
    skips_empty: bool = False
    inspect: Inspect | None = None
    group: int = 1
    is_restored: bool = False
    full: int = 0
    on_host: bool = False

    @property
    def num_skipped(self) -> int:
        """The number of examples to read and skip."""
        return 0 if self.is_restored else self.skip

    def inspected(self, batch: HostBatch) -> HostBatch:
        """Returns the batch after its inspection."""
        if self.inspect is not None:
            self.inspect(batch.number, batch.map(lambda leaf: leaf))
        return batch


class InputBatch(NamedTuple):
    """The rows of a global batch that this process has read.

    Attributes:
        batch: The rows. If the process has none, its size is 0, and its leaves may hold an example
            of an earlier batch, which the padding repeats.
        num_examples: Number of examples of the global batch, in all processes.
        full: Number of rows of `batch` after padding.
        states: States of the data after the batch, one per process with a local input, or None.
    """

    batch: HostBatch
    num_examples: int
    full: int
    states: States

    def padded(self, full: int) -> HostBatch:
        """Returns the rows, padded to a number that is at least `full` of this batch.

        `size` remains the number of examples.

        Raises:
            TypeError: If a leaf is an array of PRNG keys.
        """
        reject_keys(self.batch)
        if self.batch.size == full:
            return self.batch
        return self.batch._replace(leaves=tuple(padded(x, full) for x in self.batch.leaves))

    def mask(self, full: int) -> np.ndarray:
        """Returns the mask of the padded rows: True for examples."""
        return np.arange(full) < self.batch.size


@dataclass(eq=False)
class Pass(abc.ABC):
    """A pass over the batches of a dataset.

    Attributes:
        batches: The batches that this process reads.
        num_replicas: Number of replicas whose rows this process reads.
    """

    batches: Iterator[PyTree]
    num_replicas: int

    @abc.abstractmethod
    def steps(self, batches: Iterator[HostBatch], plan: Plan) -> Generator[InputBatch]:
        """Yields the batches that are distributed.

        Args:
            batches: `self.batches` after validation.
            plan: Options for them.
        """

    @abc.abstractmethod
    def groups(
        self, num: int, join: Callable[[list[PyTree]], T], form: Callable[[T], Form]
    ) -> Generator[T]:
        """Yields one batch for each of this process's replicas, joined.

        Args:
            num: Number of this process's replicas.
            join: Validates and joins the batches.
            form: Returns what must be equal in all processes.
        """

    @abc.abstractmethod
    def cancel(self) -> None:
        """Ends the waiting of another thread for other processes, because the loop has ended."""


StartPass: TypeAlias = Callable[[Iterator[PyTree], str], Pass]
"""Starts a pass over the batches that this process reads, in an order, if it is known."""


def global_passes(replicas: ReplicaDevices) -> StartPass:
    """Returns a function for passes in which each process reads whole global batches."""
    same = SameBatches() if replicas.spans_processes else None

    def start(batches: Iterator[PyTree], order: str) -> Pass:
        del order  # the batches themselves are compared
        return _GlobalPass(batches if same is None else same.start(batches), len(replicas))

    return start


@final
class _GlobalPass(Pass):
    def steps(self, batches: Iterator[HostBatch], plan: Plan) -> Generator[InputBatch]:
        divisor, left = self.num_replicas * plan.multiple, plan.num_skipped
        full = plan.full and padded_size(plan.full, divisor)
        for batch in batches:
            is_empty = plan.skips_empty and not batch.size
            if not is_kept(batch, self.num_replicas, plan.remainder) or is_empty:
                continue
            full = grown(full, batch.size, divisor)
            skipped = min(left, batch.size)
            left -= skipped
            if not skipped or skipped < batch.size:
                rest = plan.inspected(batch.part(slice(skipped, None)) if skipped else batch)
                states = None if rest.state is None else [rest.state]
                yield InputBatch(rest, rest.size, full, with_full(states, full))
        require_none_left(plan.skip, left)

    def groups(
        self, num: int, join: Callable[[list[PyTree]], T], form: Callable[[T], Form]
    ) -> Generator[T]:
        del form
        while len(group := taken(self.batches, num)) == num:
            yield join(group)
        if group:
            warn_of_dropped(len(group), num)

    def cancel(self) -> None:
        pass


def with_full(states: States, full: int) -> States:
    """Adds the padded size to states: batches of a pass that begins there have the same shapes."""
    return states and [state and {**state, "full": full} for state in states]


def require_none_left(skip: int, left: int) -> None:
    """Checks that a pass had all examples that were to be skipped.

    Raises:
        ValueError: If some are left.
    """
    if left:
        raise ValueError(
            f"Cannot resume: {skip} examples of this epoch were already used, but the dataset "
            f"has only {skip - left}. Resume with the dataset that the run started with."
        )


def warn_of_dropped(count: int, num: int) -> None:
    """Warns that the last batches of a pass were too few for a step of `num` batches."""
    warn_user(
        f"Dropped the last {count} batches: each step consumes {num}, one per replica. Yield a "
        f"multiple of {num} batches to use them all."
    )


def name_dataset(kind: str) -> tuple[str, str]:
    """Returns the user's line that creates a dataset, and a key of its own in the store.

    Datasets are told apart by this line and their number there, so that a dataset that only one
    process creates does not shift the others.
    """
    line = os.path.basename(line_of_user().partition(": ")[0])
    place = f"{kind}/{line}"
    return line, f"{place}/{next(_datasets[place])}"


@final
class SameBatches:
    """Compares the first batch of each pass with the other processes, without waiting for them.

    With a global input, every process reads the same batches and places its own rows. Another
    shuffle on one process would use some examples twice and others not at all, without an error.

    It never waits, because a process may look at its data alone: the process that is later finds
    the difference.
    """

    def __init__(self) -> None:
        self._line, self._key = name_dataset("data")
        self._passes = itertools.count()

    def start(self, batches: Iterator[PyTree]) -> Iterator[PyTree]:
        """Returns the batches of a pass, of which the first is compared."""
        return self._compared(batches, f"{self._key}/{next(self._passes)}")

    def _compared(self, batches: Iterator[PyTree], key: str) -> Iterator[PyTree]:
        mine: dict[str, list[Any]] = {}
        missing = [i for i in range(store.process_count()) if i != store.process_index()]
        for number, batch in enumerate(batches):
            if number == 0:
                mine = _checksums(batch)
                store.set_default(f"{key}/{store.process_index()}", json.dumps(mine))
            if missing and number < _MOST_CHECKS:
                missing = self._compare(key, mine, missing)
            yield batch
        if missing and mine:  # a short pass
            self._compare(key, mine, missing)

    def _compare(self, key: str, mine: dict[str, list[Any]], others: list[int]) -> list[int]:
        """Compares with the processes that have arrived; returns those that have not.

        Raises:
            ReplicaDivergenceError: If one of them has read another batch.
        """
        missing = []
        for i in others:
            text = store.get(f"{key}/{i}", time.monotonic())
            if text is None:
                missing.append(i)
                continue
            theirs = json.loads(text)
            differ = []
            for name in {**mine, **theirs}:
                a, b = (each.get(name, ["missing"]) for each in (mine, theirs))
                if a != b:
                    differ.append(name if a[0] == b[0] else f"{name} ({a[0]} and {b[0]})")
            if differ:
                ledger.divergence = (
                    f"The dataset of {self._line} yields different batches on process "
                    f"{store.process_index()} and process {i}: the first batch differs in "
                    f"{', '.join(differ)}. Every process must read the same global batches: "
                    "shuffle and augment with the same seed, for example "
                    "mirror.data.from_arrays(arrays, batch_size, shuffle=True, seed=0)."
                )
                raise ReplicaDivergenceError(ledger.divergence)
        return missing


def _checksums(batch: PyTree) -> dict[str, list[Any]]:
    """Returns the type and a checksum of each leaf, as it will be on the devices."""
    sums = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
        # Not an array: rejected with a message where the batch is placed.
        with contextlib.suppress(Exception), np.errstate(all="ignore"):
            array = to_array("", leaf)
            spec = shape_on_devices(array.shape, array.dtype)
            if isinstance(array, np.ndarray):
                array = array.astype(spec.dtype, copy=False)
            sums[f"batch{keys(path)}"] = [describe(spec), checksum(array)]
    return sums
