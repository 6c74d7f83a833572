"""Mistakes of new users: each message names what they wrote, says why, and gives the line to write.

Every row is a small program. A row fails if its error has another type, or if its message lacks the
user's names, the values, or the code that fixes it. Mistakes with `Trainer` are in
`tests/training/test_mistakes.py`.
"""

import argparse
import copy
import functools
import math
import operator
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from flax.training.train_state import TrainState

import mirror
from tests.support import name_tables
from tests.support.inside import replacements
from tests.support.messages import assert_message, raises
from tests.support.strategies import cpu_strategy


class Mistake(NamedTuple):
    """A program, and what its error must contain; see `tests.support.messages`."""

    program: Callable[[], Any]
    kind: type[BaseException]
    expected: dict[str, Any]


MISTAKES: dict[str, Mistake] = {}


def mistake(kind: type[BaseException], **expected: Any) -> Callable[[Callable[[], Any]], None]:
    """Returns a decorator that adds a program to the table, under the name of the function."""

    def add(program: Callable[[], Any]) -> None:
        MISTAKES[program.__name__] = Mistake(program, kind, expected)

    return add


def mistakes(
    programs: dict[str, tuple[Callable[[], Any], type[BaseException], dict[str, Any]]],
) -> None:
    """Adds programs of one line."""
    for name, row in programs.items():
        MISTAKES[name] = Mistake(*row)


def says(**expected: Any) -> dict[str, Any]:
    """Returns what a message must contain."""
    return expected


@functools.cache
def strategy() -> mirror.MirroredStrategy:
    return cpu_strategy(2)


@functools.cache
def batch() -> mirror.PerReplica:
    return mirror.PerReplica([np.ones((2, 3), "f4"), 2 * np.ones((2, 3), "f4")])


def losses() -> mirror.PerReplica:
    return mirror.PerReplica([1.0, 2.0])


def run(step, *args):
    return strategy().run(step, args)


def all_reduce(op, x):
    return mirror.all_reduce(op, x)


def linear() -> nnx.Linear:
    return nnx.Linear(3, 1, rngs=nnx.Rngs(0))


MODEL = linear()
OPTIMIZER = nnx.Optimizer(MODEL, optax.sgd(0.1), wrt=nnx.Param)


def test_mistake_is_explained(subtests):
    for name in MISTAKES:
        with subtests.test(msg=name):
            program, kind, expected = MISTAKES[name]
            with raises(kind, **expected) as caught:
                program()
            text = str(caught.value)
            assert "Tracer(" not in text
            assert "_src" not in text
            assert caught.value.__cause__ is None
            assert caught.value.__suppress_context__ or caught.value.__context__ is None


# The step


@mistake(
    mirror.ReplicaDivergenceError, names=["step", "model.kernel"], fix='all_reduce("mean", grads)'
)
def forgotten_all_reduce_nnx():
    def step(model, optimizer, x):
        loss, grads = nnx.value_and_grad(lambda model: model(x).mean())(model)
        optimizer.update(model, grads)
        return loss

    run(step, MODEL, OPTIMIZER, batch())


@mistake(mirror.ReplicaDivergenceError, names=["step"], values="kernel", fix="all_reduce")
def forgotten_all_reduce_linen():
    def step(state, x):
        grads = jax.grad(lambda params: state.apply_fn(params, x).mean())(state.params)
        return state.apply_gradients(grads=grads)

    model = linen.Dense(1)
    params = model.init(jax.random.key(0), np.ones((2, 3)))
    state = TrainState.create(apply_fn=model.apply, params=params, tx=optax.sgd(0.1))
    strategy().run(step, (state, batch()), donate_argnums=0)


CAPTURED = ["def step(MODEL, x)", "strategy.run(step, (MODEL, x))"]


@mistake(ValueError, names=["step", "'MODEL'"], fix=CAPTURED)
def captured_model_forward():
    def step(x):
        return MODEL(x).mean()

    run(step, batch())


@mistake(ValueError, names=["step", "'MODEL'"], fix=CAPTURED)
def captured_model_with_nnx_grad():
    def step(x):
        loss, grads = nnx.value_and_grad(lambda model: model(x).mean())(MODEL)
        return all_reduce("mean", (loss, grads))

    run(step, batch())


@mistake(ValueError, names=["step", "'model'"], fix="strategy.run(step, (model, x))")
def captured_local_model_with_nnx_grad():
    model = linear()

    def gradient(x):
        return nnx.grad(lambda each: each(x).mean())(model)

    def step(x):
        return gradient(x)

    run(step, batch())


@mistake(ValueError, names=["step", "'models[0]'"], fix="strategy.run(step, (model, x))")
def captured_list_of_models():
    models = [linear()]

    def step(x):
        return nnx.grad(lambda model: model(x).mean())(models[0])

    run(step, batch())


@mistake(ValueError, names=["step", "'trainer.model'"], fix="strategy.run(step, (model, x))")
def captured_model_in_an_object():
    class Training:
        model = None

    trainer = Training()
    trainer.model = linear()

    def gradient(x):
        return nnx.grad(lambda model: model(x).mean())(trainer.model)

    def step(x):
        return gradient(x)

    run(step, batch())


@mistake(ValueError, names=["step", "'MODEL'"], fix=CAPTURED)
def captured_model_with_jax_grad():
    def step(x):
        return jax.grad(lambda x: MODEL(x).mean())(x)

    run(step, batch())


@mistake(ValueError, names=["step", "'OPTIMIZER'"], fix="strategy.run(step, (OPTIMIZER, model, x))")
def captured_optimizer():
    def step(model, x):
        grads = nnx.grad(lambda model: model(x).mean())(model)
        OPTIMIZER.update(model, all_reduce("mean", grads))

    run(step, linear(), batch())


@mistake(UserWarning, names="step", values=3, fix="Define it once")
def function_defined_in_the_loop():
    for _ in range(6):

        def step(x):
            return x.mean()

        run(step, batch())


@mistake(UserWarning, names="step", values=2, fix="strategy.distribute_dataset")
def undistributed_batch():
    def step(model, x):
        return all_reduce("mean", model(x).mean())

    run(step, linear(), np.ones((4, 3), "f4"))


@mistake(RuntimeError, names="step", fix="regular Python")
def run_inside_jit():
    def step(x):
        return x.mean()

    nnx.jit(lambda x: run(step, x))(np.ones(3))


# Calls of `run`


def of_model(model, x):
    return model(x).mean()


def of_three(model, optimizer, x):
    return x.mean()


def of_batch(x):
    return x.mean()


def call_run(*args, **kwargs):
    return lambda: strategy().run(*args, **kwargs)


X = np.ones((2, 3), "f4")
THREE = "strategy.run(of_three, (model, optimizer, x))"
mistakes(
    {
        "run(step, batch)": (
            call_run(of_batch, batch()),
            TypeError,
            says(names=["args", "PerReplica"], fix="strategy.run(of_batch, (x,))"),
        ),
        "run(step, (batch))": (
            call_run(of_batch, (X)),
            TypeError,
            says(names="args", values="float32[2,3]", fix="strategy.run(of_batch, (x,))"),
        ),
        "run(step, model, batch)": (
            call_run(of_model, MODEL, X),
            TypeError,
            says(names=["Linear", "float32[2,3]"], fix="strategy.run(of_model, (model, x))"),
        ),
        "run(step, model, optimizer, batch)": (
            call_run(of_three, MODEL, OPTIMIZER, X),
            TypeError,
            says(names=["Linear", "Optimizer"], fix=THREE),
        ),
        "run(step, a, b, c, d, e)": (
            call_run(lambda a, b, c, d, e: a, 1, 2, 3, 4, 5),
            TypeError,
            says(values=[1, 5], fix="strategy.run(<lambda>, (a, b, c, d, e))"),
        ),
        "run(step, batch=batch)": (
            call_run(of_batch, x=X),
            TypeError,
            says(names="'x'", fix=["strategy.run(of_batch, (x,))", "{'x': x}"]),
        ),
        "run(step, (model,), batch=batch)": (
            call_run(of_model, (MODEL,), x=X),
            TypeError,
            says(names="'x'", fix="strategy.run(of_model, (model, x))"),
        ),
        "run(step, {batch})": (
            call_run(of_batch, {"x": X}),
            TypeError,
            says(names=["args", "dict"], fix="strategy.run(of_batch, (), {...})"),
        ),
        "run(step, args, options)": (
            call_run(of_batch, (X,), options=None),
            TypeError,
            says(
                names="'options'",
                values="tf.distribute.RunOptions",
                fix="strategy.run(of_batch, args)",
            ),
        ),
        "run(step, args, kwargs, options)": (
            lambda: strategy().run(of_batch, (X,), {}, None),
            TypeError,
            says(
                names="'options'",
                values="tf.distribute.RunOptions",
                fix="strategy.run(of_batch, args)",
            ),
        ),
        "run(step, args, donate=0)": (
            call_run(of_batch, (X,), donate_argnum=0),
            TypeError,
            says(names="'donate_argnum'", fix="donate_argnums="),
        ),
        "run(step(batch))": (
            call_run(jnp.ones(()), (X,)),
            TypeError,
            says(names="fn", values="float32[]", fix="strategy.run(step, args)"),
        ),
        "run(args, step)": (
            call_run((X,), of_batch),
            TypeError,
            says(names="of_batch", values="tuple", fix="strategy.run(of_batch, args)"),
        ),
        "verify(step, batch)": (
            lambda: strategy().verify(of_batch, batch()),
            TypeError,
            says(names="args", values="PerReplica", fix="strategy.verify(of_batch, (x,))"),
        ),
        "verify(step, model, batch, 1, 2)": (
            lambda: strategy().verify(of_model, MODEL, X, 1, 2),
            TypeError,
            says(names="verify(fn, args=(), kwargs=None", fix="strategy.verify(step, ("),
        ),
        "missing argument": (
            call_run(of_model, (X,)),
            TypeError,
            says(
                names=["of_model(model, x)", "model = float32[2,3]", "'x'"],
                values=1,
                fix="strategy.run(of_model, (model, x))",
            ),
        ),
        "no arguments": (
            call_run(of_batch),
            TypeError,
            says(names=["of_batch(x)", "'x'"], values=0, fix="strategy.run(of_batch, (x,))"),
        ),
        "too many arguments": (
            call_run(of_batch, (MODEL, X)),
            TypeError,
            says(
                names=["of_batch(x)", "x = Linear"],
                values=[2, "float32[2,3]"],
                fix="strategy.run(of_batch, (x,))",
            ),
        ),
        "unknown keyword": (
            call_run(of_batch, (X,), {"train": True}),
            TypeError,
            says(names=["of_batch(x)", "'train'"], fix="strategy.run(of_batch, (x,))"),
        ),
    }
)


# Collectives, and arguments in the wrong order


def in_step(step):
    return lambda: run(step, batch())


MEAN_FIRST = "mirror.all_reduce('mean', x)"
mistakes(
    {
        "all_reduce(x, 'mean')": (
            in_step(lambda x: mirror.all_reduce(x, "mean")),
            TypeError,
            says(names="op", values=["float32[2,3]", "'mean'"], fix=MEAN_FIRST),
        ),
        "all_reduce(x, ReduceOp.MEAN)": (
            in_step(lambda x: mirror.all_reduce(x, mirror.ReduceOp.MEAN)),
            TypeError,
            says(names="op", values="float32[2,3]", fix=MEAN_FIRST),
        ),
        "all_reduce(x)": (
            in_step(lambda x: mirror.all_reduce(x)),
            TypeError,
            says(names="all_reduce(op, tree)", values="'tree'", fix='mirror.all_reduce("mean", x)'),
        ),
        "all_reduce('avg', x)": (
            in_step(lambda x: mirror.all_reduce("avg", x)),
            ValueError,
            says(names="op", values="'avg'", fix="'mean'"),
        ),
        "all_reduce('summ', x)": (
            in_step(lambda x: mirror.all_reduce("summ", x)),
            ValueError,
            says(names="op", values="'summ'", fix="Did you mean 'sum'"),
        ),
        "all_reduce(jnp.mean, x)": (
            in_step(lambda x: mirror.all_reduce(jnp.max, x)),
            TypeError,
            says(names="op", values="max", fix='all_reduce("max", x)'),
        ),
        "all_gather(0, x)": (
            in_step(lambda x: mirror.all_gather(0, x)),
            TypeError,
            says(values=[0, "float32[2,3]"], fix="mirror.all_gather(x, axis=0)"),
        ),
        "all_gather(x, 'mean')": (
            in_step(lambda x: mirror.all_gather(x, "mean")),
            TypeError,
            says(names="axis", values="'mean'", fix="mirror.all_gather(x, axis=0)"),
        ),
        "reduce(x, 'mean')": (
            lambda: strategy().reduce(losses(), "mean"),
            TypeError,
            says(names="op", values=["PerReplica", "'mean'"], fix="strategy.reduce('mean', x)"),
        ),
        "reduce(x)": (
            lambda: strategy().reduce(losses()),
            TypeError,
            says(names="reduce(op, value", values="'value'", fix='strategy.reduce("mean"'),
        ),
        "gather(0, x)": (
            lambda: strategy().gather(0, losses()),
            TypeError,
            says(values=[0, "PerReplica"], fix="strategy.gather(x, axis=0)"),
        ),
        "AllReduce().reduce(x, 'mean')": (
            lambda: mirror.AllReduce().reduce(losses(), "mean"),
            TypeError,
            says(names="op", values="'mean'", fix="AllReduce().reduce('mean', x)"),
        ),
        "AllReduce().batch_reduce([x], 'mean')": (
            lambda: mirror.AllReduce().batch_reduce([losses()], "mean"),
            TypeError,
            says(names="op", values="'mean'", fix="AllReduce().batch_reduce('mean', x)"),
        ),
        "AllReduce().broadcast(devices, x)": (
            lambda: mirror.AllReduce().broadcast(strategy().devices, 3.0),
            TypeError,
            says(values=[3.0, "devices"], fix="AllReduce().broadcast(value, devices)"),
        ),
        "pmean(x, 'batch')": (
            in_step(lambda x: jax.lax.pmean(x, "batch")),
            ValueError,
            says(
                names="'batch'",
                values="'replica'",
                fix=["mirror.REPLICA_AXIS", "mirror.MirroredStrategy(axis_name='batch')"],
            ),
        ),
        "BatchNorm(axis_name='data')": (
            lambda: run(
                lambda model, x: model(x),
                nnx.BatchNorm(3, axis_name="data", rngs=nnx.Rngs(0)),
                batch(),
            ),
            ValueError,
            says(names="'data'", fix="mirror.MirroredStrategy(axis_name='data')"),
        ),
    }
)


# Values that a trace does not have. The line of the user is in the message.


@mistake(
    jax.errors.ConcretizationTypeError,
    names=["step", "x", "float(loss)", "test_mistakes.py"],
    values="float32[]",
    fix=["float(strategy.run(step, args))", "jax.debug.print"],
)
def float_of_the_loss():
    def step(x):
        loss = x.mean()
        return float(loss)

    run(step, batch())


@mistake(
    TypeError,
    names=["gradients", "Param", "result['bias']"],
    fix="nnx.to_pure_dict(state)",
)
def gradients_as_nnx_state():
    def gradients(model, x):
        return nnx.grad(lambda model: model(x).mean())(model)

    run(gradients, linear(), batch())


@mistake(
    jax.errors.ConcretizationTypeError,
    names=["step", "loss.item()"],
    values="float32[]",
    fix="float(strategy.run(step, args))",
)
def item_of_the_loss():
    def step(x):
        loss = x.mean()
        return loss.item()

    run(step, batch())


@mistake(
    jax.errors.TracerBoolConversionError,
    names=["step", "if loss > 0:"],
    values="bool[]",
    fix=["jnp.where", "jax.lax.cond"],
)
def branch_on_the_loss():
    def step(x):
        loss = x.mean()
        if loss > 0:
            return loss
        return -loss

    run(step, batch())


@mistake(
    jax.errors.TracerArrayConversionError,
    names=["step", "np.asarray(x)"],
    values="float32[2,3]",
    fix="jax.numpy",
)
def numpy_array_of_the_batch():
    def step(x):
        return np.asarray(x)

    run(step, batch())


@mistake(
    jax.errors.TracerIntegerConversionError,
    names=["step", "range(count)"],
    values="int32[]",
    fix=["functools.partial(step, n=3)", "jax.lax.fori_loop"],
)
def loop_over_a_traced_count():
    def step(count):
        return sum(jnp.ones(()) for _ in range(count))

    run(step, 3)


@mistake(
    TypeError, names=["step", "jnp.zeros(count)"], values="int32[]", fix="functools.partial(step"
)
def size_from_an_argument():
    def step(count):
        return jnp.zeros(count)

    run(step, 3)


@mistake(ValueError, names="step", values="float32[]", fix="functools.partial(step, n=3)")
def number_that_is_static_in_jit():
    def step(x, n):
        return x * n

    run(jax.jit(step, static_argnames="n"), 1.0, 3.0)


@mistake(
    jax.errors.NonConcreteBooleanIndexError,
    names=["step", "x[x > 0]"],
    fix=["jnp.where(mask, x, 0)", "where=mask"],
)
def elements_selected_by_a_mask():
    def step(x):
        return x[x > 0].mean()

    run(step, batch())


@mistake(TypeError, names=["step", ":.3f"], fix="jax.debug.print")
def format_of_the_loss():
    def step(x):
        return print(f"{x.mean():.3f}")

    run(step, batch())


@mistake(
    UserWarning,
    names=["step", "losses[0]"],
    values="float32[]",
    fix=["strategy.run(step, args)", "losses.append(value)"],
)
def list_that_collects_losses():
    losses: list[Any] = []

    def step(x):
        losses.append(x.mean())
        return x.sum()

    run(step, batch())


@mistake(UserWarning, names=["step", "Log.last"], values="float32[]", fix="Log.last = value")
def attribute_that_stores_the_loss():
    class Log:
        last = 0.0

    def step(x):
        Log.last = x.mean()
        return x.sum()

    run(step, batch())


@mistake(ValueError, names=["step", "'losses[0]'"], values="float32[]", fix="strategy.run(step, (")
def value_of_an_earlier_step():
    losses: list[Any] = []

    def store(x):
        losses.append(x.mean())
        return x.sum()

    def step(x):
        return x.mean() + losses[0]

    with pytest.warns(UserWarning, match=r"losses\[0\]"):
        run(store, batch())
    run(step, batch())


@mistake(
    ValueError, names=["step", "model.last"], fix=["nnx.Variable", "self.last", "[...] = value"]
)
def attribute_of_the_model():
    def step(model, x):
        model.last = x.mean()
        return x.sum()

    run(step, linear(), batch())


# A `PerReplica` where one value is needed

MEAN = "strategy.reduce('mean', x)"
NUMBER = f"float({MEAN})"
OPERATIONS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "round": (lambda x: round(x), NUMBER),
    "float": (float, NUMBER),
    "int": (int, NUMBER),
    "complex": (complex, NUMBER),
    "bool": (bool, NUMBER),
    "floor": (math.floor, NUMBER),
    "isnan": (math.isnan, NUMBER),
    "%": (lambda x: operator.mod("%.3f", x), NUMBER),
    "format": (lambda x: f"{x:.3f}", f"format({NUMBER}, '.3f')"),
    "> 0": (lambda x: x > 0, NUMBER),
    "max": (lambda x: max(x, x), NUMBER),
    "[0]": (lambda x: x[0], "x.values[0]"),
    "list": (list, "x.values"),
    "in": (lambda x: 1.0 in x, "x.values"),
    "len": (len, "x.num_replicas"),
    "+": (lambda x: x + 1, MEAN),
    "sum": (lambda x: sum([x, x]), MEAN),
    "-": (lambda x: -x, MEAN),
    "&": (lambda x: x & x, MEAN),
    "divmod": (lambda x: divmod(x, 2), MEAN),
    "abs": (abs, MEAN),
    "array +": (lambda x: np.ones(2) + x, MEAN),
    "np.exp": (np.exp, MEAN),
    "np.sum": (np.sum, MEAN),
    "jnp.mean": (jnp.mean, "x.stacked"),
    "jnp.exp": (jnp.exp, "x.stacked"),
    "jnp.stack": (lambda x: jnp.stack([x, x]), "x.stacked"),
    "jax.Array +": (lambda x: jnp.ones(2) + x, "x.stacked"),
}
ATTRIBUTES = {
    "mean": 'strategy.reduce("mean", x)',
    "sum": 'strategy.reduce("sum", x)',
    "max": 'strategy.reduce("max", x)',
    "shape": ["x.shapes", "x.stacked.shape"],
    "item": 'float(strategy.reduce("mean", x))',
    "numpy": "np.asarray(x)",
    "tolist": "np.asarray(x).tolist()",
    "block_until_ready": "jax.block_until_ready(x)",
    "astype": "x.stacked.astype",
    "T": "x.stacked.T",
    "stackd": "x.stacked",
    "nothing": "num_replicas",
}
for _name, (_operation, _fix) in OPERATIONS.items():
    MISTAKES[f"PerReplica: {_name}"] = Mistake(
        functools.partial(lambda operation: operation(losses()), _operation),
        TypeError,
        {"values": "PerReplica", "fix": _fix},
    )
for _name, _attribute_fix in ATTRIBUTES.items():
    MISTAKES[f"PerReplica: .{_name}"] = Mistake(
        functools.partial(lambda name: getattr(losses(), name), _name),
        AttributeError,
        {"names": f"'{_name}'", "values": "2 x float64[]", "fix": _attribute_fix},
    )


@mistake(AttributeError, names="'mean'", fix='strategy.reduce("mean", x, axis=(0, 1))')
def mean_over_the_axes_of_a_batch():
    batch().mean()


METHODS_OF_FUNCTIONS = {
    "init": "strategy.init(",
    "distribute_datasets_from_function": "InputContext",
    "distribute_values_from_function": "ValueContext",
}
mistakes(
    {
        f"{name} of a value": (
            lambda name=name: getattr(strategy(), name)([np.ones(4)]),
            TypeError,
            says(names="fn", values="callable", fix=fix),
        )
        for name, fix in METHODS_OF_FUNCTIONS.items()
    }
)


# Devices


def mirrored(*args, **kwargs):
    return lambda: mirror.MirroredStrategy(*args, **kwargs)


SIGNATURE = "MirroredStrategy(devices=None"
NO_GPU = says(values="/device:GPU:0", fix=["mirror doctor", "mirror.MirroredStrategy()"])
mistakes(
    {
        "num_replicas=4": (
            mirrored(num_replicas=4),
            TypeError,
            says(
                names=["'num_replicas'", SIGNATURE],
                fix=["devices=4", "replicas_per_device=4"],
            ),
        ),
        "device=": (
            mirrored(device=["/cpu:0"]),
            TypeError,
            says(names=["'device'", SIGNATURE], fix="devices="),
        ),
        "devices=9": (
            mirrored(devices=9),
            mirror.InvalidDeviceError,
            says(
                names="MirroredStrategy(9)",
                values=[8, "/device:CPU:7"],
                fix=["mirror.config.set_num_cpu_devices(9)", "replicas_per_device=2"],
            ),
        ),
        "devices=0": (
            mirrored(0),
            ValueError,
            says(names="devices", values=0, fix="MirroredStrategy()"),
        ),
        "devices=-4": (
            mirrored(-4),
            ValueError,
            says(names="devices", values=-4, fix="MirroredStrategy()"),
        ),
        "devices=True": (
            mirrored(devices=True),
            TypeError,
            says(names="devices", values="True", fix="MirroredStrategy(4)"),
        ),
        "devices=4.0": (
            mirrored(devices=4.0),
            TypeError,
            says(names="devices", values="4.0", fix="MirroredStrategy(4)"),
        ),
        "devices=[0, 1]": (
            mirrored([0, 1]),
            TypeError,
            says(values="0 (int)", fix=["'/cpu:0'", "mirror.config.list_logical_devices()"]),
        ),
        "devices='/cpu:0'": (
            mirrored("/cpu:0"),
            ValueError,
            says(names="devices", values="'/cpu:0'", fix="MirroredStrategy(['/cpu:0'])"),
        ),
        "devices='gpu'": (
            mirrored("gpu"),
            ValueError,
            says(names="devices", values="'gpu'", fix="mirror.config.list_logical_devices('GPU')"),
        ),
        "devices=[]": (mirrored([]), ValueError, says(names="devices", values="[]", fix="None")),
        "repeated": (
            mirrored(["/cpu:0", "/cpu:0"]),
            ValueError,
            says(names="devices", values="/device:CPU:0", fix="List each device once"),
        ),
        "['/gpu:0', '/gpu:1']": (
            mirrored(["/gpu:0", "/gpu:1"]),
            mirror.InvalidDeviceError,
            says(names="devices=['/gpu:0', '/gpu:1']", **NO_GPU),
        ),
        "['cuda:0']": (
            mirrored(["cuda:0"]),
            mirror.InvalidDeviceError,
            says(names="devices=['cuda:0']", **NO_GPU),
        ),
        "OneDeviceStrategy('/gpu:0')": (
            lambda: mirror.OneDeviceStrategy("/gpu:0"),
            mirror.InvalidDeviceError,
            NO_GPU,
        ),
        "OneDeviceStrategy()": (
            lambda: mirror.OneDeviceStrategy(),
            TypeError,
            says(names="OneDeviceStrategy(device", values="'device'", fix='"/cpu:'),
        ),
        "['/cpu:9']": (
            mirrored(["/cpu:9"]),
            mirror.InvalidDeviceError,
            says(
                names="devices=['/cpu:9']",
                values=["/device:CPU:9", "/device:CPU:0"],
                fix="mirror.config.set_num_cpu_devices(10)",
            ),
        ),
        "cross_device_ops='nccl'": (
            mirrored(cross_device_ops="nccl"),
            TypeError,
            says(names="cross_device_ops", values="'nccl'", fix="mirror.AllReduce()"),
        ),
        "cross_device_ops=AllReduce": (
            mirrored(cross_device_ops=mirror.AllReduce),
            TypeError,
            says(names="cross_device_ops", values="mirror.AllReduce", fix="mirror.AllReduce()"),
        ),
        "configuration after the start": (
            lambda: mirror.config.set_logical_device_configuration(
                mirror.config.list_physical_devices("CPU")[0],
                [mirror.config.LogicalDeviceConfiguration()] * 7,
            ),
            RuntimeError,
            says(names="mirror.config", fix="before"),
        ),
        "with strategy:": (
            lambda: strategy().__enter__(),
            TypeError,
            says(names="MirroredStrategy", fix="with strategy.scope():"),
        ),
    }
)


def test_gpu_names_do_not_lead_to_host_devices():
    with pytest.raises(mirror.InvalidDeviceError) as caught:
        mirror.MirroredStrategy(["/gpu:0"])
    assert "set_num_cpu_devices" not in str(caught.value)


def test_unknown_device_is_caught_as(subtests):
    """As a RuntimeError, like TensorFlow's, and as a ValueError, like every wrong argument."""
    for kind in [RuntimeError, ValueError]:
        with subtests.test(msg=kind), pytest.raises(kind):
            mirror.MirroredStrategy(["/cpu:99"])


# Data


def drawn(dataset):
    return list(strategy().distribute_dataset(dataset))


def epochs(dataset):
    distributed = strategy().distribute_dataset(dataset)
    return [list(distributed), list(distributed)]


def call_from_arrays(*args, **kwargs):
    return lambda: mirror.data.from_arrays(*args, **kwargs)


ONE_TREE = "from_arrays({"
mistakes(
    {
        "batch of 9 on 2": (
            lambda: drawn([{"x": np.ones((9, 3))}]),
            ValueError,
            says(names="batch['x']", values=[9, 2, 8, 10], fix="remainder='pad'"),
        ),
        "generator for 2 epochs": (
            lambda: epochs(np.ones((2, 2)) for _ in range(2)),
            ValueError,
            says(names="iterator", fix="DataLoader"),
        ),
        "distribute_dataset(array)": (
            lambda: strategy().distribute_dataset(np.ones((4, 2))),
            TypeError,
            says(values="float64[4,2]", fix="mirror.data.from_arrays(arrays, batch_size)"),
        ),
        "distribute_dataset(data, 8)": (
            lambda: strategy().distribute_dataset([np.ones((4, 2))], 8),
            TypeError,
            says(names="distribute_dataset(dataset, *", fix="strategy.distribute_dataset(["),
        ),
        "distribute_dataset(data, batch_size=8)": (
            lambda: strategy().distribute_dataset([np.ones((4, 2))], batch_size=8),
            TypeError,
            says(names="'batch_size'", fix="mirror.data.from_arrays(arrays, batch_size=8)"),
        ),
        "from_arrays(x, y, 32)": (
            lambda: mirror.data.from_arrays(np.ones((4, 2)), np.ones(4), 2),
            TypeError,
            says(names="from_arrays(arrays, batch_size", fix=[ONE_TREE, "batch_size=32"]),
        ),
        "from_arrays(x, y)": (
            lambda: mirror.data.from_arrays(np.ones((4, 2)), np.ones(4)),
            TypeError,
            says(names="batch_size", values="float64[4]", fix="from_arrays({'x': x, 'y': y}"),
        ),
        "from_arrays(x, y, batch_size=2)": (
            call_from_arrays(np.ones((4, 2)), np.ones(4), batch_size=2),
            TypeError,
            says(names="'batch_size'", fix=ONE_TREE),
        ),
        "from_arrays(x)": (
            lambda: mirror.data.from_arrays(np.ones((4, 2))),
            TypeError,
            says(names="'batch_size'", fix="batch_size=2"),
        ),
        "wrong number of values": (
            lambda: run(of_batch, mirror.PerReplica([1.0, 2.0, 3.0])),
            ValueError,
            says(names="x", values=[3, 2], fix="distribute_dataset"),
        ),
    }
)


# Names of other libraries

NAMES: dict[tuple[str, str], str | list[str]] = {
    ("mirror", "distribute"): "mirror.MirroredStrategy",
    ("mirror", "experimental"): "mirror.MirroredStrategy",
    ("mirror", "ReplicaMismatchError"): "mirror.VerifyError",
    ("mirror", "ParameterServerStrategy"): "mirror.ps.ParameterServerStrategy",
    ("mirror", "ClusterSpec"): "mirror.distributed.ClusterSpec",
    ("mirror", "GradientTape"): "nnx.value_and_grad",
    ("mirror", "function"): "strategy.run",
    ("mirror", "reduce_sum"): ["jax.numpy", 'strategy.reduce("sum", value)'],
    ("mirror", "NcclAllReduce"): "mirror.AllReduce(pack_bytes)",
    ("mirror", "DistributedDataParallel"): "mirror.MirroredStrategy",
    ("mirror", "init_process_group"): "one process drives all devices",
    ("mirror", "nn"): "flax.nnx",
    ("mirror", "keras"): "mirror.Trainer",
    ("mirror", "mirroredstrategy"): "mirror.MirroredStrategy",
    ("mirror", "list_physical_devices"): "mirror.config.list_physical_devices",
    ("mirror", "distribute_dataset"): "strategy.distribute_dataset",
    ("mirror", "nothing_like_it"): "help(mirror)",
    ("mirror", "replica_index"): "mirror.get_replica_context().replica_id_in_sync_group",
    ("mirror", "replica_id_in_sync_group"): "mirror.get_replica_context()",
    ("mirror", "fold_in"): "mirror.get_replica_context().fold_in",
    ("mirror", "world_size"): "num_replicas_in_sync",
    ("mirror", "psum"): ['mirror.all_reduce("sum", x)', "mirror.REPLICA_AXIS"],
    ("mirror", "ppermute"): "jax.lax.ppermute(x, mirror.REPLICA_AXIS",
    ("mirror", "barrier"): "mirror.distributed.barrier",
    ("mirror", "process_index"): "mirror.distributed.process_index",
    ("mirror", "local_rank"): "mirror.distributed.process_index",
    ("mirror", "is_main_process"): "mirror.distributed.is_chief",
    ("mirror", "assert_equals_one_device"): "mirror.testing.assert_equals_one_device",
    ("mirror", "broadcast_parameters"): "strategy.scope()",
    ("mirror", "DistributedOptimizer"): 'mirror.all_reduce("mean", grads)',
    ("mirror", "Accelerator"): "mirror.MirroredStrategy",
    ("mirror", "FSDPStrategy"): 'shard="model"',
    ("mirror", "seed_everything"): "nnx.Rngs",
    ("mirror", "unreplicate"): "jax.Array",
    ("mirror", "ModelCheckpoint"): "mirror.callbacks.Checkpoint",
    ("mirror", "experimental_distribute_dataset"): "strategy.distribute_dataset",
    ("mirror", "reduce_mean"): 'strategy.reduce("mean", value)',
    ("mirror", "compile"): "strategy.run compiles the step",
    ("mirror", "MirroredStategy"): "mirror.MirroredStrategy",
    ("mirror.config", "list_gpus"): 'mirror.config.list_physical_devices("GPU")',
    ("mirror.config", "experimental"): "the same names",
    ("mirror.config", "set_memory_grow"): "mirror.config.set_memory_growth",
    ("mirror.data", "Dataset"): "mirror.data.from_arrays",
    ("mirror.data", "DataLoader"): "mirror.data.from_arrays",
    ("mirror.data", "from_array"): "mirror.data.from_arrays",
    ("mirror.callbacks", "ModelCheckpoint"): "mirror.callbacks.Checkpoint",
    ("strategy", "experimental_distribute_dataset"): "strategy.distribute_dataset",
    ("strategy", "experimental_run_v2"): "strategy.run(fn, args, kwargs)",
    ("strategy", "experimental_local_results"): "strategy.local_results",
    ("strategy", "extended"): "methods of the strategy",
    ("strategy", "cluster_resolver"): "mirror.MultiWorkerMirroredStrategy",
    ("strategy", "num_replicas"): "strategy.num_replicas_in_sync",
    ("strategy", "all_reduce"): "mirror.all_reduce",
    ("strategy", "gathr"): "strategy.gather",
    ("strategy", "nothing_like_it"): "num_replicas_in_sync",
    ("replica_context", "merge_call"): "all_reduce",
    ("replica_context", "reduce"): "strategy.reduce(...)",
    ("replica_context", "rank"): "mirror.get_replica_context().replica_id_in_sync_group",
    ("replica_context", "pmean"): 'mirror.all_reduce("mean", x)',
    ("strategy", "rank"): "mirror.get_replica_context().replica_id_in_sync_group",
    ("strategy", "barrier"): "mirror.distributed.barrier",
    ("strategy", "size"): "num_replicas_in_sync",
    ("variable", "numpy"): "np.asarray(variable[...])",
    ("variable", "read_value"): "variable[...]",
}


def owner_of(name: str) -> Any:
    if name.startswith("mirror"):
        return mirror if name == "mirror" else getattr(mirror, name.removeprefix("mirror."))
    objects = {
        "strategy": strategy,
        "replica_context": mirror.get_replica_context,
        "variable": functools.partial(mirror.Variable, 1.0),
    }
    return objects[name]()


for (_owner, _name), _names_fix in NAMES.items():
    MISTAKES[f"{_owner}.{_name}"] = Mistake(
        functools.partial(lambda owner, name: getattr(owner_of(owner), name), _owner, _name),
        AttributeError,
        {"names": f"'{_name}'", "fix": _names_fix},
    )


@mistake(ImportError, names=["'GradientTape'", "'mirror'"], fix="nnx.value_and_grad")
def import_of_a_name_of_tensorflow():
    from mirror import GradientTape  # noqa: F401


def test_migration_pages_show_the_tables(subtests):
    for table in name_tables.TABLES:
        with subtests.test(msg=f"{table}"):
            written = name_tables.shown(table)
            assert written == table.text, "run python -m tests.support.name_tables --write"


def test_advice_is_about_names_that_do_not_exist_and_gives_names_that_do():
    _, advice = replacements()
    for (owner, name), text in advice.items():
        if owner.startswith("mirror") and not hasattr(owner_of(owner), name):
            assert len(text.split()) > 4, name
    assert advice["strategy", "experimental_run_v2"].endswith("strategy.run(fn, args, kwargs).")


def test_unknown_names_are_absent(subtests):
    """`hasattr`, `getattr` with a default, notebooks and Python itself find nothing."""
    for owner in ["mirror", "mirror.config", "strategy", "replica_context"]:
        for name in ["nothing_like_it", "_repr_png_", "__array__", "distribute"]:
            with subtests.test(msg=f"{owner}, {name}"):
                assert not hasattr(owner_of(owner), name)
                assert getattr(owner_of(owner), name, 3) == 3


def test_unknown_attributes_of_per_replica_are_absent(subtests):
    for name in ["shape", "mean", "_repr_png_", "__array_interface__", "aval"]:
        with subtests.test(msg=name):
            assert not hasattr(losses(), name)


def test_per_replica_is_copied(subtests):
    for copied in [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))]:
        with subtests.test(msg=f"{copied}"):
            np.testing.assert_array_equal(np.asarray(copied(losses())), [1.0, 2.0])
            np.testing.assert_array_equal(jax.tree.map(lambda x: x + 1, losses()), [2.0, 3.0])


def test_per_replica_is_converted_to_the_stacked_array(subtests):
    for convert in [np.asarray, np.array, jnp.asarray, jnp.array]:
        with subtests.test(msg=f"{convert}"):
            np.testing.assert_array_equal(
                convert(mirror.PerReplica([[1.0], [2.0]])), [[1.0], [2.0]]
            )


# Notes, and mistakes that work


def test_error_of_a_step_lists_its_arguments():
    """A batch that is a tuple, not a dict: Python's error does not say what the step received."""

    def step(model, batch):
        return model(batch["x"])

    with pytest.raises(TypeError, match="tuple indices") as caught:
        run(step, linear(), (batch(), losses()))
    note = caught.value.__notes__[-1]
    assert_message(note, names=["step", "model = Linear", "batch = (float32[2,3], float32[])"])


def test_error_of_a_step_shows_its_line():
    def step(x):
        return float(x.mean())

    with pytest.raises(jax.errors.ConcretizationTypeError) as caught:
        run(step, batch())
    names = [entry.name for entry in caught.traceback]
    assert names[-1] == "step"
    assert "flat" not in names


def test_unknown_name_in_a_step_shows_the_line_of_the_user_only():
    def step(x):
        return strategy().reduce_mean(x)

    with pytest.raises(AttributeError) as caught:
        run(step, batch())
    frames = [entry for entry in caught.traceback if "mirror/_src" in str(entry.path)]
    assert not frames, frames
    assert_message(caught, names="'reduce_mean'", fix="strategy.reduce")


def test_step_may_be_jitted():
    assert float(run(nnx.jit(lambda x: all_reduce("mean", x.mean())), batch())) == 1.5


def doubled_mean(x):
    return 2 * all_reduce("mean", x)


def test_fakes_of_chex_do_not_change_results(subtests):
    """A mirrored result has no replica axis, as without the fake."""
    for fake in [chex.fake_pmap, chex.fake_pmap_and_jit, chex.fake_jit]:
        with subtests.test(msg=f"{fake}"):
            with fake():
                result = run(doubled_mean, losses())
            assert result.shape == ()
            assert float(result) == 3.0


@chex.dataclass
class Examples:
    x: Any
    y: Any


def test_assertions_and_dataclasses_of_chex_work_in_a_step():
    """An assertion runs while the step is traced; its error shows only lines of this file."""

    def step(examples, width):
        chex.assert_shape(examples.x, (None, int(width)))
        chex.assert_equal_shape_prefix([examples.x, examples.y], 1)
        return all_reduce("mean", (examples.x.sum(1) * examples.y).mean())

    made = Examples(x=np.ones((4, 3), "f4"), y=np.arange(4, dtype="f4"))
    (examples,) = strategy().distribute_dataset([made])
    assert isinstance(examples.x, mirror.PerReplica)
    assert float(strategy().run(step, (examples, "3"))) == 4.5
    with pytest.raises(AssertionError) as caught:
        strategy().run(step, (examples, "4"))
    assert_message(caught, names="assert_shape", values=["(2, 3)", "(None, 4)"])
    assert {frame.path for frame in caught.traceback} == {Path(__file__)}


# Habits of other libraries


class Tiny(nnx.Module):
    """A model that a Lightning user passes to the strategy."""

    def __call__(self, x):
        return x


def dataset():
    return strategy().distribute_dataset([np.ones((4, 3), "f4")])


SINGLE = [(np.ones(3, "f4"), np.int64(1))]
mistakes(
    {
        "next_of_dataset": (lambda: next(dataset()), TypeError, says(fix="next(iter(dataset))")),
        "index_of_dataset": (lambda: dataset()[0], TypeError, says(fix="next(iter(dataset))")),
        "verify_without_tuple": (
            lambda: strategy().verify(run, 1, 2, 3),
            TypeError,
            says(fix="strategy.verify(step, (model, batch))"),
        ),
        "distribute_arrays": (
            lambda: strategy().distribute_dataset(np.ones(3), np.ones(3), 32),
            TypeError,
            says(fix="mirror.data.from_arrays((x, y), batch_size=32)"),
        ),
        "single_examples": (
            lambda: next(iter(strategy().distribute_dataset(SINGLE))),
            ValueError,
            says(values="1", fix=["DataLoader(dataset, batch_size=32)", "from_arrays"]),
        ),
        "no_gpu_listed": (
            lambda: mirror.MirroredStrategy([]),
            ValueError,
            says(names="devices", fix="mirror.MirroredStrategy()"),
        ),
        "model_as_devices": (
            lambda: mirror.MirroredStrategy(Tiny()),
            TypeError,
            says(names="devices", fix="run(step, (model, batch))"),
        ),
        "gpu_that_does_not_exist": (
            lambda: mirror.device("/gpu:2"),
            mirror.InvalidDeviceError,
            says(fix="mirror.config.set_soft_device_placement(True)"),
        ),
        "device_of_a_server": (
            lambda: mirror.device("/job:ps/task:0"),
            ValueError,
            says(
                values="'/job:ps/task:0'", fix="mirror.ps.ParameterServerStrategy().Variable(3.0)"
            ),
        ),
        "strategy_to": (
            lambda: strategy().to("gpu"),
            AttributeError,
            says(fix="strategy.run(step"),
        ),
        "names_of_torch": (
            lambda: run(lambda x: x.mean().backward(), np.ones(3, "f4")),
            AttributeError,
            says(names="backward", values="float32[]", fix="nnx.value_and_grad(loss_fn)"),
        ),
        "optimizer_of_torch": (
            lambda: strategy().run(
                lambda o: o.zero_grad(),
                (nnx.Optimizer(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), optax.sgd(0.1), wrt=nnx.Param),),
            ),
            AttributeError,
            says(names="zero_grad", values="Optimizer", fix="optimizer.update(model, grads)"),
        ),
        "arrays_in_a_list": (
            lambda: strategy().run([np.ones((2, 3), "f4")], ()),
            TypeError,
            says(names="fn", values="[float32[2,3]] (list)"),
        ),
        "zero_grad": (
            lambda: strategy().zero_grad(),
            AttributeError,
            says(fix="nnx.value_and_grad(loss_fn)(model, batch)"),
        ),
    }
)


@mistake(ValueError, names=["step"], fix="Remove @jax.pmap")
def pmap_left_with_uneven_rows():
    def step(x):
        return x.sum()

    run(jax.pmap(step, axis_name="batch"), mirror.PerReplica([np.ones((5, 3), "f4")] * 2))


@mistake(
    TypeError,
    names="args",
    values="{'x': PerReplica(2 x float32[9,9]), ... (dict)",
    fix="strategy.run(<lambda>, (data,))",
)
def parentheses_that_are_not_a_tuple():
    x = mirror.PerReplica([np.ones((9, 9), "f4")] * 2)
    data = {"x": x, "weights": mirror.PerReplica([0.123456789, 1.123456789])}
    strategy().run(lambda data: data["x"].mean(), (data))


@mistake(TypeError, names="options", values="Namespace(lr=0.1)", fix="vars(options)")
def options_of_argparse():
    run(lambda x, options: x * options.lr, batch(), argparse.Namespace(lr=0.1))


@mistake(ValueError, names="wrt", values="['Param']", fix=["LoRAParam", "wrt=nnx.Param"])
def a_selection_of_nothing():
    mirror.Trainer(linear(), optax.sgd(0.1), "mse", wrt=nnx.LoRAParam, strategy=strategy())


@mistake(ValueError, names="wrt", values="['Param']", fix=["LoRAParam", "wrt=nnx.Param"])
def an_optimizer_that_selects_nothing():
    model = linear()
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.LoRAParam)
    mirror.Trainer(model, optimizer, "mse", strategy=strategy())


def replaced(
    change: Callable[[mirror.Trainer[Any]], Any], width: int = 1, **options: Any
) -> Callable[[], Any]:
    """Returns a program that trains a model, changes the trainer and trains it further."""

    def program() -> None:
        options.setdefault("strategy", strategy())
        trainer = mirror.Trainer(of_width(width), optax.adam(0.1), squares, **options)
        for _ in range(2):
            trainer.fit([np.ones((4, 3), "f4")], progress=False)
            change(trainer)

    return program


def squares(model, x):
    return (model(x) ** 2).sum(-1)


def set_to(name: str, value: Any) -> Callable[[mirror.Trainer[Any]], None]:
    return lambda trainer: setattr(trainer, name, value)


def of_width(width: int) -> nnx.Linear:
    return nnx.Linear(3, width, rngs=nnx.Rngs(0))


KERNEL = nnx.PathContains("kernel")
STATE = "optimizer.opt_state[0].mu['kernel']"
NEW_OPTIMIZER = "trainer.optimizer = nnx.Optimizer(trainer.model, tx, wrt=nnx.Param)"
mistakes(
    {
        "a wider model": (
            replaced(set_to("model", of_width(2))),
            ValueError,
            says(names=STATE, values=["(3, 1)", "(3, 2)"], fix=NEW_OPTIMIZER),
        ),
        "a wider model, whose state cannot be broadcast": (
            replaced(set_to("model", of_width(3)), 2),
            ValueError,
            says(names=STATE, values=["(3, 2)", "(3, 3)"], fix=NEW_OPTIMIZER),
        ),
        "a model without what wrt selects": (
            replaced(set_to("model", nnx.LayerNorm(3, rngs=nnx.Rngs(0))), wrt=KERNEL),
            ValueError,
            says(names="wrt", values="['Param']", fix="wrt=nnx.Param"),
        ),
        "a number as a model": (
            replaced(set_to("model", 3)),
            TypeError,
            says(names="model", values=3, fix="nnx.bridge.ToNNX"),
        ),
        "a transformation as an optimizer": (
            replaced(set_to("optimizer", optax.sgd(0.1))),
            TypeError,
            says(names="optimizer", fix="nnx.Optimizer(trainer.model, tx, wrt=nnx.Param)"),
        ),
    }
)


@mistake(TypeError, names="buffer", values="memory", fix="vars(options)")
def a_writable_buffer():
    run(lambda x, buffer: x, batch(), memoryview(bytearray(3)))


def test_options_are_passed_as_the_message_says():
    options = argparse.Namespace(lr=0.5)
    result = run(lambda x, options: x * options["lr"], batch(), vars(options))
    np.testing.assert_array_equal(result.stacked, 0.5 * batch().stacked)


def test_traced_values_have_the_names_of_the_proof():
    def step(model, data):
        return float(model(data["x"]).mean())

    with raises(TypeError, names=["step", "model.bias", "data['x']"]) as caught:
        run(step, linear(), {"x": batch()})
    assert "args[" not in str(caught.value)


# Updates that are computed and thrown away


def mutated_dict(params, x):
    loss, grads = jax.value_and_grad(lambda p: (x @ p["w"]).mean())(params)
    grads, loss = all_reduce("mean", (grads, loss))
    params["w"] = params["w"] - 0.1 * grads["w"]
    return loss


def new_local(params, x):
    loss, grads = jax.value_and_grad(lambda p: (x @ p["w"]).mean())(params)
    grads, loss = all_reduce("mean", (grads, loss))
    params = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
    return loss


def forgotten_optax(params, opt_state, x):
    grads = all_reduce("mean", jax.grad(lambda p: (x @ p["w"]).mean())(params))
    updates, opt_state = optax.adam(0.1).update(grads, opt_state)
    optax.apply_updates(params, updates)
    return opt_state


@jax.jit
def jitted_update(params, grads):
    return jax.tree.map(lambda p, g: p + -0.1 * g, params, grads)


def forgotten_jit(params, x):
    grads = all_reduce("sum", jax.grad(lambda p: (x @ p["w"]).mean())(params))
    jitted_update(params, grads)
    return x.mean()


def returned(params, x):
    grads = all_reduce("mean", jax.grad(lambda p: (x @ p["w"]).mean())(params))
    params["w"] = params["w"] - 0.1 * grads["w"]
    return params


def only_loss(params, x):
    _, loss = all_reduce("mean", (params["w"] * x.mean(), (x @ params["w"]).mean()))
    return loss


def scaled_batch(batch):
    batch["x"] = batch["x"] - all_reduce("mean", batch["x"].mean(0))
    return all_reduce("mean", (batch["x"] ** 2).mean())


def frozen(params, x):
    grads = all_reduce("mean", jax.grad(lambda p: (x @ p["w"] + p["b"]).mean())(params))
    return {"w": params["w"] - 0.1 * grads["w"], "b": params["b"]}


LOST = (mutated_dict, new_local, forgotten_optax, forgotten_jit)
KEPT = (returned, only_loss, scaled_batch, frozen)


def lost_arguments(step):
    params = {"w": np.ones(3, "f4")} | ({"b": np.float32(0)} if step is frozen else {})
    if step is scaled_batch:
        return ({"x": batch()},)
    if step is forgotten_optax:
        return params, optax.adam(0.1).init(params), batch()
    return params, batch()


def test_update_that_reaches_no_result_is_one_warning(subtests):
    for step in LOST:
        with subtests.test(msg=step.__name__):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                run(step, *lost_arguments(step))
                run(step, *lost_arguments(step))
            (text,) = [str(each.message) for each in caught]
            assert_message(
                text,
                names=[step.__name__, "params['w']"],
                values=[f"{all_reduce.__code__.co_firstlineno + 1} in all_reduce"],
                fix=f"strategy.run({step.__name__}, (params, batch))",
            )
            assert ("in place" in text) == (step is mutated_dict)
    for step in KEPT:
        with subtests.test(msg=step.__name__):
            run(step, *lost_arguments(step))


class Tagged(nnx.Param):
    """Selected by another optimizer."""


def optimizer_step(model, optimizer, x, *others):
    wrt = nnx.DiffState(0, optimizer.wrt)
    loss, grads = nnx.value_and_grad(lambda m: (m(x) ** 2).mean(), argnums=wrt)(model)
    optimizer.update(model, all_reduce("mean", grads))
    return all_reduce("mean", loss)


def evaluation(model, optimizer, x):
    return all_reduce("mean", (model(x) ** 2).mean()) * optimizer.opt_state[0].count[...]


def split_step(optimizer, graphdef, state, metrics, x):
    model = nnx.merge(graphdef, state)
    loss = optimizer_step(model, optimizer, x)
    metrics.update(values=loss)
    return nnx.to_pure_dict(nnx.state(model))


def test_optimizer_that_selects_nothing_is_one_warning(subtests):
    model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
    tagged, both = (nnx.Linear(3, 1, rngs=nnx.Rngs(0)) for _ in range(2))
    tagged.kernel, both.kernel = (Tagged(each.kernel[...]) for each in (tagged, both))
    of = lambda model, wrt: nnx.Optimizer(model, optax.adam(0.1), wrt=wrt)  # noqa: E731
    rows = {
        "other type": (optimizer_step, (model, of(model, Tagged), batch()), True),
        "path": (optimizer_step, (model, of(model, nnx.PathContains("out")), batch()), True),
        "type": (optimizer_step, (tagged, of(tagged, Tagged), batch()), False),
        "part": (optimizer_step, (both, of(both, nnx.PathContains("bias")), batch()), False),
        "not updated": (evaluation, (model, of(model, Tagged), batch()), False),
        "of a split model": (
            split_step,
            (of(tagged, Tagged), *nnx.split(tagged), nnx.metrics.Average(), batch()),
            False,
        ),
    }
    for name, (step, arguments, is_idle) in rows.items():
        with subtests.test(msg=name), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            two = mirror.MirroredStrategy(["/cpu:0", "/cpu:1"])
            two.run(step, arguments)
            two.run(step, arguments)
            assert len(caught) == is_idle, list(map(str, caught))
            for each in caught:
                names = [step.__name__, "`wrt`"]
                assert_message(str(each.message), names=names, values="['Param']", fix="nnx.Param")


def private(key, x):
    return all_reduce("mean", -0.1 * (x.sum(0) + jax.random.normal(key, (3,))) / 4)


def private_loop(key, x):
    noisy = x.sum(0)
    for each in jax.random.split(key, 2):
        noisy = noisy - 0.5 * jax.random.normal(each, (3,))
    return all_reduce("sum", noisy)


def augmented(key, x):
    return all_reduce("mean", ((x + jax.random.normal(key, x.shape)) ** 2).mean())


def heavy_tailed(key, x):  # by a tangent
    return all_reduce("mean", ((x + jax.random.cauchy(key, x.shape)) ** 2).mean())


def dropped(key, x):
    return all_reduce("sum", jnp.where(jax.random.bernoulli(key, 0.5, x.shape), x, 0).sum())


def noisy_and_returned(key, x):
    noisy = x + jax.random.normal(key, x.shape)
    return all_reduce("sum", noisy.sum()), noisy


def test_noise_is_advised_by_its_use(subtests):
    for step in (private, private_loop, augmented, heavy_tailed, dropped, noisy_and_returned):
        with subtests.test(msg=step.__name__):
            with pytest.warns(UserWarning, match="random numbers") as caught:
                run(step, jax.random.key(0), batch())
            (text,) = [str(each.message) for each in caught]
            is_summed = step in (private, private_loop)
            line = f"{step.__code__.co_firstlineno + (3 if step is private_loop else 1)} in"
            fix = 'after mirror.all_reduce("sum"' if is_summed else "fold_in(key)"
            assert_message(text, names=step.__name__, values=line, fix=fix)
            assert ("fold_in" in text) != is_summed


def mixed(key, x):
    share = jax.random.uniform(key)
    return all_reduce("mean", ((share * x + (1 - share) * x**2) ** 2).mean())


def stochastic_depth(key, x):
    return all_reduce("mean", jnp.where(jax.random.bernoulli(key), jnp.tanh(x), x).mean())


def cut(key, x):
    return all_reduce("mean", (x * jax.random.bernoulli(key, 0.5, (3,))).mean())


def dropped_rows(key, x):
    return all_reduce("mean", (x * jax.random.bernoulli(key, 0.5, (len(x), 1))).mean())


def test_random_numbers_that_all_rows_share_are_not_advised(subtests):
    """One device has the same; numbers per row repeat on each replica."""
    for step in (mixed, stochastic_depth, cut):
        with subtests.test(msg=step.__name__):
            run(step, jax.random.key(0), batch())
    with pytest.warns(UserWarning, match="random numbers"):
        run(dropped_rows, jax.random.key(0), batch())
