"""The versions of JAX: the warning at the first strategy, and the texts that state the range."""

import warnings

import pytest

from mirror._src.utils import supported
from tests.support import fresh
from tests.support.messages import assert_message
from tests.support.strategies import cpu_strategy

VERSIONS = {  # a version of JAX, and what the message must contain
    "0.10.2": None,
    "0.12.0": None,
    "0.12.0.1": None,
    "0.12.9": None,
    "0.13.0": {"values": ["0.13.0", "0.10.2"], "fix": ["mirror doctor", 'pip install "jax<0.13"']},
    "0.13.0.dev20261101": {"values": "0.13.0.dev20261101", "fix": 'pip install "jax<0.13"'},
    "1.0": {"values": "1.0", "fix": 'pip install "jax<0.13"'},
    "0.10.1": {"values": ["0.10.1", "0.10.2"], "fix": 'pip install "jax>=0.10.2,<0.13"'},
    "0.9": {"values": ["0.9", "0.10.2"], "fix": 'pip install "jax>=0.10.2,<0.13"'},
}


@pytest.fixture
def first_strategy():
    """Makes the next strategy the first one of the process."""
    supported.warn_about_jax.cache_clear()
    yield
    supported.warn_about_jax.cache_clear()


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.usefixtures("first_strategy")
def test_first_strategy_warns_about_untried_versions(version, monkeypatch):
    monkeypatch.setattr(supported.jax, "__version__", version)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        cpu_strategy(1)
        cpu_strategy(2)
    wanted = VERSIONS[version]
    assert len(caught) == (0 if wanted is None else 1)
    for warning in caught:
        assert warning.category is UserWarning
        assert_message(str(warning.message), **wanted)
        assert "/mirror/" not in warning.filename, "it shows the user's line"


def test_import_does_not_warn():
    code = "import jax; jax.__version__ = '9.0'; import mirror"
    assert fresh.run(code) == ""


def test_readme_states_the_range():
    major, minor = map(int, str(supported.JAX.beyond).split("."))
    newest = f"{major}.{minor - 1}"
    text = " ".join((fresh.ROOT / "README.md").read_text().split())
    assert f"JAX {supported.JAX.least} to {newest}" in text
