"""`trainer.export`: a program with its weights that computes what `predict` computes."""

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
        trainer = mirror.Trainer(net, optax.adam(0.1), loss, **options)
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
