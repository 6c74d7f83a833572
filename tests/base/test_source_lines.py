"""Which files are the user's: never decided by the names of folders."""

import os

import jax

import mirror
from tests.support.inside import is_users_file

OWN = os.path.dirname(mirror.__file__)
LIBRARY = os.path.dirname(os.__file__)
USERS = (
    "/home/ann/mirror/train.py",
    "/home/ann/mirror/mirror/train.py",
    "/home/ann/site-packages/train.py",
    "/opt/jax/train.py",
    f"{OWN}_project/train.py",
    f"{LIBRARY}/site-packages/other/train.py",
    "/opt/site-packages/python/lib/site-packages/other/train.py",
    "<stdin>",
)
OTHERS = (
    f"{OWN}/anything.py",
    jax.__file__,
    f"{LIBRARY}/functools.py",
    "<frozen runpy>",
)


def test_files_of_users(subtests):
    for filename in USERS:
        with subtests.test(msg=filename):
            assert is_users_file(filename)
    for filename in OTHERS:
        with subtests.test(msg=filename):
            assert not is_users_file(filename)


def test_python_below_a_folder_named_site_packages():
    """As pip installs it, as a package."""
    library = "/opt/site-packages/python/lib/"
    assert not is_users_file(f"{library}functools.py", library)
    assert is_users_file(f"{library}site-packages/other/train.py", library)
