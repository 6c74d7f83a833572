"""Direct access to the private slot in which flax stores the value of a variable."""

from collections.abc import Callable
from typing import Any

from flax import nnx

slot: Any = vars(nnx.Variable).get("_raw_value")


def _variable_setter() -> Callable[[nnx.Variable, Any], None]:
    """Returns a function that writes the raw value of a variable.

    `Variable.set_raw_value` checks the trace level twice and takes 2 us, which for 600 variables is
    most of the overhead of a step. The checks are not needed: `run` works only outside traces
    (`jax.set_mesh` rejects it elsewhere). So the slot is written directly. It is private (flax
    0.12.8 to 0.12.12) and used only if it exists;
    `test_flax_still_has_the_private_slot_of_variables` in `tests/engine/test_runner.py` fails when
    flax removes it.
    """
    return nnx.Variable.set_raw_value if slot is None else slot.__set__


write_value = _variable_setter()
read_value: Any = getattr(slot, "__get__", nnx.Variable.get_raw_value)
"""Reads the raw value of a variable itself, even where a stand-in replaces it in a trace."""
