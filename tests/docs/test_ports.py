"""Programs that the pages port: few lines change, the results are the same, the names exist."""

import difflib
import re
from typing import NamedTuple

import numpy as np
import optax
from flax import nnx

import mirror
from tests.support.pages import PAGES

_FENCED = re.compile(r"^```python[^\n]*\n(.*?)^```$", re.DOTALL | re.M)


class Port(NamedTuple):
    """Two programs of a page: words that only the first and only the second has, and changes."""

    page: str
    before: str
    after: str
    most_changes: int


PORTS = {
    "pmap": Port("docs/from-jax.md", "jax.pmap, axis_name", "strategy.run(train_step", 5),
    "keras": Port("docs/from-tensorflow.md", "keras.layers.Dense(128", "nnx.Linear(64, 128", 6),
}


def programs(port: Port) -> tuple[str, str]:
    """Returns the code before and after."""
    code = _FENCED.findall(PAGES[port.page])
    (before,) = (block for block in code if port.before in block)
    (after,) = (block for block in code if port.after in block)
    return before, after


def changed_lines(before: str, after: str) -> list[str]:
    """Returns the lines of the second program that are not in the first."""
    diff = difflib.ndiff(before.splitlines(), after.splitlines())
    return [line[2:] for line in diff if line.startswith("+ ") and line[2:].strip()]


def test_port_changes_few_lines(subtests):
    for name in PORTS:
        with subtests.test(msg=name):
            changed = changed_lines(*programs(PORTS[name]))
            assert 0 < len(changed) <= PORTS[name].most_changes, "\n".join(changed)


def test_pmap_program_and_its_port_have_the_same_losses():
    results = []
    for program in programs(PORTS["pmap"]):
        names = {"__name__": "__main__"}
        exec(compile(program, "docs/from-jax.md", "exec"), names)
        results.append(names)
    before, after = results
    assert len(before["losses"]) == 10
    np.testing.assert_allclose(after["losses"], before["losses"], rtol=1e-6)
    unreplicated = before["jax_utils"].unreplicate(before["state"])
    np.testing.assert_allclose(after["state"][0], unreplicated[0], rtol=1e-6)
    assert after["strategy"].num_replicas_in_sync == 8


def names_in_column(header: str) -> list[str]:
    """Returns the strings in the second column of a table of the TensorFlow page."""
    table = PAGES["docs/from-tensorflow.md"].split(header)[1].split("\n\n")[0]
    cells = (row.split(" | ")[1] for row in table.splitlines() if row.startswith("| `"))
    return [name for cell in cells for name in re.findall(r'`"(\w+)"`', cell)]


def test_trainer_has_the_losses_of_the_page(subtests):
    for loss in names_in_column("| `keras.losses.` |"):
        with subtests.test(msg=loss):
            assert mirror.Trainer(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), optax.sgd(0.1), loss)


def test_trainer_has_the_metrics_of_the_page(subtests):
    for metric in sorted(set(names_in_column("| `keras.metrics.` |"))):
        with subtests.test(msg=metric):
            loss = "mean_squared_error" if "mean" in metric else "sparse_categorical_crossentropy"
            arguments = nnx.Linear(2, 2, rngs=nnx.Rngs(0)), optax.sgd(0.1), loss
            assert mirror.Trainer(*arguments, metrics=[metric])
