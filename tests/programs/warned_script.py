"""A script that is warned of a new function per call; `tests/laws/test_bad_input.py` runs it."""

import warnings

import jax.numpy as jnp

import mirror
from tests.support.messages import assert_message

strategy = mirror.MirroredStrategy(["/cpu:0"])


def main():
    for _ in range(4):
        strategy.run(lambda x: x + 1, (jnp.ones(2),))


with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    main()
(warning,) = caught
assert_message(str(warning.message), names=["<lambda>", "warned_script.py:"], values=3)
assert warning.filename == __file__, warning.filename

names = {"mirror": mirror}  # a function of no module
exec("def step(x): return mirror.all_reduce('sum', x)", names)
assert strategy.run(names["step"], (jnp.ones(2),)).tolist() == [1, 1]
