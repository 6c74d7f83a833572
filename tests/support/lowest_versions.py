"""Prints the lowest version of each direct dependency, as constraints for pip.

    python -m tests.support.lowest_versions > lowest.txt && pip install ".[test]" -c lowest.txt

`.ci/run` tests with them, because users with older environments get the versions that they have.
"""

import tomllib
from pathlib import Path

from packaging.requirements import Requirement

PYPROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"


def lowest_versions() -> list[str]:
    """Returns `numpy==2.0` for `numpy>=2.0`, for each direct dependency.

    Raises:
        ValueError: If a dependency has no lowest version.
    """
    pins = []
    for text in tomllib.loads(PYPROJECT.read_text())["project"]["dependencies"]:
        requirement = Requirement(text)
        lowest = [each.version for each in requirement.specifier if each.operator == ">="]
        if len(lowest) != 1:
            raise ValueError(
                f"{text!r} in {PYPROJECT.name} must have one lowest version. Write it as "
                f"'{requirement.name}>=1.2'."
            )
        pins.append(f"{requirement.name}=={lowest[0]}")
    return pins


if __name__ == "__main__":
    print("\n".join(lowest_versions()))
