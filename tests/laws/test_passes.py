"""A pass changes no value that the proof speaks about.

For each pass and each pair of passes: the rewritten program proves to the same marks, computes the
same values, and its collectives are those of the compiled program.
"""

import functools
import itertools
import math
import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mirror
from mirror import PerReplica
from mirror._src.devices.replicas import ReplicaDevices
from mirror._src.engine.executor import MeshExecutor, ReplicaProgram
from mirror._src.engine.staged import StagedExecutor
from mirror._src.inspection.program_report import collectives_of
from mirror._src.jaxprs.collective_eqns import is_collective
from mirror._src.jaxprs.equations import with_inner
from mirror._src.jaxprs.proof import prove
from mirror._src.jaxprs.trace import context_token, trace
from mirror._src.passes.passes import PASSES, rewritten
from mirror._src.passes.program import Layout, Settings, require_layouts
from mirror._src.passes.staging import stage_program
from tests.support import conformance, inside
from tests.support.conformance import N, rows
from tests.support.strategies import cpu_strategy

PACK_BYTES = 1024
ROUNDING = 2e-6
RNG = np.random.RandomState(0)
PARAMS = {
    "w": RNG.randn(3, 8).astype(np.float32),
    "b": np.zeros(8, np.float32),
    "v": RNG.randn(8, 3).astype(np.float32),
    "scale": np.ones((), np.float32),
    "odd": RNG.randn(3, 3).astype(np.float32),
}


def loss_of(params, x):
    hidden = jnp.tanh(x @ params["w"] + params["b"]) @ params["v"] * params["scale"]
    return ((hidden @ params["odd"]) ** 2).mean()


def update(tx, state, x):
    params, moments = state
    loss, grads = jax.value_and_grad(loss_of)(params, x)
    grads = mirror.all_reduce("mean", grads)
    updates, moments = tx.update(grads, moments, params)
    return (optax.apply_updates(params, updates), moments), mirror.all_reduce("mean", loss), x * 2


def clipped():
    return optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2))


def training(make):
    """Returns a step whose first results are the new values of its first inputs."""
    tx = make()
    return functools.partial(update, tx), lambda: ((PARAMS, tx.init(PARAMS)), rows(4, 3))


def reductions(states, x):
    """Sums, extremes and truth of slices; a product reads the second state as a whole."""
    mean = mirror.all_reduce("mean", x)
    state, other = (0.9 * state + mean for state in states)
    is_large = state > 0.5
    found = state.sum(), state.max(), state.min(), is_large.all(), is_large.any()
    return (state, other), found, jnp.zeros_like(state) + found[0], other @ jnp.ones((N, 2))


TRAININGS = {
    "reductions of slices": (reductions, lambda: ([np.ones((3, N), np.float32)] * 2, rows(3, N))),
    "clipped adamw": training(clipped),
    "momentum": training(lambda: optax.sgd(1e-2, momentum=0.9)),
    "lamb": training(lambda: optax.lamb(1e-2)),
    "adafactor": training(lambda: optax.adafactor(1e-2)),
    "zero_nans": training(lambda: optax.chain(optax.zero_nans(), optax.adam(1e-2))),
    "MultiSteps": training(lambda: optax.MultiSteps(optax.adam(1e-2), 2)),
}
CORPUS = {**TRAININGS, **conformance.STEPS}
del CORPUS["keys"]  # which `jax.shard_map` cannot send
QUICK = ("reductions of slices", "clipped adamw", "rounds")
# Programs of which XLA merges or removes no collective.
KEPT = (
    "reductions of slices",
    "rounds",
    "momentum",
    "zero_nans",
    "closures",
    "random",
    "containers",
    "part of a ring",
)
NAMES = [each.name for each in PASSES]
COMBINATIONS = [*((name,) for name in NAMES), *itertools.combinations(NAMES, 2)]


class Case:
    """A program of the corpus, which passes rewrite."""

    def __init__(self, name):
        step, make = CORPUS[name]
        args = make()
        traced = inside.traced(cpu_strategy(N), step, args)
        self.jaxpr, self.step = traced.jaxpr, traced.function
        self.marks = prove(self.jaxpr, self.step.per_replica, N)
        self.leaves = [
            leaf.stacked if is_per_replica(leaf) else leaf
            for leaf in jax.tree.leaves(args, is_leaf=is_per_replica)
        ]
        num_state = len(jax.tree.leaves(args[0])) if name in TRAININGS else 0
        self.settings = Settings(
            N, PACK_BYTES, self.step.per_replica, [(i, i) for i in range(num_state)]
        )
        outputs = [abstract(var.aval) for var in self.jaxpr.jaxpr.outvars]
        num_inputs = len(self.step.avals)
        self.finish = trace(lambda *xs: list(xs[num_inputs:]), [*self.step.avals, *outputs], N)
        self._compiled = {}

    def after(self, names):
        """Returns the program after the passes of these names."""
        passes = [each for each in PASSES if each.name in names]
        settings = self.settings._replace(min_bytes=1 if "gathers" in names else math.inf)
        return rewritten([self.jaxpr, self.finish], settings, passes)

    def compiled(self, names, executor=None):
        """Returns the results of the program after passes, and the text of what XLA compiled."""
        key = tuple(names), executor
        if key not in self._compiled:
            self._compiled[key] = self._run(names, executor)
        return self._compiled[key]

    def _run(self, names, executor):
        devices = ReplicaDevices(tuple(jax.devices("cpu")[:N]))
        pack_bytes = PACK_BYTES if "pack" in names else 0
        final = self.after(names)
        inputs = [value.layout for value in final.inputs]
        outputs = [
            atom.layout if atom.layout.axis is not None else Layout(mark.per_replica)
            for atom, mark in zip(final.outputs, self.marks, strict=True)
        ]
        if executor is None:
            executor = MeshExecutor(devices, pack_bytes=pack_bytes, mapping="shard_map")
        else:
            executor = executor(devices, mirror.ReductionToOneDevice(pack_bytes=pack_bytes))
        about = self.jaxpr, self.finish, self.step.avals, inputs, outputs, context_token()
        program = executor.compile(ReplicaProgram("law", "", *about, final=final))
        leaves = [
            jax.device_put(leaf, devices.sharding(layout))
            for leaf, layout in zip(self.leaves, inputs, strict=True)
        ]
        results: list = []
        program(leaves, results)
        text = program.lower(leaves).compile().as_text() if hasattr(program, "lower") else ""
        return list(map(on_host, results[: len(outputs)])), text


def is_per_replica(value):
    return isinstance(value, PerReplica)


def abstract(aval):
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype)


def on_host(value):
    is_key = jnp.issubdtype(value.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(value) if is_key else value)


@functools.cache
def case(name):
    return Case(name)


def programs_of(test):
    """Runs a test for each program of the corpus, most of them at night only."""
    some = [
        pytest.param(name, marks=[pytest.mark.nightly] * (name not in QUICK)) for name in CORPUS
    ]
    return pytest.mark.parametrize("name", some)(test)


@programs_of
def test_program_proves_to_the_same_marks(subtests, name):
    for names in COMBINATIONS:
        with subtests.test(msg=" and ".join(names)):
            final = case(name).after(names)
            require_layouts(final, N)
            proved = [mark.per_replica for mark in case(name).marks]
            assert [atom.layout.is_own for atom in final.outputs] == proved


@programs_of
def test_program_computes_the_same_values(subtests, name):
    """To the last bit, unless a pass reorders sums."""
    for names in COMBINATIONS:
        rounds = "shard" in names
        with subtests.test(msg=" and ".join(names)):
            (got, _), (wanted, _) = case(name).compiled(names), case(name).compiled(())
            same(got, wanted, ROUNDING if rounds else 0)
    for names in ((), ("pack",)):
        with subtests.test(msg=" and ".join([*names, "staging"])):
            got, _ = case(name).compiled(names, StagedExecutor)
            same(got, case(name).compiled(())[0], ROUNDING)


def same(got, wanted, tolerance):
    for x, y in zip(got, wanted, strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        rtol = max(tolerance, conformance.TOLERANCES.get(x.dtype, 0)) if tolerance else 0
        x, y = (each.astype(np.complex128 if each.dtype.kind == "c" else float) for each in (x, y))
        np.testing.assert_allclose(x, y, rtol=rtol, atol=rtol)


@programs_of
def test_collectives_are_those_of_the_compiled_program(subtests, name):
    for names in COMBINATIONS:
        with subtests.test(msg=" and ".join(names)):
            limit = PACK_BYTES if "pack" in names else 0
            found = Counter()
            for row in collectives_of(case(name).after(names), limit):
                found[HLO[row.kind]] += num_buffers(row)
            _, text = case(name).compiled(names)
            sent = in_text(text)
            assert sent == found if name in KEPT else sent <= found, (sent, found)
    with subtests.test(msg="staging"):
        settings = case(name).settings._replace(state=None, in_rounds=True)
        final = rewritten([case(name).jaxpr, case(name).finish], settings)
        staged = stage_program([case(name).jaxpr, case(name).finish], settings, ())
        wanted = sum(any(map(is_collective, with_inner(op.eqn))) for op in final.operations)
        found = sum(len(stage.communications) for stage in staged.stages)
        assert found == wanted if name in KEPT else found <= wanted


HLO = {
    "all-reduce": "all-reduce",
    "reduce-scatter": "reduce-scatter",
    "all-gather": "all-gather",
    "all-to-all": "all-to-all",
    "ppermute": "collective-permute",
}


def num_buffers(row):
    """Returns the number of buffers of a row: extremes of floats take two, one of them for NaN."""
    is_extreme = row.op in ("max", "min")
    is_float = is_extreme and jnp.issubdtype(row.avals[0].dtype, jnp.floating)
    return 2 if is_float else 1


def in_text(text):
    """Returns the number of buffers of each kind of collective that XLA sends."""
    found = Counter()
    for kind, operands in re.findall(r" ([a-z-]+?)(?:-start)?\(([^)]*)\)", text):
        if kind in HLO.values():
            # An all-to-all has an operand for each replica.
            found[kind] += 1 if kind == "all-to-all" else operands.count("%")
    return found
