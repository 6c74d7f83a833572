"""Direct access to the private slot in which flax stores the value of a variable."""

from collections.abc import Callable
from typing import Any

from flax import nnx

slot: Any = vars(nnx.Variable).get("_raw_value")


def _variable_setter() -> Callable[[nnx.Variable, Any], None]:
    """Writes a variable's raw value.

    `Variable.set_raw_value` checks the trace level twice and takes 2 us, which for 600 variables is
    the larger part of a step's overhead. `run` is outside every trace (`jax.set_mesh` refuses it
    elsewhere), so the slot is written directly: a private name (flax 0.12.8 to 0.12.12), used if it
    exists; `test_the_private_slot_of_variables_is_still_there` in `tests/run/test_runner.py` fails
    when flax removes it.
    """
    return nnx.Variable.set_raw_value if slot is None else slot.__set__


write_value = _variable_setter()
read_value: Any = getattr(slot, "__get__", nnx.Variable.get_raw_value)
"""Reads what the variable itself holds, also where another stands for it."""
