"""The executors agree on the dtypes of 64 bits; `tests/laws/test_conformance.py` runs it."""

import jax

import tests.conftest  # noqa: F401  (compiles as the tests do)

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_enable_x64", True)

# The tables hold arrays, which start the backend.
from tests.support import conformance as table  # noqa: E402

for step, shape in ((table.reductions, (3,)), (table.by_hand, (table.N, 3))):
    args = (table.of_dtypes(*shape, dtypes=table.WIDE),)
    wanted = table.result_of("pmap", step, args)
    assert {str(dtype) for _, dtype, _ in wanted[1]} >= set(table.WIDE)
    for name in ("vmap on 2", "staged", "staged in lanes"):
        table.assert_agree(table.result_of(name, step, args), wanted, rtol=1e-12)
