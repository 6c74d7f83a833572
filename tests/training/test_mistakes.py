"""Mistakes in the first programs of a user: each is answered with what to write instead."""
# ruff: noqa: E501 (arguments and their message are one row)

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

import mirror
from tests.support import inside
from tests.support.messages import assert_message, raises
from tests.support.strategies import cpu_strategy
from tests.support.tables import rows

X = np.random.RandomState(0).randn(8, 3).astype(np.float32)
Y = np.arange(8) % 3


class Net(nnx.Module):
    def __init__(self, rngs):
        self.out = nnx.Linear(3, 3, rngs=rngs)

    def __call__(self, x):
        return self.out(x)


def cross_entropy(model, batch):
    return optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]), batch["y"])


def new(loss_fn="sparse_categorical_crossentropy", **kwargs):
    return mirror.Trainer(
        Net(nnx.Rngs(0)), optax.sgd(0.1), loss_fn, strategy=cpu_strategy(2), **kwargs
    )


@pytest.fixture(scope="module")
def trainer():
    return new()


DATASET = mirror.data.from_arrays((X, Y), 4)
PAIR = "trainer.fit((x, y), epochs=10, batch_size=32)"
CALLS = {
    # a call, the values and the fix in its message
    "fit(x, y)": (lambda t: t.fit(X, Y), ["float32[8,3]", "int64[8]"], PAIR),
    "fit(x, y, epochs)": (lambda t: t.fit(X, Y, epochs=2), ["float32[8,3]"], PAIR),
    "fit(x, y, 32)": (lambda t: t.fit(X, Y, 32), ["float32[8,3]"], PAIR),
    "fit(x, list)": (lambda t: t.fit(X, list(Y), epochs=2), ["float32[8,3]"], PAIR),
    "fit([x, y])": (lambda t: t.fit([X, Y]), ["float32[8,3]"], "fit((x, y), batch_size=32)"),
    "evaluate([x, y])": (lambda t: t.evaluate([X, Y]), ["float32[8,3]"], "fit((x, y), batch_size=32)"),
    "fit(path)": (lambda t: t.fit("train.csv"), ["`data`", "'train.csv'"], "trainer.fit((x, y), batch_size=32)"),
    "fit(path, 32)": (lambda t: t.fit("train.csv", batch_size=32), ["`data`", "'train.csv'"], "trainer.fit((x, y), batch_size=32)"),
    "validation path": (lambda t: t.fit(DATASET, validation_data="a.csv"), ["`validation_data`", "'a.csv'"], "fit((x, y), batch_size=32)"),
    "evaluate(path)": (lambda t: t.evaluate("a.csv"), ["`data`", "'a.csv'"], "fit((x, y), batch_size=32)"),
    "predict(path)": (lambda t: t.predict("a.csv"), ["`data`", "'a.csv'"], "fit((x, y), batch_size=32)"),
    "verify(None)": (lambda t: t.verify(None), ["`data`", "None"], "fit((x, y), batch_size=32)"),
    "summary(path)": (lambda t: t.summary("a.csv"), ["`data`", "'a.csv'"], "trainer.summary(next(iter(data)))"),
    "fit(x=, y=)": (lambda t: t.fit(x=X, y=Y, batch_size=4), ["x=...", "y=..."], PAIR),
    "fit(data, y=)": (lambda t: t.fit(X, y=Y), ["y=..."], PAIR),
    "verbose": (lambda t: t.fit(DATASET, verbose=0), ["'verbose'"], "progress=False"),
    "class_weight": (lambda t: t.fit(DATASET, class_weight={}), ["'class_weight'"], "mirror.Trainer(..., class_weight="),
    "sample_weight": (lambda t: t.fit(DATASET, sample_weight=Y), ["'sample_weight'"], "mirror.Trainer(..., sample_weight="),
    "steps": (lambda t: t.evaluate(DATASET, steps=3), ["'steps'"], "itertools.islice(data"),
    "validation_batch_size": (lambda t: t.fit(DATASET, validation_batch_size=3), ["'validation_batch_size'"], "mirror.data.from_arrays"),
    "validation_freq": (lambda t: t.fit(DATASET, validation_freq=3), ["'validation_freq'"], "fit.trainer.evaluate(data)"),
    "workers": (lambda t: t.fit(DATASET, workers=3), ["'workers'"], "prefetch=2"),
    "optimizer": (lambda t: t.fit(DATASET, optimizer="adam"), ["'optimizer'"], "mirror.Trainer(model, optax.adam(1e-3), loss_fn)"),
    "fit(data, data)": (lambda t: t.fit(DATASET, DATASET), ["ArrayDataset"], "validation_data="),
    "Lightning's data": (lambda t: t.fit(train_dataloaders=DATASET), ["'train_dataloaders'"], "first argument"),
    "Lightning's validation": (lambda t: t.fit(DATASET, val_dataloaders=DATASET), ["'val_dataloaders'"], "validation_data"),
    "ckpt_path": (lambda t: t.fit(DATASET, ckpt_path="last"), ["'ckpt_path'"], "trainer.restore(directory)"),
    "typo": (lambda t: t.fit(DATASET, epoch=3), ["'epoch'"], "Did you mean 'epochs'"),
    "unknown": (lambda t: t.fit(DATASET, magic=3), ["'magic'"], "validation_data"),
    "fit()": (lambda t: t.fit(), ["'data'"], "trainer.fit("),
    "fit(d, 1, 32)": (lambda t: t.fit(DATASET, 1, 32), ["too many positional arguments"], "batch_size"),
    "evaluate(x, y)": (lambda t: t.evaluate(X, Y), ["float32[8,3]"], "trainer.evaluate((x, y), batch_size=32)"),
    "evaluate(verbose)": (lambda t: t.evaluate(DATASET, verbose=2), ["'verbose'"], "omit it"),
    "predict(x)": (lambda t: t.predict(X), ["float32[8,3]"], "trainer.predict(data, batch_size=32)"),
    "predict(model, x)": (lambda t: t.predict(t.model, X), ["Net"], "trainer.predict(data)"),
    "predict(x, 32)": (lambda t: t.predict(X, 32), ["fn", "32"], "trainer.predict(data, batch_size=32)"),
    "predict(verbose)": (lambda t: t.predict(X, verbose=0), ["'verbose'"], "omit it"),
    "batch_size": (lambda t: t.fit(DATASET, batch_size=8), ["batch_size=8", "batch_size=4"], "mirror.data.from_arrays"),
    "lists": (lambda t: t.fit({"x": X.tolist(), "y": Y}, batch_size=8), ["batch_size=8"], "np.asarray(rows)"),
    "state_dict": (lambda t: t.state_dict(), ["'state_dict'"], "nnx.state(trainer.model)"),
    "load_state_dict": (lambda t: t.load_state_dict({}), ["'load_state_dict'"], "trainer.restore(directory)"),
    "to": (lambda t: t.to("cuda"), ["'to'"], "strategy.scope()"),
    "loss=": (lambda t: mirror.Trainer(t.model, optax.sgd(0.1), loss="mse"), ["'loss'"], "loss_fn='mse'"),
    "optimizer=": (lambda t: mirror.Trainer(t.model, optimizer="adam", loss="mse"), ["'optimizer'"], "tx=optax.adam(1e-3)"),
    "no loss": (lambda t: mirror.Trainer(t.model, optax.sgd(0.1)), ["'loss_fn'"], "mirror.Trainer("),
    "Lightning's fit": (lambda t: t.fit(t.model, DATASET), ["Net"], "trainer.fit(data, epochs=10)"),
    "Lightning's arguments": (lambda t: mirror.Trainer(max_epochs=5, accelerator="gpu", devices=2), ["max_epochs", "accelerator", "devices"], ["trainer.fit(data, epochs=10)", "mirror.MirroredStrategy(2)"]),
    "Lightning's clipping": (lambda t: mirror.Trainer(t.model, optax.sgd(0.1), "mse", gradient_clip_val=1.0), ["'gradient_clip_val'"], "optax.clip_by_global_norm"),
    "Lightning": (lambda t: mirror.Trainer(t.model, optax.sgd(0.1), "mse", accumulate_grad_batches=2), ["'accumulate_grad_batches'"], "accumulate_steps"),
}  # fmt: skip


def test_calls_of_other_libraries(subtests, trainer):
    for name in CALLS:
        with subtests.test(msg=name):
            call, values, fix = CALLS[name]
            with raises((TypeError, ValueError, AttributeError), values=values, fix=fix):
                call(trainer)
            assert trainer._position.step == 0


def test_methods_of_other_libraries(subtests, trainer):
    for name in inside.guesses("trainer"):
        with subtests.test(msg=name):
            with raises(AttributeError, values=[f"'{name}'"], fix=inside.guesses("trainer")[name]):
                getattr(trainer, name)
            assert not hasattr(trainer, name)


def test_similar_attributes_are_suggested(trainer):
    with raises(AttributeError, values=["'evaluatee'"], fix="Did you mean trainer.evaluate?"):
        _ = trainer.evaluatee
    with raises(AttributeError, values=["'zzz'", "'Trainer'"], fix="evaluate, export, fit"):
        _ = trainer.zzz


# What a trainer is made of


def of_library(module, name):
    """An object of a class that says it belongs to another library."""
    return type(name, (), {"__module__": module})()


class Dense(linen.Module):
    @linen.compact
    def __call__(self, x):
        return linen.Dense(3)(x)


MODELS = {
    "class": (Net, "Net(..., rngs=nnx.Rngs(0))"),
    "Linen": (Dense(), "nnx.bridge.ToNNX(module, rngs=nnx.Rngs(0)).lazy_init(x)"),
    "Keras": (of_library("keras.src.models.sequential", "Sequential"), "keras.layers.Dense(10) is nnx.Linear"),
    "torch": (of_library("torch.nn.modules.linear", "Linear"), "torch.nn.Linear(n, 10) is nnx.Linear"),
    "Equinox": (of_library("equinox.nn", "MLP"), "strategy.run(step, (params, opt_state, batch))"),
    "function": (lambda x: x, "nnx.Module"),
    "swapped": (optax.sgd(0.1), "mirror.Trainer(model, optax.adam(1e-3), loss_fn)"),
}  # fmt: skip


def test_models_of_other_libraries(subtests):
    for name in MODELS:
        with subtests.test(msg=name):
            model, fix = MODELS[name]
            with raises(TypeError, names="model", fix=["nnx.Module", fix]):
                mirror.Trainer(model, optax.sgd(0.1), "mse")


OPTIMIZERS = {
    "'adam'": ("adam", "optax.adam(1e-3)"),
    "'SGD'": ("SGD", "optax.sgd(1e-3)"),
    "'adm'": ("adm", "Did you mean 'adam'"),
    "Keras": (of_library("keras.src.optimizers.adam", "Adam"), "optax.adam(1e-3)"),
    "torch": (of_library("torch.optim.adamw", "AdamW"), "optax.adamw(1e-3)"),
    "not called": (optax.adam, "optax.adam(1e-3)"),
    "rate": (0.01, "optax.adam(0.01)"),
    "accumulating": (optax.MultiSteps(optax.sgd(0.1), 2), ".gradient_transformation()"),
    "swapped": (cross_entropy, "mirror.Trainer(model, optax.adam(1e-3), loss_fn)"),
}


def test_optimizers_of_other_libraries(subtests, trainer):
    for name in OPTIMIZERS:
        with subtests.test(msg=name):
            tx, fix = OPTIMIZERS[name]
            with raises(TypeError, names="tx", fix=fix):
                mirror.Trainer(trainer.model, tx, "mse")


def test_optimizer_that_contains_the_model_is_rejected(trainer):
    both = nnx.ModelAndOptimizer(Net(nnx.Rngs(0)), optax.sgd(0.1))
    fix = "nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)"
    with raises(TypeError, names="tx", values="ModelAndOptimizer", fix=fix):
        mirror.Trainer(trainer.model, both, "mse")


# Batches in a loss function


def test_integers_among_the_parameters_are_named():
    class Quantized(nnx.Module):
        def __init__(self):
            self.scales = nnx.Param(jnp.ones(4))
            self.weights = nnx.Param(jnp.ones((2, 4), jnp.int8))

        def __call__(self, x):
            return x @ (self.weights[...] * self.scales)

    data = np.ones((4, 2), np.float32), np.ones((4, 4), np.float32)
    trainer = mirror.Trainer(Quantized(), optax.sgd(0.1), "mse")
    trainer.evaluate(data, batch_size=4)
    with raises(TypeError, names=["model.weights"], values=["int8[2,4]"], fix="wrt"):
        trainer.fit(data, batch_size=4, progress=False)


def test_parameters_that_the_loss_creates_are_an_error():
    class Lazy(nnx.Module):
        def __init__(self):
            self.linear = nnx.Linear(2, 4, rngs=nnx.Rngs(0))

        def __call__(self, x):
            self.scale = nnx.Param(jnp.ones(4))
            return self.linear(x) * self.scale

    data = np.ones((4, 2), np.float32), np.ones((4, 4), np.float32)
    trainer = mirror.Trainer(Lazy(), optax.sgd(0.1), "mse")
    with raises(ValueError, values=["3 parameters", 2], fix="before the Trainer"):
        trainer.fit(data, batch_size=4, progress=False)


class Parts(nnx.Module):
    def __init__(self):
        self.out, self.unused = Net(nnx.Rngs(0)), Net(nnx.Rngs(1))
        self.frozen = nnx.Param(jnp.ones(3))
        self.count = nnx.Variable(jnp.zeros(()))

    def __call__(self, x):
        self.count[...] += 1
        return self.out(x) * jax.lax.stop_gradient(self.frozen[...])


kernel = nnx.All(nnx.Param, nnx.PathContains("kernel"))
LOSSES = {
    # a loss, options of the trainer, and whether a parameter has a gradient
    "stop_gradient": (lambda m, b: jax.lax.stop_gradient(cross_entropy(m, b)), {}, False),
    "data only": (lambda m, b: jnp.square(b["x"]).sum(1), {}, False),
    "constant": (lambda m, b: jnp.ones(len(b["y"])), {}, False),
    "predictions": (lambda m, b: 1.0 * (m(b["x"]).argmax(-1) != b["y"]), {}, False),
    "sign": (lambda m, b: jnp.sign(m(b["x"])).sum(-1), {}, False),
    "frozen part": (lambda m, b: jnp.square(jax.lax.stop_gradient(m(b["x"]))).sum(1), {}, False),
    "pieces": (lambda m, b: jnp.ones(len(b["y"])), {"accumulate_steps": 2}, False),
    "group": (lambda m, b: jnp.ones(len(b["y"])), {"steps_per_execution": 2}, False),
    "scaled": (lambda m, b: jnp.ones(len(b["y"])), {"loss_scale": mirror.LossScale()}, False),
    "others of wrt": (lambda m, b: m.out.out.bias.sum() * b["x"][:, 0], {"wrt": kernel}, False),
    "Weighted": (lambda m, b: mirror.Weighted(b["x"][:, 0], b["x"][:, 1]), {}, False),
    "model": (cross_entropy, {}, True),
    "pieces of it": (cross_entropy, {"accumulate_steps": 2}, True),
    "group of it": (cross_entropy, {"steps_per_execution": 2}, True),
    "scaled of it": (cross_entropy, {"loss_scale": mirror.LossScale()}, True),
    "some of wrt": (cross_entropy, {"wrt": kernel}, True),
    "weights only": (lambda m, b: mirror.Weighted(b["x"][:, 0], jnp.exp(m(b["x"]).sum(1))), {}, True),
    "values only": (lambda m, b: mirror.Weighted(m(b["x"]).sum(1), b["x"][:, 1] ** 2), {}, True),
    "penalty only": (lambda m, b: jnp.ones(len(b["y"])), {"penalty": lambda m: jnp.sum(m.frozen[...] ** 2)}, True),
    "checkpoint": (jax.checkpoint(cross_entropy), {}, True),
    "jitted": (nnx.jit(cross_entropy), {}, True),
    "straight through": (lambda m, b: (z := m(b["x"])).sum(1) + jax.lax.stop_gradient(jnp.round(z) - z).sum(1), {}, True),
}  # fmt: skip


def warned_of_zeros(loss_fn, options, batch_sizes):
    """Returns how many warnings of zeros `fit` gives."""
    strategy = cpu_strategy(2)
    trainer = mirror.Trainer(Parts(), optax.sgd(0.1), loss_fn, strategy=strategy, **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if len(batch_sizes) > 1:
            trainer.evaluate({"x": X, "y": Y}, batch_size=4)
            assert not caught
        for epoch, size in enumerate(batch_sizes, 1):
            trainer.fit({"x": X, "y": Y}, epoch, batch_size=size, progress=False)
    return sum("gradients are 0" in str(each.message) for each in caught)


@rows("loss_fn, options, has_gradient", LOSSES)
def test_loss_without_gradients_is_a_warning(loss_fn, options, has_gradient):
    """Parts of the model may be frozen or unused."""
    assert warned_of_zeros(loss_fn, options, [4]) == (not has_gradient)


@rows("name", ["data only", "pieces", "group", "scaled", "model"])
def test_loss_without_gradients_is_one_warning(name):
    """Not of `evaluate`, and not again for batches of another size."""
    loss_fn, options, has_gradient = LOSSES[name]
    assert warned_of_zeros(loss_fn, options, [4, 8]) == (not has_gradient)


def test_model_without_parameters_has_no_gradients_to_miss():
    class Counter(nnx.Module):
        def __init__(self):
            self.count = nnx.Variable(jnp.zeros(()))

    def loss_fn(model, batch):
        model.count[...] += 1
        return batch[:, 0]

    mirror.Trainer(Counter(), optax.sgd(0.1), loss_fn, strategy=cpu_strategy(2)).fit(
        X, batch_size=4, progress=False
    )


def test_loss_with_keywords_is_told_how_to_unpack():
    def loss_fn(model, *, x, y):
        return cross_entropy(model(x), y)

    with raises(TypeError, names="loss_fn", fix="unpack it: x, y = batch"):
        new(loss_fn)


def test_note_of_a_named_loss_does_not_ask_to_unpack():
    with pytest.raises(TypeError) as caught:
        new().fit((X[:, :2], Y), batch_size=4, progress=False)
    (note,) = [each for each in caught.value.__notes__ if "batch[0]" in each]
    assert_message(note, names="batch[0]", values="float32[2,2]")
    assert "Unpack" not in note


def number_of_the_losses(model, batch):
    x, y = batch
    return float(cross_entropy(model, {"x": x, "y": y}).mean())


def test_float_in_a_loss_is_not_about_a_step():
    """The user wrote neither a step nor `strategy.run`; and the batch is not the cause."""
    with pytest.raises(jax.errors.ConcretizationTypeError) as caught:
        new(number_of_the_losses).fit((X, Y), batch_size=4, progress=False)
    fix = ["Return the array without float()", "jax.debug.print"]
    assert_message(caught, names=["number_of_the_losses", "test_mistakes.py"], fix=fix)
    assert "strategy.run" not in str(caught.value)
    assert "batch" not in note_of(caught.value)


def test_list_of_losses_and_metrics_is_told_to_be_a_tuple():
    def listed(model, batch):
        losses = cross_entropy(model, batch)
        return [losses, {"twice": 2 * losses}]

    with raises(ValueError, names="listed", values="list", fix="return losses, {...}"):
        new(listed).fit({"x": X, "y": Y}, batch_size=4, progress=False)


def unpacks(model, batch):
    x, y = batch
    return optax.softmax_cross_entropy_with_integer_labels(model(x), y)


def unpacks_three(model, batch):
    x, y, _ = batch
    return optax.softmax_cross_entropy_with_integer_labels(model(x), y)


MIX_UPS = {
    # loss function, data, error, and what its note says
    "key of a tuple": (cross_entropy, (X, Y), TypeError, ["tuple", "batch[0]: float32[2,3]", "x, y = batch"]),
    "key of an array": (cross_entropy, X, (IndexError, TypeError), ["an array", "float32[2,3]", "(x, y)"]),
    "other key": (cross_entropy, {"image": X, "y": Y}, KeyError, ["dict", "'image', 'y'"]),
    "unpacks a dict": (unpacks, {"x": X, "y": Y}, TypeError, ["dict", "batch['x']: float32[2,3]"]),
    "unpacks too many": (unpacks_three, (X, Y), ValueError, ["tuple", "x, y = batch"]),
    "transposed": (lambda model, batch: model(batch[0].T).sum(-1), (X, Y), TypeError, ["batch[0]: float32[2,3]"]),
}  # fmt: skip


def note_of(error):
    """Returns the notes of mirror; JAX adds its own."""
    return "".join(note for note in getattr(error, "__notes__", []) if "JAX" not in note)


def test_errors_of_a_loss_function_describe_the_batch(subtests):
    for name in MIX_UPS:
        with subtests.test(msg=name):
            loss_fn, data, kind, shown = MIX_UPS[name]
            trainer = new(loss_fn)
            with pytest.raises(kind) as caught:
                trainer.fit(data, batch_size=4, progress=False)
            assert_message(note_of(caught.value), names=[loss_fn.__name__], fix=shown)
            with pytest.raises(kind) as caught:
                trainer.predict(data, loss_fn, batch_size=4)
            assert_message(note_of(caught.value), fix=shown)


def test_messages_of_mirror_have_no_note():
    def loss_fn(model, batch):
        return cross_entropy(model, batch).mean()

    with raises(ValueError, names="loss_fn", fix=".mean()") as caught:
        new(loss_fn).fit({"x": X, "y": Y}, batch_size=4, progress=False)
    assert not note_of(caught.value)


def test_nan_names_labels_out_of_range():
    trainer = new(cross_entropy)
    with pytest.warns(UserWarning, match="nan") as caught:
        trainer.fit({"x": X, "y": Y + 10}, batch_size=4, progress=False)
    fix = ["NaNGuard()", "batch['y'] contains 10 to 12", "labels='y'"]
    assert_message(str(caught[0].message), fix=fix)


EMPTY = {
    "list": ([], {}, ["no batch"]),
    "no rows": ((X[:0], Y[:0]), {"batch_size": 4}, ["float32[0,3]"]),
    "exhausted": (iter([]), {}, ["no batch", "exhausted generator"]),
}


def test_empty_data(subtests, trainer):
    for name in EMPTY:
        with subtests.test(msg=name):
            data, options, fix = EMPTY[name]
            with raises(ValueError, fix=fix):
                trainer.fit(data, 1, progress=False, **options)


def test_generator_for_two_epochs():
    pair = ((X, Y) for _ in range(1))
    with raises(ValueError, names="`validation_data`", fix=["no batch", "exhausted generator"]):
        new().fit([(X, Y)], epochs=2, validation_data=pair, progress=False)
    with raises(ValueError, fix=["exhausted iterator", "a list, a DataLoader"]):
        new().fit(((X, Y) for _ in range(1)), epochs=2, progress=False)


# Callbacks of other libraries


def with_hook(name, *parameters):
    """Returns a callback with one more method."""
    scope = {}
    exec(f"def {name}({', '.join(['self', *parameters])}): pass", scope)
    return type("Report", (mirror.callbacks.Callback,), {name: scope[name]})()


UNKNOWN = {
    "on_train_begin": "on_fit_begin(self, fit)",
    "on_train_end": "on_fit_end(self, fit)",
    "on_batch_end": "on_step(self, fit)",
    "on_step_end": "on_step(self, fit)",
    "on_step_begin": "on_step(self, fit)",
    "on_train_batch_end": "on_metrics(self, fit, step, logs)",
    "on_test_end": "on_epoch_end(self, fit, logs)",
    "on_predict_begin": "trainer.predict",
    "on_train_epoch_end": "on_epoch_end(self, fit, logs)",
    "on_epochs_end": "on_epoch_end(self, fit, logs)",
    "on_metric": "on_metrics(self, fit, step, logs)",
    "on_steps": "on_step(self, fit)",
}


def test_hooks_that_would_not_be_called(subtests, trainer):
    for name in UNKNOWN:
        with subtests.test(msg=name):
            with raises(TypeError, names=[f"Report.{name}"], fix=[UNKNOWN[name], f"_{name}"]):
                trainer.fit(DATASET, callbacks=with_hook(name, "logs=None"), progress=False)
            assert trainer._position.step == 0


def test_other_methods_are_allowed(subtests):
    for name in ["on_disk", "on_gpu", "_on_train_begin", "save_on_step"]:
        with subtests.test(msg=name):
            new().fit(DATASET, callbacks=with_hook(name), progress=False)


SIGNATURES = {
    "of Keras": ("on_epoch_end", ["epoch", "logs=None"], "(self, fit, logs)"),
    "of Keras at begin": ("on_epoch_begin", ["epoch", "logs=None"], "(self, fit)"),
    "of Lightning": ("on_epoch_end", ["trainer", "pl_module"], "(self, fit, logs)"),
    "too few": ("on_epoch_end", ["fit"], "(self, fit, logs)"),
    "too many": ("on_step", ["fit", "step"], "(self, fit)"),
    "metrics": ("on_metrics", ["step", "logs"], "(self, fit, step, logs)"),
}


def test_hooks_with_other_parameters(subtests, trainer):
    for name in SIGNATURES:
        with subtests.test(msg=name):
            hook, parameters, fix = SIGNATURES[name]
            values = f"(self, {', '.join(parameters)})".replace("=None", "")
            with raises(
                TypeError,
                names=[f"Report.{hook}"],
                values=[values],
                fix=[fix, "fit.position.epoch"],
            ):
                trainer.fit(DATASET, callbacks=with_hook(hook, *parameters), progress=False)


def test_hooks_may_name_their_parameters(subtests):
    for parameters in [["run", "metrics"], ["*args"], ["fit", "logs", "more=1"]]:
        with subtests.test(msg=str(parameters)):
            new().fit(DATASET, callbacks=with_hook("on_epoch_end", *parameters), progress=False)


OBJECTS = {
    "EarlyStopping": "mirror.callbacks",
    "ModelCheckpoint": "mirror.callbacks.Checkpoint",
    "TerminateOnNaN": "mirror.callbacks.NaNGuard",
    "ReduceLROnPlateau": "optax.contrib.reduce_on_plateau",
    "LearningRateScheduler": "an Optax schedule",
    "LambdaCallback": "mirror.callbacks.Callback",
    "Unheard": "Subclass Callback",
}


def test_callbacks_of_keras(subtests, trainer):
    for name in OBJECTS:
        with subtests.test(msg=name):
            callback = of_library("keras.src.callbacks", name)
            with raises(TypeError, names="callbacks", fix=OBJECTS[name]):
                trainer.fit(DATASET, callbacks=[callback])


def test_functions_are_not_callbacks(trainer):
    with raises(TypeError, names="callbacks", fix="mirror.callbacks.Log(fn)"):
        trainer.fit(DATASET, callbacks=[lambda logs: None])


def test_signatures_stay_honest():
    """Type checkers and `help` see the parameters, and nothing that accepts any keyword."""
    import inspect

    for method in (
        mirror.Trainer,
        mirror.Trainer.fit,
        mirror.Trainer.evaluate,
        mirror.Trainer.predict,
    ):
        kinds = {parameter.kind for parameter in inspect.signature(method).parameters.values()}
        assert inspect.Parameter.VAR_KEYWORD not in kinds
        assert inspect.Parameter.VAR_POSITIONAL not in kinds


# Probabilities where a loss takes logits


class Ends(nnx.Module):
    """A model that ends in a function."""

    def __init__(self, end, out):
        self.hidden = nnx.Linear(3, out, rngs=nnx.Rngs(0))
        self.end = end

    def __call__(self, x):
        return self.end(self.hidden(x))


B = (Y > 0).astype(np.float32)[:, None]
ONE_HOT = np.eye(3, dtype=np.float32)[Y]
SPARSE, CATEGORICAL = "sparse_categorical_crossentropy", "categorical_crossentropy"
PROBABILITIES = {
    "softmax": (nnx.softmax, SPARSE, Y, 3),
    "softmax of one-hot": (jax.nn.softmax, CATEGORICAL, ONE_HOT, 3),
    "softmax by hand": (lambda x: jnp.exp(x) / jnp.exp(x).sum(-1, keepdims=True), SPARSE, Y, 3),
    "sigmoid": (nnx.sigmoid, "binary_crossentropy", B, 1),
    "sigmoid by hand": (lambda x: 1 / (1 + jnp.exp(-x)), "bce", B, 1),
    "sigmoid of a column": (lambda x: nnx.sigmoid(x)[:, 0], "bce", B[:, 0], 1),
}
LOGITS = {
    "linear": (lambda x: x, SPARSE, Y, 3),
    "logarithms": (nnx.log_softmax, SPARSE, Y, 3),
    "gate": (lambda x: x * nnx.sigmoid(x), SPARSE, Y, 3),
    "attention": (lambda x: nnx.softmax(x) @ jnp.eye(3), SPARSE, Y, 3),
    "silu": (nnx.silu, "bce", B, 1),
    "probabilities as values": (nnx.sigmoid, "mse", B, 1),
}


def fit(row, *, steps=1, pieces=1, **options):
    end, loss, labels, out = row
    trainer = mirror.Trainer(
        Ends(end, out),
        optax.sgd(0.5),
        loss,
        strategy=cpu_strategy(2),
        steps_per_execution=steps,
        accumulate_steps=pieces,
        **options,
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        history = trainer.fit((X, labels), 2, batch_size=4, progress=False, shuffle=False)
    return [str(each.message) for each in caught], history["loss"]


def test_probabilities_for_a_loss_of_logits_are_one_warning(subtests):
    for name, row in PROBABILITIES.items():
        with subtests.test(msg=name):
            (text,), _ = fit(row, steps=2 if name == "sigmoid" else 1)
            assert_message(
                text, names=name.split()[0], values=repr(row[1]), fix="from_logits=False"
            )
    for name in ("softmax", "sigmoid"):
        assert fit(PROBABILITIES[name], from_logits=False)[0] == []
    (text,), _ = fit(PROBABILITIES["softmax"], pieces=2)
    assert "from_logits=False" in text
    for name, row in LOGITS.items():
        with subtests.test(msg=name):
            assert fit(row)[0] == []


def test_from_logits_false_trains_as_logits_do(subtests):
    for name, logits in {"softmax": "linear", "sigmoid": "linear"}.items():
        with subtests.test(msg=name):
            row = PROBABILITIES[name]
            as_logits = (LOGITS[logits][0], *row[1:])
            found = fit(row, from_logits=False, metrics=["accuracy"])[1]
            np.testing.assert_allclose(found, fit(as_logits, metrics=["accuracy"])[1], rtol=1e-4)


def test_from_logits_needs_a_loss_of_logits():
    with raises(ValueError, values=["from_logits=False", "'mse'"], fix="Omit"):
        new("mse", from_logits=False)
    with raises(TypeError, names="cross_entropy", values="from_logits=False", fix="Omit"):
        new(cross_entropy, from_logits=False)


def test_metrics_with_the_order_of_keras_are_named():
    def acc(y_true, y_pred):
        return y_pred.argmax(-1) == y_true

    def error(labels, outputs):
        return abs(labels - outputs)

    for metric, fix in ((acc, "def acc(y_pred, y_true)"), (error, "def error(outputs, labels)")):
        with raises(TypeError, names=metric.__name__, fix=[fix, "(outputs, labels)"]):
            new(metrics=[metric])


def test_trainer_outside_the_scope_of_a_strategy_is_one_warning():
    def build(**options):
        return mirror.Trainer(Net(nnx.Rngs(0)), optax.sgd(0.1), SPARSE, **options)

    build()  # no strategy in the program
    strategy = cpu_strategy(2)
    with pytest.warns(UserWarning, match="outside") as caught:
        assert build().strategy.num_replicas_in_sync == 1
    (warning,) = caught
    assert warning.filename == __file__
    values = ["1 device", "MirroredStrategy with 2 devices"]
    assert_message(
        str(warning.message), names="mirror.Trainer", values=values, fix="strategy=strategy"
    )
    build(strategy=mirror.get_strategy())
    with strategy.scope():
        build()


@pytest.mark.parametrize("steps", [1, 2])
def test_nan_in_the_data_is_named(steps):
    trainer = mirror.Trainer(
        Net(nnx.Rngs(0)),
        optax.sgd(0.1),
        cross_entropy,
        strategy=cpu_strategy(2),
        steps_per_execution=steps,
    )
    inputs = X.copy()
    inputs[[5, 6], 1] = [np.nan, np.inf]
    with pytest.warns(UserWarning, match="nan") as caught:
        trainer.fit([{"x": X, "y": Y}, {"x": inputs, "y": Y}], progress=False)
    (warning,) = caught
    assert_message(str(warning.message), names="batch['x']", values=["1 NaN", "row 5"])
    assert not trainer._loop


def test_data_without_nan_is_not_blamed():
    trainer = new(lambda model, batch: jnp.log(-abs(model(batch[0]).sum(-1))))
    with pytest.warns(UserWarning, match="nan") as caught:
        trainer.fit([(X, Y)], progress=False)
    assert "clean the data" not in str(caught[0].message)


@rows(
    "batch, labels",
    {
        "tuple": ((X, Y), ["batch[1] contains 0 to 2", "labels=1"]),
        "two": ({"x": X, "y": Y, "z": Y}, ["labels='label'"]),
    },
)
def test_nan_loss_names_the_labels(batch, labels):
    def loss_fn(model, batch):
        x = batch["x"] if isinstance(batch, dict) else batch[0]
        return jnp.log(-abs(model(x).sum(-1)))

    with pytest.warns(UserWarning, match="nan") as caught:
        new(loss_fn).fit([batch], progress=False)
    assert_message(str(caught[0].message), fix=labels)


def test_states_of_two_callbacks_of_one_class_keep_their_metric(tmp_path):
    def stopping(*monitors):
        return [mirror.callbacks.EarlyStopping(name, patience=9) for name in monitors]

    trainer = new(metrics=["accuracy"])
    first = stopping("loss", "accuracy")
    trainer.fit((X, Y), 1, batch_size=4, callbacks=first, progress=False)
    trainer.save(tmp_path)
    resumed = new(metrics=["accuracy"])
    resumed.restore(tmp_path)
    exchanged = stopping("accuracy", "loss")
    resumed.fit((X, Y), 1, batch_size=4, callbacks=exchanged, progress=False)
    states = [callback.to_dict() for callback in (*first, *reversed(exchanged))]
    assert states[0] != states[1]
    assert states[:2] == states[2:]


def test_resumed_callback_of_another_metric_is_rejected(tmp_path):
    stopping = mirror.callbacks.EarlyStopping
    trainer = new(metrics=["accuracy"])
    trainer.fit((X, Y), 1, batch_size=4, callbacks=stopping("loss"), progress=False)
    trainer.save(tmp_path)
    trainer.restore(tmp_path)
    other = stopping("accuracy", mode="max", patience=9)
    fix = "trainer.fit(data, initial_epoch=1)"
    with raises(ValueError, values=["EarlyStopping('loss')", "EarlyStopping('accuracy')"], fix=fix):
        trainer.fit((X, Y), 3, batch_size=4, callbacks=other, progress=False)
    options = {"batch_size": 4, "progress": False}
    added = [stopping("loss", patience=9), other]
    assert trainer.fit((X, Y), 2, callbacks=added, **options).epochs == [0, 1]
    trainer.restore(tmp_path)
    assert trainer.fit((X, Y), 2, initial_epoch=1, callbacks=other, **options).epochs[-1] == 1
    trainer.fit((X, Y), 1, callbacks=stopping("loss"), **options)  # another training


OPTIONS_OF_CALLBACKS = {
    "Keras' stopping": ("EarlyStopping", {"restore_best_weights": True}, "trainer.restore(directory, 'best')"),
    "Keras' checkpoint": ("Checkpoint", {"directory": "x", "save_best_only": True}, "monitor='val_loss'"),
    "Lightning's checkpoint": ("Checkpoint", {"save_top_k": 3, "dirpath": "x"}, "monitor='val_loss'"),
    "Keras' TensorBoard": ("TensorBoard", {"log_dir": "x"}, "directory"),
    "Keras' log": ("CSVLogger", {"filename": "x.csv"}, "Its name is file"),
    "Profiler": ("Profiler", {"logdir": "x"}, "steps=(5, 10)"),
    "LearningRate": ("LearningRate", {"monitor": "x"}, "LearningRate(schedule=None)"),
}  # fmt: skip


@rows("name, options, fix", OPTIONS_OF_CALLBACKS)
def test_options_of_callbacks_of_other_libraries_are_answered(name, options, fix):
    with raises(TypeError, names=name, fix=["The signature is", fix]):
        getattr(mirror.callbacks, name)(**options)


def test_scalar_metric_is_told_to_return_values():
    def loss_fn(model, batch):
        losses = optax.softmax_cross_entropy_with_integer_labels(model(batch[0]), batch[1])
        return losses, {"accuracy": (model(batch[0]).argmax(-1) == batch[1]).mean()}

    with raises(ValueError, names="'accuracy'", fix="logits.argmax(-1) == labels") as caught:
        new(loss_fn).fit((X, Y), batch_size=4, progress=False)
    assert "losses" not in str(caught.value)


def test_report_of_verify_is_readable():
    report = new().verify((X, Y), batch_size=4)
    assert repr(report) == str(report)
    html = report._repr_html_()
    assert html.index("agree") < html.index("<table")
    assert all(row.name.replace("'", "&#x27;") in html for row in report.rows)


class Loader(list):
    """A loader of PyTorch, as far as its order shows."""

    sampler = type("RandomSampler", (), {})()


def test_shuffling_loader_resumed_within_an_epoch_is_one_warning():
    class Fails(mirror.callbacks.Callback):
        def on_step(self, fit):
            raise LookupError

    loader = Loader([(X[:4], Y[:4]), (X[4:], Y[4:])])
    trainer = new()
    with pytest.raises(LookupError):
        trainer.fit(loader, 2, callbacks=Fails(), progress=False)
    with pytest.warns(UserWarning, match="DistributedSampler") as caught:
        trainer.fit(loader, 2, progress=False)
    assert len(caught) == 1
