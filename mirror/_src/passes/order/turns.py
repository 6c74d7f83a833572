"""Evaluation of a staged program on a device that runs its replicas in turn.

What depends on a replica runs in a loop over the replicas of a device; what is mirrored runs once.
The same bits on any number of devices take the same machine code for what a replica computes. So
XLA must not connect it with arrays whose size depends on the number of devices: each replica's turn
is a loop of one iteration, of a number that XLA does not know. `optimization_barrier` is not enough
(XLA:CPU removes it before it fuses operations; JAX 0.10.2 and 0.12.0.1).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp

from mirror._src.base.dtypes import keys_like
from mirror._src.base.types import Array
from mirror._src.devices.replicas import ReplicaDevices
from mirror._src.jaxprs.collective_eqns import ALL_REDUCES, reduce_locally
from mirror._src.passes.collective_rules import Formulas, positive_zero, reduce_extreme, uses_gloo
from mirror._src.passes.order.tree import TreeSum, add
from mirror._src.passes.program import Atom, Constant, Value, values_of
from mirror._src.passes.staging.ir import (
    Branch,
    Collective,
    Communication,
    Computation,
    Loop,
    Stage,
    StagedJaxpr,
)

# With several devices, XLA merges equal operations before it simplifies, with one device only
# afterwards (the pass `cse` in the pipeline `spmd-cleanup`; JAX 0.10.2 and 0.12.0.1). What it
# simplifies depends on how often a value is used, so that results would differ in the last bits.
# XLA:CPU compiles loops over few bytes in another way (`small-while-loop-hoisting`), and here the
# bytes depend on the number of devices.
COMPILER_OPTIONS = {"xla_disable_hlo_passes": "cse,small-while-loop-hoisting"}


class _Values:
    """Values on a device.

    Attributes:
        once: Mirrored ones.
        rows: The values of its replicas, `(per_device, *shape)`.
        free: Values that every reader computes itself, since they have no operands.
    """

    def __init__(self) -> None:
        self.once: dict[Value, Any] = {}
        self.rows: dict[Value, Any] = {}
        self.free: dict[Value, Computation] = {}

    def is_once(self, atom: Atom) -> bool:
        """Whether all replicas have the same value."""
        return isinstance(atom, Constant) or atom in self.once or atom in self.free

    def read(self, atom: Atom) -> Any:
        """Returns a mirrored value."""
        if isinstance(atom, Constant):
            return atom.value
        if atom not in self.once:
            step = self.free[atom]
            self.once.update(zip(step.outputs, step.run(*map(self.read, step.inputs)), strict=True))
        return self.once[atom]


class _Row(Formulas):
    """Collectives of one replica, given the values of all."""

    def __init__(self, values: Array, replica: Any) -> None:
        super().__init__(values.shape[0])
        self._values, self._replica = values, replica

    def _replica_id(self) -> Array:
        return self._replica

    def _gather(self, value: Array) -> Array:
        del value
        return self._values


class Turns:
    """Evaluates staged programs on one device, inside `jax.shard_map`.

    Args:
        replicas: Devices of the replicas.
        arrays: Replacements for the constant arrays of the program, by their `id`.
        count: The number of replicas of a device, as an array that XLA does not know.
    """

    def __init__(self, replicas: ReplicaDevices, arrays: Mapping[int, Any], count: Array) -> None:
        self._per_device = replicas.replicas_per_device
        self._axis, self._num_devices = replicas.axis_name, len(replicas.distinct)
        self._arrays, self._count = arrays, count
        n = len(replicas)
        self._sum = TreeSum(n, self._per_device, self._axis, over_gloo=uses_gloo(replicas))
        first = jax.lax.axis_index(self._axis) * self._per_device if self._num_devices > 1 else 0
        self._first = jnp.asarray(first, jnp.int32)

    def run(self, staged: StagedJaxpr, inputs: Sequence[Any]) -> list[Any]:
        """Returns the outputs; of per-replica ones, a row for each replica of the device."""
        values = _Values()
        ids = self._first + jnp.arange(self._per_device, dtype=jnp.int32)
        values.rows[staged.replica_id] = ids
        for value, leaf in zip(staged.inputs, inputs, strict=True):
            (values.once if value.is_mirrored else values.rows)[value] = leaf
        for value, array in staged.constants:
            values.once[value] = self._arrays[id(array)]
        for stage in staged.stages:
            self._stage(stage, values, staged.replica_id)
        return [
            self._mirrored(atom, values) if is_mirrored else self._rows(atom, values)
            for atom, is_mirrored in zip(
                staged.stages[-1].outputs, staged.mirrored_outputs, strict=True
            )
        ]

    def _stage(self, stage: Stage, values: _Values, replica_id: Value) -> None:
        in_turn = [step for step in stage.computations if not _runs_once(step, values)]
        sums = [step for step in stage.communications if _is_sum(step)]
        others = [step for step in stage.communications if not _is_sum(step)]
        sent = [atom for step in others for atom in values_of(step.inputs)]
        operands = [step.operand for step in sums]
        made = {value for step in in_turn for value in step.outputs}
        added: set[Value] = set()
        if self._sum.depth is not None:  # the others need the rows
            alone = {v for v in operands if operands.count(v) == 1 and v not in sent}
            added = alone & made & set(stage.last_read)
        needed = {*values_of(stage.outputs), *sent, *operands} - added
        pieces = self._in_turn(in_turn, values, replica_id, needed, added)
        for value in dict.fromkeys(v for v in operands if v not in pieces):
            pieces[value] = self._sum.of_rows(self._rows(value, values))
        totals = self._sums([pieces[value] for value in operands])
        values.once.update((step.outputs[0], x) for step, x in zip(sums, totals, strict=True))
        for step in others:
            match step:
                case Collective():
                    self._collective(step, values)
                case Loop():
                    self._loop(step, values)
                case Branch():
                    self._branch(step, values)

    def _mirrored(self, atom: Atom, values: _Values) -> Any:
        return (
            jnp.asarray(values.read(atom)) if values.is_once(atom) else self._rows(atom, values)[0]
        )

    def _rows(self, atom: Atom, values: _Values) -> Any:
        if isinstance(atom, Value) and not values.is_once(atom):
            return values.rows[atom]
        value = jnp.asarray(values.read(atom))
        return jnp.broadcast_to(value[None], (self._per_device, *value.shape))

    def _in_turn(
        self,
        steps: Sequence[Computation],
        values: _Values,
        replica_id: Value,
        needed: set[Value],
        added: set[Value],
    ) -> dict[Value, Array]:
        """Runs computations for each replica; returns the pieces of the sums of `added`."""
        if not steps:
            return {}
        made = [value for step in steps for value in step.outputs]
        kept = [value for value in made if value in needed]
        summed = [value for value in made if value in added]

        def one(row: Callable[[Value], Any], replica: Any) -> list[Any]:
            local: dict[Value, Any] = {replica_id: replica}

            def read(atom: Atom) -> Any:
                if isinstance(atom, Constant):
                    return atom.value
                if atom in values.once:
                    return values.once[atom]
                if atom not in local and atom in values.free:
                    step = values.free[atom]
                    results = step.run(*map(read, step.inputs))
                    local.update(zip(step.outputs, results, strict=True))
                if atom not in local:
                    local[atom] = row(atom)
                return local[atom]

            for step in steps:
                results = step.run(*map(read, step.inputs))
                local.update(zip(step.outputs, results, strict=True))
            return [jnp.asarray(local[value]) for value in (*kept, *summed)]

        read = dict.fromkeys(value for step in steps for value in values_of(step.inputs))
        rows = {value: values.rows[value] for value in read if value in values.rows}
        rows.pop(replica_id, None)
        stacked, sums = self._turns(one, rows, [v.aval for v in kept], [v.aval for v in summed])
        values.rows.update(zip(kept, stacked, strict=True))
        return dict(zip(summed, (total[None] for total in sums), strict=True))

    def _turns(
        self,
        one: Callable[..., list[Any]],
        rows: Mapping[Value, Any],
        kept: Sequence[Any],
        summed: Sequence[Any] = (),
    ) -> tuple[list[Any], list[Any]]:
        """Calls `one` for every replica of this device.

        Args:
            one: Function of a reader of rows, and of the index of the replica.
            rows: The rows that it reads.
            kept: Types of the first results, which are stacked.
            summed: Types of the others, which are added in the order of the tree. This keeps one
                array per level of the tree, not one per replica.
        """
        last = self._per_device - 1

        def at(i: Any) -> list[Any]:
            i = jnp.minimum(i, last)
            return [jax.lax.dynamic_index_in_dim(x, i, 0, keepdims=False) for x in rows.values()]

        def store(stacked: list[Any], results: Sequence[Any], i: Any) -> list[Any]:
            pairs = zip(stacked, results, strict=True)
            return [jax.lax.dynamic_update_index_in_dim(s, r, i, 0) for s, r in pairs]

        def turn(i: Any, mine: list[Any]) -> tuple[list[Any], list[Any]]:
            """Returns the next replica's slices, and this one's results."""

            def body(state: Any) -> Any:
                j, mine, _ = state
                named = dict(zip(rows, mine, strict=True))
                results = list(map(_bits, one(named.__getitem__, self._first + i)))
                # Slices of this turn would be invariant, so that XLA could move the computation
                # out of the loop.
                return j + 1, at(i + 1), results

            blank = [jnp.zeros(x.shape, x.dtype) for x in map(_bits_of, (*kept, *summed))]
            return self._few_times(1, body, (mine, blank))

        def node(level: int, i: Any, state: Any) -> Any:
            """Runs the replicas `i` to `i + 2**level - 1`; returns the state and the sums."""
            mine, stacked = state
            if level == 0:
                mine, results = turn(i, mine)
                stacked = store(stacked, results[: len(kept)], i)
                return (mine, stacked), results[len(kept) :]

            def body(state: Any) -> Any:
                j, inner, sums = state
                inner, more = node(level - 1, i + (j << (level - 1)), inner)
                pairs = zip(sums, more, strict=True)
                return j + 1, inner, [jnp.where(j == 0, new, add(old, new)) for old, new in pairs]

            blank = [jnp.zeros(aval.shape, aval.dtype) for aval in summed]
            return self._few_times(2, body, (state, blank))

        empty = [_bits_of(aval) for aval in kept]
        state = at(0), [jnp.zeros((self._per_device, *x.shape), x.dtype) for x in empty]
        if summed and self._sum.depth is not None:
            (_, stacked), sums = node(self._sum.depth, jnp.int32(0), state)
        else:
            sums = []

            def body(state: Any) -> Any:
                i, mine, stacked = state
                mine, results = turn(i, mine)
                return i + 1, mine, store(stacked, results, i)

            _, stacked = self._few_times(self._per_device, body, state)
        return [_unbits(bits, aval) for bits, aval in zip(stacked, kept, strict=True)], sums

    def _few_times(self, count: int, body: Callable[..., Any], state: tuple[Any, ...]) -> Any:
        """Runs a loop of at most `count` iterations; XLA does not know how many."""
        most = jnp.minimum(self._count, count)
        return jax.lax.while_loop(lambda s: s[0] < most, body, (jnp.int32(0), *state))[1:]

    def _sums(self, pieces: Sequence[Array]) -> list[Array]:
        """Returns sums over all replicas; XLA does not connect the additions with their readers."""
        totals = [self._sum.exchanged(of_device) for of_device in pieces]
        waiting = [total for total in totals if not isinstance(total, jax.Array)]
        if not waiting:
            return [total for total in totals if isinstance(total, jax.Array)]
        like = jax.eval_shape(lambda: [add_up() for add_up in waiting])
        blank = [jnp.zeros(x.shape, x.dtype) for x in like]
        body = lambda s: (s[0] + 1, [add_up() for add_up in waiting])  # noqa: E731
        added = iter(self._few_times(1, body, (blank,))[0])
        return [total if isinstance(total, jax.Array) else next(added) for total in totals]

    def _gather(self, rows: Array) -> Array:
        return jax.lax.all_gather(rows, self._axis, tiled=True) if self._num_devices > 1 else rows

    def _collective(self, step: Collective, values: _Values) -> None:
        (out,), name = step.outputs, step.primitive
        rows = self._rows(step.operand, values)
        if step.spans_all and name in ALL_REDUCES:
            values.once[out] = self._extreme(name, rows)
            return
        total = None
        if step.spans_all and name == "reduce_scatter":
            (total,) = self._sums([self._sum.of_rows(rows)])
        everyone = self._gather(rows)
        if out.is_mirrored:
            values.once[out] = _formula(step, everyone, everyone[0], jnp.int32(0), total)
            return

        def one(_: Any, replica: Any) -> list[Any]:
            mine = jax.lax.dynamic_index_in_dim(everyone, replica, 0, keepdims=False)
            return [_formula(step, everyone, mine, replica, total)]

        (values.rows[out],), _ = self._turns(one, {}, [out.aval])

    def _extreme(self, name: str, rows: Array) -> Array:
        if rows.dtype == jnp.bool_:
            return self._extreme(name, rows.astype(jnp.uint8)).astype(jnp.bool_)
        extreme = positive_zero(reduce_locally(name, rows, (0,)))
        return reduce_extreme(name, extreme, self._axis) if self._num_devices > 1 else extreme

    def _inputs(self, atoms: Sequence[Atom], values: _Values, staged: StagedJaxpr) -> list[Any]:
        return [
            self._mirrored(atom, values) if value.is_mirrored else self._rows(atom, values)
            for atom, value in zip(atoms, staged.inputs, strict=True)
        ]

    def _loop(self, step: Loop, values: _Values) -> None:
        inputs = self._inputs(step.inputs, values, step.body)
        first = len(inputs) - len(step.outputs)
        reads, carried = inputs[:first], inputs[first:]
        run = lambda carry: self.run(step.body, [*reads, *carry])  # noqa: E731
        test = step.test
        if test is None:
            carried = jax.lax.fori_loop(0, step.trips, lambda _, carry: run(carry), carried)
        else:
            goes_on = lambda carry: self.run(test, [*reads, *carry])[0][0]  # noqa: E731
            carried = jax.lax.while_loop(goes_on, run, carried)
        values.rows.update(zip(step.outputs, carried, strict=True))

    def _branch(self, step: Branch, values: _Values) -> None:
        index = self._mirrored(step.inputs[0], values)
        operands = self._inputs(step.inputs[1:], values, step.branches[0])
        branches = [lambda *ops, b=branch: self.run(b, ops) for branch in step.branches]
        results = jax.lax.switch(index.astype(jnp.int32), branches, *operands)
        values.rows.update(zip(step.outputs, results, strict=True))


def _runs_once(step: Computation, values: _Values) -> bool:
    """Runs a computation of mirrored values; `False` if replicas may compute different ones."""
    if step.has_effects or not all(map(values.is_once, step.inputs)):
        return False
    if all(isinstance(atom, Constant) or atom in values.free for atom in step.inputs):
        # As in the step of one replica, XLA merges constants with the operations that read them.
        values.free.update(dict.fromkeys(step.outputs, step))
        return True
    results = step.run(*map(values.read, step.inputs))
    values.once.update(zip(step.outputs, results, strict=True))
    return True


def _formula(step: Collective, everyone: Array, mine: Array, replica: Any, total: Any) -> Array:
    """Returns the result of a collective on one replica, given the operands of all replicas."""
    row, params, name = _Row(everyone, replica), step.params, step.primitive
    if name in row.moves:
        return row.moves[name](params, mine)
    if name == "reduce_scatter":
        if total is None:
            rows = row.gather_in_group(mine, params["axis_index_groups"])
            total = reduce_locally("psum", rows, (0,))
        return row.scattered(params, total)
    reduced = lambda primitive, rows: reduce_locally(primitive, rows, (0,))  # noqa: E731
    return row.reduce_in_groups(name, mine, params["axis_index_groups"], reduced)


def _is_sum(step: Communication) -> TypeGuard[Collective]:
    """Whether a communication is a sum over all replicas."""
    return isinstance(step, Collective) and step.primitive == "psum" and step.spans_all


def _is_key(aval: Any) -> bool:
    return jnp.issubdtype(aval.dtype, jax.dtypes.extended)


def _bits(value: Any) -> Any:
    """Returns the key data of keys, whose rows JAX cannot write, and other arrays as they are."""
    return jax.random.key_data(value) if _is_key(value) else value


def _bits_of(aval: Any) -> Any:
    """Returns the type of `_bits`."""
    return jax.eval_shape(_bits, jax.ShapeDtypeStruct(aval.shape, aval.dtype))


def _unbits(bits: Array, aval: Any) -> Array:
    """Returns what `_bits` has converted."""
    return keys_like(bits, aval) if _is_key(aval) else bits
