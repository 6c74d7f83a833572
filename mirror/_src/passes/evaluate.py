"""Evaluation of a program, operation by operation, under the current trace."""

import contextlib
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Primitive, jaxpr_as_fun
from jax.interpreters import mlir
from jax.sharding import NamedSharding

from mirror._src.base.types import Array, needs_64_bits
from mirror._src.jaxprs.equations import (
    Scan,
    While,
    called,
    inner_programs,
    jaxpr_of,
    solve_of,
    walk,
)
from mirror._src.jaxprs.primitives import SIMPLE
from mirror._src.jaxprs.trace import program_of
from mirror._src.passes.pack import count, join, packed, split, split_columns
from mirror._src.passes.program import (
    Atom,
    Operation,
    Program,
    Settings,
    needs_barrier,
    walk_operations,
)

Rule: TypeAlias = Callable[[JaxprEqn, list[Any]], Sequence[Any]]
Rules: TypeAlias = Mapping[str, Callable[[JaxprEqn], Rule | None]]


_DEFAULTS = Settings()


class Evaluation:
    """Evaluation of a program that binds each operation again, unchanged."""

    def call(self, program: ClosedJaxpr | Jaxpr, arguments: Sequence[Any]) -> list[Any]:
        """Returns the outputs of a program."""
        return walk(program, arguments, self.constant, self.apply)

    def constant(self, value: Any) -> Any:
        """Returns the value to use for a constant of the program."""
        return value

    def apply(self, eqn: JaxprEqn, arguments: list[Any]) -> list[Any]:
        """Returns the outputs of one operation, evaluated in the user's contexts around it."""
        with at_line_of(eqn), eqn.ctx.manager:
            return bind(eqn, arguments)


def bind(eqn: JaxprEqn, arguments: Sequence[Any], /, **changed: Any) -> list[Any]:
    """Returns the outputs of the operation on other operands, also with other parameters."""
    params = eqn.primitive.get_bind_params({**eqn.params, **changed})
    outputs = eqn.primitive.bind(*arguments, **params)
    return outputs if eqn.primitive.multiple_results else [outputs]


def _wide_if_wide(eqn: JaxprEqn) -> contextlib.AbstractContextManager[Any]:
    """Context manager that permits 64 bits if an operand or result has them, as the user does."""
    avals = [atom.aval for atom in (*eqn.invars, *eqn.outvars)]
    is_wide = any(needs_64_bits(aval.dtype) for aval in avals if hasattr(aval, "dtype"))
    return jax.enable_x64(True) if is_wide else contextlib.nullcontext()


def at_line_of(eqn: JaxprEqn) -> Any:
    """Context manager that gives operations the user's line and name scopes of this one."""
    info = eqn.source_info
    stack = source_info_util.current_name_stack() + info.name_stack
    return source_info_util.user_context(info.traceback, name_stack=stack)


class Lowering(Evaluation):
    """Evaluation inside the mapping of an executor that replaces some operations.

    Control flow and calls are inlined only if they contain a replaced operation. If constant arrays
    are replaced too, everything is inlined: types in an inner program name the mesh of its constant
    arrays, so the program cannot be bound on another mesh.

    Args:
        arrays: Replacements for the constant arrays of the program, by the `id` of the array.
        rules: For each name of a primitive, a function that returns the replacement of an
            operation, or `None` to keep the operation.
        settings: How independent all-reduces are packed, also inside loops and branches, and the
            axis along which arrays are sliced.
        zero: The integer 0, whose value XLA does not know: see `_after`.
        opens: Whether to inline everything, because operands may come from constant arrays.
    """

    def __init__(
        self,
        arrays: Mapping[int, Any],
        rules: Rules,
        settings: Settings = _DEFAULTS,
        zero: Any = None,
        opens: bool = False,
    ) -> None:
        self._arrays = arrays
        self._opens_all = opens or bool(arrays)
        self._rules = rules
        self.settings = settings
        self._opened: dict[int, tuple[Jaxpr, bool]] = {}
        self.zero = zero

    def call(self, program: ClosedJaxpr | Jaxpr, arguments: Sequence[Any]) -> list[Any]:
        """See `Evaluation.call`."""
        return self.run(packed(program, self.settings), arguments)

    def run(self, program: Program, arguments: Sequence[Any]) -> list[Any]:
        """Returns the outputs of a flat program."""
        return walk_operations(program, arguments, self.constant, self.evaluate)

    def joined(self, program: Program) -> Program:
        """Returns a program in which operations that are bound unchanged are joined to blocks.

        JAX does not trace the operations of a block again, which takes as long as the proof.
        """
        if self._opens_all or program.sharded_inputs:  # values have other types than in the jaxpr
            return program
        operations, read = list[Operation](), set(program.outputs)
        for unchanged, group in itertools.groupby(program.operations[::-1], self._is_unchanged):
            added = list(group)
            added = _block(added, read) if unchanged else added
            operations += added
            read.update(*[operation.inputs for operation in added])
        return program._replace(operations=operations[::-1])

    def _is_unchanged(self, operation: Operation) -> bool:
        """Whether an operation can be part of a block."""
        eqn, name = operation.eqn, operation.eqn.primitive.name
        is_pure = operation.kind == "equation" and not operation.around and not eqn.effects
        is_kept = is_pure and (name not in self._rules or self._replacement(eqn) is None)
        return is_kept and (name in SIMPLE or not self._opens(eqn))

    def evaluate(self, operation: Operation, operands: list[Any]) -> list[Any]:
        """Returns the outputs of one operation of a flat program."""
        with contextlib.ExitStack() as stack:
            for call in operation.around:
                stack.enter_context(at_line_of(call))
                stack.enter_context(_scope_of(call))
            return _KINDS[operation.kind](self, operation, operands)

    def constant(self, value: Any) -> Any:
        """See `Evaluation.constant`."""
        return self._arrays.get(id(value), value)

    def apply(self, eqn: JaxprEqn, arguments: list[Any]) -> list[Any]:
        """See `Evaluation.apply`."""
        replacement = self._replacement(eqn)
        with at_line_of(eqn):
            if replacement is not None:
                with _wide_if_wide(eqn):
                    return list(replacement(eqn, arguments))
            if not self._opens(eqn):
                with eqn.ctx.manager:
                    return bind(eqn, arguments)
            # The only context around an operation that changes its results, except for the mesh.
            with jax.threefry_partitionable(eqn.ctx.threefry_partitionable):
                return self._open(eqn, arguments)

    def _replacement(self, eqn: JaxprEqn) -> Rule | None:
        find = self._rules.get(eqn.primitive.name)
        return None if find is None else find(eqn)

    def _opens(self, eqn: JaxprEqn) -> bool:
        if self._opens_all:
            return True
        return any(map(self._replaces, map(jaxpr_of, inner_programs(eqn.params.values()))))

    def _replaces(self, jaxpr: Jaxpr) -> bool:
        """Whether an operation of a program, or of a program inside it, is replaced."""
        _, replaces = self._opened.get(id(jaxpr), (None, None))
        if replaces is None:
            replaces = count(jaxpr, self.settings.pack_bytes) > 1
            replaces |= any(self._replacement(e) is not None or self._opens(e) for e in jaxpr.eqns)
            self._opened[id(jaxpr)] = jaxpr, replaces
        return replaces

    def _open(self, eqn: JaxprEqn, arguments: list[Any]) -> list[Any]:
        rule = _CONTROL_FLOW.get(eqn.primitive.name)
        if rule is not None:
            return rule(self, eqn, arguments)
        program = called(eqn)
        if program is None:
            return bind(eqn, arguments, **_without_mesh(eqn.params))
        if needs_barrier(eqn):
            # As in JAX's own lowering: otherwise XLA merges the recomputation with the original.
            arguments = jax.lax.optimization_barrier(arguments)
        with _scope_of(eqn):
            return self.call(program, arguments)


block_p = Primitive("block")
block_p.multiple_results = True
block_p.def_impl(lambda *values, jaxpr: jaxpr_as_fun(ClosedJaxpr(jaxpr, ()))(*values))
block_p.def_abstract_eval(lambda *_, jaxpr: [var.aval for var in jaxpr.outvars])


def _lower_block(ctx: Any, *values: Any, jaxpr: Jaxpr) -> Any:
    # As JAX lowers the body of a loop (0.10.2, 0.12.0.1). `core_call_lowering` makes a function.
    fixed = ctx.module_context, jaxpr, ctx.name_stack, mlir.TokenSet(), ()
    where = {"const_lowering": ctx.const_lowering, "outer_traceback": ctx.traceback}
    return mlir.jaxpr_subcomp(*fixed, *values, dim_var_values=ctx.dim_var_values, **where)[0]


mlir.register_lowering(block_p, _lower_block, cacheable=False)


def _block(unchanged: list[Operation], read: set[Atom]) -> list[Operation]:
    """Returns one operation for several, which are in reverse order, given what is read later."""
    operations, live = list[Operation](), set(read)
    for operation in unchanged:
        if not live.isdisjoint(operation.outputs):
            operations.append(operation)
            live.update(operation.inputs)
    eqns = [operation.eqn for operation in reversed(operations)]
    before = [pair for op in operations for pair in zip(op.eqn.invars, op.inputs, strict=True)]
    made = {a: x for op in operations for a, x in zip(op.eqn.outvars, op.outputs, strict=True)}
    operands = {a: x for a, x in before if not isinstance(a, Literal) and a not in made}
    # The result of `ensure_mirrored` is its operand under another variable, which no block makes.
    if len(eqns) < 2 or not set(made.values()).isdisjoint(operands.values()):
        return operations
    results = {a: x for a, x in made.items() if x in read}
    program = program_of(operands, results, eqns)
    eqn = eqns[0].replace(primitive=block_p, params={"jaxpr": program})
    return [Operation("block", eqn, [*operands.values()], [*results.values()])]


def _scope_of(call: JaxprEqn) -> contextlib.AbstractContextManager[Any]:
    """Returns the name scope of an inlined call: profiles show the names of jitted functions."""
    name = call.params.get("name") if call.primitive.name == "jit" else None
    return jax.named_scope(f"jit({name})") if name else contextlib.nullcontext()


def _without_mesh(params: dict[str, Any]) -> dict[str, Any]:
    """Returns the parameters without shardings, which autodiff records (JAX 0.10)."""
    return {k: None if isinstance(v, NamedSharding) else v for k, v in params.items()}


def _scan(run: Lowering, eqn: JaxprEqn, arguments: list[Any]) -> list[Any]:
    scan = Scan(eqn)
    return _scanned(scan, arguments, functools.partial(run.call, scan.body))


def _scanned(
    scan: Scan, arguments: list[Any], evaluate: Callable[[list[Any]], list[Any]]
) -> list[Any]:
    """Returns the outputs of a `scan`, whose body is evaluated by a function."""
    consts, carry, xs = scan.split(arguments)

    def body(carry: list[Any], xs: list[Any]) -> tuple[list[Any], list[Any]]:
        outputs = evaluate([*consts, *carry, *xs])
        return outputs[: scan.num_carry], outputs[scan.num_carry :]

    carry, stacked = jax.lax.scan(body, carry, xs, scan.length, scan.reverse, scan.unroll)
    return [*carry, *stacked]


def _while(run: Lowering, eqn: JaxprEqn, arguments: list[Any]) -> list[Any]:
    loop = While(eqn)
    test_consts, consts, carry = loop.split(arguments)
    return jax.lax.while_loop(*round_of(loop, run.call, test_consts, consts), carry)


def round_of(
    loop: While,
    call: Callable[[ClosedJaxpr, Sequence[Any]], list[Any]],
    test_consts: Sequence[Any],
    consts: Sequence[Any],
) -> tuple[Callable[[Sequence[Any]], Any], Callable[[Sequence[Any]], list[Any]]]:
    """Returns functions of the carry: the test of a `while`, and its body.

    The test of a loop under `jax.vmap` may return a boolean per element. Then the loop runs while
    one is true, and its body keeps the other elements.
    """
    (predicate,) = loop.test.out_avals

    def test(carry: Sequence[Any]) -> Any:
        return call(loop.test, [*test_consts, *carry])[0]

    def any_continues(carry: Sequence[Any]) -> Any:
        return jax.lax.reduce_or(test(carry), range(len(predicate.shape)))

    def body(carry: Sequence[Any]) -> list[Any]:
        return call(loop.body, [*consts, *carry])

    def body_of_some(carry: Sequence[Any]) -> list[Any]:
        continues = test(carry)
        return [
            jax.lax.select(_expanded(continues, new.shape), new, old)
            for new, old in zip(body(carry), carry, strict=True)
        ]

    return (any_continues, body_of_some) if predicate.shape else (test, body)


def _expanded(value: Array, shape: tuple[int, ...]) -> Array:
    """Returns the value, broadcast along more axes at the end."""
    return jax.lax.broadcast_in_dim(value, shape, range(value.ndim))


def _cond(run: Lowering, eqn: JaxprEqn, arguments: list[Any]) -> list[Any]:
    def branch(program: ClosedJaxpr) -> Callable[..., list[Any]]:
        return lambda *operands: run.call(program, operands)

    index, *operands = arguments
    branches = [branch(program) for program in eqn.params["branches"]]
    if (platforms := eqn.params.get("branches_platforms")) is not None:
        # Only the branch of this platform can be compiled.
        pairs = zip(platforms, branches, strict=True)
        named = {name: branch for names, branch in pairs for name in names or ["default"]}
        return jax.lax.platform_dependent(*operands, **named)
    return jax.lax.switch(index.astype(jnp.int32), branches, *operands)


_CONTROL_FLOW: dict[str, Callable[[Lowering, JaxprEqn, list[Any]], list[Any]]] = {
    "scan": _scan,
    "while": _while,
    "cond": _cond,
    "custom_linear_solve": lambda run, eqn, arguments: run.call(*solve_of(eqn, arguments)),
    # These refer to the mesh of a constant array of the step, which is an argument here.
    "sharding_constraint": lambda _, __, arguments: arguments,
    "reshard": lambda _, __, arguments: arguments,
}


def _slice(_: Lowering, operation: Operation, operands: list[Any]) -> list[Any]:
    value, index = operands
    axis = _axis_of(operation.outputs[0])
    size = operation.outputs[0].aval.shape[axis]
    return [jax.lax.dynamic_slice_in_dim(value, index * size, size, axis)]


def _scatter(run: Lowering, operation: Operation, operands: list[Any]) -> list[Any]:
    axis, name = _axis_of(operation.outputs[0]), run.settings.axis_name
    return [jax.lax.psum_scatter(operands[0], name, scatter_dimension=axis, tiled=True)]


def _gather(run: Lowering, operation: Operation, operands: list[Any]) -> list[Any]:
    axis = _axis_of(operation.inputs[0])
    part, *earlier = operands
    part = _after(part, earlier, run.zero) if earlier else part
    return [jax.lax.all_gather(part, run.settings.axis_name, axis=axis, tiled=True)]


def _after(value: Array, earlier: Sequence[Array], zero: Any) -> Array:
    """Returns the same bits, which XLA cannot have before it has computed other values.

    On GPUs a barrier does this. On host devices XLA removes barriers before it merges equal
    operations (JAX 0.10 to 0.12): it would merge all gathers of a weight into one, whose result
    stays alive until the gradient. There, the bits are combined by OR with bits of the other
    values, of which an AND with an unknown 0 leaves none.
    """
    if zero is None or value.dtype == jnp.bool_:
        return jax.lax.optimization_barrier((value, *earlier))[0]
    if jnp.issubdtype(value.dtype, jnp.complexfloating):
        return jax.lax.complex(_after(value.real, earlier, zero), value.imag)
    none = functools.reduce(jax.lax.bitwise_or, map(_some_bits, earlier)) & zero
    bits = _unsigned(value.dtype)
    cast = jax.lax.bitcast_convert_type
    return cast(cast(value, bits) | none.astype(bits), value.dtype)


def _unsigned(dtype: Any) -> Any:
    """Returns the unsigned integers of as many bits; a number may have fewer than 8."""
    info = jnp.finfo if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo
    return jnp.dtype(f"uint{info(dtype).bits}")


def _some_bits(value: Array) -> Array:
    """Returns an integer made of one element."""
    first = jax.lax.slice(value, (0,) * value.ndim, (1,) * value.ndim)
    element = jax.lax.squeeze(first, range(value.ndim))
    if jnp.issubdtype(element.dtype, jnp.complexfloating):
        element = jax.lax.real(element)
    if jnp.issubdtype(element.dtype, jnp.floating):
        element = jax.lax.bitcast_convert_type(element, _unsigned(element.dtype))
    return element.astype(jnp.int32)


def _loop(run: Lowering, operation: Operation, operands: list[Any]) -> list[Any]:
    assert operation.body is not None
    return _scanned(Scan(operation.eqn), operands, functools.partial(run.run, operation.body))


def _pack(run: Lowering, operation: Operation, operands: list[Any]) -> list[Any]:
    # Without the barrier here, and the one after the collective, XLA fuses the packing with the
    # operations around it, which doubles the compilation time (JAX 0.12) and does not run faster.
    operands = list(jax.lax.optimization_barrier(operands))
    return _PACKS[operation.packed[0].kind](run, operation, operands)


def _all_reduces(run: Lowering, operation: Operation, operands: list[Any]) -> list[Any]:
    (total,) = run.apply(operation.eqn, [join(operands)])
    return list(jax.lax.optimization_barrier(split(total, operands, on_cpus=run.settings.on_cpus)))


def _scatters(run: Lowering, operation: Operation, operands: list[Any]) -> list[Any]:
    axes = list(map(_axis_of, operation.outputs))
    n = operands[0].shape[axes[0]] // operation.outputs[0].aval.shape[axes[0]]
    rows = [jnp.moveaxis(value, axis, 0) for value, axis in zip(operands, axes, strict=True)]
    flat = jax.lax.concatenate([row.reshape(n, row.size // n) for row in rows], 1)
    received = jax.lax.psum_scatter(flat, run.settings.axis_name, scatter_dimension=0)
    like = [jax.ShapeDtypeStruct((row.shape[0] // n, *row.shape[1:]), row.dtype) for row in rows]
    parts = jax.lax.optimization_barrier(split(received, like, on_cpus=run.settings.on_cpus))
    return [jnp.moveaxis(part, 0, axis) for part, axis in zip(parts, axes, strict=True)]


def _gathers(run: Lowering, operation: Operation, operands: list[Any]) -> list[Any]:
    axes = list(map(_axis_of, operation.inputs))
    rows = [jnp.moveaxis(part, axis, 0) for part, axis in zip(operands, axes, strict=True)]
    gathered = jax.lax.all_gather(join(rows), run.settings.axis_name)
    blocks = split_columns(gathered, [row.size for row in rows], on_cpus=run.settings.on_cpus)
    wholes = [block.reshape(-1, *row.shape[1:]) for block, row in zip(blocks, rows, strict=True)]
    wholes = jax.lax.optimization_barrier(wholes)
    return [jnp.moveaxis(whole, 0, axis) for whole, axis in zip(wholes, axes, strict=True)]


def _axis_of(atom: Atom) -> int:
    """Returns the axis along which a value is sliced."""
    assert atom.layout.axis is not None
    return atom.layout.axis


_KINDS: dict[str, Callable[[Lowering, Operation, list[Any]], list[Any]]] = {
    "equation": lambda run, operation, operands: run.apply(operation.eqn, operands),
    "barrier": lambda _, __, operands: list(jax.lax.optimization_barrier(operands)),
    "block": lambda _, operation, operands: bind(operation.eqn, operands),
    "slice": _slice,
    "scatter": _scatter,
    "gather": _gather,
    "loop": _loop,
    "pack": _pack,
}
_PACKS: dict[str, Callable[[Lowering, Operation, list[Any]], list[Any]]] = {
    "equation": _all_reduces,
    "scatter": _scatters,
    "gather": _gathers,
}
