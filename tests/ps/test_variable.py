"""Variables of the servers, in the main program and in functions that JAX traces."""

import jax
import jax.numpy as jnp
import numpy as np

from tests.support import inside
from tests.support.messages import raises


class Host:
    """A server with one variable."""

    def __init__(self):
        self.held = np.float32(3)

    def variable(self, server, name, operation, value):
        change = {"read": 0, "assign": (value or 0) - self.held, "assign_add": value or 0}
        self.held += change[operation]
        return self.held


USES = {
    "read": lambda v, x: x * v.read_value(),
    "value": lambda v, x: x * v.value,
    "arithmetic": lambda v, x: v * x,
    "reflected": lambda v, x: x + v,
    "conversion": lambda v, x: x * jnp.asarray(v),
    "assign": lambda v, x: v.assign(1.0),
    "assign_add": lambda v, x: v.assign_add(1.0),
    "traced value": lambda v, x: v.assign(x),
}


def test_traced_functions_cannot_use_variables(subtests):
    """They would keep the value that it has now, or change it once."""
    for name in USES:
        with subtests.test(msg=name):
            host = Host()
            variable = inside.server_variable("a", 0, host)
            with raises(RuntimeError, names="'a'", fix="outside"):
                jax.jit(lambda x: USES[name](variable, x))(2.0)
            assert host.held == 3
            assert USES[name](variable, 2.0) is not None
