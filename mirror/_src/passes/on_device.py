"""Evaluation of a staged program on one device, which has one or several replicas.

What is mirrored runs once; how the rest runs for each replica, and how sums are added, is up to the
mode: together, by `jax.vmap` (`Vectorized`), or in turn (`passes.order`).

The gradient of a weight is a product that contracts the batch axis. Under `jax.vmap` over k
replicas it becomes k products, and the all-reduce becomes a sum over them:

    dw = einsum("kbi,kbo->kio", x, dy)    # k copies of the gradient
    total = dw.sum(0)

The sum equals one product that contracts replicas and batch together, which is what one device
computes for the whole batch: `einsum("kbi,kbo->io", x, dy)`. XLA does not merge the sum into the
contraction (JAX 0.10.2 and 0.12.0.1): it stores k copies of every gradient. Delete `_PRODUCTS` when
it does: then `assert holds_copies(plain, w, x)` fails in tests/passes/test_vectorized.py.
"""

import abc
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, TypeGuard

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn

from mirror._src.base.types import Array
from mirror._src.devices.replicas import ReplicaDevices
from mirror._src.jaxprs.collective_eqns import ALL_REDUCES, reduce_locally
from mirror._src.jaxprs.primitives import shape_of
from mirror._src.passes.collective_rules import (
    Formulas,
    Reduction,
    reduce_extreme,
    reduced_by,
    sum_of_parts,
)
from mirror._src.passes.evaluate import Rule, Rules, at_line_of, bind
from mirror._src.passes.lower import lowered
from mirror._src.passes.program import Atom, Constant, Value, values_of
from mirror._src.passes.staged import (
    Branch,
    Collective,
    Communication,
    Computation,
    Loop,
    Stage,
    StagedJaxpr,
    drop_unused,
)

OfReplica: TypeAlias = Callable[[Callable[[Value], Any], Any], list[Any]]
"""Function of a reader of rows, and of the index of the replica."""


class Values:
    """Values on a device.

    Attributes:
        replica_id: The value of the replica's index.
        once: Mirrored ones.
        rows: The values of its replicas, `(per_device, *shape)`.
        free: Values that every reader computes itself, since they have no operands.
    """

    def __init__(self, replica_id: Value, ids: Array) -> None:
        self.replica_id = replica_id
        self.once: dict[Value, Any] = {}
        self.rows: dict[Value, Any] = {replica_id: ids}
        self.free: dict[Value, Computation] = {}

    def is_once(self, atom: Atom) -> bool:
        """Whether all replicas have the same value."""
        return isinstance(atom, Constant) or atom in self.once or atom in self.free

    def read(self, atom: Atom) -> Any:
        """Returns a mirrored value."""
        if isinstance(atom, Constant):
            return atom.value
        if atom not in self.once:
            _run(self.free[atom], self.read, self.once)
        return self.once[atom]


def _run(step: Computation, read: Callable[[Atom], Any], results: dict[Value, Any]) -> None:
    """Runs a computation, and stores its results."""
    results.update(zip(step.outputs, step.run(*map(read, step.inputs)), strict=True))


class OnDevice(abc.ABC):
    """Evaluates staged programs on one device, inside `jax.shard_map` if there are several.

    Args:
        replicas: Devices of the replicas.
        arrays: Replacements for the constant arrays of the program, by their `id`.
        reduction: Reduces the replicas' operands in place of XLA, unless it is None.
    """

    def __init__(
        self,
        replicas: ReplicaDevices,
        arrays: Mapping[int, Any],
        reduction: Reduction | None = None,
    ) -> None:
        self._per_device = replicas.replicas_per_device
        self._axis, self._num_devices = replicas.axis_name, len(replicas.distinct)
        self._arrays, self._reduction = arrays, reduction
        first = jax.lax.axis_index(self._axis) * self._per_device if self._num_devices > 1 else 0
        self._first = jnp.asarray(first, jnp.int32)

    @abc.abstractmethod
    def each(self, one: OfReplica, rows: Mapping[Value, Any], kept: Sequence[Any]) -> list[Any]:
        """Calls a function for every replica of this device, and stacks the results.

        Args:
            one: The function.
            rows: The rows that it reads.
            kept: Types of the results.
        """

    @abc.abstractmethod
    def computed(
        self, steps: list[Computation], values: Values, needed: set[Value], sums: list[Collective]
    ) -> list[Any]:
        """Runs computations for each replica, and returns sums over all replicas.

        Args:
            steps: The computations.
            values: Receives the rows of their results.
            needed: The results that are read outside, except those that only sums read.
            sums: The sums.
        """

    def reduced(self, step: Collective, rows: Array, primitive: str = "psum") -> Array:
        """Returns the reduction of the operands of several replicas."""
        return reduced_by(self._reduction, primitive, rows, step.description)

    def run(self, staged: StagedJaxpr, inputs: Sequence[Any]) -> list[Any]:
        """Returns the outputs; of per-replica ones, a row for each replica of the device."""
        once = [value.is_mirrored for value in staged.inputs]
        return self._outputs(staged, inputs, once, staged.mirrored_outputs)

    def _evaluated(
        self, staged: StagedJaxpr, inputs: Sequence[Any], once: Sequence[bool]
    ) -> Values:
        ids = self._first + jnp.arange(self._per_device, dtype=jnp.int32)
        values = Values(staged.replica_id, ids)
        for value, leaf, is_once in zip(staged.inputs, inputs, once, strict=True):
            (values.once if is_once else values.rows)[value] = leaf
        for value, array in staged.constants:
            values.once[value] = self._arrays[id(array)]
        for stage in staged.stages:
            self._stage(stage, values)
        return values

    def _stage(self, stage: Stage, values: Values) -> None:
        steps = [step for step in stage.computations if not _runs_once(step, values)]
        sums = [step for step in stage.communications if _is_sum(step)]
        others = [step for step in stage.communications if not _is_sum(step)]
        sent = {atom for step in others for atom in values_of(step.inputs)}
        summed = {step.operand for step in sums} & set(stage.last_read) - sent
        needed = {*values_of(stage.outputs), *sent} - summed
        totals = self.computed(steps, values, needed, sums)
        values.once.update((step.outputs[0], x) for step, x in zip(sums, totals, strict=True))
        for step in others:
            match step:
                case Collective():
                    self._collective(step, values)
                case Loop():
                    self._loop(step, values)
                case Branch():
                    self._branch(step, values)

    def _read(self, atoms: Sequence[Atom], values: Values, once: Sequence[bool]) -> list[Any]:
        """Returns values, each as a mirrored one or as rows."""
        pairs = zip(atoms, once, strict=True)
        return [
            self._mirrored(atom, values) if is_once else self.rows_of(atom, values)
            for atom, is_once in pairs
        ]

    def _mirrored(self, atom: Atom, values: Values) -> Any:
        if values.is_once(atom):
            return jnp.asarray(values.read(atom))
        return self.rows_of(atom, values)[0]

    def rows_of(self, atom: Atom, values: Values) -> Any:
        """Returns a value as a row for each replica of the device."""
        if isinstance(atom, Value) and not values.is_once(atom):
            return values.rows[atom]
        value = jnp.asarray(values.read(atom))
        return jnp.broadcast_to(value[None], (self._per_device, *value.shape))

    def gather(self, rows: Array) -> Array:
        """Returns the rows of all devices."""
        return jax.lax.all_gather(rows, self._axis, tiled=True) if self._num_devices > 1 else rows

    def _collective(self, step: Collective, values: Values) -> None:
        (out,), name = step.outputs, step.primitive
        rows = self.rows_of(step.operand, values)
        if step.spans_all and name in ALL_REDUCES:
            values.once[out] = self.extreme(step, rows)
            return
        total = None
        if step.spans_all and name == "reduce_scatter":
            (total,) = self.computed([], values, set(), [step])
        everyone = self.gather(rows)
        if out.is_mirrored:
            values.once[out] = self._formula(step, everyone, everyone[0], jnp.int32(0), total)
            return

        def one(_: Any, replica: Any) -> list[Any]:
            mine = jax.lax.dynamic_index_in_dim(everyone, replica, 0, keepdims=False)
            return [self._formula(step, everyone, mine, replica, total)]

        (values.rows[out],) = self.each(one, {}, [out.aval])

    def extreme(self, step: Collective, rows: Array) -> Array:
        """Returns the maximum or minimum over all replicas."""
        if self._reduction is not None:
            return self.reduced(step, self.gather(rows), step.primitive)
        if rows.dtype == jnp.bool_:
            return self.extreme(step, rows.astype(jnp.uint8)).astype(jnp.bool_)
        extreme = reduce_locally(step.primitive, rows, (0,))
        if self._num_devices == 1:
            return extreme
        return reduce_extreme(step.primitive, extreme, self._axis)

    def _formula(
        self, step: Collective, everyone: Array, mine: Array, replica: Any, total: Any
    ) -> Array:
        """Returns the result of a collective on one replica, given the operands of all replicas."""
        row = Formulas(everyone.shape[0], lambda: replica, lambda _: everyone)
        params, name = step.params, step.primitive
        if name in row.moves:
            return row.moves[name](params, mine)
        if name == "reduce_scatter":
            if total is None:
                rows = row.gather_in_group(mine, params["axis_index_groups"])
                total = self.reduced(step, rows)
            return row.scattered(params, total)
        reduced = lambda primitive, rows: self.reduced(step, rows, primitive)  # noqa: E731
        return row.reduce_in_groups(name, mine, params["axis_index_groups"], reduced)

    def _outputs(
        self, staged: StagedJaxpr, inputs: Sequence[Any], once: Sequence[bool], like: Sequence[bool]
    ) -> list[Any]:
        values = self._evaluated(staged, inputs, once)
        return self._read(staged.stages[-1].outputs, values, like)

    def _found(
        self, staged: StagedJaxpr, inputs: Sequence[Any], once: Sequence[bool]
    ) -> list[bool]:
        """Returns which outputs of an inner program are the same on all replicas."""
        found: list[bool] = []

        def run(*inputs: Any) -> None:
            values = self._evaluated(staged, inputs, once)
            found.extend(map(values.is_once, staged.stages[-1].outputs))

        jax.eval_shape(run, *inputs)
        return found

    def _loop(self, step: Loop, values: Values) -> None:
        once = list(map(values.is_once, step.inputs))
        first = len(once) - len(step.outputs)
        before = None
        while once != before:  # what is mirrored before the loop may become per-replica in it
            before, inputs = [*once], self._read(step.inputs, values, once)
            found = self._found(step.body, inputs, once)
            once[first:] = [a and b for a, b in zip(once[first:], found, strict=True)]
        reads, carried = inputs[:first], inputs[first:]
        run = lambda carry: self._outputs(step.body, [*reads, *carry], once, once[first:])  # noqa: E731
        test = step.test
        if test is None:
            carried = jax.lax.fori_loop(0, step.trips, lambda _, carry: run(carry), carried)
        else:
            goes_on = lambda carry: self._outputs(test, [*reads, *carry], once, [True])[0]  # noqa: E731
            carried = jax.lax.while_loop(goes_on, run, carried)
        self._store(step.outputs, carried, once[first:], values)

    def _branch(self, step: Branch, values: Values) -> None:
        index, *operands = step.inputs
        once = list(map(values.is_once, operands))
        inputs = self._read(operands, values, once)
        found = [self._found(branch, inputs, once) for branch in step.branches]
        alike = [all(flags) for flags in zip(*found, strict=True)]
        branches = [
            lambda *ops, b=branch: self._outputs(b, ops, once, alike) for branch in step.branches
        ]
        where = self._mirrored(index, values).astype(jnp.int32)
        results = jax.lax.switch(where, branches, *inputs)
        self._store(step.outputs, results, alike, values)

    def _store(
        self, outputs: Sequence[Value], results: Sequence[Any], once: Sequence[bool], values: Values
    ) -> None:
        for value, result, is_once in zip(outputs, results, once, strict=True):
            (values.once if is_once else values.rows)[value] = result

    def function(
        self, steps: Sequence[Computation], values: Values, kept: Sequence[Value]
    ) -> tuple[OfReplica, dict[Value, Any]]:
        """Returns the function of one replica that runs computations, and the rows it reads."""

        def one(row: Callable[[Value], Any], replica: Any) -> list[Any]:
            local: dict[Value, Any] = {values.replica_id: replica}

            def read(atom: Atom) -> Any:
                if isinstance(atom, Constant) or atom in values.once:
                    return values.read(atom)
                if atom not in local and atom in values.free:
                    _run(values.free[atom], read, local)
                if atom not in local:
                    local[atom] = row(atom)
                return local[atom]

            for step in steps:
                _run(step, read, local)
            return [jnp.asarray(local[value]) for value in kept]

        read = dict.fromkeys(value for step in steps for value in values_of(step.inputs))
        rows = {value: values.rows[value] for value in read if value in values.rows}
        rows.pop(values.replica_id, None)
        return one, rows


def _runs_once(step: Computation, values: Values) -> bool:
    """Runs a computation of mirrored values; `False` if replicas may compute different ones."""
    if step.has_effects or not all(map(values.is_once, step.inputs)):
        return False
    if all(isinstance(atom, Constant) or atom in values.free for atom in step.inputs):
        # As in the step of one replica, XLA merges constants with the operations that read them.
        values.free.update(dict.fromkeys(step.outputs, step))
        return True
    _run(step, values.read, values.once)
    return True


def _is_sum(step: Communication) -> TypeGuard[Collective]:
    """Whether a communication is a sum over all replicas."""
    return isinstance(step, Collective) and step.primitive == "psum" and step.spans_all


_ROWS = "rows of a device"
CALLED_SEQUENTIALLY: Rules = {
    "pure_callback": lambda eqn: None if eqn.params["vmap_method"] else _call_sequentially,
    "io_callback": lambda _: _call_for_each,
}
"""Each replica calls its function separately, as with one replica per device."""


def _call_sequentially(eqn: JaxprEqn, arguments: list[Any]) -> list[Any]:
    return bind(eqn, arguments, vmap_method="sequential")


def _call_for_each(eqn: JaxprEqn, arguments: list[Any]) -> list[Any]:
    """Adds an operand that differs between replicas: without any, `jax.vmap` calls only once."""
    callback = eqn.params["callback"]
    row = jax.lax.axis_index(_ROWS)
    return bind(eqn, [row, *arguments], callback=lambda _, *values: callback(*values))


def vectorized(fn: Callable[..., Any], rules: Rules) -> Callable[..., Any]:
    """Returns a function that uses `jax.vmap`, whose operations are replaced afterwards."""

    def run(*leaves: Any) -> Any:
        try:
            return lowered(lowered(fn, _POOLING), rules)(*leaves)
        except Exception as error:
            # JAX raises `Exception` itself for a callback in a loop of each replica's own rounds.
            if type(error) is not Exception and not isinstance(error, _OF_VMAP):
                raise
            raise NotImplementedError(
                "This step cannot run with several replicas per device, which relies on "
                f"jax.vmap: {str(error).rstrip('.')}. Use one replica per device, or rewrite "
                "the operation."
            ) from error

    return run


_OF_VMAP = (NotImplementedError, AssertionError, NameError, ValueError)
_SIZES = ("window_dimensions", "window_strides", "base_dilation", "window_dilation")
_TRIVIAL: dict[str, Any] = {**dict.fromkeys(_SIZES, 1), "padding": (0, 0)}


def _pooling(eqn: JaxprEqn) -> Rule | None:
    """Returns a rule if images are pooled: windows span one replica and one example."""
    windows = {name: eqn.params[name][:2] for name in _TRIVIAL if name in eqn.params}
    are_trivial = all(tuple(two) == (_TRIVIAL[name],) * 2 for name, two in windows.items())
    return _pool if are_trivial and len({shape_of(x)[:2] for x in eqn.invars}) == 1 else None


def _pool(eqn: JaxprEqn, arguments: list[Any]) -> list[Any]:
    """Pools the examples of all replicas as one batch: XLA is slower with the extra axis."""
    params = {k: v[1:] if k in _TRIVIAL else v for k, v in eqn.params.items()}
    k, b, *_ = arguments[0].shape
    batches = [x.reshape(k * b, *x.shape[2:]) for x in arguments]
    return [pooled.reshape(k, b, *pooled.shape[1:]) for pooled in bind(eqn, batches, **params)]


_POOLING: Rules = dict.fromkeys(
    ("reduce_window_max", "reduce_window_min", "reduce_window_sum", "select_and_scatter_add"),
    _pooling,
)


class Vectorized(OnDevice):
    """Computes the replicas of a device together."""

    def each(self, one: OfReplica, rows: Mapping[Value, Any], kept: Sequence[Any]) -> list[Any]:
        """See `OnDevice.each`."""
        del kept
        ids = self._first + jnp.arange(self._per_device, dtype=jnp.int32)
        run = lambda i, mine: one(dict(zip(rows, mine, strict=True)).__getitem__, i)  # noqa: E731
        return jax.vmap(run, axis_name=_ROWS)(ids, list(rows.values()))

    def computed(
        self, steps: list[Computation], values: Values, needed: set[Value], sums: list[Collective]
    ) -> list[Any]:
        """See `OnDevice.computed`."""
        makers: dict[Atom, Computation] = {}
        if self._reduction is None:
            makers = {step.outputs[0]: step for step in steps if len(step.outputs) == 1}
        totals = [self._sum(step.operand, values, makers) for step in sums]
        wanted = {*needed, *(value for sources, _ in totals for value in values_of(sources))}
        kept = [step for step in drop_unused(steps, [*wanted]) if isinstance(step, Computation)]
        made = [value for step in kept for value in step.outputs if value in wanted]
        one, rows = self.function(kept, values, made)
        values.rows.update(zip(made, self.each(one, rows, []), strict=True))
        if self._reduction is not None:
            operands = [self.gather(self.rows_of(step.operand, values)) for step in sums]
            return [self.reduced(*pair) for pair in zip(sums, operands, strict=True)]
        results = [total() for _, total in totals]
        return list(map(self._over_devices, sums, results))

    def _sum(
        self, atom: Atom, values: Values, makers: Mapping[Atom, Computation]
    ) -> tuple[Sequence[Atom], Callable[[], Array]]:
        """Returns the values that a sum over the replicas of this device reads, and the sum."""
        maker = makers.get(atom)
        if maker is not None and maker.moves:
            parts = [self._sum(each, values, makers) for each in maker.inputs]
            sources = [value for sources, _ in parts for value in sources]
            return sources, lambda: maker.run(*(total() for _, total in parts))[0]
        merged = None
        if maker is not None and maker.eqn is not None:
            merged = _PRODUCTS.get(maker.eqn.primitive.name, lambda _: None)(maker.eqn)
        if maker is not None and merged is not None and not any(map(values.is_once, maker.inputs)):
            factors = maker.inputs
            return factors, lambda: merged(*(self.rows_of(each, values) for each in factors))
        return [atom], lambda: reduce_locally("psum", self.rows_of(atom, values), (0,))

    def _over_devices(self, step: Collective, total: Array) -> Array:
        if self._num_devices == 1:
            return total
        if len(step.lines) == 1:
            return sum_of_parts(lambda x: jax.lax.psum(x, self._axis), total)
        barrier = jax.lax.optimization_barrier  # as in `evaluate`, around a pack
        return barrier(jax.lax.psum(barrier(total), self._axis))


def _dot_general(eqn: JaxprEqn) -> Callable[..., Array]:
    """Contracts the replicas, too: `einsum("kbi,kbo->io", x, dy)`."""
    contracted, batch = (
        [[axis + 1 for axis in axes] for axes in pair] for pair in eqn.params["dimension_numbers"]
    )
    numbers = tuple((0, *axes) for axes in contracted), tuple(map(tuple, batch))
    return lambda *rows: _bound(eqn, rows, dimension_numbers=numbers)


def _convolution(eqn: JaxprEqn) -> Callable[..., Array] | None:
    """Joins the input features of all replicas: a convolution is a sum over input features."""
    lhs, rhs, _ = eqn.params["dimension_numbers"]
    if eqn.params["feature_group_count"] > 1:  # which would join features of other groups
        return None
    return lambda x, w: _bound(eqn, (_joined(x, lhs[1]), _joined(w, rhs[1])))


def _joined(rows: Array, axis: int) -> Array:
    """Joins the rows along an axis."""
    count, *shape = rows.shape
    shape[axis] *= count
    return jnp.moveaxis(rows, 0, axis).reshape(shape)


def _bound(eqn: JaxprEqn, rows: Sequence[Array], **changed: Any) -> Array:
    with at_line_of(eqn):
        return bind(eqn, rows, **changed)[0]


_PRODUCTS: dict[str, Callable[[JaxprEqn], Callable[..., Array] | None]] = {
    "dot_general": _dot_general,
    "conv_general_dilated": _convolution,
}
