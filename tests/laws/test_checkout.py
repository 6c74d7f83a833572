"""A checkout works in any folder, environment and account: a part of the suite runs in each."""

import ast
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import mirror
from tests.support import fresh

# Files that are fast and depend on paths, temporary files, encodings, signals or messages.
PART = (
    "tests/laws/test_checkout.py",
    "tests/base",
    "tests/support/test_messages.py",
    "tests/tools/test_report.py",
    "tests/tools/test_bench.py",
    "tests/docs/test_packaging.py",
)
OTHER_USER = 54321  # without an entry in /etc/passwd
SECS = 280


def test_tests_import_this_checkout():
    assert Path(mirror.__file__).resolve() == fresh.ROOT / "mirror" / "__init__.py"


def test_signals_have_handlers():
    """Also under `nohup` and in the background of a script, which ignore them."""
    for number in (signal.SIGHUP, signal.SIGINT):
        assert signal.getsignal(number) is not signal.SIG_IGN


def test_standard_input_exists():
    """Also if it was closed."""
    assert sys.stdin.encoding


def test_fork_server_starts():
    """Also if the path of TMPDIR is too long for a socket."""
    from tests.support.checkpoints import START

    process = START.Process(target=os.getpid)
    process.start()
    process.join(SECS)
    assert process.exitcode == 0


# Static: text files of the package do not depend on the locale

_TEXT = {"read_text": 0, "write_text": 1}  # the position of `encoding`
_OTHER_OPENS = {"os", "self"}


def _needs_encoding(call: ast.Call) -> bool:
    """Whether a call reads or writes text without an encoding."""
    fn = call.func
    name = fn.attr if isinstance(fn, ast.Attribute) else getattr(fn, "id", "")
    keywords = {keyword.arg for keyword in call.keywords}
    if "encoding" in keywords:
        return False
    if name in _TEXT:
        return len(call.args) <= _TEXT[name]
    if name == "open":
        is_method = isinstance(fn, ast.Attribute)
        if is_method and getattr(fn.value, "id", "") in _OTHER_OPENS:
            return False
        modes = call.args[0 if is_method else 1 :]
        return not (modes and isinstance(modes[0], ast.Constant) and "b" in str(modes[0].value))
    return "text" in keywords and name in ("run", "Popen", "check_output")


def _calls_without_encoding() -> list[str]:
    files = [fresh.ROOT / "setup.py", fresh.ROOT / "docs" / "build.py"]
    files += (fresh.ROOT / "mirror").rglob("*.py")
    return [
        f"{file.relative_to(fresh.ROOT)}:{node.lineno}"
        for file in files
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and _needs_encoding(node)
    ]


def test_text_files_have_an_encoding():
    assert _calls_without_encoding() == []


# Copies of the checkout


class Environment(NamedTuple):
    """Where and how a part of the suite runs."""

    checkout: Path
    command: list[str]
    variables: dict[str, str | None]


def _copy(target: Path) -> Path:
    """Copies the checkout without asking git, which a source distribution does not have."""
    junk = shutil.ignore_patterns(".git", ".venv*", ".*_cache", ".hypothesis", "*.egg-info")
    shutil.copytree(fresh.ROOT, target, ignore=junk, ignore_dangling_symlinks=True)
    return target


def _in_a_folder_named_mirror(folder: Path) -> Environment:
    """With the locale C, a HOME in which nothing can be created, and no standard input."""
    (folder / "file").touch()
    variables: dict[str, str | None] = {"LC_ALL": "C", "LANG": "C", "HOME": f"{folder}/file/home"}
    return Environment(_copy(folder / "mirror"), ["sh", "-c", 'exec "$@" <&-', "sh"], variables)


def _in_a_linked_folder(folder: Path) -> Environment:
    """With spaces in the path, temporary files in a long path, and SIGHUP ignored."""
    _copy(folder / "of a user" / "src")
    link = folder / "a link"
    link.symlink_to(folder / "of a user" / "src")
    temporary = folder / ("temporary" * 12)
    temporary.mkdir()
    return Environment(link, ["nohup"], {"TMPDIR": str(temporary), "PWD": str(link)})


def _as_another_user(folder: Path) -> Environment:
    """Without HOME and without an entry in the list of users."""
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    if shutil.which("setpriv") is None:
        pytest.skip("needs setpriv, of util-linux")
    # This Python may be in root's home, so the user may read everything.
    may_read = "+dac_read_search"
    command = ["setpriv", f"--reuid={OTHER_USER}", f"--regid={OTHER_USER}", "--clear-groups"]
    command += [f"--inh-caps={may_read}", f"--ambient-caps={may_read}"]
    tried = subprocess.run([*command, sys.executable, "-c", "import jax"], check=False)
    if tried.returncode:
        pytest.skip("another user cannot run this Python")
    checkout, temporary = _copy(folder / "src"), folder / "temporary"
    temporary.mkdir()
    for path in (checkout, temporary, *checkout.rglob("*")):
        os.chown(path, OTHER_USER, OTHER_USER)
    unset = dict.fromkeys(("HOME", "USER", "LOGNAME"))
    return Environment(checkout, command, {"TMPDIR": str(temporary), **unset})


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that other users can enter, unlike pytest's."""
    with tempfile.TemporaryDirectory(prefix="checkout-", dir="/tmp") as name:
        os.chmod(name, 0o755)
        yield Path(name)


ENVIRONMENTS = [
    _in_a_folder_named_mirror,
    *(
        pytest.param(enter, marks=pytest.mark.nightly)
        for enter in (_in_a_linked_folder, _as_another_user)
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize("enter", ENVIRONMENTS, ids=lambda enter: enter.__name__.strip("_"))
def test_checkout_works_anywhere(enter: Callable[[Path], Environment], folder):
    environment = enter(folder)
    variables = {**fresh.INHERITED, **environment.variables}
    # A copy makes its own: an account that reads root's cache cannot write to it.
    for name in ("PYTEST_ADDOPTS", "JAX_COMPILATION_CACHE_DIR", "MPLCONFIGDIR"):
        variables.pop(name, None)
    done = subprocess.run(
        [*environment.command, sys.executable, "-m", "pytest", "-n", "0", "-q", *PART],
        cwd=environment.checkout,
        env={name: value for name, value in variables.items() if value is not None},
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=SECS,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
