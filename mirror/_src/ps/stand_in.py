"""`GradientKeeper`: the optimizer of a training step on a worker."""

from collections.abc import Collection, Mapping
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from mirror._src.base.errors import describe
from mirror._src.base.types import Array
from mirror._src.ps.placement import Leaf
from mirror._src.ps.sparse import take
from mirror._src.training.checkpoints.snapshot import value_of


class PushedGradient(nnx.Variable[Any]):
    """The gradient of a leaf that the last step computed."""


class TouchedIds(nnx.Variable[Any]):
    """The padded ids of a table's rows that a step touches."""


class OutsideRows(nnx.Variable[Any]):
    """Number of nonzero rows of a table's gradient that were not touched, and the first of them."""


class GradientKeeper(nnx.Optimizer[Any]):
    """Optimizer of a training step on a worker: `update` keeps the gradients for the servers.

    The servers update the model, so the model of the worker does not change. The gradients are
    variables, so that `strategy.run` proves that all replicas have the same ones, and names the
    gradient that they do not have in common.

    Args:
        model: The model.
        wrt: The filter of the user's optimizer.
        leaves: The leaves of the model on the servers.
        tables: Names of the leaves whose gradients are kept for touched rows alone.
    """

    def __init__(
        self,
        model: nnx.Module,
        wrt: Any,
        leaves: tuple[Leaf, ...],
        tables: Collection[str] = (),
    ) -> None:
        super().__init__(model, optax.identity(), wrt=wrt)
        trained = {leaf.name: leaf for leaf in leaves if leaf.kind == "trained"}
        self.gradients = nnx.Dict(
            {
                name: PushedGradient(
                    jnp.zeros((0, *leaf.shape[1:]) if name in tables else leaf.shape, leaf.dtype),
                    whole_shape=leaf.shape,
                )
                for name, leaf in trained.items()
            }
        )
        self.ids = nnx.Dict({name: TouchedIds(jnp.zeros(0, jnp.int32)) for name in tables})
        self.outside = nnx.Dict({name: OutsideRows(jnp.zeros(2, jnp.int32)) for name in tables})

    def touch(self, ids: Mapping[str, np.ndarray]) -> None:
        """Sets the rows of tables whose gradients the next step keeps; outside of `jax.jit`."""
        for name, each in ids.items():
            if self.ids[name].shape != each.shape:
                gradient = self.gradients[name]
                rows = (len(each), *gradient.shape[1:])
                gradient.set_value(jnp.zeros(rows, gradient.dtype))
            self.ids[name].set_value(jnp.asarray(each))

    def update(self, model: nnx.Module, grads: Any, /, **kwargs: Any) -> None:
        """Keeps the gradients.

        Raises:
            ValueError: If the gradients do not match the trained variables.
            TypeError: If there are further arguments, or a gradient has another dtype.
        """
        del model
        if kwargs:
            raise TypeError(
                f"optimizer.update() got {', '.join(map(repr, kwargs))}, but parameter servers "
                "receive gradients only. Omit these arguments."
            )
        flat = nnx.to_flat_state(nnx.state(grads, self.wrt))
        given = {".".join(map(str, path)): value_of(leaf) for path, leaf in flat}
        kept = self.gradients
        if set(given) != set(kept):
            differing = sorted(set(given) ^ set(kept))
            raise ValueError(
                f"optimizer.update() must receive a gradient for each of the {len(kept)} variables "
                f"that wrt={describe(self.wrt)} selects, got {len(given)}; they differ in "
                f"{differing[0]}. Pass what nnx.grad(loss, argnums=nnx.DiffState(0, wrt)) returns."
            )
        for name, value in given.items():
            like = jax.ShapeDtypeStruct(kept[name].get_metadata()["whole_shape"], kept[name].dtype)
            if (value.shape, value.dtype) != (like.shape, like.dtype):
                raise TypeError(
                    f"The gradient of {name} must be {describe(like)}, as the variable is, got "
                    f"{describe(value)}. Convert it before optimizer.update()."
                )
            if name in self.ids:
                ids = self.ids[name][...]
                self.outside[name][...] = _outside(value, ids)
                value = take(value, ids)
            kept[name][...] = value
        self.step[...] += 1

    def pushed(self, name: str) -> Array:
        """Returns the gradient of a leaf; of a table, the touched rows."""
        return self.gradients[name].get_value()

    def __reduce__(self) -> NoReturn:
        raise TypeError("The optimizer of a scheduled step stays on its worker.")


def _outside(gradient: Array, ids: Array) -> Array:
    is_nonzero = (gradient != 0).reshape(len(gradient), -1).any(axis=1)  # NaN too
    is_outside = is_nonzero.at[ids].set(False, mode="drop")
    return jnp.stack([is_outside.sum(), is_outside.argmax()]).astype(jnp.int32)
