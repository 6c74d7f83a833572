"""Tests that hang, which `tests/tools/test_plugin.py` copies and runs."""

import ctypes
import time

import pytest


@pytest.mark.mirror(timeout=1)
def test_marked():
    print("printed before")
    time.sleep(60)


def test_of_the_option():
    time.sleep(60)


@pytest.mark.mirror(timeout=1)
def test_keeps_the_lock_of_the_interpreter():
    ctypes.PyDLL(None).sleep(60)


@pytest.mark.mirror(timeout=0)
def test_may_take_long():
    time.sleep(2.5)


def test_is_debugged(pytestconfig):
    pytestconfig.hook.pytest_enter_pdb(config=pytestconfig, pdb=None)
    time.sleep(2.5)
