"""The lowest versions come from `pyproject.toml`, and every dependency has one."""

import pytest

from tests.support import lowest_versions
from tests.support.messages import raises


def test_each_dependency_has_a_pin():
    pins = lowest_versions.lowest_versions()
    names = [pin.partition("==")[0] for pin in pins]
    assert {"jax", "flax", "numpy", "orbax-checkpoint"} <= set(names)
    assert all(pin.partition("==")[2][0].isdigit() for pin in pins)


@pytest.mark.parametrize("dependency", ["numpy", "numpy<3", "numpy==2.1"])
def test_a_dependency_without_a_lowest_version_is_an_error(tmp_path, monkeypatch, dependency):
    file = tmp_path / "pyproject.toml"
    file.write_text(f"[project]\ndependencies = ['{dependency}']\n")
    monkeypatch.setattr(lowest_versions, "PYPROJECT", file)
    with raises(ValueError, names=repr(dependency), fix="numpy>="):
        lowest_versions.lowest_versions()
