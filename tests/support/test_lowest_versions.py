"""The lowest versions come from `pyproject.toml`, and every dependency has one."""

import pytest

from tests.support import lowest_versions
from tests.support.messages import raises


def test_each_dependency_has_a_pin():
    pins = lowest_versions.lowest_versions()
    names = [pin.partition("==")[0] for pin in pins]
    assert {"jax", "flax", "numpy", "chex"} <= set(names)
    assert all(pin.partition("==")[2][0].isdigit() for pin in pins)


def test_a_dependency_without_a_lowest_version_is_an_error(subtests, tmp_path_factory):
    for dependency in ["numpy", "numpy<3", "numpy==2.1"]:
        with subtests.test(msg=dependency), pytest.MonkeyPatch.context() as monkeypatch:
            tmp_path = tmp_path_factory.mktemp("row")
            file = tmp_path / "pyproject.toml"
            file.write_text(f"[project]\ndependencies = ['{dependency}']\n")
            monkeypatch.setattr(lowest_versions, "PYPROJECT", file)
            with raises(ValueError, names=repr(dependency), fix="numpy>="):
                lowest_versions.lowest_versions()
