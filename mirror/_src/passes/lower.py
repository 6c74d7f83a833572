"""The pass `lower`: replaces operations that a platform executes slowly by equivalent ones.

It is a table of rules for the evaluation of the program: platform -> primitive -> rule, with one
module per family of operations. A rule returns `None` for an operation that XLA executes fast, or
whose shapes or dtype it was not measured for. `MIRROR_LOWERING=xla` switches the table off; it is
read when a step is compiled.

Law: `tests/passes/test_lower.py`: same values as `jax.lax`; at night, each rule is still faster.
"""

import os
from collections.abc import Callable, Mapping
from typing import Any

import jax

from mirror._src.base.errors import expected
from mirror._src.devices import backend
from mirror._src.devices.replicas import ReplicaDevices
from mirror._src.jaxprs.trace import trace_inside
from mirror._src.passes import convolutions, extremes
from mirror._src.passes.evaluate import Lowering, Rules

VARIABLE = "MIRROR_LOWERING"
_BY_PLATFORM: dict[str, Rules] = {"CPU": {**extremes.RULES, **convolutions.RULES}}

# XLA's library YNN computes large convolutions in one thread, which takes up to 3.4 times as long
# on one device (JAX 0.10.2). With all threads, nets take 1.06 to 1.16 times as long (0.12.0.1). The
# default without them:
_YNN = "xla_cpu_experimental_ynn_fusion_type"
_WITHOUT_YNN_CONVOLUTIONS = {_YNN: "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT,LIBRARY_FUSION_TYPE_REDUCE"}


def setting() -> str:
    """Returns the value of the environment variable; empty by default.

    Raises:
        ValueError: If it is neither empty nor `xla`.
    """
    value = os.environ.get(VARIABLE, "")
    if value not in ("", "xla"):
        raise ValueError(expected(VARIABLE, value, "'xla' or unset", f"unset {VARIABLE}."))
    return value


def rules_for(replicas: ReplicaDevices) -> Rules:
    """Returns the rules for programs on these devices, which are of one type."""
    table = _BY_PLATFORM.get(backend.type_of(replicas.devices[0]), {})
    return {} if setting() == "xla" else table


def compiler_options(replicas: ReplicaDevices) -> Mapping[str, str]:
    """Returns XLA's options for programs on these devices, unless the user sets them."""
    is_set = setting() == "xla" or _YNN in os.environ.get("XLA_FLAGS", "")
    is_slow = jax.__version_info__ < (0, 13) and replicas.on_cpus
    return _WITHOUT_YNN_CONVOLUTIONS if is_slow and not is_set else {}


def lowered(fn: Callable[..., Any], rules: Rules) -> Callable[..., Any]:
    """Returns a function of pytrees whose operations are replaced by rules, after it is traced."""
    if not rules:
        return fn

    def with_rules(*args: Any) -> Any:
        treedef: Any
        leaves, treedef = jax.tree.flatten(args)
        structures: list[Any] = []

        def flat(*leaves: Any) -> list[Any]:
            results, structure = jax.tree.flatten(fn(*treedef.unflatten(leaves)))
            structures.append(structure)
            return results

        results = Lowering({}, rules).call(trace_inside(flat, leaves), leaves)
        return structures[0].unflatten(results)

    return with_rules
