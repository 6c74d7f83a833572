"""Named variables: their operations, and functions that JAX traces."""

import jax
import jax.numpy as jnp
import numpy as np

from mirror._src.ps.variables import NamedVariables
from tests.support import inside
from tests.support.messages import raises


class Host:
    """One variable."""

    def __init__(self):
        self.held = np.float32(3)

    def apply(self, name, operation, value):
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
            variable = inside.server_variable("a", host)
            with raises(RuntimeError, names="'a'", fix="outside"):
                jax.jit(lambda x: USES[name](variable, x))(2.0)
            assert host.held == 3
            assert USES[name](variable, 2.0) is not None


def test_variables_compare_values_and_are_hashed_by_identity():
    variable, other = (inside.server_variable(name, Host()) for name in "ab")
    assert variable == 3
    assert variable == other
    assert variable != 4
    assert bool(variable != 3) is False
    assert variable
    variable.assign(0.0)
    assert not variable
    assert len({variable, other, variable}) == 2


def test_variables_apply_operations():
    named = NamedVariables()
    assert named.apply("a", "create", np.float32(10)) == 10
    assert named.apply("a", "create", np.float32(20)) == 10, "it exists"
    assert named.apply("a", "assign_add", 1) == 11
    assert named.apply("a", "assign_sub", 3) == 8
    assert named.apply("a", "assign", 5.0).dtype == np.float32
    named.apply("a", "read")[...] = 100
    assert named.apply("a", "read") == 5


def test_bad_operations_on_named_variables_are_refused():
    named = NamedVariables()
    named.apply("alpha", "create", np.zeros(3, np.int32))
    with raises(ValueError, names=("'alphas'", "'alpha'"), fix="strategy.Variable"):
        named.apply("alphas", "read")
    with raises(ValueError, names=("assign_add", "'alpha'"), values=("[3]", "[2]")):
        named.apply("alpha", "assign_add", np.zeros(2, np.int32))
    with raises(TypeError, names=("assign", "'alpha'"), values=("int32[3]", "float64[3]")):
        named.apply("alpha", "assign", np.zeros(3))
    with raises(TypeError, names="'alpha'", values="'x'"):
        named.apply("alpha", "assign", "x")
    with raises(TypeError, names="'beta'"):
        named.apply("beta", "create", None)
    with raises(ValueError, names="'alpha'", values=("int32[3]", "float32[3]")):
        named.apply("alpha", "create", np.zeros(3, np.float32))
    assert named.apply("alpha", "read").tolist() == [0, 0, 0]
