"""Local input: each process reads its own part of every global batch.

A global batch is the parts of all processes, one after the other. The parts may differ in size: all
of them are padded to the same number of rows, which the processes agree on before the step.
"""

import contextlib
import functools
import itertools
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, final

import jax
import numpy as np

from mirror._src.base.naming import warn_user
from mirror._src.base.types import PyTree
from mirror._src.cluster import store
from mirror._src.data.arrays import ArrayDataset
from mirror._src.data.batches import HostBatch, grown, padded_size, reject_keys, shape_on_devices
from mirror._src.data.foreign import taken
from mirror._src.data.input import (
    InputBatch,
    Pass,
    Plan,
    StartPass,
    T,
    name_dataset,
    require_none_left,
    warn_of_dropped,
    with_full,
)
from mirror._src.data.step_exchange import Form, Step, StepExchange, close_at_exit
from mirror._src.devices.replicas import ReplicaDevices
from mirror._src.engine.examples import warn_of_positions
from mirror._src.jaxprs.text import checksum


def local_passes(replicas: ReplicaDevices) -> StartPass:
    """Returns a function for passes in which each process reads the rows of its own replicas."""
    line, key = name_dataset("local")
    passes = itertools.count()
    close_at_exit()

    def start(batches: Iterator[PyTree], order: str) -> Pass:
        number = next(passes)
        exchange = StepExchange(f"{key}/{number}", f"the dataset of {line}")
        num_local, is_first = len(replicas.local_ids), number == 0
        return _LocalPass(batches, num_local, exchange, order, is_first, replicas.devices)

    return start


@final
@dataclass(eq=False)
class _LocalPass(Pass):
    exchange: StepExchange
    order: str
    is_first: bool
    devices: Sequence[jax.Device]

    def cancel(self) -> None:
        self.exchange.cancel()

    def steps(self, batches: Iterator[HostBatch], plan: Plan) -> Generator[InputBatch]:
        per_replica = plan.full and padded_size(plan.full, plan.multiple)
        left, state = plan.num_skipped, None
        padding, n = _Padding(), self.num_replicas
        with contextlib.closing(self.exchange):
            while True:
                batch = self._next(batches, plan)
                state = state if batch is None else batch.state
                step = self._agreed(batch, state, plan)
                if step is None or (step.has_ended and plan.remainder == "drop"):
                    break
                if not self._is_kept(step, plan) or (plan.skips_empty and not step.total):
                    continue
                per_replica = grown(per_replica, -(-max(step.counts) // n), plan.multiple)
                rows = padding.fill(batch, functools.partial(self.exchange.form, step.form))
                if left:
                    left -= self._skipped(left, step)
                    continue
                counts, full = step.counts, per_replica * n
                if any(x < full and any(counts[i + 1 :]) for i, x in enumerate(counts)):
                    said = f"batch {step.number} of {self.exchange.what} ({step.sizes})"
                    warn_of_positions(self.devices, said)
                states = with_full(step.states, per_replica)
                yield InputBatch(rows, step.total, full, states)
            require_none_left(plan.skip, left)

    def _next(self, batches: Iterator[HostBatch], plan: Plan) -> HostBatch | None:
        """Returns the next part; None at the end."""
        try:
            batch = next(batches, None)
            if batch is not None:
                reject_keys(batch)
                plan.inspected(batch)
            return batch
        except Exception as error:
            self.exchange.fail(error)
            raise

    def _agreed(
        self, batch: HostBatch | None, state: dict[str, Any] | None, plan: Plan
    ) -> Step | None:
        if batch is None:
            return self.exchange.end(state)
        is_first = self.is_first and batch.number == 0
        # The hash of integers is the same in all processes.
        check = hash(tuple(map(checksum, batch.leaves))) if is_first else 0
        step = self.exchange.agree(batch.size, self._form(batch, plan), check, state)
        if is_first and step.is_same:
            warn_user(
                f"All processes have read the same first batch of {self.exchange.what}, so each "
                "example counts once per process. With input='local', every process must read its "
                "own part, for example mirror.data.from_arrays(..., shard=(process_index, "
                "process_count)). If all of them read the same batches, use input='global'."
            )
        return step

    def _form(self, batch: HostBatch, plan: Plan) -> Form:
        settings = f"remainder={plan.remainder!r}, multiple={plan.multiple}, group={plan.group}"
        if plan.skip:
            settings += f", skip={plan.skip}"
        if plan.is_restored:
            settings += " by the state of the loader"
        if self.order:
            settings += f", {self.order}"
        leaves = tuple(
            (name, str(shape_on_devices((), leaf.dtype).dtype), tuple(leaf.shape[1:]))
            for name, leaf in zip(batch.names, batch.leaves, strict=True)
        )
        return Form(settings, str(batch.treedef), leaves)

    def _is_kept(self, step: Step, plan: Plan) -> bool:
        """Whether a step takes place; as `is_kept`, for the parts of all processes.

        Raises:
            ValueError: If it cannot be split evenly, and `remainder` is `"error"` or it is the
                first. In all processes.
        """
        size, *others = set(step.counts)
        is_even = not others and size % self.num_replicas == 0
        if plan.remainder == "pad" or (is_even and size):
            return True
        if plan.remainder == "drop" and (step.number or plan.is_restored):
            return False
        advice = (
            "remainder='drop' would skip this batch, but it is the first: nothing would be trained."
            if plan.remainder == "drop"
            else "Or pass remainder='pad', with which a loop receives (batch, mask), or 'drop'."
        )
        raise ValueError(
            f"Batch {step.number} has parts of different sizes, or sizes that cannot be split: "
            f"{step.sizes}. Every process must have the same number of examples, a multiple of its "
            f"{self.num_replicas} replicas. {advice}"
        )

    def _skipped(self, left: int, step: Step) -> int:
        if left < step.total:
            raise ValueError(
                f"Cannot resume in the middle of batch {step.number}: {left} of its {step.total} "
                "examples were already used. With input='local', resume with the number of "
                "processes and the batch sizes that the run started with."
            )
        return step.total

    def groups(
        self, num: int, join: Callable[[list[PyTree]], T], form: Callable[[T], Form]
    ) -> Generator[T]:
        with contextlib.closing(self.exchange):
            while True:
                try:
                    group = taken(self.batches, num)
                    joined = join(group) if len(group) == num else None
                except Exception as error:
                    self.exchange.fail(error)
                    raise
                if joined is None:
                    self.exchange.end()
                    if group:
                        warn_of_dropped(len(group), num)
                    return
                step = self.exchange.agree(num, form(joined))
                if step.has_ended:
                    warn_user(
                        f"Dropped the batches that {self.exchange.what} has left in this process: "
                        "the pass ends in all processes, because one has no batches left for "
                        f"another step (for it, {step.sizes}). Yield the same number of batches "
                        "on every process to use them all."
                    )
                    return
                yield joined


class _Padding:
    """The example that fills the rows of a process without examples.

    The last one that it has read, so that padding does not introduce NaN or Inf; zeros if there was
    none.
    """

    def __init__(self) -> None:
        self._last: HostBatch | None = None
        self._example: HostBatch | None = None

    def fill(self, batch: HostBatch | None, form: Callable[[], Form]) -> HostBatch:
        """Returns the part, or one without examples in its place.

        Args:
            batch: The part; None if the data of this process have ended.
            form: Returns the form of the parts of the other processes.
        """
        if batch is not None:
            self._last = batch.part(slice(0))
        if batch is not None and batch.size:
            start = batch.size - 1
            kept = tuple(np.array(leaf[start:]) for leaf in batch.leaves)
            self._example = batch._replace(leaves=kept, size=0)
            return batch
        assert self._last is not None, "a process without any batch is an error of the exchange"
        shapes = [(dtype, shape) for _, dtype, shape in form().leaves]
        example = self._example
        if example is not None and [leaf.shape[1:] for leaf in example.leaves] == [
            shape for _, shape in shapes
        ]:
            return example
        zeros = tuple(np.zeros((0, *shape), dtype) for dtype, shape in shapes)
        return self._last._replace(leaves=zeros, size=0)


def warn_of_part(loader: Any) -> None:
    """Warns of a loader that reads one of several parts, if no other process reads the others."""
    if isinstance(loader, ArrayDataset):
        what, fix, count = f"shard={loader.shard}", "`shard`", (loader.shard or (0, 1))[1]
    else:
        what = f"The sampler of {type(loader).__name__}"
        fix = "the sampler: DataLoader(dataset, batch_size, shuffle=True)"
        count = getattr(getattr(loader, "sampler", None), "num_replicas", 1)
    if isinstance(count, int) and count not in (1, store.process_count()):
        warn_user(
            f"{what} selects one of {count} parts of the dataset, and this process reads no other: "
            f"mirror splits each batch over the devices itself. Omit {fix}."
        )


def require_own_shard(dataset: Any, *, is_local: bool) -> None:
    """Checks the part of each batch that a dataset of `mirror.data.from_arrays` yields.

    Raises:
        ValueError: If it is not the part of this process.
    """
    if not isinstance(dataset, ArrayDataset) or dataset.shard is None:
        return
    own = (store.process_index(), store.process_count())
    if not is_local:
        raise ValueError(
            f"The dataset has shard={dataset.shard}, a part of each global batch, but "
            "distribute_dataset expects whole global batches. Pass input='local', or make the "
            "dataset without `shard`."
        )
    if dataset.shard != own:
        raise ValueError(
            f"The dataset has shard={dataset.shard}, but this is process {own[0]} of {own[1]}. "
            "Pass shard=(mirror.distributed.process_index(), mirror.distributed.process_count())."
        )
