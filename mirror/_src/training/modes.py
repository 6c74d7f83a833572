"""Models whose mode is an argument of their call, which `model.eval()` cannot change."""

import inspect

from flax import nnx

_NEGATED = ("train", "training", "is_training")
_MODES = (*_NEGATED, "deterministic", "use_running_average", "inference")


def mode_argument(model: nnx.Module) -> tuple[str, str] | None:
    """Returns the name of the class in a model whose call has such an argument, and the argument.

    The calls of Flax's layers have it too. There, it defaults to their attribute.
    """
    for _, node in nnx.iter_graph(model):
        module = node.to_nnx__module if isinstance(node, nnx.bridge.ToNNX) else node
        if not callable(module) or type(module).__module__.startswith("flax."):
            continue
        parameters = inspect.signature(type(module).__call__).parameters.values()
        for parameter in parameters:
            if parameter.name in _MODES and parameter.default is not None:
                return type(module).__name__, parameter.name
    return None


def message_of(name: str, argument: str, evidence: str) -> str:
    """Returns the warning that an evaluation is in training mode."""
    value = "not self.deterministic" if argument in _NEGATED else "self.deterministic"
    return (
        f"evaluate and predict call {name} in training mode: it {evidence}. Its mode is the "
        f"argument `{argument}`, and model.eval() changes attributes only. Let an attribute of an "
        f"nnx.Module decide: self.deterministic = False in __init__, and {argument} = {value} in "
        "__call__, which replaces the argument, or is passed to a Linen module."
    )
