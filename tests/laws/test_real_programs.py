"""Real programs train as on one device on every layout, or are rejected."""

import dataclasses
import functools
import importlib

import jax
import numpy as np
import pytest

import mirror
from tests.real_programs import lora
from tests.real_programs.harness import Program, assert_close

# Devices, replicas on each of them, and whether collectives are reduced on one device.
LAYOUTS = {
    "pmap-1": (1, 1, False),
    "pmap-2": (2, 1, False),
    "pmap-4": (4, 1, False),
    "vmap-2": (1, 2, False),
    "vmap-4": (1, 4, False),
    "pairs": (2, 2, False),
    "staged-2": (2, 1, True),
    "staged-4": (4, 1, True),
}
# What a program imports besides the dependencies of `mirror`, and its layout in the suite, because
# compiling is all the work here. `--nightly` runs every program on every layout.
PROGRAMS = {
    "flax_imagenet": (None, "pairs"),
    "flax_imagenet_dynamic_scale": (None, "pmap-4"),
    "nnx_mnist": (None, "staged-2"),
    "equinox_cnn": ("equinox", "pairs"),
    "equinox_stateful": ("equinox", "pmap-2"),
    "haiku_transformer": ("haiku", "vmap-4"),
    "nanogpt": (None, "pmap-4"),
    "vqvae": ("haiku", "pairs"),
    "ppo": (None, "pmap-4"),
    "lora": (None, "pmap-1"),
    "ema": (None, "pairs"),
    "lbfgs": (None, "pmap-2"),
}
# The programs that compile fastest, and one of each library, which is slow; others are nightly.
QUICK = ("nnx_mnist", "lora", "lbfgs")
SLOW = ("equinox_stateful", "haiku_transformer")


def programs(mark):
    """The parameter `name`: each program, of which those that are not quick get a mark."""
    every = [pytest.param(name, marks=[mark] * (name not in QUICK)) for name in PROGRAMS]
    return pytest.mark.parametrize("name", every)


NUM_REPLICAS = 4  # of the layouts of a program that samples per replica


def load(name: str) -> Program:
    needed, _ = PROGRAMS[name]
    if needed:
        pytest.importorskip(needed)
    return importlib.import_module(f"tests.real_programs.{name}").PROGRAM


def strategy_for(program: Program, layout: str) -> mirror.MirroredStrategy:
    num_devices, replicas_per_device, on_one = LAYOUTS[layout]
    named = {} if program.axis_name == mirror.REPLICA_AXIS else {"axis_name": program.axis_name}
    return mirror.MirroredStrategy(
        jax.devices("cpu")[:num_devices],
        mirror.ReductionToOneDevice() if on_one else None,
        replicas_per_device=replicas_per_device,
        **named,
    )


@functools.cache
def trained_alone(name: str, num_replicas: int):
    program = load(name)
    state, metrics = program.plain(num_replicas)
    return program.arrays(state), metrics


@pytest.mark.parametrize(
    "name",
    [
        *QUICK,
        *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW),
        *(pytest.param(n, marks=pytest.mark.nightly) for n in PROGRAMS if n not in QUICK + SLOW),
    ],
)
def test_real_program_trains_as_on_one_device(name):
    check_trains_as_on_one_device(name, PROGRAMS[name][1])


@pytest.mark.nightly
@pytest.mark.parametrize("name", PROGRAMS)
def test_real_program_trains_as_on_one_device_on_every_layout(subtests, name):
    for layout in LAYOUTS:
        with subtests.test(msg=layout):
            check_trains_as_on_one_device(name, layout)


def check_trains_as_on_one_device(name, layout):
    program = load(name)
    strategy = strategy_for(program, layout)
    if program.draws_per_replica and strategy.num_replicas_in_sync != NUM_REPLICAS:
        return  # it draws for each of `NUM_REPLICAS` replicas, so that others draw otherwise
    state, metrics = program.train(strategy, program.step)
    wanted, wanted_metrics = trained_alone(name, NUM_REPLICAS)
    assert_close(metrics, wanted_metrics)
    assert_close(program.arrays(state), wanted)
    mirrored = [part for place, part in enumerate(state) if place not in program.split]
    strategy.check_mirrored(mirrored)


@programs(pytest.mark.nightly)
def test_missing_all_reduce_of_donated_state_is_rejected(name):
    program = load(name)
    if not program.in_place:
        program = dataclasses.replace(program, donate_argnums=tuple(range(len(program.make()))))
    strategy = strategy_for(program, "pmap-2")
    with pytest.raises(mirror.ReplicaDivergenceError, match=program.drifting):
        program.train(strategy, program.broken_step, num_steps=1)


@programs(pytest.mark.nightly)
def test_real_program_reduces_its_loss(name):
    """Otherwise the layouts would agree trivially."""
    program = load(name)
    before = program.arrays(program.make())
    after, _ = trained_alone(name, NUM_REPLICAS)
    moved = [
        not np.array_equal(np.asarray(a), np.asarray(b))
        for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True)
        if a.ndim
    ]
    assert np.mean(moved) > 0.5


@pytest.mark.nightly
def test_loss_scale_backs_off_on_all_replicas():
    _, metrics = trained_alone("flax_imagenet_dynamic_scale", NUM_REPLICAS)
    assert [bool(m["is_finite"]) for m in metrics] == [True] * 3 + [False] + [True] * 6
    assert metrics[3]["scale"] == metrics[2]["scale"] / 2


def test_frozen_layers_stay_bitwise_unchanged():
    state, _ = lora.PROGRAM.train(strategy_for(lora.PROGRAM, "pmap-1"), lora.step, num_steps=2)
    jax.tree.map(np.testing.assert_array_equal, lora.frozen(state), lora.frozen(lora.make()))
