"""Adds the long description to the metadata of pyproject.toml.

It is README.md for a place without the files of the repository, such as a package index.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent
_LINK = re.compile(r"(!?)\[([^\]]*)\]\((?![a-z]+:)([^)\s]+)\)")


def long_description(readme: str, repository: str | None) -> str:
    """Returns the text of README.md with absolute links, or without links.

    Args:
        readme: The text, whose links are relative to the root of the repository.
        repository: Public address of the repository. Without it, a link becomes its text, and a
            picture is omitted.
    """

    def link(match: re.Match[str]) -> str:
        picture, text, target = match.groups()
        if repository is None:
            return "" if picture else text
        view = "raw" if picture else "blob"
        file = f"README.md{target}" if target.startswith("#") else target
        return f"{picture}[{text}]({repository.rstrip('/')}/{view}/main/{file})"

    return _LINK.sub(link, readme)


def require_python(version: tuple[int, ...]) -> None:
    """Ends the installation with one sentence on an old Python: pip would name a dependency."""
    if version < (3, 11):
        found = ".".join(map(str, version))
        sys.exit(f"mirror-jax needs Python 3.11 or newer, but this is Python {found}.")


if __name__ == "__main__":
    require_python(sys.version_info[:2])
    import tomllib

    from setuptools import setup  # Python 3.12 and later do not bring it for the tests

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    setup(
        long_description=long_description(readme, project.get("urls", {}).get("Repository")),
        long_description_content_type="text/markdown",
    )
