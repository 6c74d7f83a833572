"""`Trainer(precision=)`: layers compute in half precision; parameters and sums stay float32."""

import dataclasses
import os
import types
import warnings
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

import mirror
from tests.support.messages import raises
from tests.support.strategies import EXECUTORS, cpu_strategy
from tests.support.tables import mostly_nightly, mostly_slow
from tests.support.training import fit

RNG = np.random.RandomState(0)
X = RNG.randn(30, 4).astype(np.float32)
DATA = {"x": X, "y": np.argmax(X[:, :3], 1)}
TABLES = [DATA, {name: rows[:6] for name, rows in DATA.items()}]  # the last batch is smaller


class Net(nnx.Module):
    def __init__(self, dtype=None):
        rngs = nnx.Rngs(0)
        self.first = nnx.Linear(4, 8, rngs=rngs)
        self.batch_norm = nnx.BatchNorm(8, rngs=rngs)
        self.norm = nnx.LayerNorm(8, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.out = nnx.Linear(8, 3, dtype=dtype, rngs=rngs)

    def __call__(self, x):
        return self.out(self.dropout(self.norm(self.batch_norm(self.first(x)))))


class Setup(linen.Module):
    def setup(self):
        self.layers = [linen.Dense(8), linen.Dense(8)]

    def __call__(self, x):
        for layer in self.layers:
            x = self.twice(layer, x)
        return x

    def twice(self, layer, x):
        return layer(layer(x))


class LinenNet(linen.Module):
    dtype_of_last: type | None = None

    @linen.compact
    def __call__(self, x):
        x = linen.relu(Setup()(linen.Dense(8)(x)))
        return linen.Dense(3, dtype=self.dtype_of_last)(linen.BatchNorm(True)(x))


class ManyLayers(linen.Module):
    """Layers from `setup`, from a compact method, passed in, shared, and inside transformations."""

    inner: linen.Module

    @linen.compact
    def __call__(self, x):
        first = linen.Dense(8)
        x = first(linen.Dense(8)(x))
        x = self.inner(Setup()(first(x)))
        x = x + linen.MultiHeadDotProductAttention(2)(x[:, None])[:, 0]
        x = linen.remat(linen.Dense)(8)(linen.WeightNorm(linen.Dense(8))(linen.LayerNorm()(x)))
        x = linen.RNN(linen.LSTMCell(8))(linen.RNN(linen.SimpleCell(8))(x[:, None]))[:, 0]
        table = linen.Embed(8, 8)
        x = table.attend(x) + table(jnp.zeros(len(x), int))
        return linen.vmap(
            linen.Dense, variable_axes={"params": None}, split_rngs={"params": False}
        )(3)(x)


def linen_net(dtype=None):
    return wrapped(LinenNet(dtype))


def wrapped(module):
    return nnx.bridge.ToNNX(module, rngs=nnx.Rngs(0)).lazy_init(X[:2])


NETS = {"nnx": Net, "linen": linen_net}
HALVES = ["bfloat16", "float16"]


def losses(model, batch):
    logits = model(batch["x"]).astype(jnp.float32)
    found = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
    return found, {"accuracy": logits.argmax(-1) == batch["y"]}


def outputs(model, batch):
    return model(batch["x"])


def trainer_of(model, strategy=None, loss_fn=losses, **kwargs):
    strategy = strategy or cpu_strategy(2)
    return mirror.Trainer(
        model, optax.adam(1e-2), loss_fn, strategy=strategy, require_equal=False, **kwargs
    )


def arrays(tree):
    """Returns the arrays of nnx objects, without random keys."""
    return [np.asarray(x) for x in jax.tree.leaves(nnx.state(tree, nnx.Not(nnx.RngState)))]


def assert_same(one, other):
    assert all(np.array_equal(*pair) for pair in zip(arrays(one), arrays(other), strict=True))


def dtypes(tree):
    """Returns the float dtypes of the arrays of nnx objects."""
    return {str(x.dtype) for x in arrays(tree)} - {"int32", "uint32"}


ROWS = [
    ("nnx", "pmap", "bfloat16"),
    ("linen", "vmap", "float16"),
]


@pytest.mark.parametrize("rows", mostly_nightly(ROWS, ("nnx", "pmap", "bfloat16")))
def test_layers_compute_in_it_and_state_and_sums_are_float32(subtests, rows):
    for net, executor, precision in rows:
        with subtests.test(msg=f"{net} {executor} {precision}"):
            strategy = EXECUTORS[executor]()
            with strategy.scope():
                model = NETS[net]()
                trainer = trainer_of(model, strategy, precision=precision)
            before = trainer.evaluate(TABLES)["loss"]
            assert fit(trainer, TABLES, 3)["loss"][-1] < before
            assert trainer.predict(TABLES, outputs).dtype == precision
            assert dtypes((trainer.model, trainer.optimizer)) == {"float32"}
            strategy.check_mirrored((trainer.model, trainer.optimizer))
            table = str(trainer.summary(TABLES))
            assert f"{precision}[30,3]" in table
            assert precision in repr(trainer)
            assert table.splitlines()[-1].split() == ["precision", precision]
            if net == "linen":
                report = trainer.verify(TABLES)
                assert 1e-7 < report.largest <= report.rtol == 4 * float(jnp.finfo(precision).eps)


@pytest.mark.slow
def test_verify_allows_the_rounding_of_the_coarsest_layer():
    for dtype, precision, coarsest in [
        (jnp.bfloat16, None, "bfloat16"),
        (jnp.float16, "bfloat16", "bfloat16"),
        (jnp.float32, "float16", "float16"),
        ("bfloat16", "float16", "bfloat16"),
    ]:
        trainer = linear_trainer(dtype, precision=precision, loss_scale=False)
        report = trainer.verify(TABLES)
        assert 1e-5 < report.largest <= report.rtol == 4 * float(jnp.finfo(coarsest).eps)
    for dtype in (None, jnp.float32, "of the user's"):
        trainer = linear_trainer(None)
        trainer.model.dtype = dtype
        assert trainer.verify(TABLES).rtol == 1e-5


def linear_trainer(dtype, **kwargs):
    """A trainer that does not amplify rounding errors, as Adam and normalization do."""
    rngs = nnx.Rngs(0)
    layers = [nnx.Linear(4, 8, rngs=rngs), nnx.Linear(8, 3, dtype=dtype, rngs=rngs)]
    model = nnx.Sequential(*layers)
    return mirror.Trainer(
        model, optax.sgd(0.1), losses, strategy=cpu_strategy(2), require_equal=False, **kwargs
    )


def test_default_leaves_the_model_as_it_is():
    plain, explicit = trainer_of(Net()), trainer_of(Net(), precision=None, loss_scale=False)
    for trainer in (plain, explicit):
        fit(trainer, TABLES)
        assert (trainer.precision, trainer.loss_scale) == (None, None)
        assert trainer.model.first.dtype is None
        assert "precision" not in str(trainer.summary(TABLES))
    assert_same((plain.model, plain.optimizer), (explicit.model, explicit.optimizer))
    assert "float32" not in repr(plain)


@pytest.mark.parametrize("rows", mostly_slow(NETS, "nnx"))
def test_float32_trains_to_the_same_bits_as_the_default(subtests, rows):
    for net in rows:
        with subtests.test(msg=net):
            models = [trainer_of(NETS[net](), precision=each) for each in (None, "float32")]
            for trainer in models:
                fit(trainer, TABLES)
            assert_same(models[0].model, models[1].model)


@pytest.mark.parametrize("rows", mostly_slow(NETS, "nnx"))
def test_dtype_that_the_user_set_is_kept(subtests, rows):
    for net in rows:
        with subtests.test(msg=net):
            trainer = trainer_of(NETS[net](jnp.float32), precision="bfloat16")
            assert trainer.predict(TABLES, outputs).dtype == "float32"
            if net == "nnx":
                model = trainer.model
                assert (model.first.dtype, model.out.dtype) == (jnp.bfloat16, jnp.float32)
                assert not hasattr(model, "dtype")


def test_same_precision_can_be_set_again_and_another_is_an_error():
    model = Net(jnp.float32)
    for precision in ("bfloat16", "bfloat16", None):
        trainer = trainer_of(model, precision=precision)
        assert trainer.predict(TABLES[1:], outputs).dtype == "float32"
        assert model.first.dtype == jnp.bfloat16
    for other in ("float32", "float16"):
        with raises(ValueError, names=["Net", f"precision={other!r}"], fix="precision='bfloat16'"):
            trainer_of(model, precision=other)
        with raises(ValueError, names=[f"precision={other!r}"], values="first: bfloat16"):
            trainer_of(nnx.clone(model), precision=other)
    assert (model.first.dtype, model.out.dtype) == (jnp.bfloat16, jnp.float32)
    trainer_of(nnx.clone(model), precision="bfloat16")
    model.set_attributes(dtype=None)
    assert trainer_of(model, precision="float16").model.first.dtype == jnp.float16


@dataclasses.dataclass(eq=True)
class Block(nnx.Module):
    """Without a hash, and with attributes that are called dtype but are not Flax's."""

    first: nnx.Linear
    dtype: str = "mine"

    def __call__(self, x):
        return self.first(x)


class Computed(nnx.Module):
    def __init__(self):
        self.first = nnx.Linear(4, 3, rngs=nnx.Rngs(0))

    @property
    def dtype(self):
        return None

    def __call__(self, x):
        return self.first(x)


def cells():
    rngs = nnx.Rngs(0)
    kinds = (nnx.LSTMCell, nnx.OptimizedLSTMCell, nnx.GRUCell, nnx.SimpleCell)
    return {kind.__name__: nnx.RNN(kind(4, 4, rngs=rngs)) for kind in kinds}


def layers():
    """Layers of Flax that have parameters, and what a trainer makes of them."""
    rngs = nnx.Rngs(0)
    return {
        "Linear": nnx.Linear(4, 4, rngs=rngs),
        "LinearGeneral": nnx.LinearGeneral(4, 4, rngs=rngs),
        "LoRALinear": nnx.LoRALinear(4, 4, lora_rank=2, rngs=rngs),
        "BatchNorm": nnx.BatchNorm(4, rngs=rngs),
        "LayerNorm": nnx.LayerNorm(4, rngs=rngs),
        "RMSNorm": nnx.RMSNorm(4, rngs=rngs),
        "GroupNorm": nnx.GroupNorm(4, num_groups=2, rngs=rngs),
        "InstanceNorm": nnx.InstanceNorm(4, rngs=rngs),
        "PReLU": nnx.PReLU(),
        "MultiHeadAttention": nnx.MultiHeadAttention(2, 4, decode=False, rngs=rngs),
        "WeightNorm": nnx.WeightNorm(nnx.Linear(4, 4, rngs=rngs), rngs=rngs),
        "SpectralNorm": nnx.SpectralNorm(nnx.Linear(4, 4, rngs=rngs), rngs=rngs),
        **cells(),
    }


@pytest.mark.parametrize(
    "rows",
    [
        pytest.param(["BatchNorm", "LoRALinear", "GRUCell"], id="some"),
        pytest.param(list(layers()), id="all", marks=pytest.mark.nightly),
    ],
)
def test_every_layer_of_flax_keeps_its_variables_in_float32(subtests, rows):
    for name in rows:
        with subtests.test(msg=name):
            check_every_layer_of_flax_keeps_its_variables_in_float32(name)


def check_every_layer_of_flax_keeps_its_variables_in_float32(name):
    layer = layers()[name]
    model = nnx.Sequential(nnx.Linear(4, 4, rngs=nnx.Rngs(0)), layer)
    trainer_of(model, precision="bfloat16")
    shape = (3, 2, 4)
    result = nnx.jit(lambda model, x: model(x))(model, jnp.ones(shape))
    assert result.dtype == ("float32" if name.endswith("Cell") else "bfloat16")  # of the carry
    assert dtypes(model) == {"float32"}
    assert result.shape == shape


def test_attributes_of_the_same_name_are_left_alone(subtests):
    for make in [lambda: Block(nnx.Linear(4, 3, rngs=nnx.Rngs(0))), Computed]:
        with subtests.test(msg=make.__name__):
            trainer = trainer_of(make(), precision="bfloat16")
            assert trainer.predict(TABLES, outputs).dtype == "bfloat16"
            assert trainer.model.dtype in ("mine", None)


def test_embedding_keeps_the_dtype_that_flax_gave_it():
    """`nnx.Embed` replaces None by the dtype of its table, so that a choice cannot be told."""
    rngs = nnx.Rngs(0)
    for dtype, wanted in ((None, "float32"), (jnp.bfloat16, "bfloat16")):
        model = nnx.Sequential(nnx.Embed(5, 4, dtype=dtype, rngs=rngs), nnx.Linear(4, 3, rngs=rngs))
        trainer_of(model, precision="bfloat16")
        assert model.layers[0](jnp.zeros(2, int)).dtype == wanted
        assert model(jnp.zeros(2, int)).dtype == "bfloat16"


@pytest.mark.nightly
def test_linen_modules_change_only_inside_the_trainer():
    model = wrapped(ManyLayers(linen.Dense(8)))
    trainer = trainer_of(model, precision="bfloat16")
    assert model(X).dtype == "float32"
    rounded = trainer.predict(TABLES[1:], outputs)
    assert rounded.dtype == "bfloat16"
    np.testing.assert_allclose(rounded.astype("float32"), model(TABLES[1]["x"]), atol=0.1)
    assert model(X).dtype == "float32"


# What cannot be set


class Bare(nnx.Module):
    def __init__(self):
        self.w = nnx.Param(jnp.ones((4, 3)))

    def __call__(self, x):
        return x @ self.w


class BareLinen(linen.Module):
    @linen.compact
    def __call__(self, x):
        return x @ self.param("w", jax.nn.initializers.ones, (4, 3))


def equinox():
    return type("MLP", (), {"__module__": "equinox.nn"})()


WRONG = {
    "a name of torch": ("bf16", ValueError, ["'bf16'"], "'bfloat16'"),
    "a policy of Keras": ("mixed_float16", ValueError, ["'mixed_float16'"], "'float16'"),
    "a name of Lightning": ("16-mixed", ValueError, ["'16-mixed'"], "'float16'"),
    "in capitals": ("Float32", ValueError, ["'Float32'"], "'float32'"),
    "misspelt": ("bloat16", ValueError, ["'bloat16'"], "'bfloat16'"),
    "empty": ("", ValueError, ["''"], "'bfloat16'"),
    "wider": ("float64", ValueError, ["'float64'"], "'float16'"),
    "smaller": ("float8_e4m3fn", ValueError, ["'float8_e4m3fn'"], "'bfloat16'"),
    "a dtype": (jnp.float16, TypeError, ["float16"], "precision='float16'"),
    "a NumPy dtype": (np.dtype("float32"), TypeError, ["float32"], "precision='float32'"),
    "a number": (16, TypeError, ["16 (int)"], "precision='bfloat16'"),
    "True": (True, TypeError, ["True"], "precision='bfloat16'"),
}


def test_unknown_precision_is_rejected_and_the_model_kept(subtests):
    for row in WRONG:
        with subtests.test(msg=row):
            value, kind, names, fix = WRONG[row]
            model = Net()
            with raises(kind, names=["`precision`", *names], fix=fix):
                trainer_of(model, precision=value)
            assert model.first.dtype is None


REFUSED = {
    "no layers": (Bare, "Bare", "x.astype(jnp.bfloat16)"),
    "all layers set": (
        lambda: nnx.Sequential(nnx.Linear(4, 3, dtype=jnp.float32, rngs=nnx.Rngs(0))),
        "layers.0: float32",
        "Create them without dtype",
    ),
    "other layers set": (
        lambda: nnx.Sequential(nnx.Linear(4, 3, dtype=jnp.float16, rngs=nnx.Rngs(0))),
        "layers.0: float16",
        "Create them without dtype",
    ),
}


def test_precision_that_reaches_no_layer_is_an_error(subtests):
    for row in REFUSED:
        with subtests.test(msg=row):
            make, name, fix = REFUSED[row]
            with raises(ValueError, names=["precision='bfloat16'", name], fix=fix):
                trainer_of(make(), precision="bfloat16")


def test_precision_that_reaches_no_linen_layer_is_an_error():
    model = wrapped(BareLinen())
    trainer = trainer_of(model, precision="float16")
    for call in (trainer.evaluate, trainer.summary, lambda data: fit(trainer, data)):
        with raises(ValueError, names=["precision='float16'", "losses"], fix="astype(jnp.float16)"):
            call(TABLES)


class Mixed(nnx.Module):
    """A layer of nnx, and a Linen module whose layer has a dtype or none that could be set."""

    def __init__(self, head):
        self.body = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
        self.head = wrapped(head)

    def __call__(self, x):
        return self.head(self.body(x))


def test_linen_layers_may_be_set_if_the_precision_reaches_others(subtests):
    for head in [linen.Dense(3, dtype=jnp.float32), BareLinen()]:
        with subtests.test(msg=type(head).__name__):
            trainer = trainer_of(Mixed(head), precision="bfloat16")
            assert trainer.model.body.dtype == jnp.bfloat16
            fit(trainer, TABLES)
            trainer.evaluate(TABLES)


def test_replaced_model_has_the_precision_of_the_trainer():
    trainer = trainer_of(Net(), precision="bfloat16")
    trainer.model = Net()
    assert trainer.model.first.dtype == jnp.bfloat16
    with raises(ValueError, names="precision='bfloat16'"):
        trainer.model = Bare()
    assert isinstance(trainer.model, Net)


def test_models_of_other_libraries_are_told_the_step():
    with raises(TypeError, names="`model`", fix="strategy.run(step, (params, opt_state, batch))"):
        trainer_of(equinox(), precision="bfloat16")
    with raises(TypeError, names="`model`", fix="ToNNX"):
        trainer_of(linen.Dense(3), precision="bfloat16")


def test_rejected_trainer_does_not_change_the_model():
    model = Net()
    with raises(ValueError, names="`accumulate_steps`"):
        trainer_of(model, precision="bfloat16", accumulate_steps=0)
    with raises(ValueError, names="'accuracyy'"):
        trainer_of(model, loss_fn="mse", metrics=["accuracyy"], precision="bfloat16")
    assert model.first.dtype is None


# Losses in half precision


def half(model, batch):
    return losses(model, batch)[0].astype(jnp.bfloat16)


def weighted(model, batch):
    return mirror.Weighted(losses(model, batch)[0].astype(jnp.float16), jnp.ones(len(batch["y"])))


HALF_LOSSES = [("fit", (weighted, "float16")), ("evaluate", (half, "bfloat16"))]


@pytest.mark.parametrize("rows", mostly_slow(HALF_LOSSES, HALF_LOSSES[0]))
def test_losses_in_half_precision_warn_once_at_the_users_line(subtests, rows):
    for method, (loss_fn, dtype) in rows:
        with subtests.test(msg=f"{method} {dtype}"):
            trainer = trainer_of(Net(), loss_fn=loss_fn)
            call = types.MethodType(fit, trainer) if method == "fit" else trainer.evaluate
            with pytest.warns(UserWarning, match="logits.astype") as caught:
                call(TABLES)
            fit(trainer, TABLES, 2)  # warnings are errors
            (message,) = (str(each.message) for each in caught)
            assert loss_fn.__name__ in message
            assert f"are {dtype}" in message
            assert caught[0].filename.endswith(("training.py", "test_precision.py"))


def test_named_losses_and_metrics_are_computed_in_float32():
    """The model returns bfloat16; a cross-entropy of its 8 bits would differ by 1 %."""
    seen = []

    def probabilities(outputs, labels):
        seen.append(outputs.dtype)
        return jnp.take_along_axis(jax.nn.softmax(outputs), labels[:, None], 1)[:, 0]

    trainer = trainer_of(
        Net(),
        loss_fn="sparse_categorical_crossentropy",
        metrics=["accuracy", probabilities],
        precision="bfloat16",
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        metrics = trainer.evaluate((X, DATA["y"]), batch_size=8)
    assert set(seen) == {jnp.dtype("float32")}
    logits = trainer.predict(X, batch_size=8)
    assert logits.dtype == "bfloat16"
    wanted = optax.softmax_cross_entropy_with_integer_labels(logits.astype("float32"), DATA["y"])
    np.testing.assert_allclose(metrics["loss"], wanted.mean(), rtol=1e-6)


# Checkpoints


PRECISIONS = [("float16", None), ("float32", "float16"), ("bfloat16", "float32")]


@pytest.mark.parametrize("rows", mostly_nightly(PRECISIONS, PRECISIONS[0]))
def test_checkpoint_restores_into_another_precision(subtests, tmp_path_factory, rows):
    for saved, restored in rows:
        with subtests.test(msg=f"{saved} to {restored}"):
            tmp_path = tmp_path_factory.mktemp("row")
            trainer = trainer_of(Net(), precision=saved)
            fit(trainer, TABLES)
            trainer.save(tmp_path)
            again = trainer_of(Net(), precision=restored)
            if again.loss_scale is not None:
                again.loss_scale.current.set_value(jnp.float32(2))
            again.restore(tmp_path)
            for mine, theirs in (
                (again.model, trainer.model),
                (again.optimizer, trainer.optimizer),
            ):
                assert_same(mine, theirs)
            if again.loss_scale is not None:
                assert again.loss_scale.current[...] == 2**15
            fit(again, TABLES, 2)


def digits():
    with mock.patch.dict(os.environ):  # scikit-learn sets variables for its threads
        data = pytest.importorskip("sklearn.datasets").load_digits()
    images = (data.data / 16).astype(np.float32)
    order = np.random.RandomState(0).permutation(len(images))
    images, labels = images[order], data.target[order]
    return (images[:1300], labels[:1300]), (images[1300:], labels[1300:])


class Digits(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.first = nnx.Linear(64, 64, rngs=rngs)
        self.norm = nnx.BatchNorm(64, rngs=rngs)
        self.out = nnx.Linear(64, 10, rngs=rngs)

    def __call__(self, x):
        return self.out(jax.nn.relu(self.norm(self.first(x))))


@pytest.mark.nightly
def test_digits_are_as_accurate_in_half_precision():
    train, test = digits()
    accuracy = {}
    for precision in ("float32", *HALVES):
        trainer = trainer_of(
            Digits(),
            cpu_strategy(4),
            "sparse_categorical_crossentropy",
            metrics=["accuracy"],
            precision=precision,
        )
        fit(trainer, train, 30, batch_size=100)
        trainer.strategy.check_mirrored((trainer.model, trainer.optimizer))
        accuracy[precision] = trainer.evaluate(test, batch_size=100)["accuracy"]
    assert accuracy["float32"] > 0.95
    for precision in HALVES:
        assert accuracy[precision] >= accuracy["float32"] - 0.005, accuracy
