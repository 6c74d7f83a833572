"""MkDocs hooks: adds pages and pictures from elsewhere in the repository to the site."""

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
PAGES = {
    "index.md": "README.md",
    "code.md": "mirror/README.md",
    "contributing.md": "CONTRIBUTING.md",
    "changes.md": "CHANGELOG.md",
    "benchmarks.md": "benchmarks/README.md",
}
_SITE = {file: page for page, file in PAGES.items()}
_LINK = re.compile(r"(?<=\]\()([^)#:]+)(?=(?:#[^)]*)?\))")


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages and pictures that are stored outside `docs/`."""
    for page, file in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / file).read_text()))
    for picture in ROOT.glob("benchmarks/runs/*.png"):
        path = picture.relative_to(ROOT).as_posix()
        files.append(File.generated(config, path, abs_src_path=str(picture)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrites links between files of the repository as links between pages of the site."""
    here = page.file.src_uri
    folder = posixpath.dirname(PAGES.get(here, f"docs/{here}"))

    def link(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, match[1]))
        site_path = _SITE.get(target, target.removeprefix("docs/"))
        return posixpath.relpath(site_path, posixpath.dirname(here) or ".")

    return _LINK.sub(link, markdown).replace("```python no-run", "```python")
