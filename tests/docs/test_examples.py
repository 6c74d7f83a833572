"""The code of the documentation runs: README.md, docs/ and the examples of docstrings."""

import doctest
import functools
import importlib
import pkgutil
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tensorboardX  # noqa: F401  (sets CRC32C_SW_MODE)
from flax import nnx

import mirror
from tests.support.pages import PAGES, WITH_CODE, blocks

# Blocks that cannot run here, because they configure the process, need GPUs or another library.
_FENCE = re.compile(r"^```python.*$", re.M)
_FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
NAMES = {"mirror": mirror, "jax": jax, "jnp": jnp, "np": np, "nnx": nnx, "optax": optax}


@pytest.mark.parametrize("name", WITH_CODE)
def test_examples_of_a_page_run(name, tmp_path, monkeypatch, capsys):
    """Runs all blocks of a page in order, in one namespace and an empty folder."""
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "__main__"}
    for block in blocks(PAGES[name]):
        lines = "\n" * block.line + block.code  # so that a traceback names the page's line
        exec(compile(lines, name, "exec"), names)
        printed = capsys.readouterr().out
        if block.output is not None:
            fits = doctest.OutputChecker().check_output(block.output, printed, _FLAGS)
            assert fits, f"{name}:{block.line} prints\n{printed}and not\n{block.output}"


@pytest.mark.parametrize("name", PAGES)
def test_python_blocks_are_marked_as_run_or_not(name):
    for fence in _FENCE.findall(PAGES[name]):
        assert fence in ("```python", "```python no-run"), f"{name}: {fence}"
    assert PAGES[name].count("```python\n") == len(blocks(PAGES[name]))


def test_readme_has_examples():
    assert len(blocks(PAGES["README.md"])) >= 2


@functools.cache
def training() -> dict[str, Any]:
    """The `trainer` and the `data` of the examples of callbacks and the like."""

    def loss_fn(model, batch):
        return optax.squared_error(model(batch["x"]), batch["y"])[:, 0]

    arrays = {"x": np.ones((5, 2), "float32"), "y": np.ones((5, 1), "float32")}
    with mirror.MirroredStrategy(["/cpu:0", "/cpu:1"]).scope():
        trainer = mirror.Trainer(nnx.Linear(2, 1, rngs=nnx.Rngs(0)), optax.sgd(0.1), loss_fn)
    return {"trainer": trainer, "data": mirror.data.from_arrays(arrays, batch_size=2)}


@pytest.mark.parametrize(
    "name",
    [
        module.name
        for module in pkgutil.walk_packages(mirror.__path__, "mirror.")
        if ".demo" not in module.name and not module.name.endswith("__main__")
    ],
)
def test_docstring_examples_run(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    module = importlib.import_module(name)
    assert doctest.testmod(module, extraglobs=NAMES | training(), optionflags=_FLAGS).failed == 0
