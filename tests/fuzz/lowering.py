"""Lowers a program to a step in JAX."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import mirror
from tests.fuzz.program import Block, Program, Statement

AXIS = mirror.REPLICA_AXIS
Values = dict[int, Any]


def lowered(program: Program) -> Callable[..., tuple[Any, ...]]:
    """The step that does what the program says."""

    def step(*inputs: Any) -> tuple[Any, ...]:
        return tuple(_block(program.block, {}, inputs))

    return step


def _block(block: Block, around: Values, given: Sequence[Any]) -> list[Any]:
    env = {**around, **dict(zip(block.inputs, given, strict=True))}
    for statement in block.body:
        args = [env[number] for number in statement.args]
        found = _statement(statement, env, args)
        env.update(zip(statement.outs, found, strict=True))
    return [env[number] for number in block.outputs]


def _statement(statement: Statement, env: Values, args: list[Any]) -> Sequence[Any]:
    op, params = statement.op, statement.params
    if op in _LOCAL:
        return [_LOCAL[op](*args, *params).astype(statement.kinds[0].dtype)]
    if op in _COLLECTIVES:
        return _COLLECTIVES[op](args, *params)
    return _OTHERS[op](statement, env, args)


def _index(array: Any, i: Any) -> Any:
    return jnp.abs(i).astype(jnp.int32) % array.shape[0]


_LOCAL: dict[str, Callable[..., Any]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "max": jnp.maximum,
    "min": jnp.minimum,
    "less": lambda a, b: a < b,
    "equal": lambda a, b: a == b,
    "select": lambda c, a, b: jnp.where(c > 0, a, b),
    "neg": lambda a: -a,
    "abs": jnp.abs,
    "wrap": lambda a: lax.rem(a, jnp.asarray(13, a.dtype)),
    "copy": lambda a: a,
    "plus": lambda a, number: a + number,
    "times": lambda a, number: a * number,
    "sum": jnp.sum,
    "sum_first": lambda a: a.sum(0),
    "max_first": lambda a: a.max(0),
    "argmax": lambda a: jnp.argmax(a, 0),
    "cumsum": lambda a: jnp.cumsum(a, 0),
    "cummax": lambda a: lax.cummax(a, 0),
    "sort": lambda a: jnp.sort(a, 0),
    "argsort": lambda a: jnp.argsort(a, 0),
    "reverse": lambda a: a[::-1],
    "transpose": jnp.transpose,
    "slice": lambda a, start, stop: a[start:stop],
    "at": lambda a, i: a[_index(a, i)],
    "take": lambda a, i: a[_index(a, i)],
    "put": lambda a, i, value: a.at[_index(a, i)].set(value),
    "cast": lambda a: a,
    "resize": lambda a, shape: jnp.resize(a, shape),
    "iota": lambda size: jnp.arange(size),
}


def _context() -> mirror.ReplicaContext:
    context = mirror.get_replica_context()
    assert context is not None
    return context


def _psum_groups(args: list[Any], groups: Any) -> list[Any]:
    return [lax.psum(args[0], AXIS, axis_index_groups=[list(group) for group in groups])]


def _gather_groups(args: list[Any], groups: Any) -> list[Any]:
    return [lax.all_gather(args[0], AXIS, axis_index_groups=[list(group) for group in groups])]


def _scatter(args: list[Any], is_tiled: bool) -> list[Any]:
    return [lax.psum_scatter(args[0], AXIS, scatter_dimension=0, tiled=is_tiled)]


_COLLECTIVES: dict[str, Callable[..., Sequence[Any]]] = {
    "psum": lambda args: lax.psum(tuple(args), AXIS),
    "pmax": lambda args: lax.pmax(tuple(args), AXIS),
    "pmin": lambda args: lax.pmin(tuple(args), AXIS),
    "pmean": lambda args: [lax.pmean(4 * args[0], AXIS)],
    "psum_groups": _psum_groups,
    "all_gather": lambda args, is_tiled: [lax.all_gather(args[0], AXIS, tiled=is_tiled)],
    "gather_groups": _gather_groups,
    "psum_scatter": _scatter,
    "ppermute": lambda args, pairs: [lax.ppermute(args[0], AXIS, pairs)],
    "all_to_all": lambda args: [lax.all_to_all(args[0], AXIS, 0, 0)],
    "axis_index": lambda args: [lax.axis_index(AXIS)],
    "replica_id": lambda args: [_context().replica_id_in_sync_group],
    "context_reduce": lambda args, op: _context().all_reduce(op, tuple(args)),
    "context_gather": lambda args: [_context().all_gather(args[0])],
}


def _const(statement: Statement, env: Values, args: list[Any]) -> list[Any]:
    return [jnp.asarray(np.asarray(statement.params[0], statement.kinds[0].dtype))]


def _barrier(statement: Statement, env: Values, args: list[Any]) -> list[Any]:
    return list(lax.optimization_barrier(tuple(args)))


def _struct(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def _callback(statement: Statement, env: Values, args: list[Any]) -> list[Any]:
    def double(x: Any) -> np.ndarray:
        x = np.asarray(x)
        return (2 * x - 1).astype(x.dtype)

    return [jax.pure_callback(double, _struct(args[0]), args[0], vmap_method="sequential")]


def _look(statement: Statement, env: Values, args: list[Any]) -> list[Any]:
    jax.debug.callback(lambda _: None, args[0])
    return []


def _set(statement: Statement, env: Values, args: list[Any]) -> list[Any]:
    args[0][...] = args[1]
    return []


def _bump(statement: Statement, env: Values, args: list[Any]) -> list[Any]:
    ref, value = args
    ref[...] = lax.rem(ref[...] + value, jnp.asarray(13, value.dtype))
    return []


def _scan(statement: Statement, env: Values, args: list[Any]) -> list[Any]:
    num_carry, length, is_reversed = statement.params

    def body(carry: Any, x: Any) -> Any:
        found = _block(statement.blocks[0], env, [*carry, *([] if x is None else [x])])
        return found[:num_carry], found[num_carry:]

    xs = args[num_carry] if len(args) > num_carry else None
    length = length if xs is None else None
    carry, ys = lax.scan(body, args[:num_carry], xs, length, is_reversed)
    return [*carry, *ys]


def _map(statement: Statement, env: Values, args: list[Any]) -> list[Any]:
    return [lax.map(lambda row: _block(statement.blocks[0], env, [row])[0], args[0])]


def _vmap(statement: Statement, env: Values, args: list[Any]) -> list[Any]:
    return [jax.vmap(lambda row: _block(statement.blocks[0], env, [row])[0])(args[0])]


def _small(limit: Any, size: int) -> Any:
    return jnp.abs(limit).astype(jnp.int32) % size


def _rounds(statement: Statement, env: Values, trips: Any, args: list[Any]) -> list[Any]:
    def body(i: Any, carry: list[Any]) -> list[Any]:
        return _block(statement.blocks[0], env, [jnp.asarray(i, jnp.int32), *carry])

    return lax.fori_loop(0, trips, body, list(args))


def _fori(statement: Statement, env: Values, args: list[Any]) -> list[Any]:
    return _rounds(statement, env, statement.params[0], args)


def _fori_to(statement: Statement, env: Values, args: list[Any]) -> list[Any]:
    return _rounds(statement, env, _small(args[0], 4), args[1:])


def _while_loop(statement: Statement, env: Values, args: list[Any]) -> list[Any]:
    test, body = statement.blocks

    def goes_on(carry: list[Any]) -> Any:
        (limit,) = _block(test, env, carry)
        return carry[0] < _small(limit, 4)

    def once(carry: list[Any]) -> list[Any]:
        return [carry[0] + 1, *_block(body, env, carry)]

    return lax.while_loop(goes_on, once, [jnp.zeros((), jnp.int32), *args])[1:]


def _cond(statement: Statement, env: Values, args: list[Any]) -> list[Any]:
    yes, no = statement.blocks
    return lax.cond(args[0] > 0, lambda: _block(yes, env, []), lambda: _block(no, env, []))


def _switch(statement: Statement, env: Values, args: list[Any]) -> list[Any]:
    branches = [lambda block=block: _block(block, env, []) for block in statement.blocks]
    return lax.switch(_small(args[0], len(branches)), branches)


def _call(wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Callable[..., list[Any]]:
    def call(statement: Statement, env: Values, args: list[Any]) -> list[Any]:
        return wrap(lambda *given: _block(statement.blocks[0], env, given))(*args)

    return call


def _with_jvp(fn: Callable[..., Any]) -> Callable[..., Any]:
    wrapped = jax.custom_jvp(fn)
    wrapped.defjvp(lambda primals, tangents: (fn(*primals), fn(*tangents)))
    return wrapped


def _with_vjp(fn: Callable[..., Any]) -> Callable[..., Any]:
    wrapped = jax.custom_vjp(fn)
    wrapped.defvjp(lambda *args: (fn(*args), args), lambda args, _: args)
    return wrapped


_OTHERS: dict[str, Callable[[Statement, Values, list[Any]], Sequence[Any]]] = {
    "const": _const,
    "barrier": _barrier,
    "callback": _callback,
    "look": _look,
    "ref": lambda statement, env, args: [jax.new_ref(args[0])],
    "get": lambda statement, env, args: [args[0][...]],
    "set": _set,
    "bump": _bump,
    "scan": _scan,
    "map": _map,
    "vmap": _vmap,
    "fori": _fori,
    "fori_to": _fori_to,
    "while_loop": _while_loop,
    "cond": _cond,
    "switch": _switch,
    "jit": _call(jax.jit),
    "checkpoint": _call(jax.checkpoint),
    "custom_jvp": _call(_with_jvp),
    "custom_vjp": _call(_with_vjp),
}
