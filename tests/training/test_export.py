"""`trainer.export`: a program with its weights that computes what `predict` computes."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import mirror
from tests.support import fresh
from tests.support.messages import raises

X = np.random.RandomState(0).randn(13, 4).astype("float32")
Y = (np.arange(13) % 3).astype("int32")
SMALL = {"rtol": 1e-5, "atol": 1e-6}  # programs for other batch sizes round differently


class Net(nnx.Module):
    """Has running statistics, dropout, and keys."""

    def __init__(self, rngs: nnx.Rngs):
        self.hidden = nnx.Linear(4, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.out = nnx.Linear(8, 3, rngs=rngs)

    def __call__(self, x):
        return self.out(self.dropout(jax.nn.relu(self.norm(self.hidden(x)))))


def trained(**options) -> mirror.Trainer:
    with mirror.MirroredStrategy(["/cpu:0", "/cpu:1"]).scope():
        net, loss = Net(nnx.Rngs(0)), "sparse_categorical_crossentropy"
        trainer = mirror.Trainer(net, optax.adam(0.1), loss, require_equal=False, **options)
    trainer.fit((X[:12], Y[:12]), batch_size=4, progress=False)
    return trainer


def load(file) -> jax.export.Exported:
    return jax.export.deserialize(bytearray(file.read_bytes()))


def test_program_computes_what_predict_does(tmp_path, subtests):
    trainer = trained()
    expected = trainer.predict(X, batch_size=4)
    with subtests.test(msg="any number of rows, also in a scope"):
        with trainer.strategy.scope():
            trainer.export(tmp_path / "new" / "model.jax", X[:1])
        program = load(tmp_path / "new" / "model.jax")
        assert (program.nr_devices, program.platforms) == (1, ("cpu", "cuda"))
        for rows in (1, 13):
            np.testing.assert_allclose(program.call(X[:rows]), expected[:rows], **SMALL)
    with subtests.test(msg="a later export replaces the file"):
        trainer.export(str(tmp_path / "new" / "model.jax"), (X, Y), batch_size=5, platforms=["cpu"])
        program = load(tmp_path / "new" / "model.jax")
        np.testing.assert_allclose(program.call((X[:5], Y[:5])), expected[:5], **SMALL)
        with pytest.raises(ValueError, match="5"):
            program.call((X, Y))
    with subtests.test(msg="a function"):
        trainer.export(
            tmp_path / "f.jax", {"x": X}, lambda model, batch: jnp.sin(model(batch["x"]))
        )
        found = load(tmp_path / "f.jax").call({"x": X})
        np.testing.assert_allclose(found, np.sin(expected), **SMALL)
    with subtests.test(msg="the trainer goes on"):
        trainer.fit((X[:12], Y[:12]), epochs=2, batch_size=4, progress=False)
    assert sorted(path.name for path in tmp_path.rglob("*.*")) == ["f.jax", "model.jax"]


def test_precision_is_that_of_predict(tmp_path):
    trainer = trained(precision="bfloat16")
    trainer.export(tmp_path / "model.jax", X[:1])
    found = load(tmp_path / "model.jax").call(X)
    assert found.dtype == jnp.bfloat16
    expected = trainer.predict(X, batch_size=4)
    np.testing.assert_allclose(found.astype("float32"), expected.astype("float32"), rtol=0.03)


LOADS = """
import pathlib, sys
import jax, numpy as np

folder = pathlib.Path(sys.argv[1])
program = jax.export.deserialize(bytearray((folder / "model.jax").read_bytes()))
np.save(folder / "found.npy", program.call(np.load(folder / "x.npy")))
assert not {"mirror", "flax", "optax"} & sys.modules.keys()
"""


@pytest.mark.slow
def test_a_process_without_mirror_loads_it(tmp_path):
    trainer = trained()
    trainer.export(tmp_path / "model.jax", X[:1])
    np.save(tmp_path / "x.npy", X)
    fresh.run(f"import sys; sys.argv = ['', {str(tmp_path)!r}]\n{LOADS}")
    expected = trainer.predict(X, batch_size=4)
    np.testing.assert_allclose(np.load(tmp_path / "found.npy"), expected, **SMALL)


def prints(model, batch):
    jax.debug.print("{}", batch.sum())
    return model(batch)


def calls(model, batch):
    shape = jax.ShapeDtypeStruct((), "float32")
    return model(batch) + jax.lax.cond(
        batch.sum() > 0, lambda: jax.pure_callback(lambda: np.float32(1), shape), lambda: 0.0
    )


LINES = {fn: fn.__code__.co_firstlineno + offset for fn, offset in ((prints, 1), (calls, 3))}


def branches(model, batch):
    return model(batch) if len(batch) > 3 else batch


def test_what_cannot_be_exported_is_an_error(tmp_path, subtests):
    trainer, path = trained(), tmp_path / "model.jax"
    path.write_bytes(b"before")
    for fn in (prints, calls):
        with subtests.test(msg=fn.__name__):
            fix = ["trainer.export", f"test_export.py:{LINES[fn]}"]
            with raises(ValueError, names=fn.__name__, fix=fix):
                trainer.export(path, X, fn)
    with subtests.test(msg="a number of rows that must be known"):
        with pytest.raises(Exception, match="batch") as caught:
            trainer.export(path, X, branches)
        assert "batch_size=N" in "".join(caught.value.__notes__)
        assert path.read_bytes() == b"before"
        trainer.export(path, X, branches, batch_size=3)
        np.testing.assert_array_equal(load(path).call(X[:3]), X[:3])
    with (
        subtests.test(msg="a package that is not installed"),
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setitem(__import__("sys").modules, "flatbuffers", None)
        with raises(ModuleNotFoundError, names="flatbuffers", fix="pip install"):
            trainer.export(path, X)
    with subtests.test(msg="inputs that only the loss knows"):
        arguments = Net(nnx.Rngs(0)), optax.sgd(0.1), lambda net, batch: net(batch["x"])
        of_function = mirror.Trainer(*arguments, strategy=trainer.strategy)
        with raises(ValueError, names="trainer.export", fix="model(batch['x'])"):
            of_function.export(path, {"x": X, "y": Y})
    with subtests.test(msg="a path of an unknown store, before the program is traced"):
        traced = []
        with raises(ValueError, names="path", values="'ftp://host/model.jax'"):
            trainer.export("ftp://host/model.jax", X, lambda net, x: traced.append(x) or net(x))
        assert not traced
    for platforms in ("cpu", ["cpu", "rocket"]):
        with (
            subtests.test(msg=f"{platforms}"),
            raises(ValueError, names="platforms", values=platforms),
        ):
            trainer.export(path, X, platforms=platforms)


# ONNX

ONNX = [pytest.mark.slow, pytest.mark.dev("jax2onnx", "onnxruntime")]
ONNX += [pytest.mark.filterwarnings("ignore")]  # of jax2onnx


def onnx(test):
    for mark in ONNX:
        test = mark(test)
    return test


class Images(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.conv = nnx.Conv(1, 4, (3, 3), rngs=rngs)
        self.out = nnx.Linear(4 * 3 * 3, 3, rngs=rngs)

    def __call__(self, x):
        x = nnx.max_pool(jax.nn.relu(self.conv(x)), window_shape=(2, 2), strides=(2, 2))
        return self.out(x.reshape(x.shape[0], -1))


def run_onnx(file, *arrays) -> list[np.ndarray]:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(str(file), options)
    names = [each.name for each in session.get_inputs()]
    return session.run(None, dict(zip(names, arrays, strict=True)))


LOADS_ONNX = """
import sys
import numpy as np, onnxruntime
session = onnxruntime.InferenceSession("{folder}/model.onnx")
(found,) = session.run(None, {{"input": np.load("{folder}/images.npy")}})
np.save("{folder}/found.npy", found)
assert not {{"mirror", "jax"}} & sys.modules.keys()
"""


@onnx
def test_onnx_computes_what_predict_does(tmp_path, subtests):
    trainer = trained()
    expected = trainer.predict(X, batch_size=4)
    functions = dict(vars(jnp))
    with subtests.test(msg="any number of rows"):
        trainer.export(tmp_path / "model.onnx", X[:2])
        assert [name for name in functions if vars(jnp)[name] is not functions[name]] == []
        for rows in (1, 13):
            (found,) = run_onnx(tmp_path / "model.onnx", X[:rows])
            np.testing.assert_allclose(found, expected[:rows], **SMALL)
    with subtests.test(msg="labels do not count, and the number of rows is fixed"):
        trainer.export(str(tmp_path / "model.onnx"), (X, Y), batch_size=5)
        (found,) = run_onnx(tmp_path / "model.onnx", X[:5], Y[:5])
        np.testing.assert_allclose(found, expected[:5], **SMALL)
    with subtests.test(msg="several inputs and outputs"):

        def fn(model, batch):
            return {"sum": batch["a"] + batch["b"], "logits": model(batch["a"])}

        trainer.export(tmp_path / "several.onnx", {"a": X, "b": X}, fn)
        logits, total = run_onnx(tmp_path / "several.onnx", X, X)
        np.testing.assert_allclose(logits, expected, **SMALL)
        np.testing.assert_allclose(total, 2 * X, **SMALL)
    with subtests.test(msg="images"):
        images = np.random.RandomState(0).randn(4, 6, 6, 1).astype("float32")
        with mirror.MirroredStrategy(["/cpu:0", "/cpu:1"]).scope():
            loss = "sparse_categorical_crossentropy"
            trainer = mirror.Trainer(
                Images(nnx.Rngs(0)), optax.adam(0.1), loss, require_equal=False
            )
        trainer.export(tmp_path / "images.ONNX", images)
        (found,) = run_onnx(tmp_path / "images.ONNX", images)
        np.testing.assert_allclose(found, trainer.predict(images, batch_size=4), **SMALL)
    with subtests.test(msg="a process without mirror and JAX"):
        trainer.export(tmp_path / "model.onnx", images)
        np.save(tmp_path / "images.npy", images)
        fresh.run(LOADS_ONNX.format(folder=tmp_path))
        found = np.load(tmp_path / "found.npy")
        np.testing.assert_allclose(found, trainer.predict(images, batch_size=4), **SMALL)


@onnx
def test_what_onnx_cannot_compute_is_an_error(tmp_path, subtests, monkeypatch):
    trainer, path = trained(), tmp_path / "model.onnx"
    path.write_bytes(b"before")

    def eigenvalues(model, batch):
        return jnp.linalg.eigvalsh(batch[:, :, None] * batch[:, None, :])

    with (
        subtests.test(msg="an operation"),
        raises(ValueError, names="eigenvalues", fix="model.jax"),
    ):
        trainer.export(path, X, eigenvalues)
    with subtests.test(msg="a callback"), raises(ValueError, names="prints"):
        trainer.export(path, X, prints)
    with subtests.test(msg="other numbers"), monkeypatch.context() as patch:
        import onnxruntime

        class Wrong(onnxruntime.InferenceSession):
            def run(self, *arguments):
                return [2 * x for x in super().run(*arguments)]

        patch.setattr(onnxruntime, "InferenceSession", Wrong)
        with raises(ValueError, values="Not equal to tolerance", fix="model.jax"):
            trainer.export(path, X)
    with subtests.test(msg="platforms"), raises(ValueError, names="`platforms`"):
        trainer.export(path, X, platforms=["cpu"])
    assert path.read_bytes() == b"before"


def test_onnx_names_its_packages(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "jax2onnx", None)
    with raises(ModuleNotFoundError, names="jax2onnx", fix='pip install ".[onnx]"'):
        trained().export(tmp_path / "model.onnx", X)
