"""The code of the documentation runs: README.md, docs/ and the examples of docstrings."""

import doctest
import functools
import importlib
import os
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
from tests.support.packages import imported, optional, rows
from tests.support.pages import FLAGS, PAGES, WITH_CODE, blocks, check_as_program, program

optional("keras")  # sets environment variables

_FENCE = re.compile(r"^```python.*$", re.M)
NAMES = {"mirror": mirror, "jax": jax, "jnp": jnp, "np": np, "nnx": nnx, "optax": optax}


def packages_of(name):
    return imported("\n".join(block.code for block in blocks(PAGES[name])))


# Pages that compile a lot; all other pages take some seconds together. Those of the README run as
# printed.
NIGHTLY = ["README.md", *(f"docs/{name}.md" for name in ("start", "steps", "keras"))]
NIGHTLY += [f"docs/training{suffix}.md" for suffix in ("", "-howto", "-reference")]
NIGHTLY += [f"docs/{name}.md" for name in ("one-to-eight", "fine-tuning", "after-training")]
NIGHTLY += [f"docs/from-{name}.md" for name in ("jax", "pytorch", "tensorflow")]


def pages(mark=None, marked=()):
    """The parameter `name`: each page, some of them with one more mark."""
    every = [
        pytest.param(*row.values, marks=[*row.marks, *[mark] * (row.id in marked)], id=row.id)
        for row in rows(WITH_CODE, packages_of)
    ]
    return pytest.mark.parametrize("name", every)


@pages(pytest.mark.nightly, [name for name in WITH_CODE if name != "README.md"])
@pytest.mark.slow
def test_page_runs_as_printed(name, tmp_path):
    """In a new process in which no devices are configured, as after `python page.py`."""
    check_as_program(name, tmp_path, {"JAX_PLATFORMS": "cpu"})


@pytest.mark.gpu
@pages()
def test_page_runs_on_gpus(name, tmp_path):
    """Numbers may differ from the page's: GPUs round the operands of products to TF32."""
    visible = {k: v for k, v in os.environ.items() if k == "CUDA_VISIBLE_DEVICES"}
    check_as_program(name, tmp_path, {"JAX_PLATFORMS": "cuda,cpu", **visible}, on_gpus=True)


@pages(pytest.mark.nightly, NIGHTLY)
def test_page_runs_where_there_are_more_devices(name, tmp_path, monkeypatch, capsys):
    """On the eight host devices of this process, which the page did not create."""
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "__main__"}
    for block in blocks(PAGES[name]):
        lines = "\n" * block.line + block.code  # so that a traceback names the page's line
        exec(compile(lines, name, "exec"), names)
        block.check(name, *capsys.readouterr())


def test_program_of_a_page_keeps_its_lines():
    text = "# Title\n\n```python\nx = 1\n```\n\n```python no-run\ny\n```\n\n```python\nz = 2\n```\n"
    lines = program(text).splitlines()
    assert (lines[3], lines[11]) == ("x = 1", "z = 2")
    assert [line for i, line in enumerate(lines) if line and i not in (3, 4, 11, 12)] == []


def test_output_and_progress_of_a_block_are_compared():
    text = "```text stderr\nepoch 1/2: ...\n```\n```text\ndone\n```\n"
    (block,) = blocks(f"```python\nx = 1\n```\n{text}")
    right = ("done\n", "a warning\nepoch 1/2: loss 3\n")
    block.check("page.md", *right)
    (varies,) = blocks("```python\nx\n```\n```text numbers-vary\n-1.5 3e-08 s\n```\n")
    varies.check("page.md", "2 0.0e+00 s\n", "")
    for wrong in [("", right[1]), (right[0], "stopped\n"), (right[0], "")]:
        with pytest.raises(AssertionError, match=r"page\.md:1"):
            block.check("page.md", *wrong)


def test_python_blocks_are_marked_as_run_or_not(subtests):
    for name in PAGES:
        with subtests.test(msg=name):
            for fence in _FENCE.findall(PAGES[name]):
                assert fence in ("```python", "```python no-run"), f"{name}: {fence}"
            assert PAGES[name].count("```python\n") == len(blocks(PAGES[name]))


# Their examples need a cluster of Ray; `tests/ps` tests them.
ON_RAY = [
    f"mirror.ps.{name}"
    for name in ("ClusterCoordinator", "ParameterServerStrategy", "PerWorkerDataset", "RemoteValue")
]


@functools.cache
def training() -> dict[str, Any]:
    """The `trainer` and the `data` of the examples of callbacks and the like."""

    def loss_fn(model, batch):
        return optax.squared_error(model(batch["x"]), batch["y"])[:, 0]

    arrays = {"x": np.ones((5, 2), "float32"), "y": np.ones((5, 1), "float32")}
    with mirror.MirroredStrategy(["/cpu:0", "/cpu:1"]).scope():
        trainer = mirror.Trainer(nnx.Linear(2, 1, rngs=nnx.Rngs(0)), optax.sgd(0.1), loss_fn)
    return {"trainer": trainer, "data": mirror.data.from_arrays(arrays, batch_size=2)}


def test_docstring_examples_run(subtests, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = [module.name for module in pkgutil.walk_packages(mirror.__path__, "mirror.")]
    modules = [  # `mirror` has the classes that name it as their module
        importlib.import_module(name)
        for name in ["mirror", *names]
        if ".demo" not in name and not name.endswith("__main__")
    ]
    finder, count = doctest.DocTestFinder(exclude_empty=True), 0
    runner = doctest.DocTestRunner(optionflags=FLAGS)
    for module in modules:
        for test in finder.find(module, extraglobs=NAMES | training()):
            if test.examples and test.name not in ON_RAY:
                count += 1
                with subtests.test(msg=test.name):
                    said: list[str] = []
                    assert runner.run(test, out=said.append).failed == 0, "".join(said)
    assert count > 100
