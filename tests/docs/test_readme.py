"""The first screen of README.md: its code runs, its pictures show what the package does."""

import re
import xml.etree.ElementTree as ET

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import mirror
from benchmarks import plan
from benchmarks.record import Record
from benchmarks.report import best_by_hand, by_model
from benchmarks.stats import ratio
from tests.support import fresh
from tests.support.pages import PAGES

README = PAGES["README.md"]
PICTURE = fresh.ROOT / "docs" / "first_screen.svg"
ALL_REDUCE = '    loss, grads = mirror.all_reduce("mean", (loss, grads))\n'


class Net(nnx.Module):
    def __init__(self, rngs):
        self.hidden = nnx.Linear(8, 16, rngs=rngs)
        self.out = nnx.Linear(16, 3, rngs=rngs)

    def __call__(self, x):
        return self.out(jax.nn.relu(self.hidden(x)))


def create():
    model = Net(nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)


def loss_fn(model, batch):
    logits = model(batch["x"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()


def data():
    x = np.random.RandomState(0).randn(24, 8).astype("float32")
    return mirror.data.from_arrays({"x": x, "y": np.argmax(x[:, :3], axis=1)}, batch_size=8)


def side(sign: str) -> str:
    """The program before (`-`) or after (`+`) the change that the README shows."""
    (diff,) = re.findall(r"^```diff\n(.*?)^```", README, re.DOTALL | re.M)
    return "".join(line[1:] for line in diff.splitlines(True) if line[0] in (sign, " ", "\n"))


def run(program: str) -> dict:
    names = {"mirror": mirror, "nnx": nnx, "create": create, "loss_fn": loss_fn, "data": data()}
    exec(program, names)
    return names


def test_change_keeps_the_training():
    before, after = run(side("-")), run(side("+"))
    assert after["strategy"].num_replicas_in_sync > 1
    np.testing.assert_allclose(after["loss"], before["loss"], rtol=1e-5)
    after["strategy"].check_mirrored(after["model"])


def test_picture_shows_the_change_and_the_error():
    texts = [element.text or "" for element in ET.parse(PICTURE).iter() if "text" in element.tag]
    shown = [text.replace("\xa0", " ") for text in texts]
    (start,) = (i for i, text in enumerate(shown) if text.startswith("def step"))
    program = side("+")
    before, after = ([row.strip() for row in text.splitlines()] for text in (side("-"), program))
    for line in shown[start : start + 7]:
        added, code = line.startswith("+"), line.removeprefix("+").strip()
        assert code in after, line
        assert added == (code not in before), line
    assert ALL_REDUCE in program
    with pytest.raises(mirror.ReplicaDivergenceError) as caught:
        run(program.replace(ALL_REDUCE, ""))
    (start,) = (i for i, text in enumerate(shown) if "Error" in text)
    first, variable, dots, *last = shown[start:]
    message = str(caught.value).splitlines()
    assert first == f"mirror.{type(caught.value).__name__}: {message[0]}"
    assert variable in message
    assert dots.strip() == "..."
    assert last == message[-2:]


def test_first_screen_says_what_it_is_and_how_to_run_it():
    screen = "\n".join(README.splitlines()[:40])
    for needed in ("](docs/first_screen.svg)", "```diff", "mirror demo", "start here", "Status"):
        assert needed in screen
    assert len(README.split()) <= 1000


def test_ratios_are_those_of_the_stored_run():
    (name,) = re.findall(r"\]\((benchmarks/runs/.*)\.png\)", README)
    record = Record.load(fresh.ROOT / f"{name}.json")
    ratios = [
        ratio(part["times"], kind, best_by_hand(part["times"], count)).median
        for _, count, part in by_model([done for done in record.done if done.job.kind == "own"])
        for kind in (plan.MIRROR_PLAIN, plan.MIRROR_NNX)
    ]
    low, high = re.findall(r"takes (\S+) to (\S+) of the time of the best", README)[0]
    assert (low, high) == (f"{min(ratios):.2f}", f"{max(ratios):.2f}")
    assert f"JAX {record.versions['jax']}" in README
