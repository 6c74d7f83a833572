"""The memory of host devices stays with the process, instead of being mapped in every step."""

import pytest

from tests.support import fresh
from tests.support.tables import rows

PROGRAM = """
    import os, platform, resource
    import jax, jax.numpy as jnp
    import mirror

    if platform.libc_ver()[0] != "glibc":
        raise SystemExit("other")

    def step(x):  # with 60 MiB of temporaries
        return jax.lax.cumsum(jnp.sin(x)).max() + jnp.sin(x)[::-1].max()

    strategy = mirror.OneDeviceStrategy("/cpu:0")
    x = jnp.ones((5 << 20,))
    faults = []
    for _ in range(20):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        strategy.run(step, (x,)).block_until_ready()
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    print(min(faults))
"""


@rows(
    "environment, maps",
    {
        "by default": ({}, False),
        "one setting of the user": ({"MALLOC_TOP_PAD_": "131072"}, True),
        "a tunable of the user": ({"GLIBC_TUNABLES": "glibc.malloc.perturb=0"}, True),
    },
)
def test_memory_of_a_step_is_mapped_once(environment, maps):
    found = fresh.run(PROGRAM, environment=environment).split()[-1]
    if found == "other":
        pytest.skip("another C library")
    assert (int(found) > 1000) == maps, found
