"""The order of the passes. A new pass is a module of this room, and a line here.

After them, tables of rules replace single operations while the program is evaluated: the tables of
the mapping and of callbacks, and `lower`, for the operations that a platform executes slowly.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from mirror._src.jaxprs.equations import equations, is_ref
from mirror._src.passes import gathers, pack, shard
from mirror._src.passes.program import Atom, Layout, Marks, Opens, Program, Settings, Value, flatten


class Pass(NamedTuple):
    """A pass.

    Attributes:
        name: Its name.
        opens: Returns which calls of the programs it needs inlined.
        rewrite: Returns the program, rewritten.
    """

    name: str
    opens: Callable[[Sequence[ClosedJaxpr | Jaxpr], Settings], Opens]
    rewrite: Callable[[Program, Settings], Program]


PASSES = (
    Pass("shard", shard.opens, shard.shard),
    Pass("gathers", lambda *_: lambda *_: False, gathers.order),
    Pass("pack", pack.opens, pack.pack),
)


def _has_refs(program: ClosedJaxpr) -> bool:
    eqns = equations(program.jaxpr)
    return any(is_ref(atom) for eqn in eqns for atom in (*eqn.invars, *eqn.outvars))


def rewritten(
    programs: Sequence[ClosedJaxpr], settings: Settings, passes: Sequence[Pass] = PASSES
) -> Program:
    """Returns programs that run in turn as one flat program, after all passes."""
    if settings.state is not None and any(map(_has_refs, programs)):
        # What a `Ref` holds is known to the proof of the whole program only.
        whole = rewritten(programs, settings._replace(state=None, min_bytes=math.inf), passes)
        return whole._replace(reasons={i: "the step uses a Ref" for i, _ in settings.state})
    asked = [each.opens(programs, settings) for each in passes]

    def opens(eqn: JaxprEqn, inputs: Sequence[Atom]) -> bool:
        return any(asks(eqn, inputs) for asks in asked)

    inputs = [Value(var.aval) for var in programs[0].jaxpr.invars]
    if settings.state is None:
        program = flatten(programs, opens, inputs=inputs)
    else:
        for value, is_own in zip(inputs, settings.per_replica, strict=True):
            value.layout = Layout(is_own)
        marks = Marks(inputs, settings.num_replicas, settings.axis_name)
        program = flatten(programs, opens, marks.assign, inputs)._replace(marks=marks)
    for each in passes:
        program = each.rewrite(program, settings)
    return program
