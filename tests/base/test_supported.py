"""The versions of JAX: the warning at the first strategy, and the texts that state the range."""

import re
import warnings

import jax
import pytest

import mirror
from tests.support import fresh, inside
from tests.support.messages import assert_message

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


def test_first_strategy_warns_about_untried_versions(subtests):
    for version, wanted in VERSIONS.items():
        with subtests.test(msg=version):
            caught = warnings_of(version)
            assert len(caught) == (0 if wanted is None else 1)
            for warning in caught:
                assert warning.category is UserWarning
                assert_message(str(warning.message), **wanted)
                assert warning.filename == __file__, "it shows the user's line"


def warnings_of(version: str) -> list[warnings.WarningMessage]:
    """Returns the warnings about a version of JAX, if two strategies are created."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        patch.setattr(jax, "__version__", version)
        inside.forget_version_warning()
        mirror.MirroredStrategy(jax.devices()[:1])
        mirror.MirroredStrategy(jax.devices()[:2])
    inside.forget_version_warning()
    return caught


@pytest.mark.slow
def test_import_does_not_warn():
    code = "import jax; jax.__version__ = '9.0'; import mirror"
    assert fresh.run(code) == ""


def test_readme_states_the_range():
    (warning,) = warnings_of("0.9")
    least, beyond = re.findall(r"jax>=([\d.]+),<([\d.]+)", str(warning.message))[0]
    major, minor = map(int, beyond.split("."))
    text = " ".join((fresh.ROOT / "README.md").read_text().split())
    assert f"JAX {least} to {major}.{minor - 1}" in text
