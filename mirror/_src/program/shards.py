"""Sharded weight update: which operations and which state of a step need only 1/n on each replica.

Behind the all-reduce of the gradients, every replica computes the same update (arXiv 2004.13336).
Where the update is elementwise, each replica can compute a slice of it instead: the all-reduce
becomes a reduce-scatter, state that only the update reads is stored in slices, and new weights are
gathered. A value that is sharded is sharded along the first of its axes that n divides.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn

from mirror._src.program.collective_eqns import contains_collective, is_collective, names_axis
from mirror._src.program.flat import Atom, FlatProgram, Operation, Value, flatten
from mirror._src.program.jaxprs import called, equations, inner_programs, jaxpr_of
from mirror._src.program.primitives import MIRRORING, is_replica_source
from mirror._src.program.user_lines import line_within
from mirror._src.utils.errors import describe

_ELEMENTWISE = frozenset(
    (
        *(
            "add",
            "add_any",
            "sub",
            "mul",
            "div",
            "rem",
            "neg",
            "abs",
            "sign",
            "max",
            "min",
            "clamp",
        ),
        *("sqrt", "rsqrt", "cbrt", "square", "integer_pow", "pow", "exp", "exp2", "expm1", "log"),
        *("log1p", "tanh", "logistic", "sin", "cos", "tan", "erf", "erfc", "erf_inv", "atan2"),
        *("floor", "ceil", "round", "nextafter", "reduce_precision", "convert_element_type"),
        *("select_n", "is_finite", "eq", "ne", "lt", "le", "gt", "ge", "and", "or", "not", "xor"),
        *("copy", "copy_p"),
    )
)
_REDUCTIONS = frozenset({"reduce_sum", "reduce_max", "reduce_min", "reduce_and", "reduce_or"})


class Shards(NamedTuple):
    """How the update of a step is sharded.

    Attributes:
        flat: The program.
        region: Operations that each replica computes for its own slice.
        reduced: Reductions of a sharded value to a scalar: each replica reduces its slice first.
        inputs: For the inputs that come in slices, the axis.
        outputs: For the outputs that are left in slices, the axis.
        reasons: For the other inputs that are state, why they are mirrored.
    """

    flat: FlatProgram
    region: frozenset[Operation]
    reduced: frozenset[Operation]
    inputs: Mapping[int, int]
    outputs: Mapping[int, int]
    reasons: Mapping[int, str]

    @property
    def gathered(self) -> list[Value]:
        """The outputs that are computed in slices and left whole."""
        made = {value for each in self.region for value in each.outputs}
        outputs = enumerate(self.flat.outputs)
        found = (atom for j, atom in outputs if j not in self.outputs and atom in made)
        return list(dict.fromkeys(atom for atom in found if isinstance(atom, Value)))

    @property
    def scattered(self) -> list[Operation]:
        """The all-reduces of which each replica needs one slice."""
        return [each for each in self.flat.operations if each in self.region and is_scattered(each)]


def packs_of(values: Iterable[Value], limit: int) -> list[list[Value]]:
    """Values of one dtype that are gathered together: those of at most `limit` bytes."""
    packs: dict[Any, list[Value]] = {}
    for value in values:
        key = value.aval.dtype if value.num_bytes <= limit else value
        packs.setdefault(key, []).append(value)
    return list(packs.values())


def shard_axis(shape: Sequence[int], num_replicas: int) -> int | None:
    """Returns the axis that an array is sharded along; `None` if the replicas divide no axis."""
    return next((d for d, k in enumerate(shape) if k and k % num_replicas == 0), None)


def find_shards(
    programs: Sequence[ClosedJaxpr],
    pairs: Iterable[tuple[int, int]],
    per_replica: Sequence[bool],
    num_replicas: int,
) -> Shards:
    """Finds what can be sharded exactly.

    Args:
        programs: The proved program and those after it, as `flatten` takes them.
        pairs: Positions of an input and of the output that is its new value, for all state.
        per_replica: For each input, whether replicas may hold different values.
        num_replicas: The number of replicas.
    """
    search = _Search(programs, per_replica, num_replicas)
    region = search.region()
    return search.shards(region, list(pairs))


class _Search:
    """The search in one program."""

    def __init__(
        self, programs: Sequence[ClosedJaxpr], per_replica: Sequence[bool], num_replicas: int
    ) -> None:
        self.num_replicas = num_replicas
        inputs = [Value(var.aval) for var in programs[0].jaxpr.invars]
        pairs = zip(inputs, per_replica, strict=True)
        self.differs = {value for value, differs in pairs if differs}
        self.flat = flatten(programs, self._opens, self._mark, inputs)
        self.maker = {v: each for each in self.flat.operations for v in each.outputs}
        self.users: dict[Value, list[Operation]] = {}
        for each in self.flat.operations:
            for atom in each.inputs:
                if isinstance(atom, Value):
                    self.users.setdefault(atom, []).append(each)

    def _opens(self, eqn: JaxprEqn, inputs: Sequence[Atom]) -> bool:
        """Calls with collectives, and calls in the update, which computes with mirrored values."""
        inner = called(eqn)
        assert inner is not None
        if contains_collective(jaxpr_of(inner)):
            return True
        is_mirrored = not any(atom in self.differs for atom in inputs)
        return is_mirrored and not any(map(is_replica_source, equations(jaxpr_of(inner))))

    def _mark(self, operation: Operation) -> None:
        """Notes which of its results replicas may differ in; rather too many."""
        if operation.is_barrier:
            pairs = zip(operation.inputs, operation.outputs, strict=True)
            self.differs |= {output for atom, output in pairs if atom in self.differs}
        elif self._makes_own(operation):
            self.differs |= set(operation.outputs)

    def _makes_own(self, operation: Operation) -> bool:
        eqn = operation.eqn
        if eqn.primitive.name in MIRRORING and is_collective(eqn):
            return eqn.params.get("axis_index_groups") is not None
        if is_replica_source(eqn) or any(atom in self.differs for atom in operation.inputs):
            return True
        if any(hasattr(var.aval, "inner_aval") for var in eqn.invars):
            return True  # a `Ref`, which may hold anything by now
        inner = inner_programs(eqn.params.values())
        return any(is_replica_source(e) for p in inner for e in equations(jaxpr_of(p)))

    def axis(self, atom: Atom) -> int | None:
        """The axis that a value can be sharded along."""
        return shard_axis(_shape(atom), self.num_replicas)

    def region(self) -> set[Operation]:
        """The largest set of operations whose results no other operation needs whole."""
        region = {each for each in self.flat.operations if self._can(each)}
        waiting = [each for each in region if not self._is_inside(each, region)]
        while waiting:
            each = waiting.pop()
            if each not in region:
                continue
            region.discard(each)
            makers = {self.maker[atom] for atom in each.inputs if atom in self.maker}
            waiting += [m for m in makers & region if not self._is_inside(m, region)]
        return region

    def _can(self, each: Operation) -> bool:
        """Whether a slice of its result is made of slices of what it reads."""
        if each.is_barrier or len(each.outputs) != 1 or each.has_effects:
            return False
        (output,) = each.outputs
        if output in self.differs or self.axis(output) is None:
            return False
        if is_scattered(each):
            # Half precision would be rounded in another order; other dtypes are no gradients.
            dtype = output.aval.dtype
            whole = each.eqn.params.get("axis_index_groups") is None
            return whole and jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize >= 4
        if each.name == "broadcast_in_dim":
            return _shape(each.inputs[0]) == ()
        shapes = [_shape(atom) for atom in each.inputs]
        alike = all(shape in ((), output.aval.shape) for shape in shapes)
        return each.name in _ELEMENTWISE and alike

    def _is_inside(self, each: Operation, region: set[Operation]) -> bool:
        return all(self._takes_slices(u, region) for v in each.outputs for u in self.readers(v))

    def readers(self, value: Value) -> list[Operation]:
        """The operations that read a value."""
        return self.users.get(value, [])

    def _takes_slices(self, each: Operation, region: set[Operation]) -> bool:
        return (each in region and not is_scattered(each)) or self._reduces(each)

    def _reduces(self, each: Operation) -> bool:
        """Whether it reduces a value to a scalar, in a way that slices can be reduced first."""
        if each.name not in _REDUCTIONS or each.outputs[0] in self.differs:
            return False
        aval: Any = each.eqn.invars[0].aval
        if (
            0 < len(aval.shape) == len(each.eqn.params["axes"])
            and self.axis(each.inputs[0]) is not None
        ):
            return bool(aval.dtype == jnp.bool_ or aval.dtype.itemsize >= 4)
        return False

    def shards(self, region: set[Operation], pairs: list[tuple[int, int]]) -> Shards:
        """What is sharded: the parts of the region that keep state in slices."""
        reasons = {i: self._reason(i, o, region) for i, o in pairs}
        kept = {i: o for i, o in pairs if not reasons[i]}
        inputs, outputs = self.flat.inputs, self.flat.outputs
        roots = [each for i in kept for each in self.readers(inputs[i])]
        roots += [self.maker[outputs[o]] for o in kept.values()]  # type: ignore[index]
        useful = self._connected([each for each in roots if each in region], region)
        made = {value for each in useful for value in each.outputs}
        made |= {inputs[i] for i in kept}
        reduced = {
            each for each in self.flat.operations if self._reduces(each) and each.inputs[0] in made
        }
        axes = {i: self.axis(inputs[i]) for i in kept}
        return Shards(
            self.flat,
            frozenset(useful),
            frozenset(reduced),
            {i: axis for i, axis in axes.items() if axis is not None},
            {kept[i]: axis for i, axis in axes.items() if axis is not None},
            {i: why for i, why in reasons.items() if why},
        )

    def _connected(self, roots: Sequence[Operation], region: set[Operation]) -> set[Operation]:
        """The operations of a region that are connected with some of it.

        The rest has no state to keep in slices. It would be reduced, and gathered again.
        """
        found, waiting = set(roots), list(roots)
        while waiting:
            each = waiting.pop()
            near = {self.maker[atom] for atom in each.inputs if atom in self.maker}
            if is_scattered(each):
                near = set()
            near |= {user for value in each.outputs for user in self.readers(value)}
            near &= region
            waiting += near - found
            found |= near
        return found

    def _reason(self, i: int, o: int, region: set[Operation]) -> str:
        """Why the state cannot be kept in slices; empty if it can."""
        value, new = self.flat.inputs[i], self.flat.outputs[o]
        aval = value.aval
        if not aval.shape:
            return "a scalar"
        if self.axis(value) is None:
            return f"no axis of {describe(aval)} is divisible by {self.num_replicas}"
        if not isinstance(new, Value) or (new.aval.shape, new.aval.dtype) != (
            aval.shape,
            aval.dtype,
        ):
            return "its new value has another shape or dtype"
        readers = self.readers(value)
        if any(atom is value for atom in self.flat.outputs):
            return "the step returns it as it is"
        if not readers:
            return "the step does not read it"
        for each in readers:
            if not self._takes_slices(each, region):
                return f"read whole by {_in_words(each)}"
        maker = self.maker.get(new)
        if maker is None:
            return "its new value is another input"
        if maker in region:
            return ""
        if self._can(maker):
            return f"its new value is read whole by {_in_words(self._whole_reader(maker, region))}"
        return f"its new value comes from {_in_words(maker)}, which is not elementwise"

    def _whole_reader(self, each: Operation, region: set[Operation]) -> Operation:
        """The operation at the end of a chain that keeps another one out of the region."""
        met = {each}
        while True:
            users = [u for v in each.outputs for u in self.readers(v)]
            others = [u for u in users if not self._takes_slices(u, region)]
            each = others[0]
            if not self._can(each) or each in met or is_scattered(each):
                return each
            met.add(each)


def is_scattered(each: Operation) -> bool:
    """Whether it is a sum over all replicas, whose result can be scattered instead."""
    is_sum = each.name == "psum" and names_axis(each.eqn)
    return is_sum and len(each.eqn.params["axes"]) == 1


def _shape(atom: Atom) -> tuple[int, ...]:
    return tuple(atom.aval.shape) if isinstance(atom, Value) else tuple(np.shape(atom.value))


def _in_words(each: Operation) -> str:
    return f"{each.name} at {line_within(each.eqn, each.around)}"
