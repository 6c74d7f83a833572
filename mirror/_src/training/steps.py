"""The steps of a `Trainer`, as one replica runs them.

Each replica computes sums over its own examples. The sums are all-reduced, which is the only
collective, and then divided by the total number of examples, or by the sum of the weights if the
loss is `Weighted`. A step therefore computes the same as one device on the whole batch, for any
batch size and number of replicas.

A collective in the loss carries gradients from each replica to the others. Every replica therefore
divides its loss by the same number, and what differs between replicas enters after the all-reduce.
"""

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.extend.core import ClosedJaxpr

from mirror._src.base.errors import counted, describe, expected, listing
from mirror._src.base.naming import keys, name_of
from mirror._src.base.tracebacks import on_behalf_of, users_functions
from mirror._src.base.types import Array, PyTree, accumulator, widened
from mirror._src.engine.all_reduce import AllReduce
from mirror._src.engine.examples import masking
from mirror._src.engine.step import nothing_selected
from mirror._src.engine.variable import Variable
from mirror._src.jaxprs.additive import Dependence, dependence
from mirror._src.jaxprs.trace import abstract, trace_inside
from mirror._src.strategy.mirrored import get_replica_context
from mirror._src.training.mistakes import describes_batch, require_transformation
from mirror._src.training.objective import LOSS, Objective, Sums, as_float, carried, fit_floats
from mirror._src.training.precision import SCALE, SKIPPED, LossScale, Precision, Snapshot

_IN_EACH_PIECE = (nnx.RngState, nnx.metrics.MetricState, Variable)
Gradients = tuple[list[PyTree], Sums]
"""The gradient of the loss, or of the values and of the weights of a `Weighted` loss; the sums."""


def training_step(objective: Objective, accumulate_steps: int) -> Callable[..., Sums]:
    """Returns a step that makes one update with one batch.

    With a loss scale, it makes none if a gradient is not finite: the model and the optimizer keep
    what they had before the step, also their running statistics, which could be infinite or NaN.
    """
    gradients = _gradients(objective)
    if accumulate_steps > 1:
        gradients = _accumulated(gradients, accumulate_steps)

    def train_step(
        model: nnx.Module,
        optimizer: nnx.Optimizer,
        batch: PyTree,
        mask: Array,
        loss_scale: LossScale | None = None,
    ) -> Sums:
        context = get_replica_context()
        # Why not sum and divide at the end: a sum over all rows can overflow a half-precision
        # gradient where the mean does not. Each replica therefore divides by the number of rows of
        # all replicas, including padding. The correction afterwards is 1 without padding.
        num_rows = mask.size * context.num_replicas_in_sync
        before = None if loss_scale is None else Snapshot((model, optimizer))
        scale = None if loss_scale is None else loss_scale.current[...]
        means, local_sums = gradients(model, optimizer.wrt, batch, mask, num_rows, scale)
        totals, sums = _all_reduced(means, local_sums, num_rows)
        grads = _divided(totals, sums, num_rows)
        if loss_scale is not None:  # before smaller dtypes round it
            grads = loss_scale.unscale(grads)
        grads = _like(grads, model, optimizer.wrt)
        if loss_scale is None or before is None:
            update(optimizer, model, grads, _mean_loss(sums))
            return sums
        finite = loss_scale.update(grads)
        update(optimizer, model, grads, _mean_loss(sums))
        before.restore_unless(finite)
        return _with_scale(sums, scale, finite)

    return on_behalf_of(train_step, *objective.functions)


def repeated(train_step: Callable[..., Sums]) -> Callable[..., Sums]:
    """Returns a step that makes `num_batches` updates, with batches `(k, B, ...)` from `first`.

    Both numbers are arguments of the compiled step, so that a shorter group is not compiled again.
    """

    def train_steps(
        model: nnx.Module,
        optimizer: nnx.Optimizer,
        batches: PyTree,
        masks: Array,
        first: Any,
        num_batches: Any,
        loss_scale: LossScale | None = None,
    ) -> Sums:
        scales = () if loss_scale is None else (loss_scale,)
        graphdef, keys, state = _split((model, optimizer, *scales))

        def update(i: Any, state: PyTree) -> tuple[PyTree, Sums]:
            objects = nnx.merge(graphdef, keys, state, copy=True)
            batch, mask = jax.tree.map(lambda x: x[i], (batches, masks))
            sums = train_step(*objects[:2], batch, mask, *objects[2:])
            return _split(objects)[2], sums

        def body(i: Any, carry: tuple[PyTree, Sums]) -> tuple[PyTree, Sums]:
            state, total = carry
            state, sums = update(i, state)
            return state, optax.tree.add(total, sums)

        zeros = optax.tree.zeros_like(jax.eval_shape(update, 0, state)[1])
        state, total = jax.lax.fori_loop(first, first + num_batches, body, (state, zeros))
        nnx.update((model, optimizer, *scales), state)
        return total

    return on_behalf_of(train_steps, *users_functions(train_step))


def evaluation_step(objective: Objective) -> Callable[[nnx.Module, PyTree, Array], Sums]:
    """Returns a step that computes the sums of a batch, with the model in evaluation mode."""

    def evaluate_step(model: nnx.Module, batch: PyTree, mask: Array) -> Sums:
        context = get_replica_context()
        _, _, sums = objective(_for_evaluation(model), batch, mask)
        num_rows = mask.size * context.num_replicas_in_sync
        reduced = _all_reduced([], sums._replace(metrics={}), num_rows)[1]
        return reduced._replace(metrics=sums.metrics)

    return on_behalf_of(evaluate_step, *objective.functions)


def prediction_step(
    fn: Callable[[Any, PyTree], PyTree], precision: Precision
) -> Callable[[nnx.Module, PyTree, Array], PyTree]:
    """Returns a step that applies `fn`, with the model in evaluation mode."""

    def predict_step(model: nnx.Module, batch: PyTree, mask: Array) -> PyTree:
        with describes_batch(fn, batch), precision.computing(), masking(mask):
            return fn(_for_evaluation(model), batch)

    return on_behalf_of(predict_step, fn)


def examples_of(objective: Objective, *, in_training: bool) -> Callable[..., list[Array]]:
    """Returns a step that computes what the loss function returns for the examples of a batch."""

    def examples(model: nnx.Module, batch: PyTree, mask: Array) -> list[Array]:
        return objective.examples(model if in_training else _for_evaluation(model), batch, mask)

    return on_behalf_of(examples, *objective.functions)


def gradients_of(objective: Objective, wrt: Any, times: int = 1) -> Callable[..., list[Array]]:
    """Returns a step that computes the gradients of one replica, as sums over its examples.

    The loss is divided by `times` as many rows before it is differentiated, as if the others were
    padding, and the gradients are multiplied by their number.
    """
    gradients = _gradients(objective)

    def compute_gradients(model: nnx.Module, batch: PyTree, mask: Array) -> list[Array]:
        grads, sums = gradients(model, wrt, batch, mask, times * mask.size, None)
        divisor = 1 if LOSS in sums.weights else times * mask.size
        return [widened(x) * divisor for x in jax.tree.leaves(grads)]

    return on_behalf_of(compute_gradients, *objective.functions)


def _gradients(objective: Objective) -> Callable[..., Gradients]:
    """Returns a function that computes the gradients of one replica's loss.

    Gradients of a `Weighted` loss are sums in float32, which can be added up: the total weight is
    known only after the collective. Values and weights are differentiated separately if both
    depend on the parameters.
    """

    def gradients(
        model: nnx.Module, wrt: Any, batch: PyTree, mask: Array, num_rows: int, scale: Array | None
    ) -> Gradients:
        graphdef, state = nnx.split(model)
        before = jax.tree.map(lambda x: x, state)  # the state holds the variables themselves
        derived, derived_losses = list[bool](), list[bool]()

        def scaled(total: Array, divisor: Any) -> Array:
            return total / divisor if scale is None else total / divisor * scale

        def loss(model: nnx.Module) -> tuple[Array, tuple[Sums, Any]]:
            losses, weights, sums = objective(model, batch, mask)
            _note_derivative(losses, derived_losses)
            divisor: Any = num_rows
            if weights is not None:
                _note_derivative(weights, derived)
                is_small = scale is not None or objective.precision.has_float16(model)
                divisor = _common_weight(sums) if is_small else num_rows
            return scaled(_total(losses, sums), divisor), (sums._replace(metrics={}), divisor)

        def loss_of_weights(model: nnx.Module) -> tuple[Array, None]:
            _, weights, sums = objective(model, batch, mask)
            assert weights is not None
            return scaled(_total(weights, sums), divisor), None

        if wrt is not nnx.Param:  # a model may have statistics only
            _require_selection(model, wrt)
        _require_floats(model, wrt)

        def gradient(of: Callable[..., Any], model: nnx.Module) -> Any:
            return nnx.grad(of, argnums=nnx.DiffState(0, wrt), has_aux=True)(model)

        grads, (sums, divisor) = gradient(loss, model)
        if jax.tree.leaves(grads) and not (derived_losses or derived):
            objective.is_constant = True
        if LOSS not in sums.weights:
            return [grads], sums
        found = [grads]
        if derived:  # the weights depend on the parameters
            _require_whole_batch(objective)
            # XLA merges this forward pass with the other one.
            found.append(gradient(loss_of_weights, nnx.merge(graphdef, before, copy=True))[0])
        return jax.tree.map(lambda x: widened(x) * divisor, found), sums

    return gradients


def _all_reduced(means: list[PyTree], sums: Sums, num_rows: int) -> Gradients:
    """Adds up what the replicas have computed from `num_rows` examples, padding included.

    A collective has one dtype. Integers are therefore sent as floats, with the loss, if these are
    exact: not for large batches, nor for the user's cross-device ops, which may round floats.
    """
    context = get_replica_context()
    is_exact = isinstance(context.strategy.cross_device_ops, AllReduce) and fit_floats(num_rows)
    dtype = sums.totals[LOSS].dtype

    def sent(x: Array) -> Array:
        return x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.integer) else x

    values = jax.tree.map(sent, sums) if is_exact else sums
    totals, received = context.all_reduce("sum", (means, values))
    received = jax.tree.map(lambda x, like: x.astype(like.dtype), received, sums)
    return totals, carried(received)


def _note_derivative(value: Array, derived: list[bool]) -> None:
    """Adds True to a list if a value depends on the parameters; called while JAX differentiates."""

    @jax.custom_jvp
    def identity(x: Array) -> Array:
        return x

    def derivative(primals: Any, tangents: Any) -> Any:
        derived.append(True)  # JAX does not call this for values without a tangent
        return primals[0], tangents[0]

    identity.defjvp(derivative, symbolic_zeros=True)
    if jnp.issubdtype(value.dtype, jnp.floating):
        identity(value)


def _require_whole_batch(objective: Objective) -> None:
    """Rejects weights that depend on the parameters where a batch is split among workers.

    Raises:
        ValueError: If it is split.
    """
    context = get_replica_context()
    if context.part is not None and context.part.num_parts > 1:
        raise ValueError(
            f"The weights that {name_of(objective.loss_fn)} returns depend on the parameters. The "
            f"workers compute the {context.part.num_parts} parts of a batch separately, and the "
            "gradient requires the weights of the whole batch. Use jax.lax.stop_gradient(weights), "
            "or train with mirror.MirroredStrategy."
        )


def _total(values: Array, sums: Sums) -> Array:
    return values.sum(dtype=sums.totals[LOSS].dtype)


def _common_weight(sums: Sums) -> Array:
    """Returns the sum of the weights of all replicas, as a divisor without a gradient.

    Sums over rows can overflow a gradient in float16, even if they are divided by their number.
    """
    weight = jax.lax.stop_gradient(_weight(sums))
    return _nonzero(get_replica_context().all_reduce("sum", weight))


def _weight(sums: Sums) -> Array:
    """Returns the sum of the weights of a `Weighted` loss."""
    return as_float(sums.weights[LOSS], sums.totals[LOSS].dtype)


def _mean_loss(sums: Sums) -> Array:
    """Returns the loss of the batch on all replicas; 0 if the total weight is 0."""
    divisor = _nonzero(_weight(sums)) if LOSS in sums.weights else sums.count
    loss: Array = sums.totals[LOSS] / divisor
    return loss


def _nonzero(weight: Array) -> Array:
    return jnp.where(weight == 0, 1, weight)


def _divided(totals: list[PyTree], sums: Sums, num_rows: int) -> PyTree:
    """Converts summed gradients to gradients of the mean; 0 if the total weight is 0."""
    if LOSS not in sums.weights:
        count = lambda x: sums.count.astype(jnp.promote_types(x.dtype, jnp.float32))  # noqa: E731
        return jax.tree.map(lambda x: x * (num_rows / count(x)), totals[0])
    weight = _weight(sums)
    divisor, quotient = _nonzero(weight), sums.totals[LOSS] / _nonzero(weight)

    def divided(of_values: Array, *of_weights: Array) -> Array:
        for x in of_weights:  # the gradient of the quotient
            of_values = of_values - quotient * x
        return jnp.where(weight == 0, 0, of_values / divisor)

    return jax.tree.map(divided, *totals)


def _require_floats(model: nnx.Module, wrt: Any) -> None:
    """Rejects parameters without a gradient, such as quantized weights.

    Raises:
        TypeError: If there is one.
    """
    for path, variable in nnx.to_flat_state(nnx.state(model, wrt)):
        for leaf in jax.tree.leaves(variable):
            if not jnp.issubdtype(leaf.dtype, jnp.inexact):
                name, fix = ".".join(map(str, path)), "Make it an nnx.Variable, or pass `wrt`."
                raise TypeError(expected(f"model.{name}", leaf, "floats to be trained", fix))


def _like(grads: PyTree, model: nnx.Module, wrt: Any) -> PyTree:
    """Converts gradients to the dtypes of their variables.

    Raises:
        ValueError: If the loss function has created variables.
    """
    treedef: Any
    leaves, treedef = jax.tree.flatten(grads)
    variables = jax.tree.leaves(nnx.state(model, wrt))
    if len(leaves) != len(variables):
        raise ValueError(
            f"The loss function changed the model: it has {counted(len(variables), 'parameter')} "
            f"to train, and had {len(leaves)} before. Create all variables before the Trainer."
        )
    pairs = zip(leaves, variables, strict=True)
    return treedef.unflatten([x.astype(variable.dtype) for x, variable in pairs])


def _with_scale(sums: Sums, scale: Any, finite: Array) -> Sums:
    """Adds the metrics of a loss scale, which are means over steps.

    Raises:
        ValueError: If the loss function returns metrics of the same names.
    """
    taken = sorted({SCALE, SKIPPED} & sums.totals.keys())
    if taken:
        raise ValueError(
            f"The metrics {taken} of the loss function have names of metrics of the loss scale. "
            "Rename them."
        )
    totals = {SCALE: scale, SKIPPED: (~finite).astype(jnp.float32)}
    weights = dict.fromkeys(totals, jnp.ones((), jnp.float32))
    return Sums({**sums.totals, **totals}, sums.count, {**sums.weights, **weights})


def _accumulated(gradients: Callable[..., Gradients], num_pieces: int) -> Callable[..., Gradients]:
    """Computes the same gradients from pieces of the batch, one at a time, to save memory."""

    def accumulated(
        model: nnx.Module, wrt: Any, batch: PyTree, mask: Array, num_rows: int, scale: Array | None
    ) -> Gradients:
        def split_rows(x: Array) -> Array:
            return x.reshape(num_pieces, x.shape[0] // num_pieces, *x.shape[1:])

        context = get_replica_context()
        pieces = jax.tree.map(split_rows, (context._positions(mask.size), batch, mask))
        graphdef, keys, state = _split(model)

        def gradients_of(state: PyTree, piece: PyTree) -> tuple[PyTree, Gradients]:
            model = nnx.merge(graphdef, keys, state, copy=True)
            context.piece, *examples = piece
            try:
                result = gradients(model, wrt, *examples, num_rows, scale)
            finally:
                context.piece = None
            return _split(model)[2], result

        treedef: Any
        of_piece: Any
        before, treedef = jax.tree.flatten(state)
        first, of_piece = jax.tree.flatten(jax.tree.map(lambda x: x[0], pieces))
        traced = list[Any]()

        def flat(*leaves: Array) -> list[Array]:
            of_state, rows = leaves[: len(before)], leaves[len(before) :]
            traced[:] = gradients_of(treedef.unflatten(of_state), of_piece.unflatten(rows))
            return jax.tree.leaves(traced)

        once = _changed_once(trace_inside(flat, [*before, *first]), state)
        shapes = jax.tree.map(abstract, traced[1])

        def body(carry: tuple[PyTree, Gradients], piece: PyTree) -> tuple[Any, None]:
            found, total = carry
            pairs = enumerate(zip(before, jax.tree.leaves(found), strict=True))
            found = treedef.unflatten([x if i in once else y for i, (x, y) in pairs])
            found, result = gradients_of(found, piece)
            return (found, optax.tree.add(total, result)), None

        zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, accumulator(s.dtype)), shapes)
        (found, (total, sums)), _ = jax.lax.scan(body, (state, zeros), pieces)
        nnx.update(model, found)
        return jax.tree.map(lambda x, s: x.astype(s.dtype), (total, sums), shapes)

    return accumulated


def _changed_once(program: ClosedJaxpr, state: PyTree) -> set[int]:
    """Returns the leaves of the state that change once in a step, not in each piece of a batch.

    Their new values depend on no example, such as an average of weights. Random counts change in
    each piece, which draws other numbers; so do keys, unless the examples have keys of their own.
    Metrics count the examples of each piece.

    Args:
        program: Program of a piece. The state comes first, also in the results, and then the
            positions of the examples, for `mirror.example_keys`.
        state: The state.
    """
    variables = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, nnx.Variable))
    types = [type(x) for x in variables for _ in jax.tree.leaves(x)]
    values = zip(types, program.jaxpr.invars, program.jaxpr.outvars, strict=False)
    changed = {i for i, (_, before, after) in enumerate(values) if before is not after}
    positions = program.jaxpr.invars[len(types)]
    is_kept = any(atom is positions for eqn in program.jaxpr.eqns for atom in eqn.invars)
    once = {i for i in changed if not issubclass(types[i], _IN_EACH_PIECE)}
    once = {i for i in once if is_kept or not _is_random_key(program.in_avals[i])}
    examples, dependent = range(len(types), len(program.jaxpr.invars)), {-1}
    while dependent:
        pairs = [(i, o) for o in once for i in (*examples, *(changed - once))]
        found = dependence(program, [i for i, _ in pairs], [o for _, o in pairs])
        kinds = zip(pairs, found, strict=True)
        dependent = {o for (_, o), x in kinds if x is not Dependence.INDEPENDENT}
        once -= dependent
    return once


def _is_random_key(aval: Any) -> bool:
    is_raw = aval.dtype == np.uint32 and aval.shape[-1:] == (2,)
    return is_raw or jnp.issubdtype(aval.dtype, jax.dtypes.prng_key)


def _for_evaluation(model: nnx.Module) -> nnx.Module:
    """Returns a copy of the model in evaluation mode: no dropout, running statistics."""
    copy = nnx.merge(*nnx.split(model), copy=True)
    copy.eval()
    return copy


def _split(objects: Any) -> tuple[Any, Any, Any]:
    """Splits objects into structure, random keys, which never change, and all other state."""
    split: Any = nnx.split(objects, nnx.RngKey, ...)
    return split


def make_optimizer(
    model: nnx.Module, tx: optax.GradientTransformation | nnx.Optimizer[Any], wrt: Any
) -> nnx.Optimizer[Any]:
    """Returns the `nnx.Optimizer` of a model.

    Raises:
        TypeError: If `tx` is neither an optax transformation nor an `nnx.Optimizer`, or it is an
            `nnx.ModelAndOptimizer`.
        ValueError: If `wrt` is passed together with an `nnx.Optimizer`, or selects nothing.
    """
    if isinstance(tx, nnx.ModelAndOptimizer):
        fix = "Pass optax.adam(1e-3), or nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)."
        raise TypeError(expected("tx", tx, "an optimizer without the model", fix))
    if isinstance(tx, nnx.Optimizer):
        if wrt is not None:
            raise ValueError(
                f"`wrt` ({describe(wrt)}) cannot be combined with an nnx.Optimizer, which already "
                f"has wrt={describe(tx.wrt)}. Omit wrt."
            )
        if tx.wrt is not nnx.Param:
            _require_selection(model, tx.wrt)
        return tx
    require_transformation(tx)
    if wrt is not None:
        _require_selection(model, wrt)
    return nnx.Optimizer(model, tx, wrt=nnx.Param if wrt is None else wrt)


def _require_selection(model: nnx.Module, wrt: Any) -> None:
    message = nothing_selected([model], wrt)
    if message is not None:
        raise ValueError(message)


def update(
    optimizer: nnx.Optimizer[Any], model: nnx.Module, gradients: PyTree, loss: Array
) -> None:
    """Makes an update. A transformation that accepts `value` receives the loss.

    Raises:
        Exception: What the transformation raises, with a note on what it receives.
    """
    value = _value_for(optimizer, loss)
    before = jax.tree.map(jax.typeof, _trained(optimizer, model))
    try:
        optimizer.update(model, gradients, **value)
    except Exception as error:
        _require_fitting(optimizer, *before)
        error.add_note(
            "The update of the optimizer has raised this. mirror.Trainer passes the gradients, the "
            "parameters and, as `value`, the loss. For an optimizer that needs more, such as a "
            "line search, write the step and call strategy.run(step, args)."
        )
        raise
    # Arrays of other shapes may also be broadcast.
    if _shapes(before) != _shapes(_trained(optimizer, model)):
        _require_fitting(optimizer, *before)


def _trained(optimizer: nnx.Optimizer[Any], model: nnx.Module) -> tuple[PyTree, PyTree]:
    return nnx.state(model, optimizer.wrt), optimizer.opt_state


def _shapes(tree: PyTree) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of arrays, which may be in variables, by path."""
    found, _ = jax.tree_util.tree_flatten_with_path(
        tree, is_leaf=lambda x: isinstance(x, nnx.Variable)
    )
    return {keys(path): np.shape(x) for path, each in found for x in jax.tree.leaves(each)}


def _require_fitting(optimizer: nnx.Optimizer[Any], params: PyTree, state: PyTree) -> None:
    """Rejects the state of an optimizer that is for parameters of other shapes.

    Raises:
        ValueError: If its arrays have other shapes than a new state for the parameters.
    """
    try:
        needed = _shapes(jax.eval_shape(optimizer.tx.init, params))
    except Exception:
        return
    has = _shapes(state)
    wrong = [name for name in needed | has if needed.get(name) != has.get(name)]
    if wrong:
        lines = [
            f"optimizer.opt_state{name}: {has.get(name, 'missing')}, but the model needs "
            f"{needed.get(name, 'no such array')}"
            for name in wrong
        ]
        raise ValueError(
            f"The state of the optimizer does not have the shapes of the model:\n{listing(lines)}\n"
            "It is for another model, or the model has changed. Create it for this one: "
            "trainer.optimizer = nnx.Optimizer(trainer.model, tx, wrt=nnx.Param)."
        ) from None


def _value_for(optimizer: nnx.Optimizer[Any], loss: Array) -> dict[str, Array]:
    """Returns the loss as the argument `value` of an optimizer's update, if it accepts one.

    Optax passes it to transformations that need it, such as `optax.contrib.reduce_on_plateau`.
    """
    tx = getattr(optimizer, "tx", None)  # a parameter server has the transformation
    if not isinstance(tx, optax.GradientTransformationExtraArgs):
        return {}
    is_accepted = _accepts_value(optimizer.update) and _accepts_value(tx.update)
    return {"value": loss} if is_accepted else {}


def _accepts_value(update: Callable[..., Any]) -> bool:
    parameters = inspect.signature(update).parameters
    has_more = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return has_more or "value" in parameters
