"""The code of README.md and docs/ passes mypy and pyright in strict mode.

Functions of users need no annotations, so what these two say of missing and unknown types is off.
"""

import json
import re
import subprocess
import sys

import pytest

from tests.support import fresh
from tests.support.pages import PAGES, WITH_CODE, blocks

MYPY = [
    *("--strict", "--allow-untyped-defs", "--allow-incomplete-defs", "--allow-untyped-calls"),
    *(
        "--ignore-missing-imports",
        "--follow-imports=silent",
        "--config-file=",
        "--disable-error-code=no-redef",  # a page may have a program and its port
        "--no-error-summary",
    ),
]
OFF = [
    "reportDuplicateImport",
    "reportMissingParameterType",
    "reportMissingTypeArgument",
    "reportMissingTypeStubs",
    "reportPossiblyUnboundVariable",
    "reportRedeclaration",
    "reportUnknownArgumentType",
    "reportUnknownLambdaType",
    "reportUnknownMemberType",
    "reportUnknownParameterType",
    "reportUnknownVariableType",
    "reportUntypedFunctionDecorator",
    "reportUnusedImport",
]
FOREIGN = [  # types of other libraries that are narrower than what they accept
    r"hk\.TransformedWithState\? has no attribute",
    r'DataLoader" has incompatible type|DataLoader" in function "__init__"|parameter "dataset"',
    r'"MultiMetric" has no attribute|for class "MultiMetric"',
    r'Cannot access attribute "\w+" for class "FrozenDict',  # Linen
    r'"Literal\[0\]" cannot be assigned to parameter "verbose" of type "str"',  # Keras
    r'"tuple\[Unknown, list\[Unknown\], list\[Unknown\] \| None\] .* to target tuple',  # Keras
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with one module per page."""
    folder = tmp_path_factory.mktemp("pages")
    for page in WITH_CODE:
        name = re.sub(r"\W", "_", page.removesuffix(".md")) + ".py"
        (folder / name).write_text("\n".join(block.code for block in blocks(PAGES[page])))
    return folder


def errors_of(command: list[str]) -> list[str]:
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=fresh.ROOT, timeout=900, check=False
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr
    lines = [line for line in done.stdout.splitlines() if " error: " in line]
    assert lines or done.returncode == 0, done.stdout + done.stderr
    return [line for line in lines if not any(re.search(known, line) for known in FOREIGN)]


@pytest.mark.nightly
def test_code_of_pages_passes_mypy(folder):
    pages = sorted(map(str, folder.glob("*.py")))
    command = [sys.executable, "-m", "mypy", *MYPY, f"--cache-dir={folder / 'cache'}", *pages]
    assert errors_of(command) == []


@pytest.mark.dev("basedpyright", "torch", "datasets")
@pytest.mark.nightly
def test_code_of_pages_passes_pyright(folder):
    settings = {"typeCheckingMode": "strict", "extraPaths": [str(fresh.ROOT)]}
    settings |= dict.fromkeys(OFF, False)
    (folder / "pyrightconfig.json").write_text(json.dumps(settings))
    command = [sys.executable, "-m", "basedpyright", "-p", str(folder)]
    assert errors_of([*command, "--pythonpath", sys.executable]) == []


@pytest.mark.slow
def test_types_reject_what_the_run_would(folder):
    """The checks are not silent: each line below is a mistake."""
    (folder / "mistakes").mkdir()
    module = folder / "mistakes" / "mistakes.py"
    module.write_text(
        "import mirror\n"
        "import numpy as np; from typing import Any, Iterator, NamedTuple\n"
        "strategy = mirror.MirroredStrategy()\n"
        "mirror.all_reduce('avg', 1.0)\n"
        "class Pair(NamedTuple):\n"
        "    x: Any; y: Any\n"
        "class Loader:\n"
        "    def __iter__(self) -> Iterator[Any]: return iter([])\n"
        "strategy.distribute_dataset([np.ones(4)], remainder='padd')\n"
        "batches = strategy.distribute_dataset([{'x': np.ones(4)}], remainder='pad')\n"
        "for batch in batches:\n"
        "    batch['x']\n"
        "for part in strategy.distribute_dataset([{'x': np.ones(4)}]):\n"
        "    part['x'].values\n"  # a PerReplica, not a mistake
        "    part['x'].mean()\n"  # not an array
        "for loaded in strategy.distribute_dataset(Loader()):\n"
        "    loaded['x'].values, loaded.y.mean()\n"  # unknown, not a mistake
        "for pair in strategy.distribute_dataset([Pair(np.ones(4), np.ones(4))]):\n"
        "    pair.x.values\n"
        "for row in mirror.data.from_arrays({'x': np.ones(4)}, batch_size=2):\n"
        "    row.x\n"  # a dict
    )
    command = [sys.executable, "-m", "mypy", *MYPY, f"--cache-dir={folder / 'cache'}", str(module)]
    lines = {int(line.split(":")[1]) for line in errors_of(command)}
    assert lines == {4, 9, 12, 15, 21}
