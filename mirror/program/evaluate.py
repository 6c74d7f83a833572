"""Running a program operation by operation, under whatever trace is current."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn
from jax.sharding import NamedSharding

from mirror.program.exchanges import names_axis
from mirror.program.inner import Scan, While, called, walk


class Evaluation:
    """One run of a program: each operation is bound again, as it stands."""

    def call(self, program: ClosedJaxpr | Jaxpr, arguments: Sequence[Any]) -> list[Any]:
        """The outputs of a program."""
        return walk(program, arguments, self.held, self.apply)

    def held(self, value: Any) -> Any:
        """What stands for a value that the program holds itself."""
        return value

    def apply(self, eqn: JaxprEqn, arguments: list[Any]) -> list[Any]:
        """The outputs of one operation, in the user's contexts around it."""
        with eqn.ctx.manager:
            return bind(eqn, arguments)


def bind(eqn: JaxprEqn, arguments: Sequence[Any]) -> list[Any]:
    """The outputs of the same operation on other operands."""
    return _bound(eqn, arguments, eqn.params)


def _bound(eqn: JaxprEqn, arguments: Sequence[Any], params: dict[str, Any]) -> list[Any]:
    outputs = eqn.primitive.bind(*arguments, **eqn.primitive.get_bind_params(params))
    return outputs if eqn.primitive.multiple_results else [outputs]


class Retracing(Evaluation):
    """Runs a program on another mesh than the one it was traced for.

    The types in an inner program name the mesh of its trace, and so do the arrays that it holds.
    So inner programs are not bound as they are but traced anew, through JAX's own control flow.

    Args:
        arrays: what stands for each array that the program holds, by the array's `id`.
        replica_id: what stands for the replica's number.
    """

    def __init__(self, arrays: Mapping[int, Any], replica_id: Any) -> None:
        self._arrays = arrays
        self._replica_id = replica_id

    def held(self, value: Any) -> Any:
        """See `Evaluation.held`."""
        return self._arrays.get(id(value), value)

    def apply(self, eqn: JaxprEqn, arguments: list[Any]) -> list[Any]:
        """See `Evaluation.apply`."""
        if eqn.primitive.name == "axis_index" and names_axis(eqn):
            return [self._replica_id]
        # The one of the contexts around an operation that changes numbers; another is the mesh.
        with jax.threefry_partitionable(eqn.ctx.threefry_partitionable):
            rule = _RULES.get(eqn.primitive.name)
            if rule is not None:
                return rule(self, eqn, arguments)
            program = called(eqn)
            if program is None:
                return _bound(eqn, arguments, _without_mesh(eqn.params))
            if eqn.params.get("differentiated") and eqn.params.get("prevent_cse"):
                # As JAX lowers it: else XLA would find that all of this is known already.
                arguments = jax.lax.optimization_barrier(arguments)
            return self.call(program, arguments)


def _without_mesh(params: dict[str, Any]) -> dict[str, Any]:
    """The parameters without shardings, which autodiff writes down (JAX 0.10)."""
    return {k: None if isinstance(v, NamedSharding) else v for k, v in params.items()}


def _scan(run: Retracing, eqn: JaxprEqn, arguments: list[Any]) -> list[Any]:
    scan = Scan(eqn)
    consts, carry, xs = scan.split(arguments)

    def body(carry: list[Any], xs: list[Any]) -> tuple[list[Any], list[Any]]:
        outputs = run.call(scan.body, [*consts, *carry, *xs])
        return outputs[: scan.num_carry], outputs[scan.num_carry :]

    unroll = eqn.params["unroll"]
    carry, stacked = jax.lax.scan(body, carry, xs, scan.length, scan.reverse, unroll)
    return [*carry, *stacked]


def _while(run: Retracing, eqn: JaxprEqn, arguments: list[Any]) -> list[Any]:
    loop = While(eqn)
    test_consts, consts, carry = loop.split(arguments)
    return jax.lax.while_loop(
        lambda carry: run.call(loop.test, [*test_consts, *carry])[0],
        lambda carry: run.call(loop.body, [*consts, *carry]),
        carry,
    )


def _cond(run: Retracing, eqn: JaxprEqn, arguments: list[Any]) -> list[Any]:
    def branch(program: ClosedJaxpr) -> Callable[..., list[Any]]:
        return lambda *operands: run.call(program, operands)

    index, *operands = arguments
    branches = [branch(program) for program in eqn.params["branches"]]
    return jax.lax.switch(index.astype(jnp.int32), branches, *operands)


def _linear_solve(run: Retracing, eqn: JaxprEqn, arguments: list[Any]) -> list[Any]:
    """It runs its `solve`; the other programs are for its derivatives."""
    lengths = eqn.params["const_lengths"]
    start = lengths.matvec + lengths.vecmat
    consts, rest = arguments[start : start + lengths.solve], arguments[sum(lengths) :]
    return run.call(eqn.params["jaxprs"].solve, [*consts, *rest])


_RULES: dict[str, Callable[[Retracing, JaxprEqn, list[Any]], list[Any]]] = {
    "scan": _scan,
    "while": _while,
    "cond": _cond,
    "custom_linear_solve": _linear_solve,
    "sharding_constraint": lambda _, __, arguments: arguments,  # of the mesh of the trace
}
