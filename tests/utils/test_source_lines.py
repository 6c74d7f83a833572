"""Which files are the user's: never decided by the names of folders."""

import importlib
import os
import sys

import jax

import mirror
from mirror._src.utils import source_lines

OWN = os.path.dirname(mirror.__file__)
LIBRARY = os.path.dirname(os.__file__)
USERS = (
    "/home/ann/mirror/train.py",
    "/home/ann/mirror/mirror/_src/train.py",
    "/home/ann/site-packages/train.py",
    "/opt/jax/train.py",
    f"{OWN}_project/train.py",
    f"{LIBRARY}/site-packages/other/train.py",
    "/opt/site-packages/python/lib/site-packages/other/train.py",
    "<stdin>",
)
OTHERS = (
    f"{OWN}/_src/anything.py",
    jax.__file__,
    f"{LIBRARY}/functools.py",
    "<frozen runpy>",
)


def test_files_of_users(subtests, monkeypatch):
    for filename in USERS:
        with subtests.test(msg=filename):
            assert source_lines.is_users(filename)
    for filename in OTHERS:
        with subtests.test(msg=filename):
            assert not source_lines.is_users(filename)
    # An interpreter may itself be in such a folder: pip installs Python as a package.
    library = "/opt/site-packages/python/lib/"
    directories = (library, *source_lines._directories()[1:])
    monkeypatch.setattr(source_lines, "_directories", lambda: directories)
    assert source_lines.is_standard(f"{library}functools.py")
    assert not source_lines.is_standard(f"{library}site-packages/other/train.py")


def test_module_of_a_folder_named_mirror_is_the_users(tmp_path, monkeypatch):
    folder = tmp_path / "mirror"
    folder.mkdir()
    (folder / "my_helper.py").write_text(
        "from mirror._src.utils.source_lines import line_of_user\n\n"
        "def here():\n    return line_of_user()\n"
    )
    monkeypatch.syspath_prepend(str(folder))
    helper = importlib.import_module("my_helper")
    try:
        assert helper.here() == "my_helper.py:4: return line_of_user()"
    finally:
        del sys.modules["my_helper"]
