"""Checks that padding, pieces of a batch and a training mode do not change what a step computes."""

import copy
import functools
import inspect
import itertools
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, final

import jax
import numpy as np
from flax import nnx
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal

from mirror._src.base.errors import counted
from mirror._src.base.naming import is_first, name_of, warn_user
from mirror._src.base.tracebacks import on_behalf_of, users_function, users_functions
from mirror._src.base.types import PyTree
from mirror._src.cluster import consensus
from mirror._src.cluster.start import agreement_secs
from mirror._src.data.padded import PaddedBatch
from mirror._src.engine.arguments import Call
from mirror._src.engine.per_replica import PerReplica, is_per_replica
from mirror._src.engine.replica_function import TracedStep
from mirror._src.inspection.measurement import copy_of
from mirror._src.jaxprs.collective_eqns import is_collective, is_stateful
from mirror._src.jaxprs.equations import equations, user_line
from mirror._src.jaxprs.primitives import CUSTOM_VJP, SAMPLER
from mirror._src.jaxprs.relate import guess
from mirror._src.jaxprs.relations import SAME, Kind, Why, rows
from mirror._src.jaxprs.row_facts import NO_ROWS, Place, Rows, constant_of, row
from mirror._src.jaxprs.rows import find_rows
from mirror._src.strategy.strategy import Strategy

Step = Callable[..., Any]
"""Step `(model, batch, mask)` that returns what is computed for the examples."""

_OF_MASK = frozenset({Place("the mask")})
_MASK = "mask = mirror.example_mask(batch)"
_COUNTS = "depends on how many examples a {} has, as the gradient of their mean does"
_SUM = "Inside the loss, differentiate their sum: jax.grad(lambda x: losses(x).sum())(x)"
_MEANT = (
    "If each replica is meant to use its own examples, pass "
    "mirror.Trainer(..., require_equal=False)."
)
_MOST_ROWS, _MOST_REPLICAS = 16, 8  # whose losses are compared as numbers
_RTOL, _GRADIENT_RTOL = 1e-3, 0.01
_decisions = itertools.count()  # of a job: every process makes the same ones
_NEGATED = ("train", "training", "is_training")
_MODES = (*_NEGATED, "deterministic", "use_running_average", "inference")


class Mixing(NamedTuple):
    """Lines at which a program looks across the rows of the batch.

    Attributes:
        mixed: Lines at which a result came to depend on other rows.
        padded: Those at which padding enters.
        means: Those at which a replica divides by the number of its examples.
        unknown: Lines of operations that are not known.
    """

    mixed: tuple[Place, ...]
    padded: tuple[Place, ...]
    means: tuple[Place, ...]
    unknown: tuple[Place, ...]

    @property
    def across(self) -> tuple[Place, ...]:
        """The lines of `mixed` that are not in a normalization layer."""
        return tuple(place for place in self.mixed if not place.is_statistics)


@final
class RowCheck:
    """Checks the steps of one trainer.

    Args:
        strategy: Strategy that runs the steps.
        num_pieces: Number of pieces into which a training step splits a replica's batch.
        option: The option of the trainer that is why, for messages.
        gradients: Steps that compute the gradients of a replica, of its rows and with as much
            padding.
    """

    def __init__(
        self, strategy: Strategy, num_pieces: int, option: str, gradients: Sequence[Step]
    ) -> None:
        self._strategy, self._gradients = strategy, gradients
        self._num_pieces, self._option = num_pieces, option
        self._separate: set[Any] = set()
        self._known: list[tuple[Any, Any]] = []
        self._warned: set[str] = set()
        self._in_modes, self._compared = weakref.WeakSet[Step](), weakref.WeakSet[Step]()

    def __deepcopy__(self, memo: dict[int, Any]) -> "RowCheck":
        # Programs cannot be copied.
        strategy = copy.deepcopy(self._strategy, memo)
        return RowCheck(strategy, self._num_pieces, self._option, self._gradients)

    def require_separate_pieces(self, step: Step, model: Any, padded: PaddedBatch) -> None:
        """Checks that rows of one piece do not depend on rows of others; once for each shape.

        A layer may compute batch statistics over the examples of a piece, with one warning.

        Raises:
            ValueError: If another operation looks across rows.
        """
        if self._num_pieces == 1 or padded.types in self._separate:
            return
        mixing = self._mixing(step, model, padded)
        if mixing.across:
            raise ValueError(
                f"{_name(step)} looks across the examples of a batch at {_lines(mixing.across)}, "
                f"but {self._option} splits the batch of a replica into pieces, each of which "
                f"would be a batch of its own. Omit {self._option.partition('=')[0]}, and save "
                "memory with nnx.remat or a smaller batch."
            )
        self._separate.add(padded.types)
        if mixing.mixed:
            self._warn(
                "pieces",
                f"The batch normalization at {_lines(mixing.mixed)} uses the statistics of one of "
                f"{counted(self._num_pieces, 'piece')}, not of the batch of a replica. For results "
                f"that do not depend on the pieces, omit {self._option.partition('=')[0]} or use "
                "nnx.LayerNorm or nnx.GroupNorm.",
            )

    def without_padding(
        self,
        step: Step,
        model: Any,
        padded: PaddedBatch,
        num_pieces: int = 1,
        *,
        changes_state: bool = False,
    ) -> list[PaddedBatch]:
        """Returns launches that compute what the examples alone give: this one, if it does.

        If padding would change results, every batch becomes a launch without padding. A layer may
        include padding in the batch statistics of a replica, with one warning.

        Args:
            step: The step to check.
            model: First argument of the step.
            padded: Batches, perhaps with padding.
            num_pieces: Number of pieces into which the step splits the batch of a replica.
            changes_state: Whether the step changes the model, and not only computes rows.

        Raises:
            ValueError: If padding would change results, and is needed.
        """
        n, *_, num_rows = _shape(padded)
        if padded.num_examples >= padded.num_batches * n * num_rows:
            return [padded]
        sizes = padded.sizes or (padded.num_examples,)
        indices = range(padded.first, padded.first + padded.num_batches)
        if n * num_pieces == 1 and self._uses_size(step, model, padded):
            return [self._exact(padded, i, sizes[i]) for i in indices]
        mixing = self._mixing(step, model, padded, only_rows=not changes_state)
        across = mixing.across
        unknown = tuple(place for place in mixing.unknown if across or not place.counts_padding)
        if not mixing.padded:
            unsure = unknown or self.numbers_of_rows(step, model, padded) or across
            has_padding = bool(unsure) and self._has_padding(step, model, padded)
            mixing = mixing._replace(padded=unsure if has_padding else ())
        # Statistics over the examples of a replica or piece that has none would be 0 / 0.
        has_empty = min(sizes) <= n * num_rows - num_rows // num_pieces
        is_empty = bool(mixing.means) and has_empty
        is_wrong = is_empty or not all(place.is_statistics for place in mixing.padded)
        undefined: tuple[Place, ...] = ()
        clipped: tuple[Place, ...] = ()
        if changes_state and not is_wrong:
            undefined = self._undefined(step, model, padded, has_empty)
            clipped = self._clipped(step, model, padded)
        if not mixing.padded and not is_empty and not undefined and not clipped:
            return [padded]
        uneven = [sizes[i] for i in indices if sizes[i] % (n * num_pieces)]
        if not uneven and not self._strategy._spans_processes:
            return [self._exact(padded, i, sizes[i]) for i in indices]
        if is_wrong or undefined or clipped:
            size, multiple = max(uneven or sizes), n * num_pieces
            raise ValueError(self._message(step, mixing, undefined, clipped, size, multiple))
        self._warn(
            "padding",
            f"The batch normalization at {_lines(mixing.padded)} counts the padding of batches "
            f"whose size is not a multiple of {n * num_pieces}. Pass "
            "mask=mirror.example_mask(x) with axes added for the other axes of x, or drop the last "
            "batch: "
            "mirror.data.from_arrays(..., drop_remainder=True).",
        )
        return [padded]

    def check_last(
        self, step: Step, model: Any, padded: PaddedBatch, size: int, num_pieces: int
    ) -> None:
        """Checks the padding of the last batch at the first step, as `without_padding` does later.

        Args:
            step: As for `without_padding`, as are `model` and `num_pieces`.
            model: First argument of the step.
            padded: The first launch, whose shapes the last one has.
            size: Number of examples of the last batch.
            num_pieces: Number of pieces into which the step splits the batch of a replica.

        Raises:
            ValueError: If padding would change results, and is needed.
        """
        if size % (_shape(padded)[0] * num_pieces):
            last = padded._replace(num_batches=1, num_examples=size, first=0, sizes=(size,))
            self.without_padding(step, model, last, num_pieces, changes_state=True)

    def warn_of_own_rows(self, step: Step, model: Any, padded: PaddedBatch) -> None:
        """Warns of results for which the other rows of a replica's batch count.

        One device has other rows there. Numbers decide: a mean over the rows, for example, adds up
        to the same. Random numbers of replicas are meant to differ.

        Args:
            step: Step that computes losses or predictions, in evaluation mode. It is checked once.
            model: First argument of the step.
            padded: A batch, or a group of them.
        """
        if self._strategy.num_replicas_in_sync == 1 or step in self._compared:
            return
        self._compared.add(step)
        try:
            mixing = self._mixing(step, model, padded, only_rows=True)
            places = mixing.across
            program = self._program(step, model, padded)[0]
            is_together = any(map(is_collective, equations(program.jaxpr)))
            counts = self._counts_rows(step, model, padded)
            sizes = () if counts else self.numbers_of_rows(step, model, padded)
            is_known = not (places or sizes or counts)
            if is_known or _is_random(program) or (is_together and self._strategy._spans_processes):
                return
            batch, mask = self._first_rows(padded, None if is_together else _MOST_REPLICAS)
            every, *parts = _every_and_each(batch, mask)
            whole = self._sums(step, model, *every)
            if is_together:
                alone = self._sums(step, model, batch, mask)
            else:
                alone = np.sum([self._sums(step, model, *part) for part in parts], 0)
        except Exception:  # it is only a warning; a loss may require more rows, or other ones
            return
        name = _name(step)
        why, fix = f"{name} {_COUNTS.format('replica')}", _SUM
        if places:
            why = f"{name} looks across the examples of each replica at {_lines(places)}"
            fix = "Look across all: mirror.all_gather(x)"
        elif sizes:
            why = f"{name} computes with the number of rows of a replica at {_lines(sizes)}"
            fix = f'Use their number: mirror.all_reduce("sum", mask.sum()), with {_MASK}'
        for x, y in zip(whole, alone, strict=True):
            if _differ(x, y):
                self._warn(
                    f"own rows of {name}",
                    f"{why}, so that the results depend on the number of replicas: the values "
                    f"of {mask.sum()} examples add up to {x:.4g} on one device, and to {y:.4g} on "
                    f"{counted(len(mask), 'replica')}. {fix}. {_MEANT}",
                )

    def warn_of_row_counts(self, step: Step, model: Any, padded: PaddedBatch) -> None:
        """Warns of a loss whose gradients depend on how many examples a replica or piece has.

        An example is a loss of rows that are moved along the gradient of their mean. Numbers
        decide, in evaluation mode, for the arguments of `warn_of_own_rows`.
        """
        part = "replica" if self._num_pieces == 1 else "piece"
        try:
            program = self._program(step, model, padded)[0]
            is_known = _is_random(program) or any(map(is_collective, equations(program.jaxpr)))
            if is_known or not self._uses_size(step, model, padded):
                return
            (evaluated,) = copy_of([model])
            evaluated.eval()
            replicas = self._first_rows(padded, _MOST_REPLICAS)
            if part == "piece":
                replicas = jax.tree.map(_in_halves, replicas)
            rows = _every_and_each(*replicas)
            whole, *parts = [self._gradient(self._gradients[0], evaluated, *each) for each in rows]
        except Exception:  # as in `warn_of_own_rows`
            return
        if (distance := _distance(whole, np.sum(parts, 0))) > _GRADIENT_RTOL:
            self._warn(
                f"own rows of {_name(step)}",
                f"{_name(step)} {_COUNTS.format(part)}: in {counted(len(parts), part)}, its "
                f"gradients differ by {distance:.1%} from the whole batch. {_SUM}. {_MEANT}",
            )

    def _has_padding(self, step: Step, model: Any, padded: PaddedBatch) -> bool:
        """Whether numbers show that padding enters a loss, in evaluation mode if it is random."""
        program = self._program(step, model, padded)[0]

        def differs() -> bool:
            batch, ones = self._first_examples(padded)
            evaluated = model
            if _is_random(program):
                (evaluated,) = copy_of([model])
                evaluated.eval()
                if _is_random(self._program(step, evaluated, padded)[0]):
                    return False

            def padding(x: np.ndarray) -> np.ndarray:
                return np.concatenate([x, x[:, -1:].repeat(2, 1)], 1)

            more = jax.tree.map(padding, batch), np.pad(ones, ((0, 0), (0, 2)))
            try:
                rows = (batch, ones), more, (batch, ones)
                sums = [self._sums(step, evaluated, *each, and_state=True) for each in rows]
            except Exception:  # of a loss that requires other numbers of rows
                return False
            # A callback may return other numbers in each call.
            return any(_differ(x, y) and x == z for x, y, z in zip(*sums, strict=True))

        may_run_again = not any(map(is_stateful, equations(program.jaxpr)))
        return may_run_again and self._once((program, "numbers"), lambda: self._is_any(differs()))

    def _uses_size(self, step: Step, model: Any, padded: PaddedBatch) -> bool:
        """Whether results are likely to depend on how many rows there are."""
        return self._counts_rows(step, model, padded) or bool(
            self.numbers_of_rows(step, model, padded)
        )

    def numbers_of_rows(self, step: Step, model: Any, padded: PaddedBatch) -> tuple[Place, ...]:
        """Returns the lines at which a number differs with the number of rows."""
        call, traced, axis, are_rows = self._call(step, model, padded)
        count = 3 if _shape(padded)[-1] == 4 else 4

        def differing() -> tuple[Place, ...]:
            types = tuple(
                x.update(shape=(*x.shape[:axis], count, *x.shape[axis + 1 :])) if is_row else x
                for x, is_row in zip(traced.function.avals, are_rows, strict=True)
            )
            try:
                other = self._strategy._runner.traced_as(call, types).jaxpr
            except Exception:  # of a loss that requires other numbers of rows
                return ()
            pairs = zip(equations(traced.jaxpr.jaxpr), equations(other.jaxpr), strict=False)
            eqns = [x for x, y in pairs if _numbers(x) != _numbers(y)]
            return tuple({Place(user_line(eqn), counts_padding=True) for eqn in eqns})

        return self._once((traced.jaxpr, "rows"), differing)

    def _is_any(self, found: bool) -> bool:
        """Whether a process has found it; each has other examples."""
        if not self._strategy._spans_processes:
            return found
        name = f"padding/{next(_decisions)}"
        return consensus.is_any(name, found, time.monotonic() + agreement_secs())

    def _first_rows(self, padded: PaddedBatch, most: int | None) -> tuple[PyTree, np.ndarray]:
        """Returns the first rows of replicas of this process, along a second axis."""
        parts = self._strategy.local_results((padded.batch, padded.mask))[:most]
        is_group, count = len(_shape(padded)) == 3, max(2, _MOST_ROWS // len(parts))

        def stacked(*leaves: Any) -> np.ndarray:
            return np.stack([(x[0] if is_group else x)[:count] for x in leaves])

        batch, mask = jax.tree.map(stacked, *parts)
        return batch, mask

    def _first_examples(self, padded: PaddedBatch) -> tuple[PyTree, np.ndarray]:
        """Returns a few examples, as rows of one replica, and the mask that selects them all."""
        batch, mask = self._first_rows(padded, _MOST_REPLICAS)
        batch = jax.tree.map(lambda x: x[mask][None, :_MOST_ROWS], batch)
        return batch, np.ones((1, min(mask.sum(), _MOST_ROWS)), bool)

    def _sums(
        self, step: Step, model: Any, batch: PyTree, mask: np.ndarray, *, and_state: bool = False
    ) -> list[float]:
        """Returns the sums over the examples of what a step computes of each; 0 for the rest.

        Of rows that are arrays, the absolute values are added up.

        Args:
            step: The step.
            model: Its first argument.
            batch: Rows of one replica, which one device computes, or of each.
            mask: Which rows are examples.
            and_state: Whether to return the sums of other variables of the model, too.
        """

        def total(x: Any) -> float:
            values = np.asarray(x.stacked if is_per_replica(x) else [x] * len(mask))
            rows = values[mask] if values.shape[:2] == mask.shape else np.zeros(1)
            # Not losses, but predictions: they may be centered.
            return float(np.sum(rows if rows.ndim == 1 else np.abs(rows), dtype=float))

        found, after = self._run(step, model, batch, mask)
        state = nnx.state(after, nnx.Not(nnx.Any(nnx.Param, nnx.RngState))) if and_state else {}
        of_state = [float(np.sum(np.abs(x))) for x in jax.tree.leaves(state)]
        return [*map(total, jax.tree.leaves(found, is_leaf=is_per_replica)), *of_state]

    def _gradient(self, step: Step, model: Any, batch: PyTree, mask: np.ndarray) -> np.ndarray:
        """Returns the gradient of the sum over the examples of one replica, as one array."""
        found, _ = self._run(step, model, batch, mask)
        values = [np.asarray(x.stacked if is_per_replica(x) else x) for x in found]
        return np.concatenate([np.ravel(x).astype(complex) for x in values])

    def _run(self, step: Step, model: Any, batch: PyTree, mask: np.ndarray) -> tuple[Any, Any]:
        """Returns what a step computes with a copy of the model, and the copy; see `_sums`."""
        (copied,) = copy_of([model])
        runner = self._strategy._single_runner() if len(mask) == 1 else self._strategy._runner
        arguments = jax.tree.map(lambda x: PerReplica(list(x)), (batch, mask))
        return runner.run(step, (copied, *arguments), {}), copied

    def warn_of_training_mode(self, step: Step, model: nnx.Module, padded: PaddedBatch) -> None:
        """Warns if an evaluation is in training mode, because the model's call has it as argument.

        Args:
            step: The evaluation. It is checked once.
            model: First argument of the step.
            padded: A batch.
        """
        if step in self._in_modes:
            return
        self._in_modes.add(step)
        named = mode_argument(model)
        if named is None:
            return
        mixing = self._mixing(step, model, padded)
        program = self._program(step, model, padded)[0]
        evidence = []
        if _is_random(program):
            evidence.append("draws random numbers")
        if any(place.is_statistics for place in mixing.mixed):
            evidence.append("uses statistics of the batch")
        if evidence:
            self._warn("mode", message_of(*named, " and ".join(evidence)))

    def _warn(self, kind: str, message: str) -> None:
        if is_first(self._warned, kind):
            warn_user(message)

    def _message(
        self,
        step: Step,
        mixing: Mixing,
        undefined: Sequence[Place],
        clipped: Sequence[Place],
        size: int,
        multiple: int,
    ) -> str:
        n = self._strategy.num_replicas_in_sync
        name = _name(step)
        sizes = f"Use batch sizes that are multiples of {multiple}, or drop the last batch: "
        drop = "mirror.data.from_arrays(..., drop_remainder=True)"
        if mixing.padded and all(place.counts_padding for place in mixing.padded):
            return (
                f"{name} computes with a number of rows at {_lines(mixing.padded)}, but a batch of "
                f"{counted(size, 'example')} is padded for {counted(n, 'replica')}, and the number "
                f"counts the padding. Use mask.sum(), with {_MASK}, or jnp.mean(x, 0, "
                f"where=mask[:, None]). {sizes}{drop}."
            )
        if undefined:
            return (
                f"{name} has a NaN gradient for padding at {_lines(undefined)}, but a batch of "
                f"{counted(size, 'example')} is padded for {counted(n, 'replica')}. {sizes}{drop}. "
                "Or hide the padding behind numbers at which the derivative is finite: 1 in a "
                "square root, a logarithm or a divisor, and -1e9 in a softmax."
            )
        if clipped:
            return (
                f"{name} has a jax.custom_vjp at {_lines(clipped)} whose gradient is not "
                f"proportional to the one that it receives, but a batch of "
                f"{counted(size, 'example')} is padded for {counted(n, 'replica')}, and the "
                f"padding changes the scale. "
                f"{sizes}{drop}. Or clip the gradients in the optimizer."
            )
        means = [place for place in mixing.padded if place.is_mean_of_means]
        if means or not mixing.padded:
            part = "replica" if multiple == n else "piece"
            return (
                f"{name} computes means over the examples of each {part} at "
                f"{_lines(means or mixing.means)}, but {counted(multiple, part)} have unequal "
                f"numbers of the {counted(size, 'example')} of a batch, or none. {sizes}{drop}. Or "
                f"all-reduce sums over the examples of {_MASK}, and their number."
            )
        return (
            f"{name} looks across the examples of a batch at {_lines(mixing.padded)}, but a batch "
            f"of {counted(size, 'example')} is padded for {counted(n, 'replica')}, and the padding "
            f"would change the result. {sizes}{drop}. Or exclude the padding: {_MASK}, "
            "with jnp.where(mask, x, 0) in a sum and jnp.where(mask, x, -jnp.inf) in a maximum."
        )

    def _mixing(
        self, step: Step, model: Any, padded: PaddedBatch, *, only_rows: bool = False
    ) -> Mixing:
        """Returns the lines at which a step looks across rows.

        Args:
            step: The step.
            model: Its first argument.
            padded: Its other arguments.
            only_rows: Whether only results with one row per example count.
        """
        program, mask, find, _ = self._program(step, model, padded)

        def mixing() -> Mixing:
            found = find(mask)
            if only_rows:
                (axis,) = mask.axes
                pairs = zip(found, program.jaxpr.outvars, strict=True)
                found = [rows for rows, var in pairs if var.aval.shape[:1] == (axis.size,)]
            return Mixing(
                *(
                    tuple(sorted({place for rows in found for place in getattr(rows, name)}))
                    for name in Mixing._fields
                )
            )

        return self._once((program, only_rows), mixing)

    def _counts_rows(self, step: Step, model: Any, padded: PaddedBatch) -> bool:
        """Whether results are likely to have a factor such as one divided by the number of rows."""
        program, mask, _, inputs = self._program(step, model, padded)

        def counts() -> bool:
            ((along, size, *_),) = mask.axes
            relations = [rows(along) if x.axes else SAME for x in inputs]
            try:
                found = guess(program, relations, 2, {size})
            except Exception:  # it is only a guess
                return False
            whys = {x.cause.why for x in found if x.cause is not None}
            is_scaled = any(x.kind is Kind.ROWS and x.scale != 1 for x in found)
            return is_scaled or not whys.isdisjoint((Why.SCALE, Why.FACTOR))

        return self._once((program, "counts"), counts)

    def _undefined(
        self, step: Step, model: Any, padded: PaddedBatch, has_empty: bool
    ) -> tuple[Place, ...]:
        """Returns the lines at which padding makes the gradients NaN.

        Args:
            step: The step whose gradients are computed.
            model: Its first argument.
            padded: Its other arguments.
            has_empty: Whether a replica or a piece has padding only.
        """
        program, _, find, _ = self._program(step, model, padded)

        def undefined() -> tuple[Place, ...]:
            if not any(rows.unknown >= _OF_MASK for rows in find(Rows(unknown=_OF_MASK))):
                return ()
            _, mask, of_gradients, _ = self._program(self._gradients[0], model, padded)
            found = of_gradients(mask)
            if has_empty:
                found += of_gradients(mask._replace(constant=0.0))
            return tuple(sorted({x for rows in found if rows.has_nan for x in rows.undefined}))

        return self._once((program, has_empty, "undefined"), undefined)

    def _clipped(self, step: Step, model: Any, padded: PaddedBatch) -> tuple[Place, ...]:
        """Returns the lines of custom derivatives, if half of a loss has not half the gradient."""
        program = self._program(step, model, padded)[0]

        def clipped() -> tuple[Place, ...]:
            eqns = equations(program.jaxpr)
            rules = [eqn for eqn in eqns if eqn.primitive.name == CUSTOM_VJP]
            if not rules or any(map(is_stateful, eqns)):
                return ()
            rows = self._first_examples(padded)
            try:
                whole, half = (self._gradient(step, model, *rows) for step in self._gradients)
                is_clipped = _distance(whole, half) > _GRADIENT_RTOL
            except Exception:  # of a loss that requires other numbers of rows
                is_clipped = False
            return tuple(Place(user_line(e)) for e in rules) if self._is_any(is_clipped) else ()

        return self._once((program, "clipped"), clipped)

    def _program(
        self, step: Step, model: Any, padded: PaddedBatch
    ) -> tuple[ClosedJaxpr, Rows, Callable[[Rows], list[Rows]], list[Rows]]:
        """Returns a step's program, the facts about the mask, what finds all facts, and inputs'."""
        _, traced, axis, are_rows = self._call(step, model, padded)
        program, size = traced.jaxpr, traced.function.avals[-1].shape[axis]
        inputs = [row(size, axis=axis) if is_row else NO_ROWS for is_row in are_rows]
        n = self._strategy.num_replicas_in_sync
        mask = row(size, axis=axis, is_mask=True)
        return program, mask, lambda mask: find_rows(program, [*inputs[:-1], mask], n), inputs

    def _call(
        self, step: Step, model: Any, padded: PaddedBatch
    ) -> tuple[Call, TracedStep, int, list[bool]]:
        """Returns a call, its trace, the axis of a replica's rows, and which inputs have it."""
        axis = len(_shape(padded)) - 2
        step = _of_first(step) if axis else step
        arguments = model, padded.batch, padded.mask
        call, traced = self._strategy._runner.traced(step, arguments, {})
        own = traced.function.per_replica
        first = len(own) - len(call.layout.dynamic)
        return call, traced, axis, [is_own and i >= first for i, is_own in enumerate(own)]

    def _once(self, key: Any, find: Callable[[], Any]) -> Any:
        """Returns what was found before for a program, or finds it."""
        for known, result in self._known:
            if known == key:
                return result
        result = find()
        self._known = [*self._known[-31:], (key, result)]
        return result

    def _exact(self, padded: PaddedBatch, index: int, size: int) -> PaddedBatch:
        """Returns one batch of a launch, without padding."""
        examples = examples_of(padded, index), np.ones(size, bool)
        ((batch, mask),) = self._strategy.distribute_dataset([examples])
        assert isinstance(mask, PerReplica)
        return PaddedBatch(batch, mask, 1, size, sizes=(size,))


def examples_of(padded: PaddedBatch, index: int = 0) -> PyTree:
    """Returns the examples of a batch of a launch, on the host."""

    def rows(leaf: PerReplica) -> np.ndarray:
        array = np.asarray(leaf.stacked)
        array = array[:, index] if len(_shape(padded)) == 3 else array
        return array.reshape(array.shape[0] * array.shape[1], *array.shape[2:])

    mask = rows(padded.mask)
    return jax.tree.map(lambda leaf: rows(leaf)[mask], padded.batch, is_leaf=is_per_replica)


def _shape(padded: PaddedBatch) -> tuple[int, ...]:
    """Returns the shape of the mask: replicas, batches of a group, rows of a replica."""
    return tuple(padded.mask.stacked.shape)


@functools.lru_cache(16)
def _of_first(step: Step) -> Step:
    """Returns a step that computes the first batch of a group."""

    def first(model: Any, batches: PyTree, masks: Any) -> Any:
        return step(model, *jax.tree.map(lambda x: x[0], (batches, masks)))

    return on_behalf_of(first, *users_functions(step))


def _every_and_each(batch: PyTree, mask: np.ndarray) -> list[Any]:
    """Returns the rows of all replicas as rows of one replica, and the rows of each."""
    every = jax.tree.map(
        lambda x: x.reshape(1, x.shape[0] * x.shape[1], *x.shape[2:]), (batch, mask)
    )
    parts = [jax.tree.map(lambda x, i=i: x[i : i + 1], (batch, mask)) for i in range(len(mask))]
    return [every, *parts]


def _in_halves(x: np.ndarray) -> np.ndarray:
    """Returns the rows of each replica as the rows of two."""
    half = x.shape[1] // 2
    return x[:, : 2 * half].reshape(2 * len(x), half, *x.shape[2:])


def _is_random(program: ClosedJaxpr) -> bool:
    """Whether a program draws random numbers."""
    return any(eqn.primitive.name in SAMPLER for eqn in equations(program.jaxpr))


def _numbers(eqn: JaxprEqn) -> tuple[str, list[Any]]:
    """Returns the name of an operation, and the numbers among its operands."""
    return eqn.primitive.name, [constant_of(x.val) for x in eqn.invars if isinstance(x, Literal)]


def _differ(x: float, y: float) -> bool:
    return abs(x - y) > _RTOL * abs(x)


def _distance(x: np.ndarray, y: np.ndarray) -> float:
    """Returns the largest difference of two gradients, relative to the largest number."""
    return float(np.abs(x - y).max() / max(np.abs(x).max(), np.finfo(float).tiny))


def _name(step: Step) -> str:
    return name_of(users_function(step))


def _lines(places: Sequence[Place]) -> str:
    return ", ".join(dict.fromkeys(place.line for place in places))


def mode_argument(model: nnx.Module) -> tuple[str, str] | None:
    """Returns the name of the class in a model whose call has such an argument, and the argument.

    The calls of Flax's layers have it too. There, it defaults to their attribute.
    """
    for _, node in nnx.iter_graph(model):
        module = node.to_nnx__module if isinstance(node, nnx.bridge.ToNNX) else node
        if not callable(module) or type(module).__module__.startswith("flax."):
            continue
        parameters = inspect.signature(type(module).__call__).parameters.values()
        for parameter in parameters:
            if parameter.name in _MODES and parameter.default is not None:
                return type(module).__name__, parameter.name
    return None


def message_of(name: str, argument: str, evidence: str) -> str:
    """Returns the warning that an evaluation is in training mode."""
    value = "not self.deterministic" if argument in _NEGATED else "self.deterministic"
    return (
        f"evaluate and predict call {name} in training mode: it {evidence}. Its mode is the "
        f"argument `{argument}`, and model.eval() changes attributes only. Let an attribute of an "
        f"nnx.Module decide: self.deterministic = False in __init__, and {argument} = {value} in "
        "__call__, which replaces the argument, or is passed to a Linen module."
    )
