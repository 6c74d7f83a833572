"""Keras' dtype policies under a scope: the numbers of Keras alone, and skipped steps."""

import contextlib
import itertools
import warnings
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest

import mirror
from tests.support.keras_models import (
    MARKS,
    assert_close,
    compiled,
    digits,
    functional,
    keras,
    sequential,
)
from tests.support.messages import assert_message, raises
from tests.support.strategies import cpu_strategy
from tests.support.tables import mostly_nightly, mostly_slow

pytestmark = MARKS

# The rounding error of the dtype that a policy computes in.
ERROR = {"mixed_bfloat16": 2.0**-8, "mixed_float16": 2.0**-11, "float32": 2.0**-24}
HALF = {"mixed_bfloat16": "bfloat16", "mixed_float16": "float16"}
MIXED = list(HALF)


@contextlib.contextmanager
def default_policy(name: str) -> Iterator[None]:
    """Sets Keras' policy for new layers."""
    keras.config.set_dtype_policy(name)
    try:
        yield
    finally:
        keras.config.set_dtype_policy("float32")


def by_layer(policy):
    """A model whose dense layers have a policy of their own, and a loss scale if it needs one."""
    inputs = keras.Input((8, 8, 1))
    x = keras.layers.Flatten()(inputs)
    x = keras.layers.Dense(64, activation="relu", dtype=policy)(x)
    return keras.Model(inputs, keras.layers.Dense(10, dtype=policy)(x))


MODELS = {
    "global": lambda policy: functional(),
    "by layer": by_layer,
    "normalized": lambda policy: sequential(),
}


def optimizer(scales):
    sgd = keras.optimizers.SGD(0.05, momentum=0.9)
    return keras.optimizers.LossScaleOptimizer(sgd) if scales else sgd


def new_model(kind, policy):
    """Returns a model of this policy, compiled; Adam would amplify the errors of tiny gradients."""
    by = kind == "by layer"
    scales = by and policy == "mixed_float16"
    with default_policy("float32" if by else policy):
        return compiled(lambda: MODELS[kind](policy), optimizer=optimizer(scales))


def fit(model, **options):
    x, y = digits()
    return model.fit(
        x, y, **{"batch_size": 64, "epochs": 2, "verbose": 0, "shuffle": False, **options}
    )


def alone(kind, policy):
    """Returns the weights and losses after training by Keras alone, and the initial weights."""
    model = new_model(kind, policy)
    before = model.get_weights()
    losses = fit(model).history["loss"]
    return before, model.get_weights(), losses


def norm(arrays):
    return np.sqrt(sum(float(np.sum(np.square(a, dtype="float64"))) for a in arrays))


def distance(some, others):
    return norm([a.astype("float64") - b for a, b in zip(some, others, strict=True)])


TRAINED = list(itertools.product(MODELS, MIXED))


@pytest.mark.parametrize("rows", mostly_nightly(TRAINED, ("by layer", "mixed_float16")))
def test_trains_like_keras_alone(rows, subtests):
    """Up to the rounding of the policy.

    Each device rounds its sums to the half type, and so does their sum: one rounding error of each
    update per step. Momentum 0.9 adds up to ten of them, and batch normalization divides by
    rounded statistics, which doubles it. Training in float32 differs by more in `mixed_bfloat16`.
    """
    for kind, policy in rows:
        with subtests.test(policy=policy):
            before, wanted, losses = alone(kind, policy)
            with cpu_strategy(4).scope():
                model = new_model(kind, policy)
            history = fit(model)
            cpu_strategy(4).check_mirrored(model)
            is_scaled = isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
            assert is_scaled == (policy == "mixed_float16")
            assert {v.dtype for v in model.trainable_variables} == {"float32"}
            assert model.layers[-1].compute_dtype == HALF[policy]
            assert distance(model.get_weights(), wanted) < 10 * ERROR[policy] * distance(
                wanted, before
            )
            np.testing.assert_allclose(history.history["loss"], losses, rtol=10 * ERROR[policy])


@pytest.mark.parametrize("policies", mostly_slow(MIXED, "mixed_bfloat16"))
def test_the_step_computes_in_the_half_type(policies, subtests):
    """The matrix products of the compiled step, and none in float32."""
    for policy in policies:
        with subtests.test(policy=policy):
            with cpu_strategy(2).scope():
                model = new_model("global", policy)
            x, y = digits()
            model.train_on_batch(x[:8], y[:8])
            state = [
                [v.value for v in group]
                for group in (
                    model.trainable_variables,
                    model.non_trainable_variables,
                    model.optimizer.variables,
                    model.metrics_variables,
                )
            ]
            jaxpr = jax.make_jaxpr(model.train_step)(tuple(state), (x[:8], y[:8], None)).jaxpr
            products = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "dot_general"]
            assert products
            assert {str(v.aval.dtype) for eqn in products for v in eqn.outvars} == {HALF[policy]}


@pytest.mark.parametrize("policies", mostly_slow([*MIXED, "float32"], "mixed_bfloat16"))
def test_verify_allows_the_rounding_of_the_layers(policies, subtests):
    for policy in policies:
        with subtests.test(policy=policy):
            strategy = cpu_strategy(4)
            with strategy.scope():
                model = new_model("by layer", policy)
            x, y = digits()
            report = strategy.verify(model, (x[:64], y[:64]))
            assert report.rtol == (1e-5 if policy == "float32" else 8 * ERROR[policy])
            assert (report.largest > 1e-5) == (policy != "float32")
            assert strategy.verify(model, (x[:64], y[:64]), rtol=0.1).rtol == 0.1


def test_overflow_in_one_replica_skips_the_step_of_all(subtests):
    for replica in ["first", "last"]:
        with subtests.test(replica=replica):
            strategy = cpu_strategy(4)
            with strategy.scope():
                model = new_model("global", "mixed_float16")
            x, y = digits()
            model.train_on_batch(x[:64], y[:64])
            weights = [np.array(v.value) for v in model.trainable_variables]
            inner = [np.array(v.value) for v in model.optimizer.inner_optimizer.variables]
            scale = float(model.optimizer.dynamic_scale.value)
            bad = x[:64].copy()
            bad[0 if replica == "first" else -1] = (
                6e4  # float32; the sums of a layer overflow float16
            )
            model.train_on_batch(bad, y[:64])
            for v, old in zip(model.trainable_variables, weights, strict=True):
                np.testing.assert_array_equal(np.asarray(v.value), old)
            for v, old in zip(model.optimizer.inner_optimizer.variables, inner, strict=True):
                np.testing.assert_array_equal(np.asarray(v.value), old)
            assert float(model.optimizer.dynamic_scale.value) == scale / 2
            strategy.check_mirrored(model)
            model.train_on_batch(x[:64], y[:64])
            after = [np.asarray(v.value) for v in model.trainable_variables]
            assert all(np.isfinite(w).all() for w in after)
            assert distance(after, weights) > 0


@pytest.mark.slow
def test_the_scale_grows_like_in_keras_alone():
    def run():
        scaled = keras.optimizers.LossScaleOptimizer(
            keras.optimizers.SGD(0.05), initial_scale=2.0**8, dynamic_growth_steps=3
        )
        with default_policy("mixed_float16"):
            model = compiled(functional, optimizer=scaled)
        fit(model)  # eight steps
        return [float(scaled.step_counter.value), float(scaled.dynamic_scale.value)]

    wanted = run()
    with cpu_strategy(4).scope():
        assert run() == wanted == [2, 2.0**10]


@pytest.mark.parametrize("policies", mostly_slow(MIXED, "mixed_float16"))
def test_saved_and_loaded_models_continue(policies, tmp_path, subtests):
    """On another number of devices, with the policy, the scale and the optimizer's state.

    Keras adds the loss scale only if the policy is set when it loads the model.
    """
    for policy in policies:
        with subtests.test(policy=policy):
            with cpu_strategy(4).scope():
                model = new_model("global", policy)
            fit(model, epochs=1)
            model.save(tmp_path / "model.keras")
            with cpu_strategy(2).scope(), default_policy(policy):
                loaded = keras.models.load_model(tmp_path / "model.keras")
            assert loaded.layers[-1].dtype_policy.name == policy
            assert_close(loaded.get_weights(), model.get_weights(), atol=0)
            states = [[np.array(v.value) for v in m.optimizer.variables] for m in (loaded, model)]
            assert_close(states[0], states[1], atol=0)
            fit(model, epochs=1)
            fit(loaded, epochs=1)
            before, wanted, _ = alone("global", policy)
            for each in (model, loaded):
                change = distance(wanted, before)
                assert distance(each.get_weights(), wanted) < 10 * ERROR[policy] * change
            assert len(loaded.layers[-1].kernel.value.devices()) == 2


@pytest.mark.nightly
def test_accuracy_is_within_half_a_point_of_float32(subtests):
    for policy in MIXED:
        with subtests.test(policy=policy):
            from sklearn.datasets import load_digits

            data = load_digits()
            x, y = (data.images[..., None] / 16).astype("float32"), data.target.astype("int32")
            accuracies = {}
            for name in (policy, "float32"):
                with cpu_strategy(4).scope(), default_policy(name):
                    model = compiled(functional, optimizer=keras.optimizers.Adam(3e-3))
                model.fit(x[:1000], y[:1000], batch_size=64, epochs=8, verbose=0)
                accuracies[name] = model.evaluate(x[1000:], y[1000:], batch_size=200, verbose=0)[1]
            assert accuracies["float32"] > 0.9
            assert abs(accuracies[policy] - accuracies["float32"]) <= 0.005, accuracies


def test_loading_without_the_policy_warns_that_the_loss_is_not_scaled(tmp_path):
    """The layers keep their policies, but Keras forgets the model's."""
    with cpu_strategy(2).scope():
        model = new_model("global", "mixed_float16")
    train_once(model)
    model.save(tmp_path / "model.keras")
    with cpu_strategy(2).scope(), pytest.warns(UserWarning, match="variables whereas"):
        loaded = keras.models.load_model(tmp_path / "model.keras")
    with pytest.warns(UserWarning, match="the loss is not scaled"):
        train_once(loaded)


def train_once(model):
    """A second call would warn again if it were not once per model."""
    x, y = digits()
    return [model.train_on_batch(x[:64], y[:64]) for _ in range(2)]


# Policies of the layers that train, and the error of another policy's numbers.
QUANTIZED = {
    "int8_from_float32": 1e-6,
    "int4_from_float32": 1e-6,
    "float8_from_float32": 1e-6,
    "float8_from_mixed_bfloat16": 2.0**-7,
}


@pytest.mark.nightly
def test_quantized_policies_train_like_keras_alone(subtests):
    """With `int8`, Keras trains the biases alone; with `float8`, histories of the scales too."""
    for policy in QUANTIZED:
        with subtests.test(policy=policy):
            before, wanted, losses = alone_quantized(policy)
            with cpu_strategy(4).scope():
                model = compiled(lambda: by_layer(policy), optimizer=optimizer(scales=False))
            history = fit(model)
            cpu_strategy(4).check_mirrored(model)
            names = {v.name for v in model.trainable_variables}
            assert ("kernel" in names) == policy.startswith("float8")
            assert distance(model.get_weights(), wanted) <= QUANTIZED[policy] * distance(
                wanted, before
            )
            np.testing.assert_allclose(history.history["loss"], losses, rtol=QUANTIZED[policy])


def alone_quantized(policy):
    model = compiled(lambda: by_layer(policy), optimizer=optimizer(scales=False))
    before = model.get_weights()
    losses = fit(model).history["loss"]
    return before, model.get_weights(), losses


def test_policies_that_are_not_of_floats_are_rejected(subtests):
    for policy in ["int32", "bool", "complex64"]:
        with subtests.test(policy=policy):
            fix = "keras.config.set_dtype_policy('float32')"
            with (
                raises(ValueError, values=repr(policy), fix=fix),
                cpu_strategy(2).scope(),
                default_policy(policy),
            ):
                keras.Sequential([keras.layers.Dense(2)])


def test_unknown_policies_are_rejected_by_keras(subtests):
    for policy in ["nonsense", "int8", "mixed_int8", "int8_from_mixed_float16"]:
        name = policy.partition("_")[0]
        with (
            subtests.test(policy=policy),
            cpu_strategy(2).scope(),
            pytest.raises(ValueError, match=name),
        ):
            keras.layers.Dense(2, dtype=policy)


FLOAT16: dict[str, Any] = {
    "by layer": "mixed_float16",
    "stored": "float16",
    "float8": "float8_from_mixed_float16",
}


@pytest.mark.filterwarnings("ignore:.*are stored in float16")
@pytest.mark.parametrize("policies", mostly_nightly(FLOAT16.values(), "mixed_float16"))
def test_float16_without_a_loss_scale_warns(policies, subtests):
    """Keras scales the loss only by the policy of the model; `float8` computes NaN without it."""
    for policy in policies:
        with subtests.test(policy=policy):
            with cpu_strategy(2).scope():
                model = compiled(lambda: by_layer(policy), optimizer=optimizer(scales=False))
                scaled = compiled(lambda: by_layer(policy), optimizer=optimizer(scales=True))
            with pytest.warns(UserWarning, match="the loss is not scaled") as caught:
                train_once(model)
            (warning,) = [each for each in caught if "not scaled" in str(each.message)]
            assert_message(str(warning.message), names=repr(model.name), fix="LossScaleOptimizer(")
            assert warning.filename == __file__
            logs = train_once(scaled)
            if policy != "float16":  # its variables overflow in any case
                assert np.isfinite(logs).all()


def test_layers_inside_of_others_count(subtests):
    """`model.layers` has the wrapper alone, which computes in float32."""
    for policy in ["mixed_float16", "mixed_bfloat16"]:
        with subtests.test(policy=policy):
            strategy = cpu_strategy(2)
            with strategy.scope():
                dense = keras.layers.Dense(2, dtype=policy)
                model = keras.Sequential([keras.Input((4, 3)), keras.layers.TimeDistributed(dense)])
                model.compile("sgd", "mse")
            x, y = np.ones((4, 4, 3), "float32"), np.ones((4, 4, 2), "float32")
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                model.train_on_batch(x, y)
            texts = [str(each.message) for each in caught]
            assert any("the loss is not scaled" in text for text in texts) == (
                policy == "mixed_float16"
            )
            assert strategy.verify(model, (x, y)).rtol == 8 * ERROR[policy]


def test_declined_loss_scale_does_not_warn():
    with cpu_strategy(2).scope(), default_policy("mixed_float16"):
        model = compiled(functional, optimizer=optimizer(scales=False), auto_scale_loss=False)
        fixed = compiled(functional, optimizer=keras.optimizers.SGD(0.1, loss_scale_factor=8.0))
    for each in (model, fixed):
        train_once(each)


@pytest.mark.slow
def test_variables_of_half_precision_warn():
    """Adam's decay 0.999 is 1 in bfloat16, so that it does not change the weights."""
    with cpu_strategy(2).scope(), default_policy("bfloat16"):
        model = compiled(functional)
    before = model.get_weights()
    with pytest.warns(UserWarning, match="stored in bfloat16") as caught:
        train_once(model)
    assert len(caught) == 1
    fix = "keras.config.set_dtype_policy('mixed_bfloat16')"
    assert_message(str(caught[0].message), names=model.layers[2].kernel.path, fix=fix)
    for old, new in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(old, new)


def test_verify_names_gradients_that_overflow_on_one_device():
    """Each half of the batch has gradients too large for float16; their sum is zero."""
    strategy = cpu_strategy(2)
    with strategy.scope(), default_policy("mixed_float16"):
        constants = [keras.initializers.Constant(value) for value in (1, 1 / 32)]
        layers = [
            keras.layers.Dense(n, kernel_initializer=c)
            for n, c in zip((8, 1), constants, strict=True)
        ]
        model = keras.Sequential([keras.Input((4,)), *layers])
        model.compile(keras.optimizers.SGD(0.1), "mse")
    x, y = np.ones((16, 4), "float32"), np.repeat([[2.5], [-0.5]], 8, axis=0).astype("float32")
    scale = "loss_scale_optimizer/dynamic_scale"
    with raises(mirror.VerifyError, names=scale, values="float16 overflow"):
        strategy.verify(model, (x, y))
